"""The memory that `reshard plan` and the runner estimate, against what ranks of the runner have in use."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.builders import pack
from tests.fast.runner.tiny import save_model
from tests.process.torchrun import launch

Case = Mapping[str, Any]

# About 60 million parameters; the tied embedding, which both ends have, is a ninth of them. Most tensors are so large
# that malloc returns them to the system as soon as they are freed.
SIZES: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2112,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
_DTYPES: Mapping[str, Sequence[str]] = {
    "fp32": (),
    "bf16": ("--dtype", "bf16"),
    "mixed": ("--dtype", "bf16", "--master-dtype", "fp32"),
}
# The flags, and the global batch size: of every pipeline, 4 microbatches.
_DEGREES: Mapping[str, Sequence[str]] = {
    "pp": ("--global-batch", "4"),
    "fsdp": ("--global-batch", "8", "--dp-shard", "2"),
    "tp": ("--global-batch", "4", "--tp", "2"),
}
_RECOMPUTE: Mapping[str, Sequence[str]] = {
    "none": (),
    "full": ("--ac", "full"),
    "selective": ("--ac", "selective"),
    "chunks": ("--loss-chunk", "64"),
}


def _case(dtype: str, degrees: str, recompute: str, seq_len: int = 192) -> Case:
    flags = (*_DTYPES[dtype], *_DEGREES[degrees], *_RECOMPUTE[recompute])
    return {"name": f"{dtype}-{degrees}-{recompute}-{seq_len}", "args": ["--seq-len", str(seq_len), *flags]}


# By dtype, each of which gets ranks of its own: the heap of a rank keeps the shape that blocks of another size gave it.
PIPELINE = {dtype: [_case(dtype, "pp", recompute) for recompute in _RECOMPUTE] for dtype in _DTYPES}
SHARED = {
    dtype: [_case(dtype, degrees, recompute) for degrees in ("fsdp", "tp") for recompute in ("none", "full")]
    for dtype in _DTYPES
}
SAMPLE = [_case("fp32", "pp", "none")]
# Ranks that reuse freed memory: of another case before, too. So each gets ranks of its own.
REUSING = [*PIPELINE["fp32"][1:], _case("fp32", "pp", "none", 768)]


def warm_up(num_ranks: int, dtype: str) -> Sequence[Case]:
    """What torch, gloo and oneDNN allocate at their first use stays out of the figures."""
    return [_case(dtype, degrees, "full", 64) for degrees in (("pp",) if num_ranks == 2 else ("fsdp", "tp"))]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("memory")
    save_model(place / "model", **SIZES)
    return pack(place / "model", place / "packed")


def check(
    packed: Path,
    out: Path,
    num_ranks: int,
    cases: Sequence[Case],
    policy: str = "compact",
    dtype: str = "fp32",
    num_turns: int = 1,
) -> None:
    asked = [{**case, "root": str(packed), "policy": policy} for case in (*warm_up(num_ranks, dtype), *cases)]
    (out / "cases.json").write_text(json.dumps(asked))
    peaks: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(num_turns):
        launch(num_ranks, "runner/training/memory_worker.py", out / "cases.json", out, timeout_s=800)
        found = {
            (case["name"], rank): json.loads((out / f"{case['name']}-{rank}.json").read_text())
            for case in cases
            for rank in range(num_ranks)
        }
        for name, rank in found.items():
            peaks[name].append(rank["peak"])
    off = {name: statistics.median(peaks[name]) / rank["planned"]["total"] for name, rank in found.items()}
    assert {name: ratio for name, ratio in off.items() if not 0.9 < ratio < 1.1} == {}
    if num_ranks == 2:  # nothing is gathered or reduced in between
        for name, rank in found.items():
            for part in ("weights", "gradients", "optimizer"):
                # Besides its moments AdamW has a step count for each parameter.
                assert rank[part] == pytest.approx(rank["planned"][part], rel=1e-3), (name, part)


@pytest.mark.parametrize("policy", ["compact", "fast"])
def test_peak_of_each_rank_is_within_a_tenth_of_the_plan_of_its_policy(
    packed: Path, tmp_path: Path, policy: str
) -> None:
    check(packed, tmp_path, 2, SAMPLE, policy)


@pytest.mark.parametrize("case", REUSING, ids=lambda case: case["name"])
def test_ranks_that_reuse_freed_memory_are_within_a_tenth_of_their_plan(
    packed: Path, tmp_path: Path, case: Case
) -> None:
    """Which holes malloc fills differs between runs: a single one has had 0.89 and 1.18 of the plan."""
    check(packed, tmp_path, 2, [case], "fast", num_turns=5)


@pytest.mark.parametrize("dtype", PIPELINE)
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, PIPELINE), (4, SHARED)], ids=["pp", "fsdp and tp"])
def test_peak_is_within_a_tenth_of_the_plan_in_every_dtype(
    packed: Path, tmp_path: Path, num_ranks: int, cases: Mapping[str, Sequence[Case]], dtype: str
) -> None:
    check(packed, tmp_path, num_ranks, cases[dtype], dtype=dtype)
