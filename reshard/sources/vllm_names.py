"""vLLM's `sharded_state`: names of its files and tensors, and what of a tensor a tensor-parallel rank has.

Source: vLLM 0.33.0, model_executor/models/llama.py, layers/linear.py, layers/vocab_parallel_embedding.py and
model_loader/sharded_state_loader.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from manifests.errors import ModelError
from manifests.models import ModelShape
from reshard.tensors.source_index import SUFFIX

__all__ = [
    "BY_COLUMNS",
    "EMBEDDING",
    "FUSED",
    "HEAD",
    "LAYER",
    "NORM",
    "RANK_FILE",
    "SCALES",
    "WHOLE",
    "check_family",
    "heads_in",
    "is_sharded_state",
    "rows_of_part",
    "rows_of_vocabulary",
    "what_is_uneven",
]

_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_NUMBER = "(0|[1-9][0-9]{0,4})"
# Without and with pipeline stages: stage, rank, part.
RANK_FILE = re.compile(rf"model-(?:pp-{_NUMBER}-tp|rank)-{_NUMBER}-part-{_NUMBER}\.safetensors")
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_KEYS = ("self_attn.k_proj", "self_attn.v_proj")
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", *_KEYS),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
BY_COLUMNS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
WHOLE = ("norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")  # ends of names
_ATTENTION = "self_attn.attn."
SCALES = tuple(f"{_ATTENTION}{name}" for name in ("_k_scale", "_prob_scale", "_q_scale", "_v_scale"))  # of its cache
_VOCAB_ALIGNMENT = 64  # rows to which vLLM pads the vocabulary


def is_sharded_state(names: Collection[str]) -> bool:
    """Return whether a folder's safetensors files are those of vLLM's ranks."""
    shards = [name for name in names if name.endswith(SUFFIX) and "/" not in name]
    return bool(shards) and all(map(RANK_FILE.fullmatch, shards))


def check_family(shape: ModelShape, hint: str) -> None:
    """Refuse a model whose tensors vLLM has in a layout that is not known.

    Raises:
        ModelError: it is of another architecture.
    """
    if shape.architecture not in _FAMILIES:
        problem = f"vLLM's layout of {shape.architecture} is not known, of {', '.join(_FAMILIES)} it is"
        raise ModelError("config.json: architectures", problem, hint, code="model.not-in-vllm")


def heads_in(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the number of heads of queries and of keys."""
    queries = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or queries
    assert isinstance(queries, int), "model_shape checked it"
    assert isinstance(keys, int), "model_shape checked it"
    return queries, keys


def what_is_uneven(shape: ModelShape, heads: tuple[int, int], tp: int) -> str | None:
    """Return what `tp` ranks cannot share evenly; None if there is nothing."""
    num_queries, num_keys = heads
    sizes = {"attention heads": num_queries, "rows of the padded vocabulary": _VOCAB_ALIGNMENT}
    sizes |= {f"rows of {fqn}": dims[0] for fqn, dims in shape.tensors.items() if fqn.endswith("mlp.gate_proj.weight")}
    uneven = next((f"{count} {what}" for what, count in sizes.items() if count % tp), None)
    if uneven is None and max(num_keys, tp) % min(num_keys, tp):
        return f"{num_keys} key heads"
    return uneven


def rows_of_part(part: str, num_rows: int, num_keys: int, rank: int, tp: int) -> tuple[int, int]:
    """Return the first row of a rank's part of a fused projection, and the one after the last.

    Where there are fewer key heads than ranks, each is on several of them.
    """
    if part in _KEYS and tp > num_keys:
        rank, tp = rank * num_keys // tp, num_keys
    count = num_rows // tp
    return rank * count, (rank + 1) * count


def rows_of_vocabulary(num_rows: int, rank: int, tp: int) -> tuple[int, int, int]:
    """Return the first row and the one after the last of a rank's, and how many rows it has with those of padding."""
    padded = -(-num_rows // _VOCAB_ALIGNMENT) * _VOCAB_ALIGNMENT // tp
    return min(num_rows, rank * padded), min(num_rows, (rank + 1) * padded), padded
