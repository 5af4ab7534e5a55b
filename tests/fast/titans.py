"""A tiny Llama of torchtitan's, and its config in Hugging Face's words."""

from __future__ import annotations

from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _EMBEDDING_INIT, _NORM_INIT, _build_llama3_layers, _output_linear_init
from torchtitan.models.llama3.model import Llama3Model

DIM, HEADS, KV_HEADS, LAYERS, FFN, VOCAB = 32, 4, 2, 4, 48, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
    "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}  # fmt: skip


def llama(*, fused: bool) -> Llama3Model.Config:
    """Return the config of a model whose query, key and value projections are one parameter, or three."""
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64, theta=10000, scaling="none")
    layers = _build_llama3_layers(
        fuse_qkv=fused, n_layers=LAYERS, dim=DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, hidden_dim=FFN, rope=rope,
        attn_backend="flex",
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex_attention compiles for a minute
    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=_output_linear_init(DIM)),
        layers=layers,
    )
