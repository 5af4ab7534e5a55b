"""What a family does with rows: keep the documents of each apart, or run on this rank's part of each.

Whether an architecture computes that right is not listed here: see Note [Proof of the combination].
"""

from __future__ import annotations

from manifests.errors import UsageError
from manifests.models.combinations import check_constant
from manifests.models.training import ContextMethod
from runner.config.parallel_dims import CONTEXT
from runner.models.family import Family, OnTransformers
from runner.parallel.mesh import Mesh
from runner.tensors.row_parts import RowParts

_APART = "leave --document-mask out, or use --no-packing, which has one document in each sequence"
_WHOLE = "leave --cp out; more stages, --dp-shard and --ac save memory, too"


def keep_documents(family: Family, seq_len: int) -> None:
    """Let a family's modules keep packed documents apart; every rank calls this."""
    if "position_ids" in family.row_inputs:
        return
    if not isinstance(family, OnTransformers):
        problem = f"is not supported for {family.architecture}, whose family's modules take no position_ids"
        raise UsageError("--document-mask", problem, _APART, code="options.document-mask")
    check_constant("--document-mask", family.architecture, seq_len, family.padded_length(1, seq_len))
    family.keep_documents()


def split_rows(family: Family, mesh: Mesh, method: ContextMethod, seq_len: int = 1) -> None:
    """Let a family's modules run on this rank's part of each row; every rank calls this."""
    if not isinstance(family, OnTransformers):
        problem = f"is not supported for {family.architecture}, which is not trained on transformers' modules"
        raise UsageError("--cp", problem, _WHOLE, code="options.cp-architecture")
    check_constant("--cp", family.architecture, seq_len, family.padded_length(1, seq_len))
    gathers, group = method == "gather", mesh.group(CONTEXT)
    family.split_rows(RowParts(rank=mesh.context_rank, size=mesh.degrees.context, gathers=gathers, group=group))
