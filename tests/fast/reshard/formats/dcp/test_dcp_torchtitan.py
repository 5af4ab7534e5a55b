"""Models that torchtitan's of the same family is not; its own adapters and model code are the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, _build_dsv3_layers, _build_mtp_layers
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from transformers import AutoModelForCausalLM

from manifests.models import model_shape
from tests.builders import Refusal, pack, refusal, reshard, run
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.formats.dcp.test_dcp_export import Titan, assert_contains, state_of
from tests.fast.reshard.formats.dcp.test_dcp_source import (
    CONFIGS,
    assert_equal,
    huggingface_state,
    save,
    torchtitan_state,
)
from tests.fast.reshard.formats.megatron.test_megatron import save_deepseek

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def pair_halves(folder: Path) -> None:
    """Let RoPE pair the halves of heads; that of torchtitan's DeepSeek-V3, `ComplexRoPE`, pairs adjacent rows."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_interleave": False}))


def test_rope_of_other_rows_than_torchtitans_is_refused(tmp_path: Path) -> None:
    state = huggingface_state("deepseek_v3", tmp_path / "model")
    source = save(tmp_path / "step-7", "deepseek_v3", torchtitan_state("deepseek_v3", state))
    for folder in (tmp_path / "model", source):
        pair_halves(folder)
    repacked = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "out")
    for folder, refused in ((tmp_path / "packed", exported(tmp_path)), (source, repacked)):
        assert refused.found == (3, "model.not-in-torchtitan", f"{folder}: config.json: rope_interleave")
    assert not (tmp_path / "out").exists()


def exported(place: Path) -> Refusal:
    """Return how the export of `model`, once it is packed, is refused."""
    packed = pack(place / "model", place / "packed")
    return refusal("export", packed, "--to", "dcp", "--for", "torchtitan", "--out", place / "out")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3"])
def test_biases_that_torchtitans_model_does_not_have_are_refused(kind: str, tmp_path: Path) -> None:
    config = deepcopy(CONFIGS[kind])
    config.attention_bias = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(KeyError, match="bias"):
        torchtitan_state(kind, load_file(tmp_path / "model" / "model.safetensors"))
    exit_code, code, where = exported(tmp_path).found
    assert (exit_code, code, where.rpartition(".")[2]) == (3, "model.not-in-torchtitan", "bias'")


def test_scales_of_float8_weights_are_refused(tmp_path: Path) -> None:
    """Torch would read the weights without them, in another dtype."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = read_config("tiny-qwen3", quantization_config=fp8)
    shapes = model_shape(config).tensors
    dtypes = {fqn: torch.float8_e4m3fn if f"{fqn}_scale_inv" in shapes else torch.float32 for fqn in shapes}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    state = {fqn: torch.ones(shapes[fqn], dtype=dtypes[fqn]) for fqn in shapes}
    save_file(state, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    refused = exported(tmp_path)
    assert refused.found[:2] == (3, "model.not-in-torchtitan")
    assert refused.found[2].endswith(".weight_scale_inv'")


MTP = {"num_nextn_predict_layers": 2}
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def deepseek(config: Mapping[str, Any]) -> DeepSeekV3Model.Config:
    """Return torchtitan's model of a DeepSeek-V3 in Hugging Face's words."""
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    dim, vocab = config["hidden_size"], config["vocab_size"]
    layers = _build_dsv3_layers(
        n_layers=config["num_hidden_layers"], n_dense_layers=config["first_k_dense_replace"], dim=dim,
        n_heads=config["num_attention_heads"], **{name: config[name] for name in latent}, mscale=1.0,
        dense_hidden_dim=config["intermediate_size"], moe_hidden_dim=config["moe_intermediate_size"],
        num_experts=config["n_routed_experts"], num_shared_experts=config["n_shared_experts"],
        router_top_k=config["num_experts_per_tok"], router_score_func="sigmoid", attn_backend="flex",
        moe_comm_backend="standard", non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=config["qk_rope_head_dim"], max_seq_len=64, theta=10000.0, scaling="none"),
    )  # fmt: skip
    return DeepSeekV3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim),
        norm=RMSNorm.Config(normalized_shape=dim),
        lm_head=Linear.Config(in_features=dim, out_features=vocab),
        layers=layers,
        mtp_layers=_build_mtp_layers(layers[-1], dim=dim, num_mtp_layers=config["num_nextn_predict_layers"]),
    )


class TitanWithMtp(Titan):
    config = read_config("tiny-deepseek-v3", **MTP)

    def build(self, *, fused: bool) -> Any:
        model = deepseek(self.config).build()
        for tensor in model.state_dict().values():
            torch.nn.init.normal_(tensor)
        return model

    def huggingface(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what torchtitan's adapter makes of tensors, and what MTP layers have of their own in files."""
        state: dict[str, torch.Tensor] = DeepSeekV3StateDictAdapter(deepseek(self.config), None).to_hf(dict(tensors))
        copies = {f"model.layers.{layer}.{part}": state[name] for layer in (4, 5) for part, name in COPIES.items()}
        return state | copies


def test_mtp_layers_of_torchtitan_go_there_and_back(tmp_path: Path) -> None:
    titan = TitanWithMtp(fused=False, seed=0)
    titan.train(3)
    source, packed = titan.save(tmp_path / "step-3"), tmp_path / "packed"
    run("pack", source, "--layout", "pp=2", "--out", packed)
    run("export", packed, "--to", "hf", "--out", tmp_path / "hf")
    weights = titan.huggingface(titan.model.state_dict())
    assert weights.keys() == model_shape(titan.config).tensors.keys()
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), weights)
    state = titan.optimizers.state_dict()
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {name: state[f"state.{name}.{kind}"] for name, _ in titan.model.named_parameters()}
        files = map(load_file, packed.glob(f"stage-*/{kind}/*.safetensors"))
        assert_equal({fqn: moment for file in files for fqn, moment in file.items()}, titan.huggingface(moments))

    run("export", packed, "--to", "dcp", "--for", "torchtitan", "--out", tmp_path / "again")
    expected = {key: value for key, value in state_of(source).items() if key[0] not in ("dataloader", "train_state")}
    assert_contains(state_of(tmp_path / "again"), expected)
    other = TitanWithMtp(fused=False, seed=1)
    other.load(tmp_path / "again")
    assert_equal(other.model.state_dict(), titan.model.state_dict())
    assert reshard("check", tmp_path / "again", "--against", tmp_path / "hf", "--bytes").code == 0


def test_mtp_layers_of_torchtitan_may_be_dropped(tmp_path: Path) -> None:
    titan = TitanWithMtp(fused=False, seed=0)
    titan.train(1)
    flags = ("--layout", "pp=2", "--drop", "model.layers.4", "--drop", "model.layers.5")
    run("pack", titan.save(tmp_path / "step-1"), *flags, "--out", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "dcp", "--for", "torchtitan", "--out", tmp_path / "again")
    expected = {key for key in state_of(tmp_path / "step-1") if "mtp_layers" not in key[-1] and key[0] != "dataloader"}
    assert state_of(tmp_path / "again").keys() == expected


@pytest.mark.parametrize("dtype", ["source", "bf16"])
def test_mtp_layers_that_share_nothing_are_refused(dtype: str, tmp_path: Path) -> None:
    save_deepseek(tmp_path / "model", copies=1.001, **MTP)
    packed, flags = pack(tmp_path / "model", tmp_path / "packed"), ("--to", "dcp", "--for", "torchtitan")
    found = refusal("export", packed, *flags, "--dtype", dtype, "--out", tmp_path / "out").found
    assert found == (3, "model.not-in-torchtitan", f"{packed}: 'model.layers.4.embed_tokens.weight'")
