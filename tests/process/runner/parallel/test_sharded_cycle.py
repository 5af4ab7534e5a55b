"""Checkpoints that ranks wrote in slices, through every command that a user has for them, and back into training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from manifests.schema import WEIGHTS
from stores.open import open_manifest
from tests.builders import pack, reshard, run
from tests.process.runner.parallel.test_parallel import MIDDLE, STEPS, Runs, pack_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch's reader in one process
]

# By name: the model, and how the two ranks of each of its two stages share it.
SHARED = {"sharded": ("qwen3-moe", ("--dp-shard", 2)), "cut": ("tied", ("--tp", 2))}
NAMES = tuple(SHARED)
WAYS = ("sliced", "merged")  # how a checkpoint is packed for four stages


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("cycle"))
    for name, (model, flags) in SHARED.items():
        pack_model(runs.place, model)
        runs.add(name, f"{model}-pp=2", *flags)
    runs.go()
    for name in NAMES:
        for way in WAYS:
            merge = ("--merge-slices",) if way == "merged" else ()
            pack(runs.checkpoint(name, MIDDLE), cut(runs, name, way), "pp=4", *merge)
            runs.add(f"{name} {way}", cut(runs, name, way).name, "--resume", "auto")
    runs.go()
    for name, (model, _) in SHARED.items():
        runs.resume(f"{name} alone", name, f"{model}-pp=1")
    runs.go(1)
    return runs


def cut(runs: Runs, name: str, way: str) -> Path:
    return runs.place / f"{name}-{way}"


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_of_slices_is_verified_and_cut_anew_without_a_change(name: str, runs: Runs) -> None:
    parent = runs.checkpoint(name, MIDDLE)
    assert reshard("verify", parent).code == 0
    for way in WAYS:
        assert reshard("verify", cut(runs, name, way)).code == 0
        compared = reshard("diff", parent, cut(runs, name, way), "--json")
        assert (compared.code, compared.json["differences"]) == (0, []), compared.out
    assert reshard("verify", cut(runs, name, "sliced"), "--against", parent).code == 0


@pytest.mark.parametrize("name", NAMES)
def test_merged_slices_are_the_tensors_that_torchs_reader_puts_together(name: str, runs: Runs) -> None:
    expected, folder = runs.tensors(name, MIDDLE), cut(runs, name, "merged")
    found = dict[tuple[str, str], torch.Tensor]()
    for shard in open_manifest(folder).manifest.shards:
        with safe_open(folder / shard.path, "pt") as file:
            found |= {(shard.holds, fqn): file.get_tensor(fqn) for fqn in file.keys()}  # noqa: SIM118
    assert expected.keys() == found.keys()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("origin", ["itself", *WAYS])
def test_export_loads_in_transformers_with_the_same_weights(name: str, origin: str, runs: Runs, tmp_path: Path) -> None:
    folder = runs.checkpoint(name, MIDDLE) if origin == "itself" else cut(runs, name, origin)
    run("export", folder, "--to", "hf", "--out", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")  # experts, that transformers has in one tensor, get their names back
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        found = {fqn: file.get_tensor(fqn) for fqn in file.keys()}  # noqa: SIM118
    weights = {fqn: tensor for (holds, fqn), tensor in runs.tensors(name, MIDDLE).items() if holds == WEIGHTS}
    assert weights.keys() - found.keys() <= {"lm_head.weight"}  # which is tied
    assert all(weights[fqn].equal(tensor) for fqn, tensor in found.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", [*WAYS, "alone"])
def test_training_goes_on_on_four_stages_and_on_one(name: str, way: str, runs: Runs) -> None:
    expected, found = runs.losses(name), runs.losses(f"{name} {way}")
    assert sorted(found) == list(range(MIDDLE + 1, STEPS + 1))
    assert all(loss == pytest.approx(expected[step], rel=1e-5) for step, loss in found.items())


def test_both_ways_to_four_stages_are_the_same_training(runs: Runs) -> None:
    for name in NAMES:
        assert runs.losses(f"{name} sliced") == runs.losses(f"{name} merged")
        last = [runs.checkpoint(f"{name} {way}") for way in WAYS]
        assert reshard("diff", *last).code == 0
