"""What a launched job is known by later: `job.json` in its log folder. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from manifests.errors import InputError
from manifests.store import write_file

__all__ = ["JOB_NAME", "JobRecord", "read_record", "write_record"]

JOB_NAME = "job.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A submitted job: its scheduler, what that calls it, and the file that its output goes to."""

    scheduler: str
    id: str
    name: str
    output: str


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
        return JobRecord(**{field: str(found[field]) for field in JobRecord.__slots__})
    except FileNotFoundError as error:
        hint = "give the --log-dir of a job that runner launch --scheduler submitted"
        raise InputError(str(path), "no such file", hint) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(str(path), f"is no record of a job: {error}") from error
