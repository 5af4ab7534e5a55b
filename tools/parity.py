"""Compare stages of a catalogue's architecture with the whole model of transformers: logits, gradients, one step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn

from manifests.models.catalogue import CatalogueEntry
from runner.models.generic import Generic
from runner.pipeline.self_check import Compared, compare_stages, gradients_of
from tools.tiny_models import tiny_config

__all__ = ["Trained", "compare", "look_at_layers", "stages_of"]

LENGTH, LR = 12, 0.1


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


def look_at_layers(architecture: str, layers: str) -> tuple[int, bool]:
    """Return how many results a layer returns in a tuple, and whether later layers get more than the hidden state.

    One tensor that is in no tuple counts as 0.
    """
    model, found = _build(architecture, tiny_config(getattr(transformers, architecture))), []
    others: list[torch.Tensor] = []  # results beside the hidden state, kept so that no other tensor takes their place
    handed_on = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        handed_on.append(any(one is other for one in given for other in others))

    def after(_: nn.Module, args: object, out: object) -> None:
        results = out if isinstance(out, tuple) else ()
        found.append(len(results))
        others.extend(one for one in results[1:] if isinstance(one, torch.Tensor))

    listed: Any = model.get_submodule(layers)
    for layer in listed:
        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after)
    with torch.no_grad():
        model(input_ids=_tokens(), use_cache=False)
    return found[0], any(handed_on)


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


def _build(architecture: str, config: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, architecture)(copy.deepcopy(config)).eval()


def _tokens() -> torch.Tensor:
    return torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
