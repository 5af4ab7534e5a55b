"""A checkpoint as a table: where each tensor lies, and what else came with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manifests.digest import PREFIX
from manifests.errors import ShardError
from manifests.models import ModelShape
from manifests.schema import Holds, Manifest, Parent, Source
from reshard.tensors.source_index import SourceRecord
from stores.base import InputFile
from stores.bundles import TensorAt, tensors_in

__all__ = ["CarriedAt", "Checkpoint", "OriginalFiles", "TensorAt", "check_digest", "tensors_in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedAt:
    """A small file that travels with the weights: its path in the checkpoint, and where it is now."""

    path: str
    file: InputFile
    digest: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginalFiles:
    """The source's own weight files, by their names in its folder."""

    location: str
    revision: str | None
    files: Mapping[str, InputFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Everything known of a source before a tensor is read.

    `tensors` holds each stored FQN once, merged of its slices if it has any (see `slices_of`); a tied FQN that
    no file stores is absent. Each kind of `moments` is the same of the parameters, under their FQNs.
    """

    shape: ModelShape
    tensors: Mapping[str, TensorAt]
    carried: tuple[CarriedAt, ...]
    record: SourceRecord
    source: Source
    parents: tuple[Parent, ...] = ()
    manifest: Manifest | None = None  # when the source is a manifest
    originals: OriginalFiles | None = None  # when tensors still lie in them
    moments: Mapping[Holds, Mapping[str, TensorAt]] = field(default_factory=dict)  # of a training checkpoint
    merges_slices: bool = False  # whether tensors that are stored in slices are packed whole

    @property
    def location(self) -> str:
        """Where it lies; `source` says where its weights came from in the first place."""
        return self.parents[-1].location if self.manifest else self.source.location


def check_digest(tensor: TensorAt, found: str) -> None:
    """Raise unless bytes with the hex digest `found` are the tensor's, as far as that is known."""
    if tensor.digest is not None and found != tensor.digest:
        raise ShardError(
            f"{tensor.file}: {tensor.name!r}",
            f"expected {PREFIX}{tensor.digest}, found {PREFIX}{found}",
            "the shard was changed or damaged after it was written; pack it again from its source",
            code="shard.digest-mismatch",
        )
