"""Partitions of ZeRO 1 and 2: the float32 weights and AdamW's state of a group of parameters, flat, in parts by rank.

A parameter is a range of its group's vector, which is that of the first rank, of the second, and so on.

Source: DeepSpeed 0.19.8, utils/zero_to_fp32.py and runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import NoReturn

from manifests.errors import SourceError
from manifests.schema import MOMENTS, Holds
from manifests.slices import Slice
from reshard.archives.tensors import read_object
from reshard.formats.adamw import read_number
from reshard.formats.deepspeed.step import Saved, Step
from reshard.formats.rows import rows_of
from reshard.tensors.slices import merge_slices
from stores.bundles import TensorAt

_MODEL = re.compile(r"mp_rank_(\d{1,4})_model_states\.pt")
_PARTITION = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,4})_optim_states\.pt")
_NESTING = 5  # of the state of a parameter
_AGAIN = "the checkpoint is incomplete or damaged; copy or save it again"
_CONVERT = (
    "convert it with DeepSpeed: python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
    "--input_folder STEP --output_folder STEP_universal, and pack that"
)


def read_partitions(step: Step) -> Saved:
    """Return the parameters of a step in float32, with AdamW's state, and the model's other tensors as it has them.

    Raises:
        SourceError: tensor-parallel slices, partitions of another kind than ZeRO 1's and 2's, of other ranks, or
            ones that are not all of their parameters.
    """
    names = step.names()
    models = {int(match[1]): name for name in names if (match := _MODEL.fullmatch(name))}
    parts = {(int(match[2]), int(match[1])): name for name in names if (match := _PARTITION.fullmatch(name))}
    if 0 not in models or any("expp_rank" in name for name in names):
        _refuse_kind(step)
    model = _dict(read_object(step.file(models[0]), "model", _NESTING))
    if not _dict(model.get("module")):
        _refuse_kind(step)
    if others := sorted({rank for rank, _ in parts} | set(models))[1:]:
        problem = f"has slices of weights: those of tensor-parallel rank {others[0]}, too, which are not merged"
        raise SourceError(step.where, problem, _CONVERT, code="source.layer-slices")
    files = [parts[key] for key in sorted(parts)]
    states = [
        _dict(_dict(read_object(step.file(name), name, _NESTING)).get("optimizer_state_dict")) for name in files
    ]  # fmt: skip
    if not states or not all(_list(state.get("single_partition_of_fp32_groups")) for state in states):
        _refuse_kind(step)
    _check_ranks(step, [rank for _, rank in sorted(parts)], states, model)
    shapes = _groups_of(model.get("param_shapes"))
    options = [_dict(state.get("base_optimizer_state")) for state in states]
    if not shapes or not all(options):
        _refuse_kind(step)
    _check_equal(step, states)
    group = _Groups(step, shapes, states[0].get("param_alignment_paddings"))
    weights = group.parameters([_list(state["single_partition_of_fp32_groups"]) for state in states], "fp32")
    module = {
        name: tensor
        for name, tensor in _dict(model.get("module")).items()
        if isinstance(name, str) and isinstance(tensor, TensorAt)
    }
    untrained = _untrained(step, model, module, shapes)
    moments: dict[Holds, Mapping[str, TensorAt]] = {}
    for holds in MOMENTS:
        moments[holds] = group.parameters([_vectors(option, holds, len(shapes)) for option in options], holds)
    group.check_places(states)
    counts = _vectors(options[0], "step", len(shapes))
    steps = {
        name: read_number(count, f"{step.where}/{files[0]}: step")
        for names, count in zip(shapes, counts, strict=True)
        for name in names
    }
    return Saved(
        weights={**untrained, **weights},
        copies={name: tensor for name, tensor in module.items() if name in weights},
        files=(models[0], *files),
        moments=moments,
        steps=steps,
        options=(files[0], {**options[0], "clip_grad": states[0].get("clip_grad")}),
        partition=states[0],
    )


class _Groups:
    """Groups of parameters: their shapes by name, in the order in which the vector of the group has them."""

    def __init__(self, step: Step, shapes: Sequence[Mapping[str, tuple[int, ...]]], paddings: object) -> None:
        self._step, self._shapes = step, shapes
        self._paddings = _list(paddings) or [[0] * len(names) for names in shapes]

    def parameters(self, ranks: Sequence[list[object]], kind: str) -> dict[str, TensorAt]:
        """Return each parameter, given the vectors of the groups by rank."""
        found: dict[str, TensorAt] = {}
        if not all(len(vectors) == len(self._shapes) == len(self._paddings) for vectors in ranks):
            self._refuse(kind, f"expected {len(self._shapes)} groups of parameters in each rank's file")
        for number, (shapes, listed) in enumerate(zip(self._shapes, self._paddings, strict=True)):
            paddings = [count for count in _list(listed) if type(count) is int and count >= 0]
            vectors = [self._vector(vectors[number], kind) for vectors in ranks]
            total = sum(one.shape[0] for one in vectors)
            begins = accumulate((one.shape[0] for one in vectors), initial=0)
            parts = tuple(
                replace(one, part=Slice(offset=(begin,), shape=one.shape, whole_shape=(total,)))
                for one, begin in zip(vectors, begins, strict=False)
            )
            begin = 0
            if len(paddings) != len(shapes):
                self._refuse(kind, f"expected a padding for each of {len(shapes)} parameters")
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                count = prod(shape)
                if name in found or not count or begin + count > total:
                    self._refuse(
                        kind, f"{name!r} is not in the {total} elements of its group, or empty, or there twice"
                    )
                whole = merge_slices(rows_of(parts, [(begin, count)]))
                found[name] = replace(whole, name=name, shape=shape)
                begin += count + padding
            alignment = 2 * len(ranks)  # zero_to_fp32 checks the same
            if -(-begin // alignment) != -(-total // alignment):
                self._refuse(kind, f"expected {begin} elements of a group, and padding; found {total}")
        return found

    def check_places(self, states: Sequence[Mapping[object, object]]) -> None:
        """Compare where parameters are with what each rank says of its part; `parameters` has checked its vectors."""
        for rank, state in enumerate(states):
            vectors, paddings = _list(state["single_partition_of_fp32_groups"]), _list(state.get("group_paddings"))
            mappings = _list(state.get("param_slice_mappings"))
            moments = _vectors(_dict(state.get("base_optimizer_state")), MOMENTS[0], len(self._shapes))
            for number, (vector, moment) in enumerate(zip(vectors, moments, strict=True)):
                assert isinstance(vector, TensorAt), "checked in `parameters`"
                assert isinstance(moment, TensorAt), "checked in `parameters`"
                count, padded = vector.shape[0], moment.shape[0]
                if paddings and (len(paddings) != len(vectors) or paddings[number] != padded - count):
                    self._refuse("group_paddings", f"expected {padded - count} of rank {rank}, found {paddings}")
                places = {
                    name: _dict(getattr(place, "fields", None)) for name, place in _dict(mappings[number]).items()
                } if number < len(mappings) else None  # fmt: skip
                if places is not None and places != self._places(number, rank * padded, (rank + 1) * padded):
                    self._refuse("param_slice_mappings", f"rank {rank} has other parameters in group {number}")

    def _places(self, number: int, first: int, end: int) -> dict[str, dict[str, int]]:
        """Return the parameters of a group that are in a part of its vector, as DeepSpeed says where they are."""
        places, begin = dict[str, dict[str, int]](), 0
        paddings = _list(self._paddings[number])
        for (name, shape), padding in zip(self._shapes[number].items(), paddings, strict=True):
            low, high = max(begin, first), min(begin + prod(shape), end)
            if low < high:
                places[name] = {"start": low - first, "numel": high - low}
            assert isinstance(padding, int), "checked in `parameters`"
            begin += prod(shape) + padding
        return places

    def _vector(self, value: object, kind: str) -> TensorAt:
        if not isinstance(value, TensorAt) or value.dtype != "F32" or len(value.shape) != 1:
            self._refuse(kind, "expected a flat float32 tensor for each group")
        return value

    def _refuse(self, kind: str, problem: str) -> NoReturn:
        raise SourceError(f"{self._step.where}: {kind}", problem[:300], _AGAIN, code="source.bad-partitions")


def _untrained(
    step: Step,
    model: Mapping[object, object],
    module: Mapping[str, TensorAt],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
) -> dict[str, TensorAt]:
    """Return the buffers and frozen parameters of the module, whose other tensors are parameters of the groups.

    `frozen_param_fragments` has the frozen ones once more.
    """
    trained = {name: shape for group in shapes for name, shape in group.items()}
    frozen, shared = _dict(model.get("frozen_param_shapes")), _dict(model.get("shared_params"))
    buffers = _list(model.get("buffer_names"))
    for name, shape in (*trained.items(), *frozen.items()):
        if (tensor := module.get(str(name))) is None or tensor.shape != shape:
            _refuse_module(step, name, f"expected {shape} (shapes of parameters), found {tensor and tensor.shape}")
    for name, owner in shared.items():
        tensor, whole = module.get(str(name)), module.get(str(owner))
        if whole is None or not (owner in trained or owner in frozen):
            _refuse_module(step, name, f"shares {str(owner)[:80]!r}, which is not a parameter")
        if tensor is not None and (tensor.begin, tensor.shape) != (whole.begin, whole.shape):
            _refuse_module(step, name, f"shares {str(owner)[:80]!r}, and has a tensor of its own")
    for name in module.keys() - trained.keys() - shared.keys() - frozen.keys():
        if name not in buffers:
            _refuse_module(step, name, "is not a buffer, nor a parameter that is frozen or in a group")
    return {name: tensor for name, tensor in module.items() if name not in trained and name not in shared}


def _refuse_module(step: Step, name: object, problem: str) -> NoReturn:
    raise SourceError(f"{step.where}: module: {str(name)[:80]!r}", problem, _AGAIN, code="source.bad-partitions")


def _vectors(options: Mapping[object, object], kind: str, count: int) -> list[object]:
    """Return what AdamW has of each group."""
    state = _dict(options.get("state"))
    return [_dict(state.get(number)).get(kind) for number in range(count)]


def _groups_of(value: object) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters by group; empty if they are anything else."""
    groups = [_dict(group) for group in value] if isinstance(value, list) else []
    found = [
        {name: shape for name, shape in group.items() if isinstance(name, str) and _is_shape(shape)} for group in groups
    ]
    return found if [len(group) for group in found] == [len(group) for group in groups] else []  # type: ignore[return-value]


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


def _check_ranks(
    step: Step, ranks: Sequence[int], states: Sequence[Mapping[object, object]], model: Mapping[object, object]
) -> None:
    """Refuse partitions that are not those of all ranks: what another job left there, or did not write."""
    if (world := model.get("dp_world_size", len(ranks))) != len(ranks):
        problem = f"expected the partitions of {world} ranks (dp_world_size), found those of {len(ranks)}"
        raise SourceError(step.where, problem, _AGAIN, code="source.bad-partitions")
    degrees = _dict(model.get("checkpoint_parallel_dimensions"))
    if {model.get("mp_world_size", 1), degrees.get("tp_degree", 1), degrees.get("pp_degree", 1)} != {1}:
        problem = "has slices of weights, of ranks of tensor or pipeline parallelism, which are not merged"
        raise SourceError(step.where, problem, _CONVERT, code="source.layer-slices")
    for state in states:
        said = state.get("partition_count")
        counts = said if isinstance(said, list) else [said]
        if set(counts) != {len(ranks)} or list(ranks) != list(range(len(ranks))):
            problem = f"expected the partitions of {said} ranks, found those of ranks {str(list(ranks))[:80]}"
            raise SourceError(step.where, problem, _AGAIN, code="source.bad-partitions")


def _check_equal(step: Step, states: Sequence[Mapping[object, object]]) -> None:
    """Refuse partitions of ranks that took other steps, or with other options: they are of two saves."""
    facts = []
    for state in states:
        options = _dict(state.get("base_optimizer_state"))
        steps = {key: _dict(value).get("step") for key, value in _dict(options.get("state")).items()}
        counts = {key: read_number(count, f"{step.where}: step") for key, count in steps.items() if count is not None}
        of_parameters = {str(kind) for value in _dict(options.get("state")).values() for kind in _dict(value)}
        stage = getattr(state.get("zero_stage"), "args", None) or (state.get("zero_stage", 1),)
        if options.keys() - {"state", "param_groups"} or of_parameters - {*MOMENTS, "step"} or stage[0] not in (1, 2):
            _refuse_kind(step)
        equal = ("clip_grad", "param_alignment_paddings", "overflow", "dynamic_loss_scale", "loss_scaler")
        facts.append((counts, options.get("param_groups"), *(_plain(state.get(name)) for name in equal)))
    if any(each != facts[0] for each in facts):
        problem = "ranks have different steps or options of the optimizer"
        raise SourceError(step.where, problem, _AGAIN, code="source.bad-partitions")


def _refuse_kind(step: Step) -> NoReturn:
    problem = (
        "has weights or optimizer state that are not partitioned as by ZeRO 1 and 2, or are elastic, or of experts"
    )
    raise SourceError(step.where, problem, _CONVERT, code="source.zero-partitions")


def _plain(value: object) -> object:
    return getattr(value, "fields", value)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> Mapping[object, object]:
    return value if isinstance(value, dict) else {}
