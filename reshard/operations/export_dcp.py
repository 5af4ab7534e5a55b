"""export: from bundles to a folder of torch.distributed.checkpoint, as torchtitan's trainer resumes from.

Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py and filesystem.py; torchtitan 0.3.0, components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from manifests.schema import MOMENTS
from reshard.archives.names import METADATA_NAME
from reshard.copy.engine import WriteOptions
from reshard.operations.export import ExportResult
from reshard.operations.exported_optimizer import adamw_options
from reshard.operations.publish_export import ExportPlan, check_export_to, publish_export
from reshard.operations.saved_state import SavedState
from reshard.sources.huggingface import CONFIG_NAME
from reshard.tensors.checkpoint import Checkpoint, TensorAt
from reshard.transforms.cast import ExportDtype, cast_checkpoint, casts_in
from reshard.transforms.placed import Placed, in_place
from reshard.transforms.torchtitan import TitanModel
from stores.base import read_config
from stores.manifest_file import Address

__all__ = ["export_dcp"]

_OPTIMIZER, _STATE, _GROUPS = "optimizer", "state", "param_groups"
# Of torch's AdamW, with torchtitan's defaults.
_GROUP_DEFAULTS: Mapping[str, object] = {
    "amsgrad": False, "maximize": False, "foreach": False, "capturable": False, "differentiable": False, "fused": True,
    "decoupled_weight_decay": True,
}  # fmt: skip


def export_dcp(
    checkpoint: Checkpoint,
    out: Address,
    *,
    force: bool,
    for_torchtitan: bool,
    weights_only: bool = False,
    dtype: ExportDtype = "source",
    options: WriteOptions | None = None,
) -> ExportResult:
    """Write a DCP folder: weights, and AdamW's state and how far they were trained if the checkpoint has them.

    Names are Hugging Face's, or torchtitan's. Weights are as the manifest has them unless `dtype` says otherwise.

    Raises:
        OutputError: `out` exists, cannot be written, or is where the model came from.
        ShardError: a bundle's bytes do not match their digests.
        ModelError: torchtitan has no such model, or no such tensor.
        CheckpointError: the optimizer state lacks what torchtitan requires.
        UserError: see `cast_checkpoint` and `check_export_to`.
    """
    check_export_to(out, checkpoint, force=force)
    if weights_only:
        checkpoint = replace(checkpoint, trained=None)
    if dtype != "source":
        checkpoint = cast_checkpoint(checkpoint, dtype)
    saved = _save(checkpoint, for_torchtitan)
    plan = ExportPlan(
        copied=checkpoint.auxiliary,
        shards=saved.files.shards,
        last=METADATA_NAME,  # torch and torchtitan refuse a folder without it
        last_bytes=saved.metadata,
    )
    return ExportResult(
        num_files=publish_export(out, plan, options or WriteOptions(), force=force),
        nbytes=sum(shard.nbytes for shard in plan.shards),
        identical=False,
        casts=casts_in(checkpoint) if dtype != "source" else {},
    )


def _save(checkpoint: Checkpoint, for_torchtitan: bool) -> SavedState:
    saved = SavedState()
    model = _titan_model(checkpoint) if for_torchtitan else None

    def place(tensor: TensorAt, *, is_fused: bool) -> Placed:
        return model.place(tensor, is_fused=is_fused) if model else in_place(tensor, tensor.name)

    for fqn, tensor in _with_ties(checkpoint, for_torchtitan):
        if not fqn.endswith(checkpoint.shape.ignored_suffixes or ("\0",)):
            saved.add(place(tensor, is_fused=False), lambda key: (key,))
    for placed in model.balances(checkpoint.tensors) if model else ():
        saved.add(placed, lambda key: (key,))
    trained = checkpoint.trained
    if trained is None or trained.optimizer is None:
        return saved
    tied = {fqn for group in checkpoint.shape.ties for fqn in group}
    owners = {next(fqn for fqn in group if fqn in checkpoint.tensors) for group in checkpoint.shape.ties}
    for holds in MOMENTS:
        for fqn, tensor in checkpoint.moments[holds].items():
            if fqn not in tied or fqn in owners:
                keys = partial(_state_key, kind=holds)
                saved.add(place(tensor, is_fused=True), keys)
    options = {**adamw_options(checkpoint, trained, trained.optimizer), **_GROUP_DEFAULTS}
    for key in _parameters(saved):
        saved.add_step(_state_key(key, "step"), trained.step)
        for option, value in options.items():
            saved.add_value((_OPTIMIZER, f"{_GROUPS}.{key}.{option}"), value)
    saved.add_value(("train_state", "step"), trained.step)
    saved.add_value(("train_state", "ntokens_seen"), trained.num_tokens)
    saved.add_value(("lr_scheduler", "last_epoch"), trained.step)
    return saved


def _parameters(saved: SavedState) -> list[str]:
    """Return the parameters that have optimizer state."""
    prefix, suffix = f"{_STATE}.", f".{MOMENTS[0]}"
    found = (keys[1] for keys in saved.keys if keys[0] == _OPTIMIZER and keys[-1].endswith(suffix))
    return [key.removeprefix(prefix).removesuffix(suffix) for key in found]


def _state_key(key: str, kind: str) -> tuple[str, str]:
    return _OPTIMIZER, f"{_STATE}.{key}.{kind}"


def _titan_model(checkpoint: Checkpoint) -> TitanModel:
    item = next(item for item in checkpoint.auxiliary if item.path == CONFIG_NAME)
    return TitanModel(read_config(item.file, item.digest), checkpoint.shape.tensors, checkpoint.location)


def _with_ties(checkpoint: Checkpoint, for_torchtitan: bool) -> Iterator[tuple[str, TensorAt]]:
    """Yield the weights; torchtitan's state dicts have a tied one under each of its names."""
    yield from checkpoint.tensors.items()
    for group in checkpoint.shape.ties if for_torchtitan else ():
        owner = next(checkpoint.tensors[fqn] for fqn in group if fqn in checkpoint.tensors)
        yield from ((fqn, replace(owner, name=fqn)) for fqn in group if fqn not in checkpoint.tensors)
