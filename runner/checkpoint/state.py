"""The training state of a rank as a checkpoint stores it: its pieces, their shards, and copies in host memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from math import prod
from operator import not_

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from manifests.command.sizes import show_bytes
from manifests.index import MAX_SHARD_NBYTES, is_indexed, replicas_elsewhere, split_by_size
from manifests.optimizer_state import kinds_of
from manifests.paths import replicas_path, root_shard_path, shard_path
from manifests.schema import WEIGHTS, Holds, StateKind, TieGroup
from manifests.slices import Slice
from runner.distributed.fail_together import ExhaustedError, errors_of_rank, from_all_ranks
from runner.distributed.world import exchange_device
from runner.pipeline.chunk import StageChunk, hf_constants
from runner.tensors.dtensor import local_of, local_regions, whole_of
from runner.tensors.local_shard import Piece, empty_like, join_pieces
from runner.training.mixed_precision import master_of
from runner.training.optimizer import Optimizer
from runner.training.ties import Tie

_CPU = torch.device("cpu")
_SLAB_NBYTES, _ALIGNMENT = 1 << 30, 64
_LEAST_PINNED_NBYTES = 4 << 20  # smaller memory is of malloc, and CUDA locks a page once
_GATHERED_NBYTES, _SLICE_NBYTES = 1 << 30, 256 << 20  # see Note [Large parameters]
_PORTABLE, _NO_MEMORY = 1, 2  # cudaHostRegisterPortable, cudaErrorMemoryAllocation
_HINT = (
    "copies of the state of all ranks on a node must fit into its memory, for --publish two copies of their weights; "
    "--checkpoint-sync needs none"
)
# By stage, then by kind; of one kind, a piece for each Hugging Face FQN.
Held = Mapping[int, Mapping[Holds, tuple[Piece, ...]]]
_Region = tuple[torch.Tensor, tuple[int, ...]]  # of a tensor, and its offset
_Key = tuple[int, Holds]  # of a stage and a kind
_Chosen = Callable[[torch.Tensor], bool]
Divide = Callable[[int, Holds, Sequence[Piece]], list[list[Piece]]]  # the pieces of a stage and a kind, into shards


def undivided(stage: int, holds: Holds, pieces: Sequence[Piece]) -> list[list[Piece]]:
    return [list(pieces)] if pieces else []


def held_weights(
    chunks: Sequence[StageChunk], groups: Iterable[TieGroup], is_written_here: _Chosen = lambda weight: True
) -> Held:
    """Return a rank's weights, including those that are not trained; a tied replica on its owner's stage is left out.

    `is_written_here` chooses one of the ranks that have the same part of a parameter.
    """

    def regions(weight: nn.Parameter) -> Iterable[_Region]:
        is_here = is_written_here(weight) and local_of(master_of(weight)).numel()
        return local_regions(master_of(weight)) if is_here else ()

    return _weights(chunks, groups, regions, constants=is_written_here)


def whole_weights(
    chunks: Sequence[StageChunk],
    groups: Iterable[TieGroup],
    *,
    writer: int | None,
    num_writers: int = 1,
    sharing: dist.ProcessGroup | None = None,
) -> Held:
    """Return whole weights of a rank's stages, gathered from the ranks that share them, in host memory.

    Every one of these ranks, the group `sharing`, calls this, and gets a part of the tensors of about equal bytes if it
    is a `writer`: a number below `num_writers`. The others get none. As `held_weights` otherwise.
    """
    nbytes, writers = [0] * num_writers, dict[str, int]()

    def choose(piece: Piece) -> Piece | None:
        chosen = writers.setdefault(piece.fqn, nbytes.index(min(nbytes)))
        nbytes[chosen] += piece.memory.nbytes
        if chosen != writer:
            return None
        memory = piece.memory.cpu()
        if num_writers > 1 and memory.untyped_storage().nbytes() > memory.nbytes:
            memory = memory.clone()  # a view would keep what others write
        return replace(piece, memory=memory)

    def regions(weight: nn.Parameter) -> Iterable[_Region]:
        return _regions_of_whole(master_of(weight), sharing)

    return _weights(chunks, groups, regions, constants=lambda _: True, choose=choose)


def held_state(
    chunks: Sequence[StageChunk],
    groups: Iterable[TieGroup],
    ties: Sequence[Tie],
    optimizer: Optimizer,
    is_written_here: _Chosen = lambda weight: True,
) -> Held:
    """Return a rank's weights and optimizer state; members of a tie group have that of their leader."""
    leaders = {id(member): tie.leader for tie in ties for member in tie.members}
    left_out = _left_out(groups)

    def pieces(chunk: StageChunk, kind: StateKind) -> tuple[Piece, ...]:
        state = optimizer.state_pieces(chunk, kind, leaders, is_written_here)
        return join_pieces(piece for piece in state if piece.fqn not in left_out)

    weights, kinds = held_weights(chunks, groups, is_written_here), kinds_of(optimizer.plan)
    return {
        chunk.stage: {**weights[chunk.stage], **{kind.name: pieces(chunk, kind) for kind in kinds}} for chunk in chunks
    }


def nbytes_of(state: Held) -> int:
    return sum(piece.memory.nbytes for kinds in state.values() for pieces in kinds.values() for piece in pieces)


class HostCopy:
    """Host memory for a copy of a rank's state, reused for each checkpoint.

    It is pinned memory where the tensors are on a GPU and CUDA can lock it, and touched beforehand otherwise, so that
    filling it takes no longer than copying. `dtype_of` are the dtypes of the copies.

    # Note [Slabs]
    torch rounds each request for pinned memory up to a power of two: 272 MB of a matrix are 537 MB. So copies are parts
    of slabs, each of them pages of its own, which CUDA locks as they are.
    """

    def __init__(
        self, state: Held, dtype_of: Callable[[Piece], torch.dtype] = lambda piece: piece.memory.dtype
    ) -> None:
        pieces = [piece for kinds in state.values() for of_kind in kinds.values() for piece in of_kind]
        like = [torch.empty(piece.memory.shape, dtype=dtype_of(piece), device="meta") for piece in pieces]
        are_on_gpu = [piece.memory.is_cuda for piece in pieces]
        pinned = self._allocate(compress(like, are_on_gpu), is_pinned=True)
        plain = self._allocate(compress(like, map(not_, are_on_gpu)), is_pinned=False)
        self._copies: Held = {
            stage: {
                kind: tuple(replace(piece, memory=next(pinned if piece.memory.is_cuda else plain)) for piece in of_kind)
                for kind, of_kind in kinds.items()
            }
            for stage, kinds in state.items()
        }

    def _allocate(self, tensors: Iterable[torch.Tensor], *, is_pinned: bool) -> Iterator[torch.Tensor]:
        """Yield host memory like these tensors; see Note [Slabs]."""
        for run in split_by_size(tensors, _aligned_nbytes, _SLAB_NBYTES):
            sizes = [*map(_aligned_nbytes, run)]
            nbytes = max(sum(sizes), _LEAST_PINNED_NBYTES if is_pinned else 0)
            slab = empty_like(torch.empty(nbytes, dtype=torch.uint8, device="meta"), _CPU)
            if is_pinned and _pin(slab):
                weakref.finalize(self, _unpin, slab).atexit = False
            else:
                slab.zero_()
            for tensor, part in zip(run, torch.split(slab[: sum(sizes)], sizes), strict=True):
                yield part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def fill(self, state: Held) -> Held:
        """Copy everything, and return the copies; the next call overwrites them."""
        is_on_gpu = False
        for stage, kinds in state.items():
            for kind, pieces in kinds.items():
                for piece, copy in zip(pieces, self._copies[stage][kind], strict=True):
                    copy.memory.copy_(piece.memory, non_blocking=True)
                    is_on_gpu |= piece.memory.is_cuda
        if is_on_gpu:
            torch.cuda.synchronize()
        return self._copies


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardToWrite:
    """A shard that this rank writes: tensors, or its slices of them."""

    path: str
    holds: Holds
    pieces: Sequence[Piece]

    @property
    def is_indexed(self) -> bool:
        """Whether the Hugging Face index lists its tensors."""
        return is_indexed(self.holds, self.path)


def divide_into_shards(
    state: Held,
    group: dist.ProcessGroup | None,
    divide: Divide = undivided,
    *,
    ties: Iterable[TieGroup] | None,
) -> dict[int, list[ShardToWrite]]:
    """Return this rank's shards by stage; every rank of the group calls this: numbers depend on what all of them write.

    Shards are in stage folders, numbered over the ranks that write the stage. With `ties`, which is where each stage
    has one writer of whole tensors, weights are in the root, numbered over all stages, but for tied replicas of other
    stages' weights: see Note [A packed folder is a Hugging Face folder].
    """
    is_whole, replicas = ties is not None, replicas_elsewhere(ties or ())
    runs: dict[_Key, list[list[Piece]]] = {}
    for stage, kinds in state.items():
        for holds, pieces in kinds.items():
            parts = divide(stage, holds, [piece for piece in pieces if holds != WEIGHTS or piece.fqn not in replicas])
            if is_whole:
                parts = [run for part in parts for run in split_by_size(part, _size_of, MAX_SHARD_NBYTES)]
            runs[stage, holds] = parts

    def series_of(key: _Key) -> _Key | None:
        return None if is_whole and key[1] == WEIGHTS else key  # None: in the root

    counts = from_all_ranks({key: len(of_key) for key, of_key in runs.items()}, group)
    rank, totals, firsts = dist.get_rank(group), Counter[_Key | None](), dict[_Key, int]()
    for key in sorted({key for of_rank in counts for key in of_rank}):
        numbers = [of_rank.get(key, 0) for of_rank in counts]
        firsts[key] = totals[series_of(key)] + sum(numbers[:rank])
        totals[series_of(key)] += sum(numbers)
    shards: dict[int, list[ShardToWrite]] = {stage: [] for stage in state}
    for key, of_key in runs.items():
        (stage, holds), series = key, series_of(key)
        for number, run in enumerate(of_key, firsts[key]):
            path = shard_path(stage, holds, number=number, of=totals[series])
            path = root_shard_path(number, totals[series]) if series is None else path
            shards[stage].append(ShardToWrite(path=path, holds=holds, pieces=run))
        if holds == WEIGHTS and (apart := [piece for piece in state[stage][holds] if piece.fqn in replicas]):
            shards[stage].append(ShardToWrite(path=replicas_path(stage), holds=holds, pieces=apart))
    return shards


def _left_out(groups: Iterable[TieGroup]) -> frozenset[str]:
    return frozenset(
        replica.fqn for group in groups for replica in group.replicas if replica.stage == group.owner.stage
    )


def _weights(
    chunks: Sequence[StageChunk],
    groups: Iterable[TieGroup],
    regions: Callable[[nn.Parameter], Iterable[_Region]],
    *,
    constants: _Chosen,
    choose: Callable[[Piece], Piece | None] = lambda piece: piece,
) -> Held:
    """Return the weights in `regions`, and chosen constants; of a run that trains adapters, these alone."""
    left_out, weights = _left_out(groups), dict[int, dict[Holds, tuple[Piece, ...]]]()
    for chunk in chunks:
        base = chunk.frozen_ids() if chunk.has_adapters else set[int]()
        trained = (
            choose(piece)
            for name, parameter in chunk.body.named_parameters()
            if id(parameter) not in base
            for memory, offset in regions(parameter)
            for piece in chunk.family.pieces(name, memory.detach(), offset)
            if piece.fqn not in left_out
        )
        buffers = () if chunk.has_adapters else hf_constants(chunk, master_of)
        besides = (choose(piece) for piece in buffers if constants(piece.memory))
        weights[chunk.stage] = {WEIGHTS: (*join_pieces(filter(None, trained)), *filter(None, besides))}
    return weights


def _regions_of_whole(tensor: torch.Tensor, sharing: dist.ProcessGroup | None) -> Iterator[_Region]:
    """Yield all regions of a tensor on each of the ranks that share it, all of which call this.

    # Note [Large parameters]
    All experts of a layer are one parameter, 30 GB in float32: what is larger than a GiB goes to all ranks in slices,
    so that no GPU has more than one of them beside what it trains.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if not isinstance(tensor, DTensor) or nbytes <= _GATHERED_NBYTES:
        yield whole_of(tensor), (0,) * tensor.dim()
        return
    here = local_regions(tensor) if local_of(tensor).numel() else ()
    whole_shape, device = tuple(tensor.shape), exchange_device(tensor.device, sharing)
    mine = [Slice(offset=offset, shape=tuple(memory.shape), whole_shape=whole_shape) for memory, offset in here]
    sent = set[Slice]()
    for rank, parts in enumerate(from_all_ranks(mine, sharing)):
        for number, part in enumerate(parts):
            if part in sent:
                continue
            sent.add(part)
            count, *widths = part.shape
            most = max(1, _SLICE_NBYTES // (prod(widths) * tensor.element_size()))
            for row in range(0, count, most):
                rows = torch.empty((min(most, count - row), *widths), dtype=tensor.dtype, device=device)
                if rank == dist.get_rank(sharing):
                    rows.copy_(here[number][0].detach()[row : row + most])
                dist.broadcast(rows, group=sharing, group_src=rank)
                yield rows, (part.offset[0] + row, *part.offset[1:])


def _pin(memory: torch.Tensor) -> bool:
    """Lock memory for copies from a GPU, and return whether CUDA does that here; some sandboxes and boards do not."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
    if status == _NO_MEMORY:
        problem = f"out of memory: failed to lock {show_bytes(memory.nbytes)} of host memory"
        with errors_of_rank(dist.get_rank()):
            raise ExhaustedError("", problem, _HINT, code="system.out-of-memory")
    if status:
        # CUDA keeps the error, and torch raises it after the next kernel, whatever that is: here it is this one.
        with suppress(torch.AcceleratorError):
            torch.ones(1, device="cuda")
    return not status


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _aligned_nbytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _size_of(piece: Piece) -> int:
    return piece.memory.nbytes
