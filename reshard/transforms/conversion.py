"""How `pack` converts tensors: casts, and the dequantization of quantized weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from manifests.errors import Parameter, SourceError, UsageError, check_choice
from manifests.models import model_shape
from manifests.models.config import CONFIG_NAME
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.comparison import check_coverage, stored_in, without_absent
from reshard.tensors.lazy import DerivedFile, MemoryFile, derive
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
from stores.base import read_config
from stores.bundles import TensorAt

Plain = Literal["bf16", "fp32"]

_SECTION = "quantization_config"
_QUANTIZED = {"F4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8"}  # which no tensor of a plain model has
_OTHER_TOOLS = "dequantize the model with transformers: its quantization configs have dequantize=True"


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
    """Return a checkpoint whose tensors are converted when they are read.

    Raises:
        SourceError, UsageError: see `dequantize` and `cast_checkpoint`.
        UsageError: a cast of a training checkpoint, which has optimizer state.
    """
    if conversion.dequantize is not None:
        checkpoint = dequantize(checkpoint, STORED[conversion.dequantize])
    if conversion.adapters:
        checkpoint = merge_adapters(checkpoint, [(adapter, 1.0) for adapter in conversion.adapters])
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
    that was never quantized: the same files with the same tensors in the same order, without scales.

    Raises:
        SourceError: a weight or its scales have a dtype or a shape that the method does not use.
        UsageError: the checkpoint is not quantized.
    """
    config_at = next(item for item in checkpoint.auxiliary if item.path == CONFIG_NAME)
    config = read_config(config_at.file, config_at.digest)
    section = config.pop(_SECTION, None)
    if not isinstance(section, dict):
        raise UsageError(
            Parameter("conversion.dequantize"),
            f"{config_at.file} has no {_SECTION}",
            "the weights are not quantized; leave it out",
            code="options.not-quantized",
        )
    tensors = {tensor.name: (old, tensor) for old, tensor in plain_tensors(checkpoint.tensors, section, dtype)}
    plain = {fqn: tensor for fqn, (_, tensor) in tensors.items()}
    shape = model_shape(config, str(config_at.file), stored_in(plain, checkpoint.location), checkpoint.description)
    shape = without_absent(shape, tensors)
    check_coverage(plain, shape, checkpoint.location)
    kinds = {old: (tensor.name, tensor.dtype, tensor.shape) for old, tensor in tensors.values()}
    text = (json.dumps(with_dtype(config, dtype), indent=2, ensure_ascii=False) + "\n").encode()
    config_file = AuxiliaryAt(path=CONFIG_NAME, file=MemoryFile(f"{config_at.file} without {_SECTION}", text))
    return replace(
        checkpoint,
        shape=shape,
        tensors=plain,
        auxiliary=tuple(config_file if item is config_at else item for item in checkpoint.auxiliary),
        record=_record(checkpoint.record, kinds),
        originals=None,
    )


def plain_tensors(
    stored: Mapping[str, TensorAt], section: Mapping[str, object], dtype: str
) -> Iterator[tuple[str, TensorAt]]:
    """Yield the plain tensors, each with the name that its values are stored under.

    Raises:
        SourceError: as `dequantize`.
    """
    for fqn, tensor in stored.items():
        if (scale := _scale_of(tensor, stored)) is not None:
            _expect(tensor, {"F8_E4M3", "I8"})
            _expect(scale, {"F8_E8M0"} if tensor.dtype == "I8" else FLOATS | {"F8_E8M0"})
            how = _from_fp4(tensor, scale, dtype) if tensor.dtype == "I8" else _from_fp8(tensor, scale, section, dtype)
            yield fqn, how
        elif fqn.endswith("_blocks") and fqn.removesuffix("_blocks") + "_scales" in stored:
            scales = stored[fqn.removesuffix("_blocks") + "_scales"]
            _expect(tensor, {"U8", "F4"})
            _expect(scales, {"U8", "F8_E8M0"})
            yield fqn, _from_mxfp4(tensor, scales, dtype)
        elif not _is_scale(fqn, stored):
            if tensor.dtype in _QUANTIZED:
                problem = f"is {tensor.dtype}, and its scales have names or a form that are not known"
                raise SourceError(f"{tensor.file}: {fqn!r}", problem, _OTHER_TOOLS, code="source.quantized-dtype")
            yield fqn, tensor


def _scale_of(weight: TensorAt, stored: Mapping[str, TensorAt]) -> TensorAt | None:
    """Return the scales of a weight's blocks, if it has any; DeepSeek-V4's are called `scale`."""
    scale = stored.get(f"{weight.name}_scale_inv")
    if scale is None and weight.dtype in _QUANTIZED and weight.name.endswith(".weight"):
        scale = stored.get(f"{weight.name.removesuffix('weight')}scale")
    return scale


def _is_scale(fqn: str, stored: Mapping[str, TensorAt]) -> bool:
    if fqn.endswith("_scales"):
        return fqn.removesuffix("_scales") + "_blocks" in stored
    weight = stored.get(fqn.removesuffix("_scale_inv") if fqn.endswith("_scale_inv") else f"{fqn[:-5]}weight")
    scale = None if weight is None else _scale_of(weight, stored)
    return scale is not None and scale.name == fqn


def _from_fp8(weight: TensorAt, scale: TensorAt, section: Mapping[str, object], dtype: str) -> TensorAt:
    from reshard.transforms.arithmetic import fp8_blocks  # numpy

    sizes = section.get("weight_block_size")
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        raise _unfit(scale, "expected scales of blocks, whose size is weight_block_size in config.json")
    grid = tuple(-(-count // size) for count, size in zip(weight.shape, sizes, strict=False))
    if len(weight.shape) != 2 or scale.shape != grid:
        raise _unfit(scale, f"expected scales of {list(weight.shape)} in blocks of {sizes}, found {list(scale.shape)}")
    make = partial(fp8_blocks, weight, scale, (sizes[0], sizes[1]), dtype)
    return derive(weight, dtype, f"dequantized to {dtype} in blocks of {sizes}", (weight, scale), make)


def _from_fp4(packed: TensorAt, scale: TensorAt, dtype: str) -> TensorAt:
    """Return a weight of which each byte has two values, and each row scales of its own."""
    from reshard.transforms.arithmetic import fp4_blocks  # numpy

    rows, *halves = packed.shape
    fits = len(halves) == 1 and scale.shape[:-1] == (rows,) and scale.shape[-1] and not 2 * halves[0] % scale.shape[-1]
    if not fits:
        raise _unfit(scale, f"expected scales of each row of {list(packed.shape)}, found {list(scale.shape)}")
    plain = replace(packed, shape=(packed.shape[0], 2 * packed.shape[1]))
    make = partial(fp4_blocks, packed, scale, dtype)
    return derive(plain, dtype, f"dequantized to {dtype}", (packed, scale), make)


def _unfit(scale: TensorAt, problem: str) -> SourceError:
    return SourceError(f"{scale.file}: {scale.name!r}.shape", problem, _OTHER_TOOLS, code="source.quantized-shape")


def _from_mxfp4(packed: TensorAt, scales: TensorAt, dtype: str) -> TensorAt:
    from reshard.transforms.arithmetic import mxfp4_blocks  # numpy

    count, outputs, groups, half = packed.shape
    plain = replace(packed, name=packed.name.removesuffix("_blocks"), shape=(count, groups * half * 2, outputs))
    return derive(
        plain, dtype, f"dequantized to {dtype}", (packed, scales), partial(mxfp4_blocks, packed, scales, dtype)
    )


def _expect(tensor: TensorAt, dtypes: frozenset[str] | set[str]) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(sorted(dtypes))
        raise SourceError(
            f"{tensor.file}: {tensor.name!r}.dtype",
            f"expected {expected}, found {tensor.dtype}",
            code="source.quantized-dtype",
        )


def _record(record: SourceRecord, kinds: Mapping[str, TargetTensor]) -> SourceRecord:
    shards, entries = [], {}
    for shard in record.shards:
        remaining = [entry for entry in shard.header.tensors if entry.name not in record.dropped]
        entries[shard.name] = lay_out_anew(remaining, kinds)
        if entries[shard.name]:
            shards.append(RecordedShard(shard.name, new_header_text(entries[shard.name], shard.header.metadata)))
    index = None if record.index is None else index_anew(record.index, entries)
    return SourceRecord(shards=tuple(shards), index=index)


CONFIG_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
CONFIG_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 writes the first, 4 the second

ExportDtype = Literal["source", "fp32", "bf16", "fp16"]

STORED: Mapping[ExportDtype, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


_DTYPE = Parameter("dtype")


def cast_checkpoint(checkpoint: Checkpoint, wanted: ExportDtype, parameter: Parameter = _DTYPE) -> Checkpoint:
    """Return a checkpoint with weights in the source's dtypes, or all parameters in one dtype, as a parameter says.

    Optimizer state and tensors that are not parameters keep their dtypes.

    Raises:
        SourceError: the source's dtype of a tensor cannot be cast to.
        UsageError: parameters are quantized.
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
    """Count the tensors that are cast, by dtypes before and after."""
    derived = ((tensor, tensor.file) for tensor in checkpoint.tensors.values() if isinstance(tensor.file, DerivedFile))
    pairs = ((file.origins[0].dtype, tensor.dtype) for tensor, file in derived)
    return Counter((before, after) for before, after in pairs if before != after)


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
        if fqn not in shape.tensors or fqn.endswith(shape.untrained_suffixes or ("\0",)):
            continue
        if tensor.dtype not in FLOATS:
            raise UsageError(
                parameter,
                f"cannot cast {fqn!r}, which is {tensor.dtype}",
                "for quantized weights use reshard pack SOURCE --dequantize bf16",
                code="source.cannot-cast",
            )
        yield fqn, wanted


def with_dtype(config: Mapping[str, Any], stored: str) -> dict[str, Any]:
    """Return the config with this dtype (as in safetensors headers) wherever it names one, since readers cast to it."""
    name = next(name for name, dtype in CONFIG_DTYPES.items() if dtype == stored)
    return {**config, **{key: name for key in CONFIG_DTYPE_KEYS if key in config}}
