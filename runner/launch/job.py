"""A job for a scheduler: what runs, on how many nodes, with which options. No torch."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from manifests.command.console import expand_home
from manifests.command.interpreter import relative_entries
from manifests.errors import LaunchError, UsageError
from manifests.invariants import MANIFEST_NAME
from runner.checkpoint.history import checkpoint_named
from runner.config.command import is_training_flag
from runner.config.flags import TrainOptions, parse_training
from stores.address import is_url

FlagKind = Literal["switch", "one", "several"]  # what a flag takes

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_VARIABLE = re.compile(r"PET_\w+|TORCHELASTIC_\w+|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
_KEY = re.compile(r"[a-z][a-z0-9-]*")

_EXPECTED: Mapping[FlagKind, str] = {
    "switch": "true or false", "one": "a text or a number", "several": 'a list of texts, such as ["A=1"]'
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training run on `nnodes` nodes with `nproc_per_node` ranks each. Paths are absolute."""

    manifest: str  # an absolute path, or an address in a store
    training: tuple[str, ...]
    name: str
    log_dir: Path
    nnodes: int
    nproc_per_node: int
    environment: tuple[tuple[str, str], ...] = ()
    image: str | None = None
    mounts: tuple[str, ...] = ()
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    sbatch_args: tuple[str, ...] = ()
    signal: str | None = None
    restarts: int = 0
    requeue: bool = False

    def __post_init__(self) -> None:
        check_texts((("--name", self.name), ("--partition", self.partition), ("--account", self.account),
                     ("--qos", self.qos), ("--log-dir", str(self.log_dir))))  # fmt: skip
        check_texts((("--image", self.image),), without_spaces=True)
        if self.mounts and self.image is None:
            raise UsageError(
                "--mount",
                "requires --image",
                "without a container, nodes see their shared file systems",
                code="launch.scheduler-flag",
            )
        for flag, is_asked in (("--restarts", self.restarts > 0), ("--requeue", self.requeue)):
            if is_asked and not self.is_resumable:
                raise UsageError(
                    flag,
                    "requires checkpoints to resume from",
                    _how_to_resume(self.options, self.manifest),
                    code="options.needs-checkpoint",
                )

    @property
    def options(self) -> TrainOptions:
        return parse_training(self.training)

    @property
    def is_resumable(self) -> bool:
        """Whether the same command, run again, resumes the run."""
        return self.options.checkpoint is not None and self.options.resume.source == "auto"


def _how_to_resume(options: TrainOptions, manifest: str) -> str:
    """Return the flags with which a restarted job resumes, and where its first start begins as these options say."""
    flags = "--checkpoint DIR --checkpoint-every N --resume auto"
    source, has_weights_only = options.resume.source, options.resume.weights_only
    if source in (None, "auto") and not has_weights_only:
        return f"add {flags} after --"
    checkpoint = shlex.quote(manifest if source is None else str(checkpoint_named(source, options.history)))
    start = f"launch {checkpoint}, or for another PP degree OUT of reshard pack {checkpoint} --layout pp=N --out OUT"
    if has_weights_only:
        export = f"reshard export {checkpoint} --to hf --out HF"
        start = f"{export}, reshard pack HF --layout pp=N --out OUT, and launch OUT"
    elif options.lora is not None:
        start = f"copy {checkpoint} there first"
    return f"{flags} resumes the newest step of DIR, and if there is none, starts from what is launched: {start}"


def read_environment(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Read `K=V`, and `K` with the value of this process."""
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise _bad_variable(f"expected NAME or NAME=VALUE, found {text!r}")
        if _OWN_VARIABLE.fullmatch(name):
            raise _bad_variable(f"{name} is set by torchrun for every rank", "remove it")
        if "\0" in value:
            raise _bad_variable(f"the value of {name} contains a zero byte")
        if name == "PYTHONPATH" and relative_entries(value):
            problem = f"PYTHONPATH has an entry that depends on the working folder: {value!r}"
            hint = "use absolute paths, without empty entries, or code of that folder would run"
            raise _bad_variable(problem, hint)
        if not equals and name not in os.environ:
            raise _bad_variable(f"{name} is not set here", f"use --env {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    return tuple(variables.items())


def _bad_variable(problem: str, hint: str = "") -> UsageError:
    return UsageError("--env", problem, hint, code="launch.environment")


def read_job_file(path: Path, kinds: Mapping[str, FlagKind]) -> dict[str, Any]:
    """Read a job file: the flags of `runner launch` without their dashes, and a table `training` of those after --.

    Returns the values by the names of their parameters; `training` maps each flag to its arguments.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad_job_file(path, f"cannot be read: {error.strerror}", "check the path for typos") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "write lines such as lr = 1e-3, below [training]; docs/cluster.md has a whole file"
        raise _bad_job_file(path, f"is not TOML: {error}", hint) from error
    training = document.pop("training", {})
    if not isinstance(training, Mapping):
        raise _bad_job_file(f"{path}: training", "expected a table of the flags that follow --")
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in kinds:
            hint = "known: " + ", ".join(sorted(kinds))
            if is_training_flag(f"--{key}"):
                hint = "it is a training flag: put it below [training]"
            raise _bad_job_file(f"{path}: {key}", "is not a flag of runner launch", hint)
        values[key.replace("-", "_")] = _value_of(value, kinds[key], f"{path}: {key}")
    words = {f"--{key}": _words(key, value, f"{path}: training.{key}") for key, value in training.items()}
    if empty := next((flag for flag, of_flag in words.items() if "" in of_flag), None):
        raise _bad_job_file(f"{path}: training.{empty[2:]}", "expected a value, found an empty text", "leave it out")
    return {**values, "training": words}


def _bad_job_file(where: str | Path, problem: str, hint: str = "") -> LaunchError:
    return LaunchError(str(where), problem, hint, code="launch.job-file")


def _value_of(value: object, kind: FlagKind, where: str) -> object:
    if kind == "switch" and isinstance(value, bool):
        return value
    if kind == "several" and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(map(expand_home, value))
    if kind == "one" and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return expand_home(str(value))
    raise _bad_job_file(where, f"expected {_EXPECTED[kind]}, found {value!r}")


def _words(key: str, value: object, where: str) -> list[str]:
    flag = "--" + key
    if not _KEY.fullmatch(key):
        raise _bad_job_file(where, "is not a training flag", "list them with runner launch MANIFEST -- --help")
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + key]
    if isinstance(value, (str, int, float)):
        return [flag, expand_home(str(value))]
    if isinstance(value, list) and all(isinstance(part, (str, int, float)) for part in value):
        return [word for part in value for word in (flag, expand_home(str(part)))]
    raise _bad_job_file(where, "expected a text, a number, true, false or a list of these")


def check_texts(given: Iterable[tuple[str, str | None]], *, without_spaces: bool = False) -> None:
    """Check that the value of each flag, if there is one, is one line of text."""
    for flag, value in given:
        if value is None:
            continue
        if not value.strip() or not value.isprintable() or (without_spaces and " " in value):
            what = "one word" if without_spaces else "one line of text"
            raise UsageError(flag, f"expected {what}, found {value!r}", code="launch.scheduler-value")


def check_mounts(mounts: Sequence[str], form: re.Pattern[str], expected: str) -> None:
    """Check the form of every mount, and that no two have the same target."""
    seen: dict[str, str] = {}
    for mount in mounts:
        match = form.fullmatch(mount)
        if match is None or ".." in mount.split("/"):
            raise UsageError("--mount", f"expected {expected}, found {mount!r}", code="launch.mount")
        target = match["target"].rstrip("/") or "/"
        if target in seen:
            raise UsageError(
                "--mount", f"{seen[target]!r} and {mount!r} have the same target {target}", code="launch.mount"
            )
        seen[target] = mount


def is_shown(path: Path, mounts: Sequence[str]) -> bool:
    """Whether a container sees this absolute path through a mount."""
    return any(path.is_relative_to(mount.split(":")[:2][-1]) for mount in mounts)


def check_relative(job: Job) -> None:
    """Check that the relative paths of a job in a container are on its mounts, as is this folder, where they start."""
    here = Path.cwd()
    outputs = ((flag, str(path)) for flag, path in job.options.folders.items())
    for flag, given in (*outputs, *_inputs(job.options)):
        path = Path(os.path.normpath(here / given))
        if not (Path(given).is_absolute() or (is_shown(here, job.mounts) and is_shown(path, job.mounts))):
            raise UsageError(
                f"{flag} {given}", f"is relative to {here}, and no --mount provides it there in the container",
                "mount that folder, or use an absolute path that the container sees", code="launch.not-mounted",
            )  # fmt: skip


def _inputs(options: TrainOptions) -> Iterator[tuple[str, str]]:
    """Yield the files that only ranks read, each after its flag. The path of the manifest is absolute."""
    source = options.resume.source
    if source not in (None, "auto") and not re.fullmatch(r"step-\d+", source):
        yield "--resume", source
    for flag, name in (("--schedule", options.schedule), ("--optimizer", options.optim.optimizer)):
        if name is not None and name.endswith((".csv", ".toml")):
            yield flag, name
    if options.adapter is not None:
        yield "--lora-from", str(options.adapter)
    for flag, data in (("--data", options.data), ("--eval-data", options.eval_data)):
        yield from ((flag, path) for path in (data.files if data else ()))


def shown_address(address: str, written: str, mounts: Sequence[str]) -> str:
    """Return a manifest's address as a container sees it: as written, if a mount has it only under that path."""
    path = Path(os.path.normpath(Path.cwd() / written))
    is_named = not is_url(address) and not is_shown(Path(address), mounts) and is_shown(path, mounts)
    return str(path / MANIFEST_NAME if path.is_dir() else path) if is_named else address
