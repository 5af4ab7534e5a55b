"""Tensors of torchtitan under Hugging Face's names and the reverse, in the layouts that either has, family by family.

Source: torchtitan 0.3.0, torchtitan/models/{llama3,qwen3,deepseek_v3,gpt_oss}/state_dict_adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from manifests.errors import ModelError, Parameter, SourceError
from reshard.archives.tensors import swapped
from reshard.formats.saved_state import Place, Placed, in_place
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import Buffer, MemoryFile, derive, have_equal_bytes, read_blocks
from reshard.tensors.slices import FusedHeads, Slices, indices_of, merge_slices
from stores.bundles import TensorAt

EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"
TOP = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
BALANCE = "moe.expert_bias_E"  # a buffer
FUSED = "attention.qkv_linear.wqkv"  # of optimizer state: state dicts of models have its three parts

_ROUTED = "moe.routed_experts.inner_experts"
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QKV = {f"attention.qkv_linear.w{part}": f"self_attn.{part}_proj" for part in "qkv"} | {
    "attention.wo": "self_attn.o_proj"
}
_MLP = {"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
_QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
_ROUTER = {"moe.router.gate": "mlp.gate"}
_EXPERTS = {
    f"{_ROUTED}.w1_EFD": "mlp.experts.{}.gate_proj.weight", f"{_ROUTED}.w2_EDF": "mlp.experts.{}.down_proj.weight",
    f"{_ROUTED}.w3_EFD": "mlp.experts.{}.up_proj.weight",
}  # fmt: skip
_SHARED = {
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj", "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}  # fmt: skip
_MLA = {
    "attention.wq_a": "self_attn.q_a_proj", "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj", "attention.wq": "self_attn.q_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa", "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj", "attention.wo": "self_attn.o_proj",
}  # fmt: skip
_MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "mtp_norm": "shared_head.norm"}
# What Hugging Face's MTP layers have of their own, and torchtitan's share with the model.
_MTP_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}

Copies = Mapping[str, Sequence[str]]  # as `mtp_copies` returns them

_CONVERT = "convert it with torchtitan's scripts/checkpoint_conversion/convert_to_hf.py"
_UNKNOWN = "model.unknown-torchtitan-layout"
_OTHER_MODEL = "model.not-in-torchtitan"


@dataclass(frozen=True, kw_only=True, slots=True)
class TitanNames:
    """The names within a layer.

    Of `modules`, which own `leaves`; of lone `parameters`; of `experts`, stacked along a first axis, whose number in
    Hugging Face's names is {}; and of `transposed` parameters, whose last two axes are swapped. `is_rotated`: RoPE
    pairs adjacent rows of query and key heads, and Hugging Face's rows of one half with those of the other.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    transposed: Mapping[str, str] = field(default_factory=dict)
    leaves: tuple[str, ...] = ("weight",)  # parameters of modules
    balanced: str | None = None  # the weight of routers whose balancing bias Hugging Face's model does not have
    is_rotated: bool = False


_FAMILIES: Mapping[str, TitanNames] = {
    "llama": TitanNames(modules=_NORMS | _QKV | _MLP, is_rotated=True),
    "qwen3": TitanNames(modules=_NORMS | _QKV | _MLP | _QK_NORMS),
    "qwen3_moe": TitanNames(
        modules=_NORMS | _QKV | _MLP | _QK_NORMS | _ROUTER, experts=_EXPERTS, balanced="mlp.gate.weight"
    ),
    "deepseek_v3": TitanNames(
        modules=_NORMS | _MLA | _MLP | _ROUTER | _SHARED | _MTP,
        parameters={BALANCE: "mlp.gate.e_score_correction_bias"},
        experts=_EXPERTS,
    ),
    "gpt_oss": TitanNames(
        modules=_NORMS | _QKV | {"moe.router.gate": "mlp.router"},
        parameters={
            "attention.sinks": "self_attn.sinks",
            f"{_ROUTED}.mlp1_bias_EG": "mlp.experts.gate_up_proj_bias",
            f"{_ROUTED}.mlp2_bias_ED": "mlp.experts.down_proj_bias",
        },
        transposed={
            f"{_ROUTED}.mlp1_weight_EGD": "mlp.experts.gate_up_proj",
            f"{_ROUTED}.mlp2_weight_EDF": "mlp.experts.down_proj",
        },
        leaves=("weight", "bias"),
        balanced="mlp.router.weight",
    ),
}


def titan_names(config: Mapping[str, object], where: str, hint: str | None = None) -> TitanNames:
    """Return the names of the family that a config is of. `hint`: of errors, where torchtitan's model is not read."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        problem = f"expected an architecture whose torchtitan layout is known ({', '.join(_FAMILIES)})"
        raise ModelError(where, f"{problem}, found {str(kind)[:80]!r}", hint or _CONVERT, code=_UNKNOWN)
    # RoPE pairs adjacent rows in torchtitan's model, and by this field in that of transformers.
    if kind == "deepseek_v3" and (interleaved := config.get("rope_interleave", True)) is not True:
        problem = f"torchtitan's model expects True, found {str(interleaved)[:80]}"
        place = f"{where}: config.json: rope_interleave"
        raise ModelError(place, problem, hint or "use the config.json of this model", code=_OTHER_MODEL)
    return _FAMILIES[kind]


_LAYER = re.compile(r"^(mtp_)?layers\.(\d{1,6})\.")
_OLDER = {"output.weight": HEAD}  # names of earlier versions, and those that only its adapter still has
_OLDER_PARTS = re.compile(r"^attention\.(w[qkv])\.")
_OLDER_EXPERTS = {"mlp1_weight": "_EGD", "mlp1_bias": "_EG", "mlp2_weight": "_EDF", "mlp2_bias": "_ED"}
_SAVE = "save the checkpoint again with the names of one version of torchtitan"


def has_torchtitan_names(names: Iterable[str]) -> bool:
    return EMBEDDING in names


def is_without_place(name: str, config: Mapping[str, object], where: str) -> bool:
    """Return whether Hugging Face's model has no place for a buffer, which torchtitan's adapter leaves out too."""
    return titan_names(config, where).balanced is not None and name.endswith(f".{BALANCE}")


def mtp_copies(names: Iterable[str], config: Mapping[str, object]) -> Copies:
    """Return, by torchtitan's name, Hugging Face's names of what MTP layers share with the model."""
    numbers = {int(match[2]) for match in map(_LAYER.match, names) if match and match[1]}
    layers = [_count(config, "num_hidden_layers") + number for number in sorted(numbers)]
    return {owner: [f"model.layers.{layer}.{part}" for layer in layers] for part, owner in _MTP_COPIES.items()}


def under_huggingface_names(
    tensors: Mapping[str, Slices], config: Mapping[str, object], where: str, copies: Copies
) -> dict[str, Slices]:
    """Return the slices of each tensor under its name in Hugging Face's model, in the layout that it has there.

    Tensors are weights, or one kind of optimizer state; `copies` is what `mtp_copies` returned. Names that torchtitan's
    model does not have are kept, to be refused by name. A query, key or value projection may also be part of a fused
    one, as our exports for torchtitan have optimizer state for either attention: they must be equal.
    """
    names = titan_names(config, where)
    converted_slices: dict[str, Slices] = {}
    is_fused: dict[str, bool] = {}
    for name, slices in tensors.items():
        fused = f".{FUSED}." in name
        for new, converted in _converted(name, slices, names, config, copies):
            converted = tuple(replace(part, name=new) for part in converted)
            if is_fused.setdefault(new, fused) != fused:
                converted = (_compared(merge_slices(converted_slices[new]), merge_slices(converted)),)
            elif new in converted_slices:
                problem = f"is {new!r} of Hugging Face's model, which another tensor is too"
                raise SourceError(f"{where}: {name!r}", problem, _SAVE, code="source.tensor-twice")
            converted_slices[new] = converted
    return converted_slices


def _compared(tensor: TensorAt, copy: TensorAt) -> TensorAt:
    """Return a tensor that is compared with its copy when it is read."""
    if (tensor.dtype, tensor.shape) != (copy.dtype, copy.shape):
        problem = f"is {tensor.dtype} {list(tensor.shape)}, and {copy.dtype} {list(copy.shape)} in the fused projection"
        raise SourceError(tensor.place, problem, _SAVE, code="source.tensor-twice")

    def equal_blocks() -> Iterator[Buffer]:
        for block, other in zip(read_blocks(tensor), read_blocks(copy), strict=True):
            if block != other:
                problem = "differs between the fused projection of queries, keys and values and its own"
                raise SourceError(tensor.place, problem, _SAVE, code="source.tensor-twice")
            yield block

    return derive(tensor, tensor.dtype, "equal to its copy", (tensor, copy), equal_blocks)


def _converted(
    name: str, slices: Slices, names: TitanNames, config: Mapping[str, object], copies: Copies
) -> Iterator[tuple[str, Slices]]:
    match = _LAYER.match(name)
    if match is None:
        name = _OLDER.get(name, name)
        yield from ((new, slices) for new in (TOP.get(name, name), *copies.get(name, ())))
        return
    layer = int(match[2]) + (_count(config, "num_hidden_layers") if match[1] else 0)
    prefix, rest = f"model.layers.{layer}", _current(name[match.end() :], names)
    module, _, leaf = rest.rpartition(".")
    if module == FUSED:
        for part, of_part in FusedHeads.of(config).split(slices).items():
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
    weight, num_heads = merge_slices(slices), FusedHeads.of(config).num_heads(part)
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
    """The names and layouts of a model's tensors in torchtitan."""

    def __init__(self, config: Mapping[str, object], fqns: Mapping[str, object], where: str) -> None:
        self._config, self._where = config, where
        self._names: TitanNames = titan_names(config, where, _with_other_names())
        self._top = {hf: name for name, hf in TOP.items()}
        self._modules = {hf: name for name, hf in self._names.modules.items()}
        self._parameters = {hf: name for name, hf in self._names.parameters.items()}
        self._transposed = {hf: name for name, hf in self._names.transposed.items()}
        self._experts = {hf: name for name, hf in self._names.experts.items()}
        self._num_experts = 1 + max((int(match[1]) for fqn in fqns if (match := _EXPERT.search(fqn))), default=-1)

    def balances(self, weights: Mapping[str, TensorAt]) -> Iterator[Placed]:
        """Yield the biases that balance routers, as zeros, where Hugging Face's model has none."""
        for fqn, tensor in weights.items():
            match = _HF_LAYER.match(fqn)
            if match and match[2] == self._names.balanced:
                data = bytes(4 * tensor.shape[0])
                file = MemoryFile(f"zeros for {fqn}", data)
                zeros = TensorAt(fqn, "F32", tensor.shape[:1], file, 0, len(data))
                yield in_place(zeros, f"{self._layer(int(match[1]))}.{BALANCE}")

    def without_copies(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint without the copies that its MTP layers have of the model's embedding and head."""
        weights, copies = checkpoint.tensors, set[str]()
        for fqn, tensor in weights.items():
            if (match := _HF_LAYER.match(fqn)) and match[2] in _MTP_COPIES:
                names = (TOP[_MTP_COPIES[match[2]]], TOP[EMBEDDING], TOP[HEAD])  # a tied one is stored once
                owner = next(weights[name] for name in names if name in weights)
                if not have_equal_bytes(tensor, owner):
                    problem = f"differs from {owner.name!r}, which torchtitan's MTP layers share with the model"
                    hint = f"pack without its MTP layer: reshard pack SOURCE --drop model.layers.{match[1]}"
                    raise ModelError(f"{self._where}: {fqn!r}", problem, hint, code=_OTHER_MODEL)
                copies.add(fqn)
        kinds = {kind: _without(copies, tensors) for kind, tensors in checkpoint.moments.items()}
        return replace(checkpoint, tensors=_without(copies, weights), moments=kinds)

    def place(self, tensor: TensorAt, *, is_fused: bool) -> Placed:
        """Return where a weight, or the optimizer state of one, is in the model.

        `is_fused`: rows of queries, keys and values are those of one projection as well, as in the optimizer state of
        torchtitan's fused attention.
        """
        fqn = tensor.name
        if fqn in self._top:
            return in_place(tensor, self._top[fqn])
        if (match := _HF_LAYER.match(fqn)) is None:
            raise self._unknown(fqn)
        prefix, rest = self._layer(int(match[1])), match[2]
        if expert := _EXPERT.search(f".{rest}"):
            return self._expert(tensor, prefix, rest, int(expert[1]))
        if rest in self._transposed:
            return in_place(swapped(tensor), f"{prefix}.{self._transposed[rest]}")
        if rest in self._parameters:
            return in_place(tensor, f"{prefix}.{self._parameters[rest]}")
        module, _, leaf = rest.rpartition(".")
        if module not in self._modules or leaf not in self._names.leaves:  # torch loads what a model has alone
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
        heads = FusedHeads.of(self._config)
        if self._names.is_rotated and part != "v":
            num_heads = heads.num_heads(part)
            how, make = f"in torchtitan's order of rows of {num_heads} heads", partial(_interleaved, tensor, num_heads)
            tensor = derive(tensor, tensor.dtype, how, (tensor,), make)
        if fused is None:
            return in_place(tensor, key)
        whole, shared = heads.places(part, tensor.shape)
        chunk = (tensor.shape[0] // len(shared), *tensor.shape[1:])
        separate = tuple((number * chunk[0], *shared[0][1:]) for number in range(len(shared)))
        return Placed(tensor, chunk, (Place(key, tensor.shape, separate), Place(fused, whole, tuple(shared))))

    def _unknown(self, fqn: str) -> ModelError:
        problem = "torchtitan's model has no such tensor"
        hint = f"{_with_other_names()}; if weights are quantized, reshard pack SOURCE --dequantize bf16"
        return ModelError(f"{self._where}: {fqn!r}", problem, hint, code=_OTHER_MODEL)


def _without(copies: Container[str], tensors: Mapping[str, TensorAt]) -> dict[str, TensorAt]:
    return {fqn: tensor for fqn, tensor in tensors.items() if fqn not in copies}


def _with_other_names() -> str:
    return f"export without {Parameter('names', 'torchtitan')}, which keeps Hugging Face's names"


def _interleaved(weight: TensorAt, num_heads: int) -> Iterator[Buffer]:
    """Yield the rows of each head: the first of its first half, the first of its second half, and so on."""
    row = weight.nbytes // weight.shape[0]
    for head in read_blocks(weight, weight.nbytes // num_heads):
        rows = [bytes(head[begin : begin + row]) for begin in range(0, len(head), row)]
        half = len(rows) // 2
        yield b"".join(part for pair in zip(rows[:half], rows[half:], strict=True) for part in pair)
