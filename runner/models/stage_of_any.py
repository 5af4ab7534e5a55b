"""A stage of any decoder of transformers: the model's own forward, with the modules of other stages replaced.

# Note [A stage of any decoder]
A stage runs the model's own forward, and exchanges the hidden state at two places. What enters the first layer of the
list is replaced by what arrived from the stage before, so all that a model does between its embedding and its layers
(positions, norms, scales) is computed on zeros and thrown away. What enters the place of the first layer of the next
stage is what leaves. Masks, rotary tables, ALiBi and the like are computed on each stage, by transformers, from the
length of the sequence. A layer of another stage keeps its attributes, which some models read. Dropout between the
embedding and the layers is drawn by the stage with the last module before the layers alone.

A stage with some of the modules before the layers, but not the first, takes what arrived in the place of embedded
tokens: a table of positions of an earlier stage adds nothing, and a projection of another stage returns its input.

Layers of some architectures take more that depends on the tokens: an input for each layer (Gemma 4), keys and values of
an earlier layer (Gemma 3n), indices that an earlier layer chose (GLM 5), the tokens (DeepSeek-V4). The catalogue names
these arguments (`CatalogueEntry.carried`). What the layers of later stages are called with leaves together with the
hidden state; there it replaces what the model computes of tokens that are all 0.

# Note [Padding under RoPE that depends on length]
For `longrope` and `dynamic` RoPE, transformers takes the frequencies of every position from the number of tokens in a
row, padding included. A row that is padded beyond a boundary is then another computation than its text alone.
Evaluation computes the loss of the text alone: rows are padded only up to where the frequencies stay the same, and rows
that differ in that are computed apart. Training takes all rows at --seq-len, as a trainer on transformers does with
right padding. Source: transformers 5.23, `modeling_rope_utils.py`, `dynamic_rope_update`.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from manifests.models.catalogue import CatalogueEntry
from runner.models.document_mask import documents_at, inputs_of_rows
from runner.tensors.row_parts import RowParts

_SHARED = (dict, UserDict)  # of what layers write and later layers read


class StageOfAny(nn.Module):
    """Some modules of a model; see Note [A stage of any decoder].

    Shapes: tokens (B, L) or hidden (B, L, D) in, hidden or logits (B, L, V) out; position_ids (B, L). Where the family
    `hands_on_trees`, hidden is a dict: the hidden state in the shape that layers have, B and L, and what is passed on
    with it.
    """

    def __init__(
        self, model: Any, entry: CatalogueEntry, layers: str, owned: frozenset[str], names: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.model, self._layers_name, self._carried = model, layers, entry.carried
        self.parts: RowParts | None = None  # of the rows that tokens and hidden are a part of
        self._hands_on_trees = entry.hands_on_trees
        listed = model.get_submodule(layers)
        assert isinstance(listed, nn.ModuleList)
        self._takes_tokens = entry.inputs[0] in owned
        self._takes_embedded = not self._takes_tokens and not owned.isdisjoint(entry.inputs)
        self._has_norms = bool(owned & set(entry.outputs))
        self._gives_logits = entry.outputs[-1] in owned
        here = [index for index in range(len(listed)) if f"{entry.layers}.{index}" in owned]
        self._last = here[-1] if here else -1
        self._arrived: torch.Tensor | None = None
        self._outgoing: torch.Tensor | None = None
        self._given: Mapping[str, Any] = {}
        self._seen: dict[str, list[Any]] = {}
        for index, layer in enumerate(listed):
            names_of_layer = tuple(inspect.signature(type(layer).forward).parameters)[1:]
            if index not in here:
                layer = listed[index] = _Elsewhere(layer, entry.num_results)
            if self._carried:
                exchange = partial(self._exchange, index=index, num_layers=len(listed), names=names_of_layer)
                layer.register_forward_pre_hook(exchange, with_kwargs=True)
        for module, path in names.items():
            if module not in owned:
                model.set_submodule(path, _skip(model.get_submodule(path), keeps_width=not self._hands_on_trees))
        self.embedding = (model.get_submodule(names[entry.inputs[0]]),)  # in a tuple, which registers no module
        if entry.inputs[-1] not in owned:
            for name, part in list(model.named_modules()):
                is_of_module = name.startswith(f"{layers}.") or name.endswith(".lora_dropout")
                if isinstance(part, nn.Dropout) and not is_of_module:
                    model.set_submodule(name, nn.Identity())
        if not self._takes_tokens and not self._takes_embedded:
            listed[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self._has_norms and self._last + 1 < len(listed):
            listed[self._last + 1].register_forward_pre_hook(self._leave, with_kwargs=True)
        elif not self._has_norms:
            listed[-1].register_forward_hook(self._end)
        self._lengthening = tuple(_ropes_of_longest(model))

    def forward(self, given: Any, position_ids: torch.Tensor | None = None) -> Any:
        for rope, prefix in self._lengthening:
            setattr(rope, f"{prefix}max_seq_len_cached", rope.original_max_seq_len)
            setattr(rope, f"{prefix}inv_freq", getattr(rope, f"{prefix}original_inv_freq"))
        self._make_traceable(given)
        size = given["size"] if isinstance(given, dict) else tuple(given.shape[:2])
        device = pytree.tree_leaves(given)[0].device if self.parts else None
        with documents_at(position_ids):
            inputs = inputs_of_rows(position_ids, size, self.parts, device)
            output = self._run(given, size, {"use_cache": False, **inputs})
        if self._gives_logits:
            return output.logits
        if self._has_norms:
            outgoing = output.last_hidden_state
        else:
            outgoing, self._outgoing = self._outgoing, None
            assert outgoing is not None
        if not self._hands_on_trees:
            return outgoing
        seen, self._seen = self._seen, {}
        return {"hidden": outgoing, "size": size, "carried": {name: _packed(values) for name, values in seen.items()}}

    def _run(self, given: Any, size: tuple[int, ...], inputs: Mapping[str, Any]) -> Any:
        runs = self.model if self._gives_logits else self._base()
        if self._takes_tokens:
            return runs(input_ids=given, **inputs)
        if self._takes_embedded:
            return runs(inputs_embeds=given, **inputs)
        if not self._hands_on_trees:
            self._arrived = given
            output = runs(inputs_embeds=torch.zeros_like(given), **inputs)
        else:
            self._arrived, self._given = given["hidden"], given["carried"]
            for part in self.modules():
                if isinstance(part, _Skipped):
                    part.dtype = given["hidden"].dtype
            tokens = torch.zeros(size, dtype=torch.int64, device=given["hidden"].device)
            output = runs(input_ids=tokens, **inputs)
        self._arrived, self._given = None, {}
        return output

    def _make_traceable(self, given: Any) -> None:
        """Choose a kernel for experts that runs on fake tensors in any dtype, if these are some."""
        if any(isinstance(tensor, FakeTensor) for tensor in pytree.tree_leaves(given)):
            self.model.config._experts_implementation = "batched_mm"

    def _base(self) -> nn.Module:
        base: nn.Module = self.model.get_submodule(self._layers_name.partition(".")[0])
        return base

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert self._arrived is not None
        if args:
            return (self._arrived, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._arrived}

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._outgoing = args[0] if args else kwargs["hidden_states"]

    def _end(self, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._outgoing = out[0] if isinstance(out, (tuple, list)) else out

    def _exchange(
        self,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        index: int,
        num_layers: int,
        names: tuple[str, ...],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace what arrived for a layer in its arguments, and keep those that leave for a later stage's layer."""
        values = list(args)
        for name in self._carried:
            at = names.index(name) if name in names else len(values)
            value = values[at] if at < len(values) else kwargs.get(name)
            if name in self._given:
                value = _replaced(value, self._given[name], num_layers - 1 - index)
            if at < len(values):
                values[at] = value
            elif name in kwargs:
                kwargs[name] = value
            if index > self._last and not self._has_norms:
                self._seen.setdefault(name, []).append(value)
        return tuple(values), kwargs


def is_stand_in(part: nn.Module) -> bool:
    """Return whether a module is in the place of one of another stage."""
    return isinstance(part, (_Elsewhere, _Skipped))


def longest_alike(config: Any, length: int, most: int) -> int:
    """Return how many tokens, at most `most`, a row of `length` may be padded to with the same frequencies."""
    for kind, rope in _ropes(config):
        if kind == "longrope" and length <= rope["original_max_position_embeddings"]:
            most = min(most, rope["original_max_position_embeddings"])
        elif "dynamic" in kind:
            most = length if length > config.max_position_embeddings else min(most, config.max_position_embeddings)
    return max(length, most)


class _Elsewhere(nn.Module):
    """A layer of another stage: hands the hidden state on, and has the attributes of the layer, on the meta device."""

    def __init__(self, layer: nn.Module, num_results: int) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple, which registers no module
        self._num_results = num_results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *[None] * (self._num_results - 1)) if self._num_results else hidden


class _Skipped(nn.Module):
    """A module outside the layers, of another stage: its result is thrown away, or is its input.

    With a `width`, the result is that of tokens or of zeros, as wide as the module's.
    """

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self._width = width
        self.dtype = torch.float32

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        for argument in (*args, *kwargs.values()):
            if not isinstance(argument, torch.Tensor):
                continue
            is_tokens = not argument.is_floating_point()  # perhaps as many as the module is wide
            if self._width and (is_tokens or argument.shape[-1] != self._width):
                rows = argument.shape if is_tokens else argument.shape[:-1]
                return torch.zeros(*rows, self._width, dtype=self.dtype, device=argument.device)
            if not is_tokens and argument.dim() > 2:
                return argument
        return torch.zeros(())


def _skip(module: nn.Module, *, keeps_width: bool) -> nn.Module:
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList(_skip(part, keeps_width=keeps_width) for part in module)
    return _Skipped(None if keeps_width else getattr(module, "embedding_dim", getattr(module, "out_features", None)))


def _packed(values: list[Any]) -> dict[str, Any]:
    """Return what layers one after another were called with, each tensor once."""
    tensors = list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    return {
        "places": tuple(places.get(id(value)) for value in values),
        "tensors": torch.stack(tensors) if tensors else None,
        "shared": dict(values[0]) if values and isinstance(values[0], _SHARED) else None,
    }


def _replaced(argument: Any, arrived: Mapping[str, Any], num_later: int) -> Any:
    """Return the argument that arrived for the layer with `num_later` layers after it; its own one if none arrived."""
    if arrived["shared"] is not None:  # to which layers here add
        for name, value in arrived["shared"].items():
            argument.setdefault(name, value)
    places = arrived["places"]
    place = places[-1 - num_later] if num_later < len(places) else None
    return argument if place is None else arrived["tensors"][place]


def _ropes(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the kind and parameters of each RoPE: one of the model, or one of each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and isinstance(kind := rope.get("rope_type"), str):
            yield kind, rope


def _ropes_of_longest(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules whose `dynamic` frequencies transformers keeps for the longest sequence, and prefixes of names."""
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, Mapping) else (("", kinds),):
            if isinstance(kind, str) and "dynamic" in kind:
                yield part, f"{layer_type}_" if layer_type else ""
