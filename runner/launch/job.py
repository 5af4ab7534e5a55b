"""A job as it is asked for: what runs, on how many nodes, and what a scheduler is told. No torch."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from manifests.errors import InputError, UsageError
from runner.options import TrainOptions, parse_training

__all__ = ["SCHEDULERS", "Job", "Scheduler", "read_environment", "read_job_file"]

Scheduler = Literal["local", "slurm", "jobset"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIGNAL = re.compile(r"USR2@(\d{1,5})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training run on `nnodes` nodes with `nproc_per_node` ranks each. Paths are absolute.

    Raises:
        UsageError: values that do not go together.
    """

    manifest: Path
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
        if self.signal is not None and not _SIGNAL.fullmatch(self.signal):
            raise UsageError(
                "--signal",
                f"expected USR2@SECONDS, found {self.signal!r}",
                "torchrun dies of SIGUSR1 and leaves its ranks behind; the runner saves and stops at SIGUSR2",
            )
        if self.mounts and self.image is None:
            raise UsageError("--mount", "needs --image", "without a container, nodes see the files that they share")
        for flag, is_asked in (("--restarts", self.restarts > 0), ("--requeue", self.requeue)):
            if is_asked and not self.goes_on:
                raise UsageError(
                    flag,
                    "needs checkpoints to go on from",
                    "add --checkpoint DIR --checkpoint-every N --resume auto after --",
                )

    @property
    def options(self) -> TrainOptions:
        return parse_training(self.training)

    @property
    def goes_on(self) -> bool:
        """Whether the same command, started again, goes on where the run was."""
        return self.options.checkpoint is not None and self.options.resume.source == "auto"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


def read_environment(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Read `K=V`, and `K` as this process's own value.

    Raises:
        UsageError: no name, or a variable that is not set here.
    """
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise UsageError("--env", f"expected NAME or NAME=VALUE, found {text!r}")
        if not equals and name not in os.environ:
            raise UsageError("--env", f"{name} is not set here", f"--env {name}=VALUE sets it")
        found[name] = value if equals else os.environ[name]
    return tuple(found.items())


def read_job_file(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """Read a job file: the flags of `runner launch` without their dashes, and a table `training` of those after --.

    Gives the values by the names of their parameters, `training` as a tuple of words.

    Raises:
        InputError: no such file, no TOML, or a key that is no flag.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"is no TOML: {error}") from error
    training = found.pop("training", {})
    if not isinstance(training, Mapping):
        raise InputError(f"{path}: training", "expected a table of the flags that follow --")
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in known:
            raise InputError(f"{path}: {key}", "is no flag of runner launch", "known: " + ", ".join(sorted(known)))
        values[key.replace("-", "_")] = _value_of(value, f"{path}: {key}")
    return {**values, "training": tuple(word for item in training.items() for word in _words(*item, where=str(path)))}


def _value_of(value: object, where: str) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if isinstance(value, (str, int)):
        return str(value)
    raise InputError(where, "expected a text, a whole number, true, false or a list of texts")


def _words(key: str, value: object, *, where: str) -> list[str]:
    flag = "--" + key
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + key]
    if isinstance(value, (str, int, float)):
        return [flag, str(value)]
    if isinstance(value, list) and all(isinstance(part, (str, int, float)) for part in value):
        return [word for part in value for word in (flag, str(part))]
    raise InputError(f"{where}: training.{key}", "expected a text, a number, true, false or a list of these")
