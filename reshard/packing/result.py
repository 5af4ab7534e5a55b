"""The result of a pack."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from manifests.errors import OutputError
from manifests.invariants import MANIFEST_NAME
from manifests.schema import Manifest
from reshard.copy.parallelism import Used
from reshard.packing.hub_check import HubReport
from stores.open import Address


@dataclass(frozen=True, kw_only=True, slots=True)
class PackResult:
    """What was written: the manifest, its address, and which source files were verified against the hub's SHA-256.

    One `part`, such as `2/8`, has no manifest: `commit` writes it once all parts are there.

    Units: `nbytes` and `virtual_nbytes` in bytes.
    """

    out: Address
    committed: Manifest | None = None
    part: str | None = None
    part_nbytes: int = 0
    hub: HubReport = field(default_factory=HubReport)
    used: Used = field(default_factory=Used)  # threads that copied, and requests that ran at a time

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            OutputError: one part was written (`output.missing-parts`).
        """
        if self.committed is None:
            problem, hint = f"part {self.part} alone has no manifest", "commit the parts once all are written"
            raise OutputError(str(self.out), problem, hint, code="output.missing-parts")
        return self.committed

    @property
    def path(self) -> str:
        """The path or URL of manifest.json."""
        if isinstance(self.out, Path):
            return str(self.out / MANIFEST_NAME)
        return f"{self.out.rstrip('/')}/{MANIFEST_NAME}"

    @property
    def num_stages(self) -> int:
        return self.manifest.layout.num_stages

    @property
    def num_ranks(self) -> int:
        return self.manifest.layout.num_ranks

    @property
    def num_tensors(self) -> int:
        return sum(stage.num_tensors for stage in self.manifest.stages)

    @property
    def nbytes(self) -> int:
        """The size of all shards, or of those of the part, in bytes."""
        return self.part_nbytes if self.committed is None else sum(shard.nbytes for shard in self.manifest.shards)

    @property
    def virtual_nbytes(self) -> int:
        """The size of tensors that virtual bundles refer to in the source's files, in bytes."""
        return sum(stage.nbytes for stage in self.manifest.stages if stage.spans)
