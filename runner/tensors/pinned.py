"""Blocks that stored bytes are read into when they cannot be read directly into their destination."""

from __future__ import annotations

import torch

from runner.tensors.regions import BLOCK_NBYTES

_NUM_PINNED = 4  # copies to a GPU in flight while the next block is read and hashed


class PinnedBlocks:
    """One thread's blocks for copies to `device`: one for the CPU, several pinned blocks, used in turn, for a GPU.

    A block is taken, filled, copied from asynchronously, and marked as sent; it is reused once the copy has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._blocks: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None] * (_NUM_PINNED if self._is_cuda else 1)
        self._next = 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return room for `count` elements, at most a block."""
        if len(self._blocks) == self._next:
            self._blocks.append(torch.empty(BLOCK_NBYTES, dtype=torch.uint8, pin_memory=self._is_cuda))
        if (copied := self._copied[self._next]) is not None:
            copied.synchronize()
        return self._blocks[self._next].view(dtype)[:count]

    def sent(self) -> None:
        """Note that the copy from the last block taken has been enqueued."""
        if self._is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
            self._copied[self._next] = copied
        self._next = (self._next + 1) % len(self._copied)

    def finish(self) -> None:
        """Wait for every copy."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()
