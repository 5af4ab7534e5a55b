"""Tensors of a Megatron-Core checkpoint under Hugging Face's names, in the layouts that they have in its files."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping

from manifests.errors import SourceError
from reshard.formats.dcp.names import heads_of
from reshard.formats.megatron.names import EMBEDDING, HEAD, MTP_COPIES, NORM, QKV, megatron_names
from reshard.formats.rows import Slices, fused_heads, indices_of, rows_of
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
    """Return whether the tensors of a checkpoint have Megatron-Core's names."""
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

    Raises:
        ModelError: Megatron's layout of this architecture is not known.
        SourceError: two different tensors are one of Hugging Face's model, or slices are not contiguous in their files.
    """
    model = _Model(config, tensors, where)
    found: dict[str, Slices] = {}
    for name, slices in tensors.items():
        for new, converted in model.converted(name, slices):
            named = tuple(
                TensorAt(new, one.dtype, one.shape, one.file, one.begin, one.nbytes, one.blake3, one.part)
                for one in converted
            )
            if found.setdefault(new, named) != named:  # keys of several layer specs may share a place
                problem = f"is {new!r} of Hugging Face's model, which another tensor is too"
                hint = "save the checkpoint again with the layers of one release of Megatron-Core"
                raise SourceError(f"{where}: {name!r}", problem, hint, code="source.tensor-twice")
    return found


class _Model:
    def __init__(self, config: Mapping[str, object], names: Container[str], where: str) -> None:
        self._config, self._names = config, megatron_names(config, where)
        self._parameters = _inverse({**self._names.parameters, **self._names.mtp})
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
            for part, rows in fused_heads(slices, *heads_of(self._config)).items():
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


def _inverse(names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {own: theirs for theirs, spellings in names.items() for own in spellings}


def _count(config: Mapping[str, object], field: str) -> int:
    found = config.get(field) or 0
    assert isinstance(found, int), "model_shape checked it"
    return found
