"""How far a Universal Checkpoint was trained, and the options of its AdamW.

Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, runtime/zero/stage_1_and_2.py, ops/adam.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from struct import calcsize, unpack

from manifests.errors import SourceError
from manifests.schema import LearningRate, OptimizerState, ParameterGroup, TrainingState
from manifests.training_state import LARGEST_RATE
from reshard.archives.tensors import read_object
from reshard.sources.deepspeed_step import Saved, Step
from reshard.tensors.checkpoint import TensorAt
from stores.base import read_range

__all__ = ["BAD_OPTIMIZER", "STATE_NAME", "is_rank_file", "read_number", "training_state"]

BAD_OPTIMIZER = "source.bad-optimizer-state"
STATE_NAME = "zero/optimizer_state.pt"
_RANK = re.compile(r"mp_rank_\d+(?:_\d+)?_model_states\.pt|zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_SCALARS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
_LEAVE = "--drop optimizer packs the weights alone"
_OPTIONS = ("betas", "eps", "weight_decay")
_NOT_ADAMW = {"amsgrad": True, "maximize": True, "bias_correction": False}


def is_rank_file(name: str) -> bool:
    """Return whether a file has what a rank counts: steps, and which parameters are in which group."""
    return _RANK.fullmatch(name) is not None


def training_state(step: Step, saved: Saved, fqns: Mapping[str, str]) -> tuple[TrainingState, tuple[str, ...]]:
    """Return how far the checkpoint was trained, and what of its training is left out.

    `fqns` are the names of parameters here. The learning rate is that of the next step, and stays: DeepSpeed does not
    have its schedule as the runner does.

    Raises:
        SourceError: parameters took different numbers of steps, another optimizer than AdamW, or malformed options.
    """
    name, state = saved.options or (STATE_NAME, None)
    where = f"{step.where}/{name}"
    if state is None:
        if STATE_NAME not in step.names():
            raise SourceError(where, "no such file, which has the options of the optimizer", _LEAVE, code=BAD_OPTIMIZER)
        state = _dict(read_object(step.file(STATE_NAME), STATE_NAME), where)
    files = [step.file(name) for name in step.names() if is_rank_file(name)]
    ranks = [_dict(read_object(file, "state"), str(file)) for file in files]
    groups = _groups(state, where)
    rates = {group.get("lr") for group in groups if isinstance(group.get("lr"), int | float)}
    rate = rates.pop() if len(rates) == 1 else None
    found = TrainingState(
        step=_num_steps(saved.steps, groups, where, fqns),
        num_tokens=0,
        dtype="F32",
        learning_rate=_rate(rate),
        optimizer=OptimizerState(
            name="AdamW", max_norm=_max_norm(state, ranks, where), groups=_by_options(groups, ranks, fqns, where)
        ),
    )
    lost = ("lr_scheduler",) if any(rank.get("lr_scheduler") is not None for rank in ranks) else ()
    return found, lost


def read_number(value: object, where: str) -> float:
    """Return a number, or the one that a tensor has.

    Raises:
        SourceError: it is neither.
    """
    if isinstance(value, TensorAt) and value.dtype in _SCALARS and value.nbytes == calcsize(_SCALARS[value.dtype]):
        (value,) = unpack(_SCALARS[value.dtype], read_range(value.file, value.begin, value.end))
    if type(value) is int or type(value) is float:
        return value
    raise SourceError(where, f"expected one number, found a {type(value).__name__}", _LEAVE, code=BAD_OPTIMIZER)


def _num_steps(
    steps: Mapping[str, float], groups: Sequence[Mapping[object, object]], where: str, fqns: Mapping[str, str]
) -> int:
    """Return the steps that the optimizer took: of each parameter, or, as older versions have it, of each group."""
    if steps:
        if lacking := sorted(fqns.keys() - steps.keys()):
            raise SourceError(where, f"{lacking[0]!r} has no step.pt, others have", _LEAVE, code=BAD_OPTIMIZER)
        found = set(steps.values())
    else:
        found = {read_number(group.get("step"), f"{where}: param_groups: step") for group in groups}
    if len(found) > 1:
        problem = f"parameters took different numbers of steps, from {min(found)} to {max(found)}"
        raise SourceError(where, problem, _LEAVE, code=BAD_OPTIMIZER)
    count = found.pop()
    if not (0 <= count < 1 << 53 and count == int(count)):
        raise SourceError(where, f"expected a count of steps, found {count}", _LEAVE, code=BAD_OPTIMIZER)
    return int(count)


def _groups(state: Mapping[object, object], where: str) -> list[Mapping[object, object]]:
    found = state.get("param_groups")
    if not isinstance(found, list) or not found or not all(isinstance(group, dict) for group in found):
        raise SourceError(where, "expected param_groups, those of AdamW", _LEAVE, code=BAD_OPTIMIZER)
    for group in found:
        other = [f"{name}={value}" for name, value in _NOT_ADAMW.items() if group.get(name) is value]
        if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
            other.append("decoupled_weight_decay=False")
        if other:
            raise SourceError(where, f"expected AdamW, found {', '.join(other)}", _LEAVE, code=BAD_OPTIMIZER)
    return found


def _by_options(
    groups: Sequence[Mapping[object, object]],
    ranks: Sequence[Mapping[object, object]],
    fqns: Mapping[str, str],
    where: str,
) -> tuple[ParameterGroup, ...]:
    """Return a group for all parameters, or, if options differ, those whose parameters the ranks' files list."""
    found = [_group(group, where) for group in groups]
    if len(set(found)) == 1:
        return (found[0],)
    members: list[set[str]] = [set() for _ in found]
    for rank in ranks:
        shapes = rank.get("param_shapes")
        for listed, fqns_here in zip(shapes if isinstance(shapes, list) else (), members, strict=False):
            fqns_here.update(fqns[name] for name in listed if name in fqns)
    known = [fqn for listed in members for fqn in listed]
    if sorted(known) != sorted(fqns.values()):
        problem = (
            "groups of parameters have different options, and mp_rank files do not say which parameter is in which"
        )
        raise SourceError(where, problem, _LEAVE, code=BAD_OPTIMIZER)
    alike: dict[ParameterGroup, list[str]] = {}
    for group, listed in zip(found, members, strict=True):
        alike.setdefault(group, []).extend(listed)
    return tuple(
        ParameterGroup(
            beta1=group.beta1, beta2=group.beta2, eps=group.eps, weight_decay=group.weight_decay,
            fqns=tuple(sorted(listed)),
        )
        for group, listed in alike.items()
    )  # fmt: skip


def _group(options: Mapping[object, object], where: str) -> ParameterGroup:
    match tuple(options.get(name) for name in _OPTIONS):
        case (
            (float() as beta1, float() as beta2) | [float() as beta1, float() as beta2],
            int() | float() as eps,
            int() | float() as weight_decay,
        ):
            return ParameterGroup(beta1=beta1, beta2=beta2, eps=float(eps), weight_decay=float(weight_decay))
    problem = f"expected {', '.join(_OPTIONS)} of AdamW, found {str(dict(options))[:120]}"
    raise SourceError(f"{where}: param_groups", problem, _LEAVE, code=BAD_OPTIMIZER)


def _max_norm(state: Mapping[object, object], ranks: Sequence[Mapping[object, object]], where: str) -> float:
    """Return the norm to which gradients are clipped; 0 if they are not."""
    value = state.get("clip_grad")
    for config in _configs(ranks) if value is None else ():
        value = config.get("gradient_clipping", 0.0)
    found = read_number(value or 0.0, f"{where}: clip_grad")
    if not 0 <= found < float("inf"):
        raise SourceError(f"{where}: clip_grad", f"expected a norm, found {found}", _LEAVE, code=BAD_OPTIMIZER)
    return float(found)


def _configs(ranks: Sequence[Mapping[object, object]]) -> Iterator[Mapping[object, object]]:
    return (config for rank in ranks if isinstance(config := rank.get("ds_config"), dict))


def _rate(rate: object) -> LearningRate | None:
    if not isinstance(rate, int | float) or not 0 <= rate <= LARGEST_RATE:
        return None
    return LearningRate(peak=float(rate), warmup_steps=0, decay="constant", decay_steps=0, minimum=0.0)


def _dict(value: object, where: str) -> Mapping[object, object]:
    if not isinstance(value, dict):
        raise SourceError(where, f"expected a dict, found a {type(value).__name__}", _LEAVE, code=BAD_OPTIMIZER)
    return value
