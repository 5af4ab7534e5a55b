"""Parts of Hugging Face tensors in this rank's memory, their bytes and dtypes, and memory for weights in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from manifests.digest import digest_bytes
from manifests.slices import Slice

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,  # of tables that are not trained, such as DeepSeek-V4's of tokens and experts
    "I32": torch.int32,
}
FLAG_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_LEAST_NBYTES = 4 << 20  # smaller tensors would leave huge pages mostly empty


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A region of a Hugging Face tensor; writing to `memory` writes that part of the parameter or optimizer state.

    Shapes: `memory` is the region, with as many dimensions as `shape`; `offset` is where it begins.
    """

    fqn: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    memory: torch.Tensor  # a view, with any strides

    @property
    def part(self) -> Slice:
        return Slice(offset=self.offset, shape=tuple(self.memory.shape), whole_shape=self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == tuple(self.memory.shape)

    @property
    def is_first(self) -> bool:
        """Whether this part begins where its tensor does: exactly one part does."""
        return not any(self.offset)

    def view(self, region: Slice) -> Piece:
        """Return the part of this piece in a region of the same tensor that is within it."""
        memory = self.memory
        for dim, (begin, first, count) in enumerate(zip(region.offset, self.offset, region.shape, strict=True)):
            memory = memory.narrow(dim, begin - first, count)
        return replace(self, offset=region.offset, memory=memory)


def whole_pieces(tensors: Mapping[str, torch.Tensor]) -> tuple[Piece, ...]:
    """Return whole tensors, by FQN, as pieces."""
    return tuple(
        Piece(fqn=fqn, shape=tuple(memory.shape), offset=(0,) * memory.dim(), memory=memory.detach())
        for fqn, memory in tensors.items()
    )


def join_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return one piece for each FQN; pieces of one FQN in separate memory are copied into one."""
    parts_of: dict[str, list[Piece]] = {}
    for piece in pieces:
        parts_of.setdefault(piece.fqn, []).append(piece)
    return tuple(parts[0] if len(parts) == 1 else _joined(parts) for parts in parts_of.values())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that are in a model's `state_dict`, by its names."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    # A contiguous view of one element may have any stride, which `view` does not accept.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's elements in order, with any strides and on any device."""
    return digest_bytes(bytes_of(tensor.detach().cpu().contiguous()))


def readable_as(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the stored dtypes that can be read as this one: floating point as floating point, integers as integers."""
    is_float = dtype.is_floating_point
    return tuple(name for name, stored in STORED_DTYPES.items() if stored.is_floating_point == is_float)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let a block create tensors in this dtype where it names none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory on `device` of this shape and dtype; large CPU tensors are in huge pages.

    With small pages, page faults take longer than reading the weights.
    """
    if device.type != "cpu" or isinstance(tensor, DTensor) or tensor.nbytes < _LEAST_NBYTES:
        return torch.empty_like(tensor, device=device)
    # The tensor keeps the mapping alive, and frees it.
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def _joined(parts: list[Piece]) -> Piece:
    offset = tuple(map(min, zip(*(piece.part.offset for piece in parts), strict=True)))
    end = tuple(map(max, zip(*(piece.part.end for piece in parts), strict=True)))
    shape = [last - first for first, last in zip(offset, end, strict=True)]
    memory = torch.empty(shape, dtype=parts[0].memory.dtype, device=parts[0].memory.device)
    assert memory.numel() == sum(piece.memory.numel() for piece in parts), "a rank's parts of a tensor form one region"
    joined = replace(parts[0], offset=offset, memory=memory)
    for piece in parts:
        joined.view(piece.part).memory.copy_(piece.memory)
    return joined
