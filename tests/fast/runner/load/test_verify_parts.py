"""Parts of tensors that several ranks have read, verified by who reads the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import InputError
from manifests.slices import Slice
from runner.load.fill import BLOCK_NBYTES, ranges_of
from runner.load.verify_parts import PartRead, ToVerify, share_parts, verify_parts
from stores.bundles import TensorAt
from stores.local import LocalFile

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
