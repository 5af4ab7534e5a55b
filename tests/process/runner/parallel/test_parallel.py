"""Pipelines whose stages several ranks share, against one process that has everything.

References are runs of this runner on one rank, whose gradients `test_parity` holds against an unpipelined model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from manifests.store import open_shard
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.models.decoders import save_decoder
from tests.process.runner.parallel.parallel_cases import (
    LAYOUTS,
    MODELS,
    NORMAL,
    ROUNDED,
    SLOW_4,
    SLOW_MIXED,
    TWO_DTYPES,
    Case,
)
from tests.process.runner.training_jobs import job, lines_of, run_jobs
from tests.process.torchrun import launch

# Those that begin with what was packed, and not with a checkpoint.
ROWS, SLOW_ROWS = (tuple(case for case in cases if case.origin is None) for cases in (NORMAL, SLOW_4))

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch's reader in one process
]

RECIPE = ("--seq-len", 32, "--global-batch", 8, "--lr", 1e-2, "--max-norm", 0.5)
FLOOR = 1e-9  # of gradients whose common norm is 0.5: what rounding leaves of a sum that cancels out
# What tensor-parallel ranks have rows of; some of the rest they have columns of.
CUT_ROWS = re.compile(r"(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj|q_b_proj|kv_b_proj)\.(weight|bias)$|sinks$")
# Experts in one tensor, (E, F, D), of which they have some F.
CUT_EACH = re.compile(r"experts\.down_proj$")
CONSTANTS = ("e_score_correction_bias",)  # which every rank has whole
AT_A_TIME = 12  # cases of a process: each leaves the threads of its gloo groups behind, which wake now and then
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    run_with_references(place, {4: NORMAL})
    return place


@pytest.fixture(scope="module")
def trained_slow(place: Path, trained: Path) -> Path:
    run_with_references(place, {4: SLOW_4 + SLOW_MIXED})
    return place


def run_with_references(place: Path, cases: Mapping[int, tuple[Case, ...]]) -> None:
    """Train these cases on so many ranks, and on one rank each reference of theirs that was not yet."""
    references = {case.reference.name: case.reference for some in cases.values() for case in some}
    missing = [case for name, case in sorted(references.items()) if not (place / f"{name}-0.pt").exists()]
    for model in {case.model for case in missing if not (place / case.model).exists()}:
        pack_model(place, model)
    run_cases(place, 1, missing)
    for num_ranks, some in cases.items():
        run_cases(place, num_ranks, some)


def pack_model(place: Path, model: str) -> None:
    name, changes = MODELS[model]
    if name in TWO_DTYPES:
        save_tiny(place / model, name)
    else:
        save_decoder(place / model, name, **changes)
    for layout in LAYOUTS:
        pack(place / model, place / f"{model}-{layout}", layout)


def run_cases(place: Path, num_ranks: int, cases: Sequence[Case]) -> None:
    jobs = [
        {
            "name": case.name,
            "root": str(place / case.packed),
            "args": [*map(str, RECIPE), *case.args],
            "origin": case.origin and case.origin.name,
        }
        for case in cases
    ]
    for some in (jobs[at : at + AT_A_TIME] for at in range(0, len(jobs), AT_A_TIME)):
        (place / "cases.json").write_text(json.dumps(some))
        launch(num_ranks, "runner/parallel/parallel_worker.py", place / "cases.json", place, timeout_s=900)


def found_by(place: Path, case: Case) -> list[dict[str, Any]]:
    """Give what each rank found."""
    files = sorted(place.glob(f"{case.name}-?.pt"))
    assert len(files) == open_manifest(place / case.packed).manifest.layout.num_ranks * (
        case.replicate * case.shard * case.tensor
    )
    return [torch.load(file, weights_only=False) for file in files]


def whole(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together; those that several ranks have are the same bits."""
    tensors: dict[str, torch.Tensor] = {}
    for fqn, shape, offset, part in (part for rank in ranks for part in rank[what]):
        tensor = tensors.setdefault(fqn, torch.full(shape, torch.nan))
        box = tuple(slice(begin, begin + count) for begin, count in zip(offset, part.shape, strict=True))
        assert bool(tensor[box].isnan().all()) or tensor[box].equal(part), fqn
        tensor[box] = part
    assert not any(bool(tensor.isnan().any()) for tensor in tensors.values())
    return tensors


def check_against_one_rank(place: Path, case: Case) -> None:
    if case.origin is not None:
        check_goes_on(place, case, case.origin)
        return
    ranks, (reference,) = found_by(place, case), found_by(place, case.reference)
    expected, found = whole([reference], "gradients"), whole(ranks, "gradients")
    for group in open_manifest(place / case.packed).manifest.ties:  # copies of one weight
        for replica in group.replicas:
            assert found.pop(replica.fqn, found[group.owner.fqn]).equal(found[group.owner.fqn])
            expected.pop(replica.fqn, None)
    assert found.keys() == expected.keys()
    for fqn, gradient in expected.items():
        assert is_close(found[fqn], gradient, case.tolerance, FLOOR), fqn
    weights, trained = whole([reference], "weights"), whole(ranks, "weights")
    if case.model not in ROUNDED:
        assert all(is_close(trained[fqn], weight, max(1e-3, 2 * case.tolerance)) for fqn, weight in weights.items())
    for rank in ranks:
        assert rank["reports"] == ranks[0]["reports"]
        for step, (report, other) in enumerate(zip(rank["reports"], reference["reports"], strict=True)):
            assert report[2] == other[2]
            assert report[::3] == pytest.approx(other[::3], rel=case.tolerance)
            # AdamW divides by gradients that cancel out to a rounding: the next norm agrees to fewer digits.
            assert report[1] == pytest.approx(other[1], rel=case.tolerance * (3 if step else 1))


def check_goes_on(place: Path, case: Case, origin: Case) -> None:
    ranks, before = found_by(place, case), found_by(place, origin)
    saved, begun = whole(before, "saved"), whole(ranks, "begun")
    assert saved.keys() == begun.keys()
    assert all(begun[name].equal(tensor) for name, tensor in saved.items())
    tolerance = 0 if case.is_same_run else 1e-5 if not case.is_mixed else 5e-5
    assert all(rank["reports"] == [pytest.approx(before[0]["reports"][1], rel=tolerance, abs=0)] for rank in ranks)
    weights, trained = whole(before, "weights"), whole(ranks, "weights")
    assert all(is_close(trained[fqn], weight, 100 * tolerance) for fqn, weight in weights.items())


def is_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, floor: float = 0.0) -> bool:
    return bool((found - expected).norm() <= tolerance * expected.norm() + floor)


@pytest.mark.parametrize("case", NORMAL, ids=lambda case: case.name)
def test_ranks_that_share_a_stage_train_as_one_rank_does(case: Case, trained: Path) -> None:
    check_against_one_rank(trained, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_4, *SLOW_MIXED], ids=lambda case: case.name)
def test_ranks_that_share_a_stage_train_as_one_rank_does_whole_matrix(case: Case, trained_slow: Path) -> None:
    check_against_one_rank(trained_slow, case)


def planned_nbytes(place: Path, case: Case, stages: list[int], number: int) -> int:
    """Give the bytes of a rank's rows: matrices are cut over tensor-parallel ranks, and then rows over shards.

    Of experts in a tensor each, shards have some. Columns that are less than a page apart are read with what
    lies between.
    """
    manifest = open_manifest(place / case.packed).manifest
    entries = [
        entry
        for stage in (manifest.stages[index] for index in stages)
        for shard in stage.shards
        for entry in open_shard(place / case.packed, shard).tensors
    ]
    assert entries
    num_experts = 1 + max((int(found[1]) for entry in entries if (found := EXPERT.search(entry.name))), default=0)
    shard, nbytes = number // case.tensor % case.shard, 0
    for name, shape in ((entry.name, entry.shape) for entry in entries):
        rows, row_nbytes = shape[0], prod(shape[1:]) * 4
        if CUT_EACH.search(name):
            row_nbytes //= case.tensor
        elif CUT_ROWS.search(name):
            rows //= case.tensor
        if name.endswith(CONSTANTS):
            nbytes += rows * row_nbytes
        elif expert := EXPERT.search(name):
            nbytes += rows * row_nbytes * (int(expert[1]) in own_rows(num_experts, case.shard, shard))
        else:
            nbytes += len(own_rows(rows, case.shard, shard)) * row_nbytes
    return nbytes


def own_rows(rows: int, num_shards: int, shard: int) -> range:
    """Give the rows of a shard, as torch.chunk deals them out."""
    each = -(-rows // num_shards)
    return range(each * shard, max(each * shard, min(rows, each * (shard + 1))))


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_rank_reads_its_own_rows_and_no_byte_more(case: Case, trained: Path) -> None:
    check_reads(trained, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_ROWS, ids=lambda case: case.name)
def test_rank_reads_its_own_rows_and_no_byte_more_whole_matrix(case: Case, trained_slow: Path) -> None:
    check_reads(trained_slow, case)


def check_reads(place: Path, case: Case) -> None:
    manifest = open_manifest(place / case.packed).manifest
    stage_of = {shard.path: stage.index for stage in manifest.stages for shard in stage.shards}
    for number, rank in enumerate(found_by(place, case)):
        assert {stage_of[name] for name, _, _ in rank["read"]} == set(rank["stages"])
        data_nbytes = read_nbytes(place, case, rank)
        assert data_nbytes == planned_nbytes(place, case, rank["stages"], number)
        if "broadcast" not in case.flags:
            assert data_nbytes == rank["loaded"]
        assert len(set(rank["read"])) == len(rank["read"])


def read_nbytes(place: Path, case: Case, rank: dict[str, Any]) -> int:
    """Give the bytes that a rank read of tensors, headers left out."""
    folder = place / case.packed
    data = (read for read in rank["read"] if read[1] >= header_nbytes(folder / read[0]))
    return sum(end - begin for _, begin, end in data)


def header_nbytes(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_tensors_read_in_part_are_read_once_more_to_be_verified_and_those_sent_on_are_read_once(trained: Path) -> None:
    rows, sent = (found_by(trained, case) for case in NORMAL[1:3])
    assert all(rank["num_parts"] > 0 for rank in rows)
    assert all(rank["num_parts"] == 0 for rank in sent)
    manifest = open_manifest(trained / "untied-pp=2").manifest
    for stage in manifest.stages:
        assert sum(rank["loaded"] for rank in sent if rank["stages"] == [stage.index]) == stage.nbytes
        checked = [rank["verified"] for rank in rows if rank["stages"] == [stage.index]]
        assert sum(checked) == stage.nbytes
        assert min(checked) > stage.nbytes / 3  # shared out between the two


STEPS, MIDDLE = 2, 1
TRAINING = ("--seq-len", 24, "--global-batch", 8, "--lr", 2e-3, "--warmup-steps", 3, "--max-norm", 0.5,
            "--data", "synthetic", "--seed", 7)  # fmt: skip
SHARDED, CUT = ("--dp-shard", 2), ("--tp", 2)


class Runs:
    """Training runs with checkpoints; a run is known by its name."""

    def __init__(self, place: Path) -> None:
        self.place, self.jobs = place, list[dict[str, Any]]()

    def checkpoint(self, name: str, step: int = STEPS) -> Path:
        return self.place / "runs" / name / f"step-{step:06d}"

    def add(self, name: str, root: str, *args: object) -> None:
        home = self.place / "runs" / name
        home.mkdir(parents=True)
        saving = ("--steps", STEPS, "--checkpoint", home, "--checkpoint-every", MIDDLE)
        self.jobs.append(job(self.place / root, home, *TRAINING, *saving, *args))

    def resume(self, name: str, origin: str, root: str, *args: object) -> None:
        self.add(name, root, "--resume", self.checkpoint(origin, MIDDLE), *args)

    def go(self, num_ranks: int = 4) -> None:
        run_jobs(num_ranks, self.jobs, timeout_s=500)
        self.jobs = []

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in lines_of(self.place / "runs" / name) if "loss" in line}

    def tensors(self, name: str, step: int = STEPS) -> dict[tuple[str, str], torch.Tensor]:
        """Give every tensor of a checkpoint, by kind and FQN, as torch's own reader puts slices together."""
        folder, found = self.checkpoint(name, step), dict[tuple[str, str], torch.Tensor]()
        for shard in open_manifest(folder).manifest.shards:
            reader = HuggingFaceStorageReader(str((folder / shard.path).parent))
            known = reader.read_metadata().state_dict_metadata
            state = {fqn: torch.full(it.size, torch.nan) for fqn, it in known.items() if hasattr(it, "size")}
            load(state, storage_reader=reader, no_dist=True)
            found |= {(shard.holds, fqn): tensor for fqn, tensor in state.items()}
        return found


@pytest.fixture(scope="module")
def runs(place: Path) -> Runs:
    if not (place / "tied").exists():
        pack_model(place, "tied")
    runs = Runs(place)
    runs.add("sharded", "tied-pp=2", *SHARDED)
    runs.add("pipeline", "tied-pp=4")
    runs.resume("sharded again", "sharded", "tied-pp=2", *SHARDED)
    runs.resume("sharded to cut", "sharded", "tied-pp=2", *CUT, "--loading", "broadcast")
    runs.go()
    return runs


def test_steps_and_resumed_steps_are_an_uninterrupted_run_bit_for_bit_where_stages_are_sharded(runs: Runs) -> None:
    assert {**runs.losses("sharded"), **runs.losses("sharded again")} == runs.losses("sharded")
    expected, found = runs.tensors("sharded"), runs.tensors("sharded again")
    assert expected.keys() == found.keys()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


def test_training_goes_on_on_other_degrees_with_what_was_saved(runs: Runs) -> None:
    """`NORMAL` has other degrees: here ranks come from the files, by the flags that a user gives."""
    whole_run, resumed = runs.losses("sharded"), runs.losses("sharded to cut")
    assert sorted(resumed) == list(range(MIDDLE + 1, STEPS + 1))
    assert all(loss == pytest.approx(whole_run[step], rel=1e-5) for step, loss in resumed.items())
    expected, found = runs.tensors("sharded"), runs.tensors("sharded to cut")
    weights = [key for key in expected if key[0] == "weights"]
    assert all(float((found[key] - expected[key]).norm() / expected[key].norm()) < 1e-3 for key in weights)


def test_sharded_ranks_write_slices_of_their_own_that_torch_reads(runs: Runs) -> None:
    """`Runs.tensors` is torch's reader: it fills what was left NaN, and finds what one pipeline wrote whole."""
    manifest = open_manifest(runs.checkpoint("sharded")).manifest
    for stage in manifest.stages:
        names = sorted(shard.path for shard in stage.shards if shard.holds == "weights")
        assert names == [f"stage-{stage.index:03d}/model-{part:05d}-of-00002.safetensors" for part in (1, 2)]
    sharded, pipeline = runs.tensors("sharded", MIDDLE), runs.tensors("pipeline", MIDDLE)
    assert sharded.keys() == pipeline.keys()
    assert not any(bool(tensor.isnan().any()) for tensor in sharded.values())
    for key, tensor in pipeline.items():
        assert sharded[key].shape == tensor.shape
        assert float((sharded[key] - tensor).norm() / tensor.norm()) < 1e-3
