"""Checkpoints that several ranks wrote in slices, read whole and in whatever other parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import InputError
from manifests.models import module_of
from manifests.paths import shard_path
from manifests.slices import Slice
from manifests.store import open_shard
from runner.bundle.packed import Packed, open_packed
from runner.load.fill import BLOCK_NBYTES, ranges_of
from runner.load.load import load_tensors
from runner.load.verify_parts import PartRead, ToVerify, share_parts, verify_parts
from runner.tensors.local_shard import Piece, join_pieces, whole_pieces
from stores.bundles import Bundles, TensorAt
from stores.local import LocalFile
from tests.builders import flip
from tests.fast.runner.tiny import write_shard
from tests.fast.trained import write_trained

STAGE = 1


@pytest.fixture
def whole(tmp_path: Path) -> Packed:
    return open_packed(write_trained(tmp_path, "pp=2"))


def weights_of(packed: Packed) -> dict[str, torch.Tensor]:
    modules = frozenset(packed.stage_modules[STAGE])
    tensors = {fqn: torch.empty(shape) for fqn, shape in packed.shape.tensors.items() if module_of(fqn, modules)}
    load_tensors(whole_pieces(tensors), Bundles(packed.manifest, packed.root), packed.shape)
    return tensors


def cut(tensor: torch.Tensor, rows: int, columns: int) -> Iterator[Slice]:
    """Cut a tensor as ranks do that share it: rows among some, and columns of matrices among others."""
    counts = [rows, *([columns] if tensor.dim() == 2 else [])]
    for place in product(*map(range, counts)):
        bounds = [
            (size * number // count, size * (number + 1) // count)
            for size, number, count in zip(tensor.shape, place, counts, strict=True)
        ]
        yield Slice(
            offset=tuple(begin for begin, _ in bounds),
            shape=tuple(end - begin for begin, end in bounds),
            whole_shape=tuple(tensor.shape),
        )


def in_slices(packed: Packed, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> Packed:
    """Write a stage's weights anew, in shards of slices."""
    ranks: list[list[Piece]] = [[] for _ in range(rows * columns)]
    for piece in whole_pieces(tensors):
        for number, box in enumerate(cut(piece.memory, rows, columns)):
            ranks[number].append(piece.view(box))
    shards = tuple(
        write_shard(pieces, packed.root, shard_path(STAGE, number=number, of=len(ranks)))
        for number, pieces in enumerate(ranks)
        if pieces
    )
    stages = list(packed.manifest.stages)
    stages[STAGE] = replace(stages[STAGE], shards=shards)
    manifest = replace(packed.manifest, stages=tuple(stages))
    return replace(packed, read=replace(packed.read, manifest=manifest))


@pytest.mark.parametrize("stored", [(1, 1), (2, 1), (2, 2), (3, 1), (5, 4)])
@pytest.mark.parametrize("wanted", [(1, 1), (2, 2), (3, 2)])
def test_slices_are_read_into_whatever_is_wanted(
    stored: tuple[int, int], wanted: tuple[int, int], whole: Packed
) -> None:
    expected = weights_of(whole)
    packed = in_slices(whole, expected, *stored)
    pieces = [
        replace(piece.view(box), memory=torch.full(box.shape, torch.nan))
        for piece in whole_pieces(expected)
        for box in cut(piece.memory, *wanted)
    ]
    report = load_tensors(pieces, Bundles(packed.manifest, packed.root), packed.shape)
    assert {piece.fqn: piece.memory for piece in join_pieces(pieces)}.keys() == expected.keys()
    for piece in join_pieces(pieces):
        assert piece.is_whole
        bits, expected_bits = (tensor.view(torch.int32) for tensor in (piece.memory, expected[piece.fqn]))
        assert bits.equal(expected_bits)  # random bytes may be no numbers
    assert report.num_tensors == len(expected)
    assert (report.num_parts == 0) == (stored == wanted or wanted == (1, 1))


def test_a_slice_that_is_missing_is_named(whole: Packed) -> None:
    packed = in_slices(whole, weights_of(whole), 2, 1)
    stages = list(packed.manifest.stages)
    stages[STAGE] = replace(stages[STAGE], shards=stages[STAGE].shards[:1])
    found = Bundles(replace(packed.manifest, stages=tuple(stages)), packed.root)
    norm = {"model.norm.weight": torch.empty(packed.shape.tensors["model.norm.weight"])}
    with pytest.raises(InputError) as error:
        load_tensors(whole_pieces(norm), found, packed.shape)
    assert error.value.code == "shard.inconsistent-slices"


@pytest.mark.parametrize("wanted", [(2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_flipped_bit_is_found_by_who_reads_a_part_whether_or_not_it_is_there(
    wanted: tuple[int, int], is_own: bool, whole: Packed
) -> None:
    shard = next(shard for shard in whole.manifest.stages[STAGE].shards if shard.holds == "weights")
    header = open_shard(whole.root, shard)
    entry = max(header.tensors, key=lambda entry: entry.nbytes)
    tensor = torch.empty(entry.shape)
    box = next(cut(tensor, *wanted))  # the first: it has the first byte, and not the last
    flip(whole.root / shard.path, header.nbytes + (entry.begin if is_own else entry.end - 1), 64)
    (piece,) = whole_pieces({entry.name: tensor})
    with pytest.raises(InputError) as error:
        load_tensors([piece.view(box)], Bundles(whole.manifest, whole.root), whole.shape)
    assert (error.value.code, error.value.where) == (
        "shard.digest-mismatch",
        f"{whole.root / shard.path}: {entry.name!r}",
    )


def test_a_flipped_bit_of_a_slice_is_named_by_who_reads_all_of_it(whole: Packed) -> None:
    packed = in_slices(whole, weights_of(whole), 2, 1)
    shard = packed.root / packed.manifest.stages[STAGE].shards[1].path
    flip(shard, -1, 128)
    tensors = {fqn: torch.empty_like(tensor) for fqn, tensor in weights_of(whole).items()}
    with pytest.raises(InputError) as error:
        load_tensors(whole_pieces(tensors), Bundles(packed.manifest, packed.root), packed.shape)
    assert error.value.code == "shard.digest-mismatch"
    assert error.value.where.startswith(f"{shard}: '")


# Parts of tensors that several ranks have read, verified by who reads the whole.


ROWS, COLUMNS = 700, 1200  # of two bytes: more than one block, and rows whose halves are less than a page apart
DATA = Random(0).randbytes(2 * ROWS * COLUMNS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> TensorAt:
    file = tmp_path_factory.mktemp("parts") / "shard"
    file.write_bytes(b"header" + DATA)
    assert len(DATA) > BLOCK_NBYTES
    return TensorAt("w", "BF16", (ROWS, COLUMNS), LocalFile(file), 6, len(DATA), blake3(DATA).digest())


def box_of(offset: tuple[int, int], shape: tuple[int, int]) -> Slice:
    return Slice(offset=offset, shape=shape, whole_shape=(ROWS, COLUMNS))


def read(at: TensorAt, region: Slice) -> PartRead:
    """Return the part as who reads its ranges hashes it."""
    hasher = blake3()
    for begin, end in ranges_of(at.shape, region, 2):
        hasher.update(DATA[begin:end])
    return PartRead(at=at, region=region, digest=hasher.hexdigest())


@given(data=st.data())
def test_parts_are_as_who_reads_the_whole_finds_them(stored: TensorAt, data: st.DataObject) -> None:
    regions = []
    for _ in range(data.draw(st.integers(1, 3))):
        first, left = data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(0, COLUMNS - 1))
        shape = data.draw(st.integers(1, ROWS - first)), data.draw(st.integers(1, COLUMNS - left))
        regions.append(box_of((first, left), shape))
    assert verify_parts(share_parts([read(stored, region) for region in regions])) == len(DATA)


def test_a_rank_that_read_other_bytes_is_found(stored: TensorAt) -> None:
    own, other = read(stored, box_of((0, 0), (10, COLUMNS))), read(stored, box_of((10, 0), (10, COLUMNS)))
    told = ({own.region: own.digest}, {other.region: own.digest})
    with pytest.raises(InputError) as error:
        verify_parts([ToVerify(at=stored, parts=told)])
    assert (error.value.code, error.value.where) == ("shard.readings-differ", f"{stored.file}: 'w'")


def test_a_damaged_tensor_is_found_whatever_its_parts_are(stored: TensorAt, tmp_path: Path) -> None:
    damaged = bytearray(b"header" + DATA)
    damaged[-1] ^= 1
    (tmp_path / "shard").write_bytes(damaged)
    part = read(replace(stored, file=LocalFile(tmp_path / "shard")), box_of((0, 0), (1, 1)))
    with pytest.raises(InputError) as error:
        verify_parts(share_parts([part]))
    assert error.value.code == "shard.digest-mismatch"


def test_parts_of_original_files_have_nothing_to_be_verified_by(stored: TensorAt) -> None:
    assert share_parts([read(replace(stored, blake3=None), box_of((0, 0), (1, 1)))]) == []
