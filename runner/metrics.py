"""metrics.jsonl and the lines that people read; only rank 0 writes either. The fields are in docs/metrics.md."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.load import LoadReport
from runner.saver import SaveReport
from runner.step import StepReport

__all__ = ["Metrics", "RankLoad", "StepTimes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """What one rank read before the first step."""

    rank: int
    stages: tuple[int, ...]
    report: LoadReport


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of rank 0: for the batch to come, and from there to the end of the step."""

    data_s: float
    compute_s: float


class Metrics:
    """Writes JSON lines, and a printed line for each step; with no path, nothing.

    `least_step_s` is how long the products of a step would take if every GPU were as fast as its data sheet;
    None where that is not known.
    """

    def __init__(self, path: Path | None, *, num_steps: int, least_step_s: float | None = None) -> None:
        self._num_steps, self._least_step_s = num_steps, least_step_s
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 - held for the whole run

    def loaded(self, ranks: Iterable[RankLoad]) -> None:
        for each in ranks:
            report = each.report
            self._write(
                rank=each.rank,
                stages=each.stages,
                num_tensors=report.num_tensors,
                load_nbytes=report.nbytes,
                load_s=report.load_s,
                load_gib_per_s=report.nbytes / 2**30 / report.load_s,
            )

    def step(self, step: int, report: StepReport, times: StepTimes, *, peak_nbytes: int) -> None:
        step_s = times.data_s + times.compute_s
        rate = report.num_tokens / step_s
        utilization = {} if self._least_step_s is None else {"mfu": self._least_step_s / step_s}
        self._write(
            step=step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            num_tokens=report.num_tokens,
            step_s=step_s,
            data_s=times.data_s,
            compute_s=times.compute_s,
            busy_s=report.busy_s,
            schedule_s=report.schedule_s,
            tokens_per_s=rate,
            peak_nbytes=peak_nbytes,
            **utilization,
        )
        self._say(
            f"step {step}/{self._num_steps}  loss {report.loss:.6f}  grad norm {report.grad_norm:.4f}"
            f"  lr {report.lr:.3g}  {rate:,.0f} tokens/s" + "".join(f"  MFU {mfu:.1%}" for mfu in utilization.values())
        )

    def evaluation(self, step: int, loss: float, num_tokens: int) -> None:
        self._write(step=step, eval_loss=loss, num_tokens=num_tokens)
        self._say(f"after step {step}: loss {loss:.6f} over {num_tokens:,} tokens of the evaluation data")

    def checkpoint(self, report: SaveReport) -> None:
        if report.failure is not None:
            self._write(step=report.step, checkpoint=str(report.path), save_error=str(report.failure))
            self._say(f"after step {report.step}: no checkpoint, training goes on: {report.failure}")
            return
        self._write(
            step=report.step,
            checkpoint=str(report.path),
            save_nbytes=report.nbytes,
            stall_s=report.stall_s,
            save_s=report.save_s,
        )
        self._say(
            f"after step {report.step}: saved {report.path}, {report.nbytes / 2**30:.2f} GiB in {report.save_s:.2f} s;"
            f" training stood still for {report.stall_s:.3f} s"
        )

    def ended(self, peaks_nbytes: Iterable[int]) -> None:
        """Write the peak of every rank's memory, by rank; these are the last lines."""
        for rank, nbytes in enumerate(peaks_nbytes):
            self._write(rank=rank, peak_nbytes=nbytes)
        if self._file is not None:
            self._file.close()

    def saved(self, out: Path) -> None:
        self._say(f"saved the trained weights: {out / 'manifest.json'}")

    def _write(self, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({**fields, "time": time.time()}) + "\n")

    def _say(self, line: str) -> None:
        if self._file is not None:
            print(line, file=sys.stdout, flush=True)
