"""A model's tensors under Megatron-Core's names, in the layouts that its modules have.

Layers are stacked where all are alike, as Megatron-Core itself stores them then. Norms have the keys of each layer
spec, of one place in the files.

Source: megatron-core 0.16.1, transformer/transformer_block.py, mlp.py, attention.py and moe/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import eq
from typing import Any

from manifests.errors import ModelError, Parameter
from reshard.formats.dcp.names import heads_of
from reshard.formats.megatron.arguments import layers_with_experts, num_experts_of
from reshard.formats.megatron.names import EMBEDDING, HEAD, MTP_COPIES, NORM, QKV, megatron_names
from reshard.formats.placed import Place, Placed, in_place
from reshard.tensors.lazy import read_blocks
from stores.bundles import TensorAt

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_HEADS = re.compile(r"self_attn\.([qkv])_proj\.weight")
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_EXPERTS = "mlp.experts.experts.linear_{}"
_TOP = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD, "model.norm.weight": NORM}
_MTP_INNER = ("transformer_layer", "mtp_model_layer")  # an MTP layer's decoder layer: of 0.16.1, and of newer releases


class MegatronModel:
    """The names and layouts of a model's tensors in Megatron-Core.

    Raises:
        ModelError: Megatron's layout of the architecture is not known.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, TensorAt], where: str) -> None:
        self._config, self._weights, self._where = config, weights, where
        self._names = megatron_names(config, where)
        self._num_layers: int = config["num_hidden_layers"]
        self._num_experts = num_experts_of(config)
        self._gated = {hf: own for own, hf in self._names.gated.items()}
        self.is_stacked = not self._num_experts or all(layers_with_experts(config, where))
        numbers = {int(match[1]) for match in map(_LAYER.fullmatch, weights) if match} if self._names.mtp else set()
        self.mtp_layers = sorted(numbers.difference(range(self._num_layers)))

    def place(self, tensor: TensorAt) -> Placed | None:
        """Return where a weight is in the model; nowhere, if it is a copy that Megatron's MTP layers do without.

        Raises:
            ModelError: Megatron's model has no such tensor, or shares it with the model, whose is another.
        """
        if tensor.name in _TOP:
            return in_place(tensor, _TOP[tensor.name])
        if (match := _LAYER.fullmatch(tensor.name)) is None:
            raise self._unknown(tensor.name)
        layer, rest = int(match[1]), match[2]
        if layer in self.mtp_layers and rest in MTP_COPIES:
            self._check_copy(tensor, layer, rest)
            return None
        if layer in self.mtp_layers and rest in self._names.mtp:
            (key,) = self._names.mtp[rest]
            return in_place(tensor, f"mtp.layers.{layer - self._num_layers}.{key}")
        if found := _HEADS.fullmatch(rest):
            return self._heads(tensor, layer, found[1])
        if self._num_experts and (found := _EXPERT.fullmatch(rest)):
            return self._expert(tensor, layer, int(found[1]), found[2])
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
        queries, keys = heads_of(self._config)
        per_key, others = queries // keys, tensor.shape[1:]
        begin, count = {"q": (0, per_key), "k": (per_key, 1), "v": (per_key + 1, 1)}[part]
        rows = tensor.shape[0] // (keys * count)  # of a head
        whole = (rows * (queries + 2 * keys), *others)
        offsets = [((group * (per_key + 2) + begin) * rows, *(0 for _ in others)) for group in range(keys)]
        return self._placed(tensor, layer, [QKV], whole, offsets, (count * rows, *others))

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
        owners = [fqn for fqn, key in _TOP.items() if key in (MTP_COPIES[part], EMBEDDING) and fqn in self._weights]
        owner = self._weights[owners[-1]]
        mine = self._weights[tensor.name]
        known = mine.digest is not None and owner.digest is not None
        if mine.digest != owner.digest if known else not _are_equal(mine, owner):
            problem = f"differs from {owner.name!r}, which Megatron-Core's MTP layers share with the model"
            hint = f"pack without its MTP layer: reshard pack SOURCE --drop model.layers.{layer}"
            raise ModelError(f"{self._where}: {tensor.name!r}", problem, hint, code="model.not-in-megatron")

    def _unknown(self, fqn: str) -> ModelError:
        problem = "Megatron-Core's model has no such tensor"
        hint = f"reshard pack SOURCE --dequantize bf16, or {Parameter('drop')} it if it is not a weight of the model"
        return ModelError(f"{self._where}: {fqn!r}", problem, hint, code="model.not-in-megatron")


def _are_equal(one: TensorAt, other: TensorAt) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and all(map(eq, read_blocks(one), read_blocks(other)))
