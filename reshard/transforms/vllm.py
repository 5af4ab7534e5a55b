"""A model's tensors as a rank of vLLM has them: fused projections, slices of heads and columns, a padded vocabulary.

Source: vLLM 0.33.0, model_executor/models/llama.py, layers/linear.py, layers/vocab_parallel_embedding.py,
layers/attention/attention.py, model_loader/sharded_state_loader.py and distributed/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from struct import pack

from manifests.errors import ModelError, UsageError
from manifests.models import ModelShape
from reshard.tensors.checkpoint import TensorAt
from reshard.tensors.lazy import Buffer, MemoryFile, derive, read_blocks

__all__ = ["VllmModel"]

_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FUSED = {"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _GATE_UP}
_BY_COLUMNS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_WHOLE = ("norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")  # ends of names
_SCALES = ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")  # of an attention without a quantized cache
_VOCAB_ALIGNMENT = 64  # rows to which vLLM pads the vocabulary


class VllmModel:
    """The tensors of each rank of vLLM, by its names.

    Raises:
        ModelError: vLLM's layout of the architecture is not known, or the weights are quantized.
        UsageError: the model cannot be split so.
    """

    def __init__(
        self, shape: ModelShape, config: Mapping[str, object], tensors: Mapping[str, TensorAt], pp: int, tp: int
    ) -> None:
        if shape.architecture not in _FAMILIES:
            problem = f"vLLM's layout of {shape.architecture} is not known, of {', '.join(_FAMILIES)} it is"
            hint = "vLLM serves the packed folder itself, without --load-format sharded_state"
            raise ModelError("config.json: architectures", problem, hint, code="model.not-in-vllm")
        self._shape, self._pp, self._tp = shape, pp, tp
        self._is_tied = bool(shape.ties)
        self._num_queries, self._num_keys = _heads(config)
        _check_degrees(shape, self._num_queries, self._num_keys, pp, tp)
        ignored = shape.ignored_suffixes or ("\0",)
        self._tensors = {fqn: tensor for fqn, tensor in tensors.items() if not fqn.endswith(ignored)}
        if self._is_tied:
            owner = next(self._tensors[fqn] for fqn in shape.ties[0] if fqn in self._tensors)
            self._tensors = {**self._tensors, _EMBEDDING: owner, _HEAD: owner}
        self._by_layer: list[dict[str, TensorAt]] = [{} for _ in range(shape.num_layers)]
        for fqn, tensor in self._tensors.items():
            if match := _LAYER.fullmatch(fqn):
                self._by_layer[int(match[1])][match[2]] = tensor
            elif fqn not in (_EMBEDDING, _NORM, _HEAD):
                raise _unknown(fqn)

    def rank(self, stage: int, rank: int) -> list[TensorAt]:
        """Return the tensors of tensor-parallel rank `rank` of a pipeline stage."""
        found = []
        # Of a tied pair on one rank, vLLM has the name that sorts first.
        if stage == 0 and not (self._is_tied and self._pp == 1):
            found.append(self._vocabulary(_EMBEDDING, rank))
        for number in self._layers_of(stage):
            prefix = f"model.layers.{number}."
            found += [replace(one, name=prefix + one.name) for one in self._layer(self._by_layer[number], rank)]
        if stage == self._pp - 1:
            found += [self._tensors[_NORM], self._vocabulary(_HEAD, rank)]
        return found

    def _layers_of(self, stage: int) -> range:
        """Return the layers of a stage: the remainder goes to the last stages but one, backwards, as in vLLM."""
        fewest, more = divmod(self._shape.num_layers, self._pp)
        counts = [fewest] * self._pp
        for position in range(2, more + 2):
            counts[-position] += 1
        begin = sum(counts[:stage])
        return range(begin, begin + counts[stage])

    def _layer(self, tensors: Mapping[str, TensorAt], rank: int) -> Iterator[TensorAt]:
        parts = {f"{part}.{leaf}" for of in _FUSED.values() for part in of for leaf in ("weight", "bias")}
        for leaf in ("weight", "bias"):
            for fused, names in _FUSED.items():
                there = [tensors[name] for part in names if (name := f"{part}.{leaf}") in tensors]
                if there:
                    yield self._fused(f"{fused}.{leaf}", there, len(names), rank)
        for name, tensor in tensors.items():
            if name in parts:
                continue
            if name in _BY_COLUMNS:
                yield _columns(replace(tensor, name=name), rank, self._tp)
            elif name.endswith(_WHOLE):
                yield replace(tensor, name=name)
            else:
                raise _unknown(tensor.name)
        for scale in _SCALES:
            data = pack("<f", 1.0)
            yield TensorAt(f"self_attn.attn.{scale}", "F32", (), MemoryFile("1.0", data), 0, len(data))

    def _fused(self, name: str, parts: Sequence[TensorAt], num_parts: int, rank: int) -> TensorAt:
        """Return rows of projections, one below the other; key and value heads are on several ranks if they are few."""
        if len(parts) < num_parts or len({part.dtype for part in parts}) > 1:
            raise _unknown(parts[0].name)
        ranges = []
        for number, part in enumerate(parts):
            index, count = rank, self._tp
            if num_parts == len(_QKV) and number > 0 and self._tp > self._num_keys:
                index, count = rank * self._num_keys // self._tp, self._num_keys
            rows = part.shape[0] // count
            ranges.append((index * rows, (index + 1) * rows))
        num_rows = sum(end - begin for begin, end in ranges)
        whole = replace(parts[0], name=name, shape=(num_rows, *parts[0].shape[1:]), part=None)
        make = partial(_chained, tuple(zip(parts, ranges, strict=True)))
        return derive(whole, whole.dtype, f"as {name} of rank {rank} of {self._tp}", tuple(parts), make)

    def _vocabulary(self, name: str, rank: int) -> TensorAt:
        """Return a rank's rows of the vocabulary, which zeros are added to."""
        tensor = self._tensors[name]
        num_rows = -(-tensor.shape[0] // _VOCAB_ALIGNMENT) * _VOCAB_ALIGNMENT // self._tp
        begin, end = (min(tensor.shape[0], at * num_rows) for at in (rank, rank + 1))
        row = tensor.nbytes // tensor.shape[0]
        whole = replace(tensor, name=name, shape=(num_rows, *tensor.shape[1:]), part=None)
        make = partial(_padded, tensor, (begin, end), (num_rows - (end - begin)) * row)
        return derive(whole, tensor.dtype, f"rows of rank {rank} of {self._tp}", (tensor,), make)


def _check_degrees(shape: ModelShape, num_queries: int, num_keys: int, pp: int, tp: int) -> None:
    if not 1 <= pp <= shape.num_layers:
        raise UsageError(
            "--pp", f"expected 1 to {shape.num_layers}, the number of layers", code="options.uneven-degree"
        )
    sizes = {"attention heads": num_queries, "rows of the padded vocabulary": _VOCAB_ALIGNMENT}
    sizes |= {f"rows of {fqn}": dims[0] for fqn, dims in shape.tensors.items() if fqn.endswith("mlp.gate_proj.weight")}
    uneven = next((f"{count} {what}" for what, count in sizes.items() if count % tp), None)
    if uneven is None and max(num_keys, tp) % min(num_keys, tp):
        uneven = f"{num_keys} key heads"
    if uneven is not None:
        raise UsageError("--tp", f"{tp} ranks cannot share {uneven} evenly", code="options.uneven-degree")


def _heads(config: Mapping[str, object]) -> tuple[int, int]:
    queries = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or queries
    assert isinstance(queries, int), "model_shape checked it"
    assert isinstance(keys, int), "model_shape checked it"
    return queries, keys


def _chained(parts: Sequence[tuple[TensorAt, tuple[int, int]]]) -> Iterator[Buffer]:
    for tensor, rows in parts:
        yield from _rows(tensor, rows)


def _padded(tensor: TensorAt, rows: tuple[int, int], num_zeros: int) -> Iterator[Buffer]:
    yield from _rows(tensor, rows)
    if num_zeros:
        yield bytes(num_zeros)


def _rows(tensor: TensorAt, rows: tuple[int, int]) -> Iterator[Buffer]:
    """Yield rows of a tensor, all of which is read, so that its digest is verified."""
    row = tensor.nbytes // tensor.shape[0]
    begin, end = (at * row for at in rows)
    position = 0
    for block in read_blocks(tensor):
        yield block[max(0, begin - position) : max(0, end - position)]
        position += len(block)


def _columns(tensor: TensorAt, rank: int, tp: int) -> TensorAt:
    """Return a rank's columns of a matrix."""
    if tp == 1:
        return tensor
    num_rows, num_columns = tensor.shape
    whole = replace(tensor, shape=(num_rows, num_columns // tp), part=None)
    make = partial(_column_blocks, tensor, rank, tp)
    return derive(whole, tensor.dtype, f"columns of rank {rank} of {tp}", (tensor,), make)


def _column_blocks(tensor: TensorAt, rank: int, tp: int) -> Iterator[Buffer]:
    row = tensor.nbytes // tensor.shape[0]
    count = row // tp
    for block in read_blocks(tensor, row * max(1, (1 << 20) // row)):
        starts = range(rank * count, len(block), row)
        yield b"".join(block[begin : begin + count] for begin in starts)


def _unknown(fqn: str) -> ModelError:
    problem = "vLLM's model has no such tensor, or it is quantized"
    return ModelError(repr(fqn), problem, "export with --to hf", code="model.not-in-vllm")
