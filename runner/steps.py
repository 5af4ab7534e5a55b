"""The steps of a run: read a batch, train on it, report, and save when a checkpoint is due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice

import torch.distributed as dist

from manifests.schema import TrainingState
from runner.checkpoint.async_save import Saver
from runner.checkpoint.data_position import FoundData, check_alike, encode_files, find_data, read_skipped, read_state
from runner.checkpoint.publish import Publisher
from runner.checkpoint.resume import advance, remember
from runner.config.flags import TrainOptions
from runner.data.own import SharedCounts, read_dataset
from runner.data.read_ahead import GroupExchange, ReadAhead
from runner.data.rows import Skipped, log_skipped
from runner.data.sequences import Batch, read_batches, read_once
from runner.data.shared import SharedReading
from runner.distributed.fail_together import (
    ReadError,
    errors_of_rank,
    from_all_ranks,
    from_rank_0,
    raise_on_all_ranks,
    reading_on_rank,
)
from runner.distributed.rounds import in_rounds
from runner.distributed.watchdog import StallTimer, Watchdog
from runner.evaluation.evaluate import check_same_data, cut_as, mean_loss
from runner.metrics.gauges import peak_memory_nbytes
from runner.metrics.metrics import Metrics, StepTimes
from runner.pipeline.heads import of_evaluation
from runner.preflight.combinations import part_of, schedule_of, share_of
from runner.preflight.preflight import is_less_than_a_step
from runner.profiling.trace import RunShape, Tracer, clear_traces, profiled
from runner.rundir.records import run_id
from runner.setup import Ready
from runner.training.rng import rng_state
from runner.training.step import StepReport, eval_counted, train_step
from runner.training.ties import check_equal

logger = logging.getLogger("runner")


def train_steps(
    ready: Ready, metrics: Metrics, saver: Saver | None, publisher: Publisher | None, watchdog: Watchdog
) -> tuple[TrainingState, bool]:
    """Take all steps that are left, saving checkpoints, publishing weights and evaluating in between.

    Returns the state after the last one, and whether a signal stopped the run before all were taken.
    """
    feed, trained = _open_feed(ready)
    steps = _Steps(
        ready=ready, feed=feed, metrics=metrics, saver=saver, publisher=publisher, watchdog=watchdog,
        tracer=_tracer(ready),
    )  # fmt: skip
    watchdog.beat(trained.step)
    is_last = False  # a signal asks for a last step
    if trained.step >= ready.options.steps:  # before it died, the run may not have published its last version
        steps.publish(trained.step, is_last=True, has_trained=False)
    with feed.reader or nullcontext():
        while trained.step < ready.options.steps and not is_last:
            started_s = time.perf_counter()
            batch = steps.read()
            if trained.step == ready.num_steps and ready.mesh.rank == 0:
                _log_documents(batch, ready.options)
            report = steps.train(batch, trained.step)
            steps.report(trained.step + 1, report, started_s)
            trained = steps.advance(trained, report, batch)
            steps.check_ties(trained, is_last=report.is_last)
            steps.save(trained, is_last=report.is_last)
            steps.publish(trained.step, is_last=report.is_last)
            if ready.options.evaluates_after(trained.step) and not report.is_last:
                steps.evaluate(trained.step)
            is_last = report.is_last
    return trained, trained.step < ready.options.steps


def evaluate(ready: Ready) -> tuple[float, int, int | None]:
    """Return the mean loss over the valid tokens of the evaluation data, their number, and documents skipped."""
    options, family, own = ready.options, ready.chunks[0].family, of_evaluation(ready.engine.loss)
    assert options.eval_data is not None
    batch_share = part_of(options.batch, ready.mesh.degrees)
    check_same_data("--eval-data", options.eval_data)  # again: files may have changed since the run began
    with raise_on_all_ranks("evaluation data"):
        # Every rank reads all of it, and so knows where it ends.
        skipped = Skipped(on_skip=log_skipped if ready.mesh.rank == 0 else None)
        batches = read_once(
            options.eval_data,
            options.batch,
            folder=ready.launched.root,
            vocab_size=family.vocab_size,
            # Rows that the loss takes together have one length, that of training.
            padded_length=family.padded_length if own is None or own.num_together == 1 else max,
            skipped=skipped,
            form=own.form if own else None,
        )
    loss, num_tokens = mean_loss(
        lambda batch: eval_counted(ready.engine, rows := ready.rows_of(batch), cut_as(batch_share, rows)),
        reading_on_rank(ready.mesh.rank, batches),
        "--eval-data",
    )
    return loss, num_tokens, skipped.count if options.eval_data.skip_bad_documents else None


@dataclass(kw_only=True, slots=True)
class _Feed:
    """The batches from where the run resumes, the number of documents skipped so far, and the state of a dataset.

    Ranks with neither the first nor the last stage have no reader.
    """

    reader: ReadAhead | None = None
    num_skipped: int = 0
    state: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """What each step does, one method after the other."""

    ready: Ready
    feed: _Feed
    metrics: Metrics
    saver: Saver | None
    publisher: Publisher | None
    watchdog: Watchdog
    tracer: Tracer | None

    def read(self) -> Batch | None:
        """Wait for this rank's rows; None: it has neither the first nor the last stage."""
        reader = self.feed.reader
        if reader is None:
            self.ready.engine.clock.note_data(0.0)
            return None
        with errors_of_rank(self.ready.mesh.rank, ReadError), self.watchdog.waiting_for(reader.thread_id):
            batch, waited_s = reader.take()
        self.ready.engine.clock.note_data(waited_s)
        if batch.cursor is not None and self.ready.options.data.skip_bad_documents:  # else they are not counted
            self.feed.num_skipped = batch.cursor.num_skipped
        self.feed.state = batch.state
        return batch

    def train(self, batch: Batch | None, step: int) -> StepReport:
        """Take one optimizer step; the last one, if any rank was asked to stop."""
        deferred, is_last = self.ready.deferred, self.watchdog.is_asked_to_stop
        with deferred.comes_first(), self._profiled(step + 1):
            report = train_step(self.ready.engine, batch, step, is_last=is_last, is_damaged=deferred.has_failed)
        if report.is_damaged:
            deferred.finish()  # which raises what was found
        self.watchdog.beat(step + 1)
        return report

    def _profiled(self, step: int) -> AbstractContextManager[None]:
        options = self.ready.options
        if step not in options.profiled:
            return nullcontext()
        return profiled(options.log_dir, self.ready.mesh.rank, step, self.ready.chunks[0].device)

    def report(self, step: int, report: StepReport, started_s: float) -> None:
        """Write the metrics of a step that has ended, and its trace, whose writing is not timed as a step."""
        ready = self.ready
        is_first, clock = ready.mesh.rank == 0, ready.engine.clock
        ranks = clock.split(step) if is_first else ()
        times = StepTimes(step_s=time.perf_counter() - started_s, data_s=clock.data_s(), ranks=ranks)
        num_skipped = self.feed.num_skipped if ready.options.data.skip_bad_documents else None
        self.metrics.step(
            step, report, times, peak_nbytes=peak_memory_nbytes(ready.chunks[0].device), num_skipped=num_skipped
        )
        if self.tracer is not None and step in ready.options.traced:
            self.tracer.add(step, ready.engine.schedule.recorder)

    def advance(self, trained: TrainingState, report: StepReport, batch: Batch | None) -> TrainingState:
        """Return the state after the step. Rank 0, which commits it, has the first stage and so the data's cursor."""
        cursor = batch.cursor if batch is not None else None
        return advance(
            trained,
            num_tokens=report.num_tokens,
            num_sequences=self.ready.options.batch.global_batch,
            cursor=cursor.plain if cursor is not None else None,
        )

    def check_ties(self, trained: TrainingState, *, is_last: bool) -> None:
        """Compare the replicas of tied weights, if that is due; a checkpoint follows the last step."""
        if self.ready.options.checks_ties_after(trained.step) or is_last:
            with self.ready.deferred.comes_first():
                check_equal(self.ready.engine.ties)

    def save(self, trained: TrainingState, *, is_last: bool) -> None:
        """Save a checkpoint if one is due, and report the saves that have ended."""
        if self.saver is None:
            return
        ready, watchdog = self.ready, self.watchdog
        if ready.options.saves_after(trained.step) or is_last:
            watchdog.beat(trained.step, "save")  # a save is not timed as a step
            ready.deferred.finish()
            state = replace(trained, random=(rng_state(ready.mesh.rank, ready.chunks[0].device),))
            files = encode_files(self.feed.num_skipped, self.feed.state)
            self.saver.save(ready.held_state(), state, files, ready.differing_steps(trained.step))
            watchdog.beat(trained.step)
        for ended in self.saver.reports():
            self.metrics.checkpoint(ended)

    def publish(self, step: int, *, is_last: bool, has_trained: bool = True) -> None:
        """Publish the weights if that is due, and report the versions that have ended."""
        if self.publisher is None:
            return
        ready, watchdog = self.ready, self.watchdog
        if ready.options.publishes_after(step) or is_last:
            watchdog.beat(step, "publish")  # not timed as a step
            ready.deferred.finish()
            self.publisher.publish(ready.published_weights(), step, has_trained=has_trained)
            watchdog.beat(step)
        for ended in self.publisher.reports():
            self.metrics.published(ended)

    def evaluate(self, step: int) -> None:
        """Evaluate, unless a rank was asked to stop meanwhile: its time may end before the evaluation does."""
        if any(from_all_ranks(self.watchdog.is_asked_to_stop)):
            return
        self.watchdog.beat(step, "evaluation")  # which is not timed as a step
        self.metrics.evaluation(step, *evaluate(self.ready))
        self.ready.engine.clock.pause()
        self.watchdog.beat(step)


def _open_feed(ready: Ready) -> tuple[_Feed, TrainingState]:
    """Open the data where the run resumes; return it, and the training state before the first step."""
    options, readers = ready.options, _readers(ready)
    found: FoundData | None = None
    with raise_on_all_ranks("data"):
        if ready.mesh.rank in readers:
            left = ready.training.data if ready.training else None
            found = find_data(options, left, ready.launched.tokenizer, ready.launched.root)
    shared = from_rank_0(found)
    assert shared is not None, "rank 0 has the first stage"
    for note in shared.notes if ready.mesh.rank == 0 else ():
        logger.info("note: %s", note)
    group = dist.new_group(readers, timedelta(seconds=options.timeout_s), "gloo") if len(readers) > 1 else None
    with raise_on_all_ranks("data"):
        takes_steps = ready.num_steps < options.steps
        if ready.mesh.rank == 0 and takes_steps and is_less_than_a_step(options.data, options.batch):
            logger.info("note: --data is less text than one step reads: every step repeats it")
        if found is not None:
            check_alike(options.data, found, shared)
    timer = StallTimer(options.timeout_s)

    def open_data(stop: threading.Event) -> Callable[[], _Feed]:
        if found is None:
            return _Feed
        with timer.working():
            return _open(ready, shared, group, partial(timer.beat, stop))

    # Files whose lines are shuffled are read once to find them, which may take longer than --timeout.
    start = in_rounds("data", open_data, timer=timer)
    feed = start()
    num_tokens = ready.training.num_tokens if ready.training else 0
    return feed, remember(
        options, ready.launched.shape, step=ready.num_steps, num_tokens=num_tokens, data=shared.position
    )


def _log_documents(batch: Batch | None, options: TrainOptions) -> None:
    """Log how many documents share a row, which the first batch tells."""
    if batch is None or batch.num_documents is None:
        return
    num_rows = options.batch.global_batch
    shared = f"{batch.num_documents / num_rows:.1f} documents per sequence in the first batch"
    if options.data.document_mask:
        logger.info("packing: %s, kept apart by --document-mask", shared)
    elif batch.num_documents > num_rows:
        logger.info("packing: %s; tokens attend to those before theirs, without --document-mask", shared)


def _readers(ready: Ready) -> list[int]:
    """Return the ranks that need data: those with the first or the last stage of any pipeline.

    All need the positions of documents, see Note [Documents on every stage].
    """
    if ready.options.data.document_mask or ready.chunks[0].family.row_inputs:
        return sorted(rank for ranks in ready.mesh.pipelines for rank in ranks)
    placement = ready.launched.manifest.placement
    ends = {placement.rank_of(0), placement.rank_of(placement.num_stages - 1)}
    return sorted(ranks[end] for ranks in ready.mesh.pipelines for end in ends)


def _open(
    ready: Ready, found: FoundData, group: dist.ProcessGroup | None, beat: Callable[[], None]
) -> Callable[[], _Feed]:
    """Open the data; return a function that reads this rank's rows of all remaining batches ahead, with the group."""
    position, is_own = found.position, ready.options.data.dataset is not None
    # Sequences of files that are counted again, without a cursor, count their skipped documents again.
    is_recount = not is_own and position.cursor is None and position.num_sequences > 0
    num_skipped = 0 if ready.training is None or is_recount else read_skipped(ready.origin)
    if is_own:
        state = read_state(ready.origin) if position.num_sequences > 0 else None
        return partial(_read_dataset, ready, group, num_skipped, state)
    shared = None if group is None else SharedReading(GroupExchange(group))
    batches = read_batches(
        ready.options.data,
        ready.options.batch,
        folder=ready.launched.root,
        vocab_size=ready.chunks[0].family.vocab_size,
        start=position.num_sequences,
        cursor=position.cursor,
        skipped=Skipped(count=num_skipped, on_skip=log_skipped if ready.mesh.rank == 0 else None),
        rows=ready.rows,
        shared=shared,
        form=ready.engine.form,
        beat=beat,
    )
    return lambda: _Feed(reader=_ahead(ready, batches, shared), num_skipped=num_skipped)


def _read_dataset(ready: Ready, group: dist.ProcessGroup | None, num_skipped: int, state: str | None) -> _Feed:
    """Read this rank's rows of a package's own dataset ahead, from a state on."""
    counts = SharedCounts(None if group is None else GroupExchange(group))
    batches = read_dataset(
        ready.options.data, ready.options.batch, ready.engine.form, ready.rows, state, counts,
        folder=ready.launched.root, vocab_size=ready.chunks[0].family.vocab_size,
    )  # fmt: skip
    return _Feed(reader=_ahead(ready, batches, counts), num_skipped=num_skipped, state=state)


def _ahead(ready: Ready, batches: Iterator[Batch], shared: SharedReading | SharedCounts | None) -> ReadAhead:
    remaining = (batch.part(*ready.parts) for batch in islice(batches, max(0, ready.options.steps - ready.num_steps)))
    return ReadAhead(remaining, ready.chunks[0].device, shared)


def _tracer(ready: Ready) -> Tracer | None:
    options, manifest = ready.options, ready.launched.manifest
    if options.traced.stop <= ready.num_steps + 1 or options.traced.start > options.steps:
        return None
    if ready.mesh.rank == 0:  # before the first step: other ranks write after it
        clear_traces(options.log_dir)
    shape = RunShape(
        schedule=schedule_of(manifest, options),
        num_stages=manifest.placement.num_stages,
        num_ranks=manifest.placement.num_ranks,
        style=manifest.placement.style,
        num_microbatches=share_of(options.batch, ready.mesh.degrees.data).num_microbatches,
        microbatch_group=options.microbatch_group,
        run=run_id(options.log_dir),
    )
    return Tracer(options.log_dir, ready.mesh.rank, shape)
