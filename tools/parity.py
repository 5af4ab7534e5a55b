"""Compare stages of a catalogue's architecture with the whole model of transformers: logits, gradients, one step."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn

from manifests.models.catalogue import CatalogueEntry
from runner.models.generic import Generic
from runner.pipeline.chunk import StageChunk
from runner.proof.stages import (
    Compared,
    SelfChecked,
    WholeModel,
    build_filled,
    compare_with_whole,
    gradients_of,
    run_whole,
)
from tools.tiny_models import tiny_config

LENGTH, LR = 12, 0.1
SHARED_LAYERS = (("num_kv_shared_layers", 2),)  # fields that let layers read keys and values of earlier ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What differs most between stages and the whole model, and between their weights after a step of SGD."""

    compared: Compared
    weights: float  # relative to a tensor's largest

    @property
    def is_equal(self) -> bool:
        return self.compared.is_equal and self.weights <= 1e-6


def stages_of(entry: CatalogueEntry, modules: Sequence[str], num_stages: int) -> list[tuple[str, ...]]:
    """Return the modules of each stage, layers spread evenly."""
    layers = [module for module in modules if module.startswith(f"{entry.layers}.")]
    bounds = [round(len(layers) * stage / num_stages) for stage in range(num_stages + 1)]
    stages = [tuple(layers[low:high]) for low, high in pairwise(bounds)]
    stages[0] = (*entry.inputs, *stages[0])
    stages[-1] = (*stages[-1], *entry.outputs)
    return stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """What layers of an architecture take and return."""

    num_results: int  # in a tuple or list; 0: one tensor by itself
    carried: tuple[str, ...]  # names of arguments after the first that depend on the tokens
    reshapes: bool  # whether the hidden state has another shape than (B, L, D)
    all_run: bool  # whether each of them runs, without images


def look_at_layers(architecture: str, path: str) -> Layers:
    """Run a tiny model on two batches, and compare what its layers take."""
    plain = tiny_config(getattr(transformers, architecture))
    found = _look_at(architecture, path, plain)
    decoder = plain.get_text_config()
    for name, value in SHARED_LAYERS:
        if hasattr(decoder, name):
            setattr(decoder, name, value)
            more = _look_at(architecture, path, plain).carried
            found = replace(found, carried=tuple(dict.fromkeys((*found.carried, *more))))
    return found


def _look_at(architecture: str, path: str, config: Any) -> Layers:
    model = _build(architecture, config)
    listed: Any = model.get_submodule(path)
    taken: list[list[tuple[int, dict[str, Any]]]] = []
    results: list[Any] = []

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, index: int) -> None:
        names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        taken[-1].append((index, {name: [each.clone() for each in _tensors(given[name])] for name in given}))

    for index, layer in enumerate(listed):
        layer.register_forward_pre_hook(partial(before, index=index), with_kwargs=True)
        layer.register_forward_hook(lambda _, __, out: results.append(out))
    for seed in (0, 1):
        taken.append([])
        with torch.no_grad():
            model(input_ids=_tokens(seed), use_cache=False)
    carried = {}
    for (_, one), (_, other) in zip(*taken, strict=True):
        hidden = next(iter(one))
        carried |= dict.fromkeys(name for name in one if name != hidden and not _are_equal(one[name], other[name]))
    first: Any = results[0]
    hidden_state = first[0] if isinstance(first, (tuple, list)) else first
    return Layers(
        num_results=len(first) if isinstance(first, (tuple, list)) else 0,
        carried=tuple(carried),
        reshapes=hidden_state.shape != (*_tokens(0).shape, config.get_text_config().hidden_size),
        all_run={index for index, _ in taken[0]} == set(range(len(listed))),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, (dict, UserDict)) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def compare(entry: CatalogueEntry, num_stages: int, **changes: Any) -> Trained:
    """Run a tiny model whole and in stages, forward and backward, and take a step with each.

    Raises:
        Exception: whatever a model that cannot be cut raises.
    """
    config = tiny_config(getattr(transformers, entry.architecture), **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        family = Generic(entry, config.to_dict(), max_seq_len=LENGTH)
        compared, whole, chunks = compare_stages(family, stages_of(entry, family.modules, num_stages))
    weights = 0.0
    for parameter, expected, found in gradients_of(whole, chunks):
        after = [parameter.detach() - LR * gradient for gradient in (found, expected)]
        weights = max(weights, ((after[0] - after[1]).abs().max() / after[1].abs().max().clamp_min(1e-30)).item())
    return Trained(compared=compared, weights=weights)


def compare_stages(
    family: SelfChecked, stage_modules: Sequence[tuple[str, ...]]
) -> tuple[Compared, WholeModel, tuple[StageChunk, ...]]:
    """Compare stages of a family's own model, which must be small, with the whole of it; return both as well."""
    with torch.random.fork_rng(devices=()):
        whole = family.whole()
        results, chunks = run_whole(whole, family.vocab_size), build_filled(family, whole, stage_modules)
        return compare_with_whole(whole, results, chunks), whole, chunks


def _build(architecture: str, config: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, architecture)(copy.deepcopy(config)).eval()


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
