"""What readers of other trainers' checkpoints share: tensors as a checkpoint of one model, and the options of AdamW.

Trainers save these options as dicts of numbers, whose learning rate is that of the next step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from struct import calcsize, unpack
from typing import Any

from manifests.errors import Parameter, SourceError
from manifests.models import ModelShape, is_sized_by_files, model_shape
from manifests.models.config import CONFIG_NAME
from manifests.schema import Holds, LearningRate, ModelDescription, ParameterGroup, Source, TrainingState
from manifests.trained import STEPS_NAME, TRAINED_NAME
from manifests.training_state import LARGEST_NUMBER, LARGEST_RATE, state_problems
from reshard.formats.auxiliary import names_weights
from reshard.formats.table import OpenOptions
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, OriginalFiles
from reshard.tensors.comparison import check_coverage, drop_tensors, stored_in, trained_part, under_fqns, without_absent
from reshard.tensors.source_index import record_anew
from reshard.transforms.casts import FLOATS
from stores.base import Folder, InputFile, read_config, read_range
from stores.bundles import TensorAt

OPTIMIZER = "optimizer"  # what `drop` calls the optimizer state
OF_OPTIMIZER = re.compile(rf"(chained_\d+\.)?{OPTIMIZER}\.")  # its entries, those of Megatron-Core's chained ones too


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A config.json, and the shape of its model; None if that depends on the names of the tensors."""

    file: InputFile
    fields: Mapping[str, Any]
    shape: ModelShape | None


def read_model_config(file: InputFile, description: ModelDescription | None = None) -> ModelConfig:
    fields, where = read_config(file), str(file)
    needs_tensors = is_sized_by_files(fields, where, description)
    return ModelConfig(file=file, fields=fields, shape=None if needs_tensors else model_shape(fields, where))


def config_in(folder: Folder) -> InputFile:
    if CONFIG_NAME not in folder.names():
        raise SourceError(
            f"{folder}/{CONFIG_NAME}",
            "no such file, and the checkpoint itself does not describe the model",
            "copy the config.json (and tokenizer files) of the Hugging Face model into the folder",
            code="source.no-config",
        )
    return folder.file(CONFIG_NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensors:
    """The weights of a model, by FQN and in its order: all but those that were `dropped`, by their names in files."""

    shape: ModelShape
    weights: Mapping[str, TensorAt]
    dropped: Mapping[str, TensorAt]
    where: str
    description: ModelDescription | None = None

    @classmethod
    def cover(
        cls, weights: MutableMapping[str, TensorAt], config: ModelConfig, options: OpenOptions, where: str
    ) -> ModelTensors:
        """Check that weights are exactly those of the model."""
        stored = dict(weights)
        dropped = {name: stored[name] for name in drop_tensors(weights, options.drop - {OPTIMIZER}, config.shape)}
        shape = config.shape or model_shape(
            config.fields, str(config.file), stored_in(weights, where), options.description
        )
        weights = _under_owners(under_fqns(weights, shape), shape, dropped)
        shape = without_absent(shape, weights)
        try:
            check_coverage(weights, shape, where, frozenset(dropped))
        except SourceError as error:
            is_plain = all(tensor.dtype in FLOATS for tensor in weights.values())
            if error.code == "source.missing-tensor" and config.fields.get("quantization_config") and is_plain:
                hint = f"if the weights are not quantized, remove quantization_config from {CONFIG_NAME}"
                raise error.changed(hint=hint) from None
            raise
        ordered = {fqn: weights[fqn] for fqn in (*shape.tensors, *weights) if fqn in weights}
        return cls(shape=shape, weights=ordered, dropped=dropped, where=where, description=options.description)

    def fqn_of(self, name: str) -> str:
        """Return the FQN of a name in files: of a tied weight, that of its owner."""
        fqn = self.shape.fqn_of(name)
        return next((group[0] for group in self.shape.ties if fqn in group and group[0] in self.weights), fqn)

    def cover_state(
        self, kind: Holds, state: MutableMapping[str, TensorAt], shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, TensorAt]:
        """Check that one kind of optimizer state is of exactly the trained weights; return it in their order.

        `shapes` are those of its state, if it is of some weights or of another shape than theirs.
        """
        state = _under_owners(under_fqns(state, self.shape), self.shape, self.dropped)
        ordered = {fqn: state[fqn] for fqn in (*self.weights, *state) if fqn in state and fqn not in self.dropped}
        trained = trained_part(self.shape)
        trained = trained if shapes is None else replace(trained, tensors=shapes)
        try:
            check_coverage(ordered, trained, f"{self.where}: {kind}", frozenset(self.dropped))
        except SourceError as error:  # of a parameter that was frozen, perhaps
            raise error.changed(hint=without_optimizer()) from None
        return ordered

    def checkpoint(
        self, folder: Folder, files: Collection[str], auxiliary: tuple[AuxiliaryAt, ...], left_out: tuple[str, ...]
    ) -> Checkpoint:
        """Return the checkpoint without optimizer state. `files` have the tensors; slices of them are packed whole.

        Weights in other files, such as a model.safetensors beside them, are left out: readers would prefer them. So is
        what a run of ours wrote about its own training, which would be taken for that of this checkpoint.
        """
        location, revision = folder.location, folder.revision
        others = {
            item.path for item in auxiliary if names_weights(item.path) or item.path in (TRAINED_NAME, STEPS_NAME)
        }
        left_out += tuple(item.path for item in auxiliary if item.path in others)
        return Checkpoint(
            shape=self.shape,
            tensors=self.weights,
            auxiliary=tuple(item for item in auxiliary if item.path not in others),
            record=record_anew((*self.weights.values(), *self.dropped.values()), tuple(self.dropped)),
            source=Source(kind=folder.kind, location=location, revision=revision, left_out=left_out),
            originals=OriginalFiles(
                location=location, revision=revision, files={name: folder.file(name) for name in files}
            ),
            description=self.description,
            merges_slices=True,
        )


def _under_owners(
    tensors: MutableMapping[str, TensorAt], shape: ModelShape, dropped: Collection[str]
) -> MutableMapping[str, TensorAt]:
    """Return the tensors with a tied one under its owner's name: weights and optimizer state may have two names."""
    for owner, *others in shape.ties:
        name = next((fqn for fqn in others if fqn in tensors), None)
        if name is not None and owner not in tensors and owner not in dropped:
            tensors[owner] = replace(tensors.pop(name), name=owner)
    return tensors


BAD_OPTIMIZER = "source.bad-optimizer-state"
_SCALARS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
_NOT_ADAMW = {"amsgrad": True, "maximize": True, "bias_correction": False}
DECOUPLED = "decoupled_weight_decay"
_OPTIONS = ("betas", "eps", "weight_decay")
_KNOWN = {
    *_OPTIONS, *_NOT_ADAMW, DECOUPLED, "lr", "step", "params", "param_names", "name",
    "initial_lr", "max_lr", "min_lr", "lr_mult", "pre_lr_mult", "is_decoupled_lr",  # `lr` is what they lead to
    "wd_mult", "pre_wd_mult", "start_wd", "end_wd",  # as is `weight_decay`
    "foreach", "fused", "capturable", "differentiable",  # how it is computed
    "is_expert", "is_expert_parallel", "default_config",  # how Megatron groups parameters
}  # fmt: skip


def without_optimizer() -> str:
    """Return the hint of an error about optimizer state that cannot be packed."""
    return f"{Parameter('drop', ['optimizer'])} packs the weights alone"


def bad_optimizer(where: str, problem: str) -> SourceError:
    return SourceError(where, problem, without_optimizer(), code=BAD_OPTIMIZER)


def groups_in(state: Mapping[object, object], where: str) -> list[Mapping[object, object]]:
    """Return the options of each group of an optimizer's state."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise bad_optimizer(where, "expected param_groups, those of AdamW")
    for group in groups:
        check_adamw(group, where)
    return groups


def check_adamw(options: Mapping[object, object], where: str) -> None:
    """Raise SourceError for options of another optimizer than AdamW, or that are not known."""
    other = [f"{name}={value}" for name, value in _NOT_ADAMW.items() if options.get(name, not value) == value]
    other += [f"{str(name)[:80]!r}" for name in options if name not in _KNOWN]
    if options.get(DECOUPLED) is False and options.get("weight_decay"):
        other.append(f"{DECOUPLED}=False")
    if other:
        raise bad_optimizer(where, f"expected AdamW, found {', '.join(other)}")


def checked_state(state: TrainingState, where: str) -> TrainingState:
    """Return the training state of a source, which a manifest may have."""
    for path, problem in state_problems(state):
        raise bad_optimizer(f"{where}: {path}", problem)
    return state


def group_of(options: Mapping[object, object], where: str) -> ParameterGroup:
    """Return a group of parameters with these options."""
    match tuple(options.get(name) for name in _OPTIONS):
        case (
            (float() as beta1, float() as beta2) | [float() as beta1, float() as beta2],
            int() | float() as eps,
            int() | float() as decay,
        ) if max(abs(eps), abs(decay)) <= LARGEST_NUMBER:
            return ParameterGroup(beta1=beta1, beta2=beta2, eps=float(eps), weight_decay=float(decay))
    problem = f"expected {', '.join(_OPTIONS)} of AdamW, found {str(dict(options))[:120]}"
    raise bad_optimizer(f"{where}: param_groups", problem)


def num_steps_of(counted: Collection[float], where: str) -> int:
    """Return the steps that an optimizer took, as each parameter or group counted them."""
    least, most = min(counted), max(counted)
    if least != most:
        problem = f"parameters took different numbers of steps, from {least} to {most}"
        raise bad_optimizer(where, problem)
    if not (0 <= least < 1 << 53 and least == int(least)):
        raise bad_optimizer(where, f"expected a count of steps, found {least}")
    return int(least)


def constant_rate(rates: Sequence[object]) -> LearningRate | None:
    """Return the learning rate that all groups have, which stays as it is: a trainer's schedule is not the runner's."""
    first, *others = rates or [None]
    if not isinstance(first, int | float) or not 0 <= first <= LARGEST_RATE or any(rate != first for rate in others):
        return None
    return LearningRate(peak=float(first), warmup_steps=0, decay="constant", decay_steps=0, minimum=0.0)


def read_number(value: object, where: str) -> float:
    """Return a finite number, or the one that a tensor has."""
    if isinstance(value, TensorAt) and value.dtype in _SCALARS and value.nbytes == calcsize(_SCALARS[value.dtype]):
        (value,) = unpack(_SCALARS[value.dtype], read_range(value.file, value.begin, value.end))
    if type(value) is int or type(value) is float:
        if abs(value) <= LARGEST_NUMBER:
            return value
        raise bad_optimizer(where, "expected a finite number")
    kind = f"tensor of {value.dtype}" if isinstance(value, TensorAt) else type(value).__name__
    raise bad_optimizer(where, f"expected one number, found a {kind}")
