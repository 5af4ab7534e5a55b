"""Slurm: write a batch script, submit it with sbatch, and query it with scontrol. No torch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from manifests.command.interpreter import module_command
from manifests.command.schedulers import job_words, run_slurm, submit_to_slurm, working_folder
from manifests.errors import UsageError, UserError
from runner.launch.job import Job, check_mounts, check_relative, is_shown
from runner.launch.schedulers import JobState, code_of_state, follow_file, print_file, refuse_force
from runner.rundir.records import JobRecord, read_state

_SIGNAL = re.compile(r"USR2@(\d{1,5})")
_MAX_SIGNAL_S = 65535  # sbatch(1), --signal
_TIME = re.compile(r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?|(?P<n>\d+(?::\d+){0,2}))")
_FOREVER = ("unlimited", "infinite")
# Flags that --sbatch-arg may not set, because the job depends on them, and the flag to use instead.
_OWN = {
    "nodes": "--nnodes", "ntasks": "--nproc-per-node", "ntasks-per-node": "--nproc-per-node", "job-name": "--name",
    "output": "--log-dir", "open-mode": "--log-dir", "signal": "--signal", "requeue": "--requeue",
    "no-requeue": "--requeue", "time": "--time", "partition": "--partition", "account": "--account", "qos": "--qos",
    "chdir": "", "array": "", "wrap": "",
}  # fmt: skip
_SHORT = {
    "N": "nodes", "n": "ntasks", "J": "job-name", "o": "output", "t": "time", "p": "partition", "A": "account",
    "q": "qos", "D": "chdir", "a": "array",
}  # fmt: skip

_CLUSTERS = re.compile("-M|--clus")
_MOUNT = re.compile(r"/[^:,]*:(?P<target>/[^:,]*)(:[a-z+]+)?")  # as pyxis takes them, with its own flags


_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
         "PREEMPTED", "TIMEOUT")  # fmt: skip


def render(job: Job) -> str:
    """Return the batch script of a job: options of sbatch, the environment of the ranks, and the command."""
    _check_end(job)
    check_mounts(job.mounts, _MOUNT, "/FOLDER-OF-THE-NODE:/FOLDER")
    check_sbatch_args(job.sbatch_args)
    if job.image is not None:
        check_relative(job)
    if job.restarts or job.requeue:
        _check_seen(job)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    # Values may contain commas and spaces, which sbatch's own --export does not support.
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment]
    lines += [f"exec {shlex.join(_supervisor(job))}", ""]
    return "\n".join(lines)


def submit(job: Job) -> JobRecord:
    """Submit a job to Slurm."""
    script = render(job)
    _check_nodes(job)
    # On its command line as well: SBATCH_ACCOUNT and others in the environment override the script.
    flags = [word for option in _options(job) for word in shlex.split(option)]
    number, cluster = submit_to_slurm(flags, script, job.name)
    output = str(job.log_dir / f"slurm-{number}.out")
    return JobRecord(scheduler="slurm", id=number, name=job.name, output=output, cluster=cluster)


def find_state(record: JobRecord, log_dir: Path) -> JobState:
    """Return the state of a job: `RUNNING` or another of Slurm's, or FORGOTTEN if its log folder has none either."""
    ended, (fields, reason) = read_state(log_dir), _fields_of(record)
    if fields is None:
        word = ended.word if ended else "FORGOTTEN"
        return JobState(word=word, exit_code=code_of_state(ended), reason=reason)
    word, code = fields.get("JobState", "UNKNOWN"), None
    if word in _OVER:
        code = int(fields.get("ExitCode", "0:0").partition(":")[0])
        code = code or (0 if word == "COMPLETED" else code_of_state(ended))  # also of one that was killed when done
    return JobState(
        word=word,
        exit_code=code,
        reason="" if fields.get("Reason") == "None" else fields.get("Reason", ""),
        nodes="" if fields.get("NodeList") == "(null)" else fields.get("NodeList", ""),
        num_requeues=int(fields.get("Restarts", "0")),
    )


def use_of(record: JobRecord, log_dir: Path) -> str | None:
    """Return how a job that has not ended uses its log folder."""
    state = find_state(record, log_dir)
    return f"is used by slurm job {record.id}, which is {state.word}" if state.exit_code is None else None


def cancel(record: JobRecord, *, is_forced: bool) -> bool:
    """Cancel a job, and return whether Slurm still knew it; another job with the same ID is not cancelled."""
    if is_forced:
        raise refuse_force()
    if _fields_of(record)[0] is None:
        return False
    run_slurm(["scancel", *job_words(record.id, record.cluster)])
    return True


print_output, follow_output = print_file, follow_file


def _fields_of(record: JobRecord) -> tuple[dict[str, str] | None, str]:
    """Return what Slurm shows of a job, or None and why: it keeps one for MinJobAge after its end, by default 300 s."""
    try:
        shown = run_slurm(["scontrol", "show", "job", "-o", *job_words(record.id, record.cluster)])
    except UserError as error:
        if "Invalid job id" not in error.problem:
            raise
        return None, "Slurm no longer knows it"
    if _is_other_job(shown, record):
        return None, "another job has its ID"
    return dict(word.partition("=")[::2] for word in shown.split() if "=" in word), ""


def _is_other_job(shown: str, record: JobRecord) -> bool:
    """Whether Slurm shows another job with this ID, by its output: of another cluster, or after a reset."""
    output = shown.partition(" StdOut=/")[2]
    # Not every version of Slurm expands each %.
    return bool(output) and "%" not in output + record.output and f" StdOut={record.output}" not in shown


def _check_end(job: Job) -> None:
    """Check that a job with --signal has the time to save, and a folder to save to."""
    limit_s = None if job.time is None else parse_time(job.time)
    if job.signal is None:
        return
    before_s = parse_signal(job.signal)
    if limit_s is not None and before_s >= limit_s:
        raise UsageError(
            "--signal",
            f"expected less than the {limit_s} s of --time, found {before_s} s",
            code="launch.scheduler-value",
        )
    if job.options.checkpoint is None:
        raise UsageError(
            "--signal",
            "asks the ranks to save, but there is no --checkpoint",
            "add --checkpoint DIR after --",
            code="options.needs-checkpoint",
        )


def _check_seen(job: Job) -> None:
    """Check that the supervisor, outside the container, finds what decides about restarts where the ranks write it."""
    for flag in ("--checkpoint", "--log-dir"):
        path = Path.cwd() / job.options.folders[flag]
        mounts = [mount.split(":")[:2] for mount in job.mounts if is_shown(path, (mount,))]
        source, target = max(mounts, key=lambda mount: len(Path(mount[1]).parts), default=("/", "/"))
        if Path(source) != Path(target):
            where, needs = f"{flag} {path}", "--restarts and --requeue need it at the same path outside the container"
            hint = f"--mount {source}:{source}, and a {flag} there"
            raise UsageError(where, f"is mounted from {source}; {needs}", hint, code="launch.not-mounted")


def _check_nodes(job: Job) -> None:
    """Check that the partition has so many nodes: Slurm 22.05 would let the job wait forever.

    scontrol shows partitions of the default cluster, or that of SLURM_CLUSTERS; those of another one are not checked.
    """
    if "SBATCH_CLUSTERS" in os.environ or any(map(_CLUSTERS.match, job.sbatch_args)):
        return
    words = (line.split() for line in run_slurm(["scontrol", "show", "partition", "-o"]).splitlines())
    partitions = [dict(word.partition("=")[::2] for word in line) for line in words]
    partition = job.partition or os.environ.get("SBATCH_PARTITION")
    names = set(partition.split(",")) if partition else None
    chosen = [
        fields for fields in partitions
        if (fields.get("Default") == "YES" if names is None else fields.get("PartitionName") in names)
    ]  # fmt: skip
    sizes = {fields["PartitionName"]: int(fields["TotalNodes"]) for fields in chosen if "TotalNodes" in fields}
    if sizes and max(sizes.values()) < job.nnodes:
        has = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise UsageError("--nnodes", f"expected at most the nodes of a partition, found {job.nnodes}: partition {has}",
                         "use fewer nodes, or another --partition", code="launch.nodes")  # fmt: skip


def _options(job: Job) -> list[str]:
    given: Mapping[str, str | int | None] = {
        "--job-name": job.name,
        "--nodes": job.nnodes,
        "--ntasks-per-node": 1,
        "--chdir": working_folder(),
        "--output": str(job.log_dir).replace("%", "%%") + "/slurm-%j.out",  # sbatch reads %% as %
        "--open-mode": "append",
        "--partition": job.partition,
        "--account": job.account,
        "--qos": job.qos,
        "--time": job.time,
        "--signal": job.signal,
    }
    options = [f"{flag}={shlex.quote(str(value))}" for flag, value in given.items() if value is not None]
    return [*options, "--requeue" if job.requeue else "--no-requeue", *job.sbatch_args]


def _supervisor(job: Job) -> list[str]:
    command = [
        *module_command("runner.launch.supervisor"),
        "--nnodes", str(job.nnodes), "--nproc-per-node", str(job.nproc_per_node), "--restarts", str(job.restarts),
    ]  # fmt: skip
    if job.requeue:
        command.append("--requeue")
    if job.image is not None:
        command += ["--python", "python3"]  # the image's
    command += [f"--srun-arg={argument}" for argument in _container(job)]
    return [*command, str(job.manifest), "--", *job.training]


def _container(job: Job) -> list[str]:
    """Return the flags that the container plugin pyxis adds to srun."""
    if job.image is None:
        return []
    flags = [f"--container-image={job.image}"]
    if job.mounts:
        flags.append(f"--container-mounts={','.join(job.mounts)}")
    if is_shown(Path.cwd(), job.mounts):
        flags.append(f"--container-workdir={Path.cwd()}")  # ranks would start in the image's folder
    if job.environment:
        names = ",".join(name for name, _ in job.environment)
        flags.append(f"--container-env={names}")  # or a variable of the image would take precedence
    return flags


def parse_signal(text: str) -> int:
    """Read the seconds of USR2@SECONDS."""
    match = _SIGNAL.fullmatch(text)
    if match and 0 < int(match[1]) <= _MAX_SIGNAL_S:
        return int(match[1])
    hint = f"seconds before the end, 1 to {_MAX_SIGNAL_S}, such as USR2@120"
    if not text.startswith("USR2"):
        hint = "use SIGUSR2, at which the runner saves and stops; SIGUSR1 kills torchrun and leaves its ranks running"
    raise UsageError("--signal", f"expected USR2@SECONDS, found {text!r}", hint, code="launch.scheduler-value")


def parse_time(text: str) -> int | None:
    """Read a time limit as sbatch does, in seconds; None: there is no limit.

    Source: sbatch(1), --time.
    """
    if text.lower() in _FOREVER:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(
            "--time",
            f"expected minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, found {text!r}",
            "such as 30, 4:00:00 or 1-12",
            code="launch.scheduler-value",
        )
    if match["n"] is None:
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("d", "dh", "dm", "ds"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None
    parts = [int(part) for part in match["n"].split(":")]
    hours, minutes, seconds = (0, *parts) if len(parts) == 2 else (0, *parts, 0) if len(parts) == 1 else parts
    return (hours * 60 + minutes) * 60 + seconds or None


def check_sbatch_args(arguments: Sequence[str]) -> None:
    """Check that each --sbatch-arg is one flag, and not one that the job sets itself."""
    for argument in arguments:
        if not argument.startswith("-") or not argument.isprintable():
            raise _bad_argument(f"expected a flag of sbatch, found {argument!r}", "--sbatch-arg=--gpus=8")
        try:
            flag, *values = shlex.split(argument)
        except ValueError as error:
            raise _bad_argument(f"expected closed quotes, found {argument!r}") from error
        if not _is_one_flag(flag, values):
            hint = "quote a value with spaces: --sbatch-arg=\"--comment='a b'\""
            raise _bad_argument(f"expected one flag, found {argument!r}", hint)
        word = flag.lstrip("-").partition("=")[0]
        name = word if flag.startswith("--") else _SHORT.get(word[:1], word)
        if name in _OWN:
            hint = f"use {_OWN[name]}" if _OWN[name] else "remove it"
            raise _bad_argument(f"{argument!r} conflicts with --{name} of the job", hint)


def _bad_argument(problem: str, hint: str = "") -> UsageError:
    return UsageError("--sbatch-arg", problem, hint, code="launch.sbatch-argument")


def _is_one_flag(flag: str, values: Sequence[str]) -> bool:
    """Whether these words are one flag, with or without a value: sbatch takes any other word for its script."""
    if not flag.strip("-"):
        return False
    lacks_value = "=" not in flag if flag.startswith("--") else len(flag) == 2
    return not values or (len(values) == 1 and lacks_value and values[0][:1] not in ("-", "#"))
