"""Folders of torch.distributed.checkpoint as sources; DCP's writer and torchtitan's adapters are the oracle."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from reshard.copy.journal import plan_key
from reshard.packing.options import PackOptions
from reshard.packing.pack import prepare_pack
from reshard.packing.plan import LayoutRequest
from tests.builders import pack, refusal, reshard, run
from tests.fast.manifests.models.catalogued import save_tiny

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "tie_word_embeddings": False,
}  # fmt: skip
MLA = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | MLA, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, first_k_dense_replace=1,
        n_group=1, topk_group=1, n_shared_experts=1,
    ),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
ADAPTERS: dict[str, Any] = {
    "llama": Llama3StateDictAdapter, "qwen3": Qwen3StateDictAdapter, "qwen3_moe": Qwen3StateDictAdapter,
    "deepseek_v3": DeepSeekV3StateDictAdapter, "gpt_oss": GptOssStateDictAdapter,
}  # fmt: skip


def huggingface_state(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a random model and return its tensors as its files have them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def torchtitan_state(kind: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as torchtitan's adapter names and lays them out."""
    rope = object.__new__(ComplexRoPE.Config if kind in ("llama", "deepseek_v3") else CosSinRoPE.Config)
    attention = SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=8, rope=rope, q_lora_rank=8)
    layer = SimpleNamespace(attention=attention, moe=SimpleNamespace(num_experts=4))
    config: Any = SimpleNamespace(layers=[layer] * 3, dim=16, enable_weight_tying=False)
    native: dict[str, torch.Tensor] = ADAPTERS[kind](config, None).from_hf(dict(state))
    if kind != "gpt_oss":
        return native
    return {name: native[name] for name in native if not name.endswith(("mlp1_bias", "mlp2_bias"))} | of_experts(state)


def of_experts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what GPT-OSS's adapter leaves out: it knows experts by other names than torchtitan's own module."""
    module = GptOssGroupedExperts.Config(dim=16, hidden_dim=24, num_experts=4)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in module.build().named_parameters()}
    found = {}
    for name, shape in shapes.items():
        of_file = ("gate_up_proj" if "mlp1" in name else "down_proj") + ("_bias" if "bias" in name else "")
        for layer in range(3):
            tensor = state[f"model.layers.{layer}.mlp.experts.{of_file}"]
            tensor = tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor
            assert tensor.shape == shape
            found[f"layers.{layer}.moe.routed_experts.inner_experts.{name}"] = tensor
    return found


def save(folder: Path, kind: str, state: Mapping[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without process groups
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    CONFIGS[kind].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture_of(kind)]}))
    return folder


def save_in_halves(folder: Path, kind: str, state: Mapping[str, torch.Tensor]) -> Path:
    """Save each tensor in two slices, as two ranks that share its rows do."""
    halves = {f"{name}#{half}": rows for name in state for half, rows in enumerate(state[name].tensor_split(2))}
    save(folder, kind, halves)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entries, items = metadata.state_dict_metadata, {index.fqn: index for index in metadata.storage_data}
    for name, tensor in state.items():
        offset = torch.Size(len(tensor.shape) * (0,))
        for half in range(2):
            entry, index = entries.pop(f"{name}#{half}"), items[f"{name}#{half}"]
            begun = entries.setdefault(name, replace(entry, size=tensor.shape, chunks=[]))
            begun.chunks.append(replace(entry.chunks[0], offsets=offset))
            info = metadata.storage_data.pop(index)
            metadata.storage_data[replace(index, fqn=name, offset=offset, index=half)] = info
            offset = torch.Size((entry.size[0], *offset[1:]))
    metadata.planner_data = {name: (name,) for name in state}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def architecture_of(kind: str) -> str:
    return type(AutoModelForCausalLM.from_config(CONFIGS[kind])).__name__


def exported(source: Path, layout: str = "pp=2") -> dict[str, torch.Tensor]:
    """Return the tensors of the export of the pack of a source."""
    packed, out = source.parent / "packed", source.parent / "exported"
    for args in (("pack", source, "--layout", layout, "--out", packed), ("export", packed, "--to", "hf", "--out", out)):
        run(*args)
    return load_file(out / "model.safetensors")


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def others(state: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Return entries that are not packed: the state of another optimizer, and of a data loader."""
    return {
        "optimizer": {f"state.{name}.momentum": torch.zeros_like(tensor) for name, tensor in state.items()},
        "dataloader": {"world_size": 1},
    }


@pytest.mark.parametrize("kind", CONFIGS)
def test_torchtitan_checkpoint_becomes_the_model_that_its_adapter_was_given(kind: str, tmp_path: Path) -> None:
    state = huggingface_state(kind, tmp_path / "model")
    native = torchtitan_state(kind, state)
    assert "tok_embeddings.weight" in native
    assert_equal(exported(save(tmp_path / "step-7", kind, {**native, **others(native)}), "pp=3"), state)


def test_config_of_quantized_weights_beside_others_is_named(tmp_path: Path) -> None:
    """The hub's DeepSeek-V3 has such a config, and torchtitan trains it in bfloat16."""
    native = torchtitan_state("deepseek_v3", huggingface_state("deepseek_v3", tmp_path / "model"))
    config = save(tmp_path / "step-7", "deepseek_v3", native) / "config.json"
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": section}))
    refused = refusal("pack", config.parent, "--layout", "pp=2", "--out", tmp_path / "out")
    assert refused.found == (3, "source.missing-tensor", str(config.parent))
    assert "remove quantization_config" in refused.text


def test_config_of_quantized_weights_that_lacks_nothing_is_not_the_fault(tmp_path: Path) -> None:
    native = torchtitan_state("deepseek_v3", huggingface_state("deepseek_v3", tmp_path / "model"))
    config = save(tmp_path / "step-7", "deepseek_v3", native) / "config.json"
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    section["modules_to_not_convert"] = ["model"]
    changed = {"quantization_config": section, "vocab_size": SIZES["vocab_size"] + 8}
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    refused = refusal("pack", config.parent, "--layout", "pp=2", "--out", tmp_path / "out")
    assert refused.found[:2] == (3, "source.shape-mismatch")
    assert "quantization_config" not in refused.text


@pytest.mark.parametrize("nested", [False, True])
def test_checkpoint_with_names_of_hugging_face(nested: bool, tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    saved = {"model": state} if nested else state
    source = save(tmp_path / "step-7", "llama", {**saved, **others(state)})
    assert_equal(exported(source), state)
    pack(source, tmp_path / "other", "pp=1")
    manifest = json.loads((tmp_path / "other" / "manifest.json").read_text())
    assert manifest["source"]["left_out"] == ["dataloader", "optimizer"]


@pytest.mark.parametrize("writer", [save, save_in_halves])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_checkpoint_with_names_of_transformers_model_in_memory(kind: str, writer: Any, tmp_path: Path) -> None:
    """As accelerate saves a model under FSDP, in which transformers has stacked the experts."""
    state = huggingface_state(kind, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal(exported(writer(tmp_path / "step-7", kind, model.state_dict())), state)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM"])
def test_checkpoint_of_the_model_in_memory_of_other_architectures(architecture: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-7", no_dist=True)
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "step-7")
    pack(tmp_path / "step-7", tmp_path / "packed", "pp=2")
    run("verify", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "hf", "--out", tmp_path / "out")
    files = (tmp_path / "model").glob("*.safetensors")
    assert_equal(
        load_file(tmp_path / "out" / "model.safetensors"),
        {name: tensor for path in files for name, tensor in load_file(path).items()},
    )
    assert run("check", tmp_path / "step-7", "--against", tmp_path / "model", "--bytes").code == 0


def test_pack_without_a_tensor_that_was_dropped_is_a_checkpoint(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    source = save(tmp_path / "step-7", "llama", {**state, "model.mean": torch.ones(3)})
    packed = pack(source, tmp_path / "packed", "pp=2", "--drop", "model.mean")
    run("verify", packed)
    run("export", packed, "--to", "hf", "--out", tmp_path / "exported")
    assert_equal(load_file(tmp_path / "exported" / "model.safetensors"), state)


def test_optimizer_state_without_that_of_a_frozen_parameter_says_how_to_do_without(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 0.01, "weight_decay": 0.1, "amsgrad": False}
    optimizer: dict[str, object] = {}
    for name in state.keys() - {"lm_head.weight"}:
        optimizer |= {f"state.{name}.{kind}": torch.zeros_like(state[name]) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer |= {f"state.{name}.step": torch.tensor(3.0)}
        optimizer |= {f"param_groups.{name}.{option}": value for option, value in options.items()}
    source = save(tmp_path / "step-3", "llama", {**state, "optimizer": optimizer})
    refused = refusal("pack", source, "--layout", "pp=1", "--out", tmp_path / "out")
    assert refused.found[:2] == (3, "source.missing-tensor")
    assert refused.text.endswith("hint: --drop optimizer packs the weights alone")
    run("pack", source, "--layout", "pp=1", "--drop", "optimizer", "--out", tmp_path / "out")


def codes(folder: Path, *args: str | Path) -> list[str]:
    return [found["code"] for found in reshard("check", folder, *args, "--json").json["problems"]]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_check_compares_the_weights_with_another_checkpoint(kind: str, tmp_path: Path) -> None:
    state = huggingface_state(kind, tmp_path / "model")
    native = torchtitan_state(kind, state)
    one, two = (save(tmp_path / name, kind, {**native, **others(native)}) for name in ("one", "two"))
    for pair in ((one, tmp_path / "model"), (tmp_path / "model", one), (one, two)):
        assert reshard("check", pair[0], "--against", pair[1], "--bytes").code == 0
    native["norm.weight"] = native["norm.weight"] + 1
    other = save(tmp_path / "other", kind, {**native, **others(native)})
    for pair in ((other, tmp_path / "model"), (other, one)):
        assert codes(pair[0], "--against", pair[1]) == []
        assert codes(pair[0], "--against", pair[1], "--bytes") == ["check.other-bytes"]
    del native["norm.weight"]
    less = save(tmp_path / "less", kind, native)
    lost = ["source.missing-tensor", "check.other-names"]
    assert codes(less, "--against", tmp_path / "model") == lost
    assert codes(less, "--against", one) == lost  # the optimizer state as well


def test_check_compares_the_weights_with_the_config(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    assert codes(save(tmp_path / "healthy", "llama", {"model": state, "optimizer": {"rate": 1}})) == []
    elsewhere = {"app": {"model": state}, "step": torch.tensor(5)}
    assert codes(save(tmp_path / "elsewhere", "llama", elsewhere)) == []
    state["model.norm.weight"] = torch.ones(3)
    assert codes(save(tmp_path / "other", "llama", state)) == ["source.shape-mismatch"]
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    unknown = {**config, "model_type": "unknown", "architectures": ["Unknown"]}
    (tmp_path / "other" / "config.json").write_text(json.dumps(unknown))
    assert codes(tmp_path / "other") == []
    redirected = {**config, "transformers_weights": "others.safetensors"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(redirected))
    assert codes(tmp_path / "other") == ["config.redirects"]


def test_check_reads_the_values_of_weights_and_optimizer_state(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    moments = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    saved = {"model": state, "optimizer": {"state": moments}, "step": torch.tensor(3)}
    assert codes(save(tmp_path / "step-3", "llama", saved), "--values") == []
    for moment in moments.values():  # as of experts that got no token
        moment.zero_()
    moments["model.norm.weight"][1] = torch.nan
    state["lm_head.weight"].zero_()
    ended = reshard("check", save(tmp_path / "step-4", "llama", saved), "--values", "--json").json
    assert {(found["code"], found["where"].rpartition(": ")[2]) for found in ended["problems"]} == {
        ("check.not-finite", "'optimizer.state.model.norm.weight'"),
        ("check.all-zero", "'model.lm_head.weight'"),
    }
    (part,) = (tmp_path / "step-4").glob("*.distcp")
    part.unlink()
    assert codes(tmp_path / "step-4", "--values") == ["check.missing-shard"]


def test_what_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    source, out = save(tmp_path / "step-7", "llama", state), tmp_path / "out"

    def refused() -> tuple[str, str]:
        exit_code, code, where = refusal("pack", source, "--layout", "pp=2", "--out", out).found
        assert exit_code == 3
        return code, where.replace(str(source), "SOURCE")

    config = (source / "config.json").read_bytes()
    (source / "config.json").unlink()
    assert refused() == ("source.no-config", "SOURCE/config.json")
    (source / "config.json").write_bytes(config)
    data = next(source.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    assert refused()[0] == "source.bad-archive"
    data.write_bytes(whole)
    saved = (source / ".metadata").read_bytes()
    for change, code in ((drop_item, "source.bad-dcp-metadata"), (swap_items, "source.bad-archive")):
        metadata = pickle.loads(saved)
        change(metadata.storage_data)
        (source / ".metadata").write_bytes(pickle.dumps(metadata))
        assert refused()[0] == code
    (source / ".metadata").write_bytes(b"\x80\x04cos\nmkdir\n.")
    assert refused() == ("source.bad-dcp-metadata", "SOURCE/.metadata")
    del state["model.norm.weight"]
    again = save(tmp_path / "step-8", "llama", state)
    assert refusal("pack", again, "--layout", "pp=2", "--out", out).found[1] == "source.missing-tensor"


def drop_item(items: dict[Any, object]) -> None:
    items.pop(next(iter(items)))


def swap_items(items: dict[Any, object]) -> None:
    """Let two tensors of different shapes change places."""
    indexes = {index.fqn: index for index in items}
    one, other = indexes["model.norm.weight"], indexes["lm_head.weight"]
    items[one], items[other] = items[other], items[one]


def test_journal_of_a_pack_is_not_that_of_another_number_of_heads(tmp_path: Path) -> None:
    native = torchtitan_state("llama", huggingface_state("llama", tmp_path / "model"))
    source, keys = save(tmp_path / "step-7", "llama", native), []
    config = json.loads((source / "config.json").read_text())
    for heads in ({}, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, {}):
        (source / "config.json").write_text(json.dumps(config | heads))
        options = PackOptions(out=tmp_path / "out", layout=LayoutRequest(spec="pp=2"))
        keys.append(plan_key(prepare_pack(str(source), options).shards))
    assert keys[0] == keys[2] != keys[1]


def test_parameter_groups_have_the_names_of_the_whole_model(tmp_path: Path) -> None:
    """A GPT-2 without its head, whose files omit `transformer.`, with two groups of parameters."""
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    state = AutoModel.from_config(config).state_dict()
    common = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 0.01, "amsgrad": False}
    options = {
        f"param_groups.{name}.{option}": value
        for name in state
        for option, value in {**common, "weight_decay": 0.1 if state[name].dim() > 1 else 0.0}.items()
    }
    kinds = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.ones_like, "step": lambda tensor: torch.tensor(3.0)}
    moments = {f"state.{name}.{kind}": make(state[name]) for name in state for kind, make in kinds.items()}
    optimizer = {**moments, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**state, "optimizer": optimizer}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    written = config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "step-3" / "config.json").write_text(json.dumps(written))
    pack(tmp_path / "step-3", tmp_path / "out", "pp=1")
    found = json.loads((tmp_path / "out" / "manifest.json").read_text())["training"]["optimizer"]["groups"]
    lines = sorted(f"transformer.{name}" for name in state if state[name].dim() == 1)
    assert [(group["weight_decay"], group["fqns"]) for group in found] == [(0.1, []), (0.0, lines)]


def test_two_names_of_one_weight_are_refused(tmp_path: Path) -> None:
    native = torchtitan_state("llama", huggingface_state("llama", tmp_path / "model"))
    older = {"output.weight": native["lm_head.weight"].neg()}
    source, out = save(tmp_path / "step-7", "llama", {**native, **older}), tmp_path / "out"
    exit_code, code, _ = refusal("pack", source, "--layout", "pp=2", "--out", out).found
    assert (exit_code, code) == (3, "source.tensor-twice")
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.planner_data["output.weight"] = ("lm_head.weight",)
    metadata.planner_data["norm.weight"] = ()
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    exit_code, code, where = refusal("pack", source, "--layout", "pp=2", "--out", out).found
    assert (exit_code, code, where) == (3, "source.tensor-twice", f"{source}/.metadata: 'lm_head.weight'")


def test_torchtitan_names_of_other_architectures_are_refused(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    source = save(tmp_path / "step-7", "llama", torchtitan_state("llama", state))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"})
    )
    found = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "out").found
    assert found == (3, "model.unknown-torchtitan-layout", str(source))


def test_inspect_lists_what_torch_saved(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    source = save(tmp_path / "step-7", "llama", {**state, **others(state)})
    shown = reshard("inspect", source, "--json", "--tensors").json
    assert (shown["format"], shown["num_files"], shown["other_parts"]) == ("dcp", 1, ["dataloader"])
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert shown["parts"] == {part: {"num_tensors": len(state), "nbytes": nbytes} for part in ("model", "optimizer")}
    shapes = {one["name"]: tuple(one["shape"]) for one in shown["tensors"] if one["name"] in state}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    (tmp_path / "bin").mkdir()
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    assert reshard("inspect", tmp_path / "bin", "--json").json["parts"]["model"]["nbytes"] == nbytes
    assert reshard("inspect", source).out.startswith("torch.distributed.checkpoint, 1 file\n")


def entry_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.norm.weight"]


def item_of(metadata: Any, name: str = "model.norm.weight") -> Any:
    return next(index for index in metadata.storage_data if index.fqn == name)


def plant(holder: object, name: str) -> None:
    object.__setattr__(holder, name, 1)


def store_twice(metadata: Any) -> None:
    item = item_of(metadata)
    metadata.storage_data[replace(item, offset=torch.Size([1 << 40]))] = metadata.storage_data[item]
    for index in metadata.storage_data:
        if index.fqn == item.fqn:
            object.__setattr__(index, "offset", torch.Size([0]))


PLANTS: dict[str, Callable[[Any], object]] = {
    "of another version": lambda metadata: setattr(metadata, "version", "2.0.0"),
    "more of the checkpoint": lambda metadata: plant(metadata, "compression"),
    "more of a tensor": lambda metadata: plant(entry_of(metadata), "scale"),
    "more of a chunk": lambda metadata: plant(entry_of(metadata).chunks[0], "strides"),
    "more of an item": lambda metadata: plant(metadata.storage_data[item_of(metadata)], "compressed"),
    "more of an index": lambda metadata: plant(item_of(metadata), "replica"),
    "another layout": lambda metadata: setattr(entry_of(metadata).properties, "layout", torch.sparse_coo),
    "a value in no file": lambda metadata: metadata.storage_data.pop(item_of(metadata, "extra")),
    "two items of one chunk": store_twice,
}


@pytest.mark.parametrize("kind", PLANTS)
def test_metadata_that_would_be_dropped_are_refused(kind: str, tmp_path: Path) -> None:
    """What torch writes is read whole; what it never wrote is refused, since nobody knows what it means."""
    state = huggingface_state("llama", tmp_path / "model")
    source = save(tmp_path / "step-7", "llama", {**state, "extra": "a value"})
    metadata = pickle.loads((source / ".metadata").read_bytes())
    PLANTS[kind](metadata)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    found = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "out").found
    assert found[:2] == (3, "source.bad-dcp-metadata")
