"""A tiny Llama of torchtitan's, and its config in Hugging Face's words."""

from __future__ import annotations

from torchtitan.models.llama3.model import Llama3Model

from bench import titans

DIM, HEADS, KV_HEADS, LAYERS, FFN, VOCAB = 32, 4, 2, 4, 48, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
    "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}  # fmt: skip


def llama(*, fused: bool) -> Llama3Model.Config:
    """Return the config of a model whose query, key and value projections are one parameter, or three."""
    return titans.llama(LLAMA, fused=fused)
