"""What autograd keeps of the layers of a decoder, as a multiple of what plans make of the sizes of their matrices."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models import ARCHITECTURES, ConfigReader, StoredTensors
from manifests.models.by_names import shape_by_names
from manifests.models.catalogue import CatalogueEntry
from tools.config_fields import build
from tools.tiny_models import WIDE, tiny_config

_LENGTH = 256  # as long as the chunks of linear attention and state space models
_CLOSE = 0.05  # to 1


def kept_of(entry: CatalogueEntry, path: str, kind_of: Sequence[int]) -> dict[str, Any]:
    """Return the multiples by kind of layer, if plans need them; `path` is the list of layers in memory."""
    if entry.architecture in ARCHITECTURES:
        return {}
    model_class = getattr(transformers, entry.architecture)
    try:
        model = build(model_class, tiny_config(model_class, WIDE), "cpu")
        kept, work = kept_by_layer(model, path), work_by_layer(model, entry)
    except Exception as error:  # of sizes that the class refuses, or a model that only runs on other kernels
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"{entry.architecture}: what autograd keeps of it was not measured: {why}", file=sys.stderr)
        return {}
    measured, planned = Counter[int](), Counter[int]()
    for layer, kind in enumerate(kind_of):
        measured[kind] += round(kept.get(layer, 0) - _LENGTH * (work[layer].scores + work[layer].softmaxes))
        planned[kind] += work[layer].saved + work[layer].saved_fp32
    # What matrices say too much of, they do in other proportions only: a plan that is too low would be worse.
    # What linear attention keeps depends on whether its kernels are installed.
    kinds = [
        round(max(1.0, measured[kind] / planned[kind]), 2) if per_key and planned[kind] else 1.0
        for kind, per_key in enumerate(entry.per_key)
    ]
    return {"kept": kinds} if max(kinds, default=1.0) > 1 + _CLOSE else {}


def work_by_layer(model: PreTrainedModel, entry: CatalogueEntry) -> list[Any]:
    """Return what plans assume of each layer of a model."""
    files = revert_weight_conversion(model, dict(model.state_dict()))
    tensors = {name: tuple(tensor.shape) for name, tensor in files.items()}
    config = {**model.config.to_dict(), "architectures": [entry.architecture]}
    stored = StoredTensors(tensors=tensors, where=entry.architecture)
    shape = shape_by_names(entry, ConfigReader(config, "config.json"), stored)
    return [shape.work[f"{entry.layers}.{number}"] for number in range(shape.num_layers)]


def kept_by_layer(model: PreTrainedModel, path: str) -> dict[int, float]:
    """Return the numbers that autograd keeps of a forward for each token, by layer; what several keep, of the first."""
    running, elements_of, storages = list[int](), dict[int, tuple[int, int]](), list[torch.UntypedStorage]()
    constant = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    layers: Any = model.get_submodule(path)
    for number, layer in enumerate(layers):
        _mark(layer, number, running)

    def keep(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if running and tensor.is_floating_point() and storage.data_ptr() not in constant:
            elements_of.setdefault(storage.data_ptr(), (running[-1], storage.nbytes() // tensor.itemsize))
        storages.append(storage)  # so that no address is used twice

    tokens = torch.arange(_LENGTH)[None] % 90 + 3
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda _: None):  # type: ignore[arg-type, return-value]
        model(input_ids=tokens, use_cache=False)
    kept = Counter[int]()
    for number, elements in elements_of.values():
        kept[number] += elements
    return {number: elements / _LENGTH for number, elements in kept.items()}


def _mark(layer: nn.Module, number: int, running: list[int]) -> None:
    layer.register_forward_pre_hook(lambda *_: running.append(number))
    layer.register_forward_hook(lambda *_: running.clear())
