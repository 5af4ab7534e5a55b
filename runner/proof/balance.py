"""What balances experts, in one process: it has the tokens of all ranks, and knows which a rank takes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runner.config.loss import BalanceOptions
from runner.config.parallel_dims import ParallelDims
from runner.data.sequences import Batch, Rows, rows_of
from runner.models.routers import Router


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """What a router made of all tokens, in rows end to end: logits (N, E), and chosen experts (N, K)."""

    of: Router
    logits: torch.Tensor
    chosen: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Balance:
    """What acts on routers; `parts` are the places, in rows end to end, of the tokens that a rank takes at once."""

    options: BalanceOptions
    parts: tuple[torch.Tensor, ...]

    def loss(self, routed: Sequence[Routing]) -> torch.Tensor:
        """Return the mean of transformers' auxiliary loss of each router and part, times the coefficient."""
        if not self.options.aux_loss:
            return torch.zeros(())
        from runner.models.whole_model import router_loss

        losses = [router_loss(router.logits[part], router.chosen.shape[-1]) for router in routed for part in self.parts]
        return self.options.aux_loss * torch.stack(losses).mean()

    @torch.no_grad()
    def move_biases(self, routed: Sequence[Routing]) -> None:
        for router in routed:
            load = torch.bincount(router.chosen.flatten(), minlength=router.of.num_experts)
            if router.of.bias is not None:
                router.of.bias.add_(torch.sign(load.sum() - load * len(load)), alpha=self.options.bias_rate)


def parts_of(batch: Batch, microbatch: int, degrees: ParallelDims) -> tuple[torch.Tensor, ...]:
    """Return the places of the tokens of each microbatch on each rank that has other tokens than the rest."""
    places = replace(batch, tokens=torch.arange(batch.tokens.numel()).view_as(batch.tokens))
    of_ranks = (
        rows_of(places, Rows(number=number, count=degrees.data)).part(context, degrees.context).tokens
        for number in range(degrees.data)
        for context in range(degrees.context)
    )
    return tuple(part.flatten() for tokens in of_ranks for part in torch.split(tokens, microbatch))


def route(routers: Sequence[Router], run: Callable[[], Any]) -> list[Routing]:
    """Return what routers do while all rows run, document by document."""
    calls: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in routers]
    hooks = [
        router.module.register_forward_hook(lambda _, __, output, of=of: of.append(output))
        for router, of in zip(routers, calls, strict=True)
    ]
    run()
    for hook in hooks:
        hook.remove()

    def in_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.flatten(0, -2) for tensor in tensors])

    return [
        Routing(
            of=router,
            logits=in_rows([output[0] for output in outputs]),
            chosen=in_rows([next(part for part in output if not part.is_floating_point()) for output in outputs]),
        )
        for router, outputs in zip(routers, calls, strict=True)
    ]
