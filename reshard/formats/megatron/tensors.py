"""Tensors of Megatron-Core under Hugging Face's names and the reverse, in the layouts that either has.

Layers are stacked where all are alike, as Megatron-Core itself stores them then. Norms have the keys of each layer
spec, of one place in the files.

Source: megatron-core 0.16.1, transformer/transformer_block.py, mlp.py, attention.py and moe/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from manifests.errors import ModelError, SourceError
from reshard.formats.megatron.arguments import layers_with_experts, num_experts_of
from reshard.formats.megatron.names import EMBEDDING, HEAD, MTP_COPIES, NORM, QKV, megatron_names
from reshard.formats.saved_state import Place, Placed, in_place
from reshard.tensors.lazy import have_equal_bytes
from reshard.tensors.slices import FusedHeads, Slices, indices_of, rows_of
from stores.bundles import TensorAt

_OTHERS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state")  # beside the model
_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,6})\.)?(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,6})\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d{1,6})\.)?linear_(fc[12])\.weight(_[wv])?")
_HALF = re.compile(r"(.+\.linear_fc1)\.weight(_[wv])?")
_PARTS = {"_w": "gate", "_v": "up"}
_TOP = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight", NORM: "model.norm.weight"}

Named = Iterator[tuple[str, Slices]]


def has_megatron_names(names: Container[str]) -> bool:
    return EMBEDDING in names


def is_megatron_weight(name: str) -> bool:
    """Return whether an entry is of the model: neither optimizer state nor RNG state."""
    return _OTHERS.match(name) is None


def under_names_of_huggingface(
    tensors: Mapping[str, Slices], config: Mapping[str, object], where: str
) -> dict[str, Slices]:
    """Return the slices of each tensor under its name in Hugging Face's model, in the layout that it has there.

    Rows that pad the vocabulary are left out. Names that Megatron's model does not have are kept, to be refused by
    name.
    """
    model = _Model(config, tensors, where)
    renamed: dict[str, Slices] = {}
    for name, slices in tensors.items():
        for new, converted in model.converted(name, slices):
            named = tuple(
                TensorAt(new, part.dtype, part.shape, part.file, part.begin, part.nbytes, part.blake3, part.part)
                for part in converted
            )
            if renamed.setdefault(new, named) != named:  # keys of several layer specs may share a place
                problem = f"is {new!r} of Hugging Face's model, which another tensor is too"
                hint = "save the checkpoint again with the layers of one release of Megatron-Core"
                raise SourceError(f"{where}: {name!r}", problem, hint, code="source.tensor-twice")
    return renamed


class _Model:
    def __init__(self, config: Mapping[str, object], names: Container[str], where: str) -> None:
        self._config, self._names = config, megatron_names(config, where)
        names_of = {**self._names.parameters, **self._names.mtp}
        self._parameters = {spelling: theirs for theirs, spellings in names_of.items() for spelling in spellings}
        self._num_layers = _count(config, "num_hidden_layers")
        count = _count(config, "num_nextn_predict_layers") if self._names.mtp else 0
        mtp = [at for at in range(count) if f"mtp.layers.{at}.eh_proj.weight" in names]
        owners = {part: owner if owner in names else EMBEDDING for part, owner in MTP_COPIES.items()}
        self._copies = [
            (f"model.layers.{self._num_layers + at}.{part}", owner) for at in mtp for part, owner in owners.items()
        ]

    def converted(self, name: str, slices: Slices) -> Named:
        if name in _TOP:
            whole = slices if name == NORM else self._without_padding(slices)
            yield _TOP[name], whole
            yield from ((copy, whole) for copy, owner in self._copies if owner == name)
            return
        if self._names.mtp and (match := _MTP_LAYER.fullmatch(name)):
            name = f"decoder.layers.{self._num_layers + int(match[1])}.{match[2]}"
        if (match := _LAYER.fullmatch(name)) is None:
            yield name, slices
            return
        number, rest = match.groups()
        for layer, of_layer in [(int(number), slices)] if number else enumerate(indices_of(slices)):
            for part, converted in self._parts(rest, of_layer) if of_layer else ():
                yield f"model.layers.{layer}.{part}", converted

    def _parts(self, rest: str, slices: Slices) -> Named:
        """Yield what a tensor of a layer is in Hugging Face's model, relative to its layer."""
        names = self._names
        if rest == QKV:
            for part, rows in FusedHeads.of(self._config).split(slices).items():
                yield f"self_attn.{part}_proj.weight", rows
        elif names.has_experts and (match := _EXPERT.fullmatch(rest)):
            number, projection, half = match.groups()
            for index, of_one in [(int(number), slices)] if number else enumerate(indices_of(slices)):
                expert = f"mlp.experts.{index}.{{}}_proj.weight"
                yield from ((expert.format("down"), of_one),) if projection == "fc2" else _halves(expert, half, of_one)
        elif (match := _HALF.fullmatch(rest)) and match[1] in names.gated:
            yield from _halves(names.gated[match[1]], match[2], slices)
        else:
            yield self._parameters.get(rest, rest), slices

    def _without_padding(self, slices: Slices) -> Slices:
        num_rows, vocab = slices[0].whole_shape[0], _count(self._config, "vocab_size")
        return rows_of(slices, [(0, vocab)]) if num_rows > vocab else slices


def _halves(name: str, half: str | None, slices: Slices) -> Named:
    """Yield the gate and the up projection of a fused one, or the one of them that is stored by itself."""
    if half is not None:
        yield name.format(_PARTS[half]), slices
    elif slices:
        rows = slices[0].whole_shape[0] // 2
        yield name.format("gate"), rows_of(slices, [(0, rows)])
        yield name.format("up"), rows_of(slices, [(rows, slices[0].whole_shape[0] - rows)])


def _count(config: Mapping[str, object], field: str) -> int:
    number = config.get(field) or 0
    assert isinstance(number, int), "model_shape checked it"
    return number


_HF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_HEADS = re.compile(r"self_attn\.([qkv])_proj\.weight")
_HF_EXPERT = re.compile(r"mlp\.experts\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_EXPERTS = "mlp.experts.experts.linear_{}"
_OWN_TOP = {fqn: name for name, fqn in _TOP.items()}
_MTP_INNER = ("transformer_layer", "mtp_model_layer")  # an MTP layer's decoder layer: of 0.16.1, and of newer releases


class MegatronModel:
    """The names and layouts of a model's tensors in Megatron-Core."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, TensorAt], where: str) -> None:
        self._config, self._weights, self._where = config, weights, where
        self._names = megatron_names(config, where)
        self._num_layers: int = config["num_hidden_layers"]
        self._num_experts = num_experts_of(config)
        self._gated = {hf: name for name, hf in self._names.gated.items()}
        self.is_stacked = not self._num_experts or all(layers_with_experts(config, where))
        numbers = {int(match[1]) for match in map(_HF_LAYER.fullmatch, weights) if match} if self._names.mtp else set()
        self.mtp_layers = sorted(numbers.difference(range(self._num_layers)))

    def place(self, tensor: TensorAt) -> Placed | None:
        """Return where a weight is in the model; nowhere, if it is a copy that Megatron's MTP layers do without."""
        if tensor.name in _OWN_TOP:
            return in_place(tensor, _OWN_TOP[tensor.name])
        if (match := _HF_LAYER.fullmatch(tensor.name)) is None:
            raise self._unknown(tensor.name)
        layer, rest = int(match[1]), match[2]
        if layer in self.mtp_layers and rest in MTP_COPIES:
            self._check_copy(tensor, layer, rest)
            return None
        if layer in self.mtp_layers and rest in self._names.mtp:
            (key,) = self._names.mtp[rest]
            return in_place(tensor, f"mtp.layers.{layer - self._num_layers}.{key}")
        if inner := _HEADS.fullmatch(rest):
            return self._heads(tensor, layer, inner[1])
        if self._num_experts and (inner := _HF_EXPERT.fullmatch(rest)):
            return self._expert(tensor, layer, int(inner[1]), inner[2])
        for half, part in enumerate(("gate", "up")):
            name = rest.replace(f".{part}_proj.", ".{}_proj.")
            if name != rest and name in self._gated:
                rows, *others = tensor.shape
                key, whole = f"{self._gated[name]}.weight", (2 * rows, *others)
                return self._placed(tensor, layer, [key], whole, [(half * rows, *(0 for _ in others))], tensor.shape)
        if rest not in self._names.parameters:
            raise self._unknown(tensor.name)
        keys = list(self._names.parameters[rest])
        return self._placed(tensor, layer, keys, tensor.shape, [(0,) * len(tensor.shape)], tensor.shape)

    def objects(self) -> Iterator[str]:
        """Yield the keys of what modules have beside tensors, of which a loader expects a value."""
        yield "decoder.final_layernorm._extra_state/shard_0_1"
        modules = sorted(self._names.modules | {"self_attention.core_attention"})
        for layer in (*range(self._num_layers), *self.mtp_layers):
            at, num = (layer, self._num_layers) if self._is_stacked(layer) else (0, 1)
            for key in self._prefixes(layer):
                yield from (f"{key}{module}._extra_state/shard_{at}_{num}" for module in modules)
                for expert in range(self._num_experts):
                    shard = f"{expert}_{self._num_experts}"
                    if self._is_stacked(layer):
                        shard = f"{at}.{expert}_{num}.{self._num_experts}"
                    yield from (f"{key}{_EXPERTS.format(fc)}._extra_state/shard_{shard}" for fc in ("fc1", "fc2"))
        for layer in self.mtp_layers:
            keys = (f"mtp.layers.{layer - self._num_layers}.{key}" for (key,) in self._names.mtp.values())
            yield from (f"{key.removesuffix('.weight')}._extra_state/shard_0_1" for key in keys)

    def _is_stacked(self, layer: int) -> bool:
        return self.is_stacked and layer < self._num_layers

    def _prefixes(self, layer: int) -> tuple[str, ...]:
        """Return what keys of a layer begin with."""
        if layer in self.mtp_layers:
            return tuple(f"mtp.layers.{layer - self._num_layers}.{inner}." for inner in _MTP_INNER)
        return ("decoder.layers.",) if self.is_stacked else (f"decoder.layers.{layer}.",)

    def _heads(self, tensor: TensorAt, layer: int, part: str) -> Placed:
        """Return a projection of heads: for each key head, the rows of its queries, its own and those of its value."""
        whole, offsets = FusedHeads.of(self._config).places(part, tensor.shape)
        chunk = (tensor.shape[0] // len(offsets), *tensor.shape[1:])
        return self._placed(tensor, layer, [QKV], whole, offsets, chunk)

    def _expert(self, tensor: TensorAt, layer: int, expert: int, part: str) -> Placed:
        rows, width = tensor.shape
        key = _EXPERTS.format("fc2" if part == "down" else "fc1") + ".weight"
        whole = (self._num_experts, rows if part == "down" else 2 * rows, width)
        return self._placed(tensor, layer, [key], whole, [(expert, rows if part == "up" else 0, 0)], (1, rows, width))

    def _placed(
        self,
        tensor: TensorAt,
        layer: int,
        keys: list[str],
        whole: tuple[int, ...],
        offsets: list[tuple[int, ...]],
        chunk: tuple[int, ...],
    ) -> Placed:
        """Return a tensor of a layer: at an index of a stack of all layers, or in an entry of its own."""
        if self._is_stacked(layer):
            offsets = [(layer, *offset) for offset in offsets]
            whole, chunk = (self._num_layers, *whole), (1, *chunk)
        full = (prefix + key for prefix in self._prefixes(layer) for key in keys)
        return Placed(tensor, chunk, tuple(Place(key, whole, tuple(offsets)) for key in full))

    def _check_copy(self, tensor: TensorAt, layer: int, part: str) -> None:
        """Raise unless an MTP layer's embedding or head is the model's."""
        owners = [fqn for fqn, key in _OWN_TOP.items() if key in (MTP_COPIES[part], EMBEDDING) and fqn in self._weights]
        owner = self._weights[owners[-1]]
        if not have_equal_bytes(self._weights[tensor.name], owner):
            problem = f"differs from {owner.name!r}, which Megatron-Core's MTP layers share with the model"
            hint = f"pack without its MTP layer: reshard pack SOURCE --drop model.layers.{layer}"
            raise ModelError(f"{self._where}: {tensor.name!r}", problem, hint, code="model.not-in-megatron")

    def _unknown(self, fqn: str) -> ModelError:
        problem = "Megatron-Core's model has no such tensor"
        hint = f"reshard pack SOURCE --dequantize bf16, or --drop {fqn} if it is not a weight of the model"
        return ModelError(f"{self._where}: {fqn!r}", problem, hint, code="model.not-in-megatron")
