"""Invariants of a manifest's training state, as part of `check_manifest`."""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from manifests.digest import is_digest
from manifests.optimizer_state import kinds_of
from manifests.schema import (
    MOMENTS,
    WEIGHTS,
    BatchSizes,
    LearningRate,
    Manifest,
    OptimizerState,
    ParameterGroup,
    RandomState,
    TrainingState,
)

COUNT_LIMIT = 1 << 63  # of integers in a manifest
LARGEST_NUMBER = sys.float_info.max
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")  # the name of a folder of a stage
_RESERVED = (WEIGHTS, "tied", "step")
LARGEST_RATE = 3.4028234663852886e38  # the largest float32: an optimizer sees a larger one as infinite


def training_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield each violation as (path, message)."""
    training, stored = manifest.training, set()
    for i, stage in enumerate(manifest.stages):
        for j, shard in enumerate(stage.shards):
            if shard.holds != WEIGHTS:
                stored.add(shard.holds)
                if training is None or training.optimizer is None:
                    yield f"stages[{i}].shards[{j}].holds", "optimizer state requires training.optimizer, found null"
    if training is None:
        return
    declared = [kind.name for kind in kinds_of(training.optimizer)] if training.optimizer is not None else []
    for kind in declared:
        if kind not in stored:
            yield (
                "training.optimizer",
                f"expected null: no shard has {kind}" if kind in MOMENTS else f"no shard has {kind}",
            )
    for kind in sorted(stored.difference(declared)) if training.optimizer is not None else ():
        yield "training.optimizer.kinds", f"expected {kind!r} too: a shard has it"
    yield from state_problems(training)


def state_problems(training: TrainingState) -> Iterator[tuple[str, str]]:
    """Yield each violation that does not depend on the shards, as (path, message)."""
    yield from _number_problems(training, "training")
    if training.optimizer is not None:
        yield from _group_problems(training.optimizer)
    if training.learning_rate is not None:
        yield from _rate_problems(training.learning_rate)
    if training.batch is not None:
        yield from _batch_problems(training.batch)
    yield from _data_problems(training)
    yield from _random_problems(training.random)


def _number_problems(record: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the numbers that the decoder refuses."""
    for field in fields(record):
        value, place = getattr(record, field.name), f"{path}.{field.name}"
        if isinstance(value, float) and not 0 <= value <= LARGEST_NUMBER:
            yield place, f"expected a number of 0 or more, found {value}"
        elif isinstance(value, int) and not 0 <= value < COUNT_LIMIT:
            shown = value if value.bit_length() < 256 else "a larger one"
            yield place, f"expected a count below 2^63, found {shown}"
        for index, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if is_dataclass(item):
                yield from _number_problems(item, f"{place}[{index}]" if isinstance(value, tuple) else place)


def _rate_problems(rate: LearningRate) -> Iterator[tuple[str, str]]:
    where = "training.learning_rate"
    for name in ("peak", "minimum"):
        if getattr(rate, name) > LARGEST_RATE:
            yield f"{where}.{name}", f"expected at most {LARGEST_RATE}, found {getattr(rate, name)}"
    if rate.decay != "constant" and rate.decay_steps <= rate.warmup_steps + rate.stable_steps:
        least = rate.warmup_steps + rate.stable_steps
        yield (
            f"{where}.decay_steps",
            f"expected more than warmup_steps + stable_steps = {least}, found {rate.decay_steps}",
        )


def _batch_problems(batch: BatchSizes) -> Iterator[tuple[str, str]]:
    for name in ("global_batch", "microbatch", "seq_len"):
        if getattr(batch, name) < 1:
            yield f"training.batch.{name}", f"expected at least 1, found {getattr(batch, name)}"
    if batch.microbatch and batch.global_batch % batch.microbatch:
        yield "training.batch.global_batch", f"expected a multiple of {batch.microbatch}, found {batch.global_batch}"


def _data_problems(training: TrainingState) -> Iterator[tuple[str, str]]:
    if training.data is not None and not is_digest(training.data.digest):
        yield "training.data.digest", f"expected blake3: and 64 hex digits, found {training.data.digest[:80]!r}"
    if training.data is not None and training.data.cursor is not None and not training.data.cursor.sources:
        yield "training.data.cursor.sources", "expected at least one"


def _random_problems(states: tuple[RandomState, ...]) -> Iterator[tuple[str, str]]:
    seen: set[tuple[int, str]] = set()
    for position, random in enumerate(states):
        if (random.rank, random.generator) in seen:
            yield f"training.random[{position}]", f"duplicate RNG state: rank {random.rank}, {random.generator!r}"
        seen.add((random.rank, random.generator))
        try:
            base64.b64decode(random.state, validate=True)
        except (ValueError, binascii.Error):
            yield f"training.random[{position}].state", f"expected base64, found {random.state[:40]!r}"


def _group_problems(optimizer: OptimizerState) -> Iterator[tuple[str, str]]:
    where, seen = "training.optimizer.groups", set[str]()
    if not _is_class_name(optimizer.name):
        yield "training.optimizer.name", f"expected a class name, found {optimizer.name[:80]!r}"
    if optimizer.ema >= 1:
        yield "training.optimizer.ema", f"expected a number below 1, found {optimizer.ema}"
    yield from _kind_problems(optimizer)
    if not optimizer.groups:
        yield where, "expected at least one"
    if sum(not group.fqns for group in optimizer.groups) > 1:
        yield where, "expected at most one group without fqns (for all other parameters)"
    for position, group in enumerate(optimizer.groups):
        yield from _algorithm_problems(group, f"{where}[{position}]")
        for name in ("beta1", "beta2"):
            if getattr(group, name) >= 1:
                yield f"{where}[{position}].{name}", f"expected a number below 1, found {getattr(group, name)}"
        for fqn in group.fqns:
            if fqn in seen:
                yield f"{where}[{position}].fqns", f"{fqn!r} is already in another group"
            seen.add(fqn)


def _algorithm_problems(group: ParameterGroup, where: str) -> Iterator[tuple[str, str]]:
    if group.algorithm is not None and not _is_class_name(group.algorithm):
        yield f"{where}.algorithm", f"expected a class name, found {group.algorithm[:80]!r}"
    names = [option.name for option in group.options]
    for option in group.options:
        if not option.name.isidentifier() or names.count(option.name) > 1:
            yield f"{where}.options", f"expected an argument's name, once, found {option.name[:80]!r}"
        try:
            json.loads(option.value)
        except (ValueError, RecursionError):
            yield f"{where}.options", f"expected JSON as the value of {option.name[:80]!r}, found {option.value[:80]!r}"


def _kind_problems(optimizer: OptimizerState) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for position, kind in enumerate(optimizer.kinds or ()):
        where = f"training.optimizer.kinds[{position}]"
        if not _KIND.fullmatch(kind.name) or kind.name in (*_RESERVED, *seen):
            yield f"{where}.name", f"expected lowercase letters, digits and _, once, found {kind.name[:80]!r}"
        seen.add(kind.name)
        for group in kind.groups:
            if group >= len(optimizer.groups):
                yield f"{where}.groups", f"expected a group below {len(optimizer.groups)}, found {group}"


def _is_class_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
