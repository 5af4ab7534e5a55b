"""export: from bundles back to a Hugging Face folder, or to a checkpoint of another trainer; what all writers share.

The files are written in the plan's order, then a record of them, and last the file that commits.

# Note [Record of an export]
With it, `--force` replaces what an export wrote and nothing else. It is beside the folder, since what an export writes
must equal the source: for `DIR/NAME` it is `DIR/.NAME.exported.json`. It lists the files of an export, with sizes and
modification times of the shards: a folder with other shards is not that export. An export in a bucket is not replaced.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from manifests.errors import (
    CheckpointError,
    InputError,
    OutputError,
    Parameter,
    UsageError,
    check_choice,
)
from manifests.jsontext import parse_json_object
from manifests.optimizer_state import EMA, is_plain, kinds_of
from manifests.schedules.learning_rate import rate_at
from manifests.schema import MOMENTS, LearningRate, OptimizerState, ParameterGroup, TrainingState
from manifests.store import read_small_file, write_file
from manifests.trained import STEPS_NAME, TRAINED_NAME, decode_steps
from reshard.archives.names import DATA_SUFFIX
from reshard.copy.destination import FolderTarget, check_apart, check_unchanged, copy_files, open_target
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import Progress, counting
from reshard.formats.delta.chain import ChainAt, list_versions, split_version
from reshard.formats.manifest.read import open_packed
from reshard.formats.open import find_format
from reshard.formats.table import DELTA, TIED_KEY, ExportOptions, ExportResult, export_targets, names_of_targets
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, ExportedWeights, with_average
from reshard.tensors.checksums import verify_records
from reshard.tensors.lazy import MemoryFile
from reshard.tensors.source_index import SUFFIX
from reshard.transforms.casts import check_stored_ties
from reshard.transforms.conversion import ExportDtype, cast_checkpoint, casts_in, with_config
from reshard.transforms.quantize import forget_source, quantize_like_source
from stores.address import is_inside, is_url, output_address, place_of
from stores.base import read_whole
from stores.bundles import TensorAt
from stores.direct_io import Io
from stores.local import LocalFile, LocalFolder
from stores.open import Address, open_manifest, open_store

logger = logging.getLogger(__name__)


def export(
    manifest: str | Path,
    out: str | Path,
    *,
    to: str = "hf",
    names: str = "hf",
    tied_key: str = TIED_KEY,
    weights_only: bool = False,
    weights: ExportedWeights = "trained",
    dtype: ExportDtype = "source",
    quantize: Literal["like-source"] | None = None,
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a manifest's model as a Hugging Face folder, or as a checkpoint that another trainer loads.

    In a Hugging Face folder, untrained tensors are restored byte for byte, in the files that they came from. A DCP
    folder has `names` of Hugging Face's model or torchtitan's, and the optimizer state and training state if there is
    one, unless `weights_only`. `dtype` is as in the source (in a DCP folder: as trained), or one for all parameters.
    `to="deepspeed"` writes the layers of a PipelineModule, weights alone; `to="universal"` DeepSpeed's Universal
    Checkpoint, in float32, with optimizer state, and with `names` of Hugging Face's model or of a PipelineModule,
    the `TiedLayerSpec` of whose tied embedding has the key `tied_key`.
    `quantize="like-source"`, in a Hugging Face folder, quantizes what `pack` dequantized as the source has it.
    `weights="ema"` writes the average of a run with --ema in place of the weights, and no optimizer state.
    `to="megatron"` writes what Megatron-LM loads, with optimizer state for its distributed optimizer.
    `out`, `force`, `io`, `sync` and `parallelism` are those of `pack`.

    Units: `nbytes` in bytes; progress is called with bytes done and bytes in total.
    Raises:
        ManifestError, ShardError: the manifest or a bundle is damaged.
        OutputError: `out` exists (`output.exists`), cannot be written, or is where the model came from.
        SourceError: a version of a chain has different copies of a tied weight, and the format has one for both.
        UsageError: `out` is inside what is read, or weights cannot be cast.

    Example:
        >>> done = reshard.export("model-pp2", "model-again")
        >>> done.identical, (Path("model-again/config.json").read_bytes() == Path("model/config.json").read_bytes())
        (True, True)
    """
    targets = export_targets()
    check_choice(Parameter("to"), to, targets)
    check_choice(Parameter("names"), names, names_of_targets())
    check_choice(Parameter("dtype"), dtype, get_args(ExportDtype))
    check_choice(Parameter("io"), io, get_args(Io))
    check_choice(Parameter("weights"), weights, get_args(ExportedWeights))
    kind, target = targets[to]
    has_other_names = names != "hf" and names not in target.names
    for name, is_wrong, problem in (
        ("names", has_other_names, f"{names} is not for {Parameter('to', to)}"),
        ("tied_key", tied_key != TIED_KEY and names != "pipeline", f"is for {Parameter('names', 'pipeline')}"),
        ("weights_only", weights_only and not target.has_state, f"{Parameter('to', to)} has weights alone"),
        ("dtype", target.is_float32 and dtype not in ("source", "fp32"),
         f"{Parameter('to', to)} has float32 weights, not {dtype}"),
    ):  # fmt: skip
        if is_wrong:
            raise UsageError(Parameter(name), problem, "leave it out", code="options.conflict")
    if quantize is not None:
        check_choice(Parameter("quantize"), quantize, ("like-source",))
    if quantize is not None and (to != "hf" or dtype != "source"):
        other = Parameter("to", to) if to != "hf" else Parameter("dtype", dtype)
        problem = f"is not for {other}: files and dtypes are those of the source"
        raise UsageError(Parameter("quantize", quantize), problem, "remove one of them", code="options.conflict")
    checkpoint = _open_to_export(str(manifest))
    address = output_address(out)
    check_export_to(address, checkpoint, force=force)
    has_state = checkpoint.moments and target.has_state and not weights_only and weights != EMA
    if has_state and any(item.path == TRAINED_NAME for item in checkpoint.auxiliary):
        problem = "has optimizer state of the parameters that were not frozen alone"
        raise refuse_state(checkpoint, problem)
    checkpoint = _with_steps(checkpoint)
    if has_state and checkpoint.steps and to != "dcp":
        what = "%s: %d parameters took fewer optimizer steps than the others: with %s they have taken as many"
        logger.warning(what, checkpoint.location, len(checkpoint.steps), Parameter("to", to))
    if weights == EMA:
        checkpoint = with_average(checkpoint)
    if weights_only or weights == EMA or not target.has_state:
        trained = None if checkpoint.trained is None else replace(checkpoint.trained, optimizer=None)
        checkpoint = replace(checkpoint, moments={}, trained=trained)
    if quantize is not None:
        checkpoint = quantize_like_source(checkpoint)
    checkpoint = forget_source(checkpoint)
    if to != "hf":
        if checkpoint.manifest is None:
            check_stored_ties(checkpoint, can_drop=False)
        _check_dtypes(checkpoint)
        if checkpoint.untied:  # who reads other formats goes by the config
            checkpoint = with_config(checkpoint, checkpoint.read_config(), "without ties")
    planned = cast_checkpoint(checkpoint, dtype) if to == "hf" else checkpoint
    total = sum(tensor.nbytes for kinds in (planned.tensors, *planned.moments.values()) for tensor in kinds.values())
    write = WriteOptions(io=io, sync=sync, progress=counting(progress, total), parallelism=parallelism or Parallelism())
    options = ExportOptions(to=to, names=names, tied_key=tied_key, dtype=dtype, force=force, write=write)
    return kind.export(checkpoint, address, options)


def _with_steps(checkpoint: Checkpoint) -> Checkpoint:
    """Read the step counts of parameters that took others than the checkpoint."""
    recorded = next((item for item in checkpoint.auxiliary if item.path == STEPS_NAME), None)
    if recorded is None:
        return checkpoint
    steps = decode_steps(read_whole(recorded.file, recorded.digest), str(recorded.file))
    return replace(checkpoint, steps=steps)


def _open_to_export(source: str) -> Checkpoint:
    """Open a manifest, or a chain of versions."""
    address, version = split_version(source)
    if version is None:
        if is_url(source):
            has_versions = find_format(source)[0] is DELTA
        else:  # a bare name is never one of the hub: Note [Kind of an address]
            has_versions = os.path.isdir(source) and bool(list_versions(LocalFolder(Path(source))).numbers)
        if not has_versions:
            return open_packed(open_manifest(source))
    return DELTA.open_checkpoint(ChainAt(open_store(address), version))


Casts = Mapping[tuple[str, str], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """What an export writes, in this order; without the `last` file, readers of the format see no checkpoint."""

    copied: Sequence[AuxiliaryAt]
    shards: Sequence[OutputShard]
    made: Sequence[MemoryFile] = ()
    last: str
    last_bytes: Callable[[], bytes]

    @property
    def names(self) -> set[str]:
        files = (item.path for item in self.copied)
        return {*files, *(shard.path for shard in self.shards), *(file.name for file in self.made), self.last}


def check_export_to(out: Address, checkpoint: Checkpoint, *, force: bool) -> None:
    """Refuse an output that overlaps what is exported, or, with `force`, the folder that the model came from."""
    check_apart(out, checkpoint, may_replace=False)
    place, origin = place_of(out), place_of(checkpoint.source.location)
    if force and (place == origin or is_inside(place, origin) or is_inside(origin, place)):
        source = checkpoint.source.location
        problem = (
            f"overlaps the folder that the model came from, {source}, which {Parameter('force', True)} does not replace"
        )
        raise OutputError(str(out), problem, f"choose another {Parameter('out')}", code="output.overlaps-source")


def _check_dtypes(checkpoint: Checkpoint) -> None:
    """Refuse tensors that torch.save does not write."""
    from reshard.archives.saved import TORCH_NAMES  # with the reader of pickles

    for tensor in checkpoint.tensors.values():
        if tensor.dtype not in TORCH_NAMES:
            hint = "dequantize the weights with reshard pack --dequantize"
            raise UsageError(tensor.place, f"torch has no dtype for {tensor.dtype}", hint, code="options.array-dtype")


def cast_for_export(checkpoint: Checkpoint, dtype: ExportDtype) -> tuple[Checkpoint, Casts]:
    """Return a checkpoint in the dtypes that another trainer is to have, as trained by default, and what is cast."""
    if dtype == "source":
        return checkpoint, {}
    checkpoint = cast_checkpoint(checkpoint, dtype)
    return checkpoint, casts_in(checkpoint)


def publish_export(
    out: Address, plan: ExportPlan, options: ExportOptions, casts: Casts, *, identical: bool = False
) -> ExportResult:
    """Write an export to a folder or a bucket."""
    with open_target(
        out, plan.shards, force=options.force, find_owned=files_of_export, wanted=plan.names, last=plan.last
    ) as target:
        copy_files(plan.copied, target)
        target.write_shards(plan.shards, options.write)
        for file in plan.made:
            target.copy(file.name, file)
        verify_records(origin for shard in plan.shards for origin in shard.origins)
        check_unchanged(plan.shards, plan.copied)
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
    owned: dict[str, TensorAt] = {}
    for fqn, tensor in tensors.items():
        owner = owners.get(fqn, fqn)
        if not fqn.endswith(checkpoint.shape.ignored_suffixes) and owner not in owned:
            owned[owner] = tensor if owner == fqn else replace(tensor, name=owner)
    return owned


def refuse_state(checkpoint: Checkpoint, problem: str, *, code: str = "checkpoint.other-optimizer") -> CheckpointError:
    hint = f"{Parameter('weights_only', True)} exports the weights without it"
    return CheckpointError(f"{checkpoint.location}: training", problem, hint, code=code)


def check_moments(checkpoint: Checkpoint, optimizer: OptimizerState) -> None:
    """Refuse other kinds of optimizer state than AdamW's."""
    kinds = [kind.name for kind in kinds_of(optimizer)]
    if sorted(kinds) != sorted(MOMENTS):
        problem = f"expected {' and '.join(MOMENTS)} of AdamW alone, found {', '.join(kinds) or 'no state'}"
        raise refuse_state(checkpoint, problem)


def rate_of(checkpoint: Checkpoint, trained: TrainingState) -> LearningRate:
    if trained.learning_rate is None:
        problem = "has no learning rate, which an optimizer of torch must have"
        raise refuse_state(checkpoint, problem, code="checkpoint.no-learning-rate")
    return trained.learning_rate


def adamw_options(checkpoint: Checkpoint, trained: TrainingState, optimizer: OptimizerState) -> dict[str, object]:
    """Return the options of the parameter group, at the learning rate of the next step."""
    rate = rate_of(checkpoint, trained)
    check_moments(checkpoint, optimizer)
    if len(optimizer.groups) > 1 or optimizer.name != "AdamW" or not is_plain(optimizer.groups[0]):
        problem = f"expected AdamW with one parameter group, found {optimizer.name} with {len(optimizer.groups)}"
        raise refuse_state(checkpoint, problem)
    group: ParameterGroup = optimizer.groups[0]
    return {
        "lr": rate_at(trained.step, rate), "betas": (group.beta1, group.beta2), "eps": group.eps,
        "weight_decay": group.weight_decay, "initial_lr": rate.peak,
    }  # fmt: skip


_FORMAT = "reshard-export"
_SHARD_SUFFIXES = (SUFFIX, DATA_SUFFIX, ".pt")
_Files = Mapping[str, str]  # state of each shard, "" of other files, by path


def files_of_export(out: Path) -> Collection[str] | None:
    """Return the paths that an export wrote to a folder, or None if there is no record of that."""
    return next((files.keys() for files in _recorded_files(out) if _describes(files, out)), None)


def record_export(out: Path, folder: Path, names: Iterable[str], *, is_published: bool) -> None:
    """Record the files of `folder`, which becomes `out`; until it is published, those of the earlier `out` as well."""
    files = {name: _state_of_file(folder / name) for name in sorted(names)}
    earlier = [] if is_published else [files for files in _recorded_files(out) if _describes(files, out)]
    record = {"format": _FORMAT, "version": 1, "exports": [files, *earlier]}
    write_file(_record_path(out), json.dumps(record, indent=1).encode())


def _decoded(data: bytes, where: str) -> list[_Files]:
    """Return the exports that a record lists; none if it is another file."""
    body = parse_json_object(data, where)
    exports = body.get("exports")
    if body.get("format") != _FORMAT or body.get("version") != 1 or not isinstance(exports, list):
        return []
    return [files for files in exports if isinstance(files, dict)]


def _record_path(out: Path) -> Path:
    out = out.resolve() if out.name in ("", "..") else out
    name = out.name
    if name.startswith(".") and name.endswith(".partial"):  # what `out` was a moment ago, or is about to be
        name = name[1:].removesuffix(".partial")
    return out.parent / f".{name}.exported.json"


def _recorded_files(out: Path) -> list[_Files]:
    path = _record_path(out)
    if not os.path.lexists(path):
        return []
    try:
        return _decoded(read_small_file(path), str(path))
    except InputError:
        return []


def _describes(files: _Files, out: Path) -> bool:
    """Whether a folder's shards are those of the record; shards that were removed do not count."""
    shards = [name for name in files if name.endswith(_SHARD_SUFFIXES) and os.path.lexists(out / name)]
    return bool(shards) and all(_state_of_file(out / name) == files[name] for name in shards)


def _state_of_file(path: Path) -> str:
    return LocalFile(path).fingerprint if path.name.endswith(_SHARD_SUFFIXES) and not path.is_symlink() else ""
