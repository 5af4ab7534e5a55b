"""`job.json` in the log folder: which job `runner launch` started, for status, logs and cancel. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from manifests.errors import LaunchError, UsageError, refused_by_system
from manifests.invariants import MANIFEST_NAME
from manifests.store import write_file
from runner.rundir.run_record import check_same_run, run_id
from stores.folders.probe import check_writable

JOB_NAME = "job.json"
_MOST_DIGITS = 20  # of a process id

Scheduler = Literal["local", "slurm", "jobset"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A launched job: its scheduler, its id there, and the file of its output.

    The id of a local job is its process id; `host` and `birth` distinguish it from later processes with that id. A
    JobSet's id is its name in `namespace`.
    """

    scheduler: str
    id: str
    name: str
    output: str
    host: str = ""
    birth: str = ""
    namespace: str = ""


def make_log_dir(log_dir: Path) -> None:
    """Create the log folder if it is missing, and check that it can be written; on failure, no folder is left.

    Raises:
        UsageError: it is a packed folder or a checkpoint.
        OutputError: it cannot be created or written.
    """
    where, hint = f"--log-dir {log_dir}", "choose a folder that every node can write"
    if os.path.lexists(log_dir / MANIFEST_NAME):
        problem = "is a packed folder or a checkpoint, which has only the files of its manifest"
        raise UsageError(where, problem, "choose a folder beside it", code="output.inside-input")
    check_writable(log_dir, where, hint)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_by_system(where, error, "cannot be created", hint, code="output.unwritable") from error


def write_record(log_dir: Path, record: JobRecord) -> None:
    """Write a job's record to its log folder.

    Raises:
        OutputError: it cannot be written; an older record is unchanged.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        write_file(
            log_dir / JOB_NAME,
            (json.dumps({"version": 1, **asdict(record), "run": run_id(log_dir)}, indent=2) + "\n").encode(),
        )
    except OSError as error:
        where, hint = f"--log-dir {log_dir}", "choose a folder that every node can write"
        raise refused_by_system(where, error, "cannot be written", hint, code="output.unwritable") from error


def read_record(log_dir: Path) -> JobRecord:
    """Read the record of the job last launched with this log folder.

    Raises:
        LaunchError: there is none, or it is damaged.
        LogError: it is of another run.
    """
    path = log_dir / JOB_NAME
    try:
        document = json.loads(path.read_bytes())
        texts = {field: str(document[field]) for field in ("scheduler", "id", "name", "output")}
        if texts["scheduler"] not in SCHEDULERS:
            raise ValueError(f"expected one of {', '.join(SCHEDULERS)}, found {texts['scheduler']!r}")
        if texts["scheduler"] == "local" and not (texts["id"].isdecimal() and len(texts["id"]) < _MOST_DIGITS):
            raise ValueError(f"expected a process id, found {texts['id']!r}")
        texts |= {field: str(document.get(field, "")) for field in ("host", "birth", "namespace")}
        if "\0" in "".join(texts.values()):
            raise ValueError("it contains a zero byte")
        record = JobRecord(**texts)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "pass the --log-dir of a job that runner launch started"
        raise LaunchError(str(path), "no such file", hint, code="launch.no-record") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(str(path), f"is not a job record: {error}", code="launch.bad-record") from error
    check_same_run(document.get("run"), log_dir, str(path))
    return record
