"""How many ranks share a stage, and what each does of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manifests.errors import InputError, UsageError

__all__ = ["DegreeOptions", "Degrees", "Load"]

Load = Literal["rows", "broadcast"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The shape of a job. A rank is numbered (pipeline, replicate, shard, tensor), the last running fastest."""

    pipeline: int
    replicate: int = 1  # copies of each stage that share the data
    shard: int = 1  # ranks that share the data and one copy's weights, gradients and moments
    tensor: int = 1  # ranks that share the data's rows and every matrix product

    @property
    def data(self) -> int:
        """Pipelines that each take their own rows of a batch."""
        return self.replicate * self.shard

    @property
    def per_stage(self) -> int:
        return self.data * self.tensor

    @property
    def world_size(self) -> int:
        return self.pipeline * self.per_stage

    def __str__(self) -> str:
        parts = [
            f"{count} {what}"
            for count, what in (
                (self.replicate, "data-parallel replicas"),
                (self.shard, "data-parallel shards"),
                (self.tensor, "tensor-parallel parts"),
            )
            if count > 1
        ]
        return f"{self.pipeline} pipeline ranks" + "".join(f" x {part}" for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreeOptions:
    """What was asked for. None: whatever the number of ranks comes to; of both data-parallel ways, by copies."""

    replicate: int | None = None
    shard: int | None = 1
    tensor: int = 1
    load: Load = "rows"

    def resolve(self, num_pipeline_ranks: int, world_size: int) -> Degrees:
        """Give each stage its ranks.

        Raises:
            InputError: there are fewer ranks than the manifest needs, or they cannot be dealt out.
            UsageError: the degrees asked for do not come to this number of ranks.
        """
        per_stage, rest = divmod(world_size, num_pipeline_ranks)
        if rest or not per_stage:
            near = per_stage * num_pipeline_ranks
            start = f"start {near} or {near + num_pipeline_ranks}"
            if not per_stage:
                start = f"runner launch MANIFEST --nproc-per-node {num_pipeline_ranks}"
            multiple = ", or a multiple of them" if per_stage else ""
            raise InputError(
                "",
                f"manifest needs {num_pipeline_ranks} ranks{multiple}, WORLD_SIZE is {world_size}",
                f"{start}, or reshard pack MANIFEST --layout pp={world_size} --out DIR",
            )
        if per_stage % self.tensor:
            unit = num_pipeline_ranks * self.tensor
            lower = world_size // unit * unit
            raise UsageError(
                "--tp",
                f"expected a divisor of {per_stage}, the ranks of each stage, found {self.tensor}",
                f"start {lower} or {lower + unit} ranks" if lower else f"start {unit} ranks",
            )
        data = per_stage // self.tensor
        replicate = self.replicate or data // (self.shard or data) or 1
        shard = self.shard or max(1, data // replicate)
        if replicate * shard != data:
            asked = "--dp-replicate" if self.replicate else "--dp-shard"
            left = "both degrees" if self.replicate and data % (self.shard or data) else asked
            hint = f"start {num_pipeline_ranks * self.tensor * replicate * shard} ranks, or leave {left} out"
            raise UsageError(
                asked,
                f"{replicate} replicas of {shard} shards are {replicate * shard} data-parallel ranks for each stage, "
                f"and {world_size} ranks over {num_pipeline_ranks} pipeline ranks and --tp {self.tensor} leave {data}",
                hint,
            )
        return Degrees(pipeline=num_pipeline_ranks, replicate=replicate, shard=shard, tensor=self.tensor)
