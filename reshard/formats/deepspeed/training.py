"""How far a Universal Checkpoint was trained, and the options of its AdamW.

Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, runtime/engine.py, runtime/zero/stage_1_and_2.py, ops/adam.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manifests.schema import TrainingState
from reshard.archives.tensors import read_object
from reshard.formats.assemble import (
    DECOUPLED,
    bad_optimizer,
    check_adamw,
    checked_state,
    groups_in,
    num_steps_of,
    read_number,
)
from reshard.formats.dcp.algorithms import adamw_of, read_adamw
from reshard.formats.deepspeed.names import Saved, Step

STATE_NAME = "zero/optimizer_state.pt"
_RANK = re.compile(r"mp_rank_\d+(?:_\d+)?_model_states\.pt|zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")


def is_rank_file(name: str) -> bool:
    """Return whether a file has what a rank counts: steps, and which parameters are in which group."""
    return _RANK.fullmatch(name) is not None


def training_state(step: Step, saved: Saved, fqns: Mapping[str, str]) -> tuple[TrainingState, tuple[str, ...]]:
    """Return how far the checkpoint was trained, and what of its training is left out.

    `fqns` are the names of parameters here. The learning rate is that of the next step, and stays: DeepSpeed does not
    have its schedule as the runner does.
    """
    where = f"{step.where}/{STATE_NAME}"
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
    numbers = _group_numbers(groups, ranks, fqns, where)
    optimizer, rate = adamw_of(groups, numbers, _max_norm(state, ranks, where), where)
    trained = TrainingState(
        step=_num_steps(saved.steps, groups, where, fqns),
        num_tokens=0,
        dtype="F32",
        learning_rate=rate,
        optimizer=optimizer,
    )
    return checked_state(trained, where), check_values(state, by_file, trained.step, where)


def _num_steps(
    steps: Mapping[str, float], groups: Sequence[Mapping[object, object]], where: str, fqns: Mapping[str, str]
) -> int:
    """Return the steps that the optimizer took: of each parameter, or, as older versions have it, of each group."""
    if steps:
        if lacking := sorted(fqns.keys() - steps.keys()):
            raise bad_optimizer(where, f"{lacking[0]!r} has no step.pt, others have")
        counts = set(steps.values())
    else:
        counts = {read_number(group.get("step"), f"{where}: param_groups: step") for group in groups}
    return num_steps_of(counts, where)


def _group_numbers(
    groups: Sequence[Mapping[object, object]],
    ranks: Sequence[Mapping[object, object]],
    fqns: Mapping[str, str],
    where: str,
) -> dict[str, int]:
    """Return the number of each parameter's group: any, or, if options or rates differ, as the ranks' files list."""
    if len(set(read_adamw(groups, where))) == 1:
        return dict.fromkeys(fqns.values(), 0)
    members: list[set[str]] = [set() for _ in groups]
    for rank in ranks:
        shapes = rank.get("param_shapes")
        for listed, fqns_here in zip(shapes if isinstance(shapes, list) else (), members, strict=False):
            fqns_here.update(fqns[name] for name in listed if name in fqns)
    assigned = [fqn for listed in members for fqn in listed]
    if sorted(assigned) != sorted(fqns.values()):
        problem = (
            "groups of parameters differ in options or learning rates, and mp_rank files do not say which parameter is "
            "in which"
        )
        raise bad_optimizer(where, problem)
    return {fqn: number for number, listed in enumerate(members) for fqn in listed}


def _max_norm(state: Mapping[object, object], ranks: Sequence[Mapping[object, object]], where: str) -> float:
    """Return the norm to which gradients are clipped; 0 if they are not."""
    value = state.get("clip_grad")
    for config in _configs(ranks) if value is None else ():
        value = config.get("gradient_clipping", 0.0)
    norm = read_number(value or 0.0, f"{where}: clip_grad")
    if norm < 0:
        raise bad_optimizer(f"{where}: clip_grad", f"expected a norm, found {norm}")
    return float(norm)


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


# Note [Values of ranks]: they agree with the tensors, or are named as left out. Nothing here depends on the release
# (`ds_version`), on how ranks reduced gradients (`sparse_tensor_module_names`) or on `dynamic_loss_scale`: the state of
# AdamW is of gradients without a scale. `universal_checkpoint_info` and `cat_dim` say how slices were merged that are
# whole here. `global_samples` counts sequences whose length is in no file.
_COUNTS = ("global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size")
_OF_ALL_RANKS = (*_COUNTS, "checkpoint_parallel_dimensions", "ds_config")
_READ = {
    *_OF_ALL_RANKS, "module", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments",
    "buffer_names", "iteration", "ds_version", "universal_checkpoint_info", "sparse_tensor_module_names",
}  # fmt: skip
_OF_OPTIMIZER = {
    "loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage", "ds_version", "group_paddings",
    "param_alignment_paddings", "partition_count", "param_groups",
}  # fmt: skip
_OTHER_MODELS = ("compression_training", "curriculum_learning", "progressive_layer_drop", "sparse_attention")


def check_values(
    state: Mapping[object, object], ranks: Mapping[str, Mapping[object, object]], num_steps: int, where: str
) -> tuple[str, ...]:
    """Return what is left out of an optimizer's state and of the ranks' files, by name, after `num_steps` of it.

    See Note [Values of ranks].
    """
    if unread := sorted(str(name) for name in state.keys() - _OF_OPTIMIZER):
        raise bad_optimizer(where, f"has {unread[0][:80]!r}, which is not read")
    for name in _OF_ALL_RANKS:
        values = [rank.get(name) for rank in ranks.values()]
        if any(value != values[0] for value in values):
            raise bad_optimizer(where, f"ranks have different {name!r}, from {str(values[0])[:80]} on")
    skipped = 0.0
    for rank in list(ranks.values())[:1]:
        counts = {name: read_number(rank[name], f"{where}: {name}") for name in _COUNTS if name in rank}
        skipped, steps = counts.get("skipped_steps", 0), counts.get("global_steps", num_steps)
        if steps - skipped != num_steps:
            problem = f"ranks count {steps} steps, {skipped} of them skipped, and the optimizer took {num_steps}"
            raise bad_optimizer(where, problem)
        num_models = sum(name.startswith("mp_rank_") for name in ranks)
        if num_models and counts.get("mp_world_size", num_models) != num_models:
            raise bad_optimizer(where, f"expected mp_rank files of {counts['mp_world_size']} ranks, found {num_models}")
    if ranks and state.get("overflow") and not skipped:
        raise bad_optimizer(where, "the last step overflowed, and none was skipped")
    return tuple(dict.fromkeys(_left_out(state, list(ranks.values()))))


def _left_out(state: Mapping[object, object], ranks: Sequence[Mapping[object, object]]) -> Iterator[str]:
    scale = getattr(state.get("loss_scaler"), "fields", {}).get("cur_scale", 1.0)
    if scale != 1.0:
        yield "loss_scaler"
    for rank in ranks:
        yield from sorted(
            str(name) for name, value in rank.items() if name not in _READ and value not in (None, {}, [])
        )
        if isinstance(config := rank.get("ds_config"), dict):
            yield from (f"ds_config: {name}" for name in _OTHER_MODELS if config.get(name))
