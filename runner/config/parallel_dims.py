"""Parallel dimensions: pipeline, data-parallel replicas and shards, context, tensor and expert parallelism. No torch.

# Note [Two meshes]
The ranks of a stage form two device meshes. In the dense one they are (replicate, fsdp, tensor): FSDP shards over
data-parallel shards and context-parallel ranks alike, which are the parts (shard, context) of `fsdp`. Parameters of
experts are on the sparse one, (replicate, efsdp, expert): the same ranks of a replica, of which `expert` adjacent ones
have different experts, and `efsdp` have the same. The last dimension is the fastest in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import click

from manifests.command import defaults
from manifests.errors import LaunchError, UsageError
from manifests.models.training import ContextMethod
from runner.config.declared import WholeNumber, flag, nearest_multiples
from runner.config.schema import ComputeOptions

# Names of the device mesh dimensions, as in torchtitan.
PIPELINE, REPLICATE, FSDP, TENSOR = "pp", "dp_replicate", "fsdp", "tp"
SHARD, CONTEXT = "dp_shard", "cp"  # the parts of `fsdp`
EXPERT_FSDP, EXPERT = "efsdp", "ep"

Load = Literal["rows", "broadcast"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """The parallel degrees of a job. Ranks are numbered (pipeline, replicate, shard, context, tensor), tensor fastest.

    See Note [Two meshes].
    """

    pipeline: int
    replicate: int = 1  # data-parallel replicas of each stage
    shard: int = 1  # data-parallel shards of each replica's weights, gradients and optimizer state
    context: int = 1  # context-parallel degree
    tensor: int = 1  # tensor-parallel degree
    expert: int = 1  # expert-parallel degree, a divisor of shard * context * tensor

    @property
    def data(self) -> int:
        """The number of data-parallel ranks, each with its own rows of a batch."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """The number of ranks that shard each dense parameter, or a tensor-parallel part of it."""
        return self.shard * self.context

    @property
    def per_replica(self) -> int:
        """The number of ranks that share one copy of a stage's weights."""
        return self.fsdp * self.tensor

    @property
    def expert_fsdp(self) -> int:
        """The number of ranks of a replica that have the same experts."""
        return self.per_replica // self.expert

    @property
    def per_stage(self) -> int:
        return self.replicate * self.per_replica

    @property
    def world_size(self) -> int:
        return self.pipeline * self.per_stage

    @property
    def flags(self) -> str:
        """The degrees by their flags: `pp=2,dp-shard=4`."""
        degrees = {
            "dp-replicate": self.replicate, "dp-shard": self.shard, "cp": self.context, "tp": self.tensor,
            "ep": self.expert,
        }  # fmt: skip
        more = "".join(f",{name}={degree}" for name, degree in degrees.items() if degree > 1)
        return f"pp={self.pipeline}{more}"

    def __str__(self) -> str:
        parts = [
            f"{count} {what}"
            for count, what in (
                (self.replicate, "data-parallel replicas"),
                (self.shard, "data-parallel shards"),
                (self.context, "context-parallel parts"),
                (self.tensor, "tensor-parallel parts"),
            )
            if count > 1
        ]
        experts = f", experts over {self.expert} ranks" if self.expert > 1 else ""
        return (
            f"{self.pipeline} pipeline rank{'s' * (self.pipeline > 1)}"
            + "".join(f" x {part}" for part in parts)
            + experts
        )


def _parse_shards(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise UsageError("--dp-shard", f"expected auto or a number from 1 up, found {text!r}", code="options.invalid-value")


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreeOptions:
    """The degrees on the command line. None: derived from the number of ranks; if both are None, by replicas."""

    replicate: int | None = flag(
        "--dp-replicate", type=WholeNumber(min=1), metavar="N", default=None, show_default="from the number of ranks",
        help="Data-parallel replicas of each stage (DDP, HSDP).",
    )  # fmt: skip
    shard: int | None = flag(
        "--dp-shard", metavar="N|auto", default=1, written_default="1", read=_parse_shards,
        help="Data-parallel ranks that shard each stage (FSDP); auto: from the number of ranks.",
    )  # fmt: skip
    tensor: int = flag("--tp", type=WholeNumber(min=1), metavar="N", default=1, help="Tensor-parallel degree.")
    context: int = flag(
        "--cp", type=WholeNumber(min=1), metavar="N", default=1,
        help="Context-parallel degree: ranks that each have a part of every sequence.",
    )  # fmt: skip
    context_method: ContextMethod = flag(
        "--cp-method", type=click.Choice(get_args(ContextMethod)), default=defaults.CONTEXT_METHOD,
        help="How attention sees the whole sequence: gather keys and values, or exchange parts for heads (ulysses).",
    )  # fmt: skip
    expert: int = flag(
        "--ep", type=WholeNumber(min=1), metavar="N", default=1,
        help="Expert-parallel degree: ranks of a replica, of all degrees above, among which experts are divided.",
    )  # fmt: skip
    load: Load = flag(
        "--loading", "load", type=click.Choice(get_args(Load)), default="rows",
        help="rows: each rank reads its own rows; broadcast: one rank of a stage reads a tensor and broadcasts it.",
    )  # fmt: skip

    def resolve(self, num_pipeline_ranks: int, world_size: int) -> ParallelDims:
        """Return the degrees for this number of ranks."""
        per_stage, rest = divmod(world_size, num_pipeline_ranks)
        if rest or not per_stage:
            start = f"start {nearest_multiples(world_size, num_pipeline_ranks)} ranks"
            if not per_stage:
                start = f"runner launch MANIFEST --nproc-per-node {num_pipeline_ranks}"
            multiple = ", or a multiple" if per_stage else ""
            raise LaunchError(
                "",
                f"manifest needs {num_pipeline_ranks} ranks{multiple}, WORLD_SIZE is {world_size}",
                f"{start}, or reshard pack MANIFEST --layout pp={world_size} --out DIR",
                code="launch.world-size",
            )
        if per_stage % self.tensor:
            unit = num_pipeline_ranks * self.tensor
            raise UsageError(
                "--tp",
                f"expected a divisor of {per_stage}, the ranks of each stage, found {self.tensor}",
                f"start {nearest_multiples(world_size, unit)} ranks",
                code="launch.degrees",
            )
        data, rest = divmod(per_stage // self.tensor, self.context)
        if rest:
            unit = num_pipeline_ranks * self.tensor * self.context
            raise UsageError(
                "--cp",
                f"expected a divisor of {per_stage // self.tensor}, the ranks of each stage for each tensor-parallel "
                f"part, found {self.context}",
                f"start {world_size // unit * unit + unit} ranks",
                code="launch.degrees",
            )
        replicate = self.replicate or data // (self.shard or data) or 1
        shard = self.shard or max(1, data // replicate)
        if replicate * shard != data:
            given_flag = "--dp-replicate" if self.replicate else "--dp-shard"
            hinted = "both degrees" if self.replicate and data % (self.shard or data) else given_flag
            number = num_pipeline_ranks * self.tensor * self.context * replicate * shard
            hint = f"start {number} ranks, or remove {hinted}"
            context = f", --cp {self.context}" if self.context > 1 else ""
            raise UsageError(
                given_flag,
                f"{replicate} replicas of {shard} shards are {replicate * shard} data-parallel ranks for each stage, "
                f"and {world_size} ranks over {num_pipeline_ranks} pipeline ranks{context} and --tp {self.tensor} "
                f"leave {data}",
                hint,
                code="launch.degrees",
            )
        degrees = ParallelDims(
            pipeline=num_pipeline_ranks,
            replicate=replicate,
            shard=shard,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
        )
        if degrees.per_replica % self.expert:
            unit, context = self.context * self.tensor, f" x --cp {self.context}" if self.context > 1 else ""
            raise UsageError(
                "--ep",
                f"expected a divisor of {degrees.per_replica}, the ranks that share one copy of a stage's weights "
                f"(--dp-shard {shard}{context} x --tp {self.tensor}), found {self.expert}",
                f"use --dp-shard {math.lcm(self.expert, unit) // unit}, or a multiple",
                code="launch.degrees",
            )
        return degrees


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
