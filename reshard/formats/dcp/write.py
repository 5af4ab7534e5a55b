"""export: from bundles to a folder of torch.distributed.checkpoint, as torchtitan's trainer resumes from.

Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py and filesystem.py; torchtitan 0.3.0, components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from manifests.models.config import CONFIG_NAME
from manifests.schema import MOMENTS, OptimizerState, TrainingState
from reshard.archives.names import METADATA_NAME
from reshard.formats.auxiliary import with_source_files
from reshard.formats.dcp.torchtitan import TitanModel
from reshard.formats.export import ExportPlan, adamw_options, cast_for_export, publish_export, refuse_state
from reshard.formats.saved_state import Placed, SavedState, in_place
from reshard.formats.table import ExportOptions, ExportResult
from reshard.tensors.checkpoint import Checkpoint
from stores.base import read_config
from stores.bundles import TensorAt
from stores.open import Address

_OPTIMIZER, _STATE, _GROUPS = "optimizer", "state", "param_groups"
# Of torch's AdamW, with torchtitan's defaults.
_GROUP_DEFAULTS: Mapping[str, object] = {
    "amsgrad": False, "maximize": False, "foreach": False, "capturable": False, "differentiable": False, "fused": True,
    "decoupled_weight_decay": True,
}  # fmt: skip


def export(checkpoint: Checkpoint, out: Address, options: ExportOptions) -> ExportResult:
    """Write a DCP folder: weights, and AdamW's state and how far they were trained if the checkpoint has them.

    Names are Hugging Face's, or torchtitan's. Weights are as the manifest has them unless `dtype` says otherwise.

    Raises:
        OutputError: `out` exists or cannot be written.
        ShardError: a bundle's bytes do not match their digests.
        ModelError: torchtitan has no such model, or no such tensor.
        CheckpointError: the optimizer state lacks what torchtitan requires.
        UserError: see `cast_checkpoint`.
    """
    checkpoint, casts = cast_for_export(checkpoint, options.dtype)
    saved = _save(checkpoint, options.names == "torchtitan")
    plan = ExportPlan(
        copied=with_source_files(checkpoint.auxiliary, is_same=False),
        shards=saved.files.shards,
        last=METADATA_NAME,  # torch and torchtitan refuse a folder without it
        last_bytes=saved.metadata,
    )
    return publish_export(out, plan, options, casts)


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
    groups = _Groups(checkpoint, trained, trained.optimizer)
    for holds in MOMENTS:
        for fqn, tensor in checkpoint.moments[holds].items():
            if fqn not in tied or fqn in owners:
                placed = place(tensor, is_fused=True)
                saved.add(placed, partial(_state_key, kind=holds))
                groups.add(fqn, placed)
    for key, options in groups.options.items():
        saved.add_step(_state_key(key, "step"), trained.step)
        for option, value in {**options, **_GROUP_DEFAULTS}.items():
            saved.add_value((_OPTIMIZER, f"{_GROUPS}.{key}.{option}"), value)
    saved.add_value(("train_state", "step"), trained.step)
    saved.add_value(("train_state", "ntokens_seen"), trained.num_tokens)
    saved.add_value(("lr_scheduler", "last_epoch"), trained.step)
    return saved


class _Groups:
    """The options of each parameter of another trainer, which may be made of several: all with the same options."""

    def __init__(self, checkpoint: Checkpoint, trained: TrainingState, optimizer: OptimizerState) -> None:
        optimizers = [(group, replace(optimizer, groups=(group,))) for group in optimizer.groups]
        groups = [(group.fqns or ("",), adamw_options(checkpoint, trained, alone)) for group, alone in optimizers]
        self._by_fqn = {fqn: options for fqns, options in groups for fqn in fqns}  # "": of all others
        self._where = f"{checkpoint.location}: training"
        self.options: dict[str, dict[str, object]] = {}

    def add(self, fqn: str, placed: Placed) -> None:
        options = self._by_fqn.get(fqn) or self._by_fqn.get("")
        for key in (place.key for place in placed.places):
            if options is None or self.options.setdefault(key, options) != options:
                problem = f"expected one parameter group of all that {key!r} is made of"
                raise refuse_state(self._where, problem, code="checkpoint.other-optimizer")


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
