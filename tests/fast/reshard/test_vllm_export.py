"""The files of vLLM's ranks; transformers' tensors, split and joined as vLLM's layers do, are the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from tests.builders import refusal, run

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**{key: value for key, value in SIZES.items() if key != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
}
SCALES = {f"self_attn.attn.{name}": torch.tensor(1.0) for name in ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")}


def exported(kind: str, place: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Export a random model to `out`, and return transformers' tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.save_pretrained(place / "model")
    run("pack", place / "model", "--layout", "pp=2", "--out", place / "packed")
    run("export", place / "packed", "--to", "vllm", *flags, "--out", place / "out")
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def rank_of(state: dict[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    """Return what a tensor-parallel rank has of all layers, with torch's own operations."""
    found = {}
    heads = torch.arange(2).repeat_interleave(max(1, tp // 2)).chunk(tp)[rank]  # of keys; several ranks may have one

    def keys(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (2, -1))[heads.unique()].flatten(0, 1)

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.zeros(128, 32)
        padded[:100] = state[name]
        found[name] = padded.chunk(tp)[rank]
    found["model.norm.weight"] = state["model.norm.weight"]
    for layer in range(5):
        prefix = f"model.layers.{layer}."
        of = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        for leaf in ("weight", "bias"):
            if f"self_attn.q_proj.{leaf}" in of:
                q, k, v = (of.pop(f"self_attn.{part}_proj.{leaf}") for part in "qkv")
                of[f"self_attn.qkv_proj.{leaf}"] = torch.cat([q.chunk(tp)[rank], keys(k), keys(v)])
        gate, up = (of.pop(f"mlp.{part}_proj.weight") for part in ("gate", "up"))
        of["mlp.gate_up_proj.weight"] = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            of[name] = of[name].chunk(tp, dim=1)[rank]
        found |= {prefix + name: tensor for name, tensor in {**of, **SCALES}.items()}
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_ranks_have_the_slices_of_vllms_layers(kind: str, tp: int, tmp_path: Path) -> None:
    state = exported(kind, tmp_path, "--tp", str(tp))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == tp
    for rank in range(tp):
        expected = rank_of(state, rank, tp)
        if kind.endswith("tied"):  # vLLM's state dict has a tied weight under the name that sorts first
            del expected["model.embed_tokens.weight"]
        assert_equal(load_file(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors"), expected)


# The layers of stages, as vLLM's get_pp_indices divides five.
@pytest.mark.parametrize(("pp", "counts"), [(2, [3, 2]), (3, [2, 2, 1]), (4, [1, 1, 2, 1])])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_stages_have_the_layers_that_vllm_gives_them(kind: str, pp: int, counts: list[int], tmp_path: Path) -> None:
    state = exported(kind, tmp_path, "--pp", str(pp), "--tp", "2")
    for rank in range(2):
        whole, first = rank_of(state, rank, 2), 0
        for stage, count in enumerate(counts):
            prefixes = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
            first += count
            wanted = {name for name in whole if name.startswith(prefixes)}
            wanted |= {"model.embed_tokens.weight"} if stage == 0 else set()
            wanted |= {"model.norm.weight", "lm_head.weight"} if stage == pp - 1 else set()
            found = load_file(tmp_path / "out" / f"model-pp-{stage}-tp-{rank}-part-0.safetensors")
            assert_equal(found, {name: whole[name] for name in wanted})


def test_dtype_is_cast_and_config_says_so(tmp_path: Path) -> None:
    state = exported("llama", tmp_path, "--dtype", "bf16")
    found = load_file(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    assert torch.equal(found["model.norm.weight"], state["model.norm.weight"].bfloat16())
    assert '"bfloat16"' in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--tp", "3"), "options.uneven-degree"),
        (("--pp", "6"), "options.uneven-degree"),
        (("--weights-only",), "options.conflict"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(flags: tuple[str, ...], code: str, tmp_path: Path) -> None:
    exported("llama", tmp_path)
    error = refusal("export", tmp_path / "packed", "--to", "vllm", *flags, "--out", tmp_path / "refused")
    assert error.found[1] == code


def test_families_whose_layout_is_not_known_are_refused(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=40)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    run("pack", tmp_path / "model", "--layout", "pp=1", "--out", tmp_path / "packed")
    error = refusal("export", tmp_path / "packed", "--to", "vllm", "--out", tmp_path / "out")
    assert error.found[1] == "model.not-in-vllm"


def test_degrees_are_for_vllm_alone(tmp_path: Path) -> None:
    exported("llama", tmp_path)
    error = refusal("export", tmp_path / "packed", "--to", "hf", "--tp", "2", "--out", tmp_path / "refused")
    assert error.found[1] == "options.conflict"
