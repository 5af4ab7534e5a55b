"""export: the source's own files where nothing changed, honest new ones where training or --drop did."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors import safe_open

from tests.builders import (
    EMBEDDING,
    HEAD,
    INDEX,
    Tensor,
    files_in,
    header_of,
    llama_config,
    random_tensors,
    reshard,
    run,
    tensors_in,
    write_model,
    write_safetensors,
)
from tests.fast.reshard.forged import change_manifest, change_stage

STRAY = "model.layers.1.mlp.side_proj.weight"
INV_FREQ = "model.layers.1.self_attn.rotary_emb.inv_freq"
AS_TRAINED = ("--dtype", "fp32")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def pack(source: Path, *args: str, layout: str = "pp=2") -> Path:
    out = source.parent / "out"
    run("pack", source, "--layout", layout, "--out", out, *args)
    return out


def export(out: Path, *args: str) -> Path:
    exported = out.parent / "exported"
    run("export", out, "--to", "hf", "--out", exported, *args)
    return exported


def train(out: Path, *, lose: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Change every tensor to other values in F32 and lose some, as training does, and give them by name."""
    trained: dict[str, Tensor] = {}

    def step(tensors: dict[str, Tensor]) -> None:
        for name in lose:
            tensors.pop(name, None)
        for name, tensor in tensors.items():
            data = bytes(len(name) for _ in range(4 * prod(tensor.shape)))
            tensors[name] = replace(tensor, dtype="F32", data=data)
            if name == HEAD and EMBEDDING in trained:
                tensors[name] = trained[EMBEDDING]
        trained.update(tensors)

    for index in range(len(json.loads((out / "manifest.json").read_text())["stages"])):
        change_stage(out, index, step)
    change_manifest(out, lambda document: document.update(training={"step": 3, "num_tokens": 96}))
    assert reshard("verify", out).code == 0, reshard("verify", out).out
    return trained


def test_trained_weights_are_exported_in_the_files_and_the_order_of_the_source(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=2)
    out = pack(tmp_path / "source")
    trained = train(out)
    exported = export(out, *AS_TRAINED)
    assert tensors_in(exported) == trained
    for shard in SHARDS:
        with safe_open(tmp_path / "source" / shard, "np") as before, safe_open(exported / shard, "np") as after:
            assert after.keys() == before.keys()
            assert after.metadata() == before.metadata() == {"format": "pt"}
    before, after = (json.loads((folder / INDEX).read_text()) for folder in (tmp_path / "source", exported))
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"] == {"total_size": 2 * before["metadata"]["total_size"]}
    same = {"config.json", "generation_config.json", "tokenizer.json"}
    assert {name for name, data in files_in(tmp_path / "source").items() if files_in(exported)[name] == data} == same


def test_trained_weights_reshard_and_export_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=2)
    out = pack(tmp_path / "source")
    train(out)
    exported = files_in(export(out, *AS_TRAINED))
    assert reshard("pack", out, "--layout", "pp=3", "--out", tmp_path / "three").code == 0
    training = json.loads((tmp_path / "three/manifest.json").read_text())["training"]
    assert (training["step"], training["num_tokens"]) == (3, 96)
    ended = reshard("export", tmp_path / "three", "--to", "hf", "--out", tmp_path / "again", *AS_TRAINED)
    assert ended.out.startswith("exported 6 files, ")
    assert "(new headers: " in ended.out
    assert files_in(tmp_path / "again") == exported


@pytest.mark.parametrize("layout", ["pp=1", "pp=2", "pp=2,style=v"])
def test_trained_tied_weight_is_exported_under_both_names_that_the_source_stored(layout: str, tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(tie_word_embeddings=True))
    tensors[HEAD] = tensors[EMBEDDING]
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True), tensors)
    out = pack(tmp_path / "source", layout=layout)
    trained = train(out, lose=(HEAD,) if layout == "pp=1" else ())
    found = tensors_in(export(out, *AS_TRAINED))
    assert found == {**trained, HEAD: trained[EMBEDDING]}


def test_tensors_that_the_model_recomputes_do_not_outlive_training(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config()) | {INV_FREQ: Tensor(dtype="F32", shape=(2,), data=b"rotating")}
    write_model(tmp_path / "source", llama_config(), tensors, num_shards=2)
    out = pack(tmp_path / "source")
    trained = train(out, lose=(INV_FREQ,))
    exported = export(out, *AS_TRAINED)
    assert tensors_in(exported) == trained
    assert INV_FREQ not in json.loads((exported / INDEX).read_text())["weight_map"]
    assert reshard("plan", exported, "--layout", "pp=2").code == 0


@pytest.mark.parametrize(("dropped", "kept"), [(True, {}), (False, {"total_parameters": 7})])
def test_index_keeps_a_count_of_parameters_as_long_as_its_tensors(
    dropped: bool, kept: dict[str, int], tmp_path: Path
) -> None:
    tensors = random_tensors(llama_config(), dtypes=["F32"]) | {STRAY: Tensor(dtype="U8", shape=(4,), data=b"lost")}
    if not dropped:
        del tensors[STRAY]
    write_model(tmp_path / "source", llama_config(), tensors, num_shards=2)
    index = json.loads((tmp_path / "source" / INDEX).read_text())
    index["metadata"]["total_parameters"] = 7  # transformers 5 counts
    (tmp_path / "source" / INDEX).write_text(json.dumps(index))
    out = pack(tmp_path / "source", *(("--drop", STRAY) if dropped else ()))
    total = sum(len(tensor.data) // 2 for name, tensor in tensors.items() if name != STRAY)
    exported = export(out, "--dtype", "bf16")
    assert json.loads((exported / INDEX).read_text())["metadata"] == {**kept, "total_size": total}


@pytest.mark.parametrize("change", ["none", "values", "dtype"])
def test_digests_in_headers_of_the_source_do_not_outlive_the_bytes_that_they_are_of(
    change: str, tmp_path: Path
) -> None:
    tensors = random_tensors(llama_config(), dtypes=["F32"])
    digests = " ".join(blake3(tensor.data).hexdigest() for tensor in tensors.values())
    write_model(tmp_path / "source", llama_config(), tensors)
    metadata = {"format": "pt", "blake3": digests}  # as `reshard delta apply` writes it
    write_safetensors(tmp_path / "source/model.safetensors", tensors, metadata=metadata)
    out = pack(tmp_path / "source")
    if change == "values":
        train(out)
    exported = export(out, *(("--dtype", "bf16") if change == "dtype" else ())) / "model.safetensors"
    with safe_open(exported, framework="numpy") as file:
        assert file.metadata() == (metadata if change == "none" else {"format": "pt"})
    is_same = exported.read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()
    assert is_same == (change == "none")


def test_shard_of_which_everything_was_dropped_is_not_exported(tmp_path: Path) -> None:
    stray = Tensor(dtype="U8", shape=(4,), data=b"lost")
    write_model(tmp_path / "source", num_shards=2)
    write_safetensors(tmp_path / "source" / "stray.safetensors", {STRAY: stray})
    index = json.loads((tmp_path / "source" / INDEX).read_text())
    index["weight_map"][STRAY] = "stray.safetensors"
    (tmp_path / "source" / INDEX).write_text(json.dumps(index))
    exported = export(pack(tmp_path / "source", "--drop", STRAY))
    assert sorted(path.name for path in exported.glob("*.safetensors")) == list(SHARDS)
    for shard in SHARDS:
        assert (exported / shard).read_bytes() == (tmp_path / "source" / shard).read_bytes()
    assert reshard("plan", exported, "--layout", "pp=2").code == 0


# As transformers, Mistral, Meta and OpenAI put them beside a model's shards.
OTHER_WEIGHTS = (
    "consolidated.safetensors",
    "pytorch_model.bin",
    "rust_model.ot",
    "original/consolidated.00.pth",
    "original/model.safetensors",
)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_weights_in_other_formats_are_left_out_by_name(num_shards: int, tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=num_shards)
    (tmp_path / "source" / "original").mkdir()
    for name in OTHER_WEIGHTS:
        (tmp_path / "source" / name).write_bytes(b"the same weights once more")
    packed = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out")
    assert [line.split()[2] for line in packed.err.splitlines()] == list(OTHER_WEIGHTS)
    left_out = json.loads((tmp_path / "out/manifest.json").read_text())["source"]["left_out"]
    assert left_out == list(OTHER_WEIGHTS)
    assert files_in(tmp_path / "source").keys() - files_in(export(tmp_path / "out")).keys() == set(left_out)


def test_header_that_lists_tensors_in_another_order_than_their_bytes_comes_back(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "source")
    order = sorted(tensors, key=lambda fqn: fqn[::-1])
    write_safetensors(tmp_path / "source" / "model.safetensors", tensors, data_order=order, padding=3)
    assert list(header_of(tensors, data_order=order)) != order
    assert files_in(export(pack(tmp_path / "source"))) == files_in(tmp_path / "source")
