"""torchtitan's names of a model's weights, and what its layouts of them are in Hugging Face's.

Source: torchtitan 0.3.0, torchtitan/models/{llama3,qwen3}/state_dict_adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from manifests.errors import ModelError, SourceError
from manifests.slices import Slice
from reshard.tensors.checkpoint import TensorAt
from reshard.tensors.lazy import Buffer, DerivedFile, derive, read_blocks
from reshard.tensors.slices import merge_slices

__all__ = ["has_torchtitan_names", "under_huggingface_names"]

_EMBEDDING = "tok_embeddings.weight"
_NUMBER = re.compile(r"^layers\.(\d{1,6})\.")
_TOP = {_EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight",
        "output.weight": "lm_head.weight"}  # fmt: skip
_LAYER = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention.wo": "self_attn.o_proj",
    "attention.qkv_linear.wq": "self_attn.q_proj", "attention.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj", "attention.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj", "attention.wv": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm", "moe.router.gate": "mlp.gate",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
_EXPERTS = {
    "moe.routed_experts.inner_experts.w1_EFD": "gate_proj", "moe.routed_experts.inner_experts.w2_EDF": "down_proj",
    "moe.routed_experts.inner_experts.w3_EFD": "up_proj",
}  # fmt: skip
_HEADS = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
_INTERLEAVED = "llama"  # model type whose rotary embedding pairs adjacent rows in torchtitan
_SUPPORTED = (_INTERLEAVED, "qwen3", "qwen3_moe")

_CONVERT = "convert it with torchtitan's scripts/checkpoint_conversion/convert_to_hf.py"
_SAVE = "save the checkpoint again with the names of one version of torchtitan"
_UNKNOWN = "model.unknown-torchtitan-layout"

Slices = tuple[TensorAt, ...]


def has_torchtitan_names(names: Mapping[str, object]) -> bool:
    """Return whether weights have torchtitan's names."""
    return _EMBEDDING in names


def under_huggingface_names(
    tensors: Mapping[str, Slices], config: Mapping[str, object], where: str
) -> dict[str, Slices]:
    """Return the slices of each tensor under its name in Hugging Face's model, in the layout that it has there.

    Names that torchtitan's model does not have are kept, to be refused by name.

    Raises:
        ModelError: torchtitan's layout of this architecture is not known.
        SourceError: two tensors have names, of two versions of torchtitan, of one weight.
    """
    kind = config.get("model_type")
    if kind not in _SUPPORTED:
        problem = f"found torchtitan's names in a checkpoint of {str(kind)[:80]!r}, expected {', '.join(_SUPPORTED)}"
        raise ModelError(where, problem, _CONVERT, code=_UNKNOWN)
    found: dict[str, Slices] = {}
    for name, slices in tensors.items():
        for new, converted in _converted(name, slices, config, interleaved=kind == _INTERLEAVED):
            if new in found:
                problem = f"is {new!r} of Hugging Face's model, which another tensor is too"
                raise SourceError(f"{where}: {name!r}", problem, _SAVE, code="source.tensor-twice")
            found[new] = tuple(replace(one, name=new) for one in converted)
    return found


def _converted(
    name: str, slices: Slices, config: Mapping[str, object], *, interleaved: bool
) -> Iterator[tuple[str, Slices]]:
    match = _NUMBER.match(name)
    if match is None:
        yield _TOP.get(name, name), slices
        return
    prefix, rest = f"model.layers.{match[1]}", name[match.end() :]
    if rest in _EXPERTS:
        for expert, of_one in enumerate(_split(slices)):
            yield f"{prefix}.mlp.experts.{expert}.{_EXPERTS[rest]}.weight", of_one
        return
    module = _LAYER.get(rest.removesuffix(".weight"))
    if module is None or not rest.endswith(".weight"):
        yield name, slices
        return
    if interleaved and module in _HEADS:
        slices = (_with_halves(merge_slices(slices), _num_heads(config, module)),)
    yield f"{prefix}.{module}.weight", slices


def _num_heads(config: Mapping[str, object], module: str) -> int:
    found = config.get(_HEADS[module]) or config.get("num_attention_heads")
    assert isinstance(found, int), "model_shape checked it"
    return found


def _split(slices: Slices) -> Iterator[Slices]:
    """Yield the slices of each expert: tensors are stacked along their first axis, and slices are contiguous."""
    for one in slices:
        if isinstance(one.file, DerivedFile):
            problem = "expert weights that are not contiguous in their file, which is not supported"
            raise ModelError(f"{one.file}: {one.name!r}", problem, _CONVERT, code=_UNKNOWN)
    for expert in range(slices[0].whole_shape[0]):
        of_one = []
        for one in slices:
            at = expert - one.offset[0]
            if 0 <= at < one.shape[0]:
                nbytes = one.nbytes // one.shape[0]
                region = Slice(offset=one.offset[1:], shape=one.shape[1:], whole_shape=one.whole_shape[1:])
                part = None if region.shape == region.whole_shape else region
                of_one.append(
                    replace(one, shape=one.shape[1:], begin=one.begin + at * nbytes, nbytes=nbytes, part=part)
                )
        yield tuple(of_one)


def _with_halves(weight: TensorAt, num_heads: int) -> TensorAt:
    """Return a projection whose rows are, in each head, first the even and then the odd ones of `weight`."""
    return derive(
        weight, weight.dtype, "in Hugging Face's order of rows", (weight,), partial(_halves, weight, num_heads)
    )


def _halves(weight: TensorAt, num_heads: int) -> Iterator[Buffer]:
    row = weight.nbytes // weight.shape[0]
    for head in read_blocks(weight, weight.nbytes // num_heads):
        rows = [bytes(head[begin : begin + row]) for begin in range(0, len(head), row)]
        yield b"".join((*rows[::2], *rows[1::2]))
