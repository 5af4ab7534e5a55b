"""A checkpoint of DeepSpeed's and the model's config.json: a PipelineModule's layers, or a Universal Checkpoint.

Source: DeepSpeed 0.19.8, runtime/pipe/module.py, runtime/engine.py and checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from manifests.errors import ModelError, SourceError
from manifests.index import OTHER_WEIGHTS
from manifests.models import ModelShape
from manifests.schema import MOMENTS, Holds
from reshard.archives.names import LATEST_NAMES
from reshard.archives.tensors import read_archive, read_object
from reshard.formats.assemble import OPTIMIZER, ModelTensors, bad_optimizer, config_in, read_model_config, read_number
from reshard.formats.auxiliary import auxiliary_files
from reshard.formats.deepspeed.names import Saved, Step, find_step, fqns_of_layers
from reshard.formats.deepspeed.training import STATE_NAME, is_rank_file, training_state
from reshard.formats.table import ListedTensor, Listing, OpenOptions
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.source_index import SUFFIX
from stores.address import is_url
from stores.base import Folder
from stores.bundles import TensorAt
from stores.workers import each_of

_LAYER = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,4}))?-model_states\.pt")
_PARAMETER = re.compile(r"zero/([^/]+)/(fp32|exp_avg|exp_avg_sq|step)\.pt")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
_NUMBERED = re.compile(r"(\d{1,6})\.(.+)")
_PARTITION_SUFFIX = "_optim_states.pt"  # of a rank, by ZeRO and its optimizers of bfloat16 and float16
# Beside a tensor: where slices were concatenated; whether rows that pad a vocabulary were cut off; of several experts.
_OF_PARAMETER = {"param", "cat_dim", "vocab_tensor", "ep_is_expert_param"}
_FP32 = "fp32"
_BESIDE = (*LATEST_NAMES, "zero_to_fp32.py", "zero_to_torch.py")  # what DeepSpeed writes beside its steps
_AGAIN = "the checkpoint is incomplete or damaged; copy or save it again"


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Read the tables of a DeepSpeed checkpoint and check that its tensors cover the model exactly.

    Weights are those of the layers of a PipelineModule, or, with AdamW's state, those of a Universal Checkpoint.
    """
    step = find_step(folder)
    config, where = read_model_config(config_in(step.root), options.description), step.where
    saved = read_step(step)
    if config.shape is None and saved.layers is not None:
        problem = "is known by the names of its tensors, and layers of a PipelineModule have names of their own"
        hint = "use DeepSpeed's Universal Checkpoint of transformers' model, or save a Hugging Face folder"
        raise ModelError(str(config.file), problem, hint, code="model.layers-without-names")
    fqns = _fqns_of(saved, config.shape, where)
    copies = [": ".join(layer) for name, layer in (saved.layers or {}).items() if name not in fqns]
    saved = replace(saved, weights={name: tensor for name, tensor in saved.weights.items() if name in fqns})
    model = ModelTensors.cover(_named(saved, saved.weights, fqns, config.shape), config, options, where)
    moments: dict[Holds, dict[str, TensorAt]] = {}
    trained, unread = None, tuple[str, ...]()
    if saved.moments and OPTIMIZER not in options.drop:
        for kind, parameters in saved.moments.items():
            moments[kind] = model.cover_state(kind, _named(saved, parameters, fqns, model.shape))
        named = {name: model.fqn_of(fqns[name]) for name in saved.weights}
        here = {name: fqn for name, fqn in named.items() if fqn in model.weights}  # not dropped
        trained, unread = training_state(step, saved, here)
    files = [step.path(name) for name in saved.files]
    left_out = (*_left_out(step, set(files), is_trained=trained is not None), *unread, *copies)
    checkpoint = model.checkpoint(step.root, files, _auxiliary(step, set(files)), left_out)
    return replace(checkpoint, moments=moments, trained=trained)


def list_tensors(folder: Folder) -> Listing:
    """Return the tensors of a step under DeepSpeed's names, with no need of a config.json."""
    saved = read_step(find_step(folder, needs_config=False))
    tensors = tuple(
        ListedTensor(name=name, part=part, dtype=tensor.dtype, shape=tensor.shape)
        for part, by_name in (("model", saved.weights), *saved.moments.items())
        for name, tensor in by_name.items()
    )
    return Listing(format="deepspeed", title="DeepSpeed", num_files=len(saved.files), tensors=tensors)


def read_step(step: Step) -> Saved:
    """Return the tensors of a step: those of layers, or of a Universal Checkpoint."""
    names = step.names()
    layers = [name for name in names if _LAYER.fullmatch(name)]
    parameters = [name for name in names if _PARAMETER.fullmatch(name)]
    if layers and parameters:
        problem = f"has layers ({layers[0]}) and a Universal Checkpoint ({parameters[0]})"
        hint = "keep one of them in a folder of its own"
        raise SourceError(step.where, problem, hint, code="source.two-checkpoints")
    if layers:
        return _read_layers(step, layers)
    if parameters:
        return _read_universal(step, parameters)
    if any(name.endswith(_PARTITION_SUFFIX) for name in names):
        problem = "has partitions of ZeRO, expected layers of a PipelineModule or a Universal Checkpoint"
        raise SourceError(step.where, problem, _convert(step), code="source.zero-partitions")
    problem = "has neither layers of a PipelineModule nor a Universal Checkpoint"
    hint = "save the model with transformers, or as a PipelineModule, or convert it to a Universal Checkpoint"
    raise SourceError(step.where, problem, hint, code="source.no-layers")


def _convert(step: Step) -> str:
    """Return how to convert partitions, from where DeepSpeed is installed."""
    place = "STEP" if is_url(step.where) else shlex.quote(step.where)
    command = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state"
    hint = f"{command} --input_folder {place} --output_folder {place}_universal; then pack {place}_universal"
    if place == "STEP":
        hint = f"copy the folder to this machine as STEP; {hint}"
    if step.tag and any(name.endswith(SUFFIX) and "/" not in name for name in step.root.names()):
        hint += f"; or, for the weights in {step.root}/*{SUFFIX} alone, without optimizer state, move {step.tag}/ and "
        hint += f"{LATEST_NAMES[-1]} elsewhere"
    return hint


def _read_layers(step: Step, names: Sequence[str]) -> Saved:
    by_number: dict[int, str] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        assert match is not None, "filtered by the caller"
        if match[2] is not None and int(match[2]) > 0:
            problem = "is a tensor-parallel slice of a layer, which is not supported"
            hint = "save the checkpoint with a model-parallel degree of 1"
            raise SourceError(str(step.file(name)), problem, hint, code="source.layer-slices")
        number = int(match[1])
        if number in by_number:
            problem = f"is layer {number}, which {by_number[number]} is too"
            raise SourceError(str(step.file(name)), problem, "remove one of them", code="source.tensor-twice")
        by_number[number] = name
    weights: dict[str, TensorAt] = {}
    layers: dict[str, tuple[str, str]] = {}
    numbers = sorted(by_number)
    files = [step.file(by_number[number]) for number in numbers]
    for number, (_, tensors) in zip(numbers, each_of(files, read_archive), strict=True):
        for tensor in tensors:
            name = f"{number}.{tensor.name}"
            weights[name] = tensor
            layers[name] = (by_number[number], tensor.name)
    return Saved(weights=weights, layers=layers, files=tuple(by_number[number] for number in numbers))


def _read_universal(step: Step, names: Sequence[str]) -> Saved:
    values: dict[str, dict[str, object]] = {kind: {} for kind in (_FP32, *MOMENTS, "step")}
    files = {step.file(name): name for name in names}
    for file, value in each_of(files, partial(read_object, name="param")):
        match = _PARAMETER.fullmatch(files[file])
        assert match is not None, "filtered by the caller"
        values[match[2]][match[1]] = value.get("param") if isinstance(value, dict) else value
        if isinstance(value, dict) and match[2] != "step":
            if value.get("ep_is_expert_param"):
                problem = "is a weight of several experts, which is not supported"
                raise SourceError(str(file), problem, code="source.bad-universal")
            if unread := sorted(str(key) for key in value.keys() - _OF_PARAMETER):
                raise SourceError(str(file), f"has {unread[0][:80]!r}, which is not read", code="source.bad-universal")
    flat = set()
    tensors: dict[str, dict[str, TensorAt]] = {kind: {} for kind in (_FP32, *MOMENTS)}
    for kind, by_name in tensors.items():
        for name, value in values[kind].items():
            if not isinstance(value, TensorAt) or value.dtype != "F32":
                problem = f"expected a float32 tensor 'param', found {_kind(value)}"
                raise SourceError(f"{step.where}/zero/{name}/{kind}.pt", problem, _AGAIN, code="source.bad-universal")
            by_name[name] = value
            if len(value.shape) == 1:
                flat.add(name)
    steps = {name: read_number(value, f"{step.where}/zero/{name}/step.pt") for name, value in values["step"].items()}
    weights = tensors[_FP32]
    layers = _layers_of(weights) if any(map(_NUMBERED.fullmatch, weights)) else None
    moments: dict[Holds, Mapping[str, TensorAt]] = {holds: tensors[holds] for holds in MOMENTS if tensors[holds]}
    if len(moments) == 1:
        problem = f"has {next(iter(moments))} and no {next(kind for kind in MOMENTS if kind not in moments)}"
        raise bad_optimizer(step.where, problem)
    return Saved(
        weights=weights, layers=layers, moments=moments, steps=steps, flat=frozenset(flat), files=tuple(names)
    )  # fmt: skip


def _layers_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the layer of each name: tied modules first, since the input embedding is the one that is tied."""
    layers: dict[str, tuple[int, str, str]] = {}
    for name in names:
        if tied := _TIED.fullmatch(name):
            layers[name] = (-1, f"tied_modules.{tied[1]}", tied[2])
        elif numbered := _NUMBERED.fullmatch(name):
            layers[name] = (int(numbered[1]), f"layer {int(numbered[1])}", numbered[2])
        else:
            layers[name] = (1 << 30, name, name)  # refused: a layer of unknown names
    ordered = sorted(layers.items(), key=lambda item: item[1][0])
    return {name: (layer, inside) for name, (_, layer, inside) in ordered}


def _fqns_of(saved: Saved, shape: ModelShape | None, where: str) -> dict[str, str]:
    """Return the FQN of each weight by DeepSpeed's name; what a tied layer has once more has none."""
    if saved.layers is None:
        return {name: name for name in saved.weights}
    assert shape is not None, "checked by the caller"
    layers: dict[str, list[str]] = {}
    for layer, name in saved.layers.values():
        layers.setdefault(layer, []).append(name)
    fqns = fqns_of_layers(layers, shape, where)
    return {name: fqns[inside] for name, inside in saved.layers.items() if inside in fqns}


def _named(
    saved: Saved, tensors: Mapping[str, TensorAt], fqns: Mapping[str, str], shape: ModelShape | None
) -> dict[str, TensorAt]:
    """Return the tensors by FQN, in the shapes that ZeRO 3 leaves out."""
    named: dict[str, TensorAt] = {}
    for name, tensor in tensors.items():
        fqn = fqns.get(name, name)
        expected = shape.tensors.get(fqn) if shape and name in saved.flat else None
        whole = expected if expected is not None and (prod(expected),) == tensor.shape else tensor.shape
        assert fqn not in named, "names are unique, and so are the FQNs of layers"
        named[fqn] = replace(tensor, name=fqn, shape=whole)
    return named


def _auxiliary(step: Step, read: set[str]) -> tuple[AuxiliaryAt, ...]:
    files = step.root.names()
    beside = {name for name in files if "/" in name or name in _BESIDE or name.endswith(OTHER_WEIGHTS)}
    return auxiliary_files(step.root, files, read | beside)


def _left_out(step: Step, read: set[str], *, is_trained: bool) -> Iterator[str]:
    """Yield the files that are not packed, and the folders of which nothing is."""
    states = (STATE_NAME, *(name for name in step.names() if is_rank_file(name))) if is_trained else ()
    understood = read | {step.path(name) for name in states}
    inside = f"{step.tag}/" if step.tag else "zero/"
    others: dict[str, None] = {}
    for name in step.root.names():
        if name in understood or name in _BESIDE:
            continue
        if "/" in name and not name.startswith(inside):
            others.setdefault(f"{name.partition('/')[0]}/")
        elif "/" in name or name.endswith(OTHER_WEIGHTS):
            others.setdefault(name)
    yield from others


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, TensorAt) else f"a {type(value).__name__}"
