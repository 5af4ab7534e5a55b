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
from transformers.core_model_loading import revert_weight_conversion

from manifests.models.catalogue import Entry
from runner.models.generic import Generic
from tools.tiny_models import tiny_config

__all__ = ["Compared", "compare", "look_at_layers", "stages_of"]

LENGTH, LR = 12, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What differs most between stages and the whole model; gradients and weights relative to a tensor's largest."""

    logits: float
    gradients: float
    weights: float  # after a step of SGD

    @property
    def is_equal(self) -> bool:
        return self.logits == 0 and self.gradients <= 1e-6 and self.weights <= 1e-6


def stages_of(entry: Entry, modules: Sequence[str], num_stages: int) -> list[tuple[str, ...]]:
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


def compare(entry: Entry, num_stages: int, **changes: Any) -> Compared:
    """Run a tiny model whole and in stages, forward and backward, and take a step with each.

    Raises:
        Exception: whatever a model that cannot be cut raises.
    """
    config = tiny_config(getattr(transformers, entry.architecture), **changes)
    config.tie_word_embeddings = False
    whole = _build(entry.architecture, config)
    files = {name: tensor.detach() for name, tensor in _in_files(whole).items()}
    family = Generic(entry, {**config.to_dict(), "architectures": [entry.architecture]}, max_seq_len=LENGTH)
    stages = [_load(family, modules, files) for modules in stages_of(entry, family.modules, num_stages)]
    logits = whole(input_ids=_tokens(), use_cache=False).logits
    found = _tokens()
    for stage in stages:
        found = stage(found)
    towards = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    for result in (logits, found):
        torch.autograd.backward(result, towards)
    parameters = dict(whole.named_parameters())
    gradients, weights = 0.0, 0.0
    for stage in stages:
        for name, parameter in stage.named_parameters():
            expected = parameters[name.removeprefix("model.")]
            gradients = max(gradients, _difference(_gradient(parameter), _gradient(expected)))
            after, wanted = (one.detach() - LR * _gradient(one) for one in (parameter, expected))
            weights = max(weights, _difference(after, wanted))
    return Compared(logits=(found - logits).abs().max().item(), gradients=gradients, weights=weights)


def _build(architecture: str, config: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, architecture)(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def _in_files(model: Any) -> Mapping[str, torch.Tensor]:
    files: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(model.state_dict()))
    return files


def _load(family: Generic, modules: tuple[str, ...], files: Mapping[str, torch.Tensor]) -> nn.Module:
    stage = family.build(modules)
    stage._apply(_unfilled)  # type: ignore[no-untyped-call]
    family.init_buffers(stage, torch.device("cpu"))
    for name, tensor in stage.state_dict(keep_vars=True).items():
        for piece in family.pieces(name, tensor.detach(), (0,) * tensor.dim()):
            region = tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.memory.shape, strict=True))
            piece.memory.copy_(files[piece.fqn][region])
    return stage.eval()


def _unfilled(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory whose values show where nothing was loaded."""
    memory = torch.empty_like(tensor, device="cpu")
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory.zero_()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    largest = expected.abs().max().clamp_min(1e-30)
    difference: float = ((found - expected).abs().max() / largest).item()
    return difference


def _tokens() -> torch.Tensor:
    return torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
