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
from manifests.schema import MOMENTS, BatchSizes, TrainedDtype, TrainingState
from reshard.archives.dcp import DcpTensor
from reshard.formats.assemble import (
    DECOUPLED,
    OF_OPTIMIZER,
    OPTIMIZER,
    bad_optimizer,
    check_adamw,
    checked_state,
    groups_in,
    num_steps_of,
    read_number,
    without_optimizer,
)
from reshard.formats.dcp.algorithms import adamw_of, read_adamw
from reshard.formats.megatron.names import MTP_COPIES, Common
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
_EMBEDDINGS = (*MTP_COPIES, "lm_head.weight")  # the ends of what has the rate of --decoupled-lr


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
    numbers = _group_numbers(groups, arguments, moments, _undecayed(moments, arguments, names), place)
    optimizer, rate = adamw_of(groups, numbers, max(clip, 0.0), place)  # Megatron clips to a norm above 0
    state = TrainingState(
        step=step,
        num_tokens=samples * batch.seq_len if batch and type(samples) is int and samples > 0 else 0,
        dtype="F32",
        compute_dtype=_DTYPES.get(weights_dtype) if weights_dtype != "F32" else None,
        optimizer=optimizer,
        learning_rate=rate,
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


def _group_numbers(
    saved: list[Mapping[object, object]],
    arguments: Mapping[str, Any],
    moments: Collection[str],
    undecayed: tuple[str, ...],
    place: str,
) -> dict[str, int]:
    """Return the number of each parameter's group; first come those that have --lr and weight decay.

    A checkpoint does not say which parameter is in which group: the `undecayed` are in one without weight decay, if
    there is such; the embedding and the head in that of --decoupled-lr. Groups of experts repeat those of others.
    """
    read, decoupled = read_adamw(saved, place), arguments.get("decoupled_lr")
    marks = [
        bool(group.get("is_decoupled_lr")) or (decoupled is not None and group.get("max_lr") == decoupled)
        for group in saved
    ]
    alike = {group: number for number, group in enumerate(read) if not marks[number] or all(marks)}
    apart = {group: number for number, group in enumerate(read) if marks[number] and group not in alike}
    main = max(alike, key=lambda group: group.weight_decay)
    bare = [group for group in alike if group != main]
    is_known = all(replace(main, weight_decay=0.0) == group for group in bare) and len(apart) < 2
    is_known = is_known and all(saved[alike[group]].get("wd_mult") == 0 for group in bare)
    if not is_known or any(replace(group, rate_factor=main.rate_factor) != main for group in apart):
        shown = ", ".join(f"decay {group.weight_decay:g} at rate {group.rate_factor}" for group in (*alike, *apart))
        problem = f"expected one weight decay and rate, except of 1-D parameters and for --decoupled-lr, found {shown}"
        raise bad_optimizer(f"{place}: param_groups", problem)
    if bare and (std := arguments.get("embedding_init_method_std")) is not None:
        problem = "found no group of the embedding, which some releases decay and others do not"
        raise bad_optimizer(f"{place}: param_groups", f"{problem} with embedding_init_method_std {str(std)[:80]}")
    numbers = dict.fromkeys(moments, alike[main])
    numbers |= {fqn: alike[group] for group in bare for fqn in undecayed}
    numbers |= {fqn: apart[group] for group in apart for fqn in moments if fqn.endswith(_EMBEDDINGS)}
    return dict(sorted(numbers.items(), key=lambda item: item[1] != alike[main]))


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
