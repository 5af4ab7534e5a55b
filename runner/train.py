"""One rank of a training job, from start to end."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from manifests.errors import UserError
from manifests.invariants import MANIFEST_NAME
from manifests.models.adapters import PEFT_WEIGHTS
from manifests.models.combinations import check_combination
from manifests.optimizer_state import stored_kinds
from manifests.schema import WEIGHTS, TrainingState
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.adapter_record import base_of
from runner.checkpoint.async_save import InFlight, ReportT, Saver, prune_older
from runner.checkpoint.history import claim_history, claim_output, find_misnamed, step_of
from runner.checkpoint.outputs import check_apart, check_outputs, check_space, replaced_note, swap_of
from runner.checkpoint.peft_folder import save_peft
from runner.checkpoint.publish import Publisher
from runner.checkpoint.resume import Origin, find_origins
from runner.checkpoint.save import save
from runner.checkpoint.seen import check_newest
from runner.checkpoint.shard_file import Before
from runner.checkpoint.state import nbytes_of
from runner.config.flags import TrainOptions, parse_training
from runner.config.trained import trained_params
from runner.distributed.fail_together import errors_of_rank, from_all_ranks, from_rank_0, raise_on_all_ranks
from runner.distributed.rank_process import run_rank
from runner.distributed.rounds import in_rounds
from runner.distributed.watchdog import StallTimer, StoppedError, Watchdog, enable_flight_recorder, log_to_file
from runner.distributed.world import World, check_reachable, device_of, join_world
from runner.evaluation.evaluate import check_same_data
from runner.load.local_cache import check_same_manifest, fetch_to_cache
from runner.measure.after_run import measure_fixed_share, measure_link
from runner.measure.of_run import read_run_times, write_run_times
from runner.metrics.gauges import least_step_s, peak_memory_nbytes
from runner.metrics.metrics import Metrics, RankLoad, StepProgress
from runner.metrics.sinks import open_sinks
from runner.metrics.summary import how_to_resume, next_command, opening
from runner.models import import_family
from runner.models.family import OnTransformers
from runner.preflight.combinations import check_sinks, schedule_of, sharing_ranks
from runner.preflight.preflight import check_evaluable, check_texts
from runner.profiling.trace import memory_snapshot
from runner.rundir.exit_report import set_rank_label, stages_of
from runner.rundir.records import (
    STATE_NAME,
    RunState,
    clear_beats,
    clear_state,
    note_resolved,
    note_saved,
    run_id,
    write_state,
)
from runner.setup import Ready, begin
from runner.steps import evaluate, train_steps
from runner.tensors.local_shard import FLAG_DTYPES
from runner.training.ties import check_equal
from stores.address import is_url
from stores.folders.probe import can_link
from stores.open import open_manifest

logger = logging.getLogger("runner")
_LEAST_CLAIM_S = 120.0  # a lock whose owner may be dead is watched for a minute

Checks = Mapping[str, Callable[[], None]]  # by flag, on rank 0


def train(address: str, options: TrainOptions, world: World) -> None:
    """Train the model of a manifest; every rank calls this."""
    world.start.end("launch_s")
    with errors_of_rank(world.rank):
        log_to_file(options.log_dir, world.rank)
        enable_flight_recorder(options.log_dir, os.environ)
        read = open_manifest(address)
    manifest = read.manifest
    check_combination(sharing_ranks(manifest, options))
    options.degrees.resolve(manifest.layout.num_ranks, world.size)
    set_rank_label(world.rank, stages_of(manifest, world.rank, world.size))
    with errors_of_rank(world.rank):
        check_reachable(world, socket.gethostname())
        device = device_of(world, options.device)
    join_world(device, options.timeout_s)
    world.start.end("meet_s")
    if is_url(address):
        launched = fetch_to_cache(read, options, world)
    else:
        check_same_manifest(str(read), read.digest)
        with raise_on_all_ranks("manifest"):
            launched = open_packed(read)
    run(launched, options, world, device)


def run(launched: Packed, options: TrainOptions, world: World, device: torch.device) -> None:
    """Train the model of an open manifest, once the ranks have met."""
    with raise_on_all_ranks("options"):
        if world.rank == 0:
            check_sinks(options)
            check_apart(options, launched.root)
            if options.save is not None and (note := replaced_note(options.save)):
                logger.warning("note: %s", note)
    check_evaluation(launched, options)
    with claim_outputs(options, world) as checks, ExitStack() as stack:
        if options.memory_snapshot:
            stack.enter_context(memory_snapshot(options.log_dir, world.rank, device))
        ready = begin(launched, find_start(launched, options, world), options, world, device)
        check_writes(ready, world, checks)
        if world.rank == 0:
            resolved = {
                **ready.options.values,
                "device": device.type,
                "num_ranks": world.size,
                "ranks_per_node": world.local_size,
                "first_step": ready.num_steps + 1,
                "layout": ready.mesh.degrees.flags,
            }
            if options.history is not None:  # for a status that is asked from another folder
                resolved["checkpoint"] = str(options.history.absolute())
            note_resolved(options.log_dir, resolved)
        with ready.deferred, open_metrics(ready, world, device) as metrics:
            _train_and_save(ready, metrics, world, device, checks)


@contextmanager
def claim_outputs(options: TrainOptions, world: World) -> Iterator[Checks]:
    """Keep other runs from saving where this run saves, on rank 0; every rank calls this.

    Yields a check for each flag that no other run has taken its folder over.
    """
    checks, timer = dict[str, Callable[[], None]](), StallTimer(max(options.timeout_s, _LEAST_CLAIM_S))
    with ExitStack() as claims:

        def claim(stop: threading.Event) -> None:
            if world.rank == 0:
                with timer.working():
                    if options.history is not None:
                        checks["--checkpoint"] = claims.enter_context(claim_history(options.history, timer.beat))
                    timer.beat()
                    if options.save is not None:
                        checks["--save"] = claims.enter_context(claim_output(options.save))

        in_rounds("folders", claim, timer=timer)
        yield checks


def find_start(launched: Packed, options: TrainOptions, world: World) -> tuple[Origin, ...]:
    """Return what to start from, the best first, the same folders on all ranks; clear the log folder."""
    launched_here = Origin(launched.root, launched.read)  # nodes may have copies, at different paths
    origins: tuple[Origin, ...] = ()
    if options.history is not None and options.resume.source == "auto":
        check_newest(options.history)
    with raise_on_all_ranks("resume"):
        if world.rank == 0:
            clear_state(options.log_dir)
            clear_beats(options.log_dir)
            origins = find_origins(launched_here, options)
            for folder, step in find_misnamed(options.history) if options.history else ():
                logger.warning("warning: %s: its manifest says step %d: not a checkpoint of this run", folder, step)
    folders = from_rank_0(tuple(None if origin == launched_here else origin.folder for origin in origins))
    return origins or tuple(launched_here if folder is None else Origin(folder) for folder in folders)


def _train_and_save(ready: Ready, metrics: Metrics, world: World, device: torch.device, checks: Checks) -> None:
    """Take all steps, save, and evaluate; or stop at a signal with a checkpoint."""
    options = ready.options
    saving, publishing = StallTimer(options.timeout_s), StallTimer(options.timeout_s)
    with (
        _watchdog(ready, world, (saving, publishing, ready.deferred.timer)) as watchdog,
        _publisher(ready, publishing) as publisher,
        _saver(ready, saving, checks) as saver,
    ):
        # The saver is left first, and waits for its save while the watchdog watches that the disk answers.
        try:
            trained, is_stopped = train_steps(ready, metrics, saver, publisher, watchdog)
        finally:
            watchdog.leave()
        ready.deferred.finish()
        check_equal(ready.engine.ties)
        if is_stopped:
            _stop(saver, publisher, metrics, trained, ready, world)
        # The weights are written first: neither a failed checkpoint nor what follows may lose them.
        failure = _finish(saver, metrics.checkpoint)
        if options.save is not None:
            _save_weights(ready, trained, options.save, saving, checks)
            if world.rank == 0:
                note_saved(options.log_dir, options.save)
            metrics.saved(options.save, *(() if options.lora is None else (PEFT_WEIGHTS, "adapters")))
        failure = _finish(publisher, metrics.published) or failure
        if options.eval_data is not None:
            metrics.evaluation(trained.step, *evaluate(ready))
        if failure is not None:
            raise failure
        base = base_of(ready.launched, ready.origin)
        following = next_command(options, base.location, has_state=stored_kinds(base.manifest) != (WEIGHTS,))
        metrics.ended(from_all_ranks(peak_memory_nbytes(device)), following)
        if world.rank == 0:
            _note_end(options.log_dir, RunState(step=trained.step, ended="done"))
        if options.traced:
            sizes = options.batch.microbatch * options.batch.seq_len, ready.launched.shape.hidden_size
            link = measure_link(device, *sizes)
            fixed_share = measure_fixed_share(device, *sizes, FLAG_DTYPES[options.compute.dtype])
            if world.rank == 0:
                counts, degrees = trained_params(options, ready.launched.shape), ready.mesh.degrees
                times = partial(read_run_times, ready.launched, options.log_dir, degrees, link, counts, fixed_share)
                write_run_times(options.log_dir, times)


def check_writes(ready: Ready, world: World, checks: Checks) -> None:
    """Check before the first step that every rank can write its outputs, and that the disk has room for them."""
    options, before = ready.options, _find_before(ready)
    with raise_on_all_ranks("outputs"):
        check_outputs(options)
    is_verified = options.digests == "foreground" and options.resume.source == "auto" and ready.training is not None
    if options.checkpoint is not None and before is not None and step_of(before) is not None and is_verified:
        # A run that is killed right after a save has not pruned, and may have left no room for another checkpoint.
        timer, check = StallTimer(max(options.timeout_s, _LEAST_CLAIM_S)), checks.get("--checkpoint", lambda: None)
        pruning = partial(prune_older, before, options.checkpoint, ready.save_context, timer, check)
        in_rounds("prune", pruning, timer=timer)
    with raise_on_all_ranks("outputs"):
        nbytes = (_checkpoint_nbytes(ready, before), nbytes_of(ready.held_weights()))
    state_nbytes, weights_nbytes = (sum(sizes) for sizes in zip(*from_all_ranks(nbytes), strict=True))
    is_done = ready.training is not None and ready.num_steps >= options.steps
    with raise_on_all_ranks("outputs"):
        if world.rank == 0:
            check_space(options, checkpoint_nbytes=0 if is_done else state_nbytes, weights_nbytes=weights_nbytes)


def _checkpoint_nbytes(ready: Ready, before: Path | None) -> int:
    """Return the bytes that this rank's next checkpoint takes: shards of frozen weights may be links to one before."""
    state, trained = ready.held_state(), ready.save_context.trained
    if trained is None or before is None or not can_link(before / MANIFEST_NAME, before.parent):
        return nbytes_of(state)
    return nbytes_of(state) - Before.read(before, state).linked_nbytes(state, frozenset(trained))


def _find_before(ready: Ready) -> Path | None:
    """Return the checkpoint that the first one of this run shares files with; None: it resumes none of its folder."""
    origin, history = ready.origin.root, ready.options.history
    return origin if history is not None and origin.parent.resolve() == history.resolve() else None


def check_evaluation(launched: Packed, options: TrainOptions) -> None:
    """Check before the first step that every rank finds the same evaluation data, and a tokenizer."""
    data = options.eval_data
    if data is None:
        return
    with raise_on_all_ranks("evaluation data"):
        check_evaluable(data, options.loss)
        check_texts(launched, options)
    check_same_data("--eval-data", data)


def open_metrics(ready: Ready, world: World, device: torch.device) -> Metrics:
    """Open metrics.jsonl and the other sinks on rank 0, and write what every rank has read."""
    options, metrics = ready.options, Metrics()
    world.start.end("fill_s")
    if world.rank == 0:
        metrics = Metrics(
            open_sinks(options, ready.num_steps),
            StepProgress(options.steps, first_step=ready.num_steps, every=options.log_every, quiet=options.quiet),
            least_step_s=least_step_s(ready.launched.shape, options, world.size, device),
            run=run_id(options.log_dir),
        )
    rank_load = RankLoad(
        rank=world.rank,
        stages=tuple(chunk.stage for chunk in ready.chunks),
        report=ready.loaded,
        base_nbytes=ready.base_nbytes,
        planned_nbytes=ready.planned_nbytes,
        copied=ready.copied,
        start_s=world.start.seconds,
    )
    metrics.loaded(from_all_ranks(rank_load))
    if world.rank == 0 and ready.num_steps < options.steps:
        schedule = schedule_of(ready.launched.manifest, options)
        shape, degrees = ready.launched.shape, ready.mesh.degrees
        metrics.begin(opening(shape, options, degrees, schedule, device.type, ready.num_steps + 1))
    return metrics


def prepare(words: Sequence[str]) -> None:
    """Import the model code that ranks with these arguments import, in the process that they are forked from."""
    path, *_ = words
    if not is_url(path):
        launched = open_packed(open_manifest(path))
        import_family(launched.config)


def main() -> None:
    path, *training = sys.argv[1:]
    run_rank(lambda world: train(path, parse_training(training), world), is_quiet="--quiet" in training)


def _finish(work: InFlight[ReportT] | None, note: Callable[[ReportT], None]) -> UserError | None:
    """Wait for what is in flight; return the error of the last of it, which makes the run fail."""
    if work is None:
        return None
    for ended in work.reports(wait=True):
        note(ended)
    return work.failure


def _save_weights(ready: Ready, trained: TrainingState, out: Path, timer: StallTimer, checks: Checks) -> None:
    """Write the trained weights, without optimizer state; adapters as a PEFT folder."""
    weights_only = TrainingState(step=trained.step, num_tokens=trained.num_tokens, dtype=trained.dtype)
    weights, context = ready.whole_weights()
    family, swap, check = ready.chunks[0].family, swap_of(ready.options), checks.get("--save", lambda: None)
    if isinstance(family, OnTransformers) and family.adapters is not None:
        pipeline = ready.mesh.pipeline
        save_peft(weights, family.adapters, context.adapters, out, pipeline=pipeline, swap=swap, check=check)
        return
    save(weights, context, out, weights_only, swap=swap, timer=timer, check=check)


def _watchdog(ready: Ready, world: World, saving: Sequence[StallTimer]) -> Watchdog:
    return Watchdog(
        ready.options.log_dir,
        world.rank,
        [chunk.stage for chunk in ready.chunks],
        step_timeout_s=ready.options.step_timeout_s,
        can_stop=ready.options.checkpoint is not None,
        saving=saving,
    )


def _saver(ready: Ready, saving: StallTimer, checks: Checks) -> AbstractContextManager[Saver | None]:
    options = ready.options
    if options.checkpoint is None:
        return nullcontext()
    timeout, before = timedelta(seconds=options.timeout_s), _find_before(ready)
    check = checks.get("--checkpoint", lambda: None)
    return Saver(ready.save_context, options.checkpoint, ready.held_state(), timeout, saving, before, check)


def _publisher(ready: Ready, publishing: StallTimer) -> AbstractContextManager[Publisher | None]:
    options = ready.options
    if options.publish is None:
        return nullcontext()
    timeout, shape = timedelta(seconds=options.timeout_s), ready.launched.shape
    return Publisher(options.publish, ready.save_context, shape, ready.published_weights(), timeout, publishing)


def _stop(
    saver: Saver | None,
    publisher: Publisher | None,
    metrics: Metrics,
    trained: TrainingState,
    ready: Ready,
    world: World,
) -> NoReturn:
    """End a run that was asked to stop, once its checkpoint is on disk and `state.json` is written.

    Then it waits for the published version: a bucket that does not answer does not make it a run that saved nothing.
    """
    assert saver is not None, "only a run that saves can be asked to stop"
    if (failure := _finish(saver, metrics.checkpoint)) is not None:
        raise failure
    with raise_on_all_ranks("stop"):
        if world.rank == 0:
            _note_end(ready.options.log_dir, RunState(step=trained.step, ended="stopped"))
    _finish(publisher, metrics.published)
    base = base_of(ready.launched, ready.origin)
    raise StoppedError(
        "",
        f"stopped by a signal after step {trained.step}; checkpoint saved",
        how_to_resume(ready.options, ready.launched.location, base.location),
        code="rank.stopped",
    )


def _note_end(log_dir: Path, state: RunState) -> None:
    """Write how the run ended; a log folder on a full disk does not change that."""
    try:
        write_state(log_dir, state)
    except OSError as error:
        logger.warning("note: %s: cannot be written: %s", log_dir / STATE_NAME, error.strerror)


if __name__ == "__main__":
    main()
