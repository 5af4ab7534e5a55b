"""Quantized weights as plain ones when these are read, by the names and shapes of their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from manifests.errors import SourceError
from reshard.tensors.lazy import derive
from reshard.transforms.casts import FLOATS
from stores.bundles import TensorAt

SECTION = "quantization_config"
_BLOCKS = "_blocks"  # of MXFP4
_QUANTIZED = {"F4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8"}  # which no tensor of a plain model has
_OTHER_TOOLS = "dequantize the model with transformers: its quantization configs have dequantize=True"


def plain_tensors(
    stored: Mapping[str, TensorAt], section: Mapping[str, object], dtype: str
) -> Iterator[tuple[str, TensorAt]]:
    """Yield the plain tensors, each with the name that its values are stored under."""
    for fqn, tensor in stored.items():
        if scale_of(tensor, stored) is not None:
            yield fqn, plain_of(tensor, stored, section, dtype)
        elif not is_scale(fqn, stored):
            if tensor.dtype in _QUANTIZED:
                problem = f"is {tensor.dtype}, and its scales have names or a form that are not known"
                raise SourceError(f"{tensor.file}: {fqn!r}", problem, _OTHER_TOOLS, code="source.quantized-dtype")
            yield fqn, tensor


def plain_of(tensor: TensorAt, stored: Mapping[str, TensorAt], section: Mapping[str, object], dtype: str) -> TensorAt:
    """Return a quantized weight, which has scales, as a plain one."""
    scale = scale_of(tensor, stored)
    assert scale is not None
    if tensor.name.endswith(_BLOCKS):
        _expect(tensor, {"U8", "F4"})
        _expect(scale, {"U8", "F8_E8M0"})
        return _from_mxfp4(tensor, scale, dtype)
    _expect(tensor, {"F8_E4M3", "I8"})
    _expect(scale, {"F8_E8M0"} if tensor.dtype == "I8" else FLOATS | {"F8_E8M0"})
    return _from_fp4(tensor, scale, dtype) if tensor.dtype == "I8" else _from_fp8(tensor, scale, section, dtype)


def find_plain(fqn: str, stored: Mapping[str, TensorAt], section: Mapping[str, object]) -> TensorAt | None:
    """Return a tensor by its name in the plain model, if there is one; a quantized one in its encoder's dtype."""
    packed = stored.get(f"{fqn}{_BLOCKS}")
    tensor = stored.get(fqn, packed)
    if tensor is None or scale_of(tensor, stored) is None:
        return tensor
    return plain_of(tensor, stored, section, "F32" if tensor is not packed else "BF16")


def scale_of(weight: TensorAt, stored: Mapping[str, TensorAt]) -> TensorAt | None:
    """Return the scales of a weight's blocks, if it has any; DeepSeek-V4's are called `scale`."""
    if weight.name.endswith(_BLOCKS):
        return stored.get(weight.name.removesuffix(_BLOCKS) + "_scales")
    scale = stored.get(f"{weight.name}_scale_inv")
    if scale is None and weight.dtype in _QUANTIZED and weight.name.endswith(".weight"):
        scale = stored.get(f"{weight.name.removesuffix('weight')}scale")
    return scale


def is_scale(fqn: str, stored: Mapping[str, TensorAt]) -> bool:
    """Return whether a tensor has the scales of a quantized weight."""
    if fqn.endswith("_scales"):
        return fqn.removesuffix("_scales") + _BLOCKS in stored
    weight = stored.get(fqn.removesuffix("_scale_inv") if fqn.endswith("_scale_inv") else f"{fqn[:-5]}weight")
    scale = None if weight is None else scale_of(weight, stored)
    return scale is not None and scale.name == fqn


def _from_fp8(weight: TensorAt, scale: TensorAt, section: Mapping[str, object], dtype: str) -> TensorAt:
    from reshard.transforms.arithmetic import fp8_blocks  # numpy

    sizes = block_sizes(scale, section)
    grid = tuple(-(-count // size) for count, size in zip(weight.shape, sizes, strict=False))
    if len(weight.shape) != 2 or scale.shape != grid:
        problem = f"expected scales of {list(weight.shape)} in blocks of {list(sizes)}, found {list(scale.shape)}"
        raise _unfit(scale, problem)
    make = partial(fp8_blocks, weight, scale, sizes, dtype)
    return derive(weight, dtype, f"dequantized to {dtype} in blocks of {list(sizes)}", (weight, scale), make)


def block_sizes(scale: TensorAt, section: Mapping[str, object]) -> tuple[int, int]:
    """Return the rows and columns of a block of float8."""
    sizes = section.get("weight_block_size")
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        raise _unfit(scale, "expected scales of blocks, whose size is weight_block_size in config.json")
    return sizes[0], sizes[1]


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
    plain = replace(packed, name=packed.name.removesuffix(_BLOCKS), shape=(count, groups * half * 2, outputs))
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
