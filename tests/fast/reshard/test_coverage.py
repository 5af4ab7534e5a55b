"""Law 1: every tensor of the source lands exactly once, in a tie group, or is dropped by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import (
    EMBEDDING,
    HEAD,
    INDEX,
    Tensor,
    files_in,
    leftovers,
    llama_config,
    random_tensors,
    reshard,
    write_model,
    write_safetensors,
)

UP = "model.layers.1.mlp.up_proj.weight"
STRAY = "model.layers.1.mlp.side_proj.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OTHERS = "\nhint: shards and index come from different checkpoints; download them again"


def refusal(source: Path, *args: str) -> str:
    """Give what packing a source says, without the path of the source, when it is refused as bad input."""
    out = source.parent / "out"
    ended = reshard("pack", source, "--layout", "pp=2", "--out", out, *args)
    assert ended.code == 3
    assert ended.out == ""
    assert leftovers(out) == []
    return ended.err.replace(str(source), "SOURCE").strip()


def change_index(source: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((source / INDEX).read_text())
    change(index["weight_map"])
    (source / INDEX).write_text(json.dumps(index))


def stray() -> Tensor:
    return Tensor(dtype="U8", shape=(4,), data=b"lost")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    del tensors[UP]
    write_model(tmp_path / "source", llama_config(), tensors)
    assert refusal(tmp_path / "source") == (
        f"error: SOURCE: 1 tensor of the model missing: {UP}\nhint: the checkpoint is incomplete; download it again"
    )


def test_of_many_missing_tensors_five_are_named_and_all_counted(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(num_hidden_layers=5), random_tensors(llama_config()))
    names = [f"model.layers.4.self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")] + [
        "model.layers.4.mlp.gate_proj.weight"
    ]
    assert refusal(tmp_path / "source") == (
        f"error: SOURCE: 9 tensors of the model missing: {', '.join(names)}, ...\n"
        "hint: the checkpoint is incomplete; download it again"
    )


@pytest.mark.parametrize("num_shards", [1, 2])
def test_stray_tensor_is_refused_and_may_be_dropped_by_name(num_shards: int, tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    write_model(tmp_path / "source", llama_config(), tensors | {STRAY: stray()}, num_shards=num_shards)
    assert refusal(tmp_path / "source") == (
        f"error: SOURCE: 1 tensor that LlamaForCausalLM does not have: {STRAY}\n"
        f"hint: weights and config disagree; to leave one behind say --drop {STRAY}"
    )
    ended = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", "--drop", STRAY)
    assert ended.code == 0, ended.err
    rows = reshard("inspect", tmp_path / "out", "--tensors", "--json").json["tensors"]
    assert sorted(row["fqn"] for row in rows) == sorted(tensors)


def test_tensor_of_a_layer_that_the_config_does_not_have_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config()) | {"model.layers.4.mlp.up_proj.weight": stray()}
    write_model(tmp_path / "source", llama_config(), tensors)
    assert refusal(tmp_path / "source").startswith(
        "error: SOURCE: 1 tensor that LlamaForCausalLM does not have: model.layers.4.mlp.up_proj.weight\n"
    )


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors[HEAD] = replace(tensors[HEAD], shape=(80, 8))
    write_model(tmp_path / "source", llama_config(), tensors)
    assert refusal(tmp_path / "source") == (
        "error: SOURCE/model.safetensors: 'lm_head.weight'.shape: expected [40, 16] (config.json), found [80, 8]\n"
        "hint: weights and config disagree; download both from one revision"
    )


def test_untied_head_that_is_not_stored_is_missing(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(tie_word_embeddings=True))
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=False), tensors)
    assert refusal(tmp_path / "source").startswith("error: SOURCE: 1 tensor of the model missing: lm_head.weight\n")


def test_tied_weight_of_which_no_copy_is_stored_is_missing(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    del tensors[EMBEDDING]
    write_model(tmp_path / "source", config, tensors)
    assert refusal(tmp_path / "source").startswith(
        f"error: SOURCE: 2 tensors of the model missing: {EMBEDDING}, {HEAD}\n"
    )


def test_tied_copies_that_differ_are_refused_and_one_may_be_dropped(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(llama_config())
    write_model(tmp_path / "source", config, tensors)
    assert refusal(tmp_path / "source") == (
        f"error: SOURCE/model.safetensors: the config ties {EMBEDDING} and {HEAD}, "
        "and the files store different values for them\n"
        f"hint: set tie_word_embeddings to false to keep both, or say --drop {HEAD}"
    )
    ended = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", "--drop", HEAD)
    assert ended.code == 0, ended.err
    rows = reshard("inspect", tmp_path / "out", "--tensors", "--json").json["tensors"]
    assert {row["fqn"]: row["blake3"] for row in rows}[HEAD] == rows[0]["blake3"]


def test_tied_copies_of_equal_bytes_in_two_dtypes_are_refused(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config, dtypes=["BF16"])
    tensors[HEAD] = replace(tensors[EMBEDDING], dtype="F16")
    write_model(tmp_path / "source", config, tensors)
    assert refusal(tmp_path / "source").startswith(
        f"error: SOURCE/model.safetensors: the config ties {EMBEDDING} and {HEAD}, "
    )


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "source", num_shards=2)
    names = list(tensors)
    write_safetensors(tmp_path / "source" / SHARDS[1], {fqn: tensors[fqn] for fqn in [*names[1::2], names[0]]})
    assert refusal(tmp_path / "source") == (
        f"error: SOURCE/{SHARDS[1]}: '{names[0]}': is in this shard, but {INDEX} puts it in {SHARDS[0]}{OTHERS}"
    )


def test_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=2)
    change_index(tmp_path / "source", lambda weight_map: weight_map.pop(UP))
    assert refusal(tmp_path / "source") == (
        f"error: SOURCE/{SHARDS[1]}: '{UP}': is in this shard, but {INDEX} does not list it{OTHERS}"
    )


def test_tensor_that_its_shard_does_not_hold_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=2)
    change_index(tmp_path / "source", lambda weight_map: weight_map.update({"ghost.weight": SHARDS[0]}))
    assert refusal(tmp_path / "source") == (
        f"error: SOURCE/{INDEX}: weight_map['ghost.weight']: {SHARDS[0]} does not hold this tensor{OTHERS}"
    )


def test_dropping_what_is_not_there_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    assert refusal(tmp_path / "source", "--drop", STRAY) == f"error: --drop: '{STRAY}' is no tensor of the source"


def test_dropping_what_the_model_needs_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    assert refusal(tmp_path / "source", "--drop", UP).startswith(
        f"error: SOURCE: 1 tensor of the model missing: {UP}\n"
        "hint: --drop is for what the model can do without; leave it out"
    )


def test_dropping_from_a_manifest_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "packed").code == 0
    assert refusal(tmp_path / "packed", "--drop", UP) == (
        "error: --drop: a manifest's tensors cannot be dropped\nhint: drop them when packing the source"
    )


def test_refused_source_is_not_touched(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(num_hidden_layers=5), random_tensors(llama_config()))
    before = files_in(tmp_path / "source")
    refusal(tmp_path / "source")
    assert files_in(tmp_path / "source") == before
