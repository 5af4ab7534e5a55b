"""The gradient norm over the whole pipeline, gradient clipping, and the loss of the step, known to every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import NoReturn

import torch
from torch import distributed as dist
from torch import nn

from manifests.errors import RankError
from runner.config.parallel_dims import ParallelDims
from runner.distributed.fail_together import from_all_ranks
from runner.distributed.world import exchange_device, wait_for_numbers
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import NamedParameter
from runner.tensors.dtensor import local_of
from runner.training.ties import Tie

_HEAD = 5  # a row's numbers before the times and the squares
_CURE = "try a lower --lr, a longer --warmup-steps or --dtype fp32"
_CPU_PART = 1 << 20  # elements of a longer tensor: of those, torch makes a copy in float64 at a time
Number = float | torch.Tensor  # on the host, or () on the device


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The totals of one step over the whole pipeline."""

    loss: float  # mean over the valid tokens
    num_tokens: int  # valid ones
    norm: float  # L2, of all gradients taken as one vector, times `scale`
    scale: float  # of gradients, see Note [Counts of a loss]
    is_last: bool  # a rank was asked to stop
    is_damaged: bool  # a rank has found that what it loaded is damaged
    times_s: tuple[tuple[float, ...], ...]  # the times that each pipeline rank reported
    sums: tuple[list[float], ...]  # by pipeline rank, of what was summed besides


class StepTotals:
    """Sums over all ranks. The constructor is a collective: ranks exchange the names of their parameters.

    Squares are summed in float64, parameter by parameter and over the ranks that share its stage, each
    element once, and then exactly (`math.fsum`): the norm does not depend on the layout of stages or the
    assignment to ranks. It leaves out parameters that `counts` refuses. Each rank may report `num_times` times of its
    own with them.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        ties: Sequence[Tie],
        *,
        device: torch.device,
        mesh: Mesh | None = None,
        num_times: int = 0,
        counts: Callable[[nn.Parameter], bool] = lambda parameter: True,
    ) -> None:
        self._num_times = num_times
        elsewhere = {id(tie.leader) for tie in ties if not tie.is_counted_here}
        counted = [(fqn, parameter) for fqn, parameter in parameters if id(parameter) not in elsewhere]
        self._counted = [parameter for _, parameter in counted]
        self._device, self._mesh = device, mesh or Mesh(degrees=ParallelDims(pipeline=1), rank=0)
        rows = from_all_ranks([(fqn, counts(parameter)) for fqn, parameter in counted], self._mesh.pipeline)
        self._names = [[fqn for fqn, _ in row] for row in rows]
        self._most_names = max(map(len, self._names))
        self._is_in_norm = [[is_counted for _, is_counted in row] for row in rows]

    def reduce(
        self,
        loss: Number | None,
        num_tokens: int,
        count: Number | None = None,
        *,
        is_last: bool = False,
        is_damaged: bool = False,
        times_s: Callable[[], Sequence[float]] = tuple,
        addends: torch.Tensor | None = None,
    ) -> Totals:
        """Return the totals of this step; `loss` is None on all ranks but those of the last stage.

        All numbers meet on the device, which is read once.

        `count` is what the loss of this rank is divided by in place of tokens; None, on all ranks: tokens.

        All ranks learn whether one of them was asked to stop after this step or has loaded damaged tensors, and the
        times of each; `times_s` is called when this rank's gradients are done. The times of ranks that share
        stages are averaged. `addends`, as many on all ranks, are summed over the ranks that share a stage.

        Every rank calls this after `sync_gradients`; it runs one collective, and one more where ranks share stages.
        """
        num_here, head = num_tokens / self._num_losses, list[Number]([0.0, 0.0, 0.0])
        if loss is not None and self.counts_loss:
            head = [loss, num_here, num_here if count is None else count]
        squares = _squared_norms(self._counted, self._mesh)
        times = [seconds / self._num_sharing for seconds in times_s()]
        assert len(times) == self._num_times, "all ranks report the same number of times"
        rows = self._gather([*head, float(is_last), float(is_damaged), *times], squares, addends)
        first = _HEAD + self._num_times
        end = first + self._most_names
        squared = [row[first:end] for row in rows]
        if not math.isfinite(math.fsum(chain.from_iterable(squared))):
            self._raise_not_finite(squared)
        square = math.fsum(chain.from_iterable(map(compress, squared, self._is_in_norm)))
        loss, tokens, counts = (math.fsum(row[place] for row in rows) for place in range(3))
        scale = 1.0 if counts == tokens or counts <= 0 else round(tokens) / counts
        loss *= scale
        if loss and counts <= 0:
            hint = "a loss counts what its sum is divided by, and weights of tokens are positive in sum"
            raise RankError("", f"the loss is {loss} over a count of {counts:g}", hint, code="rank.not-finite")
        if not math.isfinite(loss):
            raise RankError("", f"the loss is {loss}", _CURE, code="rank.not-finite")
        return Totals(
            loss=loss,
            num_tokens=round(tokens),
            is_last=any(row[3] for row in rows),
            is_damaged=any(row[4] for row in rows),
            times_s=tuple(tuple(row[_HEAD:first]) for row in rows),
            norm=math.sqrt(square) * scale,
            scale=scale,
            sums=tuple(row[end:] for row in rows),
        )

    def reduce_loss(self, loss: Number | None, count: Number | None) -> tuple[float, float]:
        """Return the loss and its count on every rank; only ranks with the last stage know their parts of them."""
        counted = [0.0 if number is None or not self.counts_loss else number for number in (loss, count)]
        rows = self._gather(counted)
        return math.fsum(row[0] for row in rows), math.fsum(row[1] for row in rows)

    def _raise_not_finite(self, rows: Sequence[Sequence[float]]) -> NoReturn:
        name, rank = next(
            (name, rank)
            for rank, (squares, names) in enumerate(zip(rows, self._names, strict=True))
            for name, square in zip(names, squares, strict=False)
            if not math.isfinite(square)
        )
        where = f"rank {rank}" if self._num_sharing == 1 else f"pipeline rank {rank}"
        raise RankError(where, f"the gradient of {name} is not finite", _CURE, code="rank.not-finite")

    @property
    def counts_loss(self) -> bool:
        return self._mesh.counts_loss

    @property
    def _num_losses(self) -> int:
        return self._mesh.degrees.data * self._mesh.degrees.context

    @property
    def _num_sharing(self) -> int:
        return self._mesh.degrees.per_stage

    def _gather(
        self, head: Sequence[Number], squares: torch.Tensor | None = None, addends: torch.Tensor | None = None
    ) -> list[list[float]]:
        """Return the rows of this pipeline's ranks, each summed over the ranks that share a stage."""
        numbers = [0.0 if isinstance(number, torch.Tensor) else number for number in head]
        end = _HEAD + self._num_times + self._most_names
        width = end + (0 if addends is None else len(addends))
        mine = torch.zeros(width, dtype=torch.float64, device=self._device)
        mine[: len(head)] = torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        for place, number in enumerate(head):
            if isinstance(number, torch.Tensor):
                mine[place] = number
        if squares is not None:
            mine[len(head) : len(head) + len(squares)] = squares
        if addends is not None:
            mine[end:] = addends
        if not dist.is_initialized():
            return [mine.tolist()]
        device = exchange_device(self._device)
        mine = mine.to(device)
        if self._mesh.stage is not None:
            dist.all_reduce(mine, group=self._mesh.stage)
        everyone = torch.empty(len(self._names) * width, dtype=torch.float64, device=device)
        dist.all_gather_single(everyone, mine, group=self._mesh.pipeline)
        rows: list[list[float]] = wait_for_numbers(everyone.view(-1, width))
        return rows


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Clip gradients whose total norm is `norm` to `max_norm`; 0 disables clipping."""
    if not max_norm:
        return
    factor = min(1.0, max_norm / (norm + 1e-6))
    for parameter in parameters if factor < 1 else ():
        if parameter.grad is not None:
            parameter.grad *= factor


def _squared_norms(parameters: Iterable[nn.Parameter], mesh: Mesh) -> torch.Tensor | None:
    """Return each parameter's squared norm on the device, 0 where another rank counts it; None: no parameters."""
    gradients = [
        local_of(parameter.grad)
        if parameter.grad is not None and mesh.owns(parameter)
        else torch.zeros(1, device=parameter.device)
        for parameter in parameters
    ]
    return sum_squares(gradients) if gradients else None


def sum_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each tensor, accumulated in float64: on a GPU, each element is read once."""
    if gradients[0].device.type != "cpu" or max(map(torch.Tensor.numel, gradients)) <= _CPU_PART:
        return _squares_of(list(gradients))
    parts = [torch.split(gradient.reshape(-1), _CPU_PART) for gradient in gradients]
    squares = torch.split(_squares_of([part for of in parts for part in of]), list(map(len, parts)))
    return torch.stack([of.sum() for of in squares])


def _squares_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square()
