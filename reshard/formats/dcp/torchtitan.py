"""Tensors of torchtitan under Hugging Face's names and the reverse, in the layouts that either has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from manifests.errors import ModelError, Parameter, SourceError
from reshard.archives.strides import swapped
from reshard.formats.dcp.names import (
    BALANCE,
    EMBEDDING,
    FUSED,
    TOP,
    TitanNames,
    heads_of,
    titan_names,
)
from reshard.formats.rows import Slices, fused_heads, indices_of
from reshard.formats.saved_state import Place, Placed, in_place
from reshard.tensors.lazy import Buffer, MemoryFile, derive, read_blocks
from reshard.tensors.slices import merge_slices
from stores.bundles import TensorAt

_LAYER = re.compile(r"^(mtp_)?layers\.(\d{1,6})\.")
_OLDER = {"output.weight": "lm_head.weight"}  # names of earlier versions, and those that only its adapter still has
_OLDER_PARTS = re.compile(r"^attention\.(w[qkv])\.")
_OLDER_EXPERTS = {"mlp1_weight": "_EGD", "mlp1_bias": "_EG", "mlp2_weight": "_EDF", "mlp2_bias": "_ED"}
_SAVE = "save the checkpoint again with the names of one version of torchtitan"


def has_torchtitan_names(names: Iterable[str]) -> bool:
    """Return whether weights have torchtitan's names."""
    return EMBEDDING in names


def is_without_place(name: str, config: Mapping[str, object], where: str) -> bool:
    """Return whether Hugging Face's model has no place for a buffer, which torchtitan's adapter leaves out too."""
    return titan_names(config, where).balanced is not None and name.endswith(f".{BALANCE}")


def under_huggingface_names(
    tensors: Mapping[str, Slices], config: Mapping[str, object], where: str
) -> dict[str, Slices]:
    """Return the slices of each tensor under its name in Hugging Face's model, in the layout that it has there.

    Tensors are weights, or one kind of optimizer state. Names that torchtitan's model does not have are kept, to be
    refused by name.

    Raises:
        ModelError: torchtitan's layout of this architecture is not known.
        SourceError: two tensors have names, of two versions of torchtitan, of one weight.
    """
    names = titan_names(config, where)
    found: dict[str, Slices] = {}
    for name, slices in tensors.items():
        for new, converted in _converted(name, slices, names, config):
            if new in found:
                problem = f"is {new!r} of Hugging Face's model, which another tensor is too"
                raise SourceError(f"{where}: {name!r}", problem, _SAVE, code="source.tensor-twice")
            found[new] = tuple(replace(one, name=new) for one in converted)
    return found


def _converted(
    name: str, slices: Slices, names: TitanNames, config: Mapping[str, object]
) -> Iterator[tuple[str, Slices]]:
    match = _LAYER.match(name)
    if match is None:
        name = _OLDER.get(name, name)
        yield TOP.get(name, name), slices
        return
    layer = int(match[2]) + (_count(config, "num_hidden_layers") if match[1] else 0)
    prefix, rest = f"model.layers.{layer}", _current(name[match.end() :], names)
    module, _, leaf = rest.rpartition(".")
    if module == FUSED:
        for part, of_part in fused_heads(slices, *heads_of(config)).items():
            yield f"{prefix}.self_attn.{part}_proj.{leaf}", _in_halves(of_part, part, names, config)
    elif rest in names.experts:
        for expert, of_one in enumerate(indices_of(slices)):
            yield f"{prefix}.{names.experts[rest].format(expert)}", of_one
    elif rest in names.transposed:
        yield f"{prefix}.{names.transposed[rest]}", (swapped(merge_slices(slices)),)
    elif rest in names.parameters:
        yield f"{prefix}.{names.parameters[rest]}", slices
    elif module in names.modules:
        of_head = module.rpartition(".w")[2] if module.startswith("attention.qkv_linear.") else ""
        yield f"{prefix}.{names.modules[module]}.{leaf}", _in_halves(slices, of_head, names, config)
    else:
        yield name, slices


def _current(rest: str, names: TitanNames) -> str:
    """Return the name that version 0.3.0 has for a parameter of a layer."""
    if (old := _OLDER_PARTS.match(rest)) and f"attention.{old[1]}" not in names.modules:
        return rest.replace("attention.", "attention.qkv_linear.", 1)
    return rest + _OLDER_EXPERTS.get(rest.rpartition(".")[2], "")


def _count(config: Mapping[str, object], field: str) -> int:
    count = config[field]
    assert isinstance(count, int), "model_shape checked it"
    return count


def _in_halves(slices: Slices, part: str, names: TitanNames, config: Mapping[str, object]) -> Slices:
    """Return a query or key projection with the rows of each head as in Hugging Face's files: the even ones first."""
    if not names.is_rotated or part not in ("q", "k"):
        return slices
    weight, num_heads = merge_slices(slices), heads_of(config)[part == "k"]
    how = f"in Hugging Face's order of rows of {num_heads} heads"
    return (derive(weight, weight.dtype, how, (weight,), partial(_halves, weight, num_heads)),)


def _halves(weight: TensorAt, num_heads: int) -> Iterator[Buffer]:
    row = weight.nbytes // weight.shape[0]
    for head in read_blocks(weight, weight.nbytes // num_heads):
        rows = [bytes(head[begin : begin + row]) for begin in range(0, len(head), row)]
        yield b"".join((*rows[::2], *rows[1::2]))


_HF_LAYER = re.compile(r"^model\.layers\.(\d{1,6})\.(.+)$")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")
_OF_HEADS = re.compile(r"^self_attn\.([qkv])_proj\.(weight|bias)$")


class TitanModel:
    """The names and layouts of a model's tensors in torchtitan.

    Raises:
        ModelError: torchtitan's layout of the architecture is not known.
    """

    def __init__(self, config: Mapping[str, object], fqns: Mapping[str, object], where: str) -> None:
        self._config, self._where = config, where
        self._names: TitanNames = titan_names(config, where)
        self._top = {hf: own for own, hf in TOP.items()}
        self._modules = {hf: own for own, hf in self._names.modules.items()}
        self._parameters = {hf: own for own, hf in self._names.parameters.items()}
        self._transposed = {hf: own for own, hf in self._names.transposed.items()}
        self._experts = {hf: own for own, hf in self._names.experts.items()}
        self._num_experts = 1 + max((int(found[1]) for fqn in fqns if (found := _EXPERT.search(fqn))), default=-1)

    def balances(self, weights: Mapping[str, TensorAt]) -> Iterator[Placed]:
        """Yield the biases that balance routers, as zeros, where Hugging Face's model has none."""
        for fqn, tensor in weights.items():
            match = _HF_LAYER.match(fqn)
            if match and match[2] == self._names.balanced:
                data = bytes(4 * tensor.shape[0])
                file = MemoryFile(f"zeros for {fqn}", data)
                zeros = TensorAt(fqn, "F32", tensor.shape[:1], file, 0, len(data))
                yield in_place(zeros, f"{self._layer(int(match[1]))}.{BALANCE}")

    def place(self, tensor: TensorAt, *, is_fused: bool) -> Placed:
        """Return where a weight, or the optimizer state of one, is in the model.

        `is_fused`: rows of queries, keys and values are those of one projection as well, as in the optimizer state of
        torchtitan's fused attention.

        Raises:
            ModelError: torchtitan's model has no such tensor.
        """
        fqn = tensor.name
        if fqn in self._top:
            return in_place(tensor, self._top[fqn])
        if (match := _HF_LAYER.match(fqn)) is None:
            raise self._unknown(fqn)
        prefix, rest = self._layer(int(match[1])), match[2]
        if found := _EXPERT.search(f".{rest}"):
            return self._expert(tensor, prefix, rest, int(found[1]))
        if rest in self._transposed:
            return in_place(swapped(tensor), f"{prefix}.{self._transposed[rest]}")
        if rest in self._parameters:
            return in_place(tensor, f"{prefix}.{self._parameters[rest]}")
        module, _, leaf = rest.rpartition(".")
        if module not in self._modules:
            raise self._unknown(fqn)
        key = f"{prefix}.{self._modules[module]}.{leaf}"
        if self._modules[module].startswith("attention.qkv_linear.") and (match := _OF_HEADS.match(rest)):
            return self._heads(tensor, key, f"{prefix}.{FUSED}.{leaf}" if is_fused else None, match[1])
        return in_place(tensor, key)

    def _layer(self, number: int) -> str:
        num_layers = self._config["num_hidden_layers"]
        assert isinstance(num_layers, int), "model_shape checked it"
        return f"layers.{number}" if number < num_layers else f"mtp_layers.{number - num_layers}"

    def _expert(self, tensor: TensorAt, prefix: str, rest: str, expert: int) -> Placed:
        name = _EXPERT.sub(".experts.{}.", f".{rest}").removeprefix(".")
        if name not in self._experts:
            raise self._unknown(tensor.name)
        shape = (1, *tensor.shape)
        place = Place(
            f"{prefix}.{self._experts[name]}",
            (self._num_experts, *tensor.shape),
            ((expert, *(0 for _ in tensor.shape)),),
        )
        return Placed(tensor, shape, (place,))

    def _heads(self, tensor: TensorAt, key: str, fused: str | None, part: str) -> Placed:
        """Return a projection of heads, in the order of rows that torchtitan's RoPE has; in chunks if it is fused."""
        queries, keys = heads_of(self._config)
        if self._names.is_rotated and part != "v":
            num_heads = queries if part == "q" else keys
            how, make = f"in torchtitan's order of rows of {num_heads} heads", partial(_interleaved, tensor, num_heads)
            tensor = derive(tensor, tensor.dtype, how, (tensor,), make)
        if fused is None:
            return in_place(tensor, key)
        per_key, rest = queries // keys, (0,) * (len(tensor.shape) - 1)
        begin, count = {"q": (0, per_key), "k": (per_key, 1), "v": (per_key + 1, 1)}[part]
        rows = tensor.shape[0] // (keys * count)  # of a head
        whole = (rows * (queries + 2 * keys), *tensor.shape[1:])
        own = tuple((group * count * rows, *rest) for group in range(keys))
        shared = tuple(((group * (per_key + 2) + begin) * rows, *rest) for group in range(keys))
        chunk = (count * rows, *tensor.shape[1:])
        return Placed(tensor, chunk, (Place(key, tensor.shape, own), Place(fused, whole, shared)))

    def _unknown(self, fqn: str) -> ModelError:
        problem = "torchtitan's model has no such tensor"
        hint = f"export without {Parameter('names', 'torchtitan')}, which keeps Hugging Face's names"
        return ModelError(f"{self._where}: {fqn!r}", problem, hint, code="model.not-in-torchtitan")


def _interleaved(weight: TensorAt, num_heads: int) -> Iterator[Buffer]:
    """Yield the rows of each head: the first of its first half, the first of its second half, and so on."""
    row = weight.nbytes // weight.shape[0]
    for head in read_blocks(weight, weight.nbytes // num_heads):
        rows = [bytes(head[begin : begin + row]) for begin in range(0, len(head), row)]
        half = len(rows) // 2
        yield b"".join(one for pair in zip(rows[:half], rows[half:], strict=True) for one in pair)
