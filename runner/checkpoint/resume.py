"""What a run goes on from: which checkpoint, whether it fits, and what it remembers. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from manifests.digest import digest_bytes
from manifests.errors import CheckpointError, UsageError
from manifests.invariants import MANIFEST_NAME
from manifests.schema import (
    BatchSizes,
    DataCursor,
    DataPosition,
    LearningRate,
    Manifest,
    OptimizerState,
    ParameterGroup,
    TrainedDtype,
    TrainingState,
)
from manifests.store import read_manifest, read_small_file
from runner.bundle.packed import Packed
from runner.checkpoint.history import checkpoint_path, find_checkpoints, step_of
from runner.config.flags import TrainOptions, flag_of
from runner.config.schema import Dtype, ResumeOptions

__all__ = [
    "advance",
    "check_fits",
    "differences",
    "endings",
    "find_origins",
    "goes_on_from",
    "remember",
    "remembered",
]

_OPTIMIZER = "AdamW"
_DTYPES: Mapping[TrainedDtype, Dtype] = {"F32": "fp32", "BF16": "bf16"}
_STORED = {flag: dtype for dtype, flag in _DTYPES.items()}
_OTHER = "resume a checkpoint of the model that is launched, or launch the manifest of this one"
_ANEW = "--resume-weights-only begins a new run with its weights"
_OTHERS = "--resume auto goes on from the newest; or choose another --checkpoint"


def find_origins(root: Path, options: TrainOptions) -> tuple[Path, ...]:
    """Give the folders of manifests to begin with, the best first; `root` has the one that is launched.

    Raises:
        UsageError: there is nowhere to look for checkpoints.
        InputError: there is no such checkpoint; or the folder of the run's own checkpoints holds later ones, or
            such as this run does not go back to: they belong to another.
    """
    history = options.checkpoint.history if options.checkpoint else None
    past = find_checkpoints(history) if history else ()
    source = options.resume.source
    if source == "auto" and past:
        return past
    origin = root
    if source not in (None, "auto"):
        origin = _named(source, history)
    manifest = read_manifest(origin)
    training = manifest.training
    if source == "auto" and history is None and (training is None or training.optimizer is None):
        problem = f"never finds anything: {origin} holds no optimizer state, and no --checkpoint DIR is given"
        raise UsageError(
            "--resume auto",
            problem,
            "add --checkpoint DIR --checkpoint-every N, or leave it out",
            code="resume.nothing-to-find",
        )
    first = training.step if training and source and not options.resume.weights_only else 0
    if past and (source is None or (step_of(past[0]) or 0) > first):
        raise CheckpointError(
            str(past[0].parent),
            f"holds {past[0].name} already, and this run begins after step {first}",
            _OTHERS,
            code="checkpoint.folder-in-use",
        )
    if past and not _goes_back_to(past[0], origin, manifest):
        raise CheckpointError(
            str(past[0].parent),
            f"holds {past[0].name} already, and {origin} does not go back to it",
            _OTHERS,
            code="checkpoint.folder-in-use",
        )
    return (origin.resolve(),)


def goes_on_from(origin: Packed, resume: ResumeOptions, *, is_launched: bool) -> TrainingState | None:
    """Give the state that a run goes on from; None: it begins at step 0, with the weights alone.

    Raises:
        InputError: the manifest has no state, one that this runner cannot go on from, or one that nobody has
            said what to do with.
    """
    training = origin.manifest.training
    has_moments = training is not None and training.optimizer is not None
    if resume.source is None:
        if has_moments and not resume.weights_only:
            raise CheckpointError(
                origin.where,
                "holds optimizer state, and nothing says whether training goes on from it",
                f"--resume auto does; {_ANEW}",
                code="resume.undecided",
            )
        if resume.weights_only and not has_moments:
            problem = f"needs --resume, or a manifest with optimizer state to leave behind: {origin.where} has none"
            raise UsageError("--resume-weights-only", problem, "leave it out", code="options.needs-resume")
        return None
    if resume.weights_only or (resume.source == "auto" and is_launched and not has_moments):
        return None
    _check_state(training, origin.where)
    return training


def check_fits(origin: Packed, launched: Packed) -> tuple[str, ...]:
    """Give a sentence for each field of config.json that differs, having seen that both are one model.

    Raises:
        InputError: another architecture, other tensors, or another vocabulary.
    """
    expected, found = launched.shape, origin.shape
    if found.architecture != expected.architecture:
        problem = f"holds a {found.architecture}, another model than {expected.architecture}"
        raise CheckpointError(origin.where, problem, _OTHER, code="resume.other-model")
    sizes = [config.get("vocab_size") for config in (launched.config, origin.config)]
    if sizes[0] != sizes[1]:
        problem = f"has another vocabulary: expected {sizes[0]} tokens, found {sizes[1]}"
        raise CheckpointError(origin.where, problem, _OTHER, code="resume.other-model")
    if found.tensors != expected.tensors or found.ties != expected.ties:
        odd = sorted(
            fqn
            for fqn in found.tensors.keys() | expected.tensors.keys()
            if found.tensors.get(fqn) != expected.tensors.get(fqn)
        )
        shown = f"they differ in {odd[0]}" if odd else "they tie other weights"
        raise CheckpointError(
            origin.where, f"holds another model of this architecture: {shown}", _OTHER, code="resume.other-model"
        )
    tokenizers = {packed.tokenizer for packed in (launched, origin)}
    if None not in tokenizers and len(tokenizers) > 1:
        problem = "has another vocabulary: its tokenizer.json is not the launched manifest's"
        raise CheckpointError(origin.where, problem, _OTHER, code="resume.other-model")
    return tuple(
        f"config.json: {name} is {launched.config.get(name)!r} here, {origin.config.get(name)!r} in the checkpoint"
        for name in sorted(origin.config.keys() | launched.config.keys())
        if origin.config.get(name) != launched.config.get(name)
    )


def remembered(training: TrainingState) -> dict[str, Any]:
    """Give the values that a checkpoint remembers of training flags, by the names of their parameters."""
    values: dict[str, Any] = {}
    if training.dtype is not None and training.dtype in _DTYPES:
        values["dtype"] = _DTYPES[training.compute_dtype or training.dtype]
        if training.compute_dtype is not None:
            values["master_dtype"] = _DTYPES[training.dtype]
        if training.reduce_dtype is not None:
            values["reduce_dtype"] = _DTYPES[training.reduce_dtype]
    if training.optimizer is not None:
        (group,) = training.optimizer.groups
        values |= {name: getattr(group, name) for name in ("beta1", "beta2", "eps", "weight_decay")}
        values["max_norm"] = training.optimizer.max_norm
    if (rate := training.learning_rate) is not None:
        values |= {"lr": rate.peak, "min_lr": rate.minimum}
        values |= {name: getattr(rate, name) for name in ("warmup_steps", "stable_steps", "decay")}
        if rate.decay != "constant":  # which never ends: what is stored there is where another one would have
            values["decay_steps"] = rate.decay_steps
    if training.batch is not None:
        values |= asdict(training.batch)
    return values


def differences(options: TrainOptions, training: TrainingState) -> tuple[str, ...]:
    """Give a sentence for each flag that was written and is not what the checkpoint's run went by."""
    values = remembered(training)
    if "dtype" in values:  # the two that take after another one
        values.setdefault("master_dtype", values["dtype"])
        values.setdefault("reduce_dtype", values["master_dtype"])
    return tuple(
        f"{flag_of(name)} {options.values[name]} takes the place of the checkpoint's {value}"
        for name, value in values.items()
        if name in options.given and options.values[name] != value
    )


def endings(options: TrainOptions, training: TrainingState) -> tuple[str, ...]:
    """Give a sentence if all steps are taken, or if some are left for which the decay of the learning rate has ended.

    The options are those with what the checkpoint remembers.
    """
    optim = options.optim
    if training.step >= options.steps:
        return (f"it has taken all of --steps {options.steps}: only a larger number trains on",)
    if optim.decay != "constant" and optim.decay_steps < options.steps:
        return (
            f"the learning rate is --min-lr {optim.min_lr} in all steps after {optim.decay_steps}: only a larger "
            "--decay-steps lets it decay for longer",
        )
    return ()


def remember(options: TrainOptions, *, step: int, num_tokens: int, data: DataPosition) -> TrainingState:
    """Give what a checkpoint says of a run; the random states are each rank's own."""
    optim, compute = options.optim, options.compute
    group = ParameterGroup(beta1=optim.betas[0], beta2=optim.betas[1], eps=optim.eps, weight_decay=optim.weight_decay)
    return TrainingState(
        step=step,
        num_tokens=num_tokens,
        dtype=_STORED[compute.master_dtype],
        compute_dtype=_STORED[compute.dtype] if compute.has_masters else None,
        reduce_dtype=_STORED[compute.reduce_dtype] if compute.reduce_dtype != compute.master_dtype else None,
        optimizer=OptimizerState(name=_OPTIMIZER, max_norm=optim.max_norm, groups=(group,)),
        learning_rate=LearningRate(
            peak=optim.lr,
            warmup_steps=optim.warmup_steps,
            stable_steps=optim.stable_steps,
            decay=optim.decay,
            decay_steps=optim.decay_steps,
            minimum=optim.min_lr,
        ),
        batch=BatchSizes(**asdict(options.batch)),
        data=data,
    )


def advance(
    training: TrainingState, *, num_tokens: int, num_sequences: int, cursor: DataCursor | None
) -> TrainingState:
    """Give the state one step later, which used so many sequences and left the data at the cursor."""
    assert training.data is not None
    return replace(
        training,
        step=training.step + 1,
        num_tokens=training.num_tokens + num_tokens,
        data=replace(training.data, num_sequences=training.data.num_sequences + num_sequences, cursor=cursor),
    )


def _named(source: str, history: Path | None) -> Path:
    if history and re.fullmatch(r"step-\d+", source):
        folder = checkpoint_path(history, int(source.removeprefix("step-")))
    else:
        folder = Path(source).parent if Path(source).name == MANIFEST_NAME else Path(source)
    if not (folder / MANIFEST_NAME).is_file():
        found = find_checkpoints(folder) or (find_checkpoints(history) if history else ())
        there = ", ".join(path.name for path in found[:5])
        hint = f"there are {there}" if there else "a folder without one was never finished"
        raise CheckpointError(
            f"--resume {source}", f"no {MANIFEST_NAME} in {folder}", hint, code="resume.no-checkpoint"
        )
    return folder


def _goes_back_to(newest: Path, origin: Path, manifest: Manifest) -> bool:
    """Whether a checkpoint is the newest, a copy of it, or made out of it: cut anew, or trained on elsewhere."""
    past, own = (digest_bytes(read_small_file(folder / MANIFEST_NAME)) for folder in (newest, origin))
    return past in {own, *(parent.digest for parent in manifest.parents)}


def _check_state(training: TrainingState | None, where: str) -> None:
    """Refuse what AdamW, as the runner has it, cannot go on from."""
    if training is None or training.optimizer is None:
        raise CheckpointError(
            where, "holds no optimizer state, so training cannot go on from it", _ANEW, code="resume.no-optimizer-state"
        )
    optimizer = training.optimizer
    if optimizer.name != _OPTIMIZER:
        raise CheckpointError(
            where,
            f"was trained with {optimizer.name}, and this runner steps with {_OPTIMIZER}",
            _ANEW,
            code="resume.other-optimizer",
        )
    for dtype in (training.dtype, training.compute_dtype, training.reduce_dtype):
        if dtype not in (None, *_DTYPES):
            raise CheckpointError(
                where,
                f"was trained in {dtype}; this runner trains in {' or '.join(_DTYPES)}",
                _ANEW,
                code="resume.other-optimizer",
            )
    if len(optimizer.groups) != 1 or optimizer.groups[0].fqns:
        raise CheckpointError(
            where, "has several groups of optimizer options; this runner has one", _ANEW, code="resume.other-optimizer"
        )
