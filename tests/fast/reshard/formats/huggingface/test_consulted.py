"""What programs that open a folder read beside its manifest: names of files and fields of config.json, planted.

The oracle is transformers: what `verify` passes, `from_pretrained` reads as the same weights, with the same logits.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from manifests.digest import digest_bytes
from manifests.errors import ModelError
from manifests.index import is_consulted
from manifests.models import check_readable
from tests.builders import Ended, edit_manifest, reshard
from tests.fast.reshard.checks.test_sign import write_keys
from tests.fast.trained import write_trained

PACKAGE = Path(transformers.__file__).parent
UNLISTED = "manifest.unlisted-file"
# Names by where they are read. `tests/interop/test_readers.py` compares the sources of the others than transformers.
READ_IN: Mapping[str, tuple[str, ...]] = {
    "transformers 5.23.0: utils/__init__.py, utils/hub.py, modeling_utils.py": (
        "model.safetensors", "model.fp16.safetensors", "model.safetensors.index.fp16.json", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "model.gguf", "MODEL.SAFETENSORS",
    ),
    "transformers 5.23.0: dynamic_module_utils.py, generation/utils.py, configuration_utils.py": (
        "modeling_llama.py", "configuration_llama.py", "custom_generate/generate.py", "config.4.0.0.json",
    ),
    "transformers 5.23.0: processing_utils.py, tokenization_utils_base.py, models/*/tokenization_*.py": (
        "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "chat_template.json", "qwen.tiktoken",
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "tokenizer.json",
        "audio_tokenizer_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json", "tokenizer.model.v3",
    ),
    "PEFT 0.21.2: utils/constants.py, utils/save_and_load.py, config.py": (
        "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin",
    ),
    "vLLM 0.33.0: lora/lora_model.py": ("adapter_model.pt",),
    "vLLM 0.33.0: transformers_utils/config.py": (
        "consolidated.safetensors", "consolidated.safetensors.index.json", "params.json", "hf_quant_config.json",
        "modules.json", "sentence_bert_config.json", "sentence_xlm-roberta_config.json",
        "config_sentence_transformers.json",
    ),
    "vLLM 0.33.0: transformers_utils/model_arch_config_convertor.py": (
        "joint_head_config.json", "decision_config.json",
    ),
    "vLLM 0.33.0: model_executor/model_loader/: default_loader, tensorizer, weight_utils": (
        "model.pt", "model.bin", "model.tensors", "sparse_attention_config.json", "np/weight_names.json",
    ),
    "vLLM 0.33.0: model_executor/layers/quantization/*.py": (
        "quantize_config.json", "quant_config.json", "quantization_config.json", "torchao_config.json",
    ),
    "vLLM 0.33.0: model_executor/models/: jina, mimo_audio, funaudiochat, kimi_audio, d3, qwen3_dflash": (
        "adapters/retrieval/adapter_config.json", "adapters/retrieval/adapter_model.safetensors",
        "audio_tokenizer/model.safetensors", "speech_tokenizer/config.json", "whisper-large-v3/config.json",
        "readout.safetensors", "mask_embedding.pt",
    ),
    "SGLang 0.5.23: srt/model_loader/loader.py, weight_utils.py": (
        "presharded/tp_2/model-00001.safetensors", "presharded/tp_2/checksum.json", "mtp.safetensors",
    ),
    "SGLang 0.5.23: srt/models/cosmos3.py, cosmos3_edge.py": (
        "transformer/model.safetensors", "vision_encoder/model.safetensors",
    ),
    "SGLang 0.5.23: srt/arg_groups/speculative_hook.py": ("dspark/config.json", "dspark/model.safetensors"),
    "SGLang 0.5.23: srt/utils/common.py": ("SYSTEM_PROMPT.txt",),
}  # fmt: skip
NAMES = tuple(name for names in READ_IN.values() for name in names)
# Nobody reads these as a part of a model.
OTHERS = ("notes.txt", "README.md", "LICENSE", "figure.png", "train.log", "digests.json", ".hidden.json", "sub/a.json")
# File names in transformers' sources that are not read from a model's folder: of its tests, tools and trainers.
NOT_READ = {
    "captured_info.txt", "checkpoint-is-incomplete.txt", "stereo_chemical_props.txt", "version.txt",
}  # fmt: skip
# Fields of a config that from_pretrained consults outside the architectures, and that a packed folder may have: they
# say nothing of where weights are, and P has them as M does. What chooses code is in `runner.models.implementations`.
KNOWN_FIELDS = {
    "_attn_implementation", "_attn_implementation_internal", "_experts_implementation",
    "_experts_implementation_internal", "_is_quantized", "_name_or_path", "architectures", "attention_chunk_size",
    "attention_dropout", "auto_map", "bos_token_id", "chain_hidden_post_norm", "classifier_dropout", "dtype",
    "eos_token_id", "features_only", "first_k_dense_replace", "gradient_checkpointing", "head_dim",
    "hidden_dropout", "hidden_size", "init_std", "initializer_factor", "initializer_range", "is_causal",
    "kv_sharing_modes", "layer_types", "logits_mup_width_multiplier", "max_position_embeddings", "mlp_layer_types",
    "model_type", "mtp_hidden_states_first", "mtp_layer_types", "mtp_mlp_layer_types", "mtp_per_layer_config",
    "name_or_path", "num_attention_heads", "num_channels", "num_hidden_layers", "num_labels", "num_mtp_layers",
    "out_indices", "pad_token_id", "per_layer_config", "quantization_config", "rms_norm_eps", "rope_parameters",
    "sep_token_id", "sliding_window", "tie_word_embeddings", "token_classification_bias", "unpadded_vocab_size",
    "vision_config", "vocab_size",
}  # fmt: skip
REFUSED_FIELDS = (
    "transformers_weights", "configuration_files", "fusion_config", "distributed_config",
    "speculators_config",  # vLLM 0.33.0, transformers_utils/config.py, maybe_override_with_speculators
    "model_file",  # mlx-lm 0.32.2, utils.py, load_model
)  # fmt: skip
# Attributes of the config class that are fields in files, or that a field may set.
SETTABLE = {
    "_attn_implementation", "_auto_class", "_experts_implementation", "is_custom_code", "model_type", "name_or_path",
    "num_labels", "output_attentions", "per_layer_config", "rope_scaling", "torch_dtype", "use_return_dict",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in two shards (M), it packed (P), and a model of zeros in one file (Z)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, max_position_embeddings=64,
    )  # fmt: skip
    model, folder = LlamaForCausalLM(config), tmp_path_factory.mktemp("models")
    model.save_pretrained(folder / "M", max_shard_size="20KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(folder / "Z")
    assert pack(folder / "M", folder / "P").code == 0
    return folder


@pytest.fixture
def packed(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "P", tmp_path / "P"))


def pack(source: Path, out: Path, *args: object) -> Ended:
    return reshard("pack", source, "--layout", "pp=2", "--out", out, *args, "--json")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return what the shards in the root have."""
    return {name: tensor for path in folder.glob("model-*.safetensors") for name, tensor in load_file(path).items()}


def load(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the weights and the logits of the model that from_pretrained reads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model.state_dict(), model(torch.arange(12)[None], return_dict=True).logits


def reads_the_same(folder: Path, logits: torch.Tensor, **options: Any) -> bool:
    """Return whether from_pretrained reads the weights that are in the shards, and the model has these logits."""
    expected, (read, computed) = weights_of(folder), load(folder, **options)
    has_weights = read.keys() == expected.keys() and all(torch.equal(read[fqn], expected[fqn]) for fqn in read)
    return has_weights and torch.equal(computed, logits)


def plant(folder: Path, name: str, data: bytes = b"{}") -> None:
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_bytes(data)


def refused_names(folder: Path, *args: object) -> list[str]:
    ended = reshard("verify", folder, "--json", *args)
    assert ended.code in (0, 4)
    return [each["where"] for each in ended.json["differences"] if each.get("code") == UNLISTED]


@pytest.mark.parametrize("kind", ["packed", "trained"])
def test_no_command_passes_a_file_that_from_pretrained_prefers(models: Path, tmp_path: Path, kind: str) -> None:
    if kind == "packed":
        folder = Path(shutil.copytree(models / "P", tmp_path / "P"))
        assert reads_the_same(folder, load(models / "M")[1])
    else:
        folder = write_trained(tmp_path, "pp=2")
    assert reshard("sign", folder, "--key", write_keys(tmp_path, "one")).code == 0
    verbs = (("verify",), ("verify", "--public-key", tmp_path / "one.pub"), ("check",), ("check", "--values"))
    for verb, *args in verbs:
        assert reshard(verb, folder, *args).code == 0
    plant(folder, "model.safetensors", (models / "Z" / "model.safetensors").read_bytes())
    if kind == "packed":
        assert not reads_the_same(folder, load(models / "M")[1])
    for verb, *args in verbs:
        ended = reshard(verb, folder, *args, "--json")
        found = ended.json["differences" if verb == "verify" else "problems"]
        assert (ended.code, [each["code"] for each in found]) == (4, [UNLISTED])
        assert found[0]["where"] == str(folder / "model.safetensors")


def test_verify_names_every_file_that_a_reader_consults(packed: Path, tmp_path: Path) -> None:
    for name in OTHERS:
        plant(packed, name)
    assert refused_names(packed) == []
    for name in NAMES:
        plant(packed, name)
    assert sorted(refused_names(packed)) == sorted(str(packed / name) for name in NAMES)
    (tmp_path / "linked").mkdir()
    (packed / "config.linked.json").symlink_to(packed / "config.json")
    (packed / "dangling.json").symlink_to(packed / "nothing")
    assert str(packed / "config.linked.json") in refused_names(packed)
    assert str(packed / "dangling.json") not in refused_names(packed)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "adapter_config.json"])
def test_manifest_cannot_list_weights_as_auxiliary_files(models: Path, packed: Path, name: str) -> None:
    """A signed manifest of a hostile packer."""
    plant(packed, name, (models / "Z" / "model.safetensors").read_bytes())
    aux = json.loads((packed / "manifest.json").read_text())["files"][0]
    edit_manifest(packed, lambda document: document["files"].append({**aux, "path": name}))
    ended = reshard("verify", packed, "--json")
    assert (ended.code, ended.json["code"]) == (4, "manifest.misleading-name")


def test_manifest_cannot_name_shards_so_that_readers_take_one_of_them(packed: Path) -> None:
    first = next(packed.glob("model-00001-*"))
    first.rename(packed / "model.safetensors")
    edit_manifest(packed, lambda document: document["stages"][0]["shards"][0].update(path="model.safetensors"))
    ended = reshard("verify", packed, "--json")
    codes = {difference.get("code") for difference in ended.json["differences"]}
    assert (ended.code, "manifest.misleading-name" in codes) == (4, True)


def test_adapter_beside_a_model_is_refused(models: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(models / "M", tmp_path / "M"))
    plant(source, "adapter_config.json", b'{"base_model_name_or_path": "somebody/else"}')
    ended = pack(source, tmp_path / "out")
    assert (ended.code, ended.json["error"]["code"]) == (3, "source.adapter")
    ended = reshard("check", source, "--json")
    assert (ended.code, [each["code"] for each in ended.json["problems"]]) == (4, ["source.adapter"])


def with_fields(models: Path, folder: Path, fields: Mapping[str, Any]) -> Path:
    source = Path(shutil.copytree(models / "M", folder))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **fields}))
    return source


REDIRECTS: tuple[Mapping[str, Any], ...] = (
    {"transformers_weights": "alt/model.safetensors"},
    {"transformers_weights": "model.safetensors.index.json"},
    {"configuration_files": ["config.4.0.0.json"]},
    {"fusion_config": {"x": True}},
    {"distributed_config": {"tp_size": 2}},
    {"speculators_config": {"verifier": {"name_or_path": "somebody/else"}}},
    {"model_file": "modeling.py"},
    {"attribute_map": {"rms_norm_eps": "eps"}, "eps": 0.5},
    {"base_model_tp_plan": {"layers.*.mlp.down_proj": "colwise"}},
    {"sub_configs": {}},
    {"to_dict": 1},
    {"vision_config": {"attribute_map": {"hidden_size": "x"}}},
)


@pytest.mark.parametrize("fields", REDIRECTS, ids=lambda fields: str(next(iter(fields))))
def test_config_that_leads_readers_elsewhere_is_refused(
    models: Path, tmp_path: Path, fields: Mapping[str, Any]
) -> None:
    source = with_fields(models, tmp_path / "M", fields)
    ended = pack(source, tmp_path / "out")
    assert (ended.code, ended.json["error"]["code"]) == (3, "config.redirects")
    ended = reshard("check", source, "--json")
    assert (ended.code, [each["code"] for each in ended.json["problems"]]) == (4, ["config.redirects"])
    assert not (tmp_path / "out").exists()


def test_packed_config_that_was_changed_to_lead_readers_elsewhere_is_refused(packed: Path) -> None:
    data = (packed / "config.json").read_bytes().replace(b"{", b'{"transformers_weights": "alt.safetensors",', 1)
    (packed / "config.json").write_bytes(data)

    def update(document: dict[str, Any]) -> None:
        file = next(file for file in document["files"] if file["path"] == "config.json")
        file.update(nbytes=len(data), digest=digest_bytes(data))

    edit_manifest(packed, update)
    ended = reshard("verify", packed, "--json")
    assert (ended.code, [each["where"] for each in ended.json["differences"]]) == (
        4, [f"{packed / 'config.json'}: transformers_weights"]
    )  # fmt: skip


# One value or two of each field that chooses a class, a dtype or code, or that changes how weights are read.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "_name_or_path": ("somebody/else", "../Z"),
    "add_cross_attention": (True,),
    "architectures": (["MistralForCausalLM"], ["LlamaForCausalLM", "GemmaForCausalLM"]),
    "attn_implementation": ("eager", "somebody/kernel@main", "flash_attention_2", "paged|eager"),
    "auto_map": ({"AutoModelForCausalLM": "modeling.Other"}, {"AutoConfig": "somebody/else--config.Other"}),
    "compression_config": ({"quant_method": "compressed-tensors"},),
    "dtype": ("float64", "load", 3, {"lm_head": "float16"}),
    "experts_implementation": ("eager", "somebody/kernel"),
    "is_decoder": (False,),
    "is_encoder_decoder": (True,),
    "model_type": ("mistral", "gemma", "nothing"),
    "name_or_path": ("somebody/else",),
    "num_labels": (7,),
    "per_layer_config": ({"1": {"intermediate_size": 32}},),
    "pruned_heads": ({"0": [0]},),
    "quantization_config": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant_method": "fp8"}),
    "return_dict": (False,),
    "text_config": ({"hidden_size": 8},),
    "tie_word_embeddings": (True,),
    "torch_dtype": ("Tensor",),
    "torchscript": (True,),
    "use_kernels": (True,),
}
# Fields that change logits alone, with values other than M's: they are in the packed config as in the source's.
OF_LOGITS: Mapping[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rms_norm_eps": 0.5,
    "hidden_act": "relu",
    "is_causal": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), [(field, value) for field in VALUES for value in VALUES[field]])
def test_any_field_leaves_the_same_weights_and_logits_or_is_refused(
    models: Path, tmp_path: Path, field: str, value: Any
) -> None:
    """By us, or by transformers, which then reads the source no better."""
    source, out = with_fields(models, tmp_path / "M", {field: value}), tmp_path / "out"
    ended = pack(source, out)
    if ended.code:
        assert ended.code == 3
        assert not out.exists()
        return
    assert reshard("verify", out).code == 0
    try:
        assert reads_the_same(out, load(source)[1])
    except (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            load(source)


@pytest.mark.slow
@pytest.mark.parametrize("field", OF_LOGITS)
def test_field_that_changes_logits_alone_changes_those_of_the_packed_model(
    models: Path, tmp_path: Path, field: str
) -> None:
    source, out = with_fields(models, tmp_path / "M", {field: OF_LOGITS[field]}), tmp_path / "out"
    assert pack(source, out).code == 0
    assert reads_the_same(out, load(source)[1])
    assert not reads_the_same(out, load(models / "M")[1])
    (out / "config.json").write_bytes((models / "M" / "config.json").read_bytes())
    assert reshard("verify", out).code == 4


def hostile(models: Path, name: str) -> bytes:
    """Return what would change a model if a program read it from a file of this name."""
    zeros = models / "Z" / "model.safetensors"
    if name.lower().endswith(".safetensors"):
        return zeros.read_bytes()
    if "index" in name:
        weight_map = dict.fromkeys(load_file(zeros), "zeros/model.safetensors")
        return json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode()
    if name.endswith((".bin", ".pt")):
        buffer = io.BytesIO()
        torch.save(load_file(zeros), buffer)
        return buffer.getvalue()
    if name.endswith(".json"):
        return (models / "M" / "config.json").read_bytes().replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 0.5')
    return b"raise SystemExit(7)"


@pytest.mark.slow
def test_planted_file_is_refused_or_changes_neither_weights_nor_logits(models: Path, tmp_path: Path) -> None:
    """The oracle is from_pretrained, by all its ways to files, and by PEFT, which it opens adapters with."""
    logits, changed = load(models / "M")[1], set()
    for number, name in enumerate(sorted({*NAMES, *OTHERS, *NOT_READ})):
        folder = Path(shutil.copytree(models / "P", tmp_path / str(number)))
        plant(folder, "zeros/model.safetensors", hostile(models, "model.safetensors"))
        plant(folder, name, hostile(models, name))
        for options in ({}, {"use_safetensors": False}, {"variant": "fp16"}):
            try:
                is_same = reads_the_same(folder, logits, **options)
            except OSError:  # no file of the kind that was asked for
                is_same = bool(options)
            except TypeError as error:
                if "peft_type" not in str(error):  # which the hostile file lacks
                    raise
                is_same = False
            changed |= set() if is_same else {name}
        assert name not in changed or refused_names(folder) == [str(folder / name)]
    assert changed == {
        "model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.fp16.safetensors",
        "model.safetensors.index.fp16.json", "adapter_config.json",
    }  # fmt: skip


def sources_of_transformers() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.startswith("convert_"):
            yield path.relative_to(PACKAGE).as_posix(), path.read_text()


@pytest.mark.slow
def test_every_file_name_in_the_sources_of_transformers_is_consulted() -> None:
    kinds = (
        "json safetensors bin txt model jinja py pt pth h5 msgpack ckpt spm tiktoken tokenizer vocab pkl gguf npz codes"
        " onnx ot yaml yml pb bpe faiss so"
    )
    name = re.compile(rf"""(?<=["'])[A-Za-z0-9_][\w.{{}}/-]*\.(?:{kinds.replace(" ", "|")})(?=["'])""")
    found = {match.replace("{}", "x") for _, text in sources_of_transformers() for match in name.findall(text)}
    found = {each for each in found if not each.startswith(("src/", "tests/", "utils/"))}
    assert len(found) > 100
    assert {each for each in found if not is_consulted(each)} - NOT_READ == set()


READS = """
import os, sys
import torch, transformers
folder = sys.argv[1]
def note(path):
    path = os.path.normpath(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if path.startswith(folder + "/"):
        names.add(path[len(folder) + 1:])
def noting(function):
    def call(path=".", *args, **kwargs):
        note(path)
        return function(path, *args, **kwargs)
    return call
names = set()
for name in ("stat", "lstat", "listdir", "scandir", "open", "access"):
    setattr(os, name, noting(getattr(os, name)))
sys.addaudithook(lambda event, args: note(args[0]) if event == "open" else None)
for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor",
             "AutoVideoProcessor", "AutoFeatureExtractor", "GenerationConfig", "LlamaForCausalLM"):
    for args in ({}, {"use_safetensors": False}, {"variant": "fp16"}):
        try:
            getattr(transformers, kind).from_pretrained(folder, **args)
        except Exception:
            pass
print(*sorted(names), sep="\\n")
"""


@pytest.mark.slow
def test_every_name_that_transformers_looks_for_is_listed_or_consulted(packed: Path) -> None:
    """Traced, not remembered."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", READS, packed], capture_output=True, text=True, timeout=300, check=True
    )
    names = done.stdout.split()
    assert {"config.json", "model.safetensors", "pytorch_model.bin", "model.fp16.safetensors", "chat_template.jinja",
            "additional_chat_templates", "tokenizer.json", "preprocessor_config.json"} <= set(names)  # fmt: skip
    listed = {path.name for path in packed.iterdir()}
    assert [name for name in names if name not in listed and not is_consulted(name) and "." in name] == []


# Where transformers consults a config for every architecture.
CORE = (
    "cache_utils.py", "configuration_utils.py", "conversion_mapping.py", "core_model_loading.py",
    "dynamic_module_utils.py", "fusion_mapping.py", "integrations/flash_attention.py", "integrations/hub_kernels.py",
    "integrations/moe.py", "integrations/peft.py", "masking_utils.py", "modeling_layers.py",
    "modeling_rope_utils.py", "modeling_utils.py", "models/auto/auto_factory.py", "models/auto/configuration_auto.py",
    "quantizers/auto.py",
)  # fmt: skip
CONFIGS = re.compile(
    r"(?:^|\.)(?:config|config_dict|text_config|_config|decoder_config|sub_?config|get_text_config\(.*\))$"
)


def fields_in(text: str) -> Iterator[str]:
    """Yield the fields of configs that a module reads, as attributes or by a constant name."""
    for node in ast.walk(ast.parse(text)):
        owner: ast.expr | None = None
        field: object = None
        match node:
            case ast.Attribute(value=owner, attr=field):
                pass
            case ast.Subscript(value=owner, slice=ast.Constant(value=field)):
                pass
            case ast.Compare(left=ast.Constant(value=field), ops=[ast.In() | ast.NotIn()], comparators=[owner]):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=field), *_]):
                pass
            case ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop"), args=[ast.Constant(value=field), *_]):
                pass
        if owner is not None and isinstance(field, str) and CONFIGS.search(ast.unparse(owner)):
            yield field


@pytest.mark.slow
def test_every_field_that_transformers_consults_is_known_or_refused() -> None:
    found = {field for name in CORE for field in fields_in((PACKAGE / name).read_text())}
    attributes = {*dir(PreTrainedConfig), *dir(dict), *(field.name for field in dataclasses.fields(PreTrainedConfig))}
    assert len(found) > 60
    assert found - attributes - KNOWN_FIELDS - set(REFUSED_FIELDS) == set()


def test_attributes_of_a_config_class_are_refused_as_fields() -> None:
    fields = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = {name for name in dir(PreTrainedConfig) if not name.startswith("_") and name not in fields | SETTABLE}
    assert len(names) > 30
    for name in names | set(REFUSED_FIELDS):
        with pytest.raises(ModelError, match=name):
            check_readable({name: 1}, "config.json")
