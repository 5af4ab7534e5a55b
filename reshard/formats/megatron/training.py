"""How far a checkpoint of Megatron-Core was trained, and the state and options of its distributed optimizer.

Of its formats, `fully_reshardable` has a tensor for each parameter, as the model has it. `dp_reshardable`, the default,
has flat buffers of the ranks that saved it.

Source: megatron-core 0.16.1, optimizer/distrib_optimizer.py and optimizer/__init__.py; Megatron-LM,
megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from manifests.errors import SourceError
from manifests.schema import MOMENTS, BatchSizes, OptimizerState, ParameterGroup, TrainedDtype, TrainingState
from reshard.archives.dcp import DcpTensor
from reshard.formats.assemble import (
    DECOUPLED,
    OF_OPTIMIZER,
    OPTIMIZER,
    bad_optimizer,
    check_adamw,
    checked_state,
    common_rate,
    group_of,
    groups_in,
    num_steps_of,
    read_number,
    without_optimizer,
)
from reshard.formats.megatron.names import Common
from stores.bundles import TensorAt

MASTERS = "param"  # weights in float32, beside those that the model computes with
RESHARDABLE, _OF_RANKS = "fully_reshardable", "dp_reshardable"
_ENTRY = re.compile(rf"(?:chained_\d{{1,3}}\.)?{OPTIMIZER}\.state\.({'|'.join((MASTERS, *MOMENTS))})\.(.+)")
_DTYPES: Mapping[str, TrainedDtype] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
# With this argument, Megatron decays norms that it calls `q_layernorm` or `k_layernorm`: of latents that of queries,
# unless it is fused into the projection after it.
DECAYS_QK_NORMS = "apply_wd_to_qk_layernorm"
QK_NORM, _LATENT_NORM = re.compile(r"\.[qk]_norm\."), re.compile(r"\.q_a_layernorm\.")
_FUSED_NORM = ".linear_q_up_proj.layer_norm_weight"


def _resave() -> str:
    saving = "load it in Megatron-LM and save it with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    return f"{saving}; {without_optimizer()}"


def find_optimizer(common: Common, tensors: Iterable[DcpTensor], where: str) -> dict[str, dict[str, DcpTensor]] | None:
    """Return the optimizer's tensors by kind, under the names of the model's: AdamW's state, and master weights."""
    by_kind: dict[str, dict[str, DcpTensor]] = {kind: {} for kind in (MASTERS, *MOMENTS)}
    others = []
    for tensor in tensors:
        if match := _ENTRY.fullmatch(tensor.name):
            by_kind[match[1]][match[2]] = tensor
        elif OF_OPTIMIZER.match(tensor.name):
            others.append(tensor.name)
    if not common.values.get(OPTIMIZER) and not others and not any(by_kind.values()):
        return None
    content = common.values.get("content_metadata")
    for optimizer in _optimizers(common):
        if (kind := optimizer.get("param_state_sharding_type")) != RESHARDABLE:
            raise _not_reshardable(common.place, kind)
        if isinstance(content, dict) and (other := content.get("distrib_optim_sharding_type", kind)) != kind:
            raise _not_reshardable(common.place, f"{kind}, and content_metadata {other}")
    if others:
        problem = f"has no place in optimizer state of {RESHARDABLE!r}"
        raise SourceError(f"{where}: {others[0][:80]!r}", problem, _resave(), code="source.megatron-optimizer")
    return by_kind


def training_state(
    common: Common,
    arguments: Mapping[str, Any],
    moments: Mapping[str, TensorAt],
    names: Collection[str],
    weights_dtype: str,
) -> TrainingState:
    """Return how far the checkpoint was trained. Of `moments`, those of one kind, come the shapes of its parameters.

    `names` are those that Megatron has for them.
    The learning rate is that of the next step, and stays: Megatron's schedule counts samples.
    """
    place = f"{common.place}: {OPTIMIZER}"
    groups = [group for optimizer in _optimizers(common) for group in groups_in(_inner(optimizer, place), place)]
    counted = [read_number(group["step"], f"{place}: step") for group in groups if group.get("step") is not None]
    if not counted:
        raise bad_optimizer(place, "found no count of its steps")
    step, last = num_steps_of(counted, place), common.values.get("iteration")
    if last is not None and step > read_number(last, f"{common.place}: iteration"):  # iterations may be skipped
        problem = f"took {step} steps, and the checkpoint is of iteration {last}"
        raise bad_optimizer(place, problem)
    for group in groups if arguments.get(DECOUPLED) is False else ():
        check_adamw({DECOUPLED: False, **group}, place)
    batch = _batch(arguments)
    samples = arguments.get("consumed_train_samples")
    clip = float(read_number(arguments.get("clip_grad", 1.0), f"{common.place}: args.clip_grad"))
    state = TrainingState(
        step=step,
        num_tokens=samples * batch.seq_len if batch and type(samples) is int and samples > 0 else 0,
        dtype="F32",
        compute_dtype=_DTYPES.get(weights_dtype) if weights_dtype != "F32" else None,
        optimizer=OptimizerState(
            name="AdamW",
            max_norm=max(clip, 0.0),  # Megatron clips to a norm above 0
            groups=_groups(groups, arguments, _undecayed(moments, arguments, names), place),
        ),
        learning_rate=common_rate([group.get("lr") for group in groups], place),
        batch=batch,
    )
    return checked_state(state, place)


def _optimizers(common: Common) -> list[Mapping[object, object]]:
    """Return the optimizers: one, or, if there are experts, one of them and one of all other parameters."""
    saved = common.values.get(OPTIMIZER)
    if not isinstance(saved, dict):
        raise bad_optimizer(common.place, f"found no {OPTIMIZER!r}")
    chained = [optimizer for key, optimizer in saved.items() if type(key) is int]
    return [optimizer for optimizer in chained or [saved] if isinstance(optimizer, dict)]


def _inner(state: Mapping[object, object], place: str) -> Mapping[object, object]:
    options = state.get(OPTIMIZER)
    if not isinstance(options, dict):
        raise bad_optimizer(place, f"found no {OPTIMIZER!r}, the options of groups")
    return options


def _groups(
    saved: list[Mapping[object, object]], arguments: Mapping[str, Any], undecayed: tuple[str, ...], place: str
) -> tuple[ParameterGroup, ...]:
    """Return a group for all parameters; or, if some have no weight decay, two: those are the `undecayed` ones.

    A checkpoint does not say which parameter is in which group; groups of experts repeat those of other parameters.
    """
    alike = {group_of(group, place): group.get("wd_mult") for group in saved}
    if len(alike) == 1:
        return (next(iter(alike)),)
    decayed = [group for group in alike if group.weight_decay]
    bare = [group for group, factor in alike.items() if not group.weight_decay and factor == 0]
    if len(alike) != 2 or len(decayed) != 1 or replace(decayed[0], weight_decay=0.0) not in bare:
        problem = f"expected one weight decay, and none of 1-D parameters, found {[g.weight_decay for g in alike]}"
        raise bad_optimizer(f"{place}: param_groups", problem)
    if (std := arguments.get("embedding_init_method_std")) is not None:
        problem = "found no group of the embedding, which some releases decay and others do not"
        raise bad_optimizer(f"{place}: param_groups", f"{problem} with embedding_init_method_std {str(std)[:80]}")
    return decayed[0], replace(bare[0], fqns=undecayed)


def _undecayed(
    moments: Mapping[str, TensorAt], arguments: Mapping[str, Any], names: Collection[str]
) -> tuple[str, ...]:
    """Return the parameters that Megatron does not decay if there are such: 1-D ones, but for some norms."""
    decayed = [QK_NORM] if arguments.get(DECAYS_QK_NORMS) else []
    if decayed and not any(name.endswith(_FUSED_NORM) for name in names):
        decayed.append(_LATENT_NORM)
    lines = (fqn for fqn, moment in moments.items() if len(moment.shape) == 1)
    return tuple(sorted(fqn for fqn in lines if not any(norm.search(fqn) for norm in decayed)))


def _batch(arguments: Mapping[str, Any]) -> BatchSizes | None:
    match [arguments.get(name) for name in ("global_batch_size", "micro_batch_size", "seq_length")]:
        case (int() as whole, int() as micro, int() as length) if min(whole, micro, length) > 0 and not whole % micro:
            return BatchSizes(global_batch=whole, microbatch=micro, seq_len=length)
    return None


def _not_reshardable(place: str, kind: object) -> SourceError:
    problem = f"expected {RESHARDABLE!r} optimizer state, of a tensor for each parameter, found {str(kind)[:80]!r}"
    if kind == _OF_RANKS:
        problem = f"has {kind!r} optimizer state: flat buffers of the ranks that saved it, without names of parameters"
    code = "source.megatron-dp-reshardable" if kind == _OF_RANKS else "source.megatron-optimizer"
    return SourceError(f"{place}: {OPTIMIZER}", problem, _resave(), code=code)
