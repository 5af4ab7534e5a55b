"""How far a Universal Checkpoint was trained, and the options of its AdamW.

Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, runtime/engine.py, runtime/zero/stage_1_and_2.py, ops/adam.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manifests.schema import OptimizerState, ParameterGroup, TrainingState
from reshard.archives.tensors import read_object
from reshard.formats.adamw import (
    DECOUPLED,
    bad_optimizer,
    by_options,
    check_adamw,
    checked_state,
    constant_rate,
    group_of,
    groups_in,
    num_steps_of,
    read_number,
)
from reshard.formats.deepspeed.step import Saved, Step
from reshard.formats.deepspeed.values import check_values

STATE_NAME = "zero/optimizer_state.pt"
_RANK = re.compile(r"mp_rank_\d+(?:_\d+)?_model_states\.pt|zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")


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
            raise bad_optimizer(where, "no such file, which has the options of the optimizer")
        state = _dict(read_object(step.file(STATE_NAME), STATE_NAME), where)
    files = {name: step.file(name) for name in step.names() if is_rank_file(name)}
    by_file = {name: _dict(read_object(file, "state"), str(file)) for name, file in files.items()}
    ranks = list(by_file.values())
    groups = groups_in(state, where)
    chosen = [config["optimizer"] for config in _configs(ranks) if isinstance(config.get("optimizer"), dict)]
    kinds = {str(optimizer.get("type", "adamw")).lower() for optimizer in chosen}
    if other := sorted(kinds - {"adam", "adamw"}):
        raise bad_optimizer(where, f"expected AdamW, found {other[0][:80]!r} (ds_config)")
    for group in groups if _decays_as_l2(ranks) else ():
        check_adamw({DECOUPLED: False, **group}, where)  # a trainer's own optimizer says it itself
    rates = {group.get("lr") for group in groups if isinstance(group.get("lr"), int | float)}
    rate = rates.pop() if len(rates) == 1 else None
    found = TrainingState(
        step=_num_steps(saved.steps, groups, where, fqns),
        num_tokens=0,
        dtype="F32",
        learning_rate=constant_rate(rate),
        optimizer=OptimizerState(
            name="AdamW", max_norm=_max_norm(state, ranks, where), groups=_by_options(groups, ranks, fqns, where)
        ),
    )
    return checked_state(found, where), check_values(saved.partition or state, by_file, found.step, where)


def _num_steps(
    steps: Mapping[str, float], groups: Sequence[Mapping[object, object]], where: str, fqns: Mapping[str, str]
) -> int:
    """Return the steps that the optimizer took: of each parameter, or, as older versions have it, of each group."""
    if steps:
        if lacking := sorted(fqns.keys() - steps.keys()):
            raise bad_optimizer(where, f"{lacking[0]!r} has no step.pt, others have")
        found = set(steps.values())
    else:
        found = {read_number(group.get("step"), f"{where}: param_groups: step") for group in groups}
    return num_steps_of(found, where)


def _by_options(
    groups: Sequence[Mapping[object, object]],
    ranks: Sequence[Mapping[object, object]],
    fqns: Mapping[str, str],
    where: str,
) -> tuple[ParameterGroup, ...]:
    """Return a group for all parameters, or, if options differ, those whose parameters the ranks' files list."""
    found = [group_of(group, where) for group in groups]
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
        raise bad_optimizer(where, problem)
    return by_options(zip(found, members, strict=True))


def _max_norm(state: Mapping[object, object], ranks: Sequence[Mapping[object, object]], where: str) -> float:
    """Return the norm to which gradients are clipped; 0 if they are not."""
    value = state.get("clip_grad")
    for config in _configs(ranks) if value is None else ():
        value = config.get("gradient_clipping", 0.0)
    found = read_number(value or 0.0, f"{where}: clip_grad")
    if found < 0:
        raise bad_optimizer(f"{where}: clip_grad", f"expected a norm, found {found}")
    return float(found)


def _decays_as_l2(ranks: Sequence[Mapping[object, object]]) -> bool:
    """Return whether the config asks for Adam with L2 decay: "Adam" is AdamW, with torch_adam too, by default."""
    for config in _configs(ranks):
        match config.get("optimizer"):
            case {"type": str(kind), "params": {"adam_w_mode": mode}} if kind.lower() == "adam" and not mode:
                return True
    return False


def _configs(ranks: Sequence[Mapping[object, object]]) -> Iterator[Mapping[object, Any]]:
    return (config for rank in ranks if isinstance(config := rank.get("ds_config"), dict))


def _dict(value: object, where: str) -> Mapping[object, object]:
    if not isinstance(value, dict):
        raise bad_optimizer(where, f"expected a dict, found a {type(value).__name__}")
    return value
