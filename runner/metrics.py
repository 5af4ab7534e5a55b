"""metrics.jsonl and the lines that people read; only rank 0 writes either."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from runner.saver import SaveReport
from runner.step import StepReport

__all__ = ["Metrics"]


class Metrics:
    """Writes one JSON line and one printed line for each step; with no path, nothing.

    JSON fields: `step` (1 is the first), `loss` (mean over the valid tokens of the global batch,
    before the step), `grad_norm` (before clipping), `lr`, `num_tokens`, `step_s` and `tokens_per_s`;
    an evaluation has `step`, `eval_loss` and `num_tokens`. A checkpoint has the `step` after which it was
    saved, `checkpoint` (its folder), `save_nbytes` (over all ranks), `stall_s` (training stood still) and
    `save_s` (from there on until it was committed), or `save_error`. `time` is seconds since the epoch.
    """

    def __init__(self, path: Path | None, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 - held for the whole run

    def step(self, step: int, report: StepReport, step_s: float) -> None:
        rate = report.num_tokens / step_s
        self._write(
            step=step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            num_tokens=report.num_tokens,
            step_s=step_s,
            tokens_per_s=rate,
        )
        self._say(
            f"step {step}/{self._num_steps}  loss {report.loss:.6f}  grad norm {report.grad_norm:.4f}"
            f"  lr {report.lr:.3g}  {rate:,.0f} tokens/s"
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

    def saved(self, out: Path) -> None:
        self._say(f"saved the trained weights: {out / 'manifest.json'}")

    def _write(self, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({**fields, "time": time.time()}) + "\n")

    def _say(self, line: str) -> None:
        if self._file is not None:
            print(line, file=sys.stdout, flush=True)
