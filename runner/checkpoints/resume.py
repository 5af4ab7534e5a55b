"""What a run goes on from: which checkpoint, whether it fits, and what it remembers. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from manifests.digest import digest_bytes
from manifests.errors import InputError, UsageError
from manifests.invariants import MANIFEST_NAME
from manifests.schema import (
    BatchSizes,
    DataCursor,
    DataPosition,
    LearningRate,
    OptimizerState,
    ParameterGroup,
    TrainingState,
)
from manifests.store import read_manifest
from runner.checkpoints.history import checkpoint_path, find_checkpoints, step_of
from runner.data.files import find_files
from runner.loading.packed import Packed
from runner.options import TrainOptions, flag_of
from runner.recipe import SYNTHETIC, DataOptions, Decay, Dtype, ResumeOptions

__all__ = [
    "advance",
    "check_fits",
    "differences",
    "find_origins",
    "find_position",
    "goes_on_from",
    "remember",
    "remembered",
]

_OPTIMIZER = "AdamW"
_DTYPES: Mapping[str, Dtype] = {"F32": "fp32", "BF16": "bf16"}
_STORED = {flag: dtype for dtype, flag in _DTYPES.items()}
_ANEW = "--resume-weights-only begins a new run with its weights"


def find_origins(root: Path, options: TrainOptions) -> tuple[Path, ...]:
    """Give the folders of manifests to begin with, the best first; `root` has the one that is launched.

    Raises:
        UsageError: there is nowhere to look for checkpoints.
        InputError: there is no such checkpoint; or the folder of the run's own checkpoints holds later ones,
            which belong to another run.
    """
    history = options.checkpoint.history if options.checkpoint else None
    past = find_checkpoints(history) if history else ()
    source = options.resume.source
    if source == "auto" and past:
        return past
    origin = root
    if source not in (None, "auto"):
        origin = _named(source, history)
    training = read_manifest(origin).training
    if source == "auto" and history is None and (training is None or training.optimizer is None):
        problem = f"never finds anything: {origin} holds no optimizer state, and no --checkpoint DIR is given"
        raise UsageError("--resume auto", problem, "add --checkpoint DIR --checkpoint-every N, or leave it out")
    first = training.step if training and source and not options.resume.weights_only else 0
    if past and (source is None or (step_of(past[0]) or 0) > first):
        raise InputError(
            str(past[0].parent),
            f"holds {past[0].name} already, and this run begins after step {first}",
            "--resume auto goes on from the newest; or choose another --checkpoint",
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
            raise InputError(
                origin.where,
                "holds optimizer state, and nothing says whether training goes on from it",
                f"--resume auto does; {_ANEW}",
            )
        return None
    if resume.weights_only or (is_launched and not has_moments):  # `auto` before the first checkpoint
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
        raise InputError(origin.where, f"holds a {found.architecture}, another model than {expected.architecture}")
    sizes = [config.get("vocab_size") for config in (launched.config, origin.config)]
    if sizes[0] != sizes[1]:
        raise InputError(origin.where, f"has another vocabulary: expected {sizes[0]} tokens, found {sizes[1]}")
    if found.tensors != expected.tensors or found.ties != expected.ties:
        odd = sorted(
            fqn
            for fqn in found.tensors.keys() | expected.tensors.keys()
            if found.tensors.get(fqn) != expected.tensors.get(fqn)
        )
        shown = f"they differ in {odd[0]}" if odd else "they tie other weights"
        raise InputError(origin.where, f"holds another model of this architecture: {shown}")
    tokenizers = {packed.tokenizer for packed in (launched, origin)}
    if None not in tokenizers and len(tokenizers) > 1:
        raise InputError(origin.where, "has another vocabulary: its tokenizer.json is not the launched manifest's")
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
    if training.optimizer is not None:
        (group,) = training.optimizer.groups
        values |= {name: getattr(group, name) for name in ("beta1", "beta2", "eps", "weight_decay")}
        values["max_norm"] = training.optimizer.max_norm
    if (rate := training.learning_rate) is not None:
        values |= {"lr": rate.peak, "min_lr": rate.minimum}
        values |= {name: getattr(rate, name) for name in ("warmup_steps", "stable_steps", "decay", "decay_steps")}
    if training.batch is not None:
        values |= asdict(training.batch)
    return values


def differences(options: TrainOptions, training: TrainingState) -> tuple[str, ...]:
    """Give a sentence for each flag that was written and is not what the checkpoint remembers."""
    return tuple(
        f"{flag_of(name)} {options.values[name]} takes the place of the checkpoint's {value}"
        for name, value in remembered(training).items()
        if name in options.given and options.values[name] != value
    )


def remember(options: TrainOptions, *, step: int, num_tokens: int, data: DataPosition) -> TrainingState:
    """Give what a checkpoint says of a run; the random states are each rank's own."""
    optim, compute = options.optim, options.compute
    group = ParameterGroup(beta1=optim.betas[0], beta2=optim.betas[1], eps=optim.eps, weight_decay=optim.weight_decay)
    return TrainingState(
        step=step,
        num_tokens=num_tokens,
        dtype=_STORED[compute.master_dtype],
        compute_dtype=_STORED[compute.dtype] if compute.has_masters else None,
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


def find_position(options: TrainOptions, left: DataPosition | None, tokenizer: str | None) -> DataPosition:
    """Give where the data goes on; `left` is where the checkpoint left it, None for the first sequence.

    Raises:
        InputError: a source that names nothing; sequences are not numbered as they were; or the checkpoint's
            cursor is of other sources.
    """
    found = _digest_data(options.data, options.batch.seq_len, tokenizer)
    if left is not None and left.digest != found:
        raise InputError(
            "--data",
            f"is cut into other sequences than those of which the checkpoint has used {left.num_sequences}: files, "
            "their sizes, --seq-len, --text-field, --pack, --shuffle, --data-weight, --seed or the tokenizer changed",
            "say what that run was told, or --restart-data to begin this data at its first sequence",
        )
    if left is not None and left.cursor is not None and len(left.cursor.sources) != len(options.data.groups):
        raise InputError(
            "training.data.cursor.sources",
            f"expected a position for each of {len(options.data.groups)}, found {len(left.cursor.sources)}",
        )
    return left or DataPosition(num_sequences=0, digest=found)


def _named(source: str, history: Path | None) -> Path:
    if history and re.fullmatch(r"step-\d+", source):
        folder = checkpoint_path(history, int(source.removeprefix("step-")))
    else:
        folder = Path(source).parent if Path(source).name == MANIFEST_NAME else Path(source)
    if not (folder / MANIFEST_NAME).is_file():
        found = find_checkpoints(folder) or (find_checkpoints(history) if history else ())
        there = ", ".join(path.name for path in found[:5])
        hint = f"there are {there}" if there else "a folder without one was never finished"
        raise InputError(f"--resume {source}", f"no {MANIFEST_NAME} in {folder}", hint)
    return folder


def _check_state(training: TrainingState | None, where: str) -> None:
    """Refuse what AdamW, as the runner has it, cannot go on from."""
    if training is None or training.optimizer is None:
        raise InputError(where, "holds no optimizer state, so training cannot go on from it", _ANEW)
    optimizer, rate = training.optimizer, training.learning_rate
    if optimizer.name != _OPTIMIZER:
        raise InputError(where, f"was trained with {optimizer.name}, and this runner steps with {_OPTIMIZER}", _ANEW)
    for dtype in (training.dtype, training.compute_dtype):
        if dtype not in (None, *_DTYPES):
            raise InputError(where, f"was trained in {dtype}; this runner trains in {' or '.join(_DTYPES)}", _ANEW)
    if len(optimizer.groups) != 1 or optimizer.groups[0].fqns:
        raise InputError(where, "has several groups of optimizer options; this runner has one", _ANEW)
    if rate is not None and rate.decay not in get_args(Decay):
        known = ", ".join(get_args(Decay))
        raise InputError(where, f"decays the learning rate by {rate.decay!r}; this runner knows {known}", _ANEW)


def _digest_data(data: DataOptions, seq_len: int, tokenizer: str | None) -> str:
    """Give a digest of what decides which sequence has which number: files by name and size, and how they are cut."""
    groups = () if data.sources == (SYNTHETIC,) else map(find_files, data.groups)
    named = [[(file.name, file.stat().st_size) for file in files] for files in groups]
    how: dict[str, Any] = {"text_field": data.text_field, "pack": data.pack, "seed": data.seed}
    if data.shuffle:
        how["shuffle"] = True
    if data.weights:
        how["weights"] = data.weights
    # Without weights, the files are one list: digests of checkpoints that are older than weights still hold.
    files = named if data.weights else [file for group in named for file in group]
    return digest_bytes(json.dumps([how, seq_len, tokenizer, files], sort_keys=True).encode())
