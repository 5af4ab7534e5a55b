"""A model's tensors as a rank of vLLM has them: fused projections, slices of heads and columns, a padded vocabulary.

Source: vLLM 0.33.0, layers/attention/attention.py, distributed/utils.py, and as `reshard.sources.vllm_names`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from struct import pack

from manifests.errors import ModelError, UsageError
from manifests.models import ModelShape
from reshard.sources.vllm_names import (
    BY_COLUMNS,
    EMBEDDING,
    FUSED,
    HEAD,
    LAYER,
    NORM,
    SCALES,
    WHOLE,
    check_family,
    heads_in,
    rows_of_part,
    rows_of_vocabulary,
    what_is_uneven,
)
from reshard.tensors.checkpoint import TensorAt
from reshard.tensors.lazy import Buffer, MemoryFile, derive, read_blocks

__all__ = ["VllmModel"]


class VllmModel:
    """The tensors of each rank of vLLM, by its names.

    Raises:
        ModelError: vLLM's layout of the architecture is not known, or the weights are quantized.
        UsageError: the model cannot be split so.
    """

    def __init__(
        self, shape: ModelShape, config: Mapping[str, object], tensors: Mapping[str, TensorAt], pp: int, tp: int
    ) -> None:
        check_family(shape, "vLLM serves the packed folder itself, without --load-format sharded_state")
        self._shape, self._pp, self._tp = shape, pp, tp
        self._is_tied = bool(shape.ties)
        heads = heads_in(config)
        self._num_keys = heads[1]
        _check_degrees(shape, heads, pp, tp)
        ignored = shape.ignored_suffixes or ("\0",)
        self._tensors = {fqn: tensor for fqn, tensor in tensors.items() if not fqn.endswith(ignored)}
        if self._is_tied:
            owner = next(self._tensors[fqn] for fqn in shape.ties[0] if fqn in self._tensors)
            self._tensors = {**self._tensors, EMBEDDING: owner, HEAD: owner}
        self._by_layer: list[dict[str, TensorAt]] = [{} for _ in range(shape.num_layers)]
        for fqn, tensor in self._tensors.items():
            if match := LAYER.fullmatch(fqn):
                self._by_layer[int(match[1])][match[2]] = tensor
            elif fqn not in (EMBEDDING, NORM, HEAD):
                raise _unknown(fqn)

    def rank(self, stage: int, rank: int) -> list[TensorAt]:
        """Return the tensors of tensor-parallel rank `rank` of a pipeline stage."""
        found = []
        # Of a tied pair on one rank, vLLM has the name that sorts first.
        if stage == 0 and not (self._is_tied and self._pp == 1):
            found.append(self._vocabulary(EMBEDDING, rank))
        for number in self._layers_of(stage):
            prefix = f"model.layers.{number}."
            found += [replace(one, name=prefix + one.name) for one in self._layer(self._by_layer[number], rank)]
        if stage == self._pp - 1:
            found += [self._tensors[NORM], self._vocabulary(HEAD, rank)]
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
        parts = {f"{part}.{leaf}" for of in FUSED.values() for part in of for leaf in ("weight", "bias")}
        for leaf in ("weight", "bias"):
            for fused, names in FUSED.items():
                there = {part: tensors[name] for part in names if (name := f"{part}.{leaf}") in tensors}
                if there:
                    yield self._fused(f"{fused}.{leaf}", there, len(names), rank)
        for name, tensor in tensors.items():
            if name in parts:
                continue
            if name in BY_COLUMNS:
                yield _columns(replace(tensor, name=name), rank, self._tp)
            elif name.endswith(WHOLE):
                yield replace(tensor, name=name)
            else:
                raise _unknown(tensor.name)
        for scale in SCALES:
            data = pack("<f", 1.0)
            yield TensorAt(scale, "F32", (), MemoryFile("1.0", data), 0, len(data))

    def _fused(self, name: str, parts: Mapping[str, TensorAt], num_parts: int, rank: int) -> TensorAt:
        """Return rows of projections, one below the other."""
        tensors = tuple(parts.values())
        first = tensors[0]
        if len(parts) < num_parts or len({part.dtype for part in tensors}) > 1:
            raise _unknown(first.name)
        ranges = [rows_of_part(part, tensor.shape[0], self._num_keys, rank, self._tp) for part, tensor in parts.items()]
        num_rows = sum(end - begin for begin, end in ranges)
        whole = replace(first, name=name, shape=(num_rows, *first.shape[1:]), part=None)
        make = partial(_chained, tuple(zip(tensors, ranges, strict=True)))
        return derive(whole, whole.dtype, f"as {name} of rank {rank} of {self._tp}", tensors, make)

    def _vocabulary(self, name: str, rank: int) -> TensorAt:
        """Return a rank's rows of the vocabulary, which zeros are added to."""
        tensor = self._tensors[name]
        begin, end, num_rows = rows_of_vocabulary(tensor.shape[0], rank, self._tp)
        row = tensor.nbytes // tensor.shape[0]
        whole = replace(tensor, name=name, shape=(num_rows, *tensor.shape[1:]), part=None)
        make = partial(_padded, tensor, (begin, end), (num_rows - (end - begin)) * row)
        return derive(whole, tensor.dtype, f"rows of rank {rank} of {self._tp}", (tensor,), make)


def _check_degrees(shape: ModelShape, heads: tuple[int, int], pp: int, tp: int) -> None:
    if not 1 <= pp <= shape.num_layers:
        raise UsageError(
            "--pp", f"expected 1 to {shape.num_layers}, the number of layers", code="options.uneven-degree"
        )
    if uneven := what_is_uneven(shape, heads, tp):
        raise UsageError("--tp", f"{tp} ranks cannot share {uneven} evenly", code="options.uneven-degree")


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
