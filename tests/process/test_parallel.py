"""Pipelines whose stages several ranks share, against one process that has everything.

References are runs of this runner on one rank, whose gradients `test_parity` holds against an unpipelined model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from manifests.models import module_of
from manifests.store import open_shard, read_manifest
from tests.builders import reshard
from tests.fast.runner.tiny import EMBEDDING, HEAD, save_model
from tests.process.parallel_worker import VOCAB_SIZE
from tests.process.torchrun import launch

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch's reader in one process
]

Weights = Literal["tied", "untied", "odd", "qwen3"]
WEIGHTS: tuple[Weights, ...] = ("tied", "untied", "odd", "qwen3")
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 4, "vocab_size": VOCAB_SIZE}
ODD = {"vocab_size": VOCAB_SIZE + 1, "intermediate_size": 82}  # no number of ranks divides these rows
RECIPE = ("--seq-len", 32, "--global-batch", 8, "--lr", 1e-2, "--max-norm", 0.5)
DATA_TOLERANCE, TENSOR_TOLERANCE = 1e-6, 5e-6  # of gradients, relative
COLUMNS = ("o_proj.weight", "down_proj.weight")  # cut by columns over tensor-parallel ranks; norms are not cut
LAYOUTS = ("pp=1", "pp=2", "pp=4", "pp=2,vpp=2", "pp=2,vpp=2,style=v")


@dataclass(frozen=True, kw_only=True)
class Case:
    weights: Weights
    layout: str = "pp=2"
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        shape = f"{self.replicate}x{self.shard}x{self.tensor}"
        return "-".join((self.weights, self.layout, shape, *(flag.strip("-") for flag in self.flags)))

    @property
    def tolerance(self) -> float:
        return DATA_TOLERANCE if self.tensor == 1 else TENSOR_TOLERANCE

    @property
    def args(self) -> list[str]:
        flags = ("--dp-replicate", self.replicate, "--dp-shard", self.shard, "--tp", self.tensor, *self.flags)
        return [str(flag) for flag in flags]


ZBV = ("--schedule", "ZBVZeroBubble")
NORMAL = (
    Case(weights="tied", replicate=2),
    Case(weights="tied", shard=2),
    Case(weights="untied", shard=2, flags=("--load", "broadcast")),
    Case(weights="tied", tensor=2),
    Case(weights="tied", layout="pp=2,vpp=2,style=v", shard=2, flags=ZBV),
    Case(weights="tied", layout="pp=1", shard=4),
    Case(weights="odd", layout="pp=1", shard=4),
)
SLOW_4 = (
    Case(weights="untied", replicate=2),
    Case(weights="untied", tensor=2),
    Case(weights="qwen3", tensor=2),  # its norms of heads have seen the heads of one rank
    Case(weights="tied", layout="pp=2,vpp=2", shard=2),
    Case(weights="tied", layout="pp=2,vpp=2,style=v", tensor=2, flags=ZBV),
    Case(weights="tied", layout="pp=2,vpp=2,style=v", replicate=2, flags=ZBV),
    Case(weights="tied", shard=2, flags=("--ac", "full")),
    Case(weights="untied", layout="pp=1", replicate=2, tensor=2, flags=("--load", "broadcast")),
)
SLOW_8 = (
    Case(weights="tied", shard=2, tensor=2),
    Case(weights="tied", replicate=2, shard=2),
    Case(weights="tied", replicate=2, tensor=2),
    Case(weights="untied", layout="pp=4", shard=2),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, packed on every layout, and references."""
    place = tmp_path_factory.mktemp("parallel")
    for weights in WEIGHTS[:3]:
        sizes = {**SIZES, **(ODD if weights == "odd" else {})}
        save_model(place / weights, tie_word_embeddings=weights == "tied", **sizes)
    save_qwen3(place / "qwen3")
    for weights in WEIGHTS:
        for layout in LAYOUTS:
            packed = reshard("pack", place / weights, "--layout", layout, "--out", place / f"{weights}-{layout}")
            assert packed.code == 0, packed.err
    run_cases(place, 1, tuple(Case(weights=weights, layout="pp=1") for weights in WEIGHTS))
    return place


def save_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **heads, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    run_cases(place, 4, NORMAL)
    return place


@pytest.fixture(scope="module")
def trained_slow(place: Path) -> Path:
    run_cases(place, 4, SLOW_4)
    run_cases(place, 8, SLOW_8)
    return place


def run_cases(place: Path, num_ranks: int, cases: tuple[Case, ...]) -> None:
    jobs = [
        {
            "name": case.name,
            "root": str(place / f"{case.weights}-{case.layout}"),
            "args": [*map(str, RECIPE), *case.args],
        }
        for case in cases
    ]
    (place / "cases.json").write_text(json.dumps(jobs))
    launch(num_ranks, "parallel_worker.py", place / "cases.json", place, timeout_s=500)


def found_by(place: Path, case: Case) -> list[dict[str, Any]]:
    """Give what each rank found."""
    files = sorted(place.glob(f"{case.name}-?.pt"))
    assert len(files) == read_manifest(place / f"{case.weights}-{case.layout}").layout.num_ranks * (
        case.replicate * case.shard * case.tensor
    )
    return [torch.load(file) for file in files]


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
    ranks = found_by(place, case)
    reference = torch.load(place / f"{Case(weights=case.weights, layout='pp=1').name}-0.pt")
    expected, found = whole([reference], "gradients"), whole(ranks, "gradients")
    if HEAD not in expected and HEAD in found:  # the head and the embedding are one weight
        assert found.pop(HEAD).equal(found[EMBEDDING])
    assert found.keys() == expected.keys()
    for fqn, gradient in expected.items():
        assert float((found[fqn] - gradient).norm() / gradient.norm()) <= case.tolerance, fqn
    weights, trained = whole([reference], "weights"), whole(ranks, "weights")
    assert all(float((trained[fqn] - weight).norm() / weight.norm()) < 1e-3 for fqn, weight in weights.items())
    for rank in ranks:
        assert rank["reports"] == ranks[0]["reports"]
        for report, other in zip(rank["reports"], reference["reports"], strict=True):
            assert report[2] == other[2]
            assert report == pytest.approx(other, rel=case.tolerance)


@pytest.mark.parametrize("case", NORMAL, ids=lambda case: case.name)
def test_ranks_that_share_a_stage_train_as_one_rank_does(case: Case, trained: Path) -> None:
    check_against_one_rank(trained, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_4, *SLOW_8], ids=lambda case: case.name)
def test_ranks_that_share_a_stage_train_as_one_rank_does_whole_matrix(case: Case, trained_slow: Path) -> None:
    check_against_one_rank(trained_slow, case)


def planned_nbytes(place: Path, case: Case, stages: list[int], number: int) -> int:
    """Give the bytes of a rank's rows: matrices are cut over tensor-parallel ranks, and then rows over shards.

    Columns that are less than a page apart are read with what lies between.
    """
    manifest = read_manifest(place / f"{case.weights}-{case.layout}")
    sizes, seen = 0, set()
    for stage in (manifest.stages[index] for index in stages):
        for shard in stage.shards:
            for entry in open_shard(place / f"{case.weights}-{case.layout}", shard).tensors:
                assert module_of(entry.name, stage.modules)
                rows = entry.shape[0]
                if len(entry.shape) == 2 and not entry.name.endswith(COLUMNS):
                    rows //= case.tensor
                each = -(-rows // case.shard)  # as torch.chunk deals them out
                own = max(0, min(each, rows - each * (number // case.tensor % case.shard)))
                sizes += own * prod(entry.shape[1:]) * 4
                seen.add(entry.name)
    assert seen
    return sizes


@pytest.mark.parametrize("case", NORMAL, ids=lambda case: case.name)
def test_rank_reads_its_own_rows_and_no_byte_more(case: Case, trained: Path) -> None:
    for number, rank in enumerate(found_by(trained, case)):
        files = {name for name, _, _ in rank["read"]}
        assert {int(name[6:9]) for name in files} == set(rank["stages"])
        data_nbytes = read_nbytes(trained, case, rank)
        assert data_nbytes == planned_nbytes(trained, case, rank["stages"], number)
        if "broadcast" not in case.flags:
            assert data_nbytes == rank["loaded"]
        assert len(set(rank["read"])) == len(rank["read"])


def read_nbytes(place: Path, case: Case, rank: dict[str, Any]) -> int:
    """Give the bytes that a rank read of tensors, headers left out."""
    folder = place / f"{case.weights}-{case.layout}"
    data = (read for read in rank["read"] if read[1] >= header_nbytes(folder / read[0]))
    return sum(end - begin for _, begin, end in data)


def header_nbytes(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_rows_have_no_digest_and_tensors_that_are_sent_on_have_and_are_read_once(trained: Path) -> None:
    rows, sent = (found_by(trained, case) for case in NORMAL[1:3])
    assert all(rank["num_parts"] > 0 for rank in rows)
    assert all(rank["num_parts"] == 0 for rank in sent)
    manifest = read_manifest(trained / "untied-pp=2")
    for stage in manifest.stages:
        assert sum(rank["loaded"] for rank in sent if rank["stages"] == [stage.index]) == stage.nbytes


STEPS = 12
TRAINING = ("--seq-len", 24, "--global-batch", 8, "--lr", 2e-3, "--warmup-steps", 3, "--max-norm", 0.5,
            "--data", "synthetic", "--seed", 7)  # fmt: skip
SHARDED, COPIED, CUT = ("--dp-shard", 2), ("--dp-replicate", 2), ("--tp", 2)


class Runs:
    """Training runs with checkpoints; a run is known by its name."""

    def __init__(self, place: Path) -> None:
        self.place, self.jobs = place, list[dict[str, Any]]()

    def checkpoint(self, name: str, step: int = STEPS) -> Path:
        return self.place / "runs" / name / f"step-{step:06d}"

    def add(self, name: str, root: str, *args: object) -> None:
        home = self.place / "runs" / name
        home.mkdir(parents=True)
        flags = (*TRAINING, "--steps", STEPS, "--checkpoint", home, "--checkpoint-every", 6, "--log-dir", home, *args)
        job = {"root": str(self.place / root), "args": [str(flag) for flag in flags], "log": str(home / "log")}
        self.jobs.append(job)

    def resume(self, name: str, origin: str, root: str, *args: object) -> None:
        self.add(name, root, "--resume", self.checkpoint(origin, 6), *args)

    def go(self) -> None:
        (self.place / "jobs.json").write_text(json.dumps(self.jobs))
        launch(4, "resume_worker.py", self.place / "jobs.json", timeout_s=500)
        self.jobs = []

    def losses(self, name: str) -> dict[int, float]:
        lines = map(json.loads, (self.place / "runs" / name / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def tensors(self, name: str, step: int = STEPS) -> dict[tuple[str, str], torch.Tensor]:
        """Give every tensor of a checkpoint, by kind and FQN, as torch's own reader puts slices together."""
        folder, found = self.checkpoint(name, step), dict[tuple[str, str], torch.Tensor]()
        for shard in read_manifest(folder).shards:
            reader = HuggingFaceStorageReader(str((folder / shard.path).parent))
            known = reader.read_metadata().state_dict_metadata
            state = {fqn: torch.full(it.size, torch.nan) for fqn, it in known.items() if hasattr(it, "size")}
            load(state, storage_reader=reader, no_dist=True)
            found |= {(shard.holds, fqn): tensor for fqn, tensor in state.items()}
        return found


@pytest.fixture(scope="module")
def runs(place: Path) -> Runs:
    runs = Runs(place)
    runs.add("sharded", "tied-pp=2", *SHARDED)
    runs.add("pipeline", "tied-pp=4")
    runs.go()
    runs.resume("sharded again", "sharded", "tied-pp=2", *SHARDED)
    runs.resume("pipeline to copies", "pipeline", "tied-pp=2", *COPIED)
    runs.resume("sharded to pipeline", "sharded", "tied-pp=4")
    runs.resume("sharded to cut", "sharded", "tied-pp=2", *CUT, "--load", "broadcast")
    runs.go()
    return runs


def test_six_steps_and_six_resumed_are_twelve_bit_for_bit_where_stages_are_sharded(runs: Runs) -> None:
    assert {**runs.losses("sharded"), **runs.losses("sharded again")} == runs.losses("sharded")
    expected, found = runs.tensors("sharded"), runs.tensors("sharded again")
    assert expected.keys() == found.keys()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "origin"),
    [("pipeline to copies", "pipeline"), ("sharded to pipeline", "sharded"), ("sharded to cut", "sharded")],
)
def test_training_goes_on_on_other_degrees_with_what_was_saved(name: str, origin: str, runs: Runs) -> None:
    whole_run, resumed = runs.losses(origin), runs.losses(name)
    assert sorted(resumed) == list(range(7, STEPS + 1))
    assert all(loss == pytest.approx(whole_run[step], rel=1e-5) for step, loss in resumed.items())
    expected, found = runs.tensors(origin), runs.tensors(name)
    weights = [key for key in expected if key[0] == "weights"]
    assert all(float((found[key] - expected[key]).norm() / expected[key].norm()) < 1e-3 for key in weights)


def test_sharded_ranks_write_slices_of_their_own_that_torch_reads(runs: Runs) -> None:
    """`Runs.tensors` is torch's reader: it fills what was left NaN, and finds what one pipeline wrote whole."""
    manifest = read_manifest(runs.checkpoint("sharded"))
    for stage in manifest.stages:
        names = sorted(shard.path for shard in stage.shards if shard.holds == "weights")
        assert names == [f"stage-{stage.index:03d}/model-{part:05d}-of-00002.safetensors" for part in (1, 2)]
    sharded, pipeline = runs.tensors("sharded", 6), runs.tensors("pipeline", 6)
    assert sharded.keys() == pipeline.keys()
    assert not any(bool(tensor.isnan().any()) for tensor in sharded.values())
    for key, tensor in pipeline.items():
        assert sharded[key].shape == tensor.shape
        assert float((sharded[key] - tensor).norm() / tensor.norm()) < 1e-3
