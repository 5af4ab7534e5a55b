"""What every writer of a format shares: tied tensors once, the options of AdamW, and the writing of its files.

The files are written in the plan's order, then a record of them for `--force`, and last the file that commits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.errors import CheckpointError, OutputError, Parameter
from manifests.schedules.learning_rate import rate_at
from manifests.schema import OptimizerState, ParameterGroup, TrainingState
from reshard.copy.bucket import BucketTarget
from reshard.copy.destination import FolderTarget, check_apart, check_unchanged, copy_files, open_target
from reshard.formats.export_record import files_of_export, objects_of_export, record_export, record_exported_objects
from reshard.formats.table import ExportOptions, ExportResult
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.checksums import verify_records
from reshard.tensors.lazy import MadeFile
from reshard.transforms.cast import ExportDtype, cast_checkpoint, casts_in
from stores.address import is_inside, is_url, place_of
from stores.bundles import TensorAt
from stores.open import Address

Casts = Mapping[tuple[str, str], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """What an export writes, in this order; without the `last` file, readers of the format see no checkpoint."""

    copied: Sequence[AuxiliaryAt]
    shards: Sequence[OutputShard]
    made: Sequence[MadeFile] = ()
    last: str
    last_bytes: Callable[[], bytes]

    @property
    def names(self) -> set[str]:
        files = (item.path for item in self.copied)
        return {*files, *(shard.path for shard in self.shards), *(file.name for file in self.made), self.last}


def check_export_to(out: Address, checkpoint: Checkpoint, *, force: bool) -> None:
    """Refuse an output that overlaps what is exported, or, with `force`, the folder that the model came from.

    Raises:
        OutputError: it is one of them, or would replace the original, of which it may be the only copy.
        UsageError: see `check_apart`.
    """
    check_apart(out, checkpoint, may_replace=False)
    place, origin = place_of(out), place_of(checkpoint.source.location)
    if force and (place == origin or is_inside(place, origin) or is_inside(origin, place)):
        source = checkpoint.source.location
        problem = (
            f"overlaps the folder that the model came from, {source}, which {Parameter('force', True)} does not replace"
        )
        raise OutputError(str(out), problem, f"choose another {Parameter('out')}", code="output.overlaps-source")


def cast_for_export(checkpoint: Checkpoint, dtype: ExportDtype) -> tuple[Checkpoint, Casts]:
    """Return a checkpoint in the dtypes that another trainer is to have, as trained by default, and what is cast."""
    if dtype == "source":
        return checkpoint, {}
    checkpoint = cast_checkpoint(checkpoint, dtype)
    return checkpoint, casts_in(checkpoint)


def publish_export(
    out: Address, plan: ExportPlan, options: ExportOptions, casts: Casts, *, identical: bool = False
) -> ExportResult:
    """Write an export to a folder or a bucket.

    Raises:
        OutputError: `out` exists or cannot be written.
        InputError: as `open_target` and `engine.write_shards`.
    """
    with open_target(
        out,
        plan.shards,
        force=options.force,
        find_owned=files_of_export,
        find_owned_objects=objects_of_export,
        wanted=plan.names,
        last=plan.last,
    ) as target:
        copy_files(plan.copied, target)
        target.write_shards(plan.shards, options.write)
        for file in plan.made:
            target.copy(file.name, file)
        verify_records(origin for shard in plan.shards for origin in shard.origins)
        check_unchanged(plan.shards, plan.copied)
        if isinstance(target, BucketTarget):
            record_exported_objects(target.objects, plan.names)
        target.commit(plan.last, plan.last_bytes())
        if isinstance(target, FolderTarget):
            record_export(Path(out), target.folder, plan.names, is_published=False)
    if not is_url(out):
        with suppress(OSError):  # the record lists both the old export and the new one
            record_export(Path(out), Path(out), plan.names, is_published=True)
    nbytes = sum(shard.nbytes for shard in plan.shards)
    return ExportResult(num_files=len(plan.names), nbytes=nbytes, identical=identical, casts=casts)


def owned_tensors(checkpoint: Checkpoint, tensors: Mapping[str, TensorAt]) -> dict[str, TensorAt]:
    """Return the tensors, each tied one once, under its owner's name, and none that the model recomputes."""
    owners = {fqn: group[0] for group in checkpoint.shape.ties for fqn in group}
    ignored = checkpoint.shape.ignored_suffixes or ("\0",)
    found: dict[str, TensorAt] = {}
    for fqn, tensor in tensors.items():
        owner = owners.get(fqn, fqn)
        if not fqn.endswith(ignored) and owner not in found:
            found[owner] = tensor if owner == fqn else replace(tensor, name=owner)
    return found


def refuse_state(where: str, problem: str, *, code: str) -> CheckpointError:
    """Return the refusal of optimizer state that another trainer cannot have."""
    hint = f"{Parameter('weights_only', True)} exports the weights without it"
    return CheckpointError(where, problem, hint, code=code)


def adamw_options(checkpoint: Checkpoint, trained: TrainingState, optimizer: OptimizerState) -> dict[str, object]:
    """Return the options of the parameter group, at the learning rate of the next step.

    Raises:
        CheckpointError: there is no learning rate, or another optimizer than AdamW with one group.
    """
    rate, where = trained.learning_rate, f"{checkpoint.location}: training"
    if rate is None:
        problem = "has no learning rate, which an optimizer of torch must have"
        raise refuse_state(where, problem, code="checkpoint.no-learning-rate")
    if len(optimizer.groups) > 1 or optimizer.name != "AdamW":
        problem = f"expected AdamW with one parameter group, found {optimizer.name} with {len(optimizer.groups)}"
        raise refuse_state(where, problem, code="checkpoint.other-optimizer")
    group: ParameterGroup = optimizer.groups[0]
    return {
        "lr": rate_at(trained.step, rate), "betas": (group.beta1, group.beta2), "eps": group.eps,
        "weight_decay": group.weight_decay, "initial_lr": rate.peak,
    }  # fmt: skip
