"""How `pack` converts tensors: casts, and the dequantization of quantized weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from manifests.errors import Parameter, SourceError, UsageError, as_texts, check_choice
from manifests.models import model_shape
from manifests.models.config import CONFIG_NAME, encode_config, with_dtype, without_ties
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.comparison import check_coverage, stored_in, without_absent
from reshard.tensors.lazy import DerivedFile, MemoryFile
from reshard.tensors.source_index import (
    RecordedShard,
    SourceRecord,
    TargetTensor,
    index_anew,
    lay_out_anew,
    new_header_text,
)
from reshard.transforms.adapters import merge_adapters
from reshard.transforms.casts import FLOATS, cast_tensor
from reshard.transforms.quantize import OTHER_TOOLS, SECTION, plain_tensors, remember_source

Plain = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """How `pack` converts tensors: `dtype` casts weights, `dequantize` dequantizes them.

    `merge_slices` merges tensors that several ranks stored in slices, `adapters` adds LoRA adapters of PEFT folders.
    """

    dtype: ExportDtype | None = None
    dequantize: Plain | None = None
    merge_slices: bool = False
    adapters: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UsageError for a dtype that does not exist."""
        if self.dtype is not None:
            check_choice(Parameter("conversion.dtype"), self.dtype, get_args(ExportDtype))
        if self.dequantize is not None:
            check_choice(Parameter("conversion.dequantize"), self.dequantize, get_args(Plain))

    @property
    def changes_bytes(self) -> bool:
        return self.dtype is not None or self.dequantize is not None or bool(self.adapters)


def convert(checkpoint: Checkpoint, conversion: Conversion) -> Checkpoint:
    """Return a checkpoint whose tensors are converted when they are read."""
    if conversion.dequantize is not None:
        checkpoint = dequantize(checkpoint, STORED[conversion.dequantize])
    if conversion.adapters:
        checkpoint = merge_adapters(checkpoint, [(adapter, 1.0) for adapter in as_texts(conversion.adapters)])
    if conversion.dtype is not None:
        if checkpoint.moments:
            problem = "cannot cast the weights of a training checkpoint, which has optimizer state"
            raise UsageError(
                Parameter("conversion.dtype"),
                problem,
                "leave it out; reshard export --dtype casts",
                code="options.dtype-with-optimizer-state",
            )
        checkpoint = cast_checkpoint(checkpoint, conversion.dtype, Parameter("conversion.dtype"))
    return replace(checkpoint, merges_slices=conversion.merge_slices or checkpoint.merges_slices)


def dequantize(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Return a checkpoint whose quantized weights have a floating-point dtype; other tensors are unchanged.

    Its config has no quantization section, and names that dtype if it named one. Its record is that of a source
    that was never quantized: the same files with the same tensors in the same order, without scales. Two files beside
    it say how its source is quantized.
    """
    config_at, config = checkpoint.config_at, checkpoint.read_config()
    section = config.pop(SECTION, None)
    if not isinstance(section, dict):
        raise UsageError(
            Parameter("conversion.dequantize"),
            f"{config_at.file} has no {SECTION}",
            "the weights are not quantized; leave it out",
            code="options.not-quantized",
        )
    tensors = {tensor.name: (old, tensor) for old, tensor in plain_tensors(checkpoint.tensors, section, dtype)}
    if all(tensor is checkpoint.tensors[old] for old, tensor in tensors.values()):
        problem = f"{str(section.get('quant_method'))[:80]!r}: no weight has scales of blocks, which alone are known"
        raise SourceError(f"{config_at.file}: {SECTION}", problem, OTHER_TOOLS, code="source.quantized-dtype")
    plain = {fqn: tensor for fqn, (_, tensor) in tensors.items()}
    config = without_ties(config) if checkpoint.untied else config
    shape = model_shape(config, str(config_at.file), stored_in(plain, checkpoint.location), checkpoint.description)
    shape = without_absent(shape, tensors)
    check_coverage(plain, shape, checkpoint.location)
    kinds = {old: (tensor.name, tensor.dtype, tensor.shape) for old, tensor in tensors.values()}
    text = encode_config(with_dtype(config, dtype))
    config_file = AuxiliaryAt(path=CONFIG_NAME, file=MemoryFile(f"{config_at.file} without {SECTION}", text))
    return replace(
        checkpoint,
        shape=shape,
        tensors=plain,
        auxiliary=(
            *(config_file if item is config_at else item for item in checkpoint.auxiliary),
            *remember_source(checkpoint, config_at),
        ),
        record=_record(checkpoint.record, kinds),
        originals=None,
    )


def with_config(checkpoint: Checkpoint, config: Mapping[str, Any], how: str) -> Checkpoint:
    """Return a checkpoint with another config.json, which says of weights that are not tied that they are not."""
    item, config = checkpoint.config_at, without_ties(config) if checkpoint.untied else config
    new = AuxiliaryAt(path=CONFIG_NAME, file=MemoryFile(f"{item.file} {how}", encode_config(config)))
    return replace(checkpoint, auxiliary=tuple(new if file is item else file for file in checkpoint.auxiliary))


def _record(record: SourceRecord, kinds: Mapping[str, TargetTensor]) -> SourceRecord:
    shards, entries = [], {}
    for shard in record.shards:
        remaining = [entry for entry in shard.header.tensors if entry.name not in record.dropped]
        entries[shard.name] = lay_out_anew(remaining, kinds)
        if entries[shard.name]:
            shards.append(RecordedShard(shard.name, new_header_text(entries[shard.name], shard.header.metadata)))
    index = None if record.index is None else index_anew(record.index, entries)
    return SourceRecord(shards=tuple(shards), index=index)


ExportDtype = Literal["source", "fp32", "bf16", "fp16"]

STORED: Mapping[ExportDtype, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


_DTYPE = Parameter("dtype")


def cast_checkpoint(checkpoint: Checkpoint, wanted: ExportDtype, parameter: Parameter = _DTYPE) -> Checkpoint:
    """Return a checkpoint with weights in the source's dtypes, or all parameters in one dtype, as a parameter says.

    Optimizer state and tensors that are not parameters keep their dtypes, and parameters that transformers has in
    float32 in a model of any dtype are not cast to a smaller one, as it saves them.
    """
    tensors = dict(checkpoint.tensors)
    for fqn, dtype in (
        _dtypes_of_source(checkpoint) if wanted == "source" else _one_dtype(checkpoint, STORED[wanted], parameter)
    ):
        tensor = tensors[fqn]
        if tensor.dtype != dtype and not {tensor.dtype, dtype} <= FLOATS:
            problem = f"cannot cast {tensor.dtype} to {dtype}, its dtype in the source"
            hint = f"use {Parameter(parameter.name, 'bf16')} or {Parameter(parameter.name, 'fp32')}"
            raise SourceError(f"{tensor.file}: {fqn!r}", problem, hint, code="source.cannot-cast")
        tensors[fqn] = cast_tensor(tensor, dtype)
    return replace(checkpoint, tensors=tensors)


def casts_in(checkpoint: Checkpoint) -> Mapping[tuple[str, str], int]:
    """Count the tensors that are cast, by dtypes before and after; those that are quantized are not cast."""
    derived = ((tensor, tensor.file) for tensor in checkpoint.tensors.values() if isinstance(tensor.file, DerivedFile))
    same = ((tensor, file.origins[0]) for tensor, file in derived if tensor.shape == file.origins[0].shape)
    pairs = ((origin.dtype, tensor.dtype) for tensor, origin in same)
    return Counter((before, after) for before, after in pairs if before != after and after in FLOATS)


def _dtypes_of_source(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the dtype that the source has of each tensor."""
    for shard in checkpoint.record.shards:
        for entry in shard.header.tensors:
            if (fqn := checkpoint.shape.fqn_of(entry.name)) in checkpoint.tensors:
                yield fqn, entry.dtype


def _one_dtype(checkpoint: Checkpoint, wanted: str, parameter: Parameter) -> Iterator[tuple[str, str]]:
    """Yield each parameter with the `wanted` dtype."""
    shape = checkpoint.shape
    for fqn, tensor in checkpoint.tensors.items():
        if fqn not in shape.tensors or fqn.endswith(shape.untrained_suffixes):
            continue
        if tensor.dtype not in FLOATS:
            raise UsageError(
                parameter,
                f"cannot cast {fqn!r}, which is {tensor.dtype}",
                "for quantized weights use reshard pack SOURCE --dequantize bf16",
                code="source.cannot-cast",
            )
        is_exact = wanted != "F32" and fqn.endswith(shape.float32_suffixes)
        yield fqn, tensor.dtype if is_exact else wanted
