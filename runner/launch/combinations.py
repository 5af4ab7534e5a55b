"""Combinations that torch or torchtitan would train wrong without a word, refused before anything starts. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from manifests.errors import UsageError
from manifests.schema import Manifest
from runner.config.architectures import TENSOR_PARALLEL
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import Degrees
from runner.config.schema import BatchOptions, Recompute
from runner.pipeline.timetable import Timetable

__all__ = [
    "REFUSED",
    "Combination",
    "Refusal",
    "check_combination",
    "check_divides",
    "check_sinks",
    "combine",
    "share_of",
]

_LAYER = re.compile(r"\.(\d+)$")  # numbered from the model's number of layers, they are for multi-token prediction
_CUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
_UNSPLIT = "a schedule with whole backwards on stages in a loop, such as 1F1B or Interleaved1F1B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What a run puts together. What is left out is what a plain pipeline has."""

    schedule: str = "1F1B"  # as messages name it
    splits_backward: bool = False  # see `runner.pipeline.timetable.Timetable`
    recompute: Recompute = "none"
    is_compiled: bool = False
    num_mtp_layers: int = 0
    num_tensor: int = 1  # tensor-parallel ranks
    architecture: str = "LlamaForCausalLM"
    has_loss_chunks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One rule: what it applies to, what is wrong with that, and the nearest right choice."""

    where: str
    code: str
    applies: Callable[[Combination], bool]
    problem: str  # {schedule} and {architecture} stand for what is found
    hint: str


REFUSED = (
    Refusal(
        where="--ac",
        code="schedule.selective-recomputation",
        applies=lambda found: found.splits_backward and found.recompute == "selective",
        problem="selective recomputation does not work with {schedule}, which goes through a backward in two parts",
        hint=f"take --ac full, or {_UNSPLIT}",
    ),
    Refusal(
        where="--compile",
        code="schedule.compiled-layers",
        applies=lambda found: found.splits_backward and found.is_compiled,
        problem="a compiled layer has one backward, and {schedule} cuts it in two: gradients come out wrong",
        hint=f"leave --compile out, or take {_UNSPLIT}",
    ),
    Refusal(
        where="--tp",
        code="options.tp-architecture",
        applies=lambda found: found.num_tensor > 1 and found.architecture not in TENSOR_PARALLEL,
        problem="there is no way to cut {architecture} over tensor-parallel ranks that is known to train right",
        hint=f"leave --tp out, or share memory with --dp-shard; it is known for {', '.join(TENSOR_PARALLEL)}",
    ),
    Refusal(
        where="--loss-chunk",
        code="options.tp-loss-chunk",
        applies=lambda found: found.num_tensor > 1 and found.has_loss_chunks,
        problem="a head that is cut over tensor-parallel ranks gives its logits whole, not a few tokens at a time",
        hint="leave --loss-chunk out",
    ),
    Refusal(
        where="--compile",
        code="options.tp-compiled-layers",
        applies=lambda found: found.is_compiled and found.num_tensor > 1,
        problem="compiled layers are not known to train right where tensor-parallel ranks share them",
        hint="leave --compile out, or --tp",
    ),
    Refusal(
        where="manifest",
        code="manifest.mtp-layers",
        applies=lambda found: found.num_mtp_layers > 0,
        problem="layers for multi-token prediction (MTP) cannot be trained: torchtitan has no pipeline for them",
        hint="pack again without them: num_nextn_predict_layers 0 in config.json, and --drop for each of their tensors",
    ),
)


def check_combination(found: Combination) -> None:
    """Raise unless what a run puts together is known to train right; every refusal is said.

    Raises:
        UsageError: the reasons, each with the nearest right choice.
    """
    refused = [rule for rule in REFUSED if rule.applies(found)]
    if not refused:
        return
    first, *others = refused
    problem = _said(first, found)
    for rule in others:
        problem += f"\n{rule.where}: {_said(rule, found)} ({rule.hint})"
    raise UsageError(first.where, problem, first.hint, code=first.code)


def _said(rule: Refusal, found: Combination) -> str:
    return rule.problem.format(schedule=found.schedule, architecture=found.architecture)


def check_sinks(options: TrainOptions) -> None:
    """Raise where metrics are wanted for a package that is not installed here.

    Raises:
        UsageError: naming the extra that brings it.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(options, name) and find_spec(name) is None:
            raise UsageError(
                f"--{name}",
                f"{name} is not installed here",
                f"pip install 'reshard[{name}]'",
                code="system.missing-package",
            )


def combine(
    manifest: Manifest, options: TrainOptions, timetable: Timetable, degrees: Degrees | None = None
) -> Combination:
    """Give what a run of these options puts together; without `degrees`, of one pipeline."""
    degrees = degrees or Degrees(pipeline=manifest.layout.num_ranks)
    modules = (module for stage in manifest.stages for module in stage.modules)
    numbers = [int(found[1]) for found in map(_LAYER.search, modules) if found]
    return Combination(
        schedule=timetable.name,
        splits_backward=timetable.splits_backward,
        recompute=options.compute.recompute,
        is_compiled=options.compute.is_compiled,
        num_tensor=degrees.tensor,
        architecture=manifest.model.architecture,
        has_loss_chunks=options.compute.loss_chunk is not None,
        num_mtp_layers=sum(number >= manifest.model.num_layers for number in numbers),
    )


def check_divides(config: Mapping[str, Any], num_tensor: int) -> None:
    """Make sure that a model can be cut over so many tensor-parallel ranks: whole heads, units and words for each.

    Raises:
        UsageError: naming what does not divide.
    """
    for name in _CUT:
        if isinstance(count := config.get(name), int) and count % num_tensor:
            problem = f"expected a divisor of {count} ({name} of config.json), found {num_tensor}"
            raise UsageError("--tp", problem, code="options.tp-divisor")


def share_of(batch: BatchOptions, num_replicas: int) -> BatchOptions:
    """Give one pipeline's part of a batch that so many pipelines share.

    Raises:
        UsageError: the batch does not divide, naming the nearest that do.
    """
    unit = batch.microbatch * num_replicas
    if batch.global_batch % unit:
        lower = batch.global_batch // unit * unit
        near = f"{lower} and {lower + unit}" if lower else str(unit)
        raise UsageError(
            "--global-batch",
            f"expected a multiple of {unit}, --microbatch {batch.microbatch} times {num_replicas} pipelines side by "
            f"side, found {batch.global_batch}",
            f"take {near.replace(' and ', ' or ')}",
            code="options.batch-size",
        )
    return BatchOptions(
        global_batch=batch.global_batch // num_replicas, microbatch=batch.microbatch, seq_len=batch.seq_len
    )
