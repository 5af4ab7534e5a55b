"""Tensors of a torchtitan checkpoint under Hugging Face's names, in the layouts that they have in its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from manifests.errors import SourceError
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
from reshard.tensors.lazy import Buffer, derive, read_blocks
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
    found = config[field]
    assert isinstance(found, int), "model_shape checked it"
    return found


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
