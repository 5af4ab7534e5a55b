"""Encoders of quantized weights: float8 blocks and MXFP4, see Note [Encoders] in quantize.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from manifests.errors import SourceError
from reshard.tensors.lazy import WOULD_OVERFLOW, Buffer, read_blocks
from reshard.transforms.arithmetic import NBYTES, STEP, Bytes, Floats, decode, encode
from stores.bundles import TensorAt


def quantize_fp8(
    plain: TensorAt, sizes: tuple[int, int], scale_dtype: str, *, is_power: bool, wants_scales: bool
) -> Iterator[Buffer]:
    """Yield a matrix as float8, or the scales of its blocks, by which values are multiplied; see Note [Encoders]."""
    rows, columns = plain.shape
    sizes = min(sizes[0], rows), min(sizes[1], columns)
    starts = np.arange(0, columns, sizes[1])
    for block in read_blocks(plain, sizes[0] * columns * NBYTES[plain.dtype]):
        values = decode(block, plain.dtype).reshape(-1, columns)
        largest = np.maximum.reduceat(np.abs(values).max(axis=0), starts)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            # As torch divides a number.
            scales: Floats = np.where(largest > 0, np.float32(448) * (1 / largest), np.float32(1)).astype(np.float32)
            inverse = np.reciprocal(scales)
        _check_scales(plain, largest, scales, inverse)
        if is_power:
            bounded = np.maximum(inverse, np.finfo(np.float32).tiny).astype(np.float64)
            inverse = np.exp2(np.ceil(np.log2(bounded).astype(np.float32))).astype(np.float32)
            scales = np.reciprocal(inverse)
        if wants_scales:
            exponents = (inverse.view(np.uint32) >> 23).astype(np.uint8)
            yield exponents.data if scale_dtype == "F8_E8M0" else encode(inverse, scale_dtype)
        else:
            yield _to_float8(values * np.repeat(scales, sizes[1])[:columns]).data


def quantize_mxfp4(plain: TensorAt, *, wants_scales: bool) -> Iterator[Buffer]:
    """Yield experts (inputs, outputs) as 4-bit floats of groups of 32 inputs, or the scales; see Note [Encoders].

    Memory: one expert's packed matrix per reader.
    """
    _, inputs, outputs = plain.shape
    groups = inputs // 32
    width = max(1, min(groups, STEP // (outputs * 32)))  # groups at a time, of one expert
    while groups % width:
        width -= 1
    expert = np.empty((outputs, groups) if wants_scales else (outputs, groups, 16), np.uint8)
    first = 0
    for block in read_blocks(plain, width * 32 * outputs * NBYTES[plain.dtype]):
        values = decode(encode(decode(block, plain.dtype), "BF16"), "BF16").reshape(width, 32, outputs)
        largest = np.abs(values).max(axis=1)
        _check_scales(plain, largest)
        powers = ((largest / np.float32(6)).view(np.uint32) + 0x007F_FFFF) & 0x7F80_0000
        if wants_scales:
            expert[:, first : first + width] = (powers >> 23).T
        else:
            scales = powers.view(np.float32)
            inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=powers > 0)
            codes = _to_float4(values * inverse[:, None]).reshape(width, 16, 2, outputs)
            expert[:, first : first + width] = (codes[:, :, 0] | codes[:, :, 1] << 4).transpose(2, 0, 1)
        first = (first + width) % groups
        if not first:
            yield expert.tobytes()


def _check_scales(plain: TensorAt, largest: Floats, *scales: Floats) -> None:
    if np.isfinite([largest, *scales]).all():
        return
    broken = "NaN" if np.isnan(largest).any() else "an infinity" if np.isinf(largest).any() else ""
    problem = f"has {broken or 'values so small that their scale would be infinite'}, and cannot be quantized"
    hint = "leave --quantize out, or merge into plain weights: reshard pack BASE --dequantize bf16 --adapter ADAPTER"
    raise SourceError(plain.place, problem, hint, code=WOULD_OVERFLOW)


def _to_float8(values: Floats) -> Bytes:
    """Round to the nearest E4M3, ties to even, and those too large to the largest."""
    sizes = np.minimum(np.abs(values), np.float32(448))
    bits = sizes.view(np.uint32)
    normal = ((bits + 0x7_FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    codes: Bytes = np.where(bits < 121 << 23, np.rint(sizes * 512).astype(np.uint32), normal).astype(np.uint8)
    codes[np.signbit(values)] |= 0x80
    return codes


def _to_float4(values: Floats) -> Bytes:
    """Round values of at most 6 to the nearest E2M1 code, ties away from zero."""
    bits = values.view(np.uint32)
    exponents, mantissas = (bits >> 23) & 0xFF, bits & 0x7F_FFFF
    small = (0x40_0000 | mantissas >> 1) >> np.minimum(126 - exponents, 31)
    halves = (np.maximum(exponents, 126) - 126 << 2 | np.where(exponents < 127, small, mantissas) >> 21) + 1
    codes: Bytes = np.minimum(halves >> 1, 7).astype(np.uint8)
    codes[np.signbit(values)] |= 8
    return codes
