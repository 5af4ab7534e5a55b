"""Checkpoints of Megatron-Core in and out. What it wrote, and computed with it, is in tests/data/megatron.

`tests/interop/megatron_core.py` made those folders with megatron-core 0.16.1; test_megatron_core.py of
tests/interop lets it write other models, and read ours.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import AutoModelForCausalLM

from manifests.errors import ModelError, SourceError, UserError
from manifests.models import model_shape
from manifests.schedules.learning_rate import rate_at
from manifests.schema import Decay, LearningRate
from manifests.store import write_manifest
from reshard.formats.megatron.arguments import arguments_of, check_arguments, config_of
from reshard.formats.megatron.names import Common
from reshard.formats.megatron.read import arguments_in
from stores.open import open_manifest
from tests.builders import HEAD, pack, refusal, reshard, run
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.formats.dcp.test_dcp_export import state_of
from tests.fast.reshard.formats.dcp.test_dcp_source import assert_equal, huggingface_state
from tests.fast.trained import write_trained_head

GOLDEN = Path(__file__).parents[4] / "data" / "megatron"
TOKENS = [[1, 5, 2, 7, 3, 0, 6, 4]]
FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")


def huggingface_of(source: Path, place: Path) -> Path:
    """Return the Hugging Face folder that a checkpoint becomes."""
    pack(source, place / "packed-in")
    run("export", place / "packed-in", "--to", "hf", "--out", place / "hf")
    return place / "hf"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_transformers_computes_what_megatron_core_did_with_its_checkpoint(name: str, tmp_path: Path) -> None:
    found = huggingface_of(GOLDEN / name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits
    expected = torch.tensor(json.loads((GOLDEN / f"{name}.logits.json").read_text()))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=5e-6)


def megatron_of(kind: str, place: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """Return the tensors of a model, and the checkpoint that it is exported to."""
    state = huggingface_state(kind, place / "model")
    pack(place / "model", place / "packed", "pp=3")
    run("export", place / "packed", "--to", "megatron", "--out", place / "megatron")
    return state, place / "megatron"


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_that_goes_to_megatron_and_back_has_every_bit(kind: str, tmp_path: Path) -> None:
    state, megatron = megatron_of(kind, tmp_path)
    assert_equal(load_file(huggingface_of(megatron, tmp_path) / "model.safetensors"), state)
    for asked in ((), ("--values",), ("--against", tmp_path / "model", "--bytes")):
        checked = reshard("check", megatron, *asked)
        assert (checked.code, checked.err) == (0, ""), asked
    assert "embedding.word_embeddings.weight" in reshard("inspect", megatron, "--tensors").out


def test_layers_of_several_dtypes_are_refused_unless_they_become_one(tmp_path: Path) -> None:
    """As of a run that froze some in float32: all layers are one tensor, whose dtype was that of the first."""
    state = huggingface_state("llama", tmp_path / "model")
    mixed = {name: tensor.float() if "layers.1." in name else tensor.bfloat16() for name, tensor in state.items()}
    save_file(mixed, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    asked = ("export", pack(tmp_path / "model", tmp_path / "mixed"), "--to", "megatron", "--out", tmp_path / "megatron")
    code, name, where = refusal(*asked).found
    assert (code, name, "'model.layers." in where) == (2, "options.array-dtype", True)
    assert not (tmp_path / "megatron").exists()
    run(*asked, "--dtype", "fp32")
    back = load_file(huggingface_of(tmp_path / "megatron", tmp_path) / "model.safetensors")
    assert_equal(back, {name: tensor.float() for name, tensor in mixed.items()})


def test_torch_reads_the_layout_that_megatron_core_has(tmp_path: Path) -> None:
    state, megatron = megatron_of("qwen3_moe", tmp_path)
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = dcp.FileSystemReader(megatron / "release")
        _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    layer = {name.removeprefix("model.layers.1."): one for name, one in state.items() if ".layers.1." in name}
    heads = [layer[f"self_attn.{part}_proj.weight"].unflatten(0, (2, -1)) for part in "qkv"]
    stacked = found["decoder.layers.self_attention.linear_qkv.weight"]
    assert stacked.shape == (3, 64, 16)
    assert torch.equal(stacked[1], torch.cat(heads, 1).flatten(0, 1))
    experts = [torch.cat([layer[f"mlp.experts.{n}.{part}_proj.weight"] for part in ("gate", "up")]) for n in range(4)]
    assert torch.equal(found["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1], torch.stack(experts))
    assert torch.equal(found["embedding.word_embeddings.weight"], state["model.embed_tokens.weight"])
    common = torch.load(megatron / "release" / "common.pt", weights_only=False)
    assert (common["args"].num_layers, common["args"].num_query_groups, common["args"].swiglu) == (3, 2, True)
    assert common["content_metadata"] == {"singleton_local_shards": False, "non_homogeneous_layers": False}
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"


def interleave(arguments: Namespace) -> None:
    arguments.rotary_interleaved = True


def shift_norms(arguments: Namespace) -> None:
    arguments.apply_layernorm_1p = True


def other_groups(arguments: Namespace) -> None:
    arguments.num_query_groups = 1


def more_tokens(arguments: Namespace) -> None:
    arguments.vocab_size += 1


def without_swiglu(arguments: Namespace) -> None:
    del arguments.swiglu


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (interleave, "rotary_interleaved"),
        (shift_norms, "apply_layernorm_1p"),
        (other_groups, "num_query_groups"),
        (more_tokens, "vocab_size"),
        (without_swiglu, "swiglu"),
    ],
)
def test_arguments_that_disagree_with_the_config_are_refused(
    change: Callable[[Namespace], None], name: str, tmp_path: Path
) -> None:
    _, megatron = megatron_of("llama", tmp_path)
    common = torch.load(megatron / "release" / "common.pt", weights_only=False)
    change(common["args"])
    torch.save(common, megatron / "release" / "common.pt")
    exit_code, code, where = refusal("pack", megatron, "--layout", "pp=1", "--out", tmp_path / "out").found
    assert (exit_code, code) == (3, "source.megatron-arguments")
    assert where.endswith(f"common.pt: args.{name}")


def test_arguments_of_an_unknown_model_are_not_compared_with_a_config_that_is_absent(tmp_path: Path) -> None:
    """As of Mixtral, which has experts and no norms of queries and keys."""
    _, megatron = megatron_of("qwen3_moe", tmp_path)
    (megatron / "release" / "config.json").unlink()
    common = torch.load(megatron / "release" / "common.pt", weights_only=False)
    common["args"].qk_layernorm = False
    torch.save(common, megatron / "release" / "common.pt")
    error = refusal("pack", megatron, "--layout", "pp=1", "--out", tmp_path / "out")
    assert error.found[1:] == ("source.megatron-arguments", f"{megatron}/release/common.pt: args.qk_layernorm")
    assert ("Megatron-Bridge" in error.text, "config.json" in error.text) == (True, False)


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("rotary_seq_len_interpolation_factor", 1, False), ("rotary_seq_len_interpolation_factor", 4, True),
        ("no_rope_freq", [0, 0, 1], True), ("softmax_type", "vanilla", False), ("softmax_type", "off-by-one", True),
        ("softmax_scale", 0.1, True), ("glu_linear_offset", 0.0, False), ("glu_linear_offset", 1.0, True),
        ("activation_func_clamp_value", 7.0, True), ("moe_apply_probs_on_input", True, True),
        ("make_vocab_size_divisible_by", {}, False), ("tensor_model_parallel_size", "x", False),
        ("moe_mlp_glu_interleave_size", 32, True), ("moe_shared_expert_glu_interleave_size", 32, True),
        ("use_grouped_gemm_for_dense_mlp", False, False), ("use_grouped_gemm_for_dense_mlp", True, True),
        ("rotary_base_per_layer", [1e4], True), ("use_mup", True, True),
    ],
)  # fmt: skip
def test_arguments_that_no_config_says_have_no_effect_or_are_refused(
    name: str, value: object, is_refused: bool
) -> None:
    config = read_config("tiny-llama")
    with pytest.raises(SourceError) if is_refused else nullcontext() as raised:
        check_arguments(arguments_of(config, "here") | {name: value}, config, config["vocab_size"], "there", "here")
    if is_refused:
        assert (raised.value.code, raised.value.where) == ("source.megatron-arguments", f"there: args.{name}")


def test_config_of_a_larger_vocabulary_is_refused() -> None:
    """As of Qwen3, whose config.json has more rows than the tokenizer tokens, with which Megatron trained it."""
    config = read_config("tiny-llama")
    arguments, num_rows = arguments_of(config, "here"), config["vocab_size"]
    with pytest.raises(SourceError) as raised:
        check_arguments(arguments, config | {"vocab_size": num_rows + 1}, num_rows, "there", "here")
    assert (raised.value.code, raised.value.where) == ("source.megatron-arguments", "there: args.padded_vocab_size")
    check_arguments(arguments, config, num_rows, "there", "here")


@pytest.mark.parametrize(
    ("tokenizer", "padded", "expected"),
    [
        ("NullTokenizer", 48, 41),
        ("NullTokenizer", None, 41),
        ("NullTokenizer", 40, 40),  # of a release that counts EOD
        ("HuggingFaceTokenizer", 48, 40),
        (None, 48, 40),
    ],
)
def test_null_tokenizer_has_eod_after_the_tokens_that_its_size_counts(
    tokenizer: str | None, padded: int | None, expected: int
) -> None:
    sizes = {"vocab_size": 40, "padded_vocab_size": padded, "max_position_embeddings": 64}
    arguments = arguments_of(read_config("tiny-llama"), "here") | sizes | {"tokenizer_type": tokenizer}
    assert config_of(arguments, "F32", "here")["vocab_size"] == expected


MTP = {"num_nextn_predict_layers": 2}
YARN = {
    "type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip


def deepseek_of(place: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], Path]:
    """Return the tensors of a DeepSeek-V3, and the folder of the release that it is exported to."""
    state = save_deepseek(place / "model", **changes)
    pack(place / "model", place / "packed", "pp=3")
    run("export", place / "packed", "--to", "megatron", "--out", place / "megatron")
    return state, place / "megatron" / "release"


def save_deepseek(folder: Path, copies: float = 1.0, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a random DeepSeek-V3, whose MTP layers have `copies` times the model's embedding and head."""
    config = read_config("tiny-deepseek-v3", **changes)
    torch.manual_seed(0)
    state = {fqn: torch.randn(sizes) / 4 for fqn, sizes in model_shape(config).tensors.items()}
    for fqn in state:
        if fqn.endswith((".embed_tokens.weight", ".shared_head.head.weight")) and ".layers." in fqn:
            state[fqn] = copies * state["model.embed_tokens.weight" if "embed" in fqn else "lm_head.weight"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return state


@pytest.mark.parametrize("spelling", ["layer_norm_weight", "layernorm.weight"])
def test_norms_of_latents_may_be_fused_into_the_next_projection(spelling: str, tmp_path: Path) -> None:
    state, release = deepseek_of(tmp_path, **MTP)
    with (release / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    norms = re.compile(rf"\.(linear_)?(q|kv)_(up_proj\.)?{re.escape(spelling)}$")
    others = {name: one for name, one in metadata.state_dict_metadata.items() if not norms.search(name)}
    assert len(metadata.state_dict_metadata) - len(others) == 2 * (4 + 2 * 2)  # MTP layers have two names
    metadata.state_dict_metadata = others
    (release / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_equal(load_file(huggingface_of(release, tmp_path) / "model.safetensors"), state)


@pytest.mark.parametrize(
    "changes", [{"rope_scaling": YARN, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}, MTP]
)
def test_config_of_deepseek_v3_is_made_from_the_arguments(changes: dict[str, Any], tmp_path: Path) -> None:
    _, release = deepseek_of(tmp_path, **changes)
    (release / "config.json").unlink()
    found = huggingface_of(release, tmp_path)
    expected, made = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (tmp_path / "model", found)
    )
    with torch.no_grad():
        torch.testing.assert_close(*(model(torch.tensor(TOKENS)).logits for model in (made, expected)), rtol=0, atol=0)
    config = json.loads((found / "config.json").read_text())
    assert (config["model_type"], config["n_shared_experts"], config["first_k_dense_replace"]) == ("deepseek_v3", 1, 1)


def test_config_and_tokenizer_may_be_beside_the_tracker(tmp_path: Path) -> None:
    _, megatron = megatron_of("qwen3", tmp_path)
    config = (megatron / "release" / "config.json").rename(megatron / "config.json")
    for name in ("tokenizer.json", "progress.txt"):
        (megatron / name).write_text("{}")
    for number, source in enumerate((megatron, megatron / "release")):
        packed = pack(source, tmp_path / f"again-{number}")
        assert (packed / "config.json").read_bytes() == config.read_bytes()
        assert {"tokenizer.json", "progress.txt"} & {path.name for path in packed.iterdir()} == {"tokenizer.json"}


def test_layers_of_mtp_that_share_nothing_are_refused(tmp_path: Path) -> None:
    save_deepseek(tmp_path / "model", copies=2.0, **MTP)
    pack(tmp_path / "model", tmp_path / "packed")
    asked = refusal("export", tmp_path / "packed", "--to", "megatron", "--out", tmp_path / "out")
    exit_code, code, where = asked.found
    assert (exit_code, code, "model.layers.4.embed_tokens.weight" in where) == (3, "model.not-in-megatron", True)
    flags = ("--layout", "pp=2", "--drop", "model.layers.4", "--drop", "model.layers.5")
    run("pack", tmp_path / "model", *flags, "--out", tmp_path / "two")
    run("export", tmp_path / "two", "--to", "megatron", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_interleave", False), ("norm_topk_prob", False), ("rms_norm_eps", 1e-5), ("topk_group", 2),
        ("num_key_value_heads", 2), ("rope_scaling", YARN | {"attention_factor": 1.0}), ("scoring_func", "softmax"),
        ("rope_scaling", YARN | {"mscale": 0}), ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)  # fmt: skip
def test_models_that_megatron_core_does_not_compute_are_refused(name: str, value: object) -> None:
    config = read_config("tiny-deepseek-v3", n_group=4, topk_group=1) | {name: value}
    with pytest.raises(ModelError) as raised:
        arguments_of(config, "here")
    assert raised.value.code == "model.not-in-megatron"
    assert raised.value.where.split()[-1] == {"rope_scaling": "rope_parameters"}.get(name, name)


LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [("original_max_position_embeddings", 256), ("high_freq_factor", 8.0)])
def test_field_of_llama_3_1_that_megatron_core_does_not_have_is_named(name: str, value: float) -> None:
    rope = {"factor": 32.0, **LLAMA3, name: value}
    with pytest.raises(ModelError) as raised:
        arguments_of(read_config("tiny-llama", rope_scaling=rope), "here")
    assert (raised.value.code, f"found {name} {value}" in str(raised.value)) == ("model.not-in-megatron", True)
    assert "32.0" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "changes", "code", "field"),
    [
        ("tiny-qwen3-moe", {"decoder_sparse_step": None}, None, ""),
        ("tiny-deepseek-v3", {"n_group": None, "topk_group": 8}, None, ""),  # 8, transformers' default
        ("tiny-deepseek-v3", {"topk_group": 0}, "config.invalid-field", "topk_group"),
        ("tiny-deepseek-v3", {"n_group": "1"}, "config.invalid-field", "n_group"),
        ("tiny-deepseek-v3", {"num_experts_per_tok": 0.5}, "config.invalid-field", "num_experts_per_tok"),
        ("tiny-llama", {"rope_scaling": [1]}, "config.invalid-field", "rope_scaling"),
        ("tiny-llama", {"rope_parameters": "x"}, "config.invalid-field", "rope_parameters"),
        ("tiny-llama", {"rope_scaling": LLAMA3}, "model.not-in-megatron", "rope_parameters"),
        ("tiny-llama", {"rope_scaling": {}}, None, ""),
        ("tiny-llama", {"model_type": None}, "model.unknown-megatron-layout", "here"),
        ("tiny-llama", {"model_type": "deepseek_v3"}, "config.invalid-field", "num_experts_per_tok"),
    ],
)
def test_fields_of_a_config_are_read_or_refused(
    name: str, changes: dict[str, Any], code: str | None, field: str
) -> None:
    config = read_config(name) | changes
    with pytest.raises(UserError) if code else nullcontext() as raised:
        arguments_of(config, "here")
    if code:
        assert (raised.value.code, raised.value.where.split()[-1]) == (code, field)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0}, {"num_attention_heads": 0.0, "kv_channels": None}, {"num_layers": 10**12},
        {"num_layers": 10**5000}, {"moe_ffn_hidden_size": 0}, {"rotary_base": float("inf")}, {"rotary_base": object()},
    ],
)  # fmt: skip
def test_arguments_that_describe_no_model_are_refused(changes: dict[str, Any]) -> None:
    described = arguments_of(read_config("tiny-deepseek-v3", n_group=1), "here")
    saved = described | {"vocab_size": 40, "max_position_embeddings": 64}
    assert config_of(saved, "F32", "here")["num_attention_heads"] == described["num_attention_heads"]
    with pytest.raises(SourceError) as raised:
        config_of({**saved, "kv_channels": None, **changes}, "F32", "here")
    assert raised.value.code == "source.megatron-arguments"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"rope_type": None, "rotary_scaling_factor": 1.0}, None),  # YaRN by default
        ({"rope_type": None}, "rope_type"),
        ({"moe_shared_expert_gate": None, "mtp_num_layers": 0, "moe_router_num_groups": 1}, None),
        ({"mtp_num_layers": 3}, "mtp_num_layers"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        ({"moe_layer_freq": 1}, "moe_layer_freq"),
        ({"q_lora_rank": None}, "q_lora_rank"),
    ],
)
def test_what_arguments_of_deepseek_v3_leave_out_is_megatrons_default(
    changes: dict[str, Any], refused: str | None
) -> None:
    config = read_config("tiny-deepseek-v3", n_group=1, **MTP)
    common = Common({"args": SimpleNamespace(fields=arguments_of(config, "here") | changes)}, "there")
    with pytest.raises(SourceError) if refused else nullcontext() as raised:
        check_arguments(arguments_in(common), config, config["vocab_size"], common.place, "here")
    assert refused is None or raised.value.where == f"there: args.{refused}"


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_common_pt_is_run(tmp_path: Path) -> None:
    _, megatron = megatron_of("llama", tmp_path)
    common = torch.load(megatron / "release" / "common.pt", weights_only=False)
    torch.save(common | {"rng_state": Payload(tmp_path / "run")}, megatron / "release" / "common.pt")
    pack(megatron, tmp_path / "out", "pp=1")
    assert not (tmp_path / "run").exists()
    torch.load(megatron / "release" / "common.pt", weights_only=False)
    assert (tmp_path / "run").exists()


def refused(source: Path, out: Path, *flags: str) -> str:
    exit_code, code, _ = refusal("pack", source, "--layout", "pp=1", "--out", out, *flags).found
    assert exit_code == 3
    return str(code)


def test_checkpoints_that_are_not_whole_or_not_known_are_refused(tmp_path: Path) -> None:
    _, megatron = megatron_of("llama", tmp_path)
    broken, out = tmp_path / "broken", tmp_path / "out"
    tracker, release = broken / "latest_checkpointed_iteration.txt", broken / "release"
    copytree(megatron, broken)
    tracker.write_text("../elsewhere")
    assert refused(broken, out) == "source.bad-tracker"
    (release / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert refused(release, out) == "source.megatron-format"
    (release / "metadata.json").write_bytes((megatron / "release" / "metadata.json").read_bytes())
    config = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(json.dumps(config | {"vocab_size": 30}))
    assert refused(release, out) == "source.megatron-arguments"
    (release / "common.pt").unlink()
    assert refused(release, out) == "source.no-megatron-arguments"
    checked = reshard("check", release, "--json")
    assert [problem["code"] for problem in checked.json["problems"]] == ["source.no-megatron-arguments"]
    huggingface_state("gpt_oss", tmp_path / "other")
    pack(tmp_path / "other", tmp_path / "two", "pp=1")
    exit_code, code, _ = refusal("export", tmp_path / "two", "--to", "megatron", "--out", out).found
    assert (exit_code, code) == (3, "model.unknown-megatron-layout")


@pytest.mark.parametrize("name", ["mp_rank_00/model_optim_rng.pt", "mp_rank_01_003/distrib_optim.pt"])
@pytest.mark.parametrize("has_config", [False, True])
def test_files_of_megatrons_ranks_are_refused_by_their_names(has_config: bool, name: str, tmp_path: Path) -> None:
    iteration = tmp_path / "saved" / "iter_0000001"
    (iteration / name).parent.mkdir(parents=True)
    (iteration / name).write_bytes(b"")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("1")
    if has_config:
        (iteration / "config.json").write_text("{}")
    assert refused(tmp_path / "saved", tmp_path / "out") == "source.megatron-format"
    checked = reshard("check", iteration, "--json")
    assert "source.megatron-format" in [problem["code"] for problem in checked.json["problems"]]


TRAINED = GOLDEN / "llama-trained"  # after one step, with the state of its distributed optimizer


def move_common(folder: Path) -> None:
    """Store what `common.pt` has where megatron-core 0.19 does: an object of a data file, in a list of one."""
    common, data = folder / "common.pt", folder / "__0_0.distcp"
    file, name = io.BytesIO(data.read_bytes()), "common_state/shard_0_1"
    begin = file.seek(0, io.SEEK_END)
    saved = io.BytesIO()
    torch.save([torch.load(common, weights_only=False)], saved)
    file.write(saved.getvalue())
    data.write_bytes(file.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo(data.name, begin, len(saved.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    common.unlink()


def test_common_state_in_the_metadata_is_read_as_common_pt(tmp_path: Path) -> None:
    moved = copytree(TRAINED, tmp_path / "iter_0000001")
    move_common(moved)
    packed = [pack(source, tmp_path / f"packed-{number}") for number, source in enumerate((TRAINED, moved))]
    files = [{path.relative_to(out): path.read_bytes() for path in out.rglob("*.safetensors")} for out in packed]
    assert files[0]
    assert files[0] == files[1]
    manifests = [open_manifest(out).manifest for out in packed]
    assert manifests[0].training == manifests[1].training
    assert manifests[0].source.left_out == manifests[1].source.left_out
    moved.rename(tmp_path / "iter_0000002")
    code, name, where = refusal("pack", tmp_path / "iter_0000002", "--layout", "pp=1", "--out", tmp_path / "out").found
    assert (code, name) == (3, "source.other-iteration")
    assert where.endswith("__0_0.distcp: common_state/shard_0_1: iteration")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint under Megatron's names, by torch's reader."""
    found = {key[0]: one for key, one in state_of(folder).items() if isinstance(one, torch.Tensor)}
    return {name: one for name, one in found.items() if "_extra_state" not in name and "rng" not in name}


def test_optimizer_state_of_megatron_core_comes_and_goes_with_every_bit(tmp_path: Path) -> None:
    pack(TRAINED, tmp_path / "packed")
    training = json.loads((tmp_path / "packed" / "manifest.json").read_text())["training"]
    norms = [f"model.layers.{n}.{place}_layernorm.weight" for n in (0, 1) for place in ("input", "post_attention")]
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "fqns": [], "weight_decay": 0.1}
    assert training["optimizer"] == {
        "groups": [options, {**options, "fqns": [*norms, "model.norm.weight"], "weight_decay": 0.0}],
        "max_norm": 1.0, "name": "AdamW",
    }  # fmt: skip
    assert (training["step"], training["num_tokens"], training["learning_rate"]["peak"]) == (1, 64, 4e-3)
    assert training["batch"] == {"global_batch": 4, "microbatch": 1, "seq_len": 16}
    theirs = tensors_of(TRAINED)
    moments = load_file(next((tmp_path / "packed").glob("stage-001/exp_avg_sq/*")))
    state = "optimizer.state.exp_avg_sq.decoder.layers"
    assert torch.equal(moments["model.layers.1.mlp.up_proj.weight"], theirs[f"{state}.mlp.linear_fc1.weight"][1, 8:])

    done = run("export", tmp_path / "packed", "--to", "megatron", "--out", tmp_path / "back", "--json")
    assert done.json["flags"].split()[:2] == ["--lr", "0.004"]
    ours = tensors_of(tmp_path / "back" / "iter_0000001")
    assert_equal({name: ours[name] for name in theirs}, theirs)
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "1"
    saved, again = (
        torch.load(folder / "common.pt", weights_only=False) for folder in (TRAINED, tmp_path / "back/iter_0000001")
    )
    groups = zip(*(one["optimizer"]["optimizer"]["param_groups"] for one in (saved, again)), strict=True)
    names = (
        "wd_mult",
        "lr_mult",
        "is_expert_parallel",
        "is_decoupled_lr",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "step",
    )
    assert all(theirs[name] == ours[name] for theirs, ours in groups for name in names)
    steps = ("num_steps", "max_lr", "lr_decay_style", "start_wd")
    assert all(saved["opt_param_scheduler"][name] == again["opt_param_scheduler"][name] for name in steps)
    kinds = [one["content_metadata"]["distrib_optim_sharding_type"] for one in (saved, again)]
    assert kinds == ["fully_reshardable"] * 2

    done = run("export", tmp_path / "packed", "--to", "megatron", "--weights-only", "--out", tmp_path / "weights")
    assert "--lr" not in done.out.split()
    assert (again["args"].add_position_embedding, "--no-position-embedding" in done.out) == (True, True)  # compared
    assert not any("optimizer" in name for name in tensors_of(tmp_path / "weights" / "release"))


@pytest.mark.parametrize("dtype", ["source", "bf16"])
def test_tied_weight_that_is_stored_as_the_head_is_the_embedding(dtype: str, tmp_path: Path) -> None:
    packed, weights, moments = write_trained_head(tmp_path)
    run("export", packed, "--to", "megatron", "--dtype", dtype, "--out", tmp_path / "out")
    found = tensors_of(tmp_path / "out" / "iter_0000060")
    name = "embedding.word_embeddings.weight"
    tied = {"param": weights[HEAD], **{kind: tensors[HEAD] for kind, tensors in moments.items()}}
    states = {f"optimizer.state.{kind}.{name}": tensor.data for kind, tensor in tied.items()}
    assert {key: found[key].view(torch.uint8).numpy().tobytes() for key in states} == states
    expected = found[f"optimizer.state.param.{name}"]
    assert torch.equal(found[name], expected.bfloat16() if dtype == "bf16" else expected)
    assert not any("output_layer" in key for key in found)


def test_one_weight_decay_of_all_parameters_is_named_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed = tmp_path / "packed"
    pack(TRAINED, packed)
    manifest = open_manifest(packed).manifest
    trained = manifest.training
    assert trained is not None
    assert trained.optimizer is not None
    one_group = replace(trained.optimizer, groups=trained.optimizer.groups[:1])
    for number, training in enumerate((trained, replace(trained, optimizer=one_group))):
        write_manifest(packed, replace(manifest, training=training))
        run("export", packed, "--to", "megatron", "--out", tmp_path / f"back-{number}")
        assert len(caplog.records) == number
    assert caplog.records[0].args == (str(packed), 0.1)


@pytest.mark.parametrize(
    ("decay", "stable_steps", "style", "shape"),
    [
        ("constant", 3, "constant", None), ("linear", 0, "linear", None), ("cosine", 0, "cosine", None),
        ("linear", 3, "WSD", "linear"), ("cosine", 3, "WSD", "cosine"), ("sqrt", 0, "WSD", "minus_sqrt"),
        ("sqrt", 3, "WSD", "minus_sqrt"),
    ],
)  # fmt: skip
def test_schedule_with_stable_steps_is_megatrons_wsd(
    decay: Decay, stable_steps: int, style: str, shape: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its OptimizerParamScheduler saves the style, and not how it decays: that is in flags."""
    packed = pack(TRAINED, tmp_path / "packed")
    manifest = open_manifest(packed).manifest
    trained = manifest.training
    assert trained is not None
    rate = LearningRate(peak=4e-3, warmup_steps=0, stable_steps=stable_steps, decay=decay, decay_steps=10, minimum=1e-4)
    write_manifest(packed, replace(manifest, training=replace(trained, learning_rate=rate)))
    words = run("export", packed, "--to", "megatron", "--out", tmp_path / "out").out.split()
    assert [words[words.index(flag) + 1] for flag in ("--load", "--lr", "--min-lr")] == [
        str(tmp_path / "out"), "0.004", "0.0001"
    ]  # fmt: skip
    saved = torch.load(tmp_path / "out" / "iter_0000001" / "common.pt", weights_only=False)["opt_param_scheduler"]
    names = ("lr_decay_style", "lr_warmup_steps", "lr_decay_steps", "num_steps", "max_lr", "min_lr")
    assert [saved[name] for name in names] == [style, 0, 4 * 10, 4, 4e-3, 1e-4]
    flags = f"--lr-wsd-decay-style {shape} --lr-wsd-decay-iters {10 - stable_steps}"
    assert [record.args for record in caplog.records] == ([(str(packed), flags)] if shape else [])
    again = open_manifest(pack(tmp_path / "out", tmp_path / "again")).manifest.training
    assert again is not None
    assert again.learning_rate is not None
    assert again.learning_rate.peak == rate_at(1, rate)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("dp_reshardable", "source.megatron-dp-reshardable"),
        ("fully_sharded_model_space", "source.megatron-optimizer"),
        (None, "source.megatron-optimizer"),
    ],
)
def test_optimizer_state_of_another_format_is_refused(kind: str | None, code: str, tmp_path: Path) -> None:
    saved, out = copytree(TRAINED, tmp_path / "saved"), tmp_path / "out"
    common = torch.load(saved / "common.pt", weights_only=False)
    common["optimizer"]["param_state_sharding_type"] = kind
    torch.save(common, saved / "common.pt")
    assert refused(saved, out) == code
    pack(saved, out, "pp=1", "--drop", "optimizer")
    assert json.loads((out / "manifest.json").read_text())["training"] is None


def other_decays(common: dict[str, Any]) -> None:
    common["optimizer"]["optimizer"]["param_groups"][1]["weight_decay"] = 0.05


def other_rates(common: dict[str, Any]) -> None:
    """Not marked as those of --decoupled-lr."""
    common["optimizer"]["optimizer"]["param_groups"][1]["lr"] = 1e-3


def decoupled_without_decay(common: dict[str, Any]) -> None:
    common["optimizer"]["optimizer"]["param_groups"][1] |= {"lr": 1e-3, "is_decoupled_lr": True}


def other_steps(common: dict[str, Any]) -> None:
    common["optimizer"]["optimizer"]["param_groups"][1]["step"] = 7


def without_groups(common: dict[str, Any]) -> None:
    del common["optimizer"]["optimizer"]


def decay_below_zero(common: dict[str, Any]) -> None:
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["weight_decay"] = -0.1


def endless_steps(common: dict[str, Any]) -> None:
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["step"] = math.inf


def clip_to_nothing_known(common: dict[str, Any]) -> None:
    common["args"].clip_grad = math.nan


def clip_to_too_much(common: dict[str, Any]) -> None:
    common["args"].clip_grad = 10**400


def too_many_tokens(common: dict[str, Any]) -> None:
    common["args"].consumed_train_samples = 1 << 63


def ahead_of_its_iteration(common: dict[str, Any]) -> None:
    common["iteration"] = 0


def decay_within_the_gradient(common: dict[str, Any]) -> None:
    common["args"].decoupled_weight_decay = False
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group.pop("decoupled_weight_decay", None)  # Transformer Engine's groups do not say it


def embedding_of_another_decay(common: dict[str, Any]) -> None:
    common["args"].embedding_init_method_std = 1.0


@pytest.mark.parametrize("mark", [{"is_decoupled_lr": True}, {"max_lr": 1e-2}], ids=["by name", "by its peak"])
def test_decoupled_rate_of_embedding_and_head_is_a_factor(mark: dict[str, Any], tmp_path: Path) -> None:
    """Newer releases mark no group: it has the peak that --decoupled-lr says."""
    saved = copytree(TRAINED, tmp_path / "saved")
    common = torch.load(saved / "common.pt", weights_only=False)
    common["args"].decoupled_lr = 1e-2
    groups = common["optimizer"]["optimizer"]["param_groups"]
    decayed = next(group for group in groups if group["weight_decay"])
    groups.append({**decayed, "lr": 2e-3, **mark})
    torch.save(common, saved / "common.pt")
    packed = pack(saved, tmp_path / "packed")
    training = json.loads((packed / "manifest.json").read_text())["training"]
    found = [
        (group.get("rate_factor"), group["weight_decay"], group["fqns"]) for group in training["optimizer"]["groups"]
    ]
    norms = [f"model.layers.*.{place}_layernorm.weight" for place in ("input", "post_attention")]
    assert found == [
        (None, 0.1, []), (0.5, 0.1, [HEAD, "model.embed_tokens.weight"]), (None, 0.0, [*norms, "model.norm.weight"]),
    ]  # fmt: skip
    assert training["learning_rate"]["peak"] == 4e-3
    error = refusal("export", packed, "--to", "megatron", "--out", tmp_path / "out")
    assert error.found[:2] == (3, "checkpoint.other-optimizer")


def test_clipping_that_is_switched_off_is_a_norm_of_zero(tmp_path: Path) -> None:
    saved = copytree(TRAINED, tmp_path / "saved")
    common = torch.load(saved / "common.pt", weights_only=False)
    common["args"].clip_grad = -1.0
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["lr"] = [0.1]
    torch.save(common, saved / "common.pt")
    pack(saved, tmp_path / "out", "pp=1")
    trained = open_manifest(tmp_path / "out").manifest.training
    assert trained is not None
    assert trained.optimizer is not None
    assert (trained.optimizer.max_norm, trained.learning_rate) == (0.0, None)


@pytest.mark.parametrize(
    "change",
    [
        other_decays, other_rates, decoupled_without_decay, other_steps, without_groups, decay_below_zero,
        endless_steps, clip_to_nothing_known, clip_to_too_much, too_many_tokens, ahead_of_its_iteration,
        decay_within_the_gradient, embedding_of_another_decay,
    ],
)  # fmt: skip
def test_optimizers_that_the_runner_does_not_have_are_refused(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    saved = copytree(TRAINED, tmp_path / "saved")
    common = torch.load(saved / "common.pt", weights_only=False)
    change(common)
    torch.save(common, saved / "common.pt")
    assert refused(saved, tmp_path / "out") == "source.bad-optimizer-state"


@pytest.mark.parametrize(
    ("file", "changes", "code"),
    [
        ("common.pt", {"checkpoint_version": 2.0}, "source.megatron-format"),
        ("common.pt", {"iteration": 2}, "source.other-iteration"),
        ("common.pt", {"content_metadata": {"distrib_optim_sharding_type": "x"}}, "source.megatron-optimizer"),
        ("metadata.json", {"sharded_backend_version": 2}, "source.megatron-format"),
        ("metadata.json", {"common_backend": "json"}, "source.megatron-format"),
    ],
)
def test_values_beside_the_tensors_agree_with_them(
    file: str, changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    saved = copytree(TRAINED, tmp_path / "iter_0000001")
    pack(saved, tmp_path / "packed", "pp=1")
    if file == "common.pt":
        torch.save(torch.load(saved / file, weights_only=False) | changes, saved / file)
    else:
        (saved / file).write_text(json.dumps(json.loads((saved / file).read_text()) | changes))
    assert refused(saved, tmp_path / "out") == code
    checked = [problem["code"] for problem in reshard("check", saved, "--json").json["problems"]]
    assert checked == ([] if code == "source.megatron-optimizer" else [code])


def test_what_else_a_trainer_saved_is_named(tmp_path: Path) -> None:
    saved = copytree(TRAINED, tmp_path / "iter_0000001")
    torch.save(torch.load(saved / "common.pt", weights_only=False) | {"tokens": 7}, saved / "common.pt")
    pack(saved, tmp_path / "out", "pp=1")
    assert {"tokens", "opt_param_scheduler"} <= set(open_manifest(tmp_path / "out").manifest.source.left_out)
