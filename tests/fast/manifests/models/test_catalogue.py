"""Architectures that the catalogue describes: packed, resharded and exported by the names in their files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from manifests.errors import UserError
from manifests.models import ARCHITECTURES, StoredTensors, model_shape
from manifests.models.catalogue import catalogued, entry_of
from runner.bundle.packed import open_packed
from runner.models import family_for, family_of
from stores.open import open_manifest
from tests.builders import files_in, llama_config, pack, random_tensors, reshard, run, write_model
from tests.fast.manifests.models.catalogued import DOZEN, config_of, quiet, save_tiny, stored_by
from tools.parity import compare

OTHERS = tuple(name for name in catalogued() if name not in DOZEN)
# Classes of which transformers builds no model by their own default.
WITHOUT_DEFAULT = (
    "CohereCompassForCausalLM", "DbrxForCausalLM", "Dots1ForCausalLM", "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM", "Lfm2MoeForCausalLM", "MinistralForCausalLM", "NemotronForCausalLM",
    "Qwen4ExpForCausalLM",
)  # fmt: skip
ALL = (*DOZEN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))


@pytest.mark.parametrize("architecture", ALL)
def test_export_of_a_resharded_pack_gives_back_every_byte(architecture: str, tmp_path: Path) -> None:
    source, packed, resharded, exported = (tmp_path / name for name in ("source", "packed", "resharded", "exported"))
    save_tiny(source, architecture)
    for args in (
        ("pack", source, "--layout", "pp=2", "--out", packed),
        ("verify", packed, "--against", source),
        ("pack", packed, "--layout", "pp=1", "--out", resharded),
        ("export", resharded, "--to", "hf", "--out", exported),
    ):
        run(*args, "--quiet")
    assert files_in(exported) == files_in(source)


@pytest.mark.parametrize("architecture", ALL)
def test_a_tensor_that_is_missing_is_named(architecture: str) -> None:
    config, stored = stored_by(architecture)
    if architecture in ARCHITECTURES:  # the config alone decides; `reshard.formats` compares the tensors with it
        assert model_shape(config, stored=stored).tensors.keys() >= stored.tensors.keys()
        return
    ignored, entry = model_shape(config, stored=stored).ignored_suffixes, entry_of(architecture)
    assert entry is not None
    towers = tuple(f"{tower}." for tower in entry.towers)  # whose tensors only the index knows
    for gone in stored.tensors:
        if gone.endswith((*ignored, ".attention_sink_bias")) or gone.startswith(towers):
            continue  # MiMo's layers of full attention are those of a window without the sink's bias
        with pytest.raises(UserError) as caught:
            model_shape(config, stored=without(stored, gone))
        assert (caught.value.code, caught.value.where) == ("source.missing-tensor", "SOURCE"), gone


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in ("JambaForCausalLM", "MiMoV2FlashForCausalLM") else pytest.mark.slow)
        for name in catalogued()
        if name not in (*WITHOUT_DEFAULT, *ARCHITECTURES)
    ],
)
def test_every_layer_of_a_class_s_own_default_config_is_known(architecture: str) -> None:
    """Its layers are of more kinds than the first few are, of which the tiny config has copies."""
    default = config_of(architecture, is_tiny=False)
    few = {name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(default, name, 0)}
    few |= {name: 1 for name in ("num_experts_per_tok", "n_group", "topk_group") if getattr(default, name, 0)}
    try:
        config, stored = stored_by(architecture, is_tiny=False, **few)
    except Exception:  # of a config that refuses so few experts
        config, stored = stored_by(architecture, is_tiny=False)
    assert model_shape(config, stored=stored).num_layers > 0


def test_towers_go_with_the_first_stage_and_can_be_dropped(tmp_path: Path) -> None:
    source, whole, text = (tmp_path / name for name in ("source", "whole", "text"))
    save_tiny(source, "Gemma3ForConditionalGeneration")
    plan = reshard("plan", source, "--layout", "pp=2", "--json")
    towers = {"vision_tower", "multi_modal_projector"}
    assert [len(towers.intersection(stage["modules"])) for stage in plan.json["stages"]] == [2, 0]
    pack(source, whole, "pp=2", "--quiet")
    with pytest.raises(UserError) as caught:
        family(whole).build(("vision_tower", "language_model.model.layers.0"))
    assert caught.value.code == "config.towers"
    dropped = [word for tower in sorted(towers) for word in ("--drop", tower)]
    pack(source, text, "pp=2", *dropped, "--quiet")
    modules = [
        module for stage in json.loads((text / "manifest.json").read_text())["stages"] for module in stage["modules"]
    ]
    assert towers.isdisjoint(modules)
    assert set(modules) <= set(family(text).modules)


def family(folder: Path) -> Any:
    return family_for(json.loads((folder / "config.json").read_text()), max_seq_len=16)


@pytest.mark.parametrize("of_text", [None, False, True])
@pytest.mark.parametrize("is_copy", [False, True])
def test_head_that_its_class_ties_by_default_is_tied_where_transformers_ties_it(
    is_copy: bool, of_text: bool | None, tmp_path: Path
) -> None:
    """The files decide, whatever text_config says, by which vLLM ties: that is reported, and noted."""
    source, model_class = tmp_path / "source", transformers.Mistral3ForConditionalGeneration
    with quiet():
        model = model_class(config_of(model_class.__name__, tie_word_embeddings=False))
    if is_copy:
        model.lm_head.weight.data.copy_(model.get_input_embeddings().weight.data)
    model.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"].pop("tie_word_embeddings", None)
    config["text_config"] |= {} if of_text is None else {"tie_word_embeddings": of_text}
    (source / "config.json").write_text(json.dumps(config))
    is_misread = bool(of_text) and not is_copy
    problems = reshard("check", source, "--json").json["problems"]
    assert [problem["code"] for problem in problems] == ["check.tied-copy"] * is_misread
    out = tmp_path / "out"
    assert ("note: " in run("pack", source, "--layout", "pp=2", "--out", out).err) == is_misread
    run("verify", out, "--against", source)
    assert bool(open_manifest(out).manifest.ties) == is_copy
    assert is_copy or family_of(open_packed(out), 16).whole().model.config.tie_word_embeddings is False
    for folder in (source, out):
        with quiet():
            read = model_class.from_pretrained(folder)
        assert (read.lm_head.weight is read.get_input_embeddings().weight) == is_copy


def test_head_that_text_config_ties_is_tied_where_transformers_takes_its_word(tmp_path: Path) -> None:
    source, model_class = tmp_path / "source", transformers.LlavaForConditionalGeneration
    save_tiny(source, model_class.__name__, text_config={"tie_word_embeddings": True})
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    assert config["text_config"]["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    out = pack(source, tmp_path / "out")
    assert open_manifest(out).manifest.ties
    for folder in (source, out):
        with quiet():
            read = model_class.from_pretrained(folder)
        assert read.lm_head.weight is read.get_input_embeddings().weight


def test_layers_that_are_missing_in_the_middle_are_named() -> None:
    config, stored = stored_by("Olmo3ForCausalLM")
    gone = [name for name in stored.tensors if name.startswith("model.layers.2.")]
    assert refusal(config, without(stored, *gone)) == "source.missing-tensor"


def test_layers_and_tensors_that_the_config_does_not_have_are_refused() -> None:
    config, stored = stored_by("Glm4MoeForCausalLM")
    more = {name.replace("layers.3.", "layers.4."): size for name, size in stored.tensors.items()}
    beyond = replace(stored, tensors={**stored.tensors, **more})
    assert refusal(config, beyond) == "source.unknown-tensor"
    shape = model_shape({**config, "num_nextn_predict_layers": 1}, stored=beyond)
    assert shape.optional == {"model.layers.4"}
    for odd in ("model.layers.0.mlp.other.weight", "model.other.weight", "other.weight", "lm_head.bias"):
        assert refusal(config, replace(stored, tensors={**stored.tensors, odd: (1,)})) == "source.unknown-tensor"


@pytest.mark.parametrize("architecture", ALL)
def test_quantized_files_are_known_by_their_modules(architecture: str) -> None:
    config, stored = stored_by(architecture)
    if architecture in ARCHITECTURES:
        return
    config["quantization_config"] = {"quant_method": "fp8"}
    matrices = [name for name, dims in stored.tensors.items() if len(dims) == 2 and ".weight" in name[-7:]]
    scaled = {**stored.tensors, **{f"{name}_scale_inv": (1, 1) for name in matrices if "layers.0." not in name}}
    names = {name: (f"{name[:-7]}.qweight", f"{name[:-7]}.scales") if name in matrices else (name,) for name in scaled}
    packed = {new: dims for name, dims in stored.tensors.items() for new in names[name]}
    for tensors in (scaled, packed):
        assert model_shape(config, stored=replace(stored, tensors=tensors)).tensors.keys() >= tensors.keys()


def test_tensors_that_quantized_files_lack_are_named() -> None:
    config, stored = stored_by("MiniMaxM2ForCausalLM")
    config["quantization_config"] = {"quant_method": "fp8"}
    scales = {f"{name}_scale_inv": (1, 1) for name in stored.tensors if ".experts." in name}
    stored = replace(stored, tensors={**stored.tensors, **scales})
    moe = "model.layers.1.block_sparse_moe."
    for prefix in (
        f"{moe}experts.2.",
        f"{moe}experts.2.w1.",
        f"{moe}experts.",
        "model.layers.1.input_layernorm.",
        "model.norm.",
    ):
        gone = [name for name in stored.tensors if name.startswith(prefix)]
        assert refusal(config, without(stored, *gone)) == "source.missing-tensor", prefix
    uncalibrated = {f"{moe}experts.2.w1.{name}": (1, 1) for name in ("qweight", "scales")}
    other = {**without(stored, f"{moe}experts.2.w1.weight").tensors, **uncalibrated}
    assert model_shape(config, stored=replace(stored, tensors=other)).tensors == other


def test_an_expert_that_an_mtp_layer_lacks_is_named() -> None:
    config, stored = stored_by("Glm4MoeForCausalLM")
    mtp = {name.replace("layers.3.", "layers.4."): size for name, size in stored.tensors.items()}
    stored = replace(stored, tensors={**stored.tensors, **mtp})
    gone = "model.layers.4.mlp.experts.1.up_proj.weight"
    assert refusal({**config, "num_nextn_predict_layers": 1}, without(stored, gone)) == "source.missing-tensor"


@pytest.mark.parametrize(("architecture", "mask"), [("BloomForCausalLM", ""), ("GPTJForCausalLM", "attn.bias")])
def test_files_without_the_head_s_prefix_and_with_masks_are_those_of_the_model(
    architecture: str, mask: str, tmp_path: Path
) -> None:
    """As the hub has bigscience/bloom, and EleutherAI/gpt-j-6b."""
    source, packed, exported = (tmp_path / name for name in ("source", "packed", "exported"))
    save_tiny(source, architecture)
    omit_prefix(source, {f"h.{layer}.{mask}": torch.zeros(4, 4) for layer in range(4) if mask})
    assert run("check", source).code == 0
    pack(source, packed, "pp=2", "--quiet")
    run("verify", packed, "--against", source, "--quiet")
    run("export", packed, "--to", "hf", "--out", exported, "--quiet")
    assert files_in(exported) == files_in(source)
    stages = json.loads((packed / "manifest.json").read_text())["stages"]
    assert "transformer.h.0" in stages[0]["modules"]


def omit_prefix(source: Path, more: dict[str, torch.Tensor]) -> None:
    """Write the tensors of a source, and more of them, as files of the model without its head have them."""
    tensors = dict(more)
    for path in source.glob("model*"):
        whole = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else {}
        tensors |= {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
        path.unlink()
    safetensors.torch.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def test_tensor_that_the_class_lacks_is_dropped_by_the_name_that_its_refusal_has(tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    save_tiny(source, "BloomForCausalLM")
    omit_prefix(source, {"h.0.odd.weight": torch.zeros(4)})
    error = reshard("pack", source, "--layout", "pp=2", "--out", packed, "--json").json["error"]
    drop = ("--drop", "transformer.h.0.odd.weight")
    assert (error["code"], error["hint"].endswith(" ".join(drop))) == ("source.unknown-tensor", True)
    pack(source, packed, "pp=2", *drop)
    assert json.loads((packed / "source.json").read_text())["dropped"] == ["h.0.odd.weight"]
    run("verify", packed, "--against", source, "--quiet")


def test_tensors_without_their_shapes_are_refused() -> None:
    """As ZeRO 3 has parameters of other ranks, and as it flattens all of them; sizes are known of files alone."""
    config, stored = stored_by("Olmo3ForCausalLM")
    empty = {**stored.tensors, "model.layers.0.mlp.up_proj.weight": (0,)}
    flat = {name: (math.prod(dims),) for name, dims in stored.tensors.items()}
    for tensors in (empty, flat):
        assert refusal(config, replace(stored, tensors=tensors)) == "source.shape-mismatch"


def test_index_of_another_model_is_refused() -> None:
    config, _ = stored_by("Olmo3ForCausalLM")
    _, other = stored_by("BloomForCausalLM")
    assert refusal(config, other) == "source.missing-tensor"


def test_config_fields_that_add_tensors_are_followed() -> None:
    plain, without_bias = stored_by("Olmo3ForCausalLM", attention_bias=False)
    biased, with_bias = stored_by("Olmo3ForCausalLM", attention_bias=True)
    assert with_bias.tensors.keys() > without_bias.tensors.keys()
    model_shape(biased, stored=with_bias)
    assert refusal(biased, without_bias) == "source.missing-tensor"
    assert refusal(plain, with_bias) == "source.unknown-tensor"


# Fields that add tensors or layers of another kind, alone or together.
FIELDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Gemma3nForCausalLM", {"altup_num_inputs": 2}),
    ("JambaForCausalLM", {"attn_layer_offset": 1}),
    ("NemotronHForCausalLM", {"moe_latent_size": 16, "mlp_bias": True}),
    ("Cohere2MoeForCausalLM", {"num_shared_experts": 1}),
    ("Cohere2MoeForCausalLM", {"first_k_dense_replace": 3, "attention_bias": True}),
    ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "attention_bias": True}),
    ("Gemma3nForCausalLM", {"altup_num_inputs": 6}),
    ("Gemma4ForCausalLM", {"attention_k_eq_v": True}),
    ("GraniteMoeSWAForCausalLM", {"shared_intermediate_size": 32}),
    ("GraniteMoeSharedForCausalLM", {"shared_intermediate_size": 32}),
)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [pytest.param(*case, marks=() if place < 3 else pytest.mark.slow) for place, case in enumerate(FIELDS)],
)
def test_tensors_of_a_field_are_packed_and_trained_and_never_to_be_dropped(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path / "source", architecture, **changes)
    pack(tmp_path / "source", tmp_path / "packed", "pp=2", "--quiet")
    entry = entry_of(architecture)
    assert entry is not None
    assert compare(entry, 2, **changes).is_equal
    (plain, before), (changed, after) = stored_by(architecture), stored_by(architecture, **changes)
    for gone in after.tensors.keys() - before.tensors.keys():
        assert refusal(changed, without(after, gone)) == "source.missing-tensor"
        with pytest.raises(UserError) as caught:
            model_shape(plain, stored=replace(before, tensors={**before.tensors, gone: after.tensors[gone]}))
        assert caught.value.code in ("source.unknown-tensor", "source.missing-tensor")
        assert "--drop" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.4.mlp.up_proj.weight", "odd"])
def test_only_what_no_config_of_the_class_has_may_be_dropped(name: str, tmp_path: Path) -> None:
    config = llama_config()
    tensors = random_tensors(config)
    write_model(tmp_path / "source", config, {**tensors, name: tensors["model.norm.weight"]}, num_shards=1)
    ended = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", "--json")
    assert ended.json["error"]["code"] == "source.unknown-tensor"
    assert ("--drop" in ended.json["error"]["hint"]) == (name == "odd")


def refusal(config: dict[str, Any], stored: StoredTensors) -> str:
    with pytest.raises(UserError) as caught:
        model_shape(config, stored=stored)
    assert caught.value.where == "SOURCE"
    return caught.value.code


def without(stored: StoredTensors, *names: str) -> StoredTensors:
    return replace(stored, tensors={name: shape for name, shape in stored.tensors.items() if name not in names})


def test_infinity_in_config_is_read_as_transformers_does_and_never_written(tmp_path: Path) -> None:
    source, packed, exported = (tmp_path / name for name in ("source", "packed", "exported"))
    save_tiny(source, "Mamba2ForCausalLM")
    config = transformers.AutoConfig.from_pretrained(source)
    text = json.dumps({**config.to_dict(), "architectures": ["Mamba2ForCausalLM"], "dtype": "float32"})
    assert "[0.0, Infinity]" in text
    (source / "config.json").write_text(text)
    printed = [
        run("pack", source, "--layout", "pp=2", "--out", packed, "--json"),
        run("inspect", packed, "--json"),
        run("plan", packed, "--layout", "pp=2", "--json"),
        run("export", packed, "--to", "hf", "--dtype", "bf16", "--out", exported, "--json"),
    ]
    assert (packed / "config.json").read_text() == text
    written = [packed / "manifest.json", packed / "source.json", exported / "config.json"]
    for document in (*(ended.out for ended in printed), *(file.read_text() for file in written)):
        json.loads(document, parse_constant=pytest.fail)
    assert transformers.AutoConfig.from_pretrained(exported).time_step_limit == [0.0, math.inf]
    family(packed).build(("backbone.embeddings", "backbone.layers.0"))
