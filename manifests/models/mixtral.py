"""Mixtral: a Mistral whose MLPs are experts, each in tensors of its own.

Source: transformers 5.23, `models/mixtral/modeling_mixtral.py`, `conversion_mapping.py` ("mixtral"); Jiang et al.
2024, "Mixtral of Experts".
"""

from __future__ import annotations

from manifests.models.components import Component, attention, experts, norm, routing
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape

# What files of transformers 4 and 5 call the matrices of a gated MLP. In memory transformers 5 has all experts of a
# layer in two tensors, and no others.
_FILE_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `MixtralForCausalLM`.

    Shapes: experts.0.w1 and w3 (F, D), w2 (D, F); gate (E, D).
    """
    width = config.count("hidden_size")
    head = config.count("head_dim", width // config.count("num_attention_heads"))
    count, per_token = routing(config, "num_local_experts")
    routed = experts(width, config.count("intermediate_size"), count=count, per_token=per_token)
    block = (
        attention(config, head=head, bias=False).below("self_attn")
        + _as_filed(routed).below("block_sparse_moe")
        + norm(width).below("input_layernorm")
        + norm(width).below("post_attention_layernorm")
    )
    shape = decoder("MixtralForCausalLM", config, [block] * config.count("num_hidden_layers", most=MAX_LAYERS))
    return as_stored(shape, config, {})


def _as_filed(routed: Component) -> Component:
    tensors = {}
    for leaf, dims in routed.tensors.items():
        module, _, weight = leaf.rpartition(".")
        outer, _, name = module.rpartition(".")
        tensors[f"{outer}.{_FILE_NAMES[name]}.{weight}" if name in _FILE_NAMES else leaf] = dims
    return Component(tensors=tensors, work=routed.work)
