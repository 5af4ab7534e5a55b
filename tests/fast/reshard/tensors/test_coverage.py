"""Law 1: every tensor of the source lands exactly once, in a tie group, or is dropped by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from stores.open import open_manifest
from tests.builders import (
    EMBEDDING,
    HEAD,
    INDEX,
    Tensor,
    files_in,
    leftovers,
    llama_config,
    pack,
    random_tensors,
    refusal,
    reshard,
    run,
    write_model,
    write_safetensors,
)

UP = "model.layers.1.mlp.up_proj.weight"
STRAY = "model.layers.1.mlp.side_proj.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def refused(source: Path, *args: str) -> tuple[tuple[str, str], str]:
    """Return code and place, without the path of the source, and text of the error that packing a source ends with."""
    out = source.parent / "out"
    ended = refusal("pack", source, "--layout", "pp=2", "--out", out, *args)
    exit_code, code, where = ended.found
    assert exit_code == 3
    assert leftovers(out) == []
    return (code, where.replace(str(source), "SOURCE")), ended.text


def stray() -> Tensor:
    return Tensor(dtype="U8", shape=(4,), data=b"lost")


def test_missing_tensor_is_named(tmp_path: Path, wording: Callable[[str], None]) -> None:
    tensors = random_tensors(llama_config())
    del tensors[UP]
    write_model(tmp_path / "source", llama_config(), tensors)
    found, text = refused(tmp_path / "source")
    assert found == ("source.missing-tensor", "SOURCE")
    wording(text)


def test_of_many_missing_tensors_five_are_named_and_all_counted(tmp_path: Path, wording: Callable[[str], None]) -> None:
    write_model(tmp_path / "source", llama_config(num_hidden_layers=5), random_tensors(llama_config()))
    before = files_in(tmp_path / "source")
    found, text = refused(tmp_path / "source")
    assert found == ("source.missing-tensor", "SOURCE")
    wording(text)
    assert files_in(tmp_path / "source") == before


@pytest.mark.parametrize("num_shards", [1, 2])
def test_stray_tensor_is_refused_and_may_be_dropped_by_name(
    num_shards: int, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    tensors = random_tensors(llama_config())
    write_model(tmp_path / "source", llama_config(), tensors | {STRAY: stray()}, num_shards=num_shards)
    found, text = refused(tmp_path / "source")
    assert found == ("source.unknown-tensor", "SOURCE")
    if num_shards == 1:
        wording(text)
    pack(tmp_path / "source", tmp_path / "out", "pp=2", "--drop", STRAY)
    rows = reshard("inspect", tmp_path / "out", "--tensors", "--json").json["tensors"]
    assert sorted(row["fqn"] for row in rows) == sorted(tensors)


def test_tensor_of_another_shape_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    tensors = random_tensors(llama_config())
    tensors[HEAD] = replace(tensors[HEAD], shape=(80, 8))
    write_model(tmp_path / "source", llama_config(), tensors)
    found, text = refused(tmp_path / "source")
    assert found == ("source.shape-mismatch", f"SOURCE/model.safetensors: '{HEAD}'.shape")
    wording(text)


@pytest.mark.parametrize(("tied", "missing"), [(False, [HEAD]), (True, [EMBEDDING, HEAD])])
def test_head_and_embedding_of_which_no_copy_is_stored_are_missing(
    tied: bool, missing: list[str], tmp_path: Path
) -> None:
    tensors = random_tensors(llama_config(tie_word_embeddings=True))
    if tied:
        del tensors[EMBEDDING]
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=tied), tensors)
    found, text = refused(tmp_path / "source")
    assert found == ("source.missing-tensor", "SOURCE")
    assert f": {', '.join(missing)}\n" in text


def write_with_head(source: Path, head: Tensor, **config: Any) -> Path:
    """Write a model whose config ties the head to the embedding, and whose file has a head as well."""
    config = llama_config(tie_word_embeddings=True, **config)
    write_model(source, config, random_tensors(config) | {HEAD: head})
    return source


def test_tied_copies_that_differ_are_two_weights_unless_one_is_dropped(tmp_path: Path) -> None:
    """As `from_pretrained` reads them, which warns of the config."""
    source = write_with_head(tmp_path / "source", random_tensors(llama_config())[HEAD])
    out = pack(source, tmp_path / "out", "pp=2")
    assert open_manifest(out).manifest.ties == ()
    run("verify", out, "--against", source)
    pack(out, tmp_path / "again", "pp=4")
    run("export", tmp_path / "again", "--to", "hf", "--out", tmp_path / "exported")
    assert files_in(tmp_path / "exported") == files_in(source)
    pack(source, tmp_path / "dropped", "pp=2", "--drop", HEAD)
    rows = reshard("inspect", tmp_path / "dropped", "--tensors", "--json").json["tensors"]
    assert {row["fqn"]: row["blake3"] for row in rows}[HEAD] == rows[0]["blake3"]


@pytest.mark.parametrize("verb", ["pack", "pack --dry-run", "plan"])
def test_ties_of_a_config_that_do_not_fit_the_files_are_noted(verb: str, tmp_path: Path) -> None:
    """Readers that go by the config, such as vLLM, read another model than is packed."""
    source = write_with_head(tmp_path / "source", random_tensors(llama_config())[HEAD])
    name, *flags = verb.split()
    flags += ["--layout", "pp=2"] + (["--out", str(tmp_path / "out")] if name == "pack" else [])
    again = "--force" if verb == "pack" else "--json"
    noted = run(name, source, *flags).err
    assert (noted[:6], noted.count("\n")) == ("note: ", 1)
    assert all(part in noted for part in (EMBEDDING, HEAD, f"--drop {HEAD} "))
    assert run(name, source, *flags, again, "--quiet").err == ""
    assert "note: " not in run(name, source, *flags, again, "--drop", HEAD).err


def test_ties_that_do_not_fit_the_files_are_in_the_object_of_a_plan(tmp_path: Path) -> None:
    source = write_with_head(tmp_path / "source", random_tensors(llama_config())[HEAD])
    assert run("plan", source, "--layout", "pp=2", "--json").json["untied"] == [[EMBEDDING, HEAD]]
    searched = run("plan", source, "--gpus", "2", "--gpu-memory", "1GB")
    assert HEAD in searched.err
    packed = pack(source, tmp_path / "out")  # of which nothing can be dropped
    assert run("plan", packed, "--json").json["untied"] == []


@pytest.mark.parametrize("form", ["hf --dtype bf16", "hf --dtype fp32", "dcp", "deepspeed", "universal", "megatron"])
def test_config_that_an_export_writes_does_not_tie_two_weights(form: str, tmp_path: Path) -> None:
    """Readers go by it: ours, too, of the checkpoints of other trainers."""
    source = write_with_head(tmp_path / "source", random_tensors(llama_config())[HEAD], dtype="bfloat16")
    packed, out = pack(source, tmp_path / "packed"), tmp_path / "out"
    run("export", packed, "--to", *form.split(), "--out", out)
    (config,) = out.rglob("config.json")
    assert json.loads(config.read_text())["tie_word_embeddings"] is False
    one, other = (open_manifest(folder).manifest for folder in (packed, pack(out, tmp_path / "again")))
    assert (other.ties, other.model) == ((), one.model)


@pytest.mark.parametrize("is_default", [False, True])
def test_tied_copies_that_differ_outside_of_the_samples_are_refused_by_pack_and_reported_by_check(
    is_default: bool, tmp_path: Path
) -> None:
    """A plan of a model on the hub does not download its embedding, which `pack` reads in any case."""
    embedding = random_tensors(llama_config(vocab_size=1 << 17))[EMBEDDING]
    data = bytearray(embedding.data)
    assert len(data) == 4 << 20
    data[5 << 18] ^= 1
    of_class = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"} if is_default else {}
    head = replace(embedding, data=bytes(data))
    source = write_with_head(tmp_path / "source", head, vocab_size=1 << 17, **of_class)
    config = json.loads((source / "config.json").read_text())
    if is_default:
        del config["tie_word_embeddings"]
        (source / "config.json").write_text(json.dumps(config))
    planned = run("plan", source, "--layout", "pp=2", "--json").json
    assert (len(planned["ties"]), planned["untied"]) == (1, [])
    assert refused(source)[0] == ("source.tied-values-differ", "SOURCE/model.safetensors")
    problems = reshard("check", source, "--json").json["problems"]
    assert [problem["code"] for problem in problems] == ["check.tied-copy"]
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert open_manifest(pack(source, tmp_path / "out")).manifest.ties == ()


def test_tied_copy_whose_values_the_dtype_of_the_model_cannot_have_is_another_weight(tmp_path: Path) -> None:
    shape = random_tensors(llama_config())[EMBEDDING].shape
    head = Tensor(dtype="F32", shape=shape, data=struct.pack("<f", 1e30) * prod(shape))
    source = write_with_head(tmp_path / "source", head, dtype="float16")
    assert run("plan", source, "--layout", "pp=2", "--json").json["untied"] == [[EMBEDDING, HEAD]]
    assert open_manifest(pack(source, tmp_path / "out")).manifest.ties == ()


def test_tied_copies_of_equal_bytes_in_two_dtypes_are_two_weights(tmp_path: Path) -> None:
    embedding = random_tensors(llama_config())[EMBEDDING]
    source = write_with_head(tmp_path / "source", replace(embedding, dtype="F16"), dtype="float32")
    assert open_manifest(pack(source, tmp_path / "out")).manifest.ties == ()


def test_tied_copies_that_are_equal_in_the_dtype_of_the_model_alone_are_refused(
    tmp_path: Path, wording: Callable[[str], None]
) -> None:
    embedding = random_tensors(llama_config())[EMBEDDING]
    pairs = (embedding.data[begin : begin + 2] for begin in range(0, len(embedding.data), 2))
    head = replace(embedding, dtype="F32", data=b"".join(b"\x00\x00" + pair for pair in pairs))
    found, text = refused(write_with_head(tmp_path / "source", head, dtype="bfloat16"))
    assert found == ("source.tied-values-differ", "SOURCE/model.safetensors")
    wording(text)


def test_tensor_in_two_shards_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    tensors = write_model(tmp_path / "source", num_shards=2)
    names = list(tensors)
    write_safetensors(tmp_path / "source" / SHARDS[1], {fqn: tensors[fqn] for fqn in [*names[1::2], names[0]]})
    found, text = refused(tmp_path / "source")
    assert found == ("source.index-disagrees", f"SOURCE/{SHARDS[1]}: '{names[0]}'")
    wording(text)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda weight_map: weight_map.pop(UP), f"{SHARDS[1]}: '{UP}'"),
        (lambda weight_map: weight_map.update({"ghost.weight": SHARDS[0]}), f"{INDEX}: weight_map['ghost.weight']"),
    ],
)
def test_index_that_does_not_match_its_shards_is_refused(
    change: Callable[[dict[str, str]], object], where: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    write_model(tmp_path / "source", num_shards=2)
    index = json.loads((tmp_path / "source" / INDEX).read_text())
    change(index["weight_map"])
    (tmp_path / "source" / INDEX).write_text(json.dumps(index))
    found, text = refused(tmp_path / "source")
    assert found == ("source.index-disagrees", f"SOURCE/{where}")
    wording(text)


@pytest.mark.parametrize(
    ("name", "found"),
    [(STRAY, ("options.unknown-drop", "--drop")), (UP, ("source.missing-tensor", "SOURCE"))],
)
def test_dropping_what_is_not_there_or_what_the_model_requires_is_refused(
    name: str, found: tuple[str, str], tmp_path: Path, wording: Callable[[str], None]
) -> None:
    write_model(tmp_path / "source")
    actual, text = refused(tmp_path / "source", "--drop", name)
    assert actual == found
    wording(text)
