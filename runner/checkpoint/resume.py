"""What a run resumes from: which checkpoint, whether it fits, and the options that it stores. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manifests.digest import digest_bytes
from manifests.errors import CheckpointError, UsageError
from manifests.invariants import MANIFEST_NAME
from manifests.models import ModelShape
from manifests.models.adapters import PEFT_CONFIG
from manifests.optimizer_state import kinds_of
from manifests.paths import is_file
from manifests.schema import (
    BatchSizes,
    DataCursor,
    DataPosition,
    TrainedDtype,
    TrainingState,
)
from manifests.store import file_digest, read_small_file
from manifests.trained import STEPS_NAME, TRAINED_NAME, decode_steps, decode_trained
from runner.bundle.packed import Packed
from runner.checkpoint.history import checkpoint_named, find_checkpoints, find_misnamed, step_of
from runner.config.flags import TrainOptions, flag_of
from runner.config.optimizers import is_flagged, optimizer_of
from runner.config.schema import Dtype, ResumeOptions
from runner.config.trained import ties_in_training, trained_by
from stores.open import ReadManifest, open_manifest

_DTYPES: Mapping[TrainedDtype, Dtype] = {"F32": "fp32", "BF16": "bf16"}
_STORED = {flag: dtype for dtype, flag in _DTYPES.items()}
_OTHER = "resume a checkpoint of the launched model, or launch the manifest of this checkpoint"
_WEIGHTS_ONLY = "--resume DIR --resume-weights-only starts a new run with its weights"
_RESUME_NEWEST = "resume from the newest with --resume auto, or choose another --checkpoint"


@dataclass(frozen=True, slots=True)
class Origin:
    """The folder of a manifest to start from, and the manifest, if it was read to choose this one."""

    folder: Path
    read: ReadManifest | None = None


def find_origins(launched: Origin, options: TrainOptions) -> tuple[Origin, ...]:
    """Return what a run can start from, the best first."""
    history = options.history
    past = find_checkpoints(history) if history else ()
    source = options.resume.source
    if source == "auto" and past:
        return tuple(map(Origin, past))
    origin = launched.folder if source in (None, "auto") else _named(source, history)
    read = launched.read if origin == launched.folder else None
    read = read or open_manifest(origin)
    training = read.manifest.training
    if source == "auto" and history is None and (training is None or training.optimizer is None):
        problem = f"has nothing to resume: {origin} has no optimizer state, and --checkpoint DIR is missing"
        raise UsageError(
            "--resume auto",
            problem,
            "add --checkpoint DIR --checkpoint-every N, or remove --resume",
            code="resume.nothing-to-find",
        )
    first = training.step if training and source and not options.resume.weights_only else 0
    problem = ""
    if past and (source is None or (step_of(past[0]) or 0) > first):
        problem = f"and this run starts after step {first}"
    elif past and not _descends_from(past[0], read):
        problem = f"from which {origin} does not descend"
    if problem:
        where, problem = str(past[0].parent), f"already contains {past[0].name}, {problem}"
        raise CheckpointError(where, problem, _RESUME_NEWEST, code="checkpoint.folder-in-use")
    return (Origin(origin.resolve(), read),)


def resumed_state(origin: Packed, resume: ResumeOptions, *, is_launched: bool) -> TrainingState | None:
    """Return the state that a run resumes; None: it starts at step 0, with the weights alone."""
    training = origin.manifest.training
    has_moments = training is not None and training.optimizer is not None
    if resume.source is None:
        if has_moments and not resume.weights_only:
            raise CheckpointError(
                origin.where,
                "has optimizer state, and no flag says whether to resume it",
                f"--resume auto resumes it; {_WEIGHTS_ONLY}",
                code="resume.undecided",
            )
        if resume.weights_only and not has_moments:
            problem = f"requires --resume, or a manifest with optimizer state: {origin.where} has none"
            raise UsageError("--resume-weights-only", problem, "remove it", code="options.needs-resume")
        return None
    if resume.weights_only or (resume.source == "auto" and is_launched and not has_moments):
        return None
    _check_state(training, origin.where)
    return training


def check_state_of_all(origin: Packed, options: TrainOptions, training: TrainingState | None) -> tuple[str, ...]:
    """Check that a checkpoint whose run froze parameters has the optimizer state of all that this run trains.

    Returns notes on parameters that were frozen, whose optimizer has no state, and on averages that are not kept.
    """
    if training is None or training.optimizer is None or options.lora is not None:
        return ()
    path, recorded = origin.root / TRAINED_NAME, file_digest(origin.manifest, TRAINED_NAME)
    before: Collection[str] = origin.shape.trained
    if recorded is not None:
        before = decode_trained(read_small_file(path, recorded), str(path))
    trains = trained_by(options, ties_in_training(origin.shape)) or (lambda fqn: True)
    added = [fqn for fqn in origin.shape.trained if fqn not in before and trains(fqn)]
    frozen = [fqn for fqn in origin.shape.trained if fqn in before and not trains(fqn)]
    notes = []
    if added and kinds_of(training.optimizer):
        problem = f"has no optimizer state of {added[0]}: its run froze it"
        hint = f"repeat its --train-only flags; {_WEIGHTS_ONLY}"
        raise CheckpointError(origin.where, problem, hint, code="resume.no-optimizer-state")
    if added:
        notes.append(f"training {_some(added)}, that were frozen; repeat the --train-only flags to keep them frozen")
    if frozen and training.optimizer.ema and options.optim.ema:
        export = f"reshard export {shlex.quote(str(origin.root))} --to hf --weights ema --out DIR"
        notes.append(f"the average of {_some(frozen)}, is not kept: they are frozen now; {export} writes it")
    return tuple(notes)


def differing_steps(origin: Packed) -> dict[str, int]:
    """Return how many optimizer steps parameters took, by FQN, where it is not the checkpoint's number."""
    recorded = file_digest(origin.manifest, STEPS_NAME)
    path = origin.root / STEPS_NAME
    return {} if recorded is None else decode_steps(read_small_file(path, recorded), str(path))


def check_fits(origin: Packed, launched: Packed) -> tuple[str, ...]:
    """Check that both are the same model, and return a note for each field of config.json that differs."""
    expected, stored = launched.shape, origin.shape
    if stored.architecture != expected.architecture:
        problem = f"expected a {expected.architecture}, found a {stored.architecture}"
        raise CheckpointError(origin.where, problem, _OTHER, code="resume.other-model")
    sizes = [config.get("vocab_size") for config in (launched.config, origin.config)]
    if sizes[0] != sizes[1]:
        problem = f"expected a vocabulary of {sizes[0]} tokens, found {sizes[1]}"
        raise CheckpointError(origin.where, problem, _OTHER, code="resume.other-model")
    if stored.tensors != expected.tensors or stored.ties != expected.ties:
        odd = sorted(
            fqn
            for fqn in stored.tensors.keys() | expected.tensors.keys()
            if stored.tensors.get(fqn) != expected.tensors.get(fqn)
        )
        shown = f"{odd[0]} differs" if odd else "other weights are tied"
        raise CheckpointError(
            origin.where, f"is another model of this architecture: {shown}", _OTHER, code="resume.other-model"
        )
    tokenizers = {packed.tokenizer for packed in (launched, origin)}
    if None not in tokenizers and len(tokenizers) > 1:
        problem = "its tokenizer.json differs from the launched manifest's"
        raise CheckpointError(origin.where, problem, _OTHER, code="resume.other-model")
    return tuple(
        f"config.json: {name} is {launched.config.get(name)!r} here, {origin.config.get(name)!r} in the checkpoint"
        for name in sorted(origin.config.keys() | launched.config.keys())
        if origin.config.get(name) != launched.config.get(name)
    )


def remembered(training: TrainingState) -> dict[str, Any]:
    """Return the values of training flags that a checkpoint stores, by the names of their parameters."""
    values: dict[str, Any] = {}
    if training.dtype is not None and training.dtype in _DTYPES:
        values["dtype"] = _DTYPES[training.compute_dtype or training.dtype]
        if training.compute_dtype is not None:
            values["master_dtype"] = _DTYPES[training.dtype]
        if training.reduce_dtype is not None:
            values["reduce_dtype"] = _DTYPES[training.reduce_dtype]
    if training.optimizer is not None:
        group, *bare = training.optimizer.groups
        if is_flagged(training.optimizer):
            values |= {name: getattr(group, name) for name in ("beta1", "beta2", "eps", "weight_decay")}
            values["weight_decay_1d"] = not bare
        values |= {"max_norm": training.optimizer.max_norm, "ema": training.optimizer.ema}
    if (rate := training.learning_rate) is not None:
        values |= {"lr": rate.peak, "min_lr": rate.minimum}
        values |= {name: getattr(rate, name) for name in ("warmup_steps", "stable_steps", "decay")}
        if rate.decay != "constant":  # a constant rate has no end: the stored number has no meaning
            values["decay_steps"] = rate.decay_steps
    if training.batch is not None:
        values |= asdict(training.batch)
    return values


def override_notes(options: TrainOptions, training: TrainingState) -> tuple[str, ...]:
    """Return a note for each flag that was given and overrides another value of the checkpoint."""
    values = remembered(training)
    if "dtype" in values:  # the defaults of these two are other flags
        values.setdefault("master_dtype", values["dtype"])
        values.setdefault("reduce_dtype", values["master_dtype"])
    return tuple(
        f"{flag_of(name)} {options.values[name]} overrides {value} of the checkpoint"
        for name, value in values.items()
        if name in options.given and options.values[name] != value
    )


def schedule_notes(options: TrainOptions, training: TrainingState) -> tuple[str, ...]:
    """Return a note if all steps are taken, or if the learning-rate decay ends before the last step.

    The options include the values that the checkpoint stores.
    """
    optim = options.optim
    if training.step >= options.steps:
        return (f"checkpoint is already at --steps {options.steps}; increase --steps to continue",)
    if optim.decay != "constant" and optim.decay_steps < options.steps:
        return (
            f"the learning rate stays at --min-lr {optim.min_lr} after step {optim.decay_steps}; increase "
            "--decay-steps for a longer decay",
        )
    return ()


def remember(
    options: TrainOptions, shape: ModelShape, *, step: int, num_tokens: int, data: DataPosition
) -> TrainingState:
    """Return the training state that a checkpoint of a model stores; RNG states are added by each rank."""
    optim, compute = options.optim, options.compute
    return TrainingState(
        step=step,
        num_tokens=num_tokens,
        dtype=_STORED[compute.master_dtype],
        compute_dtype=_STORED[compute.dtype] if compute.has_masters else None,
        reduce_dtype=_STORED[compute.reduce_dtype] if compute.reduce_dtype != compute.master_dtype else None,
        optimizer=optim.plan or optimizer_of(optim, shape),
        learning_rate=optim.schedule,
        batch=BatchSizes(**asdict(options.batch)),
        data=data,
    )


def advance(
    training: TrainingState, *, num_tokens: int, num_sequences: int, cursor: DataCursor | None
) -> TrainingState:
    """Return the state one step later, which consumed so many sequences and left the data at the cursor."""
    assert training.data is not None
    return replace(
        training,
        step=training.step + 1,
        num_tokens=training.num_tokens + num_tokens,
        data=replace(training.data, num_sequences=training.data.num_sequences + num_sequences, cursor=cursor),
    )


def _named(source: str, history: Path | None) -> Path:
    folder = checkpoint_named(source, history)
    folder = folder.parent if folder.name == MANIFEST_NAME else folder
    if not is_file(folder / MANIFEST_NAME):
        checkpoints = find_checkpoints(folder) or (find_checkpoints(history) if history else ())
        there = ", ".join(path.name for path in checkpoints[:5])
        hint = "the checkpoint was never finished" if folder.exists() else "check the path for typos"
        hint = f"found {there}" if there else hint
        if source in ("latest", "last", "newest", "true", "yes"):
            hint = "--resume auto takes the newest checkpoint of --checkpoint" + (f": {hint}" if there else "")
        if is_file(folder / PEFT_CONFIG):
            start = f"--lora-from {shlex.quote(str(folder))}, without --resume, starts from its adapters"
            hint = f"it is a PEFT folder, without optimizer state: {start}"
        raise CheckpointError(
            f"--resume {source}", f"no {MANIFEST_NAME} in {folder}", hint, code="resume.no-checkpoint"
        )
    if history and (step := dict(find_misnamed(history)).get(folder)) is not None:
        problem = f"{folder} is not of the step that its name says: its manifest says step {step}"
        hint = f"move it out of {history}; --resume DIR resumes it there, under any name"
        raise CheckpointError(f"--resume {source}", problem, hint, code="resume.other-step")
    return folder


def _descends_from(newest: Path, origin: ReadManifest) -> bool:
    """Whether `origin` is the newest checkpoint, a copy of it, or descends from it: resharded, or trained further."""
    digest = digest_bytes(read_small_file(newest / MANIFEST_NAME))
    return digest in {origin.digest, *(parent.digest for parent in origin.manifest.parents)}


def _some(fqns: Sequence[str]) -> str:
    return f"{len(fqns)} tensors, such as {fqns[0]}"


def _check_state(training: TrainingState | None, where: str) -> None:
    """Refuse training state that the runner cannot resume."""
    if training is None or training.optimizer is None:
        raise CheckpointError(
            where, "has no optimizer state to resume", _WEIGHTS_ONLY, code="resume.no-optimizer-state"
        )
    for dtype in (training.dtype, training.compute_dtype, training.reduce_dtype):
        if dtype not in (None, *_DTYPES):
            raise CheckpointError(
                where,
                f"was trained in {dtype}; only {' and '.join(_DTYPES)} are supported",
                _WEIGHTS_ONLY,
                code="resume.other-optimizer",
            )
