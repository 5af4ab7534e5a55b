"""Every verb of both commands, run where a stranger put code: in the working folder, in HOME and in TMPDIR."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from reshard.cli.command import cli as reshard_cli
from runner.commands import cli as runner_cli
from tests.builders import files_in
from tests.fast.manifests.models.catalogued import config_of

BIN = Path(sys.executable).parent
# Read by Python as it starts, or imported before any line of ours: PYTHONPATH is asked before our entry points are.
AT_START = ("sitecustomize", "usercustomize", "re", "contextlib", "signal", "runner", "reshard", "manifests")
LATER = ("torch", "json", "blake3", "numpy", "click", "yaml", "transformers", "safetensors", "socket", "platform")
SPEC = ("--layout", "pp=1")

RESHARD = {
    "check": ("check", ".", "--values"),
    "commit": ("commit", "."),
    "completion": ("completion", "bash"),
    "delta": ("delta", "publish", ".", "--chain", "../chain"),
    "diff": ("diff", ".", "../packed"),
    "export": ("export", ".", "--to", "hf", "--out", "../exported"),
    "inspect": ("inspect", ".", "--tensors"),
    "layout": ("layout", "pp=2", "--layers", "4"),
    "merge": ("merge", ".", ".", "--out", "../merged"),
    "pack": ("pack", ".", *SPEC, "--out", "../again"),
    "plan": ("plan", ".", *SPEC),
    "push": ("push", ".", "org/name", "--dry-run"),
    "sign": ("sign", ".", "--key", "missing.pem"),
    "verify": ("verify", "."),
}
LOG = "../log"
LAUNCH = ("launch", ".", "--log-dir", LOG, "--", "--data", "synthetic", "--steps", "1", "--seq-len", "16")
RUNNER = {
    "launch": (*LAUNCH, "--global-batch", "1", "--no-self-check"),
    "eval": ("eval", ".", "--data", "text.txt", "--seq-len", "16", "--no-self-check"),
    "prove": ("prove", ".", "--", "--global-batch", "1"),
    "measure": ("measure", ".", "--out", "../times.json", "--repeats", "1", "--seq-len", "16"),
    "list": ("list", ".."),
    "status": ("status", LOG),
    "logs": ("logs", LOG),
    "cancel": ("cancel", LOG),
    "report": ("report", LOG, "--out", "../report.html"),
    "completion": ("completion", "bash"),
}


def plant(folder: Path, names: Sequence[str]) -> None:
    """Write modules that note their names in `$PLANTED` and end the process, and files that tools read unasked."""
    code = f"import os\nopen(os.environ['PLANTED'], 'a').write(__name__ + {chr(10)!r})\nos._exit(77)\n"
    for name in names:
        (folder / f"{name}.py").write_text(code)
    (folder / "evil.pth").write_text("import sitecustomize\n")
    (folder / "pyproject.toml").write_text("[tool\n")
    (folder / ".netrc").write_text("default login me password secret\n")
    entry = folder / "evil-1.0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (entry / "entry_points.txt").write_text("[runner.families]\nLlamaForCausalLM = torch:family\n")


class Place:
    """A packed folder full of plants, and the environment of whoever works there."""

    def __init__(self, packed: Path, root: Path) -> None:
        self.folder, self._planted = root / "here", root / "planted"
        shutil.copytree(packed, self.folder)
        shutil.copytree(packed, root / "packed")
        home, temporary = root / "home", root / "tmp"
        for folder in (home / ".cache" / "huggingface", home / ".config" / "git", temporary / "real"):
            folder.mkdir(parents=True)
        (temporary / "link").symlink_to("real")
        modules = root / "modules"
        modules.mkdir()
        for folder in (self.folder, home, temporary / "real"):
            plant(folder, (*AT_START, *LATER))
        (self.folder / "sub").mkdir()
        plant(self.folder / "sub", LATER)
        (self.folder / "text.txt").write_text("text")
        self._environment = {
            **os.environ,
            "HOME": str(home),
            "TMPDIR": str(temporary / "link"),
            "PYTHONPATH": os.pathsep.join(("sub", str(modules))),
            "PLANTED": str(self._planted),
        }

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command there: no planted code ran, and it did not end in a traceback."""
        ended = subprocess.run(
            [BIN / command, *arguments], cwd=self.folder, env=self._environment, capture_output=True, text=True,
            timeout=200,
        )  # fmt: skip
        said = f"{arguments}\n{ended.stdout}\n{ended.stderr}"
        assert not self._planted.exists(), f"{self._planted.read_text()} {said}"
        assert ended.returncode != 1, said
        assert "Traceback" not in said, said
        return ended


def verbs_of(group: click.Group) -> set[str]:
    return set(group.list_commands(click.Context(group)))


def test_every_verb_is_tried() -> None:
    assert set(RESHARD) == verbs_of(reshard_cli)
    assert set(RUNNER) == verbs_of(runner_cli)


def test_no_verb_of_reshard_runs_code_of_the_place(packed_alone: Path, tmp_path: Path) -> None:
    place = Place(packed_alone, tmp_path)
    codes = {verb: place.run("reshard", *arguments).returncode for verb, arguments in RESHARD.items()}
    # Modules beside the manifest are code that readers of a folder could run: verify and check name them.
    assert {verb for verb, code in codes.items() if code} <= {"sign", "push", "check", "verify", "merge"}, codes


def test_model_that_transformers_builds_for_a_plan_is_not_the_place_s(packed_alone: Path, tmp_path: Path) -> None:
    place = Place(packed_alone, tmp_path)
    config = {**config_of("ApertusForCausalLM").to_dict(), "architectures": ["ApertusForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert place.run("reshard", "plan", "../config.json", *SPEC).returncode == 0


@pytest.mark.slow
def test_no_verb_of_runner_and_no_rank_runs_code_of_the_place(packed_alone: Path, tmp_path: Path) -> None:
    place = Place(packed_alone, tmp_path)
    codes = {verb: place.run("runner", *arguments).returncode for verb, arguments in RUNNER.items()}
    assert {verb for verb, code in codes.items() if code} <= {"eval"}, codes  # the model has no tokenizer
    assert json.loads((tmp_path / "log" / "state.json").read_text())["ended"] == "done"


@pytest.mark.parametrize(
    "command",
    [
        ("runner", "launch", "{packed}", "--", "--log-dir", "{log}", "--data", "synthetic", "--steps", "1"),
        ("runner", "status"),
        ("reshard", "pack", "{packed}", *SPEC, "--out", "out"),
        ("reshard", "export", "{packed}", "--to", "hf", "--out", "out"),
        ("reshard", "check", "."),
    ],
)
def test_deleted_working_folder_is_refused_in_a_sentence(
    packed_alone: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    words = [word.format(packed=packed_alone, log=tmp_path / "log") for word in command]
    script = 'cd gone && rmdir ../gone && exec "$@"'
    ended = subprocess.run(
        ["bash", "-c", script, "bash", BIN / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert ended.returncode in (2, 3), ended.stderr
    assert "Traceback" not in ended.stderr
    if command[:2] == ("runner", "launch"):
        assert "[system.no-working-folder]" in ended.stderr


def test_packed_folder_is_no_log_folder(packed_alone: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    shutil.copytree(packed_alone, packed)
    before = files_in(packed)
    command = ("launch", packed, "--log-dir", packed, "--", "--data", "synthetic", "--steps", "1")
    ended = subprocess.run([BIN / "runner", *command], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, "[output.inside-input]" in ended.stderr) == (2, True), ended.stderr
    assert files_in(packed) == before
