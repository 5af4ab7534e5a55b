"""The log folder of a run: choose it, distinguish it from those of other runs, and write `run.json`. No torch.

# Note [One run, one folder]
A run that resumes its own checkpoints is the same run, and continues in its folder; any other is a new run. Without
--log-dir a new run gets a new folder. With --log-dir, the files of an earlier run are moved to `earlier/DATE-NAME`
first. Restarts by a supervisor use the same folder.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from manifests.errors import (
    InputError,
    LaunchError,
    UsageError,
    UserError,
    system_errors,
)
from manifests.module_times import TIMES_NAME
from runner.checkpoint.history import find_checkpoints
from runner.config.flags import TrainOptions
from runner.launch.schedulers.local import process_of
from runner.launch.schedulers.table import scheduler_of
from runner.rundir.records import (
    DEFAULT_RUNS,
    JOB_NAME,
    RUN_NAME,
    SKEWED_S,
    JobRecord,
    clear_state,
    link_latest,
    read_job_record,
    read_run_record,
    versions,
    write_job_record,
    write_run_record,
)
from stores.folders.lock import locking

_EARLIER = "earlier"
_FILES = ("metrics.jsonl", "job.json", "state.json", RUN_NAME, TIMES_NAME, "report.html")
_FOLDERS = ("trace", "heartbeat", "tensorboard", "wandb", "flight-recorder", "profile")
_CLAIM = ".launch.lock"
_MOST_S = 1e11  # since the epoch, in the year 5138


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The folder of a run, which no other job uses meanwhile."""

    path: Path
    name: str
    manifest: str
    digest: str  # of its manifest
    options: TrainOptions
    is_chosen: bool  # by us, without --log-dir

    def begin(self) -> Path | None:
        """Prepare the folder for this run: move the files of other runs aside, and write the launch to `run.json`.

        Returns the folder to which files were moved, if any were.
        """
        run = read_run_record(self.path)
        aside: Path | None = None
        with system_errors(f"--log-dir {self.path}", "cannot be written", code="output.unwritable"):
            if not _is_same(run, self.options):
                aside, run = _move_aside(self.path, run), None
            run = dict(run) if run else self._new()
            run["launches"] = [*run.get("launches", ()), self._launch()]
            write_run_record(self.path, run)
        return aside

    def restore(self, aside: Path) -> None:
        """Put the files of another run back that `begin` has moved aside: this run was not launched."""
        with system_errors(f"--log-dir {self.path}", "cannot be written", code="output.unwritable"):
            (self.path / RUN_NAME).unlink()
            for path in tuple(aside.iterdir()):
                path.rename(self.path / path.name)
            os.removedirs(aside)

    def record(self, job: JobRecord) -> None:
        """Put the job that was launched on record, in place of the one before: now it is the latest."""
        clear_state(self.path)
        write_job_record(self.path, job)
        if self.is_chosen:
            link_latest(self.path)

    def _new(self) -> dict[str, Any]:
        history = _history(self.options)
        return {
            "id": uuid.uuid4().hex,
            "name": self.name,
            "began": time.time(),
            "checkpoint": str(history) if history else None,
        }

    def _launch(self) -> dict[str, Any]:
        return {
            "time": time.time(),
            "argv": _without_values(sys.argv),
            "folder": os.getcwd(),
            "host": socket.gethostname(),
            "manifest": {"path": self.manifest, "digest": self.digest},
            "options": dict(self.options.values),
            "versions": versions(),
        }


def choose_folder(options: TrainOptions, name: str) -> Path:
    """Return the folder for the run that these options ask for, if they name none; it may not exist yet."""
    runs = [(_began(run), path) for path, run in _runs() if _is_same(run, options)]
    if runs:
        return max(runs)[1]
    return _free(DEFAULT_RUNS, datetime.now(), name)


@contextmanager
def claim_log_dir(log_dir: Path) -> Iterator[None]:
    """Keep other launches from using a log folder until this job is on record there."""
    with locking(log_dir / _CLAIM, f"--log-dir {log_dir}", "launches a job with it"):
        check_free(log_dir)
        yield


def check_free(log_dir: Path) -> None:
    """Check that the job that was last launched with this log folder has certainly ended.

    Two jobs would write the same state, heartbeats and metrics, and `job.json` would name only one of them.
    """
    if not (log_dir / JOB_NAME).exists():
        return
    where = f"--log-dir {log_dir}"
    try:
        record = read_job_record(log_dir)
        use = _use_of(record, log_dir)
    except UserError as error:
        raise LaunchError(
            where, f"another job may be using it: {error.where}: {error.problem}",
            f"choose another, or remove {log_dir / JOB_NAME} once that job has ended",
            code="launch.log-folder-in-use",
        ) from error  # fmt: skip
    if use is not None:
        end = "cancel it with runner cancel"
        if record.scheduler == "local" and not process_of(record).is_local:
            end += f" on that machine, or in its container (if it was killed, wait {SKEWED_S:.0f} s)"
        raise UsageError(where, use, f"choose another, or {end}", code="launch.log-folder-in-use")


def _use_of(record: JobRecord, log_dir: Path) -> str | None:
    """Return how a job that has not ended uses its log folder; nothing uses a copy of it."""
    folder = os.path.dirname(record.output)
    if os.path.isdir(folder) and not os.path.samefile(folder, log_dir):
        return None
    return scheduler_of(record.scheduler).use_of(record, log_dir)


def _without_values(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the values of `--env NAME=VALUE`, which may be secrets."""
    words = list(argv)
    for number, word in enumerate(words):
        prefix = "--env=" if word.startswith("--env=") else ""
        if prefix or (number and words[number - 1] == "--env"):
            name, is_given, _ = word.removeprefix(prefix).partition("=")
            words[number] = f"{prefix}{name}{'=***' if is_given else ''}"
    return words


def _free(parent: Path, began: datetime, name: str) -> Path:
    """Return a folder that does not exist yet, named by date and name."""
    word = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    stem = f"{began:%Y%m%d-%H%M%S}-{word or 'run'}"
    names = itertools.chain((stem,), (f"{stem}-{number}" for number in itertools.count(2)))
    return next(parent / candidate for candidate in names if not (parent / candidate).exists())


def _began(run: Mapping[str, Any]) -> float:
    began = run.get("began")
    return float(began) if isinstance(began, int | float) and 0 <= began < _MOST_S else 0.0


def _runs() -> list[tuple[Path, Mapping[str, Any]]]:
    records = [(path.parent, read_run_record(path.parent)) for path in DEFAULT_RUNS.glob(f"*/{RUN_NAME}")]
    return [(path, run) for path, run in records if run is not None and not path.is_symlink()]


def _is_same(run: Mapping[str, Any] | None, options: TrainOptions) -> bool:
    """Whether these options resume the run of a folder, see Note [One run, one folder]."""
    resume, history = options.resume, _history(options)
    if run is None or resume.source is None or resume.weights_only:
        return False
    theirs = run.get("checkpoint")
    if not isinstance(theirs, str):
        return False
    if resume.source == "auto" or (history is not None and str(history) == theirs):
        try:
            return str(history) == theirs and bool(find_checkpoints(Path(theirs)))
        except InputError:  # a disk that does not answer now
            return str(history) == theirs
    return history is None and Path(os.path.abspath(resume.source)).is_relative_to(theirs)


def _history(options: TrainOptions) -> Path | None:
    return Path(os.path.abspath(options.history)) if options.history else None


def _move_aside(log_dir: Path, run: Mapping[str, Any] | None) -> Path | None:
    """Move the files of an earlier run, if there are any, into a separate folder, which is returned."""
    earlier_paths = [path for path in log_dir.iterdir() if _is_left(path)]
    if not earlier_paths:
        return None
    began_s = (run and _began(run)) or min(path.stat().st_mtime for path in earlier_paths)
    aside = _free(log_dir / _EARLIER, datetime.fromtimestamp(began_s), str(run.get("name", "")) if run else "")
    aside.mkdir(parents=True)
    # The files that identify the earlier run go last: after a kill, the next launch moves the rest.
    for path in sorted(earlier_paths, key=lambda path: path.name in (RUN_NAME, "metrics.jsonl")):
        path.rename(aside / path.name)
    return aside


def _is_left(path: Path) -> bool:
    if path.is_dir():
        return path.name in _FOLDERS and not path.is_symlink()
    return path.name in _FILES or (path.name.startswith("rank-") and path.suffix == ".log")
