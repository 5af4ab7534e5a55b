"""export: from bundles to the layers of a DeepSpeed PipelineModule, or to a Universal Checkpoint.

Source: DeepSpeed 0.19.8, runtime/pipe/module.py, runtime/engine.py, runtime/base_optimizer.py and
checkpoint/universal_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from manifests.errors import ModelError, Parameter, UsageError
from manifests.models import ModelShape
from manifests.schema import MOMENTS
from reshard.archives.saved import SavedFile, SavedTensor, saved_dict, saved_step, saved_value
from reshard.formats.auxiliary import with_source_files
from reshard.formats.export import ExportPlan, adamw_options, cast_for_export, owned_tensors, publish_export
from reshard.formats.table import ExportOptions, ExportResult
from reshard.plans.pack_plan import OutputShard, without_header
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import DerivedFile, MemoryFile, read_blocks
from reshard.transforms.casts import FLOATS, cast_tensor
from stores.bundles import TensorAt
from stores.open import Address

# Note [Groups of a Universal Checkpoint]: its reader loads as many of a trainer's parameter groups as the file lists,
# and leaves the others as they were initialized, silently. Groups that a trainer does not have are not read.
_NUM_GROUPS = 64
_DS_VERSION = "0.19.8"  # the reader refuses files without one, and those of before 0.3.17
_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a name of a ModuleDict, and a part of a file's


def export(checkpoint: Checkpoint, out: Address, options: ExportOptions) -> ExportResult:
    """Write a folder that DeepSpeed loads: `latest`, or `latest_universal`, and the folder of a step.

    Layers have weights alone, as the manifest has them unless `dtype` says otherwise. A Universal Checkpoint has them
    in float32 and AdamW's state, if there is any, under transformers' names or those of a PipelineModule, whose tied
    layers have the key `options.tied_key`.
    """
    if not _KEY.fullmatch(options.tied_key):
        problem = f"expected letters, digits, _ and -, found {options.tied_key[:80]!r}"
        raise UsageError(Parameter("tied_key"), problem, code="options.invalid-value")
    is_universal = options.to == "universal"
    checkpoint, casts = cast_for_export(checkpoint, "fp32" if is_universal else options.dtype)
    step = checkpoint.trained.step if checkpoint.trained else 0
    tag = f"global_step{step}_universal" if is_universal else f"global_step{step}"
    small = {f"{tag}/mp_rank_00_model_states.pt": saved_value(_rank_state(step))}
    if not is_universal:
        shards = _layers(checkpoint, tag)
    else:
        names = _parameter_names(checkpoint, options)
        small[f"{tag}/zero/optimizer_state.pt"] = saved_value(_optimizer_state(checkpoint))
        shards = _universal(checkpoint, tag, names)
        for fqn in owned_tensors(checkpoint, checkpoint.moments[MOMENTS[0]]) if checkpoint.moments else ():
            small[f"{tag}/zero/{names[fqn]}/step.pt"] = saved_step(step)
    plan = ExportPlan(
        copied=with_source_files(checkpoint.auxiliary, is_same=False),
        shards=tuple(shards),
        made=tuple(MemoryFile(name, data) for name, data in small.items()),
        last="latest_universal" if is_universal else "latest",
        last_bytes=tag.encode,
    )
    return publish_export(out, plan, options, casts)


def _layers(checkpoint: Checkpoint, tag: str) -> Iterator[OutputShard]:
    weights = owned_tensors(checkpoint, checkpoint.tensors)
    names = pipeline_layers(checkpoint.shape)
    _check_all_placed(weights, {fqn for layer in names for fqn in layer}, checkpoint)
    for number, layer in enumerate(names):
        tensors = {name: weights[fqn] for fqn, name in layer.items()}
        # The loader takes any file that begins with `layer_NN-`: with and without a model-parallel rank.
        yield _file(f"{tag}/layer_{number:02d}-model_00-model_states.pt", tensors, {})


def _parameter_names(checkpoint: Checkpoint, options: ExportOptions) -> dict[str, str]:
    """Return the folder of each parameter in a Universal Checkpoint: the name that it has in the trainer's model."""
    if options.names == "hf":
        return {fqn: fqn for fqn in checkpoint.shape.tensors}
    layers = pipeline_layers(checkpoint.shape)
    is_tied = any(group[0] in layers[0] for group in checkpoint.shape.ties)  # used again, by the head
    first = f"tied_modules.{options.tied_key}" if is_tied else "0"
    prefixes = (first, *map(str, range(1, len(layers))))
    names: dict[str, str] = {}
    for prefix, layer in zip(prefixes, layers, strict=True):
        for fqn, name in layer.items():
            names.setdefault(fqn, f"{prefix}.{name}")  # of a tied weight, where it is first
    return names


def _universal(checkpoint: Checkpoint, tag: str, names: Mapping[str, str]) -> Iterator[OutputShard]:
    for kind, tensors in (("fp32", checkpoint.tensors), *checkpoint.moments.items()):
        owned = owned_tensors(checkpoint, tensors)
        _check_all_placed(owned, names, checkpoint)
        for fqn, tensor in owned.items():
            if tensor.dtype not in FLOATS or fqn.endswith(checkpoint.shape.untrained_suffixes):
                problem = (
                    f"is {tensor.dtype} and no parameter, or quantized, which a Universal Checkpoint does not have"
                )
                raise ModelError(f"{checkpoint.location}: {fqn!r}", problem, code="model.not-in-pipeline")
            saved = {"param": cast_tensor(tensor, "F32")}
            yield _file(f"{tag}/zero/{names[fqn]}/{kind}.pt", saved, {"cat_dim": 0})


def _rank_state(step: int) -> dict[str, object]:
    """Return what a rank's file has beside weights: counts, which the loader requires."""
    return {
        "module": None, "optimizer": None, "lr_scheduler": None, "global_steps": step, "skipped_steps": 0,
        "iteration": step, "dp_world_size": 1, "mp_world_size": 1, "ds_version": _DS_VERSION,
    }  # fmt: skip


def _optimizer_state(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the optimizer's options. See Note [Groups of a Universal Checkpoint]."""
    trained, group = checkpoint.trained, dict[str, object]()
    state: dict[str, object] = {"ds_version": _DS_VERSION, "zero_stage": 1, "overflow": False}
    if checkpoint.moments and trained is not None and trained.optimizer is not None:
        group = adamw_options(checkpoint, trained, trained.optimizer)
        state["clip_grad"] = trained.optimizer.max_norm
    return {**state, "param_groups": [{**group, "params": [number]} for number in range(_NUM_GROUPS)]}


def _check_all_placed(weights: Mapping[str, TensorAt], placed: Iterable[str], checkpoint: Checkpoint) -> None:
    """Refuse to leave a tensor out."""
    placed = set(placed)
    for fqn in weights:
        if fqn not in placed:
            problem = "is in no layer of the pipeline"
            raise ModelError(f"{checkpoint.location}: {fqn!r}", problem, code="model.not-in-pipeline")


def _file(path: str, tensors: Mapping[str, TensorAt], values: Mapping[str, object]) -> OutputShard:
    """Plan a file of torch.save: a dict of tensors and values."""
    saved = saved_dict({name: SavedTensor(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, values)
    origins = tuple(tensors.values())
    file = DerivedFile("as torch.save writes it", origins, saved.nbytes, partial(_blocks, saved, origins))
    return without_header(path, (TensorAt(path, "U8", (saved.nbytes,), file, 0, saved.nbytes),))


def _blocks(saved: SavedFile, origins: Iterable[TensorAt]) -> Iterator[bytes | bytearray | memoryview]:
    return saved.blocks(read_blocks(tensor) for tensor in origins)


# Note [Layers that are tied]: a head that is tied to the input embedding is a `TiedLayerSpec` with the key of the first
# layer. With a `forward_fn` it computes with the first layer's module, and DeepSpeed neither saves nor loads a file of
# it. Without one it is a module that has the weight once more, in a file of its own, and DeepSpeed replaces what it
# loads from there by the first layer's. Outside of these files, parameters of both are called `tied_modules.KEY.*`.
_DECODER = re.compile(r"\.\d+$")


def pipeline_layers(shape: ModelShape) -> list[Mapping[str, str]]:
    """Return the layers, in the order they run: the name that each tensor has in its layer, by its owner's FQN."""
    named = {module: fqns for module, fqns in shape.by_module().items() if fqns}
    owners = {fqn: group[0] for group in shape.ties for fqn in group}
    before = next(iter([number for number, module in enumerate(named) if _DECODER.search(module)]), 0)
    inputs, rest = list(named)[:before], list(named)[before:]
    first = {fqn: _relative(fqn, module, len(inputs)) for module in inputs for fqn in named[module]}
    return [first, *({owners.get(fqn, fqn): _relative(fqn, module, 1) for fqn in named[module]} for module in rest)]


def _relative(fqn: str, module: str, num_modules: int) -> str:
    """Return a name relative to its module, or, where several are one layer, to what they are in."""
    if num_modules > 1:
        return fqn.removeprefix(module.rpartition(".")[0] + ".")
    return fqn.removeprefix(f"{module}.")
