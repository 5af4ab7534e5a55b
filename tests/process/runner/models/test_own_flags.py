"""Models of one's own under each flag: `examples/own_model.py` and `examples/own_tree.py`, every gradient against one
process, read from the first step's `exp_avg`. The self-check is on."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from tests.builders import run
from tests.process.local_jobs import ROOT
from tests.process.runner.models.test_own_models import imported
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said

pytestmark = pytest.mark.timeout(900)

EXAMPLES = {"TinyDecoder": "own_model.py", "TreeDecoder": "own_tree.py"}
BETA = 0.9  # of `exp_avg`, which is 0 before the first step
SEQ_LEN, NUM_ROWS = 16, 8
FLAGS: tuple[object, ...] = (
    "--tokenized", "--document-mask", "--seq-len", SEQ_LEN, "--global-batch", NUM_ROWS, "--steps", 1, "--beta1", BETA,
    "--max-norm", 0, "--device", "cpu", "--no-shuffle",
)  # fmt: skip
ZERO_BUBBLE = ("--schedule", "InterleavedZeroBubble")
# By example and number of ranks: layout and flags.
TREE, TINY = "TreeDecoder", "TinyDecoder"
Cases = dict[str, tuple[str, tuple[object, ...]]]
CASES: dict[tuple[str, int], Cases] = {
    (TINY, 2): {
        "tp": ("pp=1", ("--tp", 2)),
        "shards": ("pp=1", ("--dp-shard", 2)),
        "loss chunks": ("pp=2", ("--loss-chunk", 5, "--ac", "full")),
    },
    (TREE, 2): {
        "experts": ("pp=1", ("--dp-shard", 2, "--ep", 2)),
        "zero bubble": ("pp=2,vpp=2", ZERO_BUBBLE),
    },
}
SLOW: dict[tuple[str, int], Cases] = {
    (TINY, 2): {"zero bubble": ("pp=2,vpp=2", ZERO_BUBBLE)},
    (TREE, 2): {"shards": ("pp=1", ("--dp-shard", 2, "--loss-chunk", 5))},
    (TREE, 3): {
        "skip": ("pp=3", ()),
        "v": ("pp=3,vpp=2,style=v", ("--schedule", "ZBVZeroBubble")),
        "zero bubble": ("pp=3,vpp=2", ZERO_BUBBLE),
    },
    (TINY, 4): {
        "tp and chunks": ("pp=2", ("--tp", 2, "--loss-chunk", 5, "--ac", "full")),
        "tp and shards": ("pp=1", ("--tp", 2, "--dp-shard", 2)),
        "tp, zero bubble": ("pp=2,vpp=2", ("--tp", 2, *ZERO_BUBBLE)),
        "compiled": ("pp=2", ("--dp-shard", 2, "--compile", "--loss-chunk", 5)),
    },
    (TREE, 4): {
        "experts": ("pp=2", ("--dp-shard", 2, "--ep", 2)),
        "experts, zero bubble": ("pp=2,vpp=2", ("--dp-shard", 2, "--ep", 2, *ZERO_BUBBLE)),
        "compiled": ("pp=4", ("--compile",)),
    },
}


@cache
def sources(folder: Path) -> dict[str, Any]:
    """Save a model of each example, and install both; return the modules."""
    packages, examples = folder / "packages", {}
    for architecture, script in EXAMPLES.items():
        name = script.removesuffix(".py")
        info = packages / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (packages / script).write_text((ROOT / "examples" / script).read_text())
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[runner.families]\n{architecture} = {name}:family\n")
        examples[architecture] = imported(packages / script)
        config = json.loads(re.search(r"config\.json (\{.*?\})", examples[architecture].__doc__, re.DOTALL)[1])  # type: ignore[index]
        torch.manual_seed(0)
        model = whole(examples[architecture], config)
        (folder / architecture).mkdir()
        (folder / architecture / "config.json").write_text(json.dumps(config))
        save_file(model.state_dict(), folder / architecture / "model.safetensors")
    described = examples[TINY].__doc__.partition("model.toml:\n\n")[2].partition("\n\n")[0]
    (folder / "model.toml").write_text(described)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return examples


def whole(example: Any, config: dict[str, Any]) -> Any:
    sizes = {name: value for name, value in config.items() if name != "architectures"}
    modules = ("embed", *(f"layers.{number}" for number in range(config["depth"])), "norm", "head")
    return example.Decoder(**sizes, modules=modules)


def rows() -> list[dict[str, list[int]]]:
    """Return rows of one to three documents, most of which end before the sequence length."""
    drawn = torch.Generator().manual_seed(0)
    lengths = ((9, 7), (4, 3, 5), (12,), (2, 9))
    return [
        {
            "input_ids": torch.randint(64, (sum(documents),), generator=drawn).tolist(),
            "document_ids": [number for number, length in enumerate(documents) for _ in range(length)],
        }
        for documents in (lengths[row % 4] for row in range(NUM_ROWS))
    ]


def one_process(folder: Path, architecture: str, *, is_masked: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of the whole model, each document alone, and its gradients."""
    config = json.loads((folder / architecture / "config.json").read_text())
    model = whole(sources(folder)[architecture], config)
    model.load_state_dict(load_file(folder / architecture / "model.safetensors"))
    texts = []
    for row in rows():
        ids, numbers = torch.tensor(row["input_ids"]), torch.tensor(row["document_ids"])
        texts += [ids[numbers == number] for number in numbers.unique()] if is_masked else [ids]
    total, count = torch.zeros(()), 0
    for text in texts:
        tokens = text[None, :-1]
        more = {"position_ids": torch.arange(len(text) - 1)[None], "attention_mask": torch.ones_like(tokens)}
        logits = model(tokens, **(more if architecture == TREE else {}))
        total, count = total + cross_entropy(logits[0], text[1:], reduction="sum"), count + len(text) - 1
    loss = total / count
    torch.autograd.backward(loss)
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def check(folder: Path, architecture: str, num_ranks: int, cases: Cases) -> None:
    sources(folder)
    jobs, is_masked = [], architecture == TREE
    text = folder / ("rows.jsonl" if is_masked else "plain.jsonl")
    if not is_masked:
        text.write_text("".join(json.dumps({"input_ids": row["input_ids"]}) + "\n" for row in rows()))
    flags = [flag for flag in FLAGS if is_masked or flag != "--document-mask"]
    place = folder / f"{architecture}-{num_ranks}-{min(cases)}"
    for name, (layout, more) in cases.items():
        packed = folder / f"{architecture}-{layout}"
        if not packed.exists():
            run("pack", folder / architecture, "--layout", layout, "--model", folder / "model.toml", "--out", packed)
        saved = ("--checkpoint", place / f"{name}-saved")
        jobs.append(job(packed, place / name, "--data", text, *flags, *saved, *more, path=folder / "packages"))
    run_jobs(num_ranks, jobs, timeout_s=600)
    loss, gradients = one_process(folder, architecture, is_masked=is_masked)
    for name in cases:
        assert "error: " not in said(place / name), said(place / name)
        assert f"a tiny {architecture} is the same whole" in said(place / name)
        (line,) = (line for line in lines_of(place / name) if "loss" in line)
        assert line["loss"] == pytest.approx(loss, rel=2e-6), name
        merged = place / f"{name}-merged"
        run("pack", place / f"{name}-saved" / "step-000001", "--merge-slices", "--layout", "pp=1", "--out", merged)
        moments = {
            fqn: moment
            for file in (merged / "stage-000" / "exp_avg").glob("*.safetensors")
            for fqn, moment in load_file(file).items()
        }
        assert moments.keys() == gradients.keys()
        for fqn, gradient in gradients.items():
            distance = (moments[fqn] / (1 - BETA) - gradient).abs().max() / gradient.abs().max()
            assert distance <= 5e-6, (name, fqn, distance)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.mark.parametrize(
    ("architecture", "num_ranks"),
    [pytest.param(*case, marks=[] if case == (TREE, 2) else pytest.mark.slow) for case in CASES],
)
def test_own_model_trains_under_each_flag_as_one_process(architecture: str, num_ranks: int, place: Path) -> None:
    check(place, architecture, num_ranks, CASES[architecture, num_ranks])


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "num_ranks"), SLOW)
def test_own_model_trains_under_more_flags_and_ranks(architecture: str, num_ranks: int, place: Path) -> None:
    check(place, architecture, num_ranks, SLOW[architecture, num_ranks])
