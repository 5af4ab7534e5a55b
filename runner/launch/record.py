"""What a launched job is known by later: `job.json` in its log folder. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

from manifests.errors import InputError
from manifests.store import write_file
from runner.launch.job import SCHEDULERS

__all__ = ["JOB_NAME", "JobRecord", "make_log_dir", "read_record", "write_record"]

JOB_NAME = "job.json"


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
    """Make the log folder be there and writable.

    Raises:
        InputError: it cannot be.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise InputError(
            f"--log-dir {log_dir}", f"cannot be written: {error.strerror}", "name a folder that every node can write"
        ) from error


def write_record(log_dir: Path, record: JobRecord) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    partial = log_dir / f".{JOB_NAME}.partial"
    write_file(partial, (json.dumps({"version": 1, **asdict(record)}, indent=2) + "\n").encode())
    partial.replace(log_dir / JOB_NAME)


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
        if texts["scheduler"] == "local" and not texts["id"].isdecimal():
            raise ValueError(f"expected the number of a process, found {texts['id']!r}")
        return JobRecord(**texts, **{field: str(found.get(field, "")) for field in ("host", "birth", "namespace")})
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "give the --log-dir of a job that runner launch has started"
        raise InputError(str(path), "no such file", hint) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(str(path), f"is no record of a job: {error}") from error
