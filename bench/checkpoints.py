"""Llama-shaped checkpoints of any size, written without torch: true headers, random bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path

from manifests.models import model_shape
from manifests.safetensors import encode_header, layout_tensors

_VOCAB_SIZE = 32000


def llama_config(num_layers: int, width: int) -> dict[str, object]:
    """Return the config of a Llama with 3.1's proportions."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 7 * width // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": width // 128,
        "num_key_value_heads": max(1, width // 512),
        "vocab_size": _VOCAB_SIZE,
        "tie_word_embeddings": False,
    }


def llama_of(num_params: float, width: int, least_layers: int) -> dict[str, object]:
    """Return the config of a Llama with this many layers and at least this many parameters."""
    of_layer = 2 * width * width + 2 * width * width // 4 + 3 * 7 * width * width // 2
    return llama_config(max(least_layers, round((num_params - 2 * _VOCAB_SIZE * width) / of_layer)), width)


def experts_config(num_layers: int, num_experts: int) -> dict[str, object]:
    """Return the config of a Qwen3-MoE that is mostly experts, each three 16-bit tensors of 2 KiB."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": num_experts,
        "num_experts_per_tok": 1,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }


def write_checkpoint(
    folder: Path, config: dict[str, object], num_shards: int, dtype: str = "BF16", *, shuffled: bool = False
) -> int:
    """Write a Hugging Face folder of `num_shards` shards, and return the bytes of its weights.

    The tensors are in the model's order, or `shuffled` over the shards.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = list(model_shape(config).tensors.items())
    if shuffled:
        random.Random(1).shuffle(tensors)
    weight_map, total = {}, 0
    noise = random.Random(0).randbytes(8 << 20)
    for index in range(num_shards):
        name = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        part = tensors[index * len(tensors) // num_shards : (index + 1) * len(tensors) // num_shards]
        entries = layout_tensors((fqn, dtype, shape) for fqn, shape in part)
        with open(folder / name, "wb") as file:
            file.write(encode_header(entries, {"format": "pt"}, alignment=8))
            for number, entry in enumerate(entries):
                left, first = entry.nbytes, number * 64 % len(noise)  # tensors of one shape differ
                while left:
                    left -= file.write(memoryview(noise)[first : first + min(left, len(noise) - first)])
                    first = 0
                total += entry.nbytes
        weight_map |= dict.fromkeys((fqn for fqn, _ in part), name)
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n")
    return total
