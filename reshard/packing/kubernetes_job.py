"""A pack in parts on Kubernetes: an indexed Job, each of whose pods packs a part, and the first of which commits.

The first pod waits for the records of all parts. A pod that is lost is started again, at most `_NUM_RETRIES` times for
each part. Source: batch/v1 Job, "Job completion mode", "Backoff limit per index" (1.33) and "Pod failure policy" in
Kubernetes' documentation.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from manifests.command.interpreter import module_command
from manifests.command.schedulers import MOUNT, MOUNT_FORM, literal, run_kubectl, volumes_of
from manifests.errors import UsageError
from stores.address import is_url
from stores.open import Address

_CONTAINER = "reshard"
_NUM_RETRIES = 3  # of each part
_MISTAKES = [1, 2, 3, 4]  # exit codes that another attempt would end with, too
# The shell is the pod's first process, the only one that gets SIGTERM at an eviction, and passes it on.
_RUN = """\
run() { "$@" & child=$!; wait $child; }
trap 'kill -TERM $child; wait $child; exit 143' TERM"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPods:
    """The Job to submit. `pack` has the arguments of reshard; pods see `source` and `out` below `mounts`."""

    num_parts: int
    pack: tuple[str, ...]
    source: str
    out: Address
    image: str | None
    mounts: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what pods could not run.

        Raises:
            UsageError: no image, a malformed mount, or a path that is not below one.
        """
        if self.image is None:
            problem, hint = "is required with --scheduler job", "use an image that contains reshard"
            raise UsageError("--image", problem, hint, code="launch.no-image")
        for mount in self.mounts:
            if MOUNT.fullmatch(mount) is None:
                raise UsageError("--mount", f"expected {MOUNT_FORM}, found {mount!r}", code="launch.mount")
        addresses = {"--out": self.out, "SOURCE": self.source}
        paths = {where: Path(address) for where, address in addresses.items() if not is_url(address)}
        for where, path in paths.items():
            folder = path if path.is_absolute() else Path.cwd()  # where a pod would look for it
            if not (self._shows(folder) and self._shows(path.absolute())):
                problem = f"pods do not see {path.absolute()}"
                raise UsageError(where, problem, "add --mount CLAIM:/FOLDER above it", code="launch.not-mounted")

    def _shows(self, path: Path) -> bool:
        return any(path.is_relative_to(mount.rpartition(":")[2]) for mount in self.mounts)

    @property
    def working_folder(self) -> dict[str, str]:
        return {"workingDir": str(Path.cwd())} if self._shows(Path.cwd()) else {}


def render(pods: PackPods) -> str:
    """Return the Job as YAML."""
    volumes = volumes_of(pods.mounts)
    container = {
        "name": _CONTAINER,
        "image": pods.image,
        "command": ["sh", "-c", literal(_script(pods))],
        **pods.working_folder,
        "volumeMounts": [{"name": volume["name"], "mountPath": target} for target, volume in volumes.items()],
    }
    mistake = {"containerName": _CONTAINER, "operator": "In", "values": _MISTAKES}
    document: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": "reshard-pack-"},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.num_parts,
            "parallelism": pods.num_parts,
            "backoffLimitPerIndex": _NUM_RETRIES,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistake}]},
            "template": {
                "spec": {"restartPolicy": "Never", "containers": [container], "volumes": list(volumes.values())}
            },
        },
    }
    return yaml.safe_dump(document, sort_keys=False, width=1000)


def submit(pods: PackPods) -> str:
    """Submit the Job; return its name, as `job.batch/NAME`.

    Raises:
        InputError: kubectl is not installed here.
        LaunchError: the cluster refuses the Job.
    """
    return run_kubectl(["kubectl", "create", "-f", "-", "-o", "name"], render(pods)).strip()


def _script(pods: PackPods) -> str:
    """Return what a pod runs; it may be started again at any time, also once all is done."""
    out, part = shlex.quote(str(pods.out)), f'--part "$((JOB_COMPLETION_INDEX + 1))/{pods.num_parts}"'
    return "\n".join(
        [
            _RUN,
            *([] if is_url(pods.out) else [f"[ ! -e {out}/manifest.json ] || exit 0"]),
            f"run {_reshard(pods.pack)} {part} || exit",
            '[ "$JOB_COMPLETION_INDEX" = 0 ] || exit 0',
            f"run {_reshard(('commit', str(pods.out), '--wait'))}",
        ]
    )


def _reshard(arguments: Sequence[str]) -> str:
    return shlex.join(module_command("reshard", *arguments, python="python3"))
