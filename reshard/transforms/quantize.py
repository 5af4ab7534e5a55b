"""Quantized weights as plain ones when these are read, by the names and shapes of their scales; and back.

Plain weights are quantized by the schemes of the files that they came from.

# Note [Encoders]
Codes and scales are those of the encoders that transformers has for these formats, bit for bit.
Blocks of float8: `Fp8Quantize`, in float32, with scales that are powers of two if `scale_fmt` is "ue8m0"; a block that
the matrix cuts off is one of fewer values. MXFP4: `downcast_to_mxfp_torch` of triton_kernels, of values in bfloat16:
scales are rounded up, and values between two codes away from zero. A merged weight is rounded once to the dtype that an
encoder takes, float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from manifests.errors import ManifestError, Parameter, SourceError, UsageError
from manifests.invariants import QUANTIZED_CONFIG, QUANTIZED_SOURCE, SOURCE_FILES
from manifests.models.config import CONFIG_NAME
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.lazy import MemoryFile, derive
from reshard.tensors.source_index import SourceRecord, decode_record, encode_record
from reshard.transforms.casts import FLOATS, cast_tensor
from stores.base import read_config, read_whole
from stores.bundles import TensorAt

SECTION = "quantization_config"
_BLOCKS = "_blocks"  # of MXFP4
_QUANTIZED = {"F4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8"}  # which no tensor of a plain model has
OTHER_TOOLS = "dequantize the model with transformers: its quantization configs have dequantize=True"


def plain_tensors(
    stored: Mapping[str, TensorAt], section: Mapping[str, object], dtype: str
) -> Iterator[tuple[str, TensorAt]]:
    """Yield the plain tensors, each with the name that its values are stored under."""
    for fqn, tensor in stored.items():
        if scale_of(tensor, stored) is not None:
            yield fqn, _plain_of(tensor, stored, section, dtype)
        elif not is_scale(fqn, stored):
            if tensor.dtype in _QUANTIZED:
                problem = f"is {tensor.dtype}, and its scales have names or a form that are not known"
                raise SourceError(f"{tensor.file}: {fqn!r}", problem, OTHER_TOOLS, code="source.quantized-dtype")
            yield fqn, tensor


def _plain_of(tensor: TensorAt, stored: Mapping[str, TensorAt], section: Mapping[str, object], dtype: str) -> TensorAt:
    """Return a quantized weight, which has scales, as a plain one."""
    scale = scale_of(tensor, stored)
    assert scale is not None
    if tensor.name.endswith(_BLOCKS):
        _expect(tensor, {"U8"})
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
    return _plain_of(tensor, stored, section, "F32" if tensor is not packed else "BF16")


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

    sizes = _block_sizes(scale, section)
    grid = tuple(-(-count // size) for count, size in zip(weight.shape, sizes, strict=False))
    if len(weight.shape) != 2 or scale.shape != grid or not weight.nbytes:
        problem = f"expected scales of {list(weight.shape)} in blocks of {list(sizes)}, found {list(scale.shape)}"
        raise _unfit(scale, problem)
    make = partial(fp8_blocks, weight, scale, sizes, dtype)
    return derive(weight, dtype, f"dequantized to {dtype} in blocks of {list(sizes)}", (weight, scale), make)


def _block_sizes(scale: TensorAt, section: Mapping[str, object]) -> tuple[int, int]:
    """Return the rows and columns of a block of float8."""
    sizes = section.get("weight_block_size")
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        raise _unfit(scale, "expected scales of blocks, whose size is weight_block_size in config.json")
    return sizes[0], sizes[1]


def _from_fp4(packed: TensorAt, scale: TensorAt, dtype: str) -> TensorAt:
    """Return a weight of which each byte has two values, and each row scales of its own."""
    from reshard.transforms.arithmetic import fp4_blocks  # numpy

    of_rows = len(packed.shape) == len(scale.shape) == 2 and scale.shape[0] == packed.shape[0] and packed.nbytes
    if not (of_rows and scale.shape[1] and not 2 * packed.shape[1] % scale.shape[1]):
        raise _unfit(scale, f"expected scales of each row of {list(packed.shape)}, found {list(scale.shape)}")
    plain = replace(packed, shape=(packed.shape[0], 2 * packed.shape[1]))
    make = partial(fp4_blocks, packed, scale, dtype)
    return derive(plain, dtype, f"dequantized to {dtype}", (packed, scale), make)


def _unfit(scale: TensorAt, problem: str) -> SourceError:
    return SourceError(f"{scale.place}.shape", problem, OTHER_TOOLS, code="source.quantized-shape")


def _from_mxfp4(packed: TensorAt, scales: TensorAt, dtype: str) -> TensorAt:
    from reshard.transforms.arithmetic import mxfp4_blocks  # numpy

    if len(packed.shape) != 4 or packed.shape[3] != 16 or scales.shape != packed.shape[:3] or not packed.nbytes:
        problem = f"expected scales of each 16 bytes of {list(packed.shape)}, found {list(scales.shape)}"
        raise _unfit(scales, problem)
    count, outputs, groups, half = packed.shape
    plain = replace(packed, name=packed.name.removesuffix(_BLOCKS), shape=(count, groups * half * 2, outputs))
    return derive(
        plain, dtype, f"dequantized to {dtype}", (packed, scales), partial(mxfp4_blocks, packed, scales, dtype)
    )


def _expect(tensor: TensorAt, dtypes: frozenset[str] | set[str]) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(sorted(dtypes))
        problem = f"expected {expected}, found {tensor.dtype}"
        raise SourceError(f"{tensor.place}.dtype", problem, code="source.quantized-dtype")


def quantize_weight(
    plain: TensorAt, weight: TensorAt, scale: TensorAt, section: Mapping[str, object]
) -> tuple[TensorAt, TensorAt]:
    """Return a plain weight quantized as another one is: its codes and its scales."""
    from reshard.transforms.encoders import quantize_fp8, quantize_mxfp4  # numpy

    kinds = (weight.dtype, scale.dtype)
    if kinds == ("U8", "U8"):
        make = partial(quantize_mxfp4, plain)
    elif kinds in (("F8_E4M3", "F32"), ("F8_E4M3", "F8_E8M0")):
        is_power = section.get("scale_fmt") == "ue8m0" or scale.dtype == "F8_E8M0"
        make = partial(quantize_fp8, plain, _block_sizes(scale, section), scale.dtype, is_power=is_power)
    else:
        problem = f"is {weight.dtype} with scales of {scale.dtype}, for which there is no encoder"
        hint = "dequantize the model: reshard pack --dequantize bf16"
        raise SourceError(weight.place, problem, hint, code="source.quantized-dtype")
    numbers = section.get("weight_block_size"), section.get("scale_fmt")
    how = f"quantized as {weight.dtype} with scales of {scale.dtype}, {numbers}"
    codes, scales = (
        derive(like, like.dtype, f"{how}: {what}", (plain,), partial(make, wants_scales=what == "scales"))
        for like, what in ((weight, "codes"), (scale, "scales"))
    )
    return codes, scales


def remember_source(checkpoint: Checkpoint, config: AuxiliaryAt) -> tuple[AuxiliaryAt, ...]:
    """Return the files beside plain weights that say how their source is quantized."""
    record = encode_record(checkpoint.record)
    made = MemoryFile(f"headers of {checkpoint.location}", record, config.file.fingerprint)
    return replace(config, path=QUANTIZED_CONFIG), AuxiliaryAt(path=QUANTIZED_SOURCE, file=made)


def forget_source(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without these files, which are of packed weights alone."""
    files = (item for item in checkpoint.auxiliary if item.path not in (QUANTIZED_CONFIG, QUANTIZED_SOURCE))
    return replace(checkpoint, auxiliary=tuple(files))


def quantize_like_source(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the files, tensors and config of the quantized source that it was dequantized from."""
    files = {item.path: item for item in checkpoint.auxiliary}
    if QUANTIZED_CONFIG not in files or QUANTIZED_SOURCE not in files:
        problem = f"{checkpoint.location} was not packed with {Parameter('conversion.dequantize')}"
        hint = "leave it out: its weights are as in the source"
        raise UsageError(Parameter("quantize"), problem, hint, code="options.not-quantized")
    config, source = files[QUANTIZED_CONFIG], files[QUANTIZED_SOURCE]
    section = read_config(config.file, config.digest)[SECTION]
    record = decode_record(read_whole(source.file, source.digest), str(source.file))
    stored = {
        entry.name: TensorAt(entry.name, entry.dtype, entry.shape, source.file, 0, entry.nbytes)
        for shard in record.shards
        for entry in shard.header.tensors
    }
    tensors: dict[str, TensorAt] = {}
    dropped = set(record.dropped)
    for name, like in plain_tensors(stored, section, "F32"):
        fqn, weight, scale = checkpoint.shape.fqn_of(like.name), stored[name], scale_of(stored[name], stored)
        group = [weight.name] if scale is None else [weight.name, scale.name]
        plain = checkpoint.tensors.get(fqn)
        if plain is None and (like.name in checkpoint.record.dropped or name in dropped):
            dropped.update(group)
        elif plain is None or plain.shape != like.shape:
            shown = "no such tensor" if plain is None else f"one of {list(plain.shape)}"
            problem = f"has {like.name} of {list(like.shape)}, and the model {shown}"
            raise ManifestError(str(source.file), problem, code="manifest.source-mismatch")
        elif scale is None:
            tensors[fqn] = cast_tensor(plain, weight.dtype)
        else:
            tensors.update(zip(group, quantize_weight(plain, weight, scale, section), strict=True))
    others = (
        item for item in checkpoint.auxiliary if item.path != CONFIG_NAME and not item.path.startswith(SOURCE_FILES)
    )
    return replace(
        checkpoint,
        tensors=tensors,
        auxiliary=(*others, replace(config, path=CONFIG_NAME)),
        record=SourceRecord(shards=record.shards, index=record.index, dropped=tuple(sorted(dropped))),
        originals=None,
    )
