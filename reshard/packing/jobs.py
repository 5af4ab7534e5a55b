"""A pack in parts on a cluster: jobs that each pack a part, and a commit of all of them.

Slurm runs a job array of the parts, and a commit that depends on all of them. Kubernetes runs an indexed Job, each of
whose pods packs a part; the first one waits for the records of all parts, and commits. A pod that is lost, or whose
store was away, is started again, at most `_NUM_RETRIES` times for each part; then the Job fails.

Source: batch/v1 Job, "Job completion mode", "Backoff limit per index" (1.33) and "Pod failure policy" in Kubernetes'
documentation.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.command.interpreter import module_command
from manifests.command.schedulers import (
    MOUNT,
    MOUNT_FORM,
    job_words,
    literal,
    run_kubectl,
    run_slurm,
    submit_to_slurm,
    submitting,
    volumes_of,
    working_folder,
)
from manifests.errors import OutputError, Parameter, UsageError, UserError
from stores.address import is_url
from stores.folders.owned import files_of_manifest
from stores.folders.publish import check_target, exchange
from stores.open import Address

_ARRAY_ID = "ARRAY_JOB_ID"  # placeholder for the job id that Slurm has not assigned yet
_RESERVED = ("--array", "-a", "--wrap", "--requeue", "--no-requeue", "--open-mode", "--dependency", "-d")
_PACK, _COMMIT = "reshard-pack", "reshard-commit"  # names of jobs
_CONTAINER = "reshard"
_NUM_RETRIES = 3  # of each part
_MISTAKES = [1, 2, 4]  # exit codes that another attempt would end with, too; 3 may be of a store that was away
# The shell is the pod's first process, the only one that gets SIGTERM at an eviction, and passes it on.
_RUN = """\
run() { "$@" & child=$!; wait $child; }
trap 'kill -TERM $child; wait $child; exit 143' TERM"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmArray:
    """The jobs to submit. `pack` has the arguments of reshard without the part; sbatch gets `options` for both jobs."""

    num_parts: int
    pack: tuple[str, ...]
    out: Address
    force: bool
    options: tuple[str, ...]

    def check(self) -> None:
        """Refuse an output that the jobs could not write."""
        _check_out(self.out, force=self.force)

    def text(self) -> str:
        """Return each sbatch command, followed by the script that it would submit."""
        return "\n".join(f"$ {shlex.join(command)}\n{script}" for command, script in self._jobs())

    def document(self) -> dict[str, Any]:
        """Return the same as the object that `--json` prints."""
        parts, commit = ({"command": command, "script": script} for command, script in self._jobs())
        return {"version": 1, "num_parts": self.num_parts, "parts": parts, "commit": commit}

    def submit(self) -> tuple[dict[str, Any], str]:
        """Submit both jobs; return their ids as the object that `--json` prints, and as a sentence."""
        parts, cluster = submit_to_slurm(self._flags(), self._parts_script(), _PACK)
        try:
            commit, _ = submit_to_slurm(self._flags(parts), self._commit_script(), _COMMIT)
        except BaseException as stopped:
            try:
                run_slurm(cancel := ["scancel", *job_words(parts, cluster)])
            except UserError as error:
                hint = f"the parts are queued as job {parts}, and nothing commits them: {shlex.join(cancel)}"
                raise error.changed(hint=hint) from stopped
            raise
        text = f"submitted {self.num_parts} parts as job {parts}\nsubmitted a commit that depends on them as {commit}"
        jobs = {"parts": {"job": parts}, "commit": {"job": commit}}
        return {"version": 1, "num_parts": self.num_parts, **jobs}, text

    def _jobs(self) -> Iterator[tuple[list[str], str]]:
        """Yield the command and the script of the array, then those of the commit."""
        yield ["sbatch", "--parsable", *self._flags()], self._parts_script()
        yield ["sbatch", "--parsable", *self._flags(_ARRAY_ID)], self._commit_script()

    def _flags(self, after: str | None = None) -> list[str]:
        # Options are here as well as in the script, which SBATCH_ACCOUNT and the like in the environment override.
        words = [word for option in self.options for word in shlex.split(option)]
        # Where a part has failed, its commit would stay in the queue forever.
        return [*words, *([f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else [])]

    def _parts_script(self) -> str:
        """Return the batch script of the parts; a part that is killed is resumed, here or after a requeue."""
        pack = f'{_reshard(self.pack)} --part "$SLURM_ARRAY_TASK_ID/{self.num_parts}"'
        # Retried in the script: once a part has failed, Slurm never starts what depends on it.
        again = f"for attempt in 1 2 3; do\n  {pack}\n  code=$?; [ $code -gt 128 ] || break\ndone"
        return self._script(_PACK, (f"--array=1-{self.num_parts}", "--requeue"), f"{again}\nexit $code")

    def _commit_script(self) -> str:
        commit = ("commit", str(self.out), *(["--force"] if self.force else []))
        return self._script(_COMMIT, ("--requeue",), f"exec {_reshard(commit)}")

    def _script(self, name: str, options: Sequence[str], command: str) -> str:
        ours = [f"--job-name={name}", *options, "--open-mode=append", f"--chdir={shlex.quote(working_folder())}"]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*ours, *self.options)), "", command, ""]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedJob:
    """The Job to submit. `pack` has the arguments of reshard without the part; pods see paths below `mounts`.

    `inputs` are the addresses that each pod reads, with the flags that name them.
    """

    num_parts: int
    pack: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    out: Address
    force: bool
    image: str | None
    mounts: tuple[str, ...]

    def check(self) -> None:
        """Refuse what pods could not run."""
        if self.force:  # a pod that is started again cannot tell old from new
            problem, hint = "is not supported with --scheduler job", "remove the old output first"
            raise UsageError(Parameter("force"), problem, hint, code="options.conflict")
        _check_out(self.out, force=False)
        if self.image is None:
            problem, hint = "is required with --scheduler job", "use an image that contains reshard"
            raise UsageError("--image", problem, hint, code="launch.no-image")
        for mount in self.mounts:
            if MOUNT.fullmatch(mount) is None:
                raise UsageError("--mount", f"expected {MOUNT_FORM}, found {mount!r}", code="launch.mount")
        for where, address in (("--out", self.out), *self.inputs):
            if is_url(address):
                continue
            path = Path(address)
            folder = path if path.is_absolute() else Path.cwd()  # where a pod would look for it
            if not (self._shows(folder) and self._shows(path.absolute())):
                problem = f"pods do not see {path.absolute()}"
                raise UsageError(where, problem, "add --mount CLAIM:/FOLDER above it", code="launch.not-mounted")

    def text(self) -> str:
        import yaml

        volumes = volumes_of(self.mounts)
        container = {
            "name": _CONTAINER,
            "image": self.image,
            "command": ["sh", "-c", literal(self._script())],
            **({"workingDir": str(Path.cwd())} if self._shows(Path.cwd()) else {}),
            "volumeMounts": [{"name": volume["name"], "mountPath": target} for target, volume in volumes.items()],
        }
        mistake = {"containerName": _CONTAINER, "operator": "In", "values": _MISTAKES}
        document: dict[str, Any] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"generateName": "reshard-pack-"},
            "spec": {
                "completionMode": "Indexed",
                "completions": self.num_parts,
                "parallelism": self.num_parts,
                "backoffLimitPerIndex": _NUM_RETRIES,
                "maxFailedIndexes": 0,  # otherwise the first pod would wait forever for the part that is lost
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistake}]},
                "template": {
                    "spec": {"restartPolicy": "Never", "containers": [container], "volumes": list(volumes.values())}
                },
            },
        }
        return yaml.safe_dump(document, sort_keys=False, width=1000)

    def document(self) -> dict[str, Any]:
        """Return the same as the object that `--json` prints."""
        return {"version": 1, "num_parts": self.num_parts, "script": self.text()}

    def submit(self) -> tuple[dict[str, Any], str]:
        """Submit the Job; return its name, `job.batch/NAME`, as the object that `--json` prints, and in a sentence."""
        with submitting("kubectl get jobs", "kubectl delete job"):
            name = run_kubectl(["kubectl", "create", "-f", "-", "-o", "name"], self.text()).strip()
        text = f"submitted {self.num_parts} parts and their commit as {name}"
        return {"version": 1, "num_parts": self.num_parts, "parts": {"job": name}}, text

    def _script(self) -> str:
        """Return what a pod runs; it may be started again at any time, also once all is done."""
        out, part = shlex.quote(str(self.out)), f'--part "$((JOB_COMPLETION_INDEX + 1))/{self.num_parts}"'
        return "\n".join(
            [
                _RUN,
                *([] if is_url(self.out) else [f"[ ! -e {out}/manifest.json ] || exit 0"]),
                f"run {_reshard(self.pack, python='python3')} {part} || exit",
                '[ "$JOB_COMPLETION_INDEX" = 0 ] || exit 0',
                f"run {_reshard(('commit', str(self.out), '--wait'), python='python3')}",
            ]
        )

    def _shows(self, path: Path) -> bool:
        return any(path.is_relative_to(mount.rpartition(":")[2]) for mount in self.mounts)


def check_sbatch(options: Sequence[str]) -> None:
    """Refuse what sbatch would not take for one option, or what would break the job array."""

    def refused(problem: str, hint: str = "") -> UsageError:
        return UsageError("--sbatch-arg", problem, hint, code="options.sbatch-argument")

    for option in options:
        shown = repr(option[:80])
        if not option.isprintable() or not option.startswith("-") or option.endswith("="):
            raise refused(f"expected an option of sbatch, found {shown}")
        try:
            words = shlex.split(option)
        except ValueError as error:
            raise refused(f"{shown}: {error}", "close its quotes") from error
        # sbatch takes a word that is neither a flag nor a flag's value for its script.
        if len(words) > 2 or (len(words) == 2 and ("=" in words[0] or words[1][:1] in ("-", "#"))):
            raise refused(f"expected one option, found {shown}", "quote a value with spaces")
        if (words[0].partition("=")[0] if words[0].startswith("--") else words[0][:2]) in _RESERVED:
            raise refused(f"{option!r} is not supported: reshard sets it for the job array", "leave it out")


def _check_out(address: Address, *, force: bool) -> None:
    """Refuse an output that the jobs could not write, before they are queued."""
    if is_url(address):
        return
    out = Path(address)
    check_target(out, force, files_of_manifest, exchange)
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        why = "is not a folder" if not parent.is_dir() else "is not writable"
        problem = f"cannot be written: {parent} {why}"
        raise OutputError(str(out), problem, f"choose another {Parameter('out')}", code="output.unwritable")


def _reshard(arguments: Sequence[str], python: str = sys.executable) -> str:
    return shlex.join(module_command("reshard", *arguments, python=python))
