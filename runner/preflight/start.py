"""What a run starts from: a manifest, its training state and the options that follow, with notes for the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from manifests.optimizer_state import describe_optimizer
from manifests.schema import TrainingState
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.resume import Origin, check_fits, override_notes, remembered, resumed_state, schedule_notes
from runner.config.flags import TrainOptions, recall
from runner.config.optimizers import check_eps
from runner.preflight.combinations import check_balance, expert_notes, mtp_notes
from runner.preflight.preflight import notes
from runner.rundir.records import read_run_record
from runner.training.algorithms import plan_groups

logger = logging.getLogger("runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run starts from: a manifest and its training state, the options that follow, and notes for the log."""

    origin: Packed
    training: TrainingState | None
    options: TrainOptions
    notes: tuple[str, ...]


def read_start(launched: Packed, start_from: Origin, options: TrainOptions) -> Start:
    """Read the checkpoint that a run resumes from, or what it starts from at step 0."""
    is_launched = start_from.folder == launched.root
    origin = launched if is_launched else open_packed(start_from.read or start_from.folder)
    lines = check_fits(origin, launched)
    lines += tuple(f"{name} is not listed in {launched.where}, so it is not verified" for name in launched.unnamed)
    training, given_options = resumed_state(origin, options.resume, is_launched=is_launched), options
    if training is not None:
        check_eps(training.optimizer, options.optim, options.given, origin.where)
        lines += override_notes(options, training)
        options = recall(options, remembered(training))
        lines += schedule_notes(options, training)
    elif options.resume.source is not None:
        options = recall(options, {})
    options, groups = plan_groups(options, launched.shape, training.optimizer if training else None, origin.where)
    lines += groups
    lines += tuple(notes(given_options, options, training))
    check_balance(launched, options)
    run = None if training is None else read_run_record(options.log_dir)
    lines += expert_notes(launched.shape.tensors, options.balance, run)
    lines += mtp_notes(options, run)
    lines += _beyond_positions(launched, options)
    return Start(origin=origin, training=training, options=options, notes=lines)


def log_start(start: Start) -> None:
    origin, training = start.origin, start.training
    if training is not None:
        logger.info("resuming from %s at step %d (%s tokens)", origin.root, training.step, f"{training.num_tokens:,}")
    elif (stored_state := origin.manifest.training) is not None and stored_state.optimizer is not None:
        logger.info(
            "starting at step 0 with the weights of %s; not resumed: %s state at step %d, learning-rate schedule, "
            "data position and RNG state",
            origin.root, describe_optimizer(stored_state.optimizer), stored_state.step,
        )  # fmt: skip
    for sentence in start.notes:
        logger.info("note: %s", sentence)


def _beyond_positions(launched: Packed, options: TrainOptions) -> tuple[str, ...]:
    """Return a note where --seq-len exceeds the positions that the model was made for; RoPE can compute them."""
    seq_len, most = options.batch.seq_len, launched.config.get("max_position_embeddings")
    if not isinstance(most, int) or seq_len <= most:
        return ()
    return (f"--seq-len {seq_len} exceeds max_position_embeddings {most} of config.json",)
