"""Packs of decoders that only transformers models, with the tensor names that their files have."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from manifests.models import model_shape
from tests.builders import files_in, leftovers, pack, refusal, reshard, run
from tests.fast.manifests.models.built import DECODERS, build, perturb, read_config
from tests.fast.runner.models.decoders import name_as_openai_did, save_decoder

SHARDS = "100KB"  # small enough for several files


def save(folder: Path, name: str, **changes: Any) -> None:
    perturb(build(read_config(name, **changes))).save_pretrained(folder, max_shard_size=SHARDS)


def pack_and_export(source: Path, tmp_path: Path, layout: str = "pp=3") -> dict[str, Any]:
    """Pack, reshard, export, see that every byte came back, and return the first manifest."""
    for origin, out, spec in ((source, "packed", layout), (tmp_path / "packed", "resharded", "balance:params,pp=2")):
        pack(origin, tmp_path / out, spec, "--quiet")
    run("export", tmp_path / "resharded", "--to", "hf", "--out", tmp_path / "exported", "--quiet")
    assert files_in(tmp_path / "exported") == files_in(source)
    manifest: dict[str, Any] = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    return manifest


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_pack_and_export_give_every_byte_back(name: str, tied: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(source, name, tie_word_embeddings=tied)
    manifest = pack_and_export(source, tmp_path)
    shape = model_shape(json.loads((source / "config.json").read_text()))
    assert [module for stage in manifest["stages"] for module in stage["modules"]] == list(shape.modules)
    assert manifest["model"]["architecture"] == shape.architecture
    assert len(manifest["ties"]) == tied


def openai_gpt2(folder: Path) -> None:
    """Write a GPT-2 as OpenAI's own files are, with the constant that old ones held beside their masks."""
    save_decoder(folder / "gpt2", "tiny-gpt2", tie_word_embeddings=True, n_positions=16)
    name_as_openai_did(folder / "gpt2")
    path = folder / "gpt2" / "model.safetensors"
    save_file({**load_file(path), "h.0.attn.masked_bias": torch.tensor(-1e4)}, path, {"format": "pt"})


def test_gpt2_without_prefix_is_packed_under_its_fqns_and_exported_as_it_was(tmp_path: Path) -> None:
    openai_gpt2(tmp_path)
    source = tmp_path / "gpt2"
    manifest = pack_and_export(source, tmp_path)
    assert manifest["stages"][0]["modules"][:3] == ["transformer.wte", "transformer.wpe", "transformer.h.0"]
    packed = load_file(tmp_path / "packed" / manifest["stages"][0]["shards"][0]["path"])
    assert {"transformer.wte.weight", "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"} <= packed.keys()
    run("verify", tmp_path / "packed", "--against", source)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported")
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("named", ["h.2.attn.bias", "transformer.h.2.attn.bias"])
def test_tensor_without_prefix_is_dropped_by_either_name(named: str, tmp_path: Path) -> None:
    openai_gpt2(tmp_path)
    out = tmp_path / "packed"
    pack(tmp_path / "gpt2", out, "pp=2", "--drop", named)
    assert json.loads((out / "source.json").read_text())["dropped"] == ["h.2.attn.bias"]
    assert reshard("export", out, "--to", "hf", "--out", tmp_path / "exported").code == 0
    left = load_file(tmp_path / "exported" / "model.safetensors").keys()
    assert left == load_file(tmp_path / "gpt2" / "model.safetensors").keys() - {"h.2.attn.bias"}


def test_virtual_bundles_do_not_refer_to_files_without_prefix(tmp_path: Path) -> None:
    openai_gpt2(tmp_path)
    refused = refusal("pack", tmp_path / "gpt2", "--layout", "pp=2", "--virtual", "--out", tmp_path / "packed")
    assert refused.found == (3, "options.cannot-be-virtual", "model.safetensors: 'h.0.attn.bias'")
    assert leftovers(tmp_path / "packed") == []


def test_tensor_with_and_without_prefix_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    openai_gpt2(tmp_path)
    path = tmp_path / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "transformer.ln_f.weight": tensors["ln_f.weight"].clone()}, path, {"format": "pt"})
    ended = reshard("pack", tmp_path / "gpt2", "--layout", "pp=2", "--out", tmp_path / "packed", "--json")
    exit_code, code, where = ended.refusal
    assert (exit_code, code, where.split(": ")[0]) == (3, "source.tensor-twice", str(path))
    wording(ended.json["error"]["problem"])


def test_base_model_of_opt_is_packed_under_its_fqns(tmp_path: Path) -> None:
    model = build(read_config("tiny-opt", tie_word_embeddings=True))
    source = tmp_path / "source"
    model.save_pretrained(source)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert pack_and_export(source, tmp_path)["stages"][0]["modules"][0] == "model.decoder.embed_tokens"


@pytest.mark.parametrize(
    ("name", "layout", "cuts"),
    [
        ("gpt2", "pp=2", [8]),
        ("gpt2", "pp=2,vpp=2", [5, 9, 12]),
        ("gpt2", "Et*6|t*6L --pp 2", [8]),
        ("gpt2", "balance:params,pp=2,pin=transformer.h.2@0,pin=transformer.h.3@1", [5]),
        ("gpt2", "balance:params,pp=2,pin=h.2@0,pin=h.3@1", [5]),
        ("opt-350m", "pp=4", [9, 16, 22]),
        ("opt-350m", "balance:params,pp=3,pin=layers.2@0,pin=layers.3@1,pin=layers.23@1,pin=project_out@2", [6, 27]),
        ("mpt-7b", "balance:params,pp=2,pin=blocks.30@0,pin=blocks.31@1", [32]),
        ("mixtral-8x7b", "balance:params,pp=2", [17]),
    ],
)  # fmt: skip
def test_layouts_cut_models_of_other_names(name: str, layout: str, cuts: list[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config(name)))
    spec, *flags = layout.split(" ")
    ended = reshard("plan", tmp_path / "config.json", "--layout", spec, *flags, "--json")
    modules = model_shape(read_config(name)).modules
    bounds = [0, *cuts, len(modules)]
    assert [stage["modules"] for stage in ended.json["stages"]] == [
        list(modules[begin:end]) for begin, end in pairwise(bounds)
    ]


def test_file_of_module_lists_takes_short_names_and_ranges(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config("gpt2")))
    (tmp_path / "stages.json").write_text('[["wte", "wpe", "h.0-5"], ["h.6-11", "transformer.ln_f", "lm_head"]]')
    ended = run("plan", tmp_path / "config.json", "--layout", tmp_path / "stages.json")
    assert "wte, wpe, h.0-5" in ended.out
