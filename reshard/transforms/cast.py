"""Casts weights to the source's dtypes, or all to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from manifests.errors import Parameter, SourceError, UsageError
from reshard.tensors.checkpoint import Checkpoint, as_objects
from reshard.tensors.lazy import DerivedFile, derive
from stores.bundles import TensorAt

CONFIG_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
CONFIG_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 writes the first, 4 the second

ExportDtype = Literal["source", "fp32", "bf16", "fp16"]

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
STORED: Mapping[ExportDtype, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


_DTYPE = Parameter("dtype")


def cast_checkpoint(checkpoint: Checkpoint, wanted: ExportDtype, parameter: Parameter = _DTYPE) -> Checkpoint:
    """Return a checkpoint with weights in the source's dtypes, or all parameters in one dtype, as a parameter says.

    Optimizer state and tensors that are not parameters keep their dtypes.

    Raises:
        SourceError: the source's dtype of a tensor cannot be cast to.
        UsageError: parameters are quantized.
    """
    tensors = dict(as_objects(checkpoint.tensors))
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


def cast_tensor(tensor: TensorAt, dtype: str) -> TensorAt:
    """Return a tensor whose values are cast when they are read; the tensor itself if it has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    from reshard.transforms.arithmetic import cast_blocks  # numpy

    return derive(tensor, dtype, f"as {dtype}", (tensor,), partial(cast_blocks, tensor, dtype))


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
