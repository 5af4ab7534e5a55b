"""Weights and optimizer state are loaded on the ranks of any layout, from a checkpoint of any other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from manifests.errors import ShardError, UserError
from manifests.index import replicas_elsewhere
from manifests.models import module_of
from manifests.paths import shard_path
from manifests.schema import MOMENTS, WEIGHTS, Holds
from runner.bundle.packed import Packed, open_packed
from runner.load.load import load_tensors
from runner.tensors.local_shard import whole_pieces
from stores.bundles import Bundles
from tests.builders import EMBEDDING, HEAD, Tensor, flip, llama_config, pack, random_tensors
from tests.fast.reshard.checks.test_swapped_outputs import CHANGES, contents, place
from tests.fast.trained import random_moments, read_moments, write_moments, write_trained

UP = "model.layers.3.mlp.up_proj.weight"
LAYOUTS = ("pp=1", "pp=2", "pp=4", "pp=2,vpp=2", "pp=2,style=v", "pp=3")
KINDS: tuple[Holds, ...] = (WEIGHTS, *MOMENTS)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Packed]:
    """The same weights and optimizer state on every layout."""
    folder = tmp_path_factory.mktemp("load")
    trained = write_trained(folder, "pp=2", tie_word_embeddings=request.param)
    for layout in LAYOUTS:
        pack(trained, folder / layout, layout)
    return {layout: open_packed(folder / layout) for layout in LAYOUTS}


def expected_of(packed: Packed) -> dict[Holds, dict[str, Tensor]]:
    config = llama_config(tie_word_embeddings=packed.config["tie_word_embeddings"])
    weights = random_tensors(config, dtypes=["F32"])
    return {WEIGHTS: {HEAD: weights[EMBEDDING], **weights}, **random_moments(config)}  # type: ignore[dict-item]


def room_for(packed: Packed, rank: int) -> dict[str, torch.Tensor]:
    """Return empty tensors for all weights of a rank, replicas of tied weights too."""
    stages = packed.manifest.placement.stages_on(rank)
    modules = {module for stage in stages for module in packed.stage_modules[stage]}
    return {fqn: torch.full(shape, torch.nan) for fqn, shape in packed.shape.tensors.items() if module_of(fqn, modules)}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("written", LAYOUTS)
@pytest.mark.parametrize("trained", LAYOUTS)
def test_every_rank_loads_its_own_from_any_layout(written: str, trained: str, checkpoints: dict[str, Packed]) -> None:
    origin, launched = checkpoints[written], checkpoints[trained]
    expected, bundles = expected_of(origin), Bundles(origin.manifest, origin.root)
    seen = set()
    for rank in range(launched.manifest.layout.num_ranks):
        for holds in KINDS:
            tensors = room_for(launched, rank)
            report = load_tensors(whole_pieces(tensors), bundles, origin.shape, holds)
            assert report.num_tensors <= len(tensors)
            assert all(bytes_of(tensor) == expected[holds][fqn].data for fqn, tensor in tensors.items())
            seen |= tensors.keys()
    assert seen == origin.shape.tensors.keys()


@pytest.mark.parametrize("trained", ["pp=4", "pp=2", "pp=2,vpp=2"])
def test_rank_opens_only_the_stages_that_hold_its_own(
    trained: str, checkpoints: dict[str, Packed], tmp_path: Path
) -> None:
    launched, held = checkpoints[trained], checkpoints["pp=2"].stage_modules
    for rank in range(launched.manifest.layout.num_ranks):
        stages = launched.manifest.placement.stages_on(rank)
        own = {module for stage in stages for module in launched.stage_modules[stage]}
        copy = tmp_path / f"rank{rank}"
        shutil.copytree(checkpoints["pp=2"].root, copy)
        for stage in (stage for stage, modules in enumerate(held) if own.isdisjoint(modules)):
            shutil.rmtree(copy / f"stage-{stage:03d}")
        origin = open_packed(copy)
        for holds in KINDS:
            tensors = room_for(launched, rank)
            load_tensors(whole_pieces(tensors), Bundles(origin.manifest, copy), origin.shape, holds)
            assert not any(tensor.isnan().all() for tensor in tensors.values())


def test_tied_bytes_are_read_once(checkpoints: dict[str, Packed]) -> None:
    origin = checkpoints["pp=1"]
    is_tied = bool(origin.manifest.ties)
    tensors = room_for(origin, 0)
    report = load_tensors(whole_pieces(tensors), Bundles(origin.manifest, origin.root), origin.shape)
    assert report.num_tensors == len(tensors) - is_tied
    assert (bytes_of(tensors[EMBEDDING]) == bytes_of(tensors[HEAD])) == is_tied


def lose(tensors: dict[str, Tensor]) -> None:
    del tensors[UP]


def stray(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.mlp.side_proj.weight"] = Tensor(dtype="F32", shape=(1,), data=b"lost")


def move(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors[UP]


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = Tensor(dtype="F32", shape=(16, 24), data=tensors[UP].data)


def retype(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = Tensor(dtype="I32", shape=(24, 16), data=tensors[UP].data)


@pytest.mark.parametrize(
    ("change", "where", "code"),
    [
        (lose, ": stages[1]", "shard.missing-tensor"),
        (stray, ": stages[1]", "shard.unexpected-tensor"),
        (move, ": stages[1]", "shard.unexpected-tensor"),
        (reshape, f"/stage-001/exp_avg/model.safetensors: '{UP}'.shape", "shard.wrong-shape"),
        (retype, f"/stage-001/exp_avg/model.safetensors: '{UP}'.dtype", "shard.wrong-dtype"),
    ],
)
def test_optimizer_state_that_is_not_the_stages_is_refused(
    change: Callable[[dict[str, Tensor]], None], where: str, code: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out = write_trained(tmp_path, "pp=2")
    tensors = read_moments(out, 1, "exp_avg")
    change(tensors)
    write_moments(out, 1, "exp_avg", tensors)
    origin = open_packed(out)
    with pytest.raises(ShardError) as error:
        load_tensors(whole_pieces(room_for(origin, 1)), Bundles(origin.manifest, out), origin.shape, "exp_avg")
    assert (error.value.where, error.value.code) == (f"{out}{where}", code)
    wording(str(error.value))


def test_flipped_bit_of_optimizer_state_is_named(tmp_path: Path) -> None:
    out = write_trained(tmp_path, "pp=2")
    shard = out / "stage-001/exp_avg_sq/model.safetensors"
    flip(shard, -1, 128)
    origin = open_packed(out)
    with pytest.raises(ShardError) as error:
        load_tensors(whole_pieces(room_for(origin, 1)), Bundles(origin.manifest, out), origin.shape, "exp_avg_sq")
    assert (error.value.where, error.value.code) == (f"{shard}: 'model.norm.weight'", "shard.digest-mismatch")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_finds_one_kind_in_each_folder(checkpoints: dict[str, Packed]) -> None:
    origin = checkpoints["pp=2"]
    expected = expected_of(origin)
    for holds in KINDS:
        folder = origin.root if holds == WEIGHTS else (origin.root / shard_path(1, holds)).parent
        modules = origin.stage_modules[1]
        found = {fqn: torch.zeros(s) for fqn, s in origin.shape.tensors.items() if module_of(fqn, modules)}
        if holds == WEIGHTS:  # of the whole model, each tensor once
            found = {fqn: found[fqn] for fqn in found.keys() - replicas_elsewhere(origin.manifest.ties)}
        load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        assert all(bytes_of(tensor) == expected[holds][fqn].data for fqn, tensor in found.items())


def test_file_that_is_read_though_the_manifest_does_not_list_it_is_named(tmp_path: Path) -> None:
    out = write_trained(tmp_path, "pp=2")
    for name in ("tokenizer_config.json", "notes.json"):
        (out / name).write_text("{}")
    assert open_packed(out).unnamed == ("tokenizer_config.json",)


# Packed folders renamed, copied and swapped, as ranks load them: refused, or the right tensors.


__all__ = ["place"]  # a fixture


def loaded(folder: Path) -> dict[tuple[str, str], bytes]:
    """Return the bytes of all weights and optimizer state, as a rank of pp=1 loads them."""
    packed, tensors_by_kind = open_packed(folder), {}
    for holds in (WEIGHTS, *MOMENTS):
        tensors = {fqn: torch.empty(shape) for fqn, shape in packed.shape.tensors.items()}
        load_tensors(whole_pieces(tensors), packed.bundles, packed.shape, holds)
        tensors_by_kind |= {(holds, fqn): tensor.numpy().tobytes() for fqn, tensor in tensors.items()}
    return tensors_by_kind


def expected_of_folder(tensors: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], bytes]:
    return {key: torch.frombuffer(bytearray(tensor.data), dtype=DTYPES[tensor.dtype]).float().numpy().tobytes()
            for key, tensor in tensors.items()}  # fmt: skip


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def test_renamed_folder_loads_what_it_has(place: Path, tmp_path: Path) -> None:
    out = shutil.copytree(place / "model" / "trained", tmp_path / "step-000099")
    found, expected = loaded(out), expected_of_folder(contents(out))
    assert found == {key: expected[key] for key in found}


@pytest.mark.parametrize("name", CHANGES)
def test_swapped_folder_is_refused_or_loads_the_right_tensors(name: str, place: Path, tmp_path: Path) -> None:
    out = shutil.copytree(place / "model" / "trained", tmp_path / "step-000099")
    expected = expected_of_folder(contents(out))
    CHANGES[name](out, place / "other" / "trained")
    codes, tensors = set(), {}
    try:
        tensors = loaded(out)
    except UserError as refusal:
        codes.add(refusal.code)
    assert {code.partition(".")[0] for code in codes} <= {"shard", "manifest", "source"}
    assert tensors == {key: expected[key] for key in tensors}
