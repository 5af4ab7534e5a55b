"""Fuzz target: what a run leaves in its log folder, in one JSON object. Reports and status are given, or refuse it."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from runner.launch.verbs import find_status
from runner.report.page import tables_of
from runner.report.read import read_run
from tests.fuzz.folder import check_refusal, scratch

_JOB = {"scheduler": "local", "id": "999999999", "name": "a", "output": "rank-00000.log", "host": socket.gethostname()}


def check(text: bytes) -> None:
    """Raise AssertionError unless the report and the status of a run are given, or refused by file."""
    folder = scratch("runlog")
    log_dir = folder / "log"
    shutil.rmtree(log_dir, ignore_errors=True)
    _write(log_dir, text)
    try:
        run = read_run(log_dir)
        for table in tables_of(run):
            table.encode()
        if run.traces is not None:
            run.traces.planned()
    except UserError as error:
        check_refusal(error, log_dir)
    try:
        json.dumps(find_status(log_dir))
    except UserError as error:
        check_refusal(error, log_dir, "job ", "scontrol", "kubectl")


def _write(log_dir: Path, text: bytes) -> None:
    (log_dir / "trace").mkdir(parents=True)
    (log_dir / "heartbeat").mkdir()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        (log_dir / "metrics.jsonl").write_bytes(text)
        return
    lines = found.get("metrics")
    _dump(log_dir / "job.json", found.get("job"))
    _dump(log_dir / "state.json", found.get("state"))
    (log_dir / "metrics.jsonl").write_bytes(b"".join(map(_line, lines if isinstance(lines, list) else [lines])))
    for kind in ("trace", "heartbeat"):
        documents = found.get(kind)
        for number, document in enumerate(documents if isinstance(documents, list) else []):
            _dump(log_dir / kind / f"rank-{number:05d}.json", document)


def _dump(path: Path, found: Any) -> None:
    if found is not None:
        path.write_bytes(_line(found))


def _line(found: Any) -> bytes:
    return json.dumps(found).encode() + b"\n"


def seeds() -> tuple[bytes, ...]:
    """Return a run of two ranks with a trace, and one of two attempts that was killed."""
    load = {"rank": 0, "stages": [0], "num_tensors": 3, "load_nbytes": 10, "load_s": 0.5, "base_nbytes": 5,
            "planned_nbytes": 9, "time": 1.0}  # fmt: skip
    step = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "num_tokens": 8, "step_s": 0.5, "data_s": [0.1, 0.1],
            "compute_s": [0.2, 0.1], "communication_s": [0.1, 0.1], "bubble_s": [0.1, 0.2], "tokens_per_s": 16.0,
            "peak_nbytes": 100, "mfu": 0.3, "time": 2.0}  # fmt: skip
    saved = {"step": 2, "checkpoint": "c/step-2", "save_nbytes": 8, "stall_s": 0.1, "save_s": 0.2, "time": 3.0}
    told = [load, {**load, "rank": 1, "stages": [1]}, step, {**step, "step": 2}, saved,
            {"step": 2, "eval_loss": 2.0, "eval_num_tokens": 5, "time": 4.0}, {"rank": 0, "peak_nbytes": 70},
            {"rank": 1, "peak_nbytes": 80}]  # fmt: skip
    run = {"schedule": "GPipe", "num_stages": 2, "num_ranks": 2, "style": "loop", "num_microbatches": 1}
    order = ((("F", 0, 10), ("B", 30, 20)), (("F", 12, 8), ("L", 20, 1), ("B", 21, 9)))
    traces = [
        {"run": run, "traceEvents": [
            {"name": kind, "ph": "X", "pid": rank, "tid": rank, "ts": 1e6 + begin, "dur": took,
             "args": {"step": 1, "kind": kind, "microbatch": 0}} for kind, begin, took in spans
        ]}
        for rank, spans in enumerate(order)
    ]  # fmt: skip
    beat = {"rank": 0, "stages": [0], "host": "h", "pid": 7, "step": 2, "phase": "train", "time": 1.0, "doing": "f:1",
            "is_waiting": False}  # fmt: skip
    whole = {"job": _JOB, "metrics": told, "trace": traces, "heartbeat": [beat, {**beat, "rank": 1, "time": 99.0}],
             "state": {"version": 1, "step": 2, "ended": "done", "code": 0, "error": ""}}  # fmt: skip
    killed = {"job": {**_JOB, "id": "1"}, "metrics": [*told[:5], *told[:3]], "heartbeat": [beat],
              "state": {"step": 1, "ended": "failed", "code": 5, "error": "rank 1: gone"}}  # fmt: skip
    return json.dumps(whole).encode(), json.dumps(killed).encode()
