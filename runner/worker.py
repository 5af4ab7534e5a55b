"""One rank of a training job, top to bottom."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from manifests.errors import RankError, UserError
from manifests.schema import DataPosition, TrainingState
from manifests.store import read_manifest
from runner.batches import Batch
from runner.begin import Ready, begin
from runner.history import hold_history
from runner.launch.local import check_world
from runner.metrics import Metrics
from runner.options import TrainOptions, parse_training
from runner.packed import open_packed
from runner.randomness import random_state
from runner.resume import advance, find_origins, find_position, remember
from runner.save import save
from runner.saver import Saver
from runner.sequences import read_batches, read_once
from runner.step import eval_step, train_step
from runner.ties import check_equal
from runner.together import AloneError, alone, together
from runner.world import World, device_of, join_world

__all__ = ["main", "run", "train"]

T = TypeVar("T")
logger = logging.getLogger("runner")


def train(path: Path, options: TrainOptions, world: World) -> None:
    """Train the model of a manifest; every rank calls this."""
    check_world(read_manifest(path), world.size)
    device = device_of(world, options.device)
    join_world(device, options.timeout_s)
    run(path.resolve().parent, options, world, device)


def run(root: Path, options: TrainOptions, world: World, device: torch.device) -> None:
    """Train the model of the manifest in `root`, the ranks having met."""
    with ExitStack() as stack:
        folders: tuple[Path, ...] = ()
        with together("resume"):
            launched = open_packed(root)
            if world.rank == 0:
                if options.checkpoint:
                    stack.enter_context(hold_history(options.checkpoint.history))
                folders = find_origins(root, options)
        ready = begin(launched, _from_rank_0(folders), options, world, device)
        options = ready.options
        metrics = Metrics(options.log_dir / "metrics.jsonl" if world.rank == 0 else None, num_steps=options.steps)
        saver = None
        if options.checkpoint:
            timeout = timedelta(seconds=options.timeout_s)
            saver = stack.enter_context(Saver(ready.job, options.checkpoint, ready.held_state(), timeout))
        trained = train_steps(ready, metrics, saver, world, device)
        check_equal(ready.engine.ties)
        if options.eval_data is not None:
            metrics.evaluation(trained.step, *evaluate(ready))
        if saver is not None:
            _finish_saving(saver, metrics)
        if options.save is not None:
            weights_only = TrainingState(step=trained.step, num_tokens=trained.num_tokens, dtype=trained.dtype)
            save(ready.held_weights(), ready.job, options.save, weights_only, force=options.force)
            metrics.saved(options.save)


def train_steps(
    ready: Ready, metrics: Metrics, saver: Saver | None, world: World, device: torch.device
) -> TrainingState:
    """Take all steps that are left, saving checkpoints in between, and give the state after the last."""
    options, begun = ready.options, ready.training
    batches, position = open_data(ready, world)
    trained = remember(
        options, step=begun.step if begun else 0, num_tokens=begun.num_tokens if begun else 0, data=position
    )
    for step in range(trained.step, options.steps):
        started_s = time.perf_counter()
        with alone(world.rank):
            batch = next(batches)
        report = train_step(ready.engine, batch, step)
        metrics.step(step + 1, report, time.perf_counter() - started_s)
        trained = advance(trained, num_tokens=report.num_tokens, num_sequences=options.batch.global_batch)
        if saver is not None:
            if options.saves_after(step + 1):
                saver.save(ready.held_state(), replace(trained, random=(random_state(world.rank, device),)))
            for ended in saver.reports():
                metrics.checkpoint(ended)
    return trained


def open_data(ready: Ready, world: World) -> tuple[Iterator[Batch | None], DataPosition]:
    """Open the data where the run goes on; ranks with neither the first nor the last stage get no batches."""
    options, schedule = ready.options, ready.engine.schedule
    left = ready.training.data if ready.training and not options.resume.restart_data else None
    batches: Iterator[Batch | None] = repeat(None)
    position = DataPosition(num_sequences=0, digest="")
    with together("data"):
        if schedule.has_first or schedule.has_last:
            position = find_position(options, left, ready.launched.tokenizer)
            batches = read_batches(
                options.data,
                options.batch,
                folder=ready.launched.root,
                vocab_size=ready.chunks[0].family.vocab_size,
                start=position.num_sequences,
            )
    return batches, _from_rank_0(position)


def evaluate(ready: Ready) -> tuple[float, int]:
    """Give the mean loss over the valid tokens of the evaluation data, and their number."""
    options, vocab_size = ready.options, ready.chunks[0].family.vocab_size
    assert options.eval_data is not None
    with together("evaluation data"):
        # Every rank reads it all, so that every rank knows when it ends.
        batches = read_once(options.eval_data, options.batch, folder=ready.launched.root, vocab_size=vocab_size)
    losses, num_tokens = [], 0
    for batch in batches:
        losses.append(eval_step(ready.engine, batch) * batch.num_tokens)
        num_tokens += batch.num_tokens
    return math.fsum(losses) / num_tokens, num_tokens


def main() -> None:
    """Run one rank; end with its exit code. What all ranks know is said by rank 0 alone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    path, *training = sys.argv[1:]
    world, code = World.from_environment(os.environ), 0
    try:
        train(Path(path), parse_training(training), world)
    except UserError as error:
        code = error.exit_code
        if world.rank == 0 or isinstance(error, AloneError):
            logger.error("error: %s", error)
    except Exception as error:
        code = _report(error, world)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a peer may be gone: waiting for it in destroy_process_group could hang
    dist.destroy_process_group()


def _finish_saving(saver: Saver, metrics: Metrics) -> None:
    """Wait for the save in flight; where the last one failed, so has the run."""
    ended = saver.reports(wait=True)
    for report in ended:
        metrics.checkpoint(report)
    if ended and ended[-1].failure is not None:
        raise ended[-1].failure


def _from_rank_0(value: T) -> T:
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _report(error: Exception, world: World) -> int:
    """Say what ended this rank: a lost peer in a line, our own bug with its traceback."""
    if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
        reason = str(error).splitlines()[0].partition(". ")[0][:200]
        logger.error("[rank %d] another rank is gone or too slow: %s", world.rank, reason)
        return RankError.exit_code
    logger.error("[rank %d] %s", world.rank, traceback.format_exc())
    return 1


if __name__ == "__main__":
    main()
