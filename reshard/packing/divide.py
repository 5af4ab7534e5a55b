"""How a pack is divided: one part packed here, or all parts and their commit submitted to Slurm or Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.errors import UsageError
from reshard.plans.pack_plan import OutputShard
from reshard.plans.partition import Part, check_num_parts
from stores.address import OBJECT_SCHEMES, is_url, split_url
from stores.open import Address

if TYPE_CHECKING:
    from reshard.packing.kubernetes_job import PackPods
    from reshard.packing.slurm_array import PackJob

NAMED_OPTIONS = ("--partition", "--account", "--time")  # of sbatch, which are flags of reshard, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """One `part` is packed here, or `num_parts` are submitted to a `scheduler`; or neither.

    Slurm gets options of `sbatch`, a Job of Kubernetes an `image` and `mounts`. `command` has the arguments of reshard
    without those that divide the pack.
    """

    part: Part | None = None
    num_parts: int | None = None
    scheduler: str | None = None
    sbatch: tuple[str, ...] = ()
    image: str | None = None
    mounts: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def check(self, out: Address, *, virtual: bool, verify_source: bool, force: bool) -> None:
        """Refuse options that conflict, before a source is opened.

        Raises:
            UsageError: naming the flag.
        """
        if self.sbatch:
            from reshard.packing.slurm_array import check_options

            check_options(self.sbatch)
        flag = "--part" if self.part is not None else "--parts"
        if self.part is not None and self.num_parts is not None:
            problem = "conflicts with --parts: it packs one part here, --parts submits all of them"
            raise UsageError(flag, problem, "leave one of the two out", code="options.conflict")
        if (self.num_parts is None) != (self.scheduler is None):
            given, lacking = ("--parts", "--scheduler") if self.scheduler is None else ("--scheduler", "--parts")
            hint = "use --parts 8 --scheduler slurm, or --part 1/8"
            raise UsageError(given, f"requires {lacking}", hint, code="options.needs-scheduler")
        for lone, value in (("--image", self.image), ("--mount", self.mounts)):
            if value and self.scheduler != "job":
                raise UsageError(lone, "requires --scheduler job", "leave it out", code="options.needs-scheduler")
        if self.sbatch and self.scheduler != "slurm":
            flag = self.sbatch[0].partition("=")[0]
            flag = flag if flag in NAMED_OPTIONS else "--sbatch-arg"
            raise UsageError(flag, "requires --scheduler slurm", "leave it out", code="options.needs-scheduler")
        if self.part is None and self.num_parts is None:
            return
        if verify_source:
            problem = f"conflicts with {flag}: a part does not read whole files"
            raise UsageError("--verify-source", problem, f"pack without {flag}", code="options.conflict")
        if is_url(out):
            if split_url(out)[0] not in OBJECT_SCHEMES:
                problem = "needs an --out in a folder, or a bucket of S3, Google Cloud Storage or Azure"
                raise UsageError(flag, problem, "pack into a folder, and copy it", code="options.parts-store")
            if force:
                problem = f"conflicts with {flag} and an --out in a bucket"
                hint = "remove the old output first, or choose another --out"
                raise UsageError("--force", problem, hint, code="options.conflict")
        if virtual:
            problem = "conflicts with --virtual: a virtual pack has no bytes to divide"
            raise UsageError(flag, problem, "leave one of the two out", code="options.conflict")

    def check_shards(self, shards: Sequence[OutputShard]) -> None:
        """Refuse more parts than there are shards; raises as `check_num_parts`."""
        num_parts = self.part.of if self.part is not None else self.num_parts
        if num_parts is not None:
            check_num_parts("--part" if self.part is not None else "--parts", num_parts, shards)

    def pods(self, source: str, out: Address, *, force: bool) -> PackPods:
        """Return the Job of all parts, the first of which commits.

        Raises:
            UsageError: see `PackPods.check`, or `force` is given: a pod that is started again cannot tell old from new.
            OutputError: `out` exists or cannot be written.
        """
        from reshard.packing.kubernetes_job import PackPods
        from reshard.packing.slurm_array import check_out

        if force:
            problem, hint = "is not supported with --scheduler job", "remove the old output first"
            raise UsageError("--force", problem, hint, code="options.conflict")
        if not is_url(out):
            check_out(Path(out), force=False)
        pods = PackPods(
            num_parts=self.num_parts or 1,
            pack=self.command,
            source=source,
            out=out if is_url(out) else Path(out),
            image=self.image,
            mounts=self.mounts,
        )
        pods.check()
        return pods

    def job(self, out: Address, *, force: bool) -> PackJob:
        """Return the jobs of all parts and their commit.

        Raises:
            OutputError: `out` exists or cannot be written.
        """
        from reshard.packing.slurm_array import PackJob, check_out

        if not is_url(out):
            check_out(Path(out), force=force)
        return PackJob(
            num_parts=self.num_parts or 1,
            pack=self.command,
            commit=("commit", str(out), *(["--force"] if force else [])),
            options=self.sbatch,
        )
