"""Optimizers that need whole tensors, where several ranks have parts: each tensor is stepped by its owner.

# Note [Whole tensors]
A unit is a tensor as files have it: the query projection and not the fused one, each expert, gates apart from the rest.
Units of a stage are assigned to the ranks that share it within a replica, by what a step costs. For each unit the parts
of the weight and of its gradient go to the owner in one exchange, the owner steps it, and the new weight goes back in
another. An exchange is one all-to-all of a round of units; the next round's runs while this one is stepped. State is
the owner's alone, whole, and a checkpoint has it whole: any degrees resume from it. A rank that shares its stage with
no other steps its own memory in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manifests.index import share_evenly
from manifests.optimizer_state import shape_of
from manifests.schema import StateKind
from manifests.slices import Slice
from runner.distributed.fail_together import from_all_ranks
from runner.distributed.world import connect
from runner.pipeline.chunk import StageChunk, pieces_of
from runner.tensors.local_shard import Piece
from runner.training.algorithms import Algorithm, num_steps_of, prepare_state, set_num_steps
from runner.training.mixed_precision import master_of

_ROUND = 1 << 24  # elements of an owner's units in one exchange
_Key = tuple[int, str]  # stage and FQN
Guard = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unit:
    """A tensor as files have it, the number of its parameter group, its owner, and each rank's parts of it."""

    key: _Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int
    is_trained: bool
    owner: int  # a rank of the ranks that exchange
    parts: tuple[tuple[Slice, ...], ...]  # by rank

    def sent_by(self, rank: int) -> Iterator[int]:
        """Yield which of its parts a rank sends to the owner: those that no earlier rank has."""
        earlier = {part for parts in self.parts[:rank] for part in parts}
        return (index for index, part in enumerate(self.parts[rank]) if part not in earlier)


def cost_of(shape: tuple[int, ...], is_muon: bool) -> int:
    """Return about how many operations a step takes: of Newton-Schulz iterations, or of a few for each element."""
    if not is_muon or len(shape) < 2:
        return 10 * prod(shape)
    few, many = sorted(shape[-2:])
    return 5 * prod(shape[:-2]) * few * few * (4 * many + 2 * few)


def assign_owners(costs: Mapping[_Key, int], num_ranks: int) -> dict[_Key, int]:
    """Return the rank that steps each unit: the most costly first, each by the rank with the least to do so far."""
    return share_evenly(sorted(costs.items(), key=lambda item: (-item[1], item[0])), num_ranks)


class WholeMatrices:
    """The units of this rank's stages: their state where this rank is the owner, and the steps of them.

    Constructing it is a collective of the group: what follows it, and may fail on one rank alone, runs inside `guard`.
    `numbers` has the group of each parameter, by its id; `peak` is the learning rate after warmup.
    """

    def __init__(
        self,
        chunks: Sequence[StageChunk],
        numbers: Mapping[int, int],
        algorithms: Sequence[Algorithm],
        group: dist.ProcessGroup | None,
        peak: float,
        guard: Guard = nullcontext,
    ) -> None:
        self._algorithms, self._group = algorithms, group
        self._rank, self._size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self._parameters = [
            (chunk, name, parameter, numbers[id(parameter)])
            for chunk in chunks
            for name, parameter in chunk.body.named_parameters()
            if id(parameter) in numbers
        ]
        self._device = chunks[0].device if chunks else torch.device("cpu")
        if group is not None:
            connect(group, self._device)
        self._weights = self._memory(master_of)
        self.units = {unit.key: unit for unit in self._share()}
        trained = [unit for unit in self.units.values() if unit.is_trained]
        self._rounds = _in_rounds(trained, self._size) if group else [trained]
        dtypes = {unit.dtype for unit in trained}
        self._dtype = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)  # of what is exchanged
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._placeholders: dict[_Key, tuple[torch.Tensor, ...]] = {}  # what the optimizer knows a unit's matrices by
        self._differing: list[_Key] = []  # units that took another number of steps than the run
        with guard():
            for number, algorithm in enumerate(algorithms):
                placeholders: list[torch.Tensor] = []
                for unit in self.units.values():
                    if unit.number != number or unit.owner != self._rank:
                        continue
                    whole = torch.empty(1, dtype=unit.dtype, device=self._device).expand(unit.shape)
                    self._placeholders[unit.key] = tuple(nn.Parameter(part) for part in algorithm.matrices(whole))
                    placeholders += self._placeholders[unit.key]
                if placeholders:
                    self._optimizers[number] = algorithm.make(placeholders, algorithm.scale_rate(peak))
                    for placeholder in placeholders:
                        prepare_state(algorithm, self._optimizers[number], placeholder)

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """This rank's optimizer of each group that has one, by the group's number."""
        return self._optimizers

    def set_num_steps(self, num_steps: int, differing: Mapping[str, int]) -> None:
        """Set the step counts of this rank's units; `differing` has those that are not `num_steps`, by FQN."""
        for key, placeholders in self._placeholders.items():
            number, count = self.units[key].number, differing.get(key[1], num_steps)
            if count != num_steps:
                self._differing.append(key)
            for placeholder in placeholders:
                set_num_steps(self._algorithms[number], self._optimizers[number], placeholder, count)

    def differing_steps(self, stage: int, num_steps: int) -> dict[str, int]:
        """Return the step counts that are not `num_steps` of this rank's units of a stage, by FQN."""
        placeholders = {key: self._placeholders[key][0] for key in self._differing if key[0] == stage}
        counts = {key: num_steps_of(self._optimizers[self.units[key].number], at) for key, at in placeholders.items()}
        return {fqn: count for (_, fqn), count in counts.items() if count not in (None, num_steps)}

    def state_on(self, stage: int, kind: StateKind) -> Iterator[Piece]:
        """Yield the state of one kind of the units of a stage that this rank owns."""
        for key in self._placeholders:
            if key[0] == stage:
                yield from self._state_of_unit(key, key[1], kind)

    def state_as(self, fqn: str, leader: torch.Tensor, kind: StateKind) -> Iterator[Piece]:
        """Yield the state of a tied parameter under another of its names, if this rank owns it."""
        chunk, name, *_ = next(of for of in self._parameters if of[2] is leader)
        yield from self._state_of_unit((chunk.stage, chunk.family.to_hf(name)), fqn, kind)

    def _state_of_unit(self, key: _Key, fqn: str, kind: StateKind) -> Iterator[Piece]:
        unit, placeholders = self.units[key], self._placeholders.get(key, ())
        states = [self._optimizers[unit.number].state[placeholder].get(kind.name) for placeholder in placeholders]
        whole = shape_of(kind, unit.shape)
        if whole is None or not states or states[0] is None:
            return
        if len(states) == 1 and tuple(states[0].shape) == whole:
            yield Piece(fqn=fqn, shape=whole, offset=(0,) * len(whole), memory=states[0])
            return
        for index, state in enumerate(states):  # of a stack of matrices
            corner = tuple(int(at) for at in torch.unravel_index(torch.tensor(index), unit.shape[:-2]))
            memory = state.view(*(1 for _ in corner), *state.shape)
            yield Piece(fqn=fqn, shape=whole, offset=(*corner, 0, 0), memory=memory)

    @torch.no_grad()
    def step(self) -> None:
        """Step every unit by its owner, and take the new weights; every rank of the group calls this."""
        gradients = self._memory(_gradient_of)
        if self._group is None:
            for unit in self._rounds[0]:
                self._step_in_place(unit, self._weights[unit.key], gradients[unit.key])
            return
        arriving = self._gather(self._rounds[0], gradients) if self._rounds else None
        leaving: list[Callable[[], None]] = []
        for number, units in enumerate(self._rounds):
            assert arriving is not None
            wholes = arriving()
            is_last = number + 1 == len(self._rounds)
            arriving = None if is_last else self._gather(self._rounds[number + 1], gradients)
            for unit in units:
                if unit.owner == self._rank:
                    self._step_unit(unit, *wholes[unit.key])
            leaving.append(self._scatter(units, {key: weight for key, (weight, _) in wholes.items()}))
            for finish in leaving[:-1]:
                finish()
            del leaving[:-1]
        for finish in leaving:
            finish()

    def _memory(self, of: Callable[[nn.Parameter], torch.Tensor]) -> dict[_Key, list[Piece]]:
        """Return this rank's parts of each unit, of what `of` returns for its parameter."""
        pieces: dict[_Key, list[Piece]] = {}
        for chunk, name, parameter, _ in self._parameters:
            for piece in pieces_of(chunk, name, of(parameter)):
                pieces.setdefault((chunk.stage, piece.fqn), []).append(piece)
        return pieces

    def _share(self) -> tuple[Unit, ...]:
        """Return all units of these ranks' stages, in one order on all of them."""
        numbers = {
            (chunk.stage, piece.fqn): (number, parameter.requires_grad)
            for chunk, name, parameter, number in self._parameters
            for piece in pieces_of(chunk, name, master_of(parameter))
        }
        table = {
            key: (
                (pieces[0].shape, pieces[0].memory.dtype, *numbers[key]),
                [piece.part for piece in pieces],
            )
            for key, pieces in self._weights.items()
        }
        tables = from_all_ranks(table, self._group) if self._group else [table]
        present = {key: of_key for table in tables for key, (of_key, _) in table.items()}
        costs = {
            key: cost_of(shape, is_muon=self._algorithms[number].num_dims == {2})
            for key, (shape, _, number, _) in present.items()
        }
        owners = assign_owners(costs, self._size)
        return tuple(
            Unit(
                key=key,
                shape=present[key][0],
                dtype=present[key][1],
                number=present[key][2],
                is_trained=present[key][3],
                owner=owners[key],
                parts=tuple(tuple(table[key][1]) if key in table else () for table in tables),
            )
            for key in sorted(present, key=lambda key: (-costs[key], key))
        )

    def _gather(
        self, units: Sequence[Unit], gradients: Mapping[_Key, list[Piece]]
    ) -> Callable[[], dict[_Key, tuple[torch.Tensor, torch.Tensor]]]:
        """Send the parts of weights and gradients to their owners; the result waits for those of the own units."""
        rank = self._rank
        sent = [
            piece.memory
            for unit in _by_owner(units)
            for index in unit.sent_by(rank)
            for piece in (self._weights[unit.key][index], gradients[unit.key][index])
        ]
        counts = [0] * self._size
        for unit in units:
            counts[unit.owner] += sum(2 * prod(unit.parts[rank][index].shape) for index in unit.sent_by(rank))
        owned = [unit for unit in units if unit.owner == rank]
        places = [
            [(unit, unit.parts[sender][index]) for unit in owned for index in unit.sent_by(sender)]
            for sender in range(self._size)
        ]
        sizes = [sum(2 * prod(part.shape) for _, part in of_sender) for of_sender in places]
        arrived, work = self._exchange(sent, counts, sizes)

        def finish() -> dict[_Key, tuple[torch.Tensor, torch.Tensor]]:
            work.wait()
            wholes = {
                unit.key: tuple(arrived.new_empty(unit.shape, dtype=unit.dtype) for _ in range(2)) for unit in owned
            }
            begin = 0
            for unit, part in (place for of_sender in places for place in of_sender):
                for whole in wholes[unit.key]:
                    whole[part.index].copy_(arrived[begin : begin + prod(part.shape)].view(part.shape))
                    begin += prod(part.shape)
            return {key: (weight, gradient) for key, (weight, gradient) in wholes.items()}

        return finish

    def _scatter(self, units: Sequence[Unit], wholes: Mapping[_Key, torch.Tensor]) -> Callable[[], None]:
        """Send new weights to all ranks that have parts of them; the result waits for this rank's, and takes them."""
        rank = self._rank
        owned = [unit for unit in units if unit.owner == rank]
        sent = [
            wholes[unit.key][part.index]
            for receiver in range(self._size)
            for unit in owned
            for part in unit.parts[receiver]
        ]
        counts = [sum(prod(part.shape) for unit in owned for part in unit.parts[to]) for to in range(self._size)]
        sizes = [0] * self._size
        for unit in units:
            sizes[unit.owner] += sum(prod(part.shape) for part in unit.parts[rank])
        arrived, work = self._exchange(sent, counts, sizes)

        def finish() -> None:
            work.wait()
            begin = 0
            for unit in _by_owner(units):
                for piece in self._weights.get(unit.key, ()):
                    count = piece.memory.numel()
                    piece.memory.copy_(arrived[begin : begin + count].view(piece.memory.shape))
                    begin += count

        return finish

    def _exchange(self, sent: Sequence[torch.Tensor], counts: list[int], sizes: list[int]) -> tuple[torch.Tensor, Any]:
        """Send consecutive parts, of so many elements to each rank, and receive."""
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        flat = torch.cat([empty, *(part.reshape(-1).to(self._dtype) for part in sent)])
        arrived = flat.new_empty(sum(sizes))
        return arrived, dist.all_to_all_single(arrived, flat, sizes, counts, group=self._group, async_op=True)

    def _step_in_place(self, unit: Unit, weights: Sequence[Piece], gradients: Sequence[Piece]) -> None:
        """Step a unit in this rank's memory, or in a copy of it if it has several parts or is not contiguous."""
        if len(weights) == 1 and weights[0].memory.is_contiguous():
            self._step_unit(unit, weights[0].memory, gradients[0].memory)
            return
        weight, gradient = (
            torch.empty(unit.shape, dtype=p[0].memory.dtype, device=self._device) for p in (weights, gradients)
        )
        for whole, pieces in ((weight, weights), (gradient, gradients)):
            for piece in pieces:
                whole[piece.part.index].copy_(piece.memory)
        self._step_unit(unit, weight, gradient)
        for piece in weights:
            piece.memory.copy_(weight[piece.part.index])

    def _step_unit(self, unit: Unit, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        algorithm, placeholders = self._algorithms[unit.number], self._placeholders[unit.key]
        parts = zip(placeholders, algorithm.matrices(weight), algorithm.matrices(gradient), strict=True)
        for placeholder, part, of_gradient in parts:
            placeholder.data, placeholder.grad = part, of_gradient
        optimizer = self._optimizers[unit.number]
        (group,) = optimizer.param_groups
        every, group["params"] = group["params"], [*placeholders]  # a step looks at each
        optimizer.step()
        group["params"] = every
        for placeholder in placeholders:
            placeholder.grad = None
            placeholder.data = placeholder.data.new_empty(1).expand(placeholder.shape)


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(master_of(parameter)) if parameter.grad is None else parameter.grad


def _by_owner(units: Sequence[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: unit.owner)  # units of one owner stay in order


def _in_rounds(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return units of which each owner has at most `_ROUND` elements at a time, or one of them."""
    rounds: list[list[Unit]] = []
    at, filled = [0] * num_ranks, [0] * num_ranks
    for unit in units:
        owner, count = unit.owner, prod(unit.shape)
        if filled[owner] and filled[owner] + count > _ROUND:
            at[owner], filled[owner] = at[owner] + 1, 0
        filled[owner] += count
        while len(rounds) <= at[owner]:
            rounds.append([])
        rounds[at[owner]].append(unit)
    return rounds
