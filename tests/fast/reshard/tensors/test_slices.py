"""Slices: copied as they are, merged on request, refused if incomplete."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.slices import Slice
from reshard.copy.engine import hash_tensors
from reshard.tensors.lazy import MemoryFile, read_blocks
from reshard.tensors.slices import merge_slices, pieces_of
from stores.bundles import TensorAt
from tests.builders import Tensor, files_in, flip, pack, read_safetensors, reshard, run, weights_path
from tests.fast.sliced import CUTS, KINDS, cut_up, rewrite_slices, slices_in
from tests.fast.trained import write_trained

UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"
Shards = list[dict[str, tuple[Tensor, list[int], list[int]]]]


def sliced_and_whole(folder: Path, cut: str, layout: str = "pp=2", **config: Any) -> tuple[Path, Path]:
    """Return a checkpoint in slices, and the same one in whole tensors."""
    whole = write_trained(folder, layout, **config)
    sliced = pack(whole, folder / "sliced", layout)
    cut_up(sliced, CUTS[cut])
    return sliced, whole


def tensor_files(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_in(out).items() if name != "manifest.json"}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_grid_of_slices_is_merged_to_the_whole(data: st.DataObject, shape: list[int]) -> None:
    axes = []
    for size in shape:
        cuts = data.draw(st.sets(st.integers(0, size), max_size=4))
        axes.append(list(pairwise(sorted({0, size, *cuts}))))
    values = np.random.default_rng(0).integers(0, 1 << 16, size=shape, dtype="<u2")
    slices = []
    for box in product(*axes):
        part = values[tuple(slice(*ends) for ends in box)].tobytes()
        offset, size = tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box)
        of = Slice(offset=offset, shape=size, whole_shape=tuple(shape))
        slices.append(TensorAt("w", "BF16", size, MemoryFile("f", part), 0, len(part), blake3(part).digest(), of))
    slices.sort(key=lambda one: one.offset)
    whole = merge_slices(slices)
    assert (whole.shape, whole.nbytes, whole.part) == (tuple(shape), 2 * prod(shape), None)
    step = data.draw(st.integers(1, 40))
    assert b"".join(map(bytes, read_blocks(whole, step))) == values.tobytes()


@pytest.mark.parametrize("shape", [(700, 900), (512, 1024)])  # the second ends with a block
@pytest.mark.parametrize("cut", ["rows", "columns", "both"])
@pytest.mark.parametrize("is_known", [True, False], ids=["digests", "none"])
def test_slices_longer_than_a_block_are_merged(cut: str, shape: tuple[int, int], is_known: bool) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, size=shape, dtype="<u4")
    slices = []
    for offset, size in CUTS[cut](values.shape):
        part = values[tuple(slice(begin, begin + n) for begin, n in zip(offset, size, strict=True))].tobytes()
        of = Slice(offset=offset, shape=size, whole_shape=values.shape)
        digest = blake3(part).digest() if is_known else None
        slices.append(TensorAt("w", "F32", size, MemoryFile("f", part), 0, len(part), digest, of))
    merged = merge_slices(slices)
    assert b"".join(map(bytes, read_blocks(merged))) == values.tobytes()
    assert list(hash_tensors([merged, merged])) == [blake3(values.tobytes()).hexdigest()] * 2
    are_ranges = cut == "rows" and not is_known  # rows need no merging, and their bytes are copied as they are
    assert pieces_of(merged) == (tuple(slices) if are_ranges else (merged,))


@pytest.mark.parametrize(
    ("cut", "tied"),
    [
        pytest.param(cut, tied, marks=() if tied == (number % 2 == 0) else pytest.mark.slow)
        for number, cut in enumerate(CUTS)
        for tied in (False, True)
    ],
)
def test_merged_slices_are_the_whole_checkpoint(cut: str, tied: bool, tmp_path: Path) -> None:
    sliced, whole = sliced_and_whole(tmp_path, cut, tie_word_embeddings=tied)
    assert reshard("verify", sliced).code == 0, reshard("verify", sliced).out
    merged = pack(sliced, tmp_path / "merged", "pp=4", "--merge-slices")
    assert tensor_files(merged) == tensor_files(pack(whole, tmp_path / "expected", "pp=4"))
    assert reshard("verify", merged, "--against", sliced).code == 0


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=() if cut in ("rows", "uneven") else pytest.mark.slow) for cut in CUTS]
)
def test_slices_are_copied_as_they_are_and_keep_their_digests(cut: str, tmp_path: Path) -> None:
    sliced, whole = sliced_and_whole(tmp_path, cut)
    four = pack(sliced, tmp_path / "four", "pp=4")
    assert reshard("verify", four, "--against", sliced).code == 0
    assert reshard("verify", four, "--against", whole).code == 0
    before = {(kind, fqn, str(one)) for kind in KINDS for index in range(2) for held in slices_in(sliced, index, kind)
              for fqn, one in held.items()}  # fmt: skip
    after = {(kind, fqn, str(one)) for kind in KINDS for index in range(4) for held in slices_in(four, index, kind)
             for fqn, one in held.items()}  # fmt: skip
    assert after == before
    again = pack(pack(four, tmp_path / "two"), tmp_path / "again", "pp=4")
    assert tensor_files(again) == tensor_files(four)


def test_diff_compares_the_values_of_tensors_that_are_sliced_differently(
    tmp_path: Path, wording: Callable[[str], None]
) -> None:
    sliced, whole = sliced_and_whole(tmp_path, "columns")
    four = pack(sliced, tmp_path / "four", "pp=4")
    ended = run("diff", sliced, whole)
    wording(ended.out)
    ended = reshard("diff", sliced, four, "--json")
    assert (ended.code, ended.json["num_equal"], ended.json["num_resliced"]) == (0, 117, 0)

    def change(shards: Shards) -> None:
        tensor, *where = shards[1][UP]
        shards[1][UP] = (replace(tensor, data=bytes(len(tensor.data))), *where)

    rewrite_slices(sliced, 0, "exp_avg", change)
    ended = reshard("diff", sliced, four, "--json")
    assert (ended.code, ended.json["num_equal"], ended.json["num_moved"]) == (4, 116, 59)
    assert [(one["holds"], one["fqn"]) for one in ended.json["differences"]] == [("exp_avg", UP)]


def test_inspect_shows_the_offsets_of_slices(tmp_path: Path) -> None:
    sliced, _ = sliced_and_whole(tmp_path, "columns")
    lines = [line.split() for line in reshard("inspect", sliced, "--tensors").out.splitlines() if UP in line]
    assert [" ".join(line[2:-1]) for line in lines] == [
        "F32 [24, 8] at [0, 0] of [24, 16]",
        "F32 [24, 8] at [0, 8] of [24, 16]",
    ]
    stored = [one for one in reshard("inspect", sliced, "--tensors", "--json").json["tensors"] if one["fqn"] == UP]
    assert [(one["shape"], one["offset"], one["whole_shape"]) for one in stored] == [
        ([24, 8], [0, 0], [24, 16]),
        ([24, 8], [0, 8], [24, 16]),
    ]


def without_one(shards: Shards) -> None:
    del shards[1][UP]


def twice(shards: Shards) -> None:
    shards[1][UP] = shards[0][UP]


def of_another_dtype(shards: Shards) -> None:
    tensor, *where = shards[1][UP]
    shards[1][UP] = (replace(tensor, dtype="I32"), *where)


def of_another_whole(shards: Shards) -> None:
    tensor, offset, _ = shards[1][UP]
    shards[1][UP] = (tensor, offset, [24, 17])


def beyond_the_whole(shards: Shards) -> None:
    tensor, _, whole = shards[1][UP]
    shards[1][UP] = (tensor, [0, 9], whole)


@pytest.mark.parametrize("kind", ["weights", "exp_avg_sq"])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_one, "shard.inconsistent-slices"),
        (twice, "shard.inconsistent-slices"),
        (of_another_dtype, "shard.inconsistent-slices"),
        (of_another_whole, "shard.inconsistent-slices"),
        (beyond_the_whole, "header.invalid-slices"),
    ],
)
def test_slices_that_are_not_exactly_the_tensor_are_refused_and_nothing_is_written(
    change: Callable[[Shards], None], code: str, kind: str, tmp_path: Path
) -> None:
    sliced, _ = sliced_and_whole(tmp_path, "columns")
    rewrite_slices(sliced, 0, kind, change)
    for verb in (("pack", sliced, "--layout", "pp=4"), ("export", sliced, "--to", "hf")):
        exit_code, found, where = reshard(*verb, "--out", tmp_path / "out", "--json").refusal
        assert (exit_code, found) == (3, code)
        assert f"'{UP}'" in where
        assert not (tmp_path / "out").exists()
    verified = reshard("verify", sliced, "--json")
    assert verified.code == 4
    assert any(f"'{UP}'" in difference["where"] for difference in verified.json["differences"])


@pytest.mark.parametrize("verb", ["export", "pack"])
def test_damage_of_a_slice_is_named(verb: str, tmp_path: Path) -> None:
    sliced, whole = sliced_and_whole(tmp_path, "columns")
    shard = sliced / "stage-001/model-00002-of-00002.safetensors"
    flip(shard)
    args = ("--to", "hf") if verb == "export" else ("--layout", "pp=1", "--merge-slices")
    exit_code, code, where = reshard(verb, sliced, *args, "--out", tmp_path / "out", "--json").refusal
    assert (exit_code, code) == (3, "shard.digest-mismatch")
    assert where.startswith(f"{shard}: '")
    verified = reshard("verify", sliced, "--against", whole, "--json")
    assert verified.code == 4
    assert [difference["where"] for difference in verified.json["differences"]] == [where]


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_reader_loads_a_stage_of_slices(kind: str, tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    sliced, whole = sliced_and_whole(tmp_path, "both")
    four = pack(sliced, tmp_path / "four", "pp=4")
    expected = pack(whole, tmp_path / "expected", "pp=4")
    below = Path("stage-001") / ("" if kind == "weights" else kind)
    at = weights_path(1, 4) if kind == "weights" else below / "model.safetensors"
    tensors = read_safetensors((expected / at).read_bytes())
    state = {fqn: torch.zeros(tensor.shape) for fqn, tensor in tensors.items()}
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        checkpoint.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(str(four / below)), no_dist=True)
    assert {fqn: found.numpy().tobytes() for fqn, found in state.items()} == {
        fqn: tensor.data for fqn, tensor in tensors.items()
    }
