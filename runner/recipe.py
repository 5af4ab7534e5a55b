"""What a training run is asked to do, and what can be refused before torch is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from manifests.errors import InputError, UsageError
from manifests.placement import Placement

__all__ = [
    "SCHEDULES",
    "SYNTHETIC",
    "TRAINED",
    "BatchOptions",
    "CheckpointOptions",
    "DataOptions",
    "Decay",
    "OptimOptions",
    "ResumeOptions",
    "ScheduleName",
    "check_schedule",
    "check_trainable",
    "default_schedule",
]

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B"]
# The architectures that have a family, known here so that launch can refuse the others without torch.
TRAINED = ("LlamaForCausalLM",)
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
Decay = Literal["constant", "cosine"]
SYNTHETIC = "synthetic"  # as a data source: random tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """How the sequences of one optimizer step are cut. All counts but `seq_len` are in sequences.

    Raises:
        UsageError: a count below 1, or a global batch that the microbatch does not divide.
    """

    global_batch: int
    microbatch: int
    seq_len: int  # in tokens

    def __post_init__(self) -> None:
        for flag, count in (
            ("--global-batch", self.global_batch),
            ("--microbatch", self.microbatch),
            ("--seq-len", self.seq_len),
        ):
            if count < 1:
                raise UsageError(flag, f"expected at least 1, found {count}")
        if self.global_batch % self.microbatch:
            lower = self.global_batch // self.microbatch * self.microbatch
            upper = lower + self.microbatch
            raise UsageError(
                "--global-batch",
                f"expected a multiple of --microbatch {self.microbatch}, found {self.global_batch}",
                f"the next ones are {lower} and {upper}" if lower else f"the next one is {upper}",
            )

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """AdamW and its learning rate: a linear warm-up, then constant or a cosine down to `min_lr`.

    Raises:
        UsageError: a value out of its range, or a cosine that ends before it begins.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0  # gradients are scaled down to this norm; 0 leaves them alone
    warmup_steps: int = 0
    decay: Decay = "constant"
    decay_steps: int = 0  # the step at which the cosine has reached `min_lr`
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--lr", self.lr),
            ("--weight-decay", self.weight_decay),
            ("--max-norm", self.max_norm),
            ("--warmup-steps", self.warmup_steps),
            ("--min-lr", self.min_lr),
        ):
            if not 0 <= value < math.inf:
                raise UsageError(flag, f"expected a number from 0 up, found {value}")
        if not (0 <= self.betas[0] < 1 and 0 <= self.betas[1] < 1):
            raise UsageError("--betas", f"expected two numbers from 0 up to below 1, found {self.betas}")
        if self.decay == "cosine" and self.decay_steps <= self.warmup_steps:
            raise UsageError(
                "--decay-steps",
                f"expected more than --warmup-steps {self.warmup_steps}, found {self.decay_steps}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Where the text comes from. A source is a file, a folder or a glob; or the only one is `synthetic`.

    Raises:
        UsageError: no source, or `synthetic` beside another.
    """

    sources: tuple[str, ...]
    text_field: str = "text"  # of a JSON line; column of a Parquet file
    pack: bool = True  # documents end to end; otherwise one document a sequence, cut and padded
    seed: int = 0  # of `synthetic`

    def __post_init__(self) -> None:
        if not self.sources or (SYNTHETIC in self.sources and len(self.sources) > 1):
            raise UsageError("--data", f"expected files, folders or globs, or the one word {SYNTHETIC!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Where a run saves its checkpoints, after how many steps, and how many of them stay; None: all."""

    history: Path
    every: int | None  # besides the one after the last step
    keep: int | None
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    """What a run goes on from: `auto`, `step-N` or a checkpoint's path; None: the manifest that is launched."""

    source: str | None
    weights_only: bool
    restart_data: bool


def check_trainable(architecture: str, where: str = "config.json") -> None:
    """Raise unless the runner has a family for this architecture.

    Raises:
        InputError: naming those it has.
    """
    if architecture not in TRAINED:
        raise InputError(
            f"{where}: architectures",
            f"{architecture!r} can be packed, but the runner has no family for it",
            "known to the runner: " + ", ".join(TRAINED),
        )


def default_schedule(placement: Placement) -> ScheduleName:
    """Give the schedule for stages that no one asked a schedule for."""
    return "1F1B" if placement.num_virtual == 1 else "Interleaved1F1B"


def check_schedule(name: str, placement: Placement, num_microbatches: int) -> ScheduleName:
    """Give the schedule's name, if these stages and this many microbatches can run on it.

    Raises:
        UsageError: an unknown schedule; stages per rank or a placement that it cannot run; too few
            microbatches, or a number of them that it cannot deal out.
    """
    schedule = _known(name, SCHEDULES)
    per_rank, num_ranks = placement.num_virtual, placement.num_ranks
    if schedule == "Interleaved1F1B":
        if per_rank < 2:
            raise UsageError(
                "--schedule",
                f"{schedule} needs at least 2 stages on each rank, the manifest has 1",
                f"take 1F1B or GPipe, or pack again with more stages: reshard pack … --layout pp={num_ranks},vpp=2",
            )
        if placement.style != "loop":
            raise UsageError(
                "--schedule",
                f"{schedule} needs stages placed in a loop, the manifest places them in a {placement.style}",
                f"pack again: reshard pack … --layout pp={num_ranks},vpp={per_rank}",
            )
        rounds = max(1, num_microbatches // num_ranks)
        if num_microbatches % rounds:
            raise UsageError(
                "--microbatch",
                f"{schedule} deals {num_microbatches} microbatches over {num_ranks} ranks in {rounds} "
                "rounds, which must come out even",
                f"take a number of microbatches that is a multiple of {num_ranks}",
            )
    elif per_rank > 1:
        raise UsageError(
            "--schedule",
            f"{schedule} needs 1 stage on each rank, the manifest has {per_rank}",
            f"take Interleaved1F1B, or pack again: reshard pack … --layout pp={num_ranks}",
        )
    if schedule == "1F1B" and num_microbatches < placement.num_stages:
        raise UsageError(
            "--microbatch",
            f"1F1B needs at least {placement.num_stages} microbatches (one for each stage), found {num_microbatches}",
            "make --global-batch larger or --microbatch smaller, or take GPipe",
        )
    return schedule


def _known(name: str, names: Sequence[ScheduleName]) -> ScheduleName:
    for known in names:
        if name.lower() == known.lower():
            return known
    raise UsageError("--schedule", f"{name!r} is not known", "known: " + ", ".join(names))
