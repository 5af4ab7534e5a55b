"""Boxes of stored tensors: which bytes they are, read into memory however it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manifests.slices import Slice
from runner.load import fill as regions
from runner.load.fill import PinnedBlocks, blocks_of, fill, ranges_of

POSITION = 40  # of a stored tensor in its file


@dataclass
class Memory:
    """A file's bytes, and which of them were read."""

    data: bytes
    read: list[tuple[int, int]] = field(default_factory=list)

    def read_into(self, part: memoryview, position: int) -> None:
        self.read.append((position, len(part)))
        part[:] = self.data[position : position + len(part)]

    def close(self) -> None:
        """Nothing is open."""


def stored(shape: Sequence[int]) -> tuple[torch.Tensor, Memory]:
    tensor = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(tuple(shape))
    return tensor, Memory(bytes(POSITION) + tensor.reshape(-1).numpy().tobytes())


def cut(tensor: torch.Tensor, region: Slice) -> torch.Tensor:
    return tensor[tuple(slice(begin, end) for begin, end in zip(region.offset, region.end, strict=True))]


@st.composite
def boxes_in(draw: Any) -> Slice:
    whole = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    offset = tuple(draw(st.integers(0, size - 1)) for size in whole)
    shape = tuple(draw(st.integers(1, size - begin)) for size, begin in zip(whole, offset, strict=True))
    return Slice(offset=offset, shape=shape, whole_shape=whole)


@pytest.fixture(params=[4096, 8], ids=["page", "two elements"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that small tensors reach."""
    monkeypatch.setattr(regions, "BLOCK_NBYTES", 64)
    monkeypatch.setattr(regions, "_GAP_NBYTES", request.param)


# One element of a row: contiguous for torch, and with a stride all the same.
@example(Slice(offset=(0, 0), shape=(2, 1), whole_shape=(2, 3)), torch.float32, True)
@settings(deadline=None)
@given(region=boxes_in(), dtype=st.sampled_from([torch.float32, torch.float64]), is_turned=st.booleans())
@pytest.mark.usefixtures("small_blocks")
def test_box_is_filled_from_its_own_bytes(region: Slice, dtype: torch.dtype, is_turned: bool) -> None:
    tensor, memory = stored(region.whole_shape)
    target = torch.empty(region.shape[::-1] if is_turned else region.shape, dtype=dtype)
    target = target.permute(tuple(reversed(range(target.dim())))) if is_turned else target
    for _ in fill(target, torch.float32, memory, POSITION, region, None, PinnedBlocks(target.device)):
        pass
    assert target.equal(cut(tensor, region).to(dtype))
    ends = [begin + length for begin, length in memory.read]
    assert all(begin >= end for (begin, _), end in zip(memory.read[1:], ends, strict=False))  # no byte twice


def test_rows_are_one_range_and_columns_are_read_with_less_than_a_page_between_them() -> None:
    rows = Slice(offset=(2, 0), shape=(3, 6), whole_shape=(8, 6))
    (block,) = blocks_of((8, 6), rows, 4)
    assert (block.begin, block.nbytes) == (2 * 24, 3 * 24)
    near = Slice(offset=(0, 1024), shape=(4, 1024), whole_shape=(4, 2047))
    assert sum(block.nbytes for block in blocks_of((4, 2047), near, 4)) == 4 * 2047 * 4
    far = Slice(offset=(0, 1024), shape=(4, 1024), whole_shape=(4, 2048))
    found = [(block.begin, block.nbytes) for block in blocks_of((4, 2048), far, 4)]
    assert found == [(8192 * row + 4096, 4096) for row in range(4)]


@pytest.mark.parametrize("most_nbytes", [1 << 20, 4 << 20])
def test_larger_blocks_have_the_same_bytes(most_nbytes: int) -> None:
    region = Slice(offset=(0, 0, 0), shape=(2, 1024, 1024), whole_shape=(2, 1025, 1024))
    blocks = list(blocks_of(region.whole_shape, region, 2, most_nbytes))
    assert sum(block.nbytes for block in blocks) == sum(
        end - begin for begin, end in ranges_of(region.whole_shape, region, 2)
    )
    assert max(block.nbytes for block in blocks) <= most_nbytes
