"""The load of experts: counted over a step, and evened out by routers' biases or by an auxiliary loss.

# Note [Load of experts]
Each router counts the tokens of each of its experts when a microbatch runs forward, padding included. Activation
checkpointing runs a layer again while a backward runs, which is not counted. Counts are summed over all ranks that have
different tokens, exactly, in the row of numbers that every step gathers and reads (`StepTotals`): they cost no further
collective or read. Every rank that shares the stage moves its copy of the bias by the sign of mean - load: bitwise as
one process would, as the sign of integers does not round.

# Note [Auxiliary loss]
transformers' `load_balancing_loss_func` multiplies the mean load of an expert, over all layers and the whole batch, by
its mean probability. Its gradient in the first microbatch depends on the load in the last one and in other stages, and
a schedule runs the first backward before the last forward. So the product is taken of each layer and each microbatch
of a rank, as in Megatron-Core's `aux_loss`, and the mean over both is added to the loss: transformers' value for one
layer and one microbatch, without an `attention_mask`: padding counts. As there, softmax and choice are computed in the
logits' dtype. A layer adds its gradient when its backward runs; no stage waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from runner.config.loss import BalanceOptions
from runner.config.schema import BatchOptions
from runner.distributed.fail_together import from_all_ranks
from runner.models.routers import Router, routers_of
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import StageChunk

_MOST_RECORDED = 1000  # counts a step, in the mean


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertReport:
    """The tokens of each expert of a step by layer, if they are recorded, and the auxiliary loss, if there is one."""

    load: tuple[tuple[int, tuple[int, ...]], ...] | None
    aux_loss: float | None  # the mean over layers and microbatches, without its coefficient


class ExpertBalance:
    """The routers of a rank's stages, and what they have seen in a step; the constructor is a collective.

    See Note [Load of experts] and Note [Auxiliary loss].
    """

    def __init__(self, chunks: Sequence[StageChunk], options: BalanceOptions, batch: BatchOptions, mesh: Mesh) -> None:
        self._options, self._batch, self._mesh = options, batch, mesh
        self._routers = [router for chunk in chunks for router in routers_of(chunk.family, chunk.body)]
        row = [(router.layer, router.num_experts, _dtype_of(router.bias)) for router in self._routers]
        self._rows = from_all_ranks(row, mesh.pipeline)
        every = [router for row in self._rows for router in row]
        self.num_routers, self.bias_dtypes = len(every), {dtype for *_, dtype in every if dtype}
        self._widths = [1 + sum(size for _, size, _ in row) for row in self._rows]
        self._interval = -(-sum(self._widths) // _MOST_RECORDED)
        # The auxiliary loss of this rank's layers, then the tokens of each expert: exact, as they are below 2^53.
        width = 1 + sum(router.num_experts for router in self._routers)
        self._sums = torch.zeros(width, dtype=torch.float64, device=chunks[0].device)
        self._counts = torch.split(self._sums[1:], [router.num_experts for router in self._routers])
        self._share, self._is_recorded = 0.0, False

    def watch(self) -> None:
        """Count from now on what routers choose."""
        for router, counts in zip(self._routers, self._counts, strict=True):
            router.module.register_forward_hook(partial(self._see, router, counts))

    def start(self, step: int, cut: BatchOptions | None) -> None:
        """Begin a step on a batch of this shape; None: that of the run."""
        self._sums.zero_()
        self._is_recorded = step % self._interval == 0
        degrees = self._mesh.degrees
        num_parts = (cut or self._batch).num_microbatches * degrees.data * degrees.context
        self._share = 1 / (num_parts * self.num_routers)

    @property
    def addends(self) -> torch.Tensor | None:
        """What ranks that share a stage sum in this step, as long on every rank; None: nothing is needed."""
        if not self._options.is_on and not self._is_recorded:
            return None
        padded = self._sums.new_zeros(max(self._widths))
        if self._mesh.counts_loss:  # tensor-parallel ranks have the same tokens
            padded[: len(self._sums)] = self._sums
        return padded

    @torch.no_grad()
    def finish(self, sums: Sequence[Sequence[float]]) -> ExpertReport:
        """Move biases by the load of a step; `sums` are those of each pipeline rank's addends."""
        layers = dict[int, tuple[int, ...]]()
        for row, routers in zip(sums, self._rows, strict=True):
            begin = 1
            for layer, size, _ in routers if row else ():
                layers[layer] = tuple(map(int, row[begin : begin + size]))
                begin += size
        if self._options.bias_rate and self._routers:
            loads = [torch.tensor(layers[router.layer]) for router in self._routers]
            directions = [torch.sign(load.sum() - load * len(load)) for load in loads]  # of mean - load
            on_device = torch.cat(directions).to(self._sums.device, non_blocking=True)
            moved = torch.split(on_device, list(map(len, loads)))
            for router, direction in zip(self._routers, moved, strict=True):
                if router.bias is not None:
                    router.bias.add_(direction.to(router.bias.dtype), alpha=self._options.bias_rate)
        return ExpertReport(
            load=tuple(sorted(layers.items())) if self._is_recorded else None,
            aux_loss=sum(row[0] for row in sums) if self._options.aux_loss else None,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator] # a graph would count again when it is recomputed
    def _see(self, router: Router, counts: torch.Tensor, _: nn.Module, __: Any, output: tuple[Any, ...]) -> Any:
        is_needed = self._is_recorded or self._options.is_on
        if not torch.is_grad_enabled() or not is_needed:  # an evaluation, or a step of which nothing is asked
            return None
        chosen = next(tensor for tensor in output if not tensor.is_floating_point()).flatten()
        is_again = torch._C._current_graph_task_id() != -1
        if not is_again:
            counts.scatter_add_(0, chosen, counts.new_ones(()).expand(chosen.shape))
        if not self._options.aux_loss:
            return None
        logits, weights, *others = output
        loss = balance_loss(logits, weights.shape[-1]) * self._share
        if not is_again:
            self._sums[0] += loss.detach()
        weights = _AddGradient.apply(weights, loss * self._options.aux_loss)  # type: ignore[no-untyped-call]
        return logits, weights, *others


def balance_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the number of experts times the sum over experts of load times mean probability. Shapes: logits (N, E).

    Source: transformers 5.23, `load_balancing_loss_func`, of one layer.
    """
    probabilities = logits.softmax(-1)
    load = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    return (load.float().mean(0) * probabilities.float().mean(0)).sum() * logits.shape[-1]


def _dtype_of(bias: torch.Tensor | None) -> str:
    return "" if bias is None else str(bias.dtype).removeprefix("torch.")


class _AddGradient(torch.autograd.Function):
    """Return the first argument; its backward adds the gradient of the second, a loss, to that of the step."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.form = loss.dtype, loss.device
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = ctx.form
        return gradient, torch.ones((), dtype=dtype, device=device)


def balance_experts(
    chunks: Sequence[StageChunk], options: BalanceOptions, batch: BatchOptions, mesh: Mesh, *, is_compiled: bool
) -> ExpertBalance | None:
    """Watch the routers of a pipeline; None: there are none, or nothing acts on them and layers are compiled.

    `batch` is one pipeline's share. Every rank calls this; it is a collective.
    """
    balance = ExpertBalance(chunks, options, batch, mesh)
    options.check_routers(chunks[0].family.architecture, balance.bias_dtypes, takes_loss=balance.num_routers > 0)
    if not balance.num_routers or (is_compiled and not options.is_on):
        return None
    balance.watch()
    return balance
