"""The records of a run, for its sinks and for people, on rank 0 alone. docs/metrics.md explains the fields."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from manifests.command.sizes import show_bytes
from runner.checkpoint.async_save import SaveReport
from runner.checkpoint.publish import PublishReport
from runner.load.load import LoadReport
from runner.load.local_cache import CacheReport
from runner.metrics.sinks import Sink
from runner.metrics.summary import closing
from runner.profiling.step_times import RankTimes
from runner.training.expert_balance import ExpertReport
from runner.training.step import StepReport

logger = logging.getLogger("runner")
_lines = logging.getLogger("runner.progress")  # of the log of rank 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """What one rank read before the first step."""

    rank: int
    stages: tuple[int, ...]
    report: LoadReport
    base_nbytes: int  # memory of the process before it built its stages
    planned_nbytes: int | None  # memory that is planned beyond that
    copied: CacheReport | None
    start_s: Mapping[str, float]  # of the parts of its start, by their names


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of a step on rank 0, of waiting for data on each pipeline rank, and of the parts of a step on each.

    Of a step that was not timed, `ranks` is empty.
    """

    step_s: float
    data_s: tuple[float, ...]
    ranks: tuple[RankTimes, ...]


class StepProgress:
    """Shows the steps after `first_step`: every `every`-th of them and the last, and on a terminal a bar below.

    With `quiet` nothing is shown; the log of rank 0 has it nevertheless.
    """

    def __init__(self, num_steps: int, *, first_step: int = 0, every: int = 1, quiet: bool = False) -> None:
        self.num_steps, self._every, self._quiet = num_steps, every, quiet
        self._bar: tqdm[NoReturn] | None = None
        self._redirected = contextlib.ExitStack()
        if sys.stdout.isatty() and _has_columns() and not quiet:
            self._bar = tqdm(
                total=num_steps, initial=first_step, unit="step", file=sys.stderr, dynamic_ncols=True, smoothing=0.1
            )
            self._redirected.enter_context(logging_redirect_tqdm())  # else notes end up on the bar's line

    def step(self, step: int, brief: str, line: str) -> None:
        """Show that a step was taken: `brief` beside the bar, and `line`."""
        _lines.debug("%s", line)
        if self._bar is not None:
            self._bar.set_postfix_str(brief, refresh=False)
            self._bar.update(step - self._bar.n)
        if step % self._every == 0 or step == self.num_steps:
            self._print(line)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        _lines.debug("%s", line)
        self._print(line)

    def _print(self, line: str) -> None:
        if self._quiet:
            return
        try:
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line, file=sys.stdout, flush=True)
        except OSError as error:  # a full disk, or a closed pipe, must not stop training
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
            problem = error.strerror or type(error).__name__
            logger.warning("note: standard output: %s; the run continues, and its log has the steps", problem)

    def close(self) -> None:
        self._redirected.close()
        if self._bar is not None:
            self._bar.close()


class Metrics:
    """Writes each record to all sinks, and prints a line about it; without `progress`, none.

    `least_step_s` is the time of a step's matmuls at the data-sheet FLOP/s of the GPUs, from which MFU is computed;
    None where that is not known. `run` is the id in run.json. Leaving the context closes the sinks.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        progress: StepProgress | None = None,
        *,
        least_step_s: float | None = None,
        run: str = "",
    ) -> None:
        self._run, self._num_steps, self._num_tokens, self._train_s = run, 0, 0, 0.0
        self._sinks, self._progress, self._least_step_s = list(sinks), progress, least_step_s

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._progress is not None:
            self._progress.close()
        code = 0 if error is None else int(getattr(error, "exit_code", 1))
        for sink in self._sinks:
            self._try(sink, partial(sink.close, code))

    def loaded(self, ranks: Iterable[RankLoad]) -> None:
        for each in ranks:
            report, copied = each.report, each.copied
            staged = {} if copied is None else {
                "staged_nbytes": copied.nbytes, "peer_nbytes": copied.peer_nbytes,
                "reused_nbytes": copied.reused_nbytes, "staged_s": copied.copy_s,
            }  # fmt: skip
            self._write(
                rank=each.rank,
                stages=each.stages,
                run=self._run or None,
                num_tensors=report.num_tensors,
                load_nbytes=report.nbytes,
                load_s=report.load_s,
                load_gib_per_s=report.nbytes / 2**30 / report.load_s,
                base_nbytes=each.base_nbytes,
                planned_nbytes=each.planned_nbytes,
                **staged,
                **each.start_s,
            )

    def step(
        self, step: int, report: StepReport, times: StepTimes, *, peak_nbytes: int, num_skipped: int | None = None
    ) -> None:
        rate = report.num_tokens / times.step_s
        self._num_steps, self._num_tokens = self._num_steps + 1, self._num_tokens + report.num_tokens
        self._train_s += times.step_s
        parts = {
            "compute_s": tuple(rank.compute_s for rank in times.ranks),
            "communication_s": tuple(rank.communication_s for rank in times.ranks),
            "bubble_s": tuple(rank.bubble_s for rank in times.ranks),
        } if times.ranks else {}  # fmt: skip
        mfu = None if self._least_step_s is None else self._least_step_s / times.step_s
        self._write(
            step=step,
            loss=report.loss,
            mtp_loss=report.mtp_loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            num_tokens=report.num_tokens,
            step_s=times.step_s,
            data_s=times.data_s,
            **parts,
            tokens_per_s=rate,
            peak_nbytes=peak_nbytes,
            mfu=mfu,
            **_of_experts(report.experts),
            skipped_documents=num_skipped,
        )
        if self._progress is not None:
            self._progress.step(
                step,
                f"loss {report.loss:.4f}, {rate:,.0f} tokens/s",
                f"step {step}/{self._progress.num_steps}  loss {report.loss:.6f}"
                + ("" if report.mtp_loss is None else f"  MTP loss {report.mtp_loss:.6f}")
                + f"  grad norm {report.grad_norm:.4f}"
                f"  lr {report.lr:.3g}  {rate:,.0f} tokens/s"
                + ("" if mfu is None else f"  MFU {mfu:.1%}")
                + f"  peak {show_bytes(peak_nbytes)}",
            )

    def evaluation(self, step: int, loss: float, num_tokens: int, num_skipped: int | None = None) -> None:
        self._write(step=step, eval_loss=loss, eval_num_tokens=num_tokens, eval_skipped_documents=num_skipped)
        self._say(f"after step {step}: loss {loss:.6f} over {num_tokens:,} tokens of the evaluation data")

    def checkpoint(self, report: SaveReport) -> None:
        if report.failure is not None:
            self._write(step=report.step, checkpoint=str(report.path), save_error=str(report.failure))
            self._say(f"after step {report.step}: no checkpoint: {report.failure}")
            return
        self._write(
            step=report.step,
            checkpoint=str(report.path),
            save_nbytes=report.nbytes,
            stall_s=report.stall_s,
            save_s=report.save_s,
        )
        self._say(
            f"after step {report.step}: saved {report.path}, {show_bytes(report.nbytes)} in {report.save_s:.2f} s;"
            f" training paused for {report.stall_s:.3f} s"
        )

    def published(self, report: PublishReport) -> None:
        if report.failure is not None:
            self._write(step=report.step, published=report.location, publish_error=str(report.failure))
            self._say(f"after step {report.step}: nothing was published: {report.failure}")
            return
        if report.number is None:
            self._say(f"after step {report.step}: nothing to publish: weights are those of a version")
            return
        self._write(
            step=report.step,
            published=report.location,
            publish_nbytes=report.nbytes,
            num_changed=report.num_changed,
            stall_s=report.stall_s,
            publish_s=report.publish_s,
        )
        what = "all tensors" if report.is_full else f"{report.num_changed} of {report.num_tensors} tensors"
        self._say(
            f"after step {report.step}: published {report.location}, {what}, {show_bytes(report.nbytes)} in"
            f" {report.publish_s:.2f} s; training paused for {report.stall_s:.3f} s"
        )

    def begin(self, lines: Iterable[str]) -> None:
        """Print what the run trains, on how many ranks, and for how long."""
        for line in lines:
            self._say(line)

    def ended(self, peaks_nbytes: Sequence[int], following: str) -> None:
        """Write the peak memory of every rank, by rank; these are the last records. Print what was trained."""
        for rank, nbytes in enumerate(peaks_nbytes):
            self._write(rank=rank, peak_nbytes=nbytes)
        if self._num_steps:
            for line in closing(
                num_steps=self._num_steps, num_tokens=self._num_tokens, seconds=self._train_s,
                peaks_nbytes=peaks_nbytes, following=following,
            ):  # fmt: skip
                self._say(line)

    def saved(self, out: Path, name: str = "manifest.json", what: str = "weights") -> None:
        self._say(f"saved the trained {what}: {out / name}")

    def _write(self, **fields: Any) -> None:
        """Write a record of the fields that have a value."""
        record = {name: value for name, value in {**fields, "time": time.time()}.items() if value is not None}
        for sink in tuple(self._sinks):
            if not self._try(sink, partial(sink.write, record)):
                self._sinks.remove(sink)
                with contextlib.suppress(Exception):
                    sink.close(1)

    def _try(self, sink: Sink, act: Callable[[], None]) -> bool:
        """Call a sink, log its failure, and return whether it succeeded."""
        try:
            act()
        except Exception as error:  # third-party code, disks and networks must not stop training
            logger.warning("note: %s failed, and the run continues without it: %s", sink.name, error)
            return False
        return True

    def _say(self, line: str) -> None:
        if self._progress is not None:
            self._progress.say(line)


def _of_experts(report: ExpertReport | None) -> dict[str, Any]:
    if report is None:
        return {}
    load = None if report.load is None else {str(layer): counts for layer, counts in report.load}
    return {"aux_loss": report.aux_loss, "expert_load": load}


def _has_columns() -> bool:
    """Whether standard error is a terminal with a width; some say 0, where a bar has no room."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
