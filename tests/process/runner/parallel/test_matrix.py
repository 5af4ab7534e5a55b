"""Combinations of tests/matrix.py train as one process does that runs transformers' whole model, or are refused.

All 300, in launches of at most 12: pytest -m slow tests/process/runner/parallel/test_matrix.py; with -k 8-ranks, those
of 8 ranks.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.models import is_expert
from manifests.store import open_shard
from stores.open import open_manifest
from tests.builders import pack
from tests.matrix import NUM_CASES, Case, every_case, ten
from tests.process.runner.parallel.matrix_reference import RECIPE, reference, save_matrix_model
from tests.process.runner.parallel.test_parallel import AT_A_TIME, header_nbytes, is_close, whole
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(3600)

TOLERANCE = 2e-6  # of float32; relative
# Of gradients whose common norm is 0.5: what rounding leaves of a sum that cancels out, in transformers as well.
FLOOR = 5e-9
# Saved by one of these after the first step, resumed and saved by another, and resumed by a third.
SAVED = (
    Case(model="qwen3-moe", shard=4, expert=4),
    Case(model="qwen3-moe", shard=2, context="gather", expert=2),
    Case(model="qwen3-moe", context="ulysses", tensor=2, expert=4),
    Case(model="qwen3-moe", pipeline=2, schedule="ZBVZeroBubble", shard=2, expert=2),
    Case(model="qwen3-moe", pipeline=2, tensor=2, expert=2),
    Case(model="qwen3-moe", pipeline=4, schedule="Interleaved1F1B"),
    Case(model="qwen3-moe", replicate=2, shard=2, expert=2),
    Case(model="qwen3-moe", pipeline=2, schedule="DualPipeV", context="gather", expert=2, recompute="full"),
)
_PARTS = {1: 3, 2: 8, 3: 1, 4: 12, 8: 10}  # by number of ranks: in how many launches all cases of it are trained
# All pairs of different ones: from each, this many places on, and as many again.
_HOPS = ((1, 2), (3, 4), (5, 6), (7, 1))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def run_cases(place: Path, cases: Iterable[Case], **more: Any) -> None:
    """Train these cases, as many at a time as one process has threads for."""
    by_size: Mapping[int, list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        if not (place / case.folder).exists():
            save_matrix_model(place / case.folder, case)
        if not (place / case.packed).exists():
            pack(place / case.folder, place / case.packed, case.layout)
        args = [*map(str, RECIPE), *case.args]
        job = {"name": case.name, "root": str(place / case.packed), "args": args, "saves": 0, "until": 1}
        job |= {"origin": case.origin and case.origin.name, "rows": case.rows, "documents": case.documents}
        job["global_batch"] = case.global_batch
        by_size[case.world_size].append({**job, **more})
    for num_ranks, jobs in by_size.items():
        for some in (jobs[at : at + AT_A_TIME] for at in range(0, len(jobs), AT_A_TIME)):
            (place / "cases.json").write_text(json.dumps(some))
            launch(num_ranks, "runner/parallel/parallel_worker.py", place / "cases.json", place, timeout_s=900)


def results_of(place: Path, case: Case) -> list[dict[str, Any]]:
    return [torch.load(place / f"{case.name}-{rank}.pt", weights_only=False) for rank in range(case.world_size)]


def problems_of(place: Path, case: Case) -> list[str]:
    """Return what differs from transformers' whole model: each gradient and weight, losses, norms and reads."""
    ranks, expected = results_of(place, case), reference(place, case)
    (report,), (loss, norm, num_tokens) = ranks[0]["reports"], expected["reports"][0]
    problems = [f"rank {number} reports otherwise" for number, rank in enumerate(ranks)
                if rank["reports"] != [report]]  # fmt: skip
    problems += ["number of tokens"] * (report[2] != num_tokens)
    tensors = {what: whole(ranks, what) for what in ("gradients", "weights")}
    replicas = tensors["weights"].keys() - expected["weights"].keys()
    problems += ["names"] * bool(replicas - ({"lm_head.weight"} if case.tied else set()))
    owner = next(name for name in expected["weights"] if name.endswith("embed_tokens.weight"))
    problems += [f"{name} and its tie" for name in replicas
                 if not tensors["weights"][name].equal(tensors["weights"][owner])]  # fmt: skip
    if case.dtype != "fp32":
        return problems + _problems_of_bf16(tensors, report[0], place, case)
    problems += [
        f"{what} of {name}"
        for what, of in tensors.items()
        for name, tensor in expected[what].items()
        if not is_close(of[name], tensor, TOLERANCE, FLOOR)
    ]
    problems += [what for what, ours, theirs in (("loss", report[0], loss), ("norm", report[1], norm))
                 if ours != pytest.approx(theirs, rel=1e-6)]  # fmt: skip
    return problems + (problems_of_reads(place, case, ranks) if case.expert > 1 and case.load == "rows" else [])


def _problems_of_bf16(tensors: Any, loss: float, place: Path, case: Case) -> list[str]:
    """Return what is more than twice as far from float32 as transformers' own bf16."""
    exact, rounded = (reference(place, case, dtype) for dtype in (torch.float32, torch.bfloat16))
    first, second = (of["reports"][0][0] for of in (exact, rounded))
    is_far = abs(loss - first) > 2 * abs(second - first) + 1e-3
    problems = [f"loss {loss}, in float32 {first}, of transformers' bf16 {second}"] * is_far
    for what in ("gradients", "weights"):
        ours, theirs = (
            torch.stack([(of[name] - tensor).norm() for name, tensor in exact[what].items()]).norm()
            for of in (tensors[what], rounded[what])
        )
        problems += [f"{what}: {ours / theirs:.1f} times as far"] * bool(ours > 2 * theirs)
    return problems


def problems_of_reads(place: Path, case: Case, ranks: list[dict[str, Any]]) -> list[str]:
    """Return ranks that read other bytes of experts than their own; those of a copy of a stage share all of them.

    Of some columns of short rows, such as biases', the gaps are read along.
    """
    folder = place / (f"{case.origin.name}-saved" if case.origin else case.packed)
    read, total = [0] * len(ranks), 0
    for shard in (shard for shard in open_manifest(folder).manifest.shards if shard.holds == "weights"):
        begin = header_nbytes(folder / shard.path)
        for entry in (entry for entry in open_shard(folder, shard).tensors if is_expert(entry.name)):
            first, last = begin + entry.begin, begin + entry.end
            total += entry.nbytes
            for number, rank in enumerate(ranks):
                ranges = ((low, high) for name, low, high in rank["read"] if name == shard.path and low >= begin)
                read[number] += sum(max(0, min(high, last) - max(low, first)) for low, high in ranges)
    of_experts = [[(shape, part) for fqn, shape, _, part in rank["weights"] if is_expert(fqn)] for rank in ranks]
    problems = [
        f"rank {number} read {read[number]} bytes of experts, and has {nbytes}"
        for number, rank in enumerate(ranks)
        if read[number] != (nbytes := sum(math.prod((*part.shape[:-1], shape[-1])) * part.itemsize
                                          for shape, part in of_experts[number] if part.numel()))
    ]  # fmt: skip
    owned = sum(part.nbytes for parts in of_experts for _, part in parts)
    return problems + [f"{total} bytes of experts"] * (not 0 < total * case.replicate == owned)


def test_ten_combinations_train_as_transformers_does(place: Path) -> None:
    run_cases(place, ten())
    assert not {case.name: problems for case in ten() if (problems := problems_of(place, case))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "part"),
    [
        pytest.param(num_ranks, part, id=f"{num_ranks}-ranks-{part}")
        for num_ranks, count in _PARTS.items()
        for part in range(count)
    ],
)
def test_all_combinations_train_as_transformers_does(num_ranks: int, part: int, place: Path) -> None:
    assert len(every_case()) >= NUM_CASES
    assert {case.world_size for case in every_case()} == _PARTS.keys()
    by_model = sorted((case for case in every_case() if case.world_size == num_ranks), key=lambda case: case.name)
    begin, end = (len(by_model) * number // _PARTS[num_ranks] for number in (part, part + 1))
    cases = by_model[begin:end]  # which share references
    assert 0 < len(cases) <= AT_A_TIME
    run_cases(place, cases)
    assert not {case.name: problems for case in cases if (problems := problems_of(place, case))}


@pytest.mark.slow
def test_checkpoints_resume_at_any_other_combination_twice(place: Path) -> None:
    run_cases(place, SAVED, saves=1, until=3)
    by_hop = list[list[Case]]()
    for first, second in _HOPS:
        near = [replace(SAVED[(at + first) % 8], origin=case) for at, case in enumerate(SAVED)]
        far = [replace(SAVED[(at + first + second) % 8], origin=case) for at, case in enumerate(near)]
        by_hop += [near, far]
    run_cases(place, [case for cases in by_hop[::2] for case in cases], saves=2, until=2)
    run_cases(place, [case for cases in by_hop[1::2] for case in cases], until=3)
    losses = [report[0] for report in reference(place, SAVED[0], steps=3)["reports"]]
    problems = dict[str, list[str]]()
    for case in SAVED:
        assert [report[0] for report in results_of(place, case)[0]["reports"]] == pytest.approx(losses, rel=1e-6)
    for case in (case for cases in by_hop for case in cases):
        assert case.origin is not None
        ranks, step = results_of(place, case), 2 if case.origin.origin else 1
        saved, begun = whole(results_of(place, case.origin), "saved"), whole(ranks, "begun")
        assert saved.keys() == begun.keys()
        wrong = [name for name, tensor in saved.items() if not begun[name].equal(tensor)]
        wrong += [f"loss of rank {number}" for number, rank in enumerate(ranks)
                  if rank["reports"][0][0] != pytest.approx(losses[step], rel=2e-6)]  # fmt: skip
        wrong += problems_of_reads(place, case, ranks)
        problems |= {case.name: wrong} if wrong else {}
    assert not problems
