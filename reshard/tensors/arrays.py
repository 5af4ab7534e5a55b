"""Stored tensors as numpy arrays or torch tensors. Either package is imported on use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from manifests.errors import UsageError
from reshard.tensors.lazy import read_blocks
from stores.bundles import TensorAt

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Tensor = torch.Tensor

Framework = Literal["numpy", "torch"]

# By the dtype in a safetensors header. numpy lacks BF16 and the floats of 8 bits and fewer.
_NUMPY: Mapping[str, str] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
_TORCH: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def to_numpy(tensor: TensorAt) -> Array:
    """Read a tensor into a new, writable numpy array.

    Shapes: as stored.
    Raises:
        InputError: the bytes cannot be read, or do not match the digest.
        UsageError: numpy does not have the dtype (`options.array-dtype`).
    """
    import numpy as np

    if tensor.dtype not in _NUMPY:
        hint = 'use dtype="fp32" or framework="torch"'
        raise _no_dtype(tensor, "numpy", hint)
    return np.frombuffer(_read(tensor), np.dtype(_NUMPY[tensor.dtype])).reshape(tensor.shape)


def to_torch(tensor: TensorAt) -> Tensor:
    """Read a tensor into a new torch tensor on the CPU.

    Shapes: as stored.
    Raises:
        InputError: the bytes cannot be read, or do not match the digest.
        UsageError: torch does not have the dtype (`options.array-dtype`).
    """
    import torch

    if tensor.dtype not in _TORCH:
        raise _no_dtype(tensor, "torch", "dequantize the weights with reshard pack --dequantize")
    dtype: torch.dtype = getattr(torch, _TORCH[tensor.dtype])
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(_read(tensor), dtype=dtype).view(tensor.shape)


def _read(tensor: TensorAt) -> bytearray:
    data, position = bytearray(tensor.nbytes), 0
    for block in read_blocks(tensor):
        data[position : position + len(block)] = block
        position += len(block)
    return data


def _no_dtype(tensor: TensorAt, framework: str, hint: str) -> UsageError:
    where = f"{tensor.file}: {tensor.name!r}"
    return UsageError(where, f"{framework} has no dtype for {tensor.dtype}", hint, code="options.array-dtype")
