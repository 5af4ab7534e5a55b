"""Trained weights as a manifest: every rank writes its own stages' bundles, rank 0 commits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from manifests.digest import Hasher, digest_bytes
from manifests.invariants import MANIFEST_NAME
from manifests.publish import publishing
from manifests.safetensors import header_template, layout_tensors
from manifests.schema import Manifest, Parent, Shard, Stage, TrainingState
from manifests.store import read_small_file, write_file, write_manifest
from runner.fill import TORCH_DTYPES
from runner.together import together

__all__ = ["save_weights", "write_bundle"]

_SHARD_NAME = "model.safetensors"
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def save_weights(
    parameters: Mapping[int, Mapping[str, torch.Tensor]],
    manifest: Manifest,
    root: Path,
    out: Path,
    training: TrainingState,
    *,
    force: bool = False,
) -> None:
    """Write the parameters of every rank's stages, keyed by stage and HF FQN, as a checkpoint at `out`.

    Every rank calls this. Nothing is visible at `out` before every bundle is on disk.

    Raises:
        UserError: the same on every rank, whichever rank met it.
    """
    with ExitStack() as stack:
        folder: list[str] = []
        with together("save"):
            if dist.get_rank() == 0:
                folder = [str(stack.enter_context(publishing(out, force=force, is_ours=_is_bundle_folder)))]
        shared: list[list[str]] = [folder]
        dist.broadcast_object_list(shared, src=0)
        target = Path(shared[0][0])
        written: list[Stage] = []
        with together("save"):
            for index, tensors in parameters.items():
                written.append(_write_stage(manifest, manifest.stages[index], tensors, target))
        gathered: list[list[Stage]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, written)
        with together("save"):
            if dist.get_rank() == 0:
                stages = {stage.index: stage for part in gathered for stage in part}
                _commit(manifest, stages, root, target, training)
                stack.close()


def write_bundle(tensors: Mapping[str, torch.Tensor], path: Path) -> Shard:
    """Write a shard of these tensors, in this order, with their digests, and bring it to disk."""
    entries = layout_tensors((fqn, _NAMES[tensor.dtype], tuple(tensor.shape)) for fqn, tensor in tensors.items())
    blank = header_template(entries, {})
    digests = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(blank)
        for fqn, tensor in tensors.items():
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            digests[fqn] = Hasher(data).hexdigest()
            file.write(data)
        header = header_template(entries, {}, digests)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    nbytes = len(header) + sum(entry.nbytes for entry in entries)
    return Shard(path=f"{path.parent.name}/{path.name}", nbytes=nbytes, digest=digest_bytes(header))


def _write_stage(manifest: Manifest, stage: Stage, tensors: Mapping[str, torch.Tensor], folder: Path) -> Stage:
    """Write one stage's bundle; a replica on its owner's stage is left to its owner."""
    aliases = {
        replica.fqn
        for group in manifest.ties
        for replica in group.replicas
        if replica.stage == group.owner.stage == stage.index
    }
    stored = {fqn: tensor for fqn, tensor in tensors.items() if fqn not in aliases}
    if not stored:
        return replace(stage, shards=(), num_tensors=0, nbytes=0)
    shard = write_bundle(stored, folder / f"stage-{stage.index:03d}" / _SHARD_NAME)
    nbytes = sum(tensor.nbytes for tensor in stored.values())
    return replace(stage, shards=(shard,), num_tensors=len(stored), nbytes=nbytes)


def _commit(manifest: Manifest, stages: Mapping[int, Stage], root: Path, folder: Path, training: TrainingState) -> None:
    for carried in manifest.files:
        target = folder / carried.path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, read_small_file(root / carried.path, carried.digest))
    parent = Parent(location=str(root.resolve()), digest=digest_bytes(read_small_file(root / MANIFEST_NAME)))
    write_manifest(
        folder,
        replace(
            manifest,
            created_by=f"runner {version('reshard')}",
            stages=tuple(stages[index] for index in sorted(stages)),
            parents=(*manifest.parents, parent),
            training=training,
        ),
    )


def _is_bundle_folder(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()
