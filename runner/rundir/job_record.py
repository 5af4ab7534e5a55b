"""What a launched job is known by later: `job.json` in its log folder. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from manifests.errors import LaunchError, refused_by_system
from manifests.probe import check_writable
from manifests.store import write_file

__all__ = ["JOB_NAME", "SCHEDULERS", "JobRecord", "Scheduler", "make_log_dir", "read_record", "write_record"]

JOB_NAME = "job.json"
_MOST_DIGITS = 20  # of a process's number

Scheduler = Literal["local", "slurm", "jobset"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A launched job: its scheduler, what that calls it, and the file that its output goes to.

    One on this machine is called by its process; `host` and `birth` say which of that number. A JobSet has its name in
    a `namespace` alone.
    """

    scheduler: str
    id: str
    name: str
    output: str
    host: str = ""
    birth: str = ""
    namespace: str = ""


def make_log_dir(log_dir: Path) -> None:
    """Make sure that the log folder exists and can be written; where it cannot, no folder is left.

    Raises:
        InputError: it cannot be created or written.
    """
    where, hint = f"--log-dir {log_dir}", "name a folder that every node can write"
    check_writable(log_dir, where, hint)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_by_system(where, error, "cannot be created", hint, code="output.unwritable") from error


def write_record(log_dir: Path, record: JobRecord) -> None:
    """Write a job's record to its log folder.

    Raises:
        InputError: it cannot be written; a record that was there is as it was.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        write_file(log_dir / JOB_NAME, (json.dumps({"version": 1, **asdict(record)}, indent=2) + "\n").encode())
    except OSError as error:
        where, hint = f"--log-dir {log_dir}", "name a folder that every node can write"
        raise refused_by_system(where, error, "cannot be written", hint, code="output.unwritable") from error


def read_record(log_dir: Path) -> JobRecord:
    """Read the record of the job last launched with this log folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = log_dir / JOB_NAME
    try:
        found = json.loads(path.read_bytes())
        texts = {field: str(found[field]) for field in ("scheduler", "id", "name", "output")}
        if texts["scheduler"] not in SCHEDULERS:
            raise ValueError(f"expected one of {', '.join(SCHEDULERS)}, found {texts['scheduler']!r}")
        if texts["scheduler"] == "local" and not (texts["id"].isdecimal() and len(texts["id"]) < _MOST_DIGITS):
            raise ValueError(f"expected the number of a process, found {texts['id']!r}")
        texts |= {field: str(found.get(field, "")) for field in ("host", "birth", "namespace")}
        if "\0" in "".join(texts.values()):
            raise ValueError("a zero byte, which no command takes")
        return JobRecord(**texts)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "give the --log-dir of a job that runner launch has started"
        raise LaunchError(str(path), "no such file", hint, code="launch.no-record") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(str(path), f"is no record of a job: {error}", code="launch.bad-record") from error
