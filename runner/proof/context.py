"""Context parallelism of a family: what it can split, and the check that tokens meet in its attention alone.

# Note [Check of rows in parts]
Which architectures mix tokens elsewhere is not listed. Before the first step, a tiny model of the config runs with an
attention in which no token sees another. Either half of a row, with its positions, must then give what it gives within
the row. Convolutions, linear attention and attention that bypasses transformers' interface do not.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol, runtime_checkable

import torch

from manifests.errors import ModelError, UsageError
from manifests.models.combinations import ContextMethod
from runner.config.parallel_dims import CONTEXT
from runner.models.family import Family
from runner.parallel.mesh import Mesh
from runner.proof.stages import SelfChecked, describe
from runner.tensors.row_parts import RowParts

logger = logging.getLogger("runner")

_LENGTH = 12
_TOLERANCE = 1e-5
_INSTEAD = "leave --cp out; more stages, --dp-shard and --ac save memory, too"


@runtime_checkable
class SplitsRows(SelfChecked, Protocol):
    """A family whose modules can run on parts of rows."""

    def split_rows(self, parts: RowParts) -> None:
        """Let what is built from here on run on this rank's part of each row."""
        ...

    def let_tokens_alone(self, whole: Any) -> list[str]:
        """See `runner.models.context_parallel.let_tokens_alone`; `whole` is what `whole` returned."""
        ...


def split_rows(family: Family, mesh: Mesh, seq_len: int, method: ContextMethod) -> None:
    """Let a family's modules run on this rank's part of each row; every rank calls this, and rank 0 checks it.

    Raises:
        UsageError: it cannot, or its positions depend on the largest that a rank has.
        ModelError: tokens meet elsewhere than in attention.
    """
    if not isinstance(family, SplitsRows):
        problem = f"is not supported for {family.architecture}, which is not trained on transformers' modules"
        raise UsageError("--cp", problem, _INSTEAD, code="options.cp-architecture")
    if family.padded_length(1, seq_len) < seq_len:
        raise UsageError(
            "--cp",
            f"is not supported for {family.architecture} with --seq-len {seq_len}: its RoPE depends on the largest "
            "position that a rank has",
            f"use --seq-len {family.padded_length(1, seq_len)}, or leave --cp out",
            code="options.cp-architecture",
        )
    if mesh.rank == 0:
        started_s = time.perf_counter()
        check_rows(family)
        logger.info("self-check: tokens of a tiny %s meet in attention alone (%.1f s)",
                    family.architecture, time.perf_counter() - started_s)  # fmt: skip
    gathers, group = method == "gather", mesh.group(CONTEXT)
    family.split_rows(RowParts(rank=mesh.context_rank, size=mesh.degrees.context, gathers=gathers, group=group))


def check_rows(family: SplitsRows) -> None:
    """Check that tokens of a tiny model meet in attention alone; see Note [Check of rows in parts].

    Raises:
        ModelError: they meet elsewhere.
    """
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad():
            why = _why_not(family)
    except Exception as error:  # of a forward that takes no positions, say
        why = f"a tiny model fails with {describe(error)}"
    if why:
        raise ModelError(
            "--cp",
            f"rows of {family.architecture} cannot be split over ranks: {why}",
            _INSTEAD,
            code="model.no-context-parallelism",
        )


def _why_not(family: SplitsRows) -> str:
    tiny: Any = family.tiny()
    whole = tiny.whole().eval()
    calls = tiny.let_tokens_alone(whole)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(tiny.vocab_size, (1, _LENGTH), generator=drawn)
    places = torch.arange(_LENGTH)[None]
    row, first, second = (
        whole.model(input_ids=tokens[:, part], position_ids=places[:, part], use_cache=False).logits
        for part in (slice(None), slice(_LENGTH // 2), slice(_LENGTH // 2, None))
    )
    if not calls:
        return "its attention is not called through transformers' interface"
    if others := sorted(filter(None, set(calls))):
        return f"its attention gets {' and '.join(others)}"
    difference = float((torch.cat([first, second], dim=1) - row).abs().max() / row.abs().max())
    if not difference <= _TOLERANCE:
        return f"tokens meet outside of its attention, which changes logits by {difference:.1e} of the largest"
    return ""
