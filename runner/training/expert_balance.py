"""The load of experts: counted over a step, and evened out by routers' biases or by an auxiliary loss.

# Note [Load of experts]
Each router counts the tokens of each of its experts when a microbatch runs forward, padding included. Activation
checkpointing runs a layer again while a backward runs, which is not counted. Once a step, counts are summed over all
ranks that have different tokens, exactly, and every rank that shares the stage moves its copy of the bias by the sign
of mean - load: bitwise as one process would, as the sign of integers does not round.

# Note [Auxiliary loss]
transformers' `load_balancing_loss_func` multiplies the mean load of an expert, over all layers and the whole batch, by
its mean probability. Its gradient in the first microbatch depends on the load in the last one and in other stages, and
a schedule runs the first backward before the last forward. So the product is taken of each layer and each microbatch
of a rank, as in Megatron-Core's `aux_loss`, and the mean over both is added to the loss: transformers' value for one
layer and one microbatch. A layer adds its gradient when its backward runs; no stage waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manifests.errors import UsageError
from runner.config.balance import BalanceOptions
from runner.config.schema import BatchOptions
from runner.distributed.world import exchange_device
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
        self._rows = [[(router.layer, router.num_experts, _dtype_of(router.bias)) for router in self._routers]]
        if dist.is_initialized():
            (row,), group = self._rows, mesh.pipeline
            self._rows = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(self._rows, row, group=group)
        every = [router for row in self._rows for router in row]
        self.num_routers, self.bias_dtypes = len(every), {dtype for *_, dtype in every if dtype}
        self._widths = [1 + sum(size for _, size, _ in row) for row in self._rows]
        self._interval = -(-sum(self._widths) // _MOST_RECORDED)
        # The auxiliary loss of this rank's layers, then the tokens of each expert: exact, as they are below 2^53.
        width = 1 + sum(router.num_experts for router in self._routers)
        self._sums = torch.zeros(width, dtype=torch.float64, device=chunks[0].device)
        self._counts = torch.split(self._sums[1:], [router.num_experts for router in self._routers])
        self._share = 0.0

    def watch(self) -> None:
        """Count from now on what routers choose."""
        for router, counts in zip(self._routers, self._counts, strict=True):
            router.module.register_forward_hook(partial(self._see, router, counts))

    def start(self, cut: BatchOptions | None) -> None:
        """Begin a step on a batch of this shape; None: that of the run."""
        self._sums.zero_()
        degrees = self._mesh.degrees
        num_parts = (cut or self._batch).num_microbatches * degrees.data * degrees.context
        self._share = 1 / (num_parts * self.num_routers)

    @torch.no_grad()
    def finish(self, step: int) -> ExpertReport:
        """Move biases by the load of a step; every rank calls this."""
        sums = self._sums.to(exchange_device(self._sums.device))
        if self._mesh.stage is not None:
            if not self._mesh.counts_loss:  # tensor-parallel ranks have the same tokens
                sums.zero_()
            dist.all_reduce(sums, group=self._mesh.stage)
        parts = torch.split(sums[1:], [router.num_experts for router in self._routers])
        for router, load in zip(self._routers, parts, strict=True) if self._options.bias_rate else ():
            if router.bias is not None:
                direction = torch.sign(load.sum() - load * router.num_experts)  # of mean - load
                router.bias.add_(direction.to(router.bias), alpha=self._options.bias_rate)
        is_recorded = step % self._interval == 0
        if not is_recorded and not self._options.aux_loss:
            return ExpertReport(load=None, aux_loss=None)
        rows, layers = self._gather(sums), dict[int, tuple[int, ...]]()
        for row, routers in zip(rows, self._rows, strict=True):
            begin = 1
            for layer, size, _ in routers:
                layers[layer] = tuple(map(int, row[begin : begin + size]))
                begin += size
        return ExpertReport(
            load=tuple(sorted(layers.items())) if is_recorded else None,
            aux_loss=sum(row[0] for row in rows) if self._options.aux_loss else None,
        )

    def _gather(self, sums: torch.Tensor) -> list[list[float]]:
        if not dist.is_initialized():
            return [sums.tolist()]
        padded = sums.new_zeros(max(self._widths))
        padded[: len(sums)] = sums
        everyone = padded.new_empty(len(self._widths) * len(padded))
        dist.all_gather_single(everyone, padded, group=self._mesh.pipeline)
        rows: list[list[float]] = everyone.view(len(self._widths), -1).tolist()
        return rows

    @torch.compiler.disable  # type: ignore[untyped-decorator] # a graph would count again when it is recomputed
    def _see(self, router: Router, counts: torch.Tensor, _: nn.Module, __: Any, output: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled():  # an evaluation
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

    Raises:
        UsageError: the options are for routers of another kind.
    """
    balance = ExpertBalance(chunks, options, batch, mesh)
    architecture = chunks[0].family.architecture
    if options.bias_rate and not balance.bias_dtypes:
        problem = f"is not supported for {architecture}, whose routers have no e_score_correction_bias that is a buffer"
        raise UsageError("--router-bias-rate", problem, "use --router-aux-loss", code="options.router")
    if options.bias_rate and "bfloat16" in balance.bias_dtypes:
        problem = f"is lost in rounding: {architecture} has its biases in bfloat16"
        raise UsageError("--router-bias-rate", problem, "use --dtype fp32", code="options.router")
    if options.aux_loss and not balance.num_routers:
        problem = f"is not supported for {architecture}, which has no routers of a kind that is known"
        raise UsageError("--router-aux-loss", problem, code="options.router")
    if not balance.num_routers or (is_compiled and not options.is_on):
        return None
    balance.watch()
    return balance
