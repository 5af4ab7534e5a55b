"""Quantized checkpoints: the tensors that files have where a model has its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from manifests.models.config import ConfigReader
from manifests.models.shape import ModelShape, Shape

Method = Callable[[ModelShape, ConfigReader], ModelShape]

MXFP4_BLOCK = 32  # values that share a scale


def as_stored(shape: ModelShape, config: ConfigReader, methods: Mapping[str, Method]) -> ModelShape:
    """Return the shape of a model whose config may say `quantization_config`.

    Raises:
        InputError: a method that is not among `known`.
    """
    section = config.section("quantization_config")
    if section is None:
        return shape
    method = section.config.get("quant_method")
    if not isinstance(method, str) or method not in methods:
        hint = f"supported for {shape.architecture}: {', '.join(methods) or 'none; dequantize the weights first'}"
        raise section.error(
            "quant_method", f"{method!r} is not supported", hint, code="config.unsupported-quantization"
        )
    return methods[method](shape, section)


def fp8(shape: ModelShape, section: ConfigReader) -> ModelShape:
    """Store linear weights in float8, each with one scale for every block of it.

    The router, embeddings, norms, head and an MTP layer's own projection stay as they are, and so do the
    modules that `modules_to_not_convert` names, whole or from a dot on.
    Shapes: `weight_scale_inv` (ceil(m / 128), ceil(n / 128)) for a weight (m, n) and blocks of 128 x 128.
    Source: deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md`; transformers 5.23, `FP8Linear`,
        `should_convert_module`.
    """
    section.expect("activation_scheme", "dynamic")
    block = section.counts("weight_block_size")
    if len(block) != 2 or 0 in block:
        problem = f"expected two positive integers, found {list(block)}"
        raise section.error("weight_block_size", problem, code="config.invalid-field")
    unquantized = {*section.names("modules_to_not_convert"), *section.names("ignored_layers")}
    if odd := sorted(name for name in unquantized if not re.fullmatch(r"[\w.]+", name)):
        problem = f"{odd[0]!r} is not the name of a module"
        hint = "patterns are not supported"
        raise section.error("modules_to_not_convert", problem, hint, code="config.unsupported-field")
    tensors, scales = dict[str, Shape](), dict[Shape, Shape]()  # one object for all of a shape: there may be a million
    for fqn, dims in shape.tensors.items():
        tensors[fqn] = dims
        if _is_linear(fqn, dims) and not (unquantized and unquantized & _dotted_parts(fqn.removesuffix(".weight"))):
            if dims not in scales:
                scales[dims] = (-(-dims[0] // block[0]), -(-dims[1] // block[1]))
            tensors[f"{fqn}_scale_inv"] = scales[dims]
    return replace(
        shape,
        tensors=tensors,
        untrained_suffixes=(*shape.untrained_suffixes, ".weight_scale_inv"),
    )


def mxfp4(shape: ModelShape, section: ConfigReader) -> ModelShape:
    """Store experts as 4-bit floats, two in a byte, with one scale for every 32 of them.

    Shapes: `gate_up_proj_blocks` (E, 2 F, D / 32, 16) and `gate_up_proj_scales` (E, 2 F, D / 32) for
    `gate_up_proj` (E, D, 2 F); `down_proj` (E, F, D) likewise.
    Source: openai/gpt-oss, `gpt_oss/torch/weights.py`; transformers 5.23, `integrations/mxfp4.py`;
        OCP Microscaling Formats, version 1.0.
    """
    tensors: dict[str, Shape] = {}
    for fqn, dims in shape.tensors.items():
        if not fqn.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[fqn] = dims
            continue
        count, inputs, outputs = dims
        if inputs % MXFP4_BLOCK:
            problem = f"mxfp4 requires widths that 32 divides, {fqn} has {inputs}"
            raise section.error("quant_method", problem, code="config.inconsistent-fields")
        tensors[f"{fqn}_blocks"] = (count, outputs, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2)
        tensors[f"{fqn}_scales"] = (count, outputs, inputs // MXFP4_BLOCK)
    return replace(
        shape,
        tensors=tensors,
        untrained_suffixes=(*shape.untrained_suffixes, "_proj_scales"),
        packed_suffixes=(*shape.packed_suffixes, "_proj_blocks"),
    )


def _is_linear(fqn: str, dims: Shape) -> bool:
    """Return whether this is one of a layer's linear weights, the router's excepted."""
    in_layer = ".self_attn." in fqn or ".mlp." in fqn
    return in_layer and len(dims) == 2 and not fqn.endswith(".mlp.gate.weight")


def _dotted_parts(module: str) -> set[str]:
    """Return a module's name, those of the modules around it, and their endings from a dot on."""
    words = module.split(".")
    cuts = range(1, len(words))
    return {module, *(".".join(words[:cut]) for cut in cuts), *(".".join(words[cut:]) for cut in cuts)}
