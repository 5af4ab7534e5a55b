"""Which runs shard parameters over ranks with FSDP, and what it cannot shard. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.errors import UsageError
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import ComputeOptions


def is_sharded(degrees: ParallelDims, compute: ComputeOptions) -> bool:
    """Whether FSDP is used: to shard parameters, or for master weights of tensor-parallel matrices."""
    shards_experts = degrees.expert > 1 and degrees.expert_fsdp > 1
    return degrees.fsdp > 1 or shards_experts or (degrees.tensor > 1 and compute.has_masters)


def check_float32(architecture: str, names: Sequence[str], compute: ComputeOptions, degrees: ParallelDims) -> None:
    """Check that FSDP can shard parameters beside those of these names, which stay in float32."""
    if not names or not is_sharded(degrees, compute) or {compute.master_dtype, compute.reduce_dtype} == {"fp32"}:
        return
    flag = "--dp-shard" if degrees.shard > 1 else "--cp" if degrees.context > 1 else "--tp"
    raise UsageError(
        flag,
        f"{architecture} keeps some parameters in float32, which FSDP cannot shard with masters in "
        f"{compute.master_dtype} and reduction in {compute.reduce_dtype}: {names[0]}, say",
        f"use --master-dtype fp32 and --reduce-dtype fp32, or no {flag}",
        code="options.catalogue-combination",
    )
