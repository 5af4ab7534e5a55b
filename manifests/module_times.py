"""`times.json`: the measured seconds of each module for a microbatch, which training writes and planning reads.

# Note [Backward in two parts]
Gradients of inputs, then those of weights (zero bubble): the same products, but what the first part saves for the
second stays in memory, the graph is walked for each weight, and another pass reads what the one before had in its
cache. Measured by hand, without a result file, with torch's split of Llama layers, against whole backwards in turn with
them: in processor time of a busy CPU core, in float32, of widths 256 to 1,024 and 128 to 512 tokens, 1.03 to 1.32 times
as long, 1.14 in the median; once on an H100 with torch 2.11, on 2026-11-26, in bfloat16, of widths 2,048 to 8,192 and
2,048 to 8,192 tokens, 1.5 to 2.4 ms longer for each layer (3.8 ms at a width of 1,024), which is 6 to 45 % where a
layer computes for more than 3 ms.

# Note [What each microbatch takes]
Part of a module's time is the same for any number of tokens: its weights are read, and its gradients are added to those
of the microbatches before. With 128 tokens in float32 and a width of 512, on a core, that is a fifth of a product's
time, so 256 tokens take 1.8 times as long. A run measures this share with a product of its own number of tokens, and
one of twice as many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.brief import brief
from manifests.errors import InputError
from manifests.jsontext import kind_of, parse_json_object
from manifests.store import read_small_file

TIMES_NAME = "times.json"
_VERSION = 1
MOST_MEASURED = 1e18  # of a time, rate or count: sums and products of them are finite
_RATES = ("nbytes_per_s", "shard_nbytes_per_s")
_LINK = {"nbytes_per_s": "rate", "shard_nbytes_per_s": "shard_rate", "latency_s": "latency_s"}
# A backward in two parts takes longer than a whole one, by this share of it, and by these seconds for each layer; see
# Note [Backward in two parts].
_SPLIT = {"cpu": (0.14, 0.0), "cuda": (0.0, 2e-3)}
_MOST_SPLIT = 1.45  # times as long as a whole one, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTime:
    """Time of one microbatch in a module: in seconds if measured, else in FLOPs."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def ring(number: int) -> float:
    """Return the share of a tensor that each of so many ranks sends to gather or to scatter it, as a ring."""
    return (number - 1) / number


def split_s(how: Mapping[str, Any], backward_s: float, num_layers: int) -> float:
    """Return the seconds by which the backward of so many layers takes longer in two parts.

    See Note [Backward in two parts]. It is 0 where `how` does not say the device.
    """
    share, layer_s = _split(how)
    return share * backward_s + layer_s * num_layers


def whole_s(how: Mapping[str, Any], parts_s: float, num_layers: int) -> float:
    """Return the seconds of a whole backward that takes `parts_s` in two parts; see `split_s`.

    Layers too short for the seconds of each take the largest measured share of them.
    """
    share, layer_s = _split(how)
    return max(parts_s - layer_s * num_layers, parts_s / _MOST_SPLIT) / (1 + share)


def _split(how: Mapping[str, Any]) -> tuple[float, float]:
    if (device := how.get("device")) is None:
        return 0.0, 0.0
    return _SPLIT["cpu" if str(device).startswith("cpu") else "cuda"]


def reduction_nbytes(weights: float, gradients: float, *, shards: int, replicas: int) -> tuple[float, float]:
    """Return the bytes that a rank sends once per step among the ranks that shard its stage, and among replicas."""
    return ring(shards) * (weights + gradients), 2 * ring(replicas) * gradients / shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What ranks send to each other, as a run measured it.

    Units: `rate` in bytes per second, of each rank while all ranks reduce gradients as a ring, and `shard_rate` while
    they gather weights that they shard and scatter their gradients; `latency_s` in seconds, by which a product whose
    matrix ranks share takes longer than its bytes at `rate`.
    """

    rate: float
    shard_rate: float
    latency_s: float = 0.0

    def reduction_s(self, weights: float, gradients: float, *, shards: int, replicas: int) -> float:
        """Return the seconds of a step in which a rank sends what `reduction_nbytes` counts."""
        sharded, replicated = reduction_nbytes(weights, gradients, shards=shards, replicas=replicas)
        return sharded / self.shard_rate + replicated / self.rate


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """What a step takes besides its schedule: gradient norm, clipping, the optimizer's step, metrics; and its network.

    Units: `overhead_s` in seconds, of a rank that steps `num_params` parameters; `gap_s` in seconds, by which an action
    whose result another rank takes is longer than its computation.
    """

    overhead_s: float
    num_params: int
    link: Link | None = None  # None: there was one rank
    gap_s: float = 0.0

    def overhead_of(self, num_params: float) -> float:
        """Return the seconds for a rank with so many parameters."""
        return self.overhead_s * num_params / self.num_params


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTimes:
    """Times by module, in seconds, and the options with which they were measured, such as `seq_len`.

    `fixed_share` of them is the same for any number of tokens; see Note [What each microbatch takes].
    """

    modules: Mapping[str, ModuleTime]
    step: StepTime | None = None
    fixed_share: float = 0.0
    how: Mapping[str, Any]

    __repr__ = brief

    def scale_to(self, num_tokens: int, tensor: int) -> float:
        """Return the factor of times for so many tokens of a microbatch on a rank, and this tensor-parallel degree."""
        how = self.how
        measured = how["microbatch"] * how["seq_len"] / how.get("cp", 1)
        tokens = self.fixed_share + (1 - self.fixed_share) * num_tokens / measured
        return float(tokens * how.get("tp", 1) / tensor)

    def encode(self) -> bytes:
        """Return the text of `times.json`."""
        modules = {
            module: {"forward_s": time.forward, "backward_s": time.backward} for module, time in self.modules.items()
        }
        document = {
            "version": _VERSION, "measured": dict(self.how), "fixed_share": self.fixed_share, "modules": modules
        }  # fmt: skip
        if (step := self.step) is not None:
            link: dict[str, float] = {}
            if step.link is not None:
                link = {field: getattr(step.link, name) for field, name in _LINK.items()}
            seconds = {"overhead_s": step.overhead_s, "gap_s": step.gap_s}
            document["step"] = {**seconds, "num_params": step.num_params, **link}
        return (json.dumps(document, indent=1) + "\n").encode()


def read_times(path: Path) -> MeasuredTimes:
    """Read measured times from a file; see `parse_times`."""
    return parse_times(read_small_file(path), str(path))


def parse_times(text: bytes, where: str) -> MeasuredTimes:
    """Read `{"version": 1, "modules": {"model.layers.0": {"forward_s": 0.01, "backward_s": 0.02}}}`.

    "measured", an object, may say how they were measured, and `"step": {"overhead_s": 0.2, "num_params": 8030261248,
    "nbytes_per_s": 5e10, "latency_s": 1e-4, "shard_nbytes_per_s": 4e10}` what a step takes besides, see `StepTime`;
    "fixed_share", from 0 to 1, is `MeasuredTimes`'.
    Units: seconds for one microbatch.
    """
    document = parse_json_object(text, where)
    if document.get("version") != _VERSION or isinstance(document["version"], bool):
        raise InputError(
            f"{where}: version", f"expected {_VERSION}, found {document.get('version')!r}", code="options.cost-file"
        )
    modules = _object(document.get("modules"), f"{where}: modules")
    times = {
        module: ModuleTime(
            forward=_number(entry, "forward_s", f"{where}: modules[{module!r}]"),
            backward=_number(entry, "backward_s", f"{where}: modules[{module!r}]"),
        )
        for module, entry in modules.items()
    }
    how = _object(document.get("measured", {}), f"{where}: measured")
    step, share = document.get("step"), document.get("fixed_share", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        problem = f"expected a number from 0 to 1, found {str(share)[:80]}"
        raise InputError(f"{where}: fixed_share", problem, code="options.cost-file")
    return MeasuredTimes(
        modules=times, how=how, step=None if step is None else _step(step, f"{where}: step"), fixed_share=share
    )


def _step(entry: object, where: str) -> StepTime:
    names = _object(entry, where).keys()
    rates = {name: _number(entry, name, where, "bytes per second", 1) for name in _RATES if name in names}
    latency_s, rate = _number(entry, "latency_s", where) if "latency_s" in names else 0.0, rates.get("nbytes_per_s")
    link = Link(rate=rate, shard_rate=rates.get("shard_nbytes_per_s", rate), latency_s=latency_s) if rate else None
    num_params = int(_number(entry, "num_params", where, "a number", 1))
    overhead_s, gap_s = _number(entry, "overhead_s", where), _number(entry, "gap_s", where) if "gap_s" in names else 0.0
    return StepTime(overhead_s=overhead_s, num_params=num_params, link=link, gap_s=gap_s)


def _number(entry: object, name: str, where: str, what: str = "seconds", least: int = 0) -> float:
    number = _object(entry, where).get(name)
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= MOST_MEASURED:
        problem = f"expected {what}, from {least} to {MOST_MEASURED:g}, found {str(number)[:80]}"
        raise InputError(f"{where}.{name}", problem, code="options.cost-file")
    return float(number)


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(where, f"expected an object, found {kind_of(value)}", code="options.cost-file")
    return value
