"""Every architecture of the catalogue that trains: its stages against transformers' whole model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers.integrations import sdpa_attention

from manifests.errors import UserError
from manifests.models.catalogue import CatalogueEntry, catalogued, entry_of
from manifests.models.trainable import check_trainable, is_generic
from runner.models import family_for
from runner.models.generic import Generic
from runner.pipeline.chunk import build_chunks, hf_constants, hf_pieces, materialize
from tests.fast.manifests.models.built import read_config
from tests.fast.manifests.models.catalogued import DOZEN, config_of, quiet, save_tiny
from tools.parity import Trained, compare, stages_of
from tools.tiny_models import DROPOUTS

GENERIC = tuple(name for name in catalogued() if is_generic(name))
SLOW = pytest.mark.slow
FAST = tuple(name for name in GENERIC if name in DOZEN)  # one with its config as it is, the next with a changed one
# With the config as it is `test_catalogue` compares all of them in 1, 2 and 4 stages, among the slow tests.
WAYS = (
    *((name, 4, False) for name in FAST[::2]),
    *(pytest.param(name, 2, True, marks=() if name in FAST[1::2] else SLOW) for name in GENERIC),
    *(pytest.param(name, (1, 4)[row % 2], True, marks=SLOW) for row, name in enumerate(GENERIC)),
)
REFUSED = (
    ("DbrxForCausalLM", "tie_word_embeddings"),  # by transformers
    ("DiffLlamaForCausalLM", "attention_dropout"),  # by transformers
    ("MptForCausalLM", "emb_pdrop"),
    ("MptForCausalLM", "resid_pdrop"),
)
# Embeddings, residuals and logits that are scaled; sliding, chunked and linear attention in turn with full; dense
# layers among sparse ones, which have shared experts; and ties.
HARD = tuple(
    pytest.param(name, changes, marks=marks, id=name)
    for name, changes, marks in (
        ("GraniteForCausalLM", {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}, ()),
        ("Glm4MoeForCausalLM", {"n_shared_experts": 2, "first_k_dense_replace": 2, "use_qk_norm": True}, ()),
        ("GraniteMoeHybridForCausalLM",
         {"embedding_multiplier": 12.0, "shared_intermediate_size": 48, "layer_types": ["attention", "mamba"] * 2},
         SLOW),
        ("MiniCPM3ForCausalLM", {"scale_emb": 3.0, "dim_model_base": 16}, SLOW),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 4}, SLOW),
        ("Cohere2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 2, "logit_scale": 0.25}, SLOW),
        ("Qwen3NextForCausalLM",
         {"layer_types": ["full_attention", "linear_attention"] * 2, "mlp_only_layers": [1]}, SLOW),
        ("Qwen3_5MoeForCausalLM", {"layer_types": ["full_attention", "linear_attention"] * 2}, SLOW),
        ("MiniMaxForCausalLM", {"layer_types": ["linear_attention", "full_attention"] * 2}, SLOW),
        ("Llama4ForCausalLM", {"interleave_moe_layer_step": 1, "attention_chunk_size": 4}, SLOW),
        ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "n_shared_experts": 2}, SLOW),
        ("Ernie4_5_MoeForCausalLM", {"moe_num_shared_experts": 1, "moe_layer_start_index": 2}, SLOW),
    )
)  # fmt: skip


@pytest.mark.parametrize(("architecture", "num_stages", "is_changed"), WAYS)
def test_stages_compute_what_the_whole_model_does(architecture: str, num_stages: int, is_changed: bool) -> None:
    entry, changes = entry_for(architecture), dict[str, object]()
    if is_changed:
        default = config_of(architecture).to_dict()
        changes = {name: 0.1 for name in DROPOUTS if name in default and name != "layerdrop"}
        if entry.ties:
            changes["tie_word_embeddings"] = not default["tie_word_embeddings"]
        changes = {name: value for name, value in changes.items() if (architecture, name) not in REFUSED}
    check(compare(entry, num_stages, **changes))


@pytest.mark.parametrize(("architecture", "changes"), HARD)
def test_stages_compute_what_the_whole_model_does_where_a_config_is_hard(
    architecture: str, changes: dict[str, Any]
) -> None:
    before = config_of(architecture).to_dict()
    assert all(before[name] != value for name, value in changes.items())
    for num_stages in (1, 2, 4):
        check(compare(entry_for(architecture), num_stages, tie_word_embeddings=True, **changes))


_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 8}
_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
# Fields that our side reads, or that only training shows.
FIELDS: tuple[tuple[str, dict[str, object]], ...] = (
    ("Olmo3ForCausalLM", {"pad_token_id": 5}),
    ("OlmoeForCausalLM", {"pad_token_id": 5, "num_experts_per_tok": 1}),
    ("Gemma2ForCausalLM", {"pad_token_id": 5, "tie_word_embeddings": True}),
    ("Gemma2ForCausalLM", {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5}),
    ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 7, "hidden_activation": "gelu"}),
    ("Olmo2ForCausalLM", {"rope_parameters": _YARN}),
    ("Olmo2ForCausalLM", {"rope_parameters": _LINEAR}),
    ("Olmo2ForCausalLM", {"rope_parameters": {**_LINEAR, "rope_type": "dynamic"}}),
    ("Olmo2ForCausalLM", {"use_cache": False}),
    ("Olmo2ForCausalLM", {"attention_dropout": 0.3}),
    ("OlmoeForCausalLM", {"router_aux_loss_coef": 0.5}),
    ("OlmoeForCausalLM", {"norm_topk_prob": True, "clip_qkv": 0.05}),
    ("GPTNeoXForCausalLM", {"use_parallel_residual": False, "hidden_dropout": 0.2}),
    ("GPTNeoXForCausalLM", {"rope_parameters": {**_LINEAR, "partial_rotary_factor": 0.5}}),
)


@pytest.mark.parametrize(("architecture", "changes"), FIELDS)
def test_fields_of_a_config_give_the_gradients_of_transformers(architecture: str, changes: dict[str, object]) -> None:
    check(compare(entry_for(architecture), 2, **changes))


@pytest.mark.parametrize("architecture", ["OlmoeForCausalLM", "GraniteMoeForCausalLM"])
def test_a_loss_that_stages_would_leave_out_is_refused(architecture: str) -> None:
    with pytest.raises(UserError) as refused:
        compare(entry_for(architecture), 2, output_router_logits=True)
    assert (refused.value.code, refused.value.where) == (
        "config.unsupported-field", "config.json: output_router_logits",
    )  # fmt: skip


HANDING_ON = (
    ("Gemma4ForCausalLM", {"num_kv_shared_layers": 2}),
    pytest.param("Gemma3nForCausalLM", {"num_kv_shared_layers": 2}, marks=SLOW),
    ("GlmMoeDsaForCausalLM", {"indexer_types": ["full", "shared", "shared", "full"]}),
    pytest.param("DeepseekV4ForCausalLM", {"tie_word_embeddings": True}, marks=SLOW),
)


@pytest.mark.parametrize(("architecture", "changes"), HANDING_ON)
def test_what_layers_take_beside_the_hidden_state_is_handed_on(architecture: str, changes: dict[str, object]) -> None:
    entry = entry_for(architecture)
    check(compare(entry, 4, **changes))


def entry_for(architecture: str) -> CatalogueEntry:
    entry = entry_of(architecture)
    assert entry is not None
    return entry


def check(found: Trained) -> None:
    assert found.compared.logits == 0
    assert found.compared.loss <= 1e-6
    assert found.compared.gradients <= 1e-6
    assert found.weights <= 1e-6


def test_architectures_that_cannot_be_cut_are_refused_with_the_reason() -> None:
    refused = [name for name in catalogued() if not is_generic(name)]
    assert refused
    for name in refused:
        with pytest.raises(UserError) as caught:
            check_trainable(name)
        assert (caught.value.code, caught.value.where) == ("model.no-family", "config.json: architectures")
        entry = entry_of(name)
        assert entry is not None
        assert entry.refused in caught.value.problem


@pytest.mark.parametrize(
    ("changes", "seq_len", "code", "where"),
    [
        ({}, 129, "options.sequence-length", "--seq-len"),
        ({"output_router_logits": True}, 8, "config.unsupported-field", "config.json: output_router_logits"),
        ({"z_loss_coefficient": 0.1}, 8, "config.unsupported-field", "config.json: z_loss_coefficient"),
        ({"num_hidden_layers": "four"}, 8, "config.refused-by-transformers", "config.json"),
    ],
)
def test_what_would_train_wrongly_is_refused(changes: dict[str, object], seq_len: int, code: str, where: str) -> None:
    config = {**config_of("Qwen3NextForCausalLM").to_dict(), "architectures": ["Qwen3NextForCausalLM"], **changes}
    with pytest.raises(UserError) as caught:
        family_for(config, max_seq_len=seq_len)
    assert (caught.value.code, caught.value.where) == (code, where)


def test_modules_that_the_model_lacks_and_inputs_on_two_stages_are_refused() -> None:
    config = {**config_of("GPTBigCodeForCausalLM").to_dict(), "architectures": ["GPTBigCodeForCausalLM"]}
    family = family_for(config, max_seq_len=8)
    assert family.modules[:3] == ("transformer.wte", "transformer.wpe", "transformer.h.0")
    handing_on = {**config_of("Gemma4ForCausalLM").to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    with pytest.raises(UserError) as caught:
        family_for(handing_on, max_seq_len=8).build(("model.norm",))
    assert (caught.value.code, caught.value.where) == ("model.split-inputs", "config.json")
    for modules, code in ((("transformer.wte",), "model.split-inputs"), (("mtp",), "config.mtp-layers")):
        with pytest.raises(UserError) as caught:
            family.build(modules)
        assert (caught.value.code, caught.value.where) == (code, "config.json")


# Parameters that transformers lists to stay in float32, ones that are declared so, and buffers of either dtype.
TWO_DTYPES = (
    "BeamForCausalLM", "DeepseekV4ForCausalLM", "OlmoHybridForCausalLM", "OpenAIGPTLMHeadModel", "XGLMForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in TWO_DTYPES else SLOW) for name in GENERIC])
@pytest.mark.parametrize("is_tied", [False, True])
def test_tensors_have_the_dtypes_of_from_pretrained_in_bfloat16(name: str, is_tied: bool, tmp_path: Path) -> None:
    entry = entry_for(name)
    if is_tied and (not entry.ties or (name, "tie_word_embeddings") in REFUSED):
        pytest.skip("it is never tied")
    save_tiny(tmp_path, name, **({"tie_word_embeddings": is_tied} if entry.ties else {}))
    with quiet():
        whole = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.bfloat16)
        family = family_for(json.loads((tmp_path / "config.json").read_text()), max_seq_len=8)
        (chunk,) = build_chunks(family, (family.modules,), (0,))
        materialize(chunk, device=torch.device("cpu"), dtype=torch.bfloat16)
    tensors = dict((*chunk.body.model.named_parameters(), *chunk.body.model.named_buffers()))
    expected = {  # an architecture that takes images has its decoder under this name
        name.replace("language_model.", ""): tensor
        for name, tensor in (*whole.named_parameters(remove_duplicate=False), *whole.named_buffers())
    }
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert dtypes == {name: expected[name].dtype for name in tensors}
    computed = {
        f"{path}.{leaf}".lstrip(".")
        for path, part in chunk.body.model.named_modules()
        for leaf in part._non_persistent_buffers_set
    }
    for path in computed & tensors.keys():
        assert torch.equal(tensors[path], expected[path]), path


@pytest.mark.parametrize("name", ["BeamForCausalLM", "Ernie4_5_MoeForCausalLM"])
def test_gradients_in_bfloat16_are_those_of_from_pretrained(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    files = {fqn: tensor for path in tmp_path.glob("*.safetensors") for fqn, tensor in load_file(path).items()}
    with quiet():
        whole = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.bfloat16)
        family = family_for(json.loads((tmp_path / "config.json").read_text()), max_seq_len=16)
        chunks = build_chunks(family, stages_of(entry_for(name), family.modules, 2), (0, 1))
    tokens = torch.arange(24).view(2, 12) % 90
    logits, output = whole(tokens, use_cache=False).logits, tokens
    for chunk in chunks:
        materialize(chunk, device=torch.device("cpu"), dtype=torch.bfloat16)
        for piece in (*hf_pieces(chunk), *hf_constants(chunk)):
            assert piece.is_whole
            piece.memory.copy_(files.get(piece.fqn, files["model.embed_tokens.weight"]))  # if the head is tied to it
        output = chunk.eval()(output)
    assert torch.equal(output, logits)
    towards = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    for either in (logits, output):
        either.backward(towards.to(either.dtype))
    gradients = {name: parameter.grad for chunk in chunks for name, parameter in chunk.body.model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if "lm_head" not in name}
    assert len(expected) > 40
    for fqn, gradient in expected.items():
        if fqn == "model.embed_tokens.weight" and whole.config.tie_word_embeddings:
            continue
        assert (gradients[fqn] is None) == (gradient is None), fqn
        assert gradient is None or torch.equal(gradients[fqn], gradient), fqn
    assert any(gradient is not None and gradient.dtype == torch.float32 for gradient in expected.values())


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("size", "implementation"), [(24, "eager"), (32, "grouped_mm")])
def test_tensor_parallel_ranks_have_parts_of_experts_of_any_size(size: int, implementation: str) -> None:
    """12 numbers of bfloat16 are no multiple of the 16 bytes that torch's grouped product takes."""
    family = family_for(read_config("tiny-qwen3-moe", moe_intermediate_size=size), max_seq_len=8)
    assert isinstance(family, Generic)
    with torch.device("meta"):
        body = family.build(family.modules)
    family.shard(body, init_device_mesh("cpu", (2,)))
    body.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in body.parameters():
        torch.nn.init.zeros_(parameter)
    body(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad is not None for name, parameter in body.named_parameters() if ".experts." in name)
    assert body.model.config._experts_implementation == implementation


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "expected"),
    [(True, torch.float32, False), (True, torch.bfloat16, True), (False, torch.float32, True)],
)
def test_heads_on_a_gpu_that_share_keys_get_their_own_in_float32_which_is_fused(
    is_cuda: bool, dtype: torch.dtype, expected: bool
) -> None:
    key: Any = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 2, 8, 64))
    assert sdpa_attention.use_gqa_in_sdpa(None, key, key) is expected
