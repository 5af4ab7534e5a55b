"""What an evaluation records of tokens on a rank: losses, the largest logits, and the hidden states of a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from manifests.errors import UsageError
from runner.data.rows import IGNORED, RowForm
from runner.pipeline.chunk import StageChunk, part_of
from runner.pipeline.losses import Loss

# Of consecutive rows, by the name of what is recorded: (B, L) or (B, L, n), on the CPU.
Recorded: TypeAlias = dict[str, torch.Tensor]


class TokenLosses(Loss):
    """Cross-entropy of each token, recorded for all microbatches since they were last taken.

    # Note [Losses to the last digit]
    The same microbatches give the same bits on every number of stages and replicas; what differs is who has them, and
    in which order. So the losses of a microbatch are summed exactly, and so are these sums: the printed loss depends on
    no layout.
    """

    def __init__(self, top_k: int = 0, *, keeps_rows: bool = False) -> None:
        super().__init__(lambda *_: (torch.zeros(()), 0), RowForm(), is_own=True)  # `__call__` is its own
        self._top_k, self._keeps_rows = top_k, keeps_rows
        self._rows: dict[str, list[torch.Tensor]] = {}
        self.sums = list[tuple[float, int]]()  # of each microbatch, and its number of labels

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, *, num_tokens: int, **fields: torch.Tensor
    ) -> torch.Tensor:
        losses = _cross_entropy(logits, labels)
        counted = losses[labels != IGNORED]
        self.sums.append((math.fsum(counted.tolist()), len(counted)))
        if self._keeps_rows:
            self.record("losses", losses)
        if self._top_k:
            largest = logits.float().topk(self._top_k)
            self.record("top_ids", largest.indices.int())
            self.record("top_logits", largest.values)
        return losses.sum() / num_tokens

    def watch(self, chunks: Sequence[StageChunk], module: str) -> None:
        """Record what a module of the model returns, if one of these chunks has it."""
        family = chunks[0].family
        if module in getattr(getattr(family, "mtp", None), "modules", ()):
            problem = "is an MTP layer, which runs in training alone"
            raise UsageError(f"--hidden-states {module}", problem, "name another layer", code="options.scores")
        if module not in family.modules:
            problem = f"{family.architecture} has no such module"
            hint = f"name one of those that stages have, such as {family.modules[len(family.modules) // 2]}"
            raise UsageError(f"--hidden-states {module}", problem, hint, code="options.scores")

        def record(_: nn.Module, __: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if not isinstance(states, torch.Tensor) or states.dim() != 3:
                problem = "does not return hidden states (B, L, D)"
                raise UsageError(f"--hidden-states {module}", problem, "name a layer", code="options.scores")
            self.record("hidden_states", states.float())

        for chunk in chunks:
            if module in chunk.module_names:
                part_of(chunk, module).register_forward_hook(record)

    def record(self, name: str, rows: torch.Tensor) -> None:
        self._rows.setdefault(name, []).append(rows.detach().to("cpu", copy=True))

    def take(self) -> tuple[list[tuple[float, int]], Recorded]:
        """Return the sums of microbatches, and the rows, in their order, and forget them."""
        taken = self.sums, {name: torch.cat(parts) for name, parts in self._rows.items()}
        self.sums, self._rows = [], {}
        return taken


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token (B, L), 0 where its label is ignored."""
    flat = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(flat, labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(labels.shape)
