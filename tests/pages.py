"""The command blocks of README.md and docs/*.md: how each page's are run, and the few that are not, with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Written by a tool from code.
GENERATED = frozenset({"docs/errors.md"})
PAGES = tuple(
    name
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if (name := path.relative_to(ROOT).as_posix()) not in GENERATED
)
SECTIONS_OF = "docs/coming-from.md"  # tests/process/test_coming_from.py runs it, section by section
_BLOCK = re.compile(r"^```(\w*)\n((?:.*\n)*?)```$|((?:^    .*\n(?:\n(?=    ))*)+)", re.MULTILINE)
_INSTALL = re.compile(r"^pip install .*\n", re.MULTILINE)
OUTPUT = "text"  # the language of blocks that show what the block above prints; of these, lines of any width
_MEASURED = re.compile(r"\bloss\b|\d s\b|tokens/s")  # lines whose numbers differ from machine to machine
_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced or indented block of a page."""

    text: str
    language: str = ""

    def named_in(self, names: Iterable[str]) -> str | None:
        """Return the one of these beginnings that is this block's."""
        return next((name for name in names if self.text.lstrip().startswith(name)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How a page's blocks are run, in order, in one folder.

    `needs` are what the page's reader has; `instead` replaces what the page leaves to the reader or this machine lacks.
    Blocks go by how they begin: those of `files` are saved under a name, after which a command may read them, and those
    of `codes` end with another exit code than 0.
    """

    needs: tuple[str, ...] = ("model",)
    instead: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    codes: Mapping[str, int] = field(default_factory=dict)
    trains: bool = True


_API = """\
from examples.load_stage import Stage
import reshard
rank, model, adamw = 0, Stage(reshard.open("./pp1"), "./pp1", 0).whole, None
exec(open("api.py").read().replace("./pp2", "./pp1"))
assert not any(weight.is_meta for weight in model.model.layers[0].parameters())
"""

_PUT_LIFECYCLE = """\
import boto3, json, sys
client, (bucket, rule) = boto3.client("s3", region_name="us-east-1"), sys.argv[4::2]
assert sys.argv[1:3] == ["s3api", "put-bucket-lifecycle-configuration"]
client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=json.loads(rule))
"""

RUN: Mapping[str, Run] = {
    "README.md": Run(
        needs=(),
        instead={"demo/": f"{ROOT}/demo/", "--steps 10 ": "--steps 2 --seq-len 64 --global-batch 4 "},
    ),
    "docs/check.md": Run(needs=("tiny_model",), instead={"CHECKPOINT": "./Llama-3.2-1B"}, trains=False),
    "docs/checkpoints.md": Run(needs=("model", "pp2"), instead={r"\./model": "./Llama-3.2-1B"}),
    "docs/cluster.md": Run(
        needs=("model", "last_run", "cluster"),
        instead={
            "--scheduler (slurm|jobset|job)": r"--dry-run --scheduler \1",
            "s3://bucket": "s3://checkpoints",
            "(?<![./])/data": "$PWD/data",
            "(reshard pack .*) --part 1/8": r"for part in 1 2 3 4 5 6 7 8; do \1 --part $part/8; done",
            r"--out (\S*)405B-pp16(\s+\\\s+)--parts": r"--out \g<1>405B-parts\2--parts",
        },
        files={"# job.toml": ("job.toml", "runner launch --job job.toml --dry-run")},
    ),
    "docs/weights.md": Run(
        needs=("tiny_model",),
        instead={
            r"\./checkpoints/step-000100": "./Llama-3.2-1B",
            r"\./checkpoints/step-000200": "./Llama-3.2-1B-pp2",
            "s3://bucket/chain": "./chain",
            "--version 7": "--version 2",
            "chain@7": "chain@2",
        },
        trains=False,
    ),
    "docs/layouts.md": Run(
        needs=("model", "pp2", "configs"),
        instead={"(?<!512 --seq-len )4096": "64", r"\./Llama-3\.1-70B": "config.json"},
        files={
            "num_ranks = 2": ("stages.toml", "reshard layout stages.toml --layers 30"),
            "0F0,": (
                "table.csv",
                "reshard plan ./Llama-3.2-1B --layout pp=2,vpp=2 --schedule table.csv --global-batch 5",
            ),
        },
    ),
    "docs/manifest.md": Run(needs=("pp2",), trains=False),
    "docs/my-loss-differs.md": Run(instead={"examples/": f"{ROOT}/examples/"}),
    "docs/own-models.md": Run(
        needs=("model", "own_model"),
        instead={"4096": "64", "--steps 100": "--steps 2"},
        files={"# Modules before the layers": ("model.toml", "")},
        codes={"reshard plan ./my-model --layout pp=2\n": 3},
    ),
    "docs/push.md": Run(
        needs=("tiny_model", "trained", "hub"),
        # The hub of the tests has no sign-in: HF_TOKEN is set.
        instead={"^hf auth login\n": "", "--out hf://my-org/Llama-3.2-1B-pp2": "--out hf://my-org/again"},
        trains=False,
    ),
    "docs/signing.md": Run(needs=("tiny_model",), trains=False),
    "docs/sources.md": Run(
        needs=("torchtitan", "moto"),
        instead={"~/": "./", "^aws ": f"python -c '{_PUT_LIFECYCLE}' ", "--bucket BUCKET": "--bucket checkpoints"},
        trains=False,
    ),
    "docs/start.md": Run(
        needs=(),
        instead={"demo/": f"{ROOT}/demo/"},
        files={"import reshard, runner": ("api.py", f"python -c '{_API}'")},
    ),
    "docs/training.md": Run(
        needs=("model", "pp2"),
        instead={
            "2048": "64",
            "--lora-rank 16": "--lora-rank 16 --steps 2 --global-batch 4 --seq-len 64",
        },
    ),
}

# Blocks that no test of a page runs, by how they begin, and why.
NOT_RUN: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        "Hugging Face folder": "a drawing",
        "python3 -m venv": "its extras are compared with those of pyproject.toml",
    },
    "docs/demo.md": {
        "$ reshard plan build/demo/model": "output of `make demo`; test_pages.py compares it up to its first training",
    },
    "docs/check.md": {
        "- run: pip install ./reshard": "tests/process/test_pre_commit.py runs its last step",
        "repos:": "tests/process/test_pre_commit.py runs pre-commit with it",
    },
    "docs/cluster.md": {"error: rank 2, stage 2": "output; the launcher's tests have its wording"},
    "docs/folders.md": {"Llama-3.2-1B-pp2/": "compared with the files of a packed folder"},
    "docs/layouts.md": {
        '{"version": 1, "modules"': "the form of a file, which the block after it writes and reads",
        '"step": {"overhead_s"': "the rest of that form",
        "reshard plan ./Llama-3.2-1B-pp2 --from-run": "test_search.py plans from a run that traced steps",
    },
    "docs/my-loss-differs.md": {"from examples.dump_torchtitan": "tests/process/runner/proof/test_dumps.py runs it"},
    "docs/own-models.md": {
        "[project.entry-points": "its test, test_own_models.py, has such a pyproject.toml",
        "tp_plan = ": "test_own_flags.py trains families with such plans",
    },
    "docs/training.md": {
        "[[group]]": "test_optimizers.py trains by such a file, with a class of a package",
        "runner launch ./Qwen3-30B-A3B-pp2": "its model has experts: test_matrix.py",
        "from transformers import AutoModelForCausalLM, AutoTokenizer": "transformers alone, with a folder of a run",
        "self-check: a tiny Qwen3MoeForCausalLM": "what a launch prints",
        "error: rank 0, stage 0, node": "what a launch prints",
        "reshard pack ./gpt-oss-20b": "its model is quantized: test_quantize.py",
        "runner prove ./Qwen3-30B-A3B-pp4": "it is large: test_prove.py proves a small one",
    },
    "docs/start.md": {"python3 -m venv": "installs"},
    "docs/weights.md": {"runner launch ./pp2": "test_publish.py publishes from training"},
}


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the blocks of a page, or of a part of one, but for its diagrams."""
    for match in _BLOCK.finditer(text):
        language, fenced, indented = match.groups()
        if language != "mermaid":
            yield Block(text=fenced or textwrap.dedent(indented), language=language or "")


def run_blocks(text: str, folder: Path, run: Run = Run(), not_run: Iterable[str] = ()) -> None:
    """Run the blocks of a page, or of a part of one, in order, but for the installation; each must end as it should.

    Each block starts in the folder where the one before it ended; blocks of output must be what was printed.
    """
    own = {"PATH": search_path(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed, place = "", folder / ".place"
    place.write_text(str(folder))
    for block in blocks_of(text):
        if block.named_in(not_run):
            continue
        if name := block.named_in(run.files):
            file, command = run.files[name]
            (folder / file).write_text(block.text)
        elif block.language == OUTPUT:
            assert missing_lines(block.text, printed) == []
            continue
        else:
            command = commands_of(block, run)
        ended = subprocess.run(
            ["bash", "-euc", f"{command}\npwd > {place}"], cwd=folder, env={**os.environ, **own},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
        )  # fmt: skip
        code = run.codes.get(block.named_in(run.codes) or "", 0)
        assert ended.returncode == code, f"{command}\n{ended.stdout}"
        printed = ended.stdout
        folder = Path(place.read_text().strip())


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a block of output that a command did not print, in this order.

    `…` is any text, or any lines where it is the whole line. Of lines with losses and times, numbers are not compared.
    """
    lines = iter(printed.splitlines())
    return [
        line
        for line in shown.splitlines()
        if line.strip("… ") and not any(re.fullmatch(_pattern_of(line), other) for other in lines)
    ]


def _pattern_of(line: str) -> str:
    pieces = (_NUMBER if _MEASURED.search(line) else re.compile("(?!)")).split(line)
    return _NUMBER.pattern.join(re.escape(piece).replace("…", ".*") for piece in pieces)


def search_path() -> str:
    """Return a PATH on which the commands are those of this environment."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def commands_of(block: Block, run: Run) -> str:
    """Return a block's commands as they are run here, without what the block says beside them."""
    command = _INSTALL.sub("", block.text)
    for pattern, other in run.instead.items():
        command = re.sub(pattern, other, command, flags=re.MULTILINE)
    return command
