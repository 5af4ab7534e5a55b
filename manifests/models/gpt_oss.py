"""GPT-OSS: attention sinks, biases, and experts whose matrices are in one tensor.

Source: transformers 5.23, `models/gpt_oss/modeling_gpt_oss.py`; OpenAI 2025, "gpt-oss-120b & gpt-oss-20b
Model Card".
"""

from __future__ import annotations

from manifests.models.components import Component, attention, expert_work, layer, routing
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder
from manifests.models.quantized import as_stored, mxfp4
from manifests.models.shape import ModelShape, Work

DEFAULT_HEAD = 64  # GptOssConfig


def gpt_oss_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `GptOssForCausalLM`.

    Shapes: sinks (H); otherwise see `manifests.models.components.attention`.
    """
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    head, bias = config.count("head_dim", DEFAULT_HEAD), config.flag("attention_bias", True)
    attended = attention(config, head=head, bias=bias) + Component(tensors={"sinks": (heads,)})
    block = layer(attended, _experts(config), width)
    shape = decoder("GptOssForCausalLM", config, [block] * config.count("num_hidden_layers", most=MAX_LAYERS))
    return as_stored(shape, config, {"mxfp4": mxfp4})


def _experts(config: ConfigReader) -> Component:
    """Experts with their gates and ups interleaved, and the router.

    Shapes: router (E, D); gate_up_proj (E, D, 2 F), down_proj (E, F, D): inputs before outputs, unlike
    everywhere else.
    FLOPs: see `manifests.models.components.experts`.
    Kept: as there, but 7 F by each expert: gate and up, both clamped, the sigmoid, the gate times it, the
    product. A kernel that fuses them keeps less.
    """
    width, ffn = config.count("hidden_size"), config.count("intermediate_size")
    count, per_token = routing(config, "num_local_experts")
    expert = Work(flops=6 * width * ffn, saved=7 * ffn, products=2 * ffn + width)
    return Component(
        tensors={
            "router.weight": (count, width),
            "router.bias": (count,),
            "experts.gate_up_proj": (count, width, 2 * ffn),
            "experts.gate_up_proj_bias": (count, 2 * ffn),
            "experts.down_proj": (count, ffn, width),
            "experts.down_proj_bias": (count, width),
        },
        work=expert_work(expert, width, count=count, per_token=per_token),
    )
