"""Tiny configs: what they have of a real one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from manifests.models.catalogue import catalogued
from manifests.models.trainable import generic_entry
from runner.models.shrink import shrink
from runner.proof.reference import draw_rows
from runner.proof.stages import LENGTH
from tests.fast.manifests.models.catalogued import config_of, quiet

PLAIN = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 40}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PLAIN, {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 40}),
        ({**PLAIN, "num_key_value_heads": 32}, {"num_key_value_heads": 4}),
        ({**PLAIN, "num_key_value_heads": 1}, {"num_key_value_heads": 1}),
        ({"num_attention_heads_per_layer": [48, 64], "num_attention_heads": 48},
         {"num_attention_heads_per_layer": [4, 8]}),
        ({"intermediate_size": [8, 512]}, {"intermediate_size": [8, 96]}),
        ({"q_lora_rank": None, "n_shared_experts": 0, "tie_word_embeddings": True, "num_experts": 512},
         {"q_lora_rank": None, "n_shared_experts": 0, "tie_word_embeddings": True, "num_experts": 8}),
        ({"num_experts": 1, "num_local_experts": 3, "n_routed_experts": 7, "moe_num_experts": 9},
         {"num_experts": 1, "num_local_experts": 4, "n_routed_experts": 8, "moe_num_experts": 8}),
        ({"eos_token_id": [151645, 151643], "pad_token_id": None, "image_token_id": 9},
         {"eos_token_id": 2, "pad_token_id": None, "image_token_id": 2}),
        ({"hidden_size": 2048, "mamba_expand": 4, "mamba_n_heads": 128, "mamba_d_head": 64, "intermediate_size": 8192},
         {"mamba_n_heads": 16, "mamba_d_head": 16, "intermediate_size": 256}),
        ({"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "qk_head_dim": 192, "head_dim": 64},
         {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 8}),
        ({"qk_rope_head_dim": 64, "head_dim": 512, "o_groups": 8, "o_lora_rank": 1024,
          "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}},
         {"qk_rope_head_dim": 8, "head_dim": 16, "o_groups": 2, "o_lora_rank": 16,
          "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}}),
        ({"n_embd": 4096, "n_head": 16, "rotary_dim": 64}, {"rotary_dim": 4}),
        ({"head_dim": 256, "rope_parameters": {"mrope_section": [11, 11, 10], "rope_theta": 1e7}},
         {"rope_parameters": {"mrope_section": [2, 0, 0], "rope_theta": 1e7}}),
        ({**PLAIN, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}},
         {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}),
        ({"vision_config": {"hidden_size": 1024}, "attn_config": {"kv_n_heads": 8}},
         {"vision_config": {"hidden_size": 1024}, "attn_config": {"kv_n_heads": 2}}),
    ],
)  # fmt: skip
def test_sizes_are_small_and_what_decides_on_code_stays(config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = shrink(config)
    assert {name: found[name] for name in expected} == expected
    assert found.keys() == config.keys()


@pytest.mark.parametrize(("seq_len", "context"), [(4096, 64), (8192, 8)])
def test_a_few_tokens_are_longer_than_the_context_before_it_was_stretched_if_those_of_the_run_are(
    seq_len: int, context: int
) -> None:
    at_the_top = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    in_rope = {"max_position_embeddings": 131072, "rope_scaling": {"factor": 32.0, **at_the_top}}
    for config, place in ((at_the_top, ()), (in_rope, ("rope_scaling",))):
        tiny = shrink(config, seq_len)
        rope = tiny[place[0]] if place else tiny
        assert rope["original_max_position_embeddings"] == context
        assert tiny["max_position_embeddings"] == 32 * context


def test_rows_of_a_proof_are_longer_than_whatever_decides_how_far_a_token_sees() -> None:
    """Of rows without documents, and of some document in others; the last token of either has no label."""
    rows = draw_rows(0, 4, 96, is_masked=True)
    longest = max(len(document) for row in rows.documents for document in row) - 1
    numbers: list[tuple[str, str, int]] = []
    for architecture in (name for name in catalogued() if generic_entry(name) is not None):
        with quiet():
            tiny = shrink(config_of(architecture, is_tiny=False).to_dict(), seq_len=10**7)
        numbers += ((architecture, name, number) for name, number in _numbers_in(tiny))
    reaches = [number for number in numbers if _REACH.fullmatch(number[1])]
    assert len(reaches) > 50
    assert [number for number in reaches if number[2] >= longest] == []
    contexts = [number for number in numbers if number[1] == "original_max_position_embeddings"]
    assert contexts
    assert [number for number in contexts if number[2] >= LENGTH - 1] == []


_REACH = re.compile(
    r"(sliding_|attention_|keep_)?window(_size)?|local_attention|(mamba_|attention_)?chunk_size|index_(topk|block_size)"
    r"|block_size|sliding_window_size|(compressed_sparse|heavily_compressed)_attention|floor_scale"
)
_DECODERS = ("attn_config", "ffn_config", "text_config")


def _numbers_in(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers_in(value) if not name.endswith("_config") or name in _DECODERS else ()
        elif type(value) is int:
            yield name, value


@pytest.mark.parametrize(("seq_len", "most"), [(2048, 128), (2049, 8)])
def test_a_few_tokens_are_beyond_the_positions_of_dynamic_rope_if_those_of_the_run_are(seq_len: int, most: int) -> None:
    for name in ("type", "rope_type"):
        config = {"max_position_embeddings": 2048, "rope_scaling": {name: "dynamic", "factor": 2.0}}
        assert shrink(config, seq_len)["max_position_embeddings"] == most
