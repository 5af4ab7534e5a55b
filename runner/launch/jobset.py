"""Kubernetes: a JobSet of one indexed job, a pod for each node, handed to kubectl. No torch.

Source: JobSet v1alpha2 (jobset.sigs.k8s.io); `torchrun` reads PET_* for flags that it is not given.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml

from manifests.errors import UsageError, UserError
from runner.launch.checks import check_mounts
from runner.launch.job import Job
from runner.launch.record import JobRecord
from runner.life.supervise import FINAL, SHUTDOWN_S, agent_command

__all__ = ["JobSetState", "cancel", "find_state", "render", "submit"]

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 40  # pods are named NAME-node-0-INDEX-xxxxx, within 63 characters
_MOUNT = re.compile(r"(/[^:]*|[a-z0-9]([-a-z0-9.]*[a-z0-9])?):(?P<target>/[^:]*)")  # a claim's name is a DNS name
_PORT = 29500  # every pod has an address of its own
_LIMIT_S = 60
_LOGGED = re.compile(r"[EWI]\d{4} ")  # a line of kubectl's log, as klog writes it
# A pod that ends with a code that no restart mends ends its job for a reason of its own, and that the whole JobSet.
_MISTAKEN = {"action": "FailJob", "onExitCodes": {"containerName": "runner", "operator": "In", "values": list(FINAL)}}
_ENDS = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GPU = "nvidia.com/gpu"


class JobSetState(str):
    """A word for what Kubernetes says of a JobSet: `Completed`, `Failed`, `Suspended` or `Running`."""

    @property
    def is_over(self) -> bool:
        return self in ("Completed", "Failed")


def render(job: Job) -> str:
    """Give the JobSet of a job, as YAML.

    Raises:
        UsageError: no image, a name that Kubernetes does not take, a mount that is none, or a flag of Slurm's.
    """
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
    return yaml.safe_dump(document, sort_keys=False, width=1000)


def submit(job: Job) -> JobRecord:
    """Hand a job to Kubernetes.

    Raises:
        UserError: there is no kubectl, or the cluster refuses the job.
    """
    _call(["kubectl", "create", "-f", "-"], standard_input=render(job))
    return JobRecord(scheduler="jobset", id=job.name, name=job.name, output="")


def find_state(record: JobRecord) -> JobSetState:
    """Ask Kubernetes what a job does.

    Raises:
        UserError: it cannot be asked, or does not know the job.
    """
    found = json.loads(_call(["kubectl", "get", "jobset", record.id, "-o", "json"]))
    conditions = found.get("status", {}).get("conditions", [])
    true = [condition["type"] for condition in conditions if condition.get("status") == "True"]
    return JobSetState(next((word for word in ("Completed", "Failed", "Suspended") if word in true), "Running"))


def cancel(record: JobRecord) -> None:
    """End a job and forget it."""
    _call(["kubectl", "delete", "jobset", record.id, "--ignore-not-found", "--wait=false"])


def log_command(record: JobRecord, *, follow: bool) -> list[str]:
    """Give the command that prints what the pods of a job say."""
    selector = f"jobset.sigs.k8s.io/jobset-name={record.id}"
    return ["kubectl", "logs", "--selector", selector, "--prefix", "--tail=-1", *(["--follow"] if follow else [])]


def _refuse(job: Job) -> None:
    if job.image is None:
        raise UsageError("--image", "is needed for --scheduler jobset", "an image with reshard[runner] in it")
    if not _NAME.fullmatch(job.name) or len(job.name) > _MAX_NAME:
        found = f"expected up to {_MAX_NAME} of a-z, 0-9 and -, a letter first, found {job.name!r}"
        near = re.sub(r"[^a-z0-9]+", "-", job.name.lower())[:_MAX_NAME].strip("-")
        raise UsageError("--name", found, f"--name {near}" if _NAME.fullmatch(near) else "")
    check_mounts(job.mounts, _MOUNT, "CLAIM:/FOLDER or /FOLDER-OF-THE-NODE:/FOLDER")
    for flag, value in (("--partition", job.partition), ("--account", job.account), ("--qos", job.qos),
                        ("--time", job.time), ("--signal", job.signal), ("--sbatch-arg", job.sbatch_args or None),
                        ("--requeue", job.requeue or None)):  # fmt: skip
        if value is not None:
            hint = "--restarts N lets Kubernetes start the job again" if flag == "--requeue" else ""
            raise UsageError(flag, "is Slurm's; a JobSet has no such thing", hint)


def _indexed_job(job: Job) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.options.timeout_s + SHUTDOWN_S,
        "containers": [_container(job)],
    }
    if job.mounts:
        pod["volumes"] = [_volume(number, mount) for number, mount in enumerate(job.mounts)]
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
    container: dict[str, Any] = {
        "name": "runner",
        "image": job.image,
        "command": agent_command(
            str(job.manifest), job.training, **size, python="python3", shutdown_s=options.timeout_s
        ),
        "env": [
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            *({"name": name, "value": value} for name, value in (*rendezvous.items(), *job.environment)),
        ],
    }
    if options.device != "cpu":
        container["resources"] = {"limits": {_GPU: job.nproc_per_node}}
    if job.mounts:
        container["volumeMounts"] = [
            {"name": f"mount-{number}", "mountPath": mount.rpartition(":")[2]}
            for number, mount in enumerate(job.mounts)
        ]
    return container


def _volume(number: int, mount: str) -> dict[str, Any]:
    source = mount.rpartition(":")[0]
    name = f"mount-{number}"
    if source.startswith("/"):
        return {"name": name, "hostPath": {"path": source}}
    return {"name": name, "persistentVolumeClaim": {"claimName": source}}


def _call(command: Sequence[str], standard_input: str = "") -> str:
    try:
        done = subprocess.run(command, input=standard_input, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError as error:
        raise UserError(command[0], "is not on this machine", "--dry-run prints what kubectl would be given") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(command[0], f"did not answer within {_LIMIT_S} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not _LOGGED.match(line)]
        raise UserError(" ".join(command[:2]), " ".join(" ".join(said).split()) or f"ended with code {done.returncode}")
    return done.stdout
