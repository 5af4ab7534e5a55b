"""The records in a log folder, and how a run's folder is found. No torch.

`run.json`: which run this is and with which options. `job.json`: which job `runner launch` started, for status, logs
and cancel. `state.json`: how the run ended and after which step. `heartbeat/rank-00000.json`: the step of a rank, and
what it executes; ranks have one once they have loaded, and the launcher one from its start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from manifests.errors import LaunchError, LogError, StoreError, UsageError, system_errors
from manifests.invariants import MANIFEST_NAME
from manifests.paths import open_regular
from manifests.store import write_file
from stores.folders.probe import check_writable

RUN_NAME = "run.json"
JOB_NAME = "job.json"
STATE_NAME = "state.json"
DEFAULT_RUNS = Path("runner-log")  # has a folder for each run started without --log-dir
LATEST = "latest"
ALIVE_S = 2.0  # a rank writes its heartbeat at least this often, however long its step takes
SKEWED_S = 30.0  # the clocks of nodes may differ by this much
_BEATS = "heartbeat"
_MOST_S = 1e12  # since the epoch
_NUMBER = re.compile(r"[0-9]{1,19}")  # of a process, or of a Slurm job
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # names of JobSets and namespaces: RFC 1123
_PACKAGES = ("reshard", "torch", "transformers")
# A run as JSON: `id`, `began`, `name`, `checkpoint`, `saved`, and `launches`, one for each start.
Run = Mapping[str, Any]
Scheduler = Literal["local", "slurm", "jobset"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)
# done: all steps are complete; stopped: by a signal, after a checkpoint; failed: `error`, with exit code `code`.
Ended = Literal["done", "stopped", "failed"]


def read_run_record(log_dir: Path) -> dict[str, Any] | None:
    """Return the run record of a folder; None if there is none that can be read."""
    try:
        document = _read_json(log_dir / RUN_NAME)
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and isinstance(document.get("id"), str) else None


def run_id(log_dir: Path) -> str:
    """Return the unique id of this folder's run; empty if it has none."""
    record = read_run_record(log_dir)
    return str(record["id"]) if record else ""


def check_same_run(named: object, log_dir: Path, where: str) -> None:
    """Check that a file of a log folder, which names the run that has written it, is of the folder's run."""
    if not isinstance(named, str) or not named:
        return
    expected = run_id(log_dir)
    if expected not in ("", named):
        problem = f"is of run {named[:32]}, and {RUN_NAME} beside it of run {expected[:32]}"
        hint = "copy log folders whole: a file of another run was moved here, or this run's was lost"
        raise LogError(where, problem, hint, code="log.other-run")


def write_run_record(log_dir: Path, run: Run) -> None:
    """Write a run record.

    Raises:
        OSError: it cannot be written; an older record is unchanged.
    """
    write_file(log_dir / RUN_NAME, (json.dumps({"version": 1, **run}, indent=2, default=str) + "\n").encode())


def note_resolved(log_dir: Path, resolved: Mapping[str, Any]) -> None:
    """Add the resolved options (from flags, checkpoint and number of ranks) to the record of a run's last launch."""
    run = read_run_record(log_dir)
    if run is None or not run.get("launches"):
        return
    run["launches"][-1]["resolved"] = dict(resolved)
    with contextlib.suppress(OSError):  # training does not depend on it
        write_run_record(log_dir, run)


def note_saved(log_dir: Path, out: Path) -> None:
    """Add to a run's record which folder it has written at the `out` of --save, for `has_saved`."""
    run = read_run_record(log_dir)
    if run is not None:
        with contextlib.suppress(OSError):  # as above
            write_run_record(log_dir, {**run, "saved": _identity_of(out)})


def has_saved(log_dir: Path, out: Path) -> bool:
    """Whether the folder at `out` is the one that this run has written there, and has the same files."""
    with contextlib.suppress(OSError):
        return (read_run_record(log_dir) or {}).get("saved") == _identity_of(out)
    return False


def _identity_of(folder: Path) -> str:
    status = os.stat(folder)
    return f"{status.st_ino} {status.st_mtime_ns}"


def config_of(run: Run | None) -> dict[str, Any]:
    """Return what identifies a run, flat: of its last launch the resolved options, model, host and versions.

    Fields that a damaged record lacks are left out.
    """
    if run is None:
        return {}
    launches = run.get("launches")
    launch = object_or_empty(launches[-1]) if isinstance(launches, list) and launches else {}
    manifest, argv = object_or_empty(launch.get("manifest")), launch.get("argv")
    facts = {
        "run": run.get("id"),
        "name": run.get("name"),
        "manifest": manifest.get("path"),
        "manifest_digest": manifest.get("digest"),
        "command": shlex.join(map(str, argv)) if isinstance(argv, list) else None,
        "host": launch.get("host"),
        **{f"version/{package}": number for package, number in object_or_empty(launch.get("versions")).items()},
    }
    options = object_or_empty(launch.get("resolved")) or object_or_empty(launch.get("options"))
    return {name: value for name, value in {**options, **facts}.items() if value is not None}


def find_run(path: Path) -> Path:
    """Return the folder of one run: `path` itself, or the latest run in it."""
    latest = path / LATEST
    return path / os.readlink(latest) if latest.is_symlink() and latest.is_dir() else path


def link_latest(log_dir: Path) -> None:
    """Point the link `latest`, beside a run's folder, to it; a file of that name that is not a link is kept."""
    latest = log_dir.parent / LATEST
    if os.path.lexists(latest) and not latest.is_symlink():
        return
    fresh = latest.with_name(f".{LATEST}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(log_dir.name)
        fresh.replace(latest)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A launched job: its scheduler, its id there, and the file of its output.

    The id of a local job is its process id in the PID namespace `namespace`; `host` and `birth` distinguish it from
    later processes with that id. A JobSet's id is its name in `namespace`, and `birth` its uid. `cluster` is that of a
    Slurm job, if sbatch names one.
    """

    scheduler: str
    id: str
    name: str
    output: str
    host: str = ""
    birth: str = ""
    namespace: str = ""
    cluster: str = ""


def make_log_dir(log_dir: Path) -> None:
    """Create the log folder if it is missing, and check that it can be written; on failure, no folder is left."""
    where, hint = f"--log-dir {log_dir}", "choose a folder that every node can write"
    if os.path.lexists(log_dir / MANIFEST_NAME):
        problem = "is a packed folder or a checkpoint, which has only the files of its manifest"
        raise UsageError(where, problem, "choose a folder beside it", code="output.inside-input")
    check_writable(log_dir, where, hint)
    with system_errors(where, "cannot be created", hint, code="output.unwritable"):
        log_dir.mkdir(parents=True, exist_ok=True)


def write_job_record(log_dir: Path, record: JobRecord) -> None:
    """Write a job's record to its log folder.

    Raises:
        OutputError: it cannot be written; an older record is unchanged.
    """
    where, hint = f"--log-dir {log_dir}", "choose a folder that every node can write"
    with system_errors(where, "cannot be written", hint, code="output.unwritable"):
        log_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": 1, **asdict(record), "run": run_id(log_dir)}, indent=2)
        write_file(log_dir / JOB_NAME, f"{text}\n".encode())


def read_job_record(log_dir: Path) -> JobRecord:
    """Read the record of the job last launched with this log folder."""
    path = log_dir / JOB_NAME
    try:
        document = _read_json(path)
        texts = {field: str(document[field]) for field in ("scheduler", "id", "name", "output")}
        if texts["scheduler"] not in SCHEDULERS:
            raise ValueError(f"expected one of {', '.join(SCHEDULERS)}, found {texts['scheduler']!r}")
        texts |= {field: str(document.get(field, "")) for field in ("host", "birth", "namespace", "cluster")}
        # Both are arguments of scontrol and kubectl, which would take others for flags.
        if not (_LABEL if texts["scheduler"] == "jobset" else _NUMBER).fullmatch(texts["id"]):
            raise ValueError(f"expected the id of a {texts['scheduler']} job, found {texts['id']!r}")
        if texts["scheduler"] == "jobset" and texts["namespace"] and not _LABEL.fullmatch(texts["namespace"]):
            raise ValueError(f"expected a namespace, found {texts['namespace']!r}")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """How the last run with this log folder ended; there is none while it runs, or if every process was killed."""

    step: int
    ended: Ended
    code: int = 0
    error: str = ""
    error_code: str = ""

    @property
    def word(self) -> str:
        """The state as Slurm names it."""
        return {"done": "COMPLETED", "stopped": "STOPPED", "failed": "FAILED"}[self.ended]


def write_state(log_dir: Path, state: RunState) -> None:
    write_file(
        log_dir / STATE_NAME,
        (json.dumps({"version": 1, **asdict(state), "run": run_id(log_dir)}) + "\n").encode(),
        is_durable=False,
    )


def clear_state(log_dir: Path) -> None:
    (log_dir / STATE_NAME).unlink(missing_ok=True)


def read_state(log_dir: Path) -> RunState | None:
    """Return how the last run ended; None if it left no state. That of another run is not this one's."""
    try:
        document = _read_json(log_dir / STATE_NAME)
        state = RunState(
            step=int(document["step"]),
            ended=document["ended"],
            code=int(document.get("code", 0)),
            error=str(document.get("error", "")),
            error_code=str(document.get("error_code", "")),
        )
        check_same_run(document.get("run"), log_dir, STATE_NAME)
    except (LogError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return state if state.ended in get_args(Ended) else None


def read_shared_state(log_dir: Path) -> RunState | None:
    """Return the same where another node may have just written it."""
    with contextlib.suppress(OSError):
        os.listdir(log_dir)  # NFS caches that a file was missing until its folder is opened
    return read_state(log_dir)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One heartbeat. `time` is in seconds since the epoch, `doing` the function being executed and its line."""

    rank: int
    stages: tuple[int, ...]
    host: str
    pid: int
    step: int
    phase: str
    time: float
    doing: str = ""
    is_waiting: bool = False  # for another rank, judging by its stack


def log_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank-{rank:05d}.log"


def heartbeat_path(log_dir: Path, rank: int) -> Path:
    return log_dir / _BEATS / f"rank-{rank:05d}.json"


def launcher_heartbeat_path(log_dir: Path) -> Path:
    """Return the file that the launcher of a job on one machine touches, at least every `ALIVE_S`, until it ends."""
    return log_dir / _BEATS / "launcher"


def write_beat(path: Path, beat: Beat) -> None:
    """Write a heartbeat atomically: a reader sees this one or the previous one."""
    write_file(path, (json.dumps(asdict(beat)) + "\n").encode(), is_durable=False)


def read_beats(log_dir: Path, *, since: float = 0.0) -> tuple[Beat, ...]:
    """Return every rank's last heartbeat that is not older than `since`, ordered by rank."""
    beats = []
    for path in sorted((log_dir / _BEATS).glob("rank-*.json")):
        try:
            beat = _read_json(path)
            beat = Beat(**{**beat, "stages": tuple(beat["stages"])})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
        if _is_whole(beat) and beat.time >= since:
            beats.append(beat)
    return tuple(beats)


def clear_beats(log_dir: Path) -> None:
    for path in (log_dir / _BEATS).glob("rank-*.json"):
        path.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on most."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    installed = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def _read_json(path: Path) -> Any:
    """Read a record; a pipe, for which a reader would wait, raises the `ValueError` of a damaged one."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return json.loads(file.read())
    except StoreError as error:
        raise ValueError(error.problem) from error


def object_or_empty(value: object) -> Mapping[str, Any]:
    """Return a field of a record that should be an object; without fields where it is none."""
    return value if isinstance(value, dict) else {}


def _is_whole(beat: Beat) -> bool:
    """Whether every field that was read has its declared type."""
    counts = (beat.rank, beat.pid, beat.step, *beat.stages)
    texts = (beat.host, beat.phase, beat.doing)
    return (
        all(type(count) is int for count in counts)
        and all(isinstance(text, str) for text in texts)
        and isinstance(beat.time, int | float)
        and abs(beat.time) < _MOST_S
    )
