"""The check of --document-mask: a tiny model's packed documents must be what each is by itself, in the run's stages.

# Note [Check of documents]
Whether documents can be kept apart is not listed by architecture. Linear attention and convolutions carry a state over
tokens, and some models compute positions or masks in other ways than by `position_ids` and transformers' interface. So
before the first step a tiny model of the config, with all of its layers, runs documents packed, in the stages of the
run, and each alone, by transformers' own forward. Their logits must be equal to 1e-5 of the largest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from manifests.errors import ModelError, UsageError
from runner.models.family import Family
from runner.proof.stages import SelfChecked, build_filled, describe

logger = logging.getLogger("runner")

_LENGTHS = ((1, 9, 2), (5, 7))  # of the documents in each row: one is longer than the windows of a tiny config
_TOLERANCE = 1e-5
_INSTEAD = "leave --document-mask out, or use --no-pack, which has one document in each sequence"


@runtime_checkable
class KeepsDocuments(SelfChecked, Protocol):
    """A family whose modules take `position_ids` (B, L), which begin at 0 in each document."""

    def keep_documents(self) -> None:
        """Let what is built from here on take them."""
        ...


def keep_documents(family: Family, seq_len: int) -> KeepsDocuments:
    """Let a family's modules keep packed documents apart, and return it; every rank calls this.

    Raises:
        UsageError: it cannot, or its positions depend on the length of the longest document.
    """
    if not isinstance(family, KeepsDocuments):
        problem = f"is not supported for {family.architecture}, which is not trained on transformers' modules"
        raise UsageError("--document-mask", problem, _INSTEAD, code="options.document-mask")
    if family.padded_length(1, seq_len) < seq_len:
        raise UsageError(
            "--document-mask",
            f"is not supported for {family.architecture} with --seq-len {seq_len}: its RoPE depends on the longest "
            "document of a microbatch",
            f"use --seq-len {family.padded_length(1, seq_len)}, or leave --document-mask out",
            code="options.document-mask",
        )
    family.keep_documents()
    return family


def log_documents_check(family: KeepsDocuments, stage_modules: Sequence[tuple[str, ...]]) -> None:
    """Check documents as `check_documents` does, and log the seconds."""
    started_s = time.perf_counter()
    check_documents(family, stage_modules)
    logger.info("self-check: documents of a tiny %s are the same packed and alone (%.1f s)",
                family.architecture, time.perf_counter() - started_s)  # fmt: skip


def check_documents(family: KeepsDocuments, stage_modules: Sequence[tuple[str, ...]]) -> None:
    """Check that stages of a tiny model keep documents apart; see Note [Check of documents].

    Raises:
        ModelError: they do not.
    """
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad():
            difference = _difference(family.tiny(), stage_modules)
    except Exception as error:  # of a forward that takes no positions, say
        raise _refused(family, f"a tiny model fails with {describe(error)}") from error
    if not difference <= _TOLERANCE:
        raise _refused(family, f"logits of a document depend on its neighbors, by {difference:.1e} of the largest")


def _refused(family: Family, why: str) -> ModelError:
    problem = f"packed documents of {family.architecture} cannot be kept apart: {why}"
    return ModelError("--document-mask", problem, _INSTEAD, code="model.no-document-mask")


def _difference(family: SelfChecked, stage_modules: Sequence[tuple[str, ...]]) -> float:
    """Return by how much packed logits differ from those of the documents alone, relative to the largest."""
    whole = family.whole().eval()
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randint(family.vocab_size, (len(_LENGTHS), sum(_LENGTHS[0])), generator=drawn)
    alone = [torch.cat([whole(document[None])[0] for document in row.split(lengths)], dim=1)
             for row, lengths in zip(rows, _LENGTHS, strict=True)]  # fmt: skip
    expected = torch.cat(alone)
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in _LENGTHS])
    crossing = rows
    for chunk in build_filled(family, whole, stage_modules, is_training=False):
        chunk.io = None  # nothing is sent
        crossing = chunk(crossing, position_ids=positions)
    return float((crossing - expected).abs().max() / expected.abs().max())
