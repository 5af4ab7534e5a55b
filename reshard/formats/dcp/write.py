"""export: from bundles to a folder of torch.distributed.checkpoint, as torchtitan's trainer resumes from.

Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py and filesystem.py; torchtitan 0.3.0, components.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from manifests.optimizer_state import GroupNumbers, kinds_of
from manifests.schedules.learning_rate import rate_at
from manifests.schema import OptimizerState, TrainingState
from reshard.archives.names import METADATA_NAME
from reshard.formats.auxiliary import with_source_files
from reshard.formats.dcp.algorithms import CLASSES, SHAPES, algorithm_of, write_options
from reshard.formats.dcp.torchtitan import TitanModel
from reshard.formats.export import ExportPlan, cast_for_export, publish_export, rate_of, refuse_state
from reshard.formats.saved_state import Placed, SavedState, in_place
from reshard.formats.table import ExportOptions, ExportResult
from reshard.tensors.checkpoint import Checkpoint
from stores.bundles import TensorAt
from stores.open import Address

_OPTIMIZER, _STATE, _GROUPS = "optimizer", "state", "param_groups"


def export(checkpoint: Checkpoint, out: Address, options: ExportOptions) -> ExportResult:
    """Write a DCP folder: weights, and optimizer state and how far they were trained if the checkpoint has them.

    Names are Hugging Face's, or torchtitan's. Weights are as the manifest has them unless `dtype` says otherwise.
    """
    model = None
    if options.names == "torchtitan":
        model = TitanModel(checkpoint.read_config(), checkpoint.shape.tensors, checkpoint.location)
        checkpoint = model.without_copies(checkpoint)
    checkpoint, casts = cast_for_export(checkpoint, options.dtype)
    saved = _save(checkpoint, model)
    plan = ExportPlan(
        copied=with_source_files(checkpoint.auxiliary, is_same=False),
        shards=saved.files.shards,
        last=METADATA_NAME,  # torch and torchtitan refuse a folder without it
        last_bytes=saved.metadata,
    )
    return publish_export(out, plan, options, casts)


def _save(checkpoint: Checkpoint, model: TitanModel | None) -> SavedState:
    saved = SavedState()

    def place(tensor: TensorAt, *, is_fused: bool) -> Placed:
        return model.place(tensor, is_fused=is_fused) if model else in_place(tensor, tensor.name)

    for fqn, tensor in checkpoint.tensors.items():
        if not fqn.endswith(checkpoint.shape.ignored_suffixes):
            first, *others = (place(replace(tensor, name=n), is_fused=False) for n in _names_of(fqn, checkpoint))
            places = (*first.places, *(at for placed in others for at in placed.places))
            saved.add(replace(first, places=places), lambda key: (key,))
    for placed in model.balances(checkpoint.tensors) if model else ():
        saved.add(placed, lambda key: (key,))
    trained = checkpoint.trained
    if trained is None or trained.optimizer is None:
        return saved
    tied = {fqn for group in checkpoint.shape.ties for fqn in group}
    owners = {next(fqn for fqn in group if fqn in checkpoint.tensors): group[0] for group in checkpoint.shape.ties}
    groups = _Groups(checkpoint, trained, trained.optimizer)
    of_optimizer = checkpoint.shape.trained
    for fqn in checkpoint.tensors:  # in an order, so that each export has the same bytes
        if fqn in of_optimizer and (fqn not in tied or fqn in owners):
            groups.add(fqn, place(replace(checkpoint.tensors[fqn], name=owners.get(fqn, fqn)), is_fused=True))
    for kind in kinds_of(trained.optimizer):
        if kind.name not in SHAPES or (kind.shape != "parameter" and model):
            problem = f"has {kind.name}, which no optimizer of {'torchtitan' if model else 'torch'} has"
            raise refuse_state(checkpoint, problem)
        for fqn, tensor in checkpoint.moments[kind.name].items():
            if fqn not in tied or fqn in owners:
                owned = replace(tensor, name=owners.get(fqn, fqn))
                saved.add(place(owned, is_fused=True), partial(_state_key, kind=kind.name))
    for key, number in groups.numbers.items():
        options, counts_steps = groups.options[number]
        if counts_steps:
            saved.add_step(_state_key(key, "step"), groups.steps[key])
        for option, value in options.items():
            saved.add_value((_OPTIMIZER, f"{_GROUPS}.{key}.{option}"), value)
    saved.add_value(("train_state", "step"), trained.step)
    saved.add_value(("train_state", "ntokens_seen"), trained.num_tokens)
    saved.add_value(("lr_scheduler", "last_epoch"), trained.step)
    return saved


class _Groups:
    """The number of the group of each parameter of another trainer, which may be made of several, all of one group."""

    def __init__(self, checkpoint: Checkpoint, trained: TrainingState, optimizer: OptimizerState) -> None:
        self._checkpoint = checkpoint
        self.numbers: dict[str, int] = {}
        self.steps: dict[str, int] = {}  # that each parameter took
        self._num_steps = trained.step
        self.options: list[tuple[dict[str, object], bool]] = []  # of each group, and whether it counts steps
        self._of_fqn = GroupNumbers(optimizer.groups, checkpoint.shape.ties)
        rate = rate_of(checkpoint, trained)
        if not rate.peak and any(group.rate_factor is not None for group in optimizer.groups):
            raise refuse_state(checkpoint, "expected a learning rate above 0, as groups have factors of it, found 0")
        for group in optimizer.groups:
            name = algorithm_of(group, optimizer)
            if name not in CLASSES:
                raise refuse_state(checkpoint, f"expected groups of {', '.join(CLASSES)}, found {name}")
            factor = 1.0 if group.rate_factor is None else group.rate_factor
            rates = {"lr": rate_at(trained.step, rate) * factor, "initial_lr": rate.peak * factor}
            self.options.append(({**write_options(group, name), **rates}, CLASSES[name].counts_steps))

    def add(self, fqn: str, placed: Placed) -> None:
        number, steps = self._of_fqn.of(fqn), self._checkpoint.steps.get(fqn, self._num_steps)
        for key in (place.key for place in placed.places):
            if self.options[self.numbers.setdefault(key, number)] != self.options[number]:
                problem = f"expected one parameter group of all that {key!r} is made of"
                raise refuse_state(self._checkpoint, problem)
            if self.steps.setdefault(key, steps) != steps:
                problem = f"expected one number of optimizer steps of all that {key!r} is made of"
                raise refuse_state(self._checkpoint, problem)


def _state_key(key: str, kind: str) -> tuple[str, str]:
    return _OPTIMIZER, f"{_STATE}.{key}.{kind}"


def _names_of(fqn: str, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a weight's name, and those tied to it that are not stored: state dicts of trainers have all of them."""
    group = next((group for group in checkpoint.shape.ties if fqn in group), (fqn,))
    stored = [name for name in group if name in checkpoint.tensors]
    return (fqn, *(name for name in group if fqn == stored[0] and name not in stored))
