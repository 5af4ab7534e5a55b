"""What all ranks hold as a checkpoint: every rank writes its own stages' bundles, rank 0 commits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from manifests.digest import Hasher, digest_bytes
from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME
from manifests.paths import shard_path
from manifests.publish import publishing
from manifests.safetensors import header_template, layout_tensors
from manifests.schema import WEIGHTS, Holds, Manifest, Parent, RandomState, Shard, Stage, TrainingState
from manifests.store import read_small_file, sync_folder, write_file, write_manifest
from runner.fill import TORCH_DTYPES
from runner.held import Held
from runner.together import together

__all__ = ["Job", "parent_of", "save", "write_shard"]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a run's checkpoints have in common: the manifest it trains, in `root`, and what its weights descend from."""

    manifest: Manifest
    root: Path
    parents: tuple[Parent, ...]


def save(
    held: Held,
    job: Job,
    out: Path,
    training: TrainingState,
    *,
    force: bool = False,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Write what every rank holds as a checkpoint at `out`, and give the bytes of all its shards.

    Every rank of the group calls this, with `training` the same but for `random`, which is each rank's own.
    Nothing is visible at `out` before every bundle is on disk.

    Raises:
        UserError: the same on every rank, whichever rank met it.
    """
    with ExitStack() as stack:
        folder: list[str] = []
        with together("save", group):
            if dist.get_rank() == 0:
                folder = [str(stack.enter_context(publishing(out, force=force, is_ours=_is_bundle_folder)))]
        shared: list[list[str]] = [folder]
        dist.broadcast_object_list(shared, src=0, group=group)
        target = Path(shared[0][0])
        written: list[Stage] = []
        with together("save", group):
            for index, kinds in held.items():
                written.append(_write_stage(job.manifest.stages[index], kinds, target))
        gathered: list[tuple[list[Stage], tuple[RandomState, ...]]] = [([], ())] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (written, training.random), group=group)
        with together("save", group):
            if dist.get_rank() == 0:
                stages = {stage.index: stage for part, _ in gathered for stage in part}
                random = tuple(state for _, states in gathered for state in states)
                _commit(job, stages, target, replace(training, random=random))
                stack.close()
    return sum(shard.nbytes for part, _ in gathered for stage in part for shard in stage.shards)


def parent_of(root: Path) -> Parent:
    """Name the manifest in `root` as what another one descends from."""
    return Parent(location=str(root.resolve()), digest=digest_bytes(read_small_file(root / MANIFEST_NAME)))


def write_shard(tensors: Mapping[str, torch.Tensor], root: Path, path: str, holds: Holds = WEIGHTS) -> Shard:
    """Write a shard of these tensors, in this order, with their digests, and bring it to disk.

    Raises:
        InputError: it cannot be written: the disk is full, or the folder is read-only.
    """
    entries = layout_tensors((fqn, _NAMES[tensor.dtype], tuple(tensor.shape)) for fqn, tensor in tensors.items())
    header, digests, file = header_template(entries, {}), dict[str, str](), root / path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as stream:
            stream.write(header)
            for fqn, tensor in tensors.items():
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                digests[fqn] = Hasher(data).hexdigest()
                stream.write(data)
            header = header_template(entries, {}, digests)
            stream.seek(0)
            stream.write(header)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(file.parent)
    except OSError as error:
        raise InputError(str(file), f"cannot be written: {error.strerror}") from error
    nbytes = len(header) + sum(entry.nbytes for entry in entries)
    return Shard(path=path, nbytes=nbytes, digest=digest_bytes(header), holds=holds)


def _write_stage(stage: Stage, kinds: Mapping[Holds, Mapping[str, torch.Tensor]], folder: Path) -> Stage:
    shards = tuple(
        write_shard(tensors, folder, shard_path(stage.index, holds), holds)
        for holds, tensors in kinds.items()
        if tensors
    )
    weights = kinds[WEIGHTS].values()
    return replace(
        stage, shards=shards, spans=(), num_tensors=len(weights), nbytes=sum(weight.nbytes for weight in weights)
    )


def _commit(job: Job, stages: Mapping[int, Stage], folder: Path, training: TrainingState) -> None:
    for carried in job.manifest.files:
        target = folder / carried.path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, read_small_file(job.root / carried.path, carried.digest))
    write_manifest(
        folder,
        replace(
            job.manifest,
            created_by=f"runner {version('reshard')}",
            stages=tuple(stages[index] for index in sorted(stages)),
            parents=job.parents,
            training=training,
            virtual=None,
        ),
    )


def _is_bundle_folder(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()
