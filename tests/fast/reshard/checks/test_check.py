"""`reshard check` finds each planted fault by its code, and nothing in healthy checkpoints of every family."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _TYPES as TORCH

import reshard as api
from manifests.models.adapters import RECORD_NAME
from manifests.safetensors import DTYPE_BITS
from reshard.checks.check import check_values
from reshard.tensors.comparison import Findings
from stores.bundles import TensorAt
from stores.local import LocalFile
from tests.builders import (
    EMBEDDING,
    INDEX,
    Ended,
    Tensor,
    llama_config,
    pack,
    random_tensors,
    read_safetensors,
    reshard,
    write_model,
)
from tests.builders import write_safetensors as write_shard
from tests.fast.manifests.models.built import DECODERS, TINY, build, perturb, read_config
from tests.fast.manifests.models.catalogued import DOZEN, save_tiny
from tests.fast.reshard.forged import change_manifest, change_stage, digest
from tests.fast.reshard.transforms.adapters import write_adapter
from tests.fast.runner.models.decoders import name_as_openai_did, save_decoder
from tests.fast.trained import MOMENTS, read_stage, write_moments, write_trained

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
NORM = "model.norm.weight"
ROOT = Path(__file__).parents[4]
NO_RANKS = "ignore:torch.distributed is disabled:UserWarning"
Change = Callable[[Path], object]


def problems(folder: Path, *flags: object) -> list[tuple[str, str]]:
    """Return the code and the place, below the folder, of each problem that is found."""
    ended = reshard("check", folder, "--json", *map(str, flags))
    assert ended.code == (0 if ended.json["ok"] else 4), ended.err
    assert ended.json["ok"] == (not ended.json["problems"])
    found = [(each["code"], each["where"]) for each in ended.json["problems"]]
    return [(code, where.removeprefix(f"{folder}").removeprefix("/").partition(":")[0]) for code, where in found]


def as_json(ended: Ended) -> list[tuple[str, tuple[str, ...]]]:
    """Return the code and the names of each problem that a run printed."""
    return [(each["code"], tuple(each["names"])) for each in ended.json["problems"]]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def move(name: str, shard: str) -> Change:
    """Return a change of the index, which then says that another shard has a tensor."""
    return lambda folder: edit(folder / INDEX, lambda index: index["weight_map"].update({name: shard}))


def with_config(**changes: Any) -> Change:
    return lambda folder: edit(folder / "config.json", lambda config: config.update(changes))


def with_header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Return a change of the header of the last shard; its data stay."""

    def write(folder: Path) -> None:
        path = folder / SHARDS[2]
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return write


def healthy_tensors() -> dict[str, Tensor]:
    """Return the tensors of a tiny Llama, all of them finite."""
    generator, tensors = torch.Generator().manual_seed(0), random_tensors(llama_config())
    for name, tensor in tensors.items():
        data = torch.randn(tensor.shape, generator=generator).bfloat16().view(torch.uint8)
        tensors[name] = replace(tensor, data=data.numpy().tobytes())
    return tensors


def shards_of() -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each shard as they were written."""
    tensors = healthy_tensors()
    return {shard: {name: tensors[name] for name in list(tensors)[i::3]} for i, shard in enumerate(SHARDS)}


def rewrite(shard: int, change: Callable[[dict[str, Tensor]], object], *, in_index: bool = True) -> Change:
    """Return a change of one shard's tensors, of which the index knows or not."""

    def write(folder: Path) -> None:
        tensors = shards_of()[SHARDS[shard]]
        before = set(tensors)
        change(tensors)
        write_shard(folder / SHARDS[shard], tensors, metadata={"format": "pt"})
        if in_index:
            edit(
                folder / INDEX,
                lambda index: [
                    *(index["weight_map"].pop(name) for name in before - tensors.keys()),
                    index["weight_map"].update(dict.fromkeys(tensors.keys() - before, SHARDS[shard])),
                ],
            )

    return write


def lose_numbers(folder: Path) -> None:
    """Remove a shard from the folder and from the index, as Megatron-Bridge#4188 did with 3 of 48."""
    (folder / SHARDS[1]).unlink()
    edit(folder / INDEX, lambda index: [index["weight_map"].pop(name) for name in shards_of()[SHARDS[1]]])


def add_stray(name: str) -> Change:
    return lambda folder: write_shard(folder / "more.safetensors", {name: next(iter(shards_of()[SHARDS[0]].values()))})


def rename_architecture(folder: Path, **changes: Any) -> None:
    with_config(architectures=["NobodysForCausalLM"], **changes)(folder)


def lose_layer(folder: Path) -> None:
    rename_architecture(folder)
    for number in range(3):
        drop = [name for name in shards_of()[SHARDS[number]] if name.startswith("model.layers.2.")]
        rewrite(number, lambda tensors, drop=drop: [tensors.pop(name) for name in drop])(folder)  # type: ignore[misc]


def spoil(value: float) -> Change:
    """Return a change that puts a value into the norm."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = next(iter(tensors))
        data = torch.full((len(tensors[name].data) // 2,), 1.0, dtype=torch.bfloat16)
        data[3] = value
        tensors[name] = replace(tensors[name], data=data.view(torch.uint8).numpy().tobytes())

    return rewrite(0, change)


def zero(tensors: dict[str, Tensor]) -> None:
    name = next(name for name, tensor in tensors.items() if len(tensor.shape) == 2)
    tensors[name] = replace(tensors[name], data=bytes(len(tensors[name].data)))


def with_tokens(*numbers: int, **added: int) -> Change:
    tokens = [{"id": number, "content": f"<{content}>"} for content, number in added.items()]
    vocabulary = {"model": {"vocab": {str(number): number for number in numbers}}, "added_tokens": tokens}
    return lambda folder: (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


def truncate(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 10)


def edit_index(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: edit(folder / INDEX, change)


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def write(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data)


def add(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: Tensor(dtype="U8", shape=(1,), data=b"1")})


def pop_first(tensors: dict[str, Tensor]) -> None:
    tensors.pop(next(iter(tensors)))


def overlap(header: dict[str, Any]) -> None:
    """Let two tensors of one shape have the same bytes."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    pairs = ((one, other) for one, other in combinations(entries, 2) if one["shape"] == other["shape"])
    one, other = next(pairs)
    other["data_offsets"] = one["data_offsets"]


def name_dtype(header: dict[str, Any]) -> None:
    header[next(name for name in header if name.startswith("model."))]["dtype"] = "F7"


# What is planted, the flags that find it, the code, and the file that is named.
FAULTS: dict[str, tuple[Change, str, str, str]] = {
    "a shard is missing": (remove(SHARDS[1]), "", "check.missing-shard", INDEX),
    "a shard is missing in folder and index": (lose_numbers, "", "check.missing-numbers", INDEX),
    "a shard that the index does not have": (add_stray("x.weight"), "", "check.stray-shard", "more.safetensors"),
    "a stray shard with a tensor of it": (add_stray(NORM), "", "check.override", "more.safetensors"),
    "no index": (remove(INDEX), "", "check.no-index", ""),
    "a single file that transformers does not read": (
        lambda folder: [
            *(path.unlink() for path in folder.glob("model*")),
            write_shard(folder / "model.fp16.safetensors", healthy_tensors()),
        ],
        "", "check.no-index", "model.fp16.safetensors",
    ),
    "files of vLLM's ranks": (
        lambda folder: [path.rename(folder / f"model-rank-{i}-part-0.safetensors")
                        for i, path in enumerate(sorted(folder.glob("model-*")))],
        "", "source.vllm-sharded-state", "model-rank-0-part-0.safetensors",
    ),
    "files of torch's ranks": (
        lambda folder: [folder.joinpath(INDEX).unlink(), *(
            path.rename(folder / f"shard-{i:05d}-model-00001-of-00001.safetensors")
            for i, path in enumerate(sorted(folder.glob("model-*")), start=1)
        )],
        "", "source.layer-slices", "shard-00001-model-00001-of-00001.safetensors",
    ),
    "no weights": (lambda folder: [path.unlink() for path in folder.glob("model*")], "", "check.no-weights", ""),
    "an index without metadata": (edit_index(lambda index: index.pop("metadata")), "", "check.index-metadata", INDEX),
    "an index cut short": (truncate(INDEX), "", "source.not-json", INDEX),
    "an index that leaves the folder": (move(NORM, "../other.safetensors"), "", "source.bad-index", INDEX),
    "a tensor in two shards": (rewrite(1, add(EMBEDDING), in_index=False), "", "check.tensor-twice", SHARDS[1]),
    "a tensor in another shard": (move(EMBEDDING, SHARDS[1]), "", "check.wrong-shard", SHARDS[0]),
    "a tensor that the index lacks": (
        edit_index(lambda index: index["weight_map"].pop(EMBEDDING)), "", "check.unindexed-tensor", SHARDS[0],
    ),
    "a tensor that its shard lacks": (rewrite(0, pop_first, in_index=False), "", "check.absent-tensor", INDEX),
    "a shard cut short": (truncate(SHARDS[2]), "", "header.wrong-data-length", SHARDS[2]),
    "a header that the hub does not read": (
        lambda folder: write_shard(
            folder / SHARDS[2], shards_of()[SHARDS[2]], metadata={"format": "pt", "notes": "x" * 25_000_000}
        ),
        "", "check.long-header", SHARDS[2],
    ),
    "tensors that overlap": (with_header(overlap), "", "header.wrong-offsets", SHARDS[2]),
    "an unknown dtype": (with_header(name_dtype), "", "header.unknown-dtype", SHARDS[2]),
    "a file that is not safetensors": (write(SHARDS[2], b"\xff" * 99), "", "header.not-safetensors", SHARDS[2]),
    "a tensor missing everywhere": (rewrite(0, pop_first), "", "source.missing-tensor", ""),
    "a tensor of another model": (rewrite(0, add("model.more.weight")), "", "source.unknown-tensor", ""),
    "a tensor of another shape": (with_config(intermediate_size=12), "", "source.shape-mismatch", SHARDS[0]),
    "a layer missing in an unknown model": (lose_layer, "", "check.missing-layer", ""),
    "too few layers in an unknown model": (
        lambda folder: rename_architecture(folder, num_hidden_layers=6), "", "check.missing-layer", "",
    ),
    "a tied head with other values": (with_config(tie_word_embeddings=True), "", "check.tied-copy", SHARDS[2]),
    "more tokens than rows": (with_tokens(0, 40), "", "check.vocabulary", "tokenizer.json"),
    "more added tokens than rows": (with_tokens(0, tool=40), "", "check.vocabulary", "tokenizer.json"),
    "no config": (remove("config.json"), "", "check.no-config", "config.json"),
    "a config that is not JSON": (write("config.json", b"{"), "", "source.not-json", "config.json"),
    "NaN": (spoil(float("nan")), "--values", "check.not-finite", SHARDS[0]),
    "infinity": (spoil(float("-inf")), "--values", "check.not-finite", SHARDS[0]),
    "a matrix of zeros": (rewrite(1, zero), "--values", "check.all-zero", SHARDS[1]),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a healthy Llama in three shards."""
    write_model(tmp_path / "model", llama_config(), healthy_tensors(), num_shards=3)
    return tmp_path / "model"


def test_a_token_in_whose_place_an_image_goes_needs_no_row(folder: Path) -> None:
    """As published for Gemma 3 1B."""
    with_tokens(0, image_soft_token=40)(folder)
    assert problems(folder) == []


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str, folder: Path, wording: Callable[[str], None]) -> None:
    change, flags, code, where = FAULTS[name]
    assert problems(folder, *flags.split()) == []
    change(folder)
    assert (code, where) in problems(folder, *flags.split())
    if code.startswith("check."):  # others' messages are compared where they come from
        wording(reshard("check", folder, *flags.split()).out)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", ["100KB", "5GB"])
@pytest.mark.parametrize("name", [*TINY, *DECODERS])
def test_healthy_checkpoint_of_every_family_has_no_problem(name: str, size: str, tied: bool, tmp_path: Path) -> None:
    model = perturb(build(read_config(name, tie_word_embeddings=tied)))
    model.save_pretrained(tmp_path / "model", max_shard_size=size)
    assert problems(tmp_path / "model", "--values") == []


@pytest.mark.parametrize("architecture", DOZEN)
def test_healthy_checkpoint_of_the_catalogue_has_no_problem(architecture: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", architecture)
    assert problems(tmp_path / "model") == []


def test_stacked_biases_of_zeros_as_a_model_is_initialized_with_are_no_problem(tmp_path: Path) -> None:
    build(read_config("tiny-gpt-oss")).save_pretrained(tmp_path / "model")
    assert problems(tmp_path / "model", "--values") == []


def test_gpt2_under_its_old_names_has_no_problem(tmp_path: Path) -> None:
    save_decoder(tmp_path / "model", "tiny-gpt2", tie_word_embeddings=True)
    name_as_openai_did(tmp_path / "model")
    assert problems(tmp_path / "model", "--values") == []


def test_tensor_under_its_old_and_its_new_name_is_there_twice(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_decoder(folder, "tiny-gpt2", tie_word_embeddings=True)
    (path,) = folder.glob("*.safetensors")
    tensors = read_safetensors(path.read_bytes())
    tensors["wte.weight"] = tensors["transformer.wte.weight"]
    write_shard(path, tensors, metadata={"format": "pt"})
    assert problems(folder) == [("check.tensor-twice", path.name)]


def test_other_checkpoint_of_the_same_model_has_no_problem_and_another_one_has(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", llama_config(), healthy_tensors())
    assert problems(folder, "--against", tmp_path / "other", "--bytes") == []
    pack(folder, tmp_path / "packed")
    assert problems(folder, "--against", tmp_path / "packed", "--bytes") == []
    tensors = healthy_tensors()
    tensors["model.more.weight"] = tensors[NORM]
    tensors[EMBEDDING] = replace(tensors[EMBEDDING], data=bytes(reversed(tensors[EMBEDDING].data)))
    tensors[NORM] = replace(tensors[NORM], dtype="F16")
    write_model(tmp_path / "another", llama_config(), tensors)
    against = ("check", folder, "--against", tmp_path / "another", "--json")
    assert as_json(reshard(*against)) == [("check.other-names", ("model.more.weight",)), ("check.other-kind", ())]
    assert [code for code, _ in as_json(reshard(*against, "--bytes"))][2:] == ["check.other-bytes"]
    assert reshard("check", folder, "--bytes", "--json").json["error"]["code"] == "options.conflict"
    (tmp_path / "empty").mkdir()
    nothing = reshard("check", folder, "--against", tmp_path / "empty", "--json")
    assert (nothing.code, nothing.json["error"]["code"]) == (3, "source.nothing-to-compare")


def test_a_place_that_digests_cannot_be_written_to_is_refused_before_anything_is_read(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()  # which would be reported
    (folder / "digests.json").mkdir()
    refused = reshard("check", folder, "--digests", "write", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (3, "output.unwritable")
    assert list((folder / "digests.json").iterdir()) == []


def test_digests_are_written_once_all_is_well_and_name_each_file_that_changes(folder: Path) -> None:
    assert reshard("check", folder, "--digests", "verify", "--json").json["error"]["code"] == "source.no-digests"
    (folder / SHARDS[1]).rename(folder / "away")
    assert reshard("check", folder, "--digests", "write").code == 4
    assert not (folder / "digests.json").exists()
    (folder / "away").rename(folder / SHARDS[1])
    assert problems(folder, "--digests", "write") == []
    assert problems(folder, "--digests", "verify") == []
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "more.txt").write_text("more")
    assert sorted(problems(folder, "--digests", "verify")) == [
        ("check.absent-file", "tokenizer.json"),
        ("check.changed-file", "generation_config.json"),
        ("check.unlisted-file", "more.txt"),
    ]
    (folder / "digests.json").write_text('{"version": 1, "files": {"a": 1}}')
    assert reshard("check", folder, "--digests", "verify", "--json").json["error"]["code"] == "source.bad-digests"


def test_values_of_optimizer_state_are_read(tmp_path: Path) -> None:
    trained, name = write_trained(tmp_path, "pp=2"), "model.norm.weight"
    for stage in (0, 1):
        tensors = read_stage(trained, stage)
        zeros = {fqn: replace(tensor, data=bytes(len(tensor.data))) for fqn, tensor in tensors.items()}
        for moment in MOMENTS:
            write_moments(trained, stage, moment, zeros)
    assert problems(trained, "--values") == []
    zeros[name] = replace(zeros[name], data=struct.pack("<16f", *[0] * 15, float("nan")))
    write_moments(trained, 1, MOMENTS[0], zeros)
    assert problems(trained) == []
    assert problems(trained, "--values") == [("check.not-finite", f"stage-001/{MOMENTS[0]}/model.safetensors")]


def test_values_of_adapters_alone_are_read(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=1")
    halves = [f"model.layers.0.mlp.up_proj.lora_{half}.weight" for half in "AB"]
    zeros = Tensor(dtype="F32", shape=(2, 2), data=bytes(16))
    ones = replace(zeros, data=struct.pack("<4f", *[1] * 4))
    spoiled = replace(zeros, data=struct.pack("<4f", 1, 1, 1, float("nan")))
    record = {"path": RECORD_NAME, "nbytes": 2, "digest": digest(b"{}")}
    (trained / RECORD_NAME).write_text("{}")
    change_manifest(trained, lambda document: document["files"].append(record))

    def values_of(a: Tensor, b: Tensor) -> list[tuple[str, str]]:
        def change(tensors: dict[str, Tensor]) -> None:
            tensors.clear()
            tensors.update(zip(halves, (a, b), strict=True))

        change_stage(trained, 0, change)
        for moment in MOMENTS:
            write_moments(trained, 0, moment, dict(zip(halves, (zeros, zeros), strict=True)))
        return problems(trained, "--values")

    path = "model-00001-of-00001.safetensors"
    assert values_of(ones, zeros) == []
    assert values_of(ones, spoiled) == [("check.not-finite", path)]
    assert values_of(zeros, ones) == [("check.all-zero", path)]


def test_packed_folder_is_checked_by_its_manifest(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack(folder, packed)
    assert problems(packed, "--values") == []
    truncate("model-00002-of-00002.safetensors")(packed)
    assert problems(packed) == [("check.manifest", "model-00002-of-00002.safetensors")]
    (packed / "manifest.json").write_text("{}")
    assert [place for _, place in problems(packed)] == ["manifest.json"]


def test_peft_folder_is_no_model_and_is_told_how_it_becomes_one(tmp_path: Path) -> None:
    ended = reshard("check", write_adapter(tmp_path / "adapter"), "--json")
    (problem,) = ended.json["problems"]
    assert (ended.code, problem["code"], problem["where"]) == (4, "source.no-config", f"{tmp_path}/adapter/config.json")
    assert f"reshard merge BASE {tmp_path}/adapter" in problem["hint"]


def test_names_from_files_neither_control_the_terminal_nor_forge_the_verdict(tmp_path: Path) -> None:
    name = "w\x1b[2J\nok: no problem found\x9b1m"
    for folder, data in (("a", b"1"), ("b", b"2")):
        more = {name: Tensor(dtype="U8", shape=(1,), data=data)}
        write_model(tmp_path / folder, llama_config(), healthy_tensors() | more)
    text = reshard("check", tmp_path / "a").out
    assert text.replace("\n", "").isprintable()
    assert [line.partition(":")[0] for line in text.splitlines()] == [str(tmp_path / "a"), "  hint", "FAILED"]


def test_numbers_in_hostile_names_cost_no_memory(tmp_path: Path) -> None:
    one = Tensor(dtype="U8", shape=(1,), data=b"1")
    names = ["layers.99999999999.w", f"layers.{'9' * 5000}.w", "layers.999999999.w", "1." * 50_000 + "w"]
    folder = tmp_path / "model"
    folder.mkdir()
    for number, shard in ((1, "model-00001-of-999999999.safetensors"), (2, f"model-{'0' * 100}1-of-00002.safetensors")):
        write_shard(folder / shard, {f"{number}.{name}": one for name in names})
    found = reshard("check", folder, "--json")
    missing = {each["code"]: each for each in found.json["problems"]}
    assert missing.keys() == {"check.no-index", "check.no-config", "check.missing-layer", "check.missing-numbers"}
    assert len(missing["check.missing-layer"]["names"]) == 1000
    assert missing["check.missing-layer"]["names"][0] == "2.layers.0"
    assert missing["check.missing-numbers"]["names"][0] == "model-00002-of-999999999.safetensors"


@pytest.mark.filterwarnings(NO_RANKS)
def test_folder_of_torch_dcp_is_checked_by_its_metadata(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"weight": torch.ones(4, 8), "bias": torch.ones(8)}, "step": 3}
    folder = tmp_path / "step-3"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    ended = reshard("check", folder, "--json")
    assert (ended.code, ended.json["kind"], ended.json["num_tensors"], ended.json["num_files"]) == (0, "dcp", 2, 1)
    (part,) = folder.glob("*.distcp")
    os.truncate(part, part.stat().st_size - 1)
    assert problems(folder) == [("check.truncated-file", part.name)]
    part.unlink()
    assert problems(folder) == [("check.missing-shard", part.name)]
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert [code for code, _ in problems(folder)] == ["source.bad-dcp-metadata"]
    assert not Path("ran").exists()


def with_chunks(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], object]:
    """Return a change of the chunks of a 4 x 8 weight: the offsets and sizes of each."""

    def change(metadata: Any) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        weight = metadata.state_dict_metadata["weight"]
        weight.chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin, sizes in chunks]

    return change


@pytest.mark.filterwarnings(NO_RANKS)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda metadata: metadata.storage_data.pop(next(iter(metadata.storage_data))), "check.absent-item"),
        (lambda metadata: metadata.state_dict_metadata["weight"].chunks.pop(), "check.uncovered-tensor"),
        (
            lambda metadata: [setattr(info, "offset", n) for n, info in enumerate(metadata.storage_data.values())],
            "check.overlapping-items",
        ),
        (with_chunks(((0,), (4, 8))), "check.uncovered-tensor"),  # other numbers of dimensions
        (with_chunks(((0, 0), (32,))), "check.uncovered-tensor"),
        (with_chunks(((0, 0), (4, 9))), "check.uncovered-tensor"),  # beyond the shape
        (with_chunks(((2, 0), (4, 8))), "check.uncovered-tensor"),  # as many elements as the tensor has
        (with_chunks(((0, 0), (2, 8)), ((3, 0), (1, 8))), "check.uncovered-tensor"),  # a gap
        (with_chunks(((0, 0), (3, 8)), ((2, 0), (2, 8))), "check.uncovered-tensor"),  # an overlap
        (with_chunks(((0,) * 65, (1,) * 65)), "source.bad-dcp-metadata"),
        (
            lambda metadata: [setattr(info, "offset", 10**5000) for info in metadata.storage_data.values()],
            "source.bad-dcp-metadata",
        ),
        (lambda metadata: metadata.state_dict_metadata.update({1: 2}), "source.bad-dcp-metadata"),
    ],
)
def test_fault_of_dcp_metadata_is_found(change: Callable[[Any], object], code: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(4, 8), "bias": torch.ones(8)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert code in [found for found, _ in problems(tmp_path / "dcp")]


def test_check_from_python_returns_findings_and_imports_no_torch(folder: Path) -> None:
    result = api.check(folder)
    assert (result.ok, result.kind, result.num_files, result.findings) == (True, "huggingface", 3, ())
    (folder / SHARDS[1]).unlink()
    assert [finding.code for finding in api.check(folder).findings] == ["check.missing-shard"]
    code = f"import sys, reshard; reshard.check({str(folder)!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# `check --values` reads every dtype of safetensors that has fractions; torch's values are the oracle.


WHOLE = ("I", "U", "BOOL")  # dtypes that have neither NaN nor infinity, and matrices of zeros that mean something
NUM_BYTES = 24


def codes(path: Path, dtype: str, data: bytes) -> list[str]:
    path.write_bytes(data)
    count = len(data) * 8 // DTYPE_BITS[dtype]
    findings = Findings()
    tensor = TensorAt("w", dtype, (count // 2, 2), LocalFile(path), 0, len(data))
    counts: list[int] = []
    check_values([tensor], findings, counts.append)
    read_nbytes = sum(counts)
    assert read_nbytes == (0 if dtype.startswith(WHOLE) else len(data))
    return [found.code for found in findings]


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_with_fractions_is_read(dtype: str, tmp_path: Path) -> None:
    zeros = codes(tmp_path / "zeros", dtype, bytes(NUM_BYTES))
    assert zeros == ([] if dtype.startswith(WHOLE) or dtype == "F8_E8M0" else ["check.all-zero"])
    assert codes(tmp_path / "ones", dtype, b"\x01" * NUM_BYTES) == []


@pytest.mark.parametrize("dtype", [name for name in TORCH if not name.startswith(WHOLE)])
def test_every_pattern_is_broken_where_torch_says_so(dtype: str, tmp_path: Path) -> None:
    width = DTYPE_BITS[dtype] // 8
    for high in range(256) if width == 1 else (0, 0x3F, 0x7B, 0x7C, 0x7F, 0x80, 0xFC, 0xFF):
        for low in (0, 1, 0x7F, 0x80, 0xF0) if width > 1 else (0,):
            data = bytes([low]) * (width - 1) + bytes([high])
            value = torch.frombuffer(bytearray(data), dtype=TORCH[dtype])
            whole = value if dtype in ("C64", "F64") else value.float()
            found = codes(tmp_path / "one", dtype, data + b"\x01" * width)
            assert found == ([] if bool(torch.isfinite(whole).all()) else ["check.not-finite"]), data
