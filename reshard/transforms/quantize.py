"""Plain weights as quantized ones when these are read, by the schemes of the files that they came from.

# Note [Encoders]
Codes and scales are those of the encoders that transformers has for these formats, bit for bit.
Blocks of float8: `Fp8Quantize`, in float32, with scales that are powers of two if `scale_fmt` is "ue8m0"; a block that
the matrix cuts off is one of fewer values. MXFP4: `downcast_to_mxfp_torch` of triton_kernels, of values in bfloat16:
scales are rounded up, and values between two codes away from zero. A merged weight is rounded once to the dtype that an
encoder takes, float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from manifests.errors import ManifestError, Parameter, SourceError, UsageError
from manifests.invariants import QUANTIZED_CONFIG, QUANTIZED_SOURCE, SOURCE_FILES
from manifests.models.config import CONFIG_NAME
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.lazy import MemoryFile, derive
from reshard.tensors.source_index import SourceRecord, decode_record, encode_record
from reshard.transforms.casts import cast_tensor
from reshard.transforms.dequantize import SECTION, block_sizes, plain_tensors, scale_of
from stores.base import read_config, read_whole
from stores.bundles import TensorAt


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
        make = partial(quantize_fp8, plain, block_sizes(scale, section), scale.dtype, is_power=is_power)
    else:
        problem = f"is {weight.dtype} with scales of {scale.dtype}, for which there is no encoder"
        hint = "dequantize the model: reshard pack --dequantize bf16"
        raise SourceError(weight.place, problem, hint, code="source.quantized-dtype")
    how = f"quantized as {weight.dtype} with scales of {scale.dtype}, {section.get('weight_block_size')}"
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
