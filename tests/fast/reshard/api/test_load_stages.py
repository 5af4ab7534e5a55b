"""`runner.load_stages` fills modules of transformers and torchtitan, which compute what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn

import reshard
import runner
from tests.builders import flip
from tests.fast.runner.tiny import EMBEDDING, HEAD, SIZES, load_model, save_model

TOKENS = torch.arange(24).view(2, 12) % SIZES["vocab_size"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    out = model.with_name(f"{model.name}-pp2")
    reshard.pack(model, out, "pp=2")
    return out


class HandOn(nn.Module):
    """A layer of another stage."""

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden


def build_stage(model: Path, modules: tuple[str, ...]) -> nn.Module:
    """Build a transformers model on the meta device with these modules alone, its rotary cache computed."""
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        built = LlamaForCausalLM(config)
    for name in ("model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(8))):
        if name not in modules:
            built.set_submodule(name, HandOn())
    built.model.rotary_emb = LlamaRotaryEmbedding(config)
    return built.eval()


def stage_of(model: Path, packed: Path, index: int) -> nn.Module:
    return build_stage(model, reshard.open(packed).stage(index).info.modules)


def test_stages_of_transformers_compute_what_the_whole_model_does(model: Path, packed: Path) -> None:
    first, last = stage_of(model, packed, 0), stage_of(model, packed, 1)
    results = [runner.load_stages(packed, rank, stage) for rank, stage in enumerate((first, last))]
    assert [result.stages for result in results] == [(0,), (1,)]
    assert all(result.meta_buffers == () and result.num_unverified == 0 for result in results)
    assert sum(result.num_tensors for result in results) == len(load_file(model / "model.safetensors"))
    with torch.no_grad():
        hidden = first.model(TOKENS, use_cache=False).last_hidden_state
        logits = last(inputs_embeds=hidden, use_cache=False).logits
        assert torch.equal(logits, load_model(model)(TOKENS).logits)


def test_whole_model_in_one_module_keeps_its_tie_and_its_dtype(tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    save_model(tmp_path / "tied", tie_word_embeddings=True)
    reshard.pack(tmp_path / "tied", tmp_path / "pp1", "pp=1")
    with torch.device("meta"):
        module = LlamaForCausalLM(AutoConfig.from_pretrained(tmp_path / "tied")).to(torch.bfloat16)
    result = runner.load_stages(tmp_path / "pp1", 0, module)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert result.meta_buffers == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    expected = load_file(tmp_path / "tied" / "model.safetensors")
    assert len(list(module.parameters())) == len(expected)
    for fqn, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[fqn].to(torch.bfloat16)), fqn


class Unchanged:
    """An adapter for names and values that are those of files."""

    def to_hf(self, state_dict: dict[str, Any], /) -> dict[str, Any]:
        return state_dict

    def from_hf(self, hf_state_dict: dict[str, Any], /) -> dict[str, Any]:
        return hf_state_dict


@pytest.mark.parametrize("adapter", [None, Unchanged()])
def test_module_that_ties_what_the_packed_model_does_not_is_refused(
    adapter: Unchanged | None, model: Path, tmp_path: Path
) -> None:
    """One of the two weights would be lost."""
    from transformers import AutoConfig, LlamaForCausalLM

    reshard.pack(model, tmp_path / "pp1", "pp=1")
    with torch.device("meta"):
        module = LlamaForCausalLM(AutoConfig.from_pretrained(model, tie_word_embeddings=True))
    assert module.lm_head.weight is module.model.embed_tokens.weight
    with pytest.raises(runner.InputError) as refused:
        runner.load_stages(tmp_path / "pp1", 0, module, adapter=adapter)
    assert refused.value.code == "model.tied-parameter"
    assert "tie_word_embeddings" in refused.value.hint
    assert EMBEDDING in refused.value.problem
    assert HEAD in refused.value.problem


def test_parameters_with_memory_are_filled_in_place(model: Path, packed: Path) -> None:
    stage = stage_of(model, packed, 0).to_empty(device="cpu")
    before = {name: parameter.data_ptr() for name, parameter in stage.named_parameters()}
    runner.load_stages(packed, 0, stage)
    assert {name: parameter.data_ptr() for name, parameter in stage.named_parameters()} == before


def test_several_modules_hold_the_virtual_stages_of_a_rank(model: Path, tmp_path: Path) -> None:
    reshard.pack(model, tmp_path / "vpp", "pp=2,vpp=2")
    parts = [stage_of(model, tmp_path / "vpp", index) for index in (1, 3)]
    result = runner.load_stages(tmp_path / "vpp", 1, parts)
    assert result.stages == (1, 3)
    expected = load_file(model / "model.safetensors")
    found = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    assert found.keys() == {f for index in (1, 3) for f in reshard.open(tmp_path / "vpp").stage(index).tensors()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in found.items())
    with pytest.raises(runner.InputError) as refused:
        runner.load_stages(tmp_path / "vpp", 1, [parts[0], parts[0]])
    assert refused.value.code == "model.duplicate-parameter"


def test_names_are_mapped(model: Path, packed: Path) -> None:
    stage = stage_of(model, packed, 0)
    inner = stage.model  # its names lack "model."
    runner.load_stages(packed, 0, inner, name_of=lambda name: f"model.{name}")
    assert torch.equal(inner.embed_tokens.weight, load_file(model / "model.safetensors")[EMBEDDING])


def test_module_that_lacks_a_weight_is_refused(model: Path, packed: Path) -> None:
    modules = reshard.open(packed).stage(1).info.modules
    stage = build_stage(model, tuple(module for module in modules if module != "model.norm"))
    with pytest.raises(runner.InputError) as refused:
        runner.load_stages(packed, 1, stage)
    assert refused.value.code == "model.missing-parameter"
    assert "model.norm.weight" in refused.value.problem
    assert refused.value.where == str(packed / "manifest.json")


def test_module_with_a_weight_of_another_stage_is_refused(model: Path, packed: Path) -> None:
    stage = build_stage(model, (*reshard.open(packed).stage(0).info.modules, "lm_head"))
    with pytest.raises(runner.InputError) as refused:
        runner.load_stages(packed, 0, stage)
    assert refused.value.code == "model.unexpected-parameter"
    assert HEAD in refused.value.problem


def test_ranks_and_addresses_that_are_not_there_are_refused(model: Path, packed: Path) -> None:
    stage = stage_of(model, packed, 0)
    for rank in (-1, 2):
        with pytest.raises(runner.UsageError) as refused:
            runner.load_stages(packed, rank, stage)
        assert (refused.value.where, refused.value.code) == ("rank", "options.no-such-rank")
    with pytest.raises(runner.UsageError) as remote:
        runner.load_stages("s3://bucket/model", 0, stage)
    assert remote.value.code == "options.remote-manifest"


def test_damaged_shard_is_refused(model: Path, tmp_path: Path) -> None:
    reshard.pack(model, tmp_path / "out", "pp=2")
    shard = tmp_path / "out" / reshard.open(tmp_path / "out").stage(0).info.shards[0].path
    flip(shard)
    with pytest.raises(runner.InputError) as refused:
        runner.load_stages(tmp_path / "out", 0, stage_of(model, packed=tmp_path / "out", index=0))
    assert str(shard) in refused.value.where


def titan_config() -> Any:
    """Configure torchtitan's own Llama 3, fused QKV and complex RoPE included, with the sizes of the tiny model."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3 import _build_llama3_layers
    from torchtitan.models.llama3.model import Llama3Model

    width, vocab, heads = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_attention_heads"]
    init = {"weight": nn.init.zeros_}
    return Llama3Model.Config(
        dim=width,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init=init),
        norm=RMSNorm.Config(normalized_shape=width, param_init=init),
        lm_head=Linear.Config(in_features=width, out_features=vocab, param_init=init),
        layers=_build_llama3_layers(
            n_layers=SIZES["num_hidden_layers"], dim=width, n_heads=heads, hidden_dim=SIZES["intermediate_size"],
            n_kv_heads=SIZES["num_key_value_heads"], fuse_qkv=True, attn_backend="flex",
            rope=ComplexRoPE.Config(dim=width // heads, max_seq_len=64, theta=10000.0),
        ),
    )  # fmt: skip


def test_module_of_torchtitan_is_filled_through_its_adapter(model: Path, packed: Path) -> None:
    """A renaming alone would leave rows of the query and key projections in another order than torchtitan's RoPE."""
    from torchtitan.models.llama3.model import Llama3Model
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    config = titan_config()
    with torch.device("meta"):
        module: nn.Module = config.build()
    assert isinstance(module, Llama3Model)
    modules = reshard.open(packed).stage(0).info.modules
    for name in list(module.layers):
        if f"model.layers.{name}" not in modules:
            del module.layers[name]
    module.norm = module.lm_head = None
    adapter = Llama3StateDictAdapter(config, None)
    result = runner.load_stages(packed, 0, module, adapter=adapter)
    expected = adapter.from_hf(reshard.open(packed).stage(0).state_dict(framework="torch"))
    parameters = module.state_dict()
    assert parameters.keys() == expected.keys()
    assert result.num_tensors == len(expected)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    stored = load_file(model / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(parameters["layers.0.attention.qkv_linear.wq.weight"], stored)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_module_that_fsdp_shards_is_filled_and_computes_the_same(model: Path, packed: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stage = stage_of(model, packed, 0)
    mesh = init_device_mesh("cpu", (1,))
    for index in range(8):
        layer = stage.model.layers[index]
        if not isinstance(layer, HandOn):
            fully_shard(layer, mesh=mesh)
    fully_shard(stage.model.embed_tokens, mesh=mesh)
    runner.load_stages(packed, 0, stage)
    plain = stage_of(model, packed, 0)
    runner.load_stages(packed, 0, plain)
    with torch.no_grad():
        found, expected = (each.model(TOKENS, use_cache=False).last_hidden_state for each in (stage, plain))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("modules", [None, 3, [], [None]])
def test_what_is_no_module_is_refused(packed: Path, modules: Any) -> None:
    with pytest.raises(reshard.UsageError) as refused:
        runner.load_stages(packed, 0, modules)
    assert (refused.value.where, refused.value.code) == ("model", "options.invalid-value")
