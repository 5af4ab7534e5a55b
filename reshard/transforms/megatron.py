"""A model's tensors under Megatron-Core's names, in the layouts that its modules have.

Layers are stacked where all are alike, as Megatron-Core itself stores them then. Norms have the keys of each layer
spec, of one place in the files.

Source: megatron-core 0.16.1, transformer/transformer_block.py, mlp.py, attention.py and moe/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from manifests.errors import ModelError
from reshard.sources.megatron_arguments import num_experts_of
from reshard.sources.megatron_names import EMBEDDING, HEAD, NORM, QKV, megatron_names
from reshard.sources.torchtitan_names import heads_of
from reshard.tensors.checkpoint import TensorAt
from reshard.transforms.placed import Place, Placed

__all__ = ["MegatronModel"]

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_HEADS = re.compile(r"self_attn\.([qkv])_proj\.weight")
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_EXPERTS = "mlp.experts.experts.linear_{}"
_TOP = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD, "model.norm.weight": NORM}
# Modules with an `_extra_state`, which a loader expects: of Megatron-Core's own layers, and of Transformer Engine's.
_STATEFUL = (
    "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention",
    "self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip


class MegatronModel:
    """The names and layouts of a model's tensors in Megatron-Core.

    Raises:
        ModelError: Megatron's layout of the architecture is not known.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where
        self._names = megatron_names(config, where)
        self._num_layers: int = config["num_hidden_layers"]
        self._num_experts = num_experts_of(config)
        self._gated = {hf: own for own, hf in self._names.gated.items()}
        dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
        self.is_stacked = not (self._num_experts and dense)

    def place(self, tensor: TensorAt) -> Placed:
        """Return where a weight is in the model.

        Raises:
            ModelError: Megatron's model has no such tensor.
        """
        if tensor.name in _TOP:
            zeros = (0,) * len(tensor.shape)
            return Placed(tensor, tensor.shape, (Place(_TOP[tensor.name], tensor.shape, (zeros,)),))
        if (match := _LAYER.fullmatch(tensor.name)) is None:
            raise self._unknown(tensor.name)
        layer, rest = int(match[1]), match[2]
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
        for layer in range(self._num_layers):
            key, at = ("decoder.layers.", layer) if self.is_stacked else (f"decoder.layers.{layer}.", 0)
            num = self._num_layers if self.is_stacked else 1
            yield from (f"{key}{module}._extra_state/shard_{at}_{num}" for module in _STATEFUL)
            for expert in range(self._num_experts):
                region = (
                    f"{at}.{expert}_{num}.{self._num_experts}" if self.is_stacked else f"{expert}_{self._num_experts}"
                )
                yield from (f"{key}{_EXPERTS.format(fc)}._extra_state/shard_{region}" for fc in ("fc1", "fc2"))

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
        if not self.is_stacked:
            places = (Place(f"decoder.layers.{layer}.{key}", whole, tuple(offsets)) for key in keys)
            return Placed(tensor, chunk, tuple(places))
        stacked = tuple((layer, *offset) for offset in offsets)
        places = (Place(f"decoder.layers.{key}", (self._num_layers, *whole), stacked) for key in keys)
        return Placed(tensor, (1, *chunk), tuple(places))

    def _unknown(self, fqn: str) -> ModelError:
        problem = "Megatron-Core's model has no such tensor"
        hint = "pack with --dequantize or --drop what is not a weight of the model"
        return ModelError(f"{self._where}: {fqn!r}", problem, hint, code="model.not-in-megatron")
