"""Kubernetes: a JobSet of one indexed job, one pod per node, submitted with kubectl. No torch.

Source: JobSet v1alpha2 (jobset.sigs.k8s.io); `torchrun` reads PET_* for flags that are not given.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from manifests.command.schedulers import (
    ABSENT,
    MOUNT,
    MOUNT_FORM,
    literal,
    run_kubectl,
    said_by_kubectl,
    submitting,
    volumes_of,
)
from manifests.errors import InputError, LaunchError, UsageError, UserError
from runner.launch.decide import FINAL
from runner.launch.job import Job, check_mounts, check_relative, is_shown
from runner.launch.schedulers import (
    POLL_S,
    JobState,
    Poll,
    Print,
    code_of_state,
    follow_file,
    print_file,
    refuse_force,
)
from runner.launch.supervisor import SHUTDOWN_S, agent_command
from runner.rundir.records import JobRecord, read_state

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 40  # pods are named NAME-node-0-INDEX-xxxxx, within 63 characters
_PORT = 29500  # every pod has an address of its own
_CONTAINER = "runner"
_SHARED_MEMORY = "/dev/shm"
_MAX_PODS = 99_999  # as many as --nnodes takes; kubectl's own limit is 5
# A pod that exits with a code that no restart fixes fails its job, and that fails the JobSet without a restart.
_MISTAKEN = {"action": "FailJob", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": list(FINAL)}}
_ENDS = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GPU = "nvidia.com/gpu"
_LIKE_NUMBER = re.compile(r"[-+]?\.?\d.*|[yYnN]")


class _Dumper(yaml.SafeDumper):
    """Quotes texts that kubectl would read as numbers, although YAML 1.1 does not, such as 1e-3, 08 and y."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "'" if _LIKE_NUMBER.fullmatch(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def render(job: Job) -> str:
    """Return the JobSet of a job, as YAML."""
    _refuse(job)
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {"maxRestarts": job.restarts, "rules": [_ENDS]},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": _indexed_job(job)}}],
        },
    }
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000)


def submit(job: Job) -> JobRecord:
    """Submit a job to Kubernetes."""
    create = ["kubectl", "create", "-f", "-", "-o", "jsonpath={.metadata.namespace} {.metadata.uid}"]
    try:
        with submitting(f"kubectl get jobset {job.name}", f"kubectl delete jobset {job.name}"):
            namespace, _, uid = run_kubectl(create, standard_input=render(job)).strip().partition(" ")
    except LaunchError as error:
        if "(AlreadyExists)" not in error.problem:
            raise
        hint = "once it has ended, remove it with runner cancel LOG_DIR, of its log folder; or use another --name"
        raise error.changed(hint=hint) from error
    return JobRecord(scheduler="jobset", id=job.name, name=job.name, output="", birth=uid, namespace=namespace)


def find_state(record: JobRecord, log_dir: Path) -> JobState:
    """Return `Completed`, `Failed`, `Suspended` or `Running`, or what the log folder says of a deleted JobSet.

    Pods of a deleted one that have not ended yet may still save: it is `Terminating`. One that runs has the number of
    its pods that are: on a node that died, they stay so, and the JobSet is not restarted before they are gone.
    """
    if (shown := _find(record)) is None:
        if (ended := read_state(log_dir)) is None and _count_active(record):
            return JobState(word="Terminating")
        return JobState(word=ended.word if ended else "Forgotten", exit_code=code_of_state(ended))
    conditions = shown.get("status", {}).get("conditions", [])
    true = [condition["type"] for condition in conditions if condition.get("status") == "True"]
    word = next((word for word in ("Completed", "Failed", "Suspended") if word in true), "Running")
    code = 0 if word == "Completed" else None
    if word == "Failed":
        code = code_of_state(read_state(log_dir)) or 5  # a JobSet has no exit codes
    num_terminating = len(_fields_of_pods(record, "metadata.deletionTimestamp")) if word == "Running" else 0
    reason = f"pods terminating: {num_terminating}" if num_terminating else ""
    return JobState(word=word, exit_code=code, reason=reason)


def use_of(record: JobRecord, log_dir: Path) -> str | None:
    """Return how a job that has not ended uses its log folder; pods of an ended one may still save."""
    state = find_state(record, log_dir)
    if state.exit_code is None:
        return f"is used by jobset job {record.id}, which is {state.word}"
    num_pods = _count_active(record)
    return f"is used by {num_pods} pods of jobset job {record.id} that have not ended yet" if num_pods else None


def cancel(record: JobRecord, *, is_forced: bool) -> bool:
    """Delete a job; another one of its name is not deleted."""
    if is_forced:
        raise refuse_force()
    if _find(record) is None:
        return False
    run_kubectl(["kubectl", "delete", "jobset", record.id, *_inside(record), "--ignore-not-found", "--wait=false"])
    return True


def print_output(record: JobRecord, path: Path, show: Print) -> bool:
    """Print the output of the pods of a job so far, or the log of a rank."""
    if path != Path(record.output):
        return print_file(record, path, show)
    problem = f"jobset {record.id} was deleted, and another one has its name"
    if _is_replaced(record) or (problem := _print_pods(record, show, follow=False)):
        raise LaunchError("kubectl logs", problem, code="launch.scheduler-failed")
    return True


def follow_output(record: JobRecord, path: Path, show: Print, poll: Poll) -> int:
    """Print the output of the pods of a job until it ends, including pods that start later; or the log of a rank."""
    if path != Path(record.output):
        return follow_file(record, path, show, poll)
    since, shown = "", ""

    def show_line(line: str) -> None:
        nonlocal since
        since = datetime.now(UTC).isoformat()  # after a broken connection, the next one starts here
        show(line)

    while True:
        code, problem = poll(), ""
        try:
            phases = _find_phases(record)
        except UserError as error:
            phases, problem = ["Unknown"], f"{error.where}: {error.problem}"
        if num_pending := phases.count("Pending"):  # kubectl would leave them out
            problem = f"{num_pending} of {len(phases)} pods are pending"
        if phases and (code is not None or ("Running" in phases and not num_pending)):
            problem = _print_pods(record, show_line, follow=code is None, since=since)
        if problem and problem != shown:
            show(problem + "\n")
        shown = problem
        if code is not None:
            return code
        time.sleep(POLL_S)


def _find(record: JobRecord) -> Mapping[str, Any] | None:
    """Return what Kubernetes has of a job; None if it was deleted, whatever has its name now."""
    shown = run_kubectl(["kubectl", "get", "jobset", record.id, *_inside(record), "--ignore-not-found", "-o", "json"])
    job: Mapping[str, Any] = json.loads(shown) if shown.strip() else {}
    uid = job.get("metadata", {}).get("uid", "")
    return job if job and record.birth in ("", uid) else None


def _is_replaced(record: JobRecord) -> bool:
    """Whether another JobSet has the name of a job, by which its pods are found: this one was deleted."""
    get = ["kubectl", "get", "jobset", record.id, *_inside(record), "--ignore-not-found", "-o"]
    uid = run_kubectl([*get, "jsonpath={.metadata.uid}"])
    return "" not in (uid, record.birth) and uid != record.birth


def _count_active(record: JobRecord) -> int:
    return sum(phase in ("Pending", "Running") for phase in _find_phases(record))


def _find_phases(record: JobRecord) -> list[str]:
    """Return the phase of each pod of a job: `Pending`, `Running`, `Succeeded` or `Failed`."""
    return [] if _is_replaced(record) else _fields_of_pods(record, "status.phase")


def _fields_of_pods(record: JobRecord, field: str) -> list[str]:
    """Return a field of the pods of a job that have it, by the job's name."""
    return run_kubectl(["kubectl", "get", "pods", *_pods(record), "-o", f"jsonpath={{.items[*].{field}}}"]).split()


def _print_pods(record: JobRecord, show: Print, *, follow: bool, since: str = "") -> str:
    """Print the output of the pods of a job, with `follow` until they end; return the error of kubectl, if any.

    `since` is a time in Kubernetes' format.
    """
    command = ["kubectl", "logs", *_pods(record), "--container", _CONTAINER, "--prefix", "--tail=-1",
               f"--max-log-requests={_MAX_PODS}"]  # fmt: skip
    command += [*(["--follow", "--ignore-errors"] if follow else []), *([f"--since-time={since}"] if since else [])]
    try:
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
    except FileNotFoundError as error:
        raise InputError(command[0], *ABSENT, code="system.missing-program") from error
    with running:
        assert running.stdout is not None
        words = []
        try:
            for line in running.stdout:
                if line.startswith("[pod/"):  # of --prefix
                    show(line)
                else:
                    words.append(line)
        except BaseException:  # nobody reads what is shown: kubectl would wait for the next line of a pod
            running.kill()
            raise
    return said_by_kubectl(words) or (f"exited with code {running.returncode}" if running.returncode else "")


def _refuse(job: Job) -> None:
    if job.image is None:
        raise UsageError(
            "--image",
            "is required with --scheduler jobset",
            "use an image that contains reshard[runner]",
            code="launch.no-image",
        )
    if not _NAME.fullmatch(job.name) or len(job.name) > _MAX_NAME:
        problem = f"expected at most {_MAX_NAME} of a-z, 0-9 and -, starting with a letter, found {job.name!r}"
        near = re.sub(r"[^a-z0-9]+", "-", job.name.lower())[:_MAX_NAME].strip("-")
        raise UsageError("--name", problem, f"--name {near}" if _NAME.fullmatch(near) else "", code="launch.job-name")
    check_mounts(job.mounts, MOUNT, MOUNT_FORM)
    for flag, value in (("--partition", job.partition), ("--account", job.account), ("--qos", job.qos),
                        ("--time", job.time), ("--signal", job.signal), ("--sbatch-arg", job.sbatch_args or None),
                        ("--requeue", job.requeue or None)):  # fmt: skip
        if value is not None:
            hint = "use --restarts N, with which Kubernetes restarts the job" if flag == "--requeue" else ""
            raise UsageError(flag, "is for Slurm, and not supported by a JobSet", hint, code="launch.scheduler-flag")
    check_relative(job)
    _check_written(job.options.folders, job.mounts)


def _indexed_job(job: Job) -> dict[str, Any]:
    volumes = _volumes(job)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.options.timeout_s + SHUTDOWN_S,
        "containers": [{**_container(job), "volumeMounts": [
            {"name": volume["name"], "mountPath": target} for target, volume in volumes.items()
        ]}],
        "volumes": list(volumes.values()),
    }  # fmt: skip
    return {
        "parallelism": job.nnodes,
        "completions": job.nnodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [_MISTAKEN]},
        "template": {"spec": pod},
    }


def _container(job: Job) -> dict[str, Any]:
    options, size = job.options, {"nnodes": job.nnodes, "nproc_per_node": job.nproc_per_node}
    rendezvous = {
        "PET_MASTER_ADDR": f"{job.name}-node-0-0.{job.name}",
        "PET_MASTER_PORT": str(_PORT),
    }
    command = agent_command(job.manifest, job.training, **size, python="python3", shutdown_s=options.timeout_s)
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": job.image,
        "command": [literal(word) for word in command],
        "env": [
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            *({"name": name, "value": literal(value)} for name, value in (*rendezvous.items(), *job.environment)),
        ],
    }
    if options.device != "cpu":
        container["resources"] = {"limits": {_GPU: job.nproc_per_node}}
    if is_shown(Path.cwd(), job.mounts):
        container["workingDir"] = str(Path.cwd())
    return container


def _volumes(job: Job) -> dict[str, dict[str, Any]]:
    """Return the volumes of a pod by their mount paths."""
    volumes = volumes_of(job.mounts)
    # The default is 64 MiB, and ranks of one node communicate through it: NCCL fails where it is too small.
    volumes.setdefault(_SHARED_MEMORY, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    return volumes


def _inside(record: JobRecord) -> tuple[str, ...]:
    """Return the flag for the job's namespace, which may differ from kubectl's current one."""
    return ("--namespace", record.namespace) if record.namespace else ()


def _pods(record: JobRecord) -> tuple[str, ...]:
    return (*_inside(record), "--selector", f"jobset.sigs.k8s.io/jobset-name={record.id}")


def _check_written(folders: Mapping[str, Path], mounts: Sequence[str]) -> None:
    """Check that the folders that pods write, by their flags, are on mounts."""
    for flag, given in folders.items():
        path = Path(os.path.normpath(Path.cwd() / given))
        if not is_shown(path, mounts):
            folder = path if path.parent == Path("/") else path.parent
            raise UsageError(
                f"{flag} {path}", "is not on a --mount, and pods lose all other files that they write",
                f"--mount CLAIM:{folder}, or {folder}:{folder} if all nodes share it",
                code="launch.not-mounted",
            )  # fmt: skip
