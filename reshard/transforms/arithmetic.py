"""Arithmetic on stored values, block by block. It and `encoders` alone import numpy, and are imported lazily.

Bit patterns and rounding (to nearest, ties to even) are those of torch, except that NaNs keep sign and payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from manifests.errors import SourceError
from reshard.tensors.lazy import STEP_NBYTES, WOULD_OVERFLOW, Buffer, read_blocks
from reshard.transforms.terms import Term
from stores.bundles import TensorAt

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

STEP = STEP_NBYTES // 4  # values at a time

# By dtype: an unsigned integer, which of its bits tell NaN and infinity, and what they are then, and signs.
FLOATS: Mapping[str, tuple[str, int, int, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000, 1 << 63),
    "F32": ("<u4", 0x7F80_0000, 0x7F80_0000, 1 << 31),
    "C64": ("<u4", 0x7F80_0000, 0x7F80_0000, 1 << 31),  # two of F32
    "F16": ("<u2", 0x7C00, 0x7C00, 1 << 15),
    "BF16": ("<u2", 0x7F80, 0x7F80, 1 << 15),
    "F8_E5M2": ("u1", 0x7C, 0x7C, 1 << 7),
    "F8_E4M3": ("u1", 0x7F, 0x7F, 1 << 7),  # no infinities: its one NaN has all bits set but the sign
    "F8_E5M2FNUZ": ("u1", 0xFF, 0x80, 0),  # no infinities: its one NaN is where -0 would be
    "F8_E4M3FNUZ": ("u1", 0xFF, 0x80, 0),
    "F8_E8M0": ("u1", 0xFF, 0xFF, 0),  # a power of two: 0xFF is its NaN
    "F6_E2M3": ("u1", 0, 1, 0),  # neither has NaN or infinity; four share three bytes
    "F6_E3M2": ("u1", 0, 1, 0),
    "F4": ("u1", 0, 1, 0x88),  # likewise; two share a byte
}


def cast_blocks(tensor: TensorAt, dtype: str) -> Iterator[Buffer]:
    """Yield a floating-point tensor's values in another dtype."""
    for block in read_blocks(tensor):
        encoded = encode(decode(block, tensor.dtype), dtype)
        if _num_infinite(encoded, dtype) > _num_infinite(block, tensor.dtype):
            problem = f"a value is too large for {dtype} and would become infinite"
            hint = "use bf16 or fp32, which have a larger range than fp16"
            raise SourceError(tensor.place, problem, hint, code=WOULD_OVERFLOW)
        yield encoded


def fp8_blocks(weight: TensorAt, scale: TensorAt, block: tuple[int, int], dtype: str) -> Iterator[Buffer]:
    """Multiply a float8 weight by its scales, one per block, in float32.

    Source: deepseek-ai/DeepSeek-V3, `inference/kernel.py`, `weight_dequant`.
    """
    columns = weight.shape[1]
    block = min(block[0], weight.shape[0]), min(block[1], columns)
    scales = np.concatenate([decode(part, scale.dtype) for part in map(bytes, read_blocks(scale))]).reshape(scale.shape)
    height = max(1, STEP // columns)
    for number, part in enumerate(read_blocks(weight, height * columns)):
        values = _E4M3[np.frombuffer(part, np.uint8)].reshape(-1, columns)
        rows = np.arange(number * height, number * height + len(values)) // block[0]
        with np.errstate(over="ignore", invalid="ignore"):
            values *= np.repeat(scales[rows], block[1], axis=1)[:, :columns]
        yield encode(values, dtype)


def fp4_blocks(packed: TensorAt, scale: TensorAt, dtype: str) -> Iterator[Buffer]:
    """Unpack 4-bit floats of a matrix, two in a byte, and multiply each group of a row by its power of two.

    Source: transformers 5.23, `integrations/finegrained_fp8.py`, `Fp8Dequantize`.
    """
    (_, half), groups = packed.shape, scale.shape[1]
    height = max(1, STEP // (2 * half))  # rows at a time
    for nibbles, exponents in zip(
        read_blocks(packed, height * half), read_blocks(scale, height * groups), strict=True
    ):  # fmt: skip
        values = _FP4_TWICE[np.frombuffer(nibbles, np.uint8)].reshape(-1, groups, 2 * half // groups) * np.float32(0.5)
        with np.errstate(over="ignore", invalid="ignore"):
            values *= decode(exponents, scale.dtype).reshape(-1, groups, 1)
        yield encode(values, dtype)


def mxfp4_blocks(packed: TensorAt, scales: TensorAt, dtype: str) -> Iterator[Buffer]:
    """Unpack 4-bit floats, multiply each group of 32 by its power of two, and transpose to (inputs, outputs).

    Memory: one expert's packed matrix per reader.
    Source: transformers 5.23, `integrations/mxfp4.py`, `convert_moe_packed_tensors`.
    """
    _, outputs, groups, _ = packed.shape
    width = max(1, STEP // (outputs * 32))  # groups at a time
    experts = read_blocks(packed, outputs * groups * 16), read_blocks(scales, outputs * groups)
    for nibbles, exponents in zip(*experts, strict=True):
        pairs = np.frombuffer(nibbles, np.uint8).reshape(outputs, groups, 16)
        halves = _half_powers(np.frombuffer(exponents, np.uint8)).reshape(outputs, groups, 1)
        for first in range(0, groups, width):
            part = slice(first, first + width)
            with np.errstate(over="ignore", invalid="ignore"):
                values = _FP4_TWICE[pairs[:, part]].reshape(outputs, -1, 32) * halves[:, part]
            yield encode(np.ascontiguousarray(values.reshape(outputs, -1).T), dtype)


def merged_blocks(base: TensorAt, terms: Sequence[Term]) -> Iterator[Buffer]:
    """Yield a weight with what adapters add to it, each value rounded once. A block is valid until the next.

    Memory: the matrices of each adapter, and some blocks of rows, which are reused: page faults of new memory take
    longer than the product.
    """
    *_, rows, columns = base.shape
    height = max(1, min(rows, STEP // 2 // columns))
    while rows % height and len(base.shape) > 2:  # blocks of one expert each
        height -= 1
    wide, narrow = np.empty((2, height * columns)), np.empty(height * columns, np.float32)
    number, factors = 0, list[tuple[NDArray[np.floating], NDArray[np.float64]]]()
    for block in read_blocks(base, height * columns * NBYTES[base.dtype]):
        values, product = wide[:, : len(block) // NBYTES[base.dtype]]
        expert, first = divmod(number, rows)
        if not first:
            factors = [_factors(term, expert) for term in terms]
        last = first + len(values) // columns
        with np.errstate(over="ignore", invalid="ignore"):
            _widen(block, base.dtype, values, narrow[: len(values)])
            for term, (b, a) in zip(terms, factors, strict=True):
                _multiply(b[first:last].astype(np.float64), a, product.reshape(-1, columns))
                product *= term.scale
                values += product
            encoded = _encoded_once(values, base.dtype, narrow[: len(values)], product)
        number += last - first
        num_broken = _num_not_finite(encoded, base.dtype)
        if num_broken and num_broken > _num_not_finite(block, base.dtype):
            problem = f"with the adapters, a value would become infinite or NaN in {base.dtype}"
            hint = "an adapter has such values, or ones that are too large: cast the base to fp32 first"
            raise SourceError(base.place, problem, hint, code=WOULD_OVERFLOW)
        yield encoded


def _factors(term: Term, expert: int) -> tuple[NDArray[np.floating], NDArray[np.float64]]:
    """Return the matrices B and A whose product a term adds to a matrix, A in the dtype of products."""
    a, b = (_matrix_of(half, half.file.fingerprint) for half in (term.a, term.b))  # of the file as it is now
    if term.num_experts > 1:
        expert = expert if term.expert is None else term.expert
        a, b = a[expert * term.rank : (expert + 1) * term.rank], b[:, expert :: term.num_experts]
    if term.is_transposed:
        a, b = b.T, a.T
    return b[term.first :], a.astype(np.float64)


def _multiply(b: NDArray[np.float64], a: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Compute B A, by products so small that OpenBLAS starts no threads for them, which take longer than a low rank."""
    width, whole = max(1, (1 << 16) // len(a)), len(b) // 4 * 4
    for first in range(0, a.shape[1], width):
        part = slice(first, first + width)
        np.matmul(b[:whole].reshape(-1, 4, len(a)), a[:, part], out=out[:whole].reshape(-1, 4, a.shape[1])[..., part])
        np.matmul(b[whole:], a[:, part], out=out[whole:, part])


@lru_cache(maxsize=8)  # of the weights that are merged at the moment; an adapter of experts is of many weights
def _matrix_of(tensor: TensorAt, fingerprint: str) -> NDArray[np.float32 | np.float64]:
    values = np.concatenate([_wide(block, tensor.dtype) for block in map(bytes, read_blocks(tensor))])
    is_narrow = tensor.dtype != "F64"
    return (values.astype(np.float32) if is_narrow else values).reshape(tensor.shape)


def norms_of(a: TensorAt, b: TensorAt) -> tuple[float, float]:
    """Return the norms of B - A and of A, of floating-point tensors of the same shape, in float64."""
    apart, base = [], []
    for left, right in zip(_values(a), _values(b), strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            apart.append(float(np.linalg.norm(right - left)))
            base.append(float(np.linalg.norm(left)))
    return math.hypot(*apart), math.hypot(*base)


def count_not_finite(tensor: TensorAt, progress: Callable[[int], object]) -> tuple[int, bool]:
    """Return how many values of a floating-point tensor are NaN or infinite, and whether all are zero."""
    dtype, _, _, sign = FLOATS[tensor.dtype]
    num_broken, is_zero = 0, tensor.dtype != "F8_E8M0"  # where 0 is a number as good as any
    for block in read_blocks(tensor):
        bits = np.frombuffer(block, dtype)
        num_broken += _num_not_finite(block, tensor.dtype)
        is_zero = is_zero and not np.any(bits & ~bits.dtype.type(sign))
        progress(len(block))
    return num_broken, is_zero


def _num_not_finite(block: Buffer, dtype: str) -> int:
    kind, mask, broken, _ = FLOATS[dtype]
    return int(np.count_nonzero(np.frombuffer(block, kind) & mask == broken))


def _values(tensor: TensorAt) -> Iterator[NDArray[np.float64]]:
    """Yield a tensor's values, the same number at a time for every dtype."""
    for block in read_blocks(tensor, STEP * NBYTES[tensor.dtype]):
        yield _wide(block, tensor.dtype)


def _wide(block: Buffer, dtype: str) -> NDArray[np.float64]:
    if dtype == "F64":
        return np.frombuffer(block, "<f8")
    with np.errstate(invalid="ignore"):  # a signaling NaN
        return decode(block, dtype).astype(np.float64)


def _widen(block: Buffer, dtype: str, values: NDArray[np.float64], narrow: Floats) -> None:
    """Decode a block into `values`, by way of the memory of `narrow`."""
    if dtype == "BF16":
        np.left_shift(np.frombuffer(block, "<u2"), 16, out=narrow.view(np.uint32), dtype=np.uint32)
        values[:] = narrow
    else:
        values[:] = np.frombuffer(block, _NUMPY[dtype])


def _encoded_once(values: NDArray[np.float64], dtype: str, narrow: Floats, scratch: NDArray[np.float64]) -> Buffer:
    """Round values to the nearest of a dtype, ties to even, in the memory of `narrow` and `scratch`."""
    if dtype != "BF16":
        return values.astype(_NUMPY[dtype]).view(np.uint8).data
    narrow[:] = values
    is_finite = narrow.max() < _BF16_END and narrow.min() > -_BF16_END
    far = None if is_finite else ~(np.abs(narrow) < _BF16_END)
    bits, lower = narrow.view(np.uint32), scratch.view(np.uint32)[: len(values)]
    bits += 0x8000  # half of the last bit that stays
    # Where float32 is the middle of two BF16, what it was rounded from decides. Nothing else is rounded twice wrongly.
    is_middle = np.bitwise_and(bits, 0xFFFF, out=lower) == 0
    doubtful = np.flatnonzero(is_middle if far is None else is_middle | far)
    np.right_shift(bits, 16, out=lower)
    codes = scratch.view("<u2")[-len(values) :]
    np.copyto(codes, lower, casting="unsafe")
    codes[doubtful] = _nearest_bf16(values[doubtful])
    return codes.view(np.uint8).data


def _nearest_bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    narrow = values.astype(np.float32)
    # Rounded to odd, a value is rounded once more as if it had been exact.
    odd, exact = narrow.view(np.uint32), narrow.astype(np.float64)
    odd -= np.abs(exact) > np.abs(values)
    odd |= (exact != values) & ~np.isnan(values)
    return _to_bf16(narrow)


def decode(block: Buffer, dtype: str) -> Floats:
    if dtype == "BF16":
        return (np.frombuffer(block, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E8M0":
        exponents = np.frombuffer(block, np.uint8)
        with np.errstate(over="ignore"):
            return np.where(exponents == 255, np.float32("nan"), 2 * _half_powers(exponents))
    with np.errstate(over="ignore", invalid="ignore"):  # too large: infinite, as in torch
        return np.frombuffer(block, _NUMPY[dtype]).astype(np.float32, copy=False)


def encode(values: Floats, dtype: str) -> Buffer:
    if dtype == "BF16":
        return _to_bf16(values).view(np.uint8).data
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(_NUMPY[dtype], copy=False).view(np.uint8).data


def _num_infinite(block: Buffer, dtype: str) -> int:
    if dtype == "BF16":
        return int(np.count_nonzero(np.frombuffer(block, "<u2") & 0x7FFF == 0x7F80))
    return int(np.count_nonzero(np.isinf(np.frombuffer(block, _NUMPY[dtype]))))


def _to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Round to the nearest BF16, ties to even."""
    bits = values.view(np.uint32)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nans = np.isnan(values)
    if nans.any():
        cut = bits[nans] >> 16
        upper[nans] = np.where(cut & 0x7F, cut, cut | 0x40)  # a NaN whose payload is cut off must not become infinity
    return upper.astype("<u2")


def _half_powers(exponents: Bytes) -> Floats:
    """Return half of each scale: the largest one, 2 ** 128, is not a float32."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


def _float8() -> Floats:
    """Return the value of each byte: a sign, 4 bits of exponent, 3 of mantissa, no infinities.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1.
    """
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[byte & 127 == 127] = np.nan
    return np.where(byte < 128, values, -values).astype(np.float32)


def _twice_float4() -> Floats:
    """Return twice each byte's two values, the one in the low half first.

    Source: OCP Microscaling Formats, version 1.0, 5.3.3.
    """
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values, byte = np.concatenate([positive, -positive]), np.arange(256)
    return 2 * np.stack([values[byte & 15], values[byte >> 4]], axis=-1)


_NUMPY: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
NBYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_E4M3, _FP4_TWICE = _float8(), _twice_float4()
_BF16_END = np.uint32(0x7F7F_8000).view(np.float32)  # the smallest that rounds to infinity


def xor_into(state: memoryview, difference: memoryview) -> None:
    """Change a state to `state ^ difference`."""
    values = np.frombuffer(state, np.uint8)
    np.bitwise_xor(values, np.frombuffer(difference, np.uint8), out=values)


def xor_of(old: memoryview, new: memoryview, out: memoryview) -> int:
    """Write `old ^ new` to `out`, and return how many of its bytes are not zero."""
    before, after, difference = (np.frombuffer(block, np.uint8) for block in (old, new, out))
    np.bitwise_xor(before, after, out=difference)
    return int(np.count_nonzero(difference))


class Changes:
    """Bytes that change, by position in a tensor, in ascending order."""

    def __init__(self, positions: memoryview, values: memoryview) -> None:
        self._positions, self._values = np.frombuffer(positions, "<u4"), np.frombuffer(values, np.uint8)

    def are_within(self, nbytes: int) -> bool:
        """Return whether the positions are ascending ones of a tensor of `nbytes`."""
        positions = self._positions
        return not len(positions) or (int(positions[-1]) < nbytes and bool(np.all(positions[:-1] < positions[1:])))

    def apply(self, state: memoryview, begin: int) -> None:
        """Change the bytes of a block that begins at `begin` of the tensor."""
        first, last = np.searchsorted(self._positions, (begin, begin + len(state)))
        values = np.frombuffer(state, np.uint8)
        values[self._positions[first:last] - np.int64(begin)] = self._values[first:last]
