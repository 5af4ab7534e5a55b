"""Law 9: bad input is refused with its code and place and exit code 3, and nothing is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.builders import INDEX, files_in, leftovers, llama_config, pack, refusal, reshard, write_model
from tests.fast.reshard.forged import change_manifest, digest

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """A source spoiled in one way, and the code and the place of its error; the place begins with the source's path."""

    name: str
    spoil: Callable[[Path], object]
    found: tuple[str, str]
    num_shards: int = 1


def config(**changes: object) -> Callable[[Path], object]:
    return lambda source: (source / "config.json").write_text(json.dumps(llama_config(**changes)))


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda source: (source / name).write_text(content)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Rewrite the header of the single shard, and leave its data."""

    def spoil(source: Path) -> None:
        file = (source / SINGLE).read_bytes()
        begin = 8 + int.from_bytes(file[:8], "little")
        table = json.loads(file[8:begin])
        change(table)
        raw = json.dumps(table).encode()
        (source / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw + file[begin:])

    return spoil


def index(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def spoil(source: Path) -> None:
        document = json.loads((source / INDEX).read_text())
        change(document)
        (source / INDEX).write_text(json.dumps(document))

    return spoil


def sliced(table: dict[str, Any]) -> None:
    """Say of each tensor that there is another half, as a shard of a training checkpoint does."""
    whole = {name: {"saved_offsets": [0] * len(entry["shape"]), "shape": [2 * size for size in entry["shape"]]}
             for name, entry in table.items() if name != "__metadata__"}  # fmt: skip
    table["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(whole)}


def sliced_by_torch(table: dict[str, Any]) -> None:
    """Say of each tensor that there are rows before it, as torch's HuggingFaceStorageWriter does."""
    offsets = {name: {"saved_offsets": [4, *[0] * (len(entry["shape"]) - 1)]}
               for name, entry in table.items() if name != "__metadata__"}  # fmt: skip
    table["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


RANK = "model-rank-0-part-0.safetensors"
RANK_OF_TORCH = "shard-00001-model-00001-of-00001.safetensors"
CASES = (
    Bad(name="no config", spoil=lambda source: (source / "config.json").unlink(),
        found=("source.no-config", "/config.json")),
    Bad(name="unknown architecture", spoil=config(architectures=["OtherForCausalLM"]),
        found=("config.unsupported-architecture", "/config.json: architectures")),
    Bad(name="config without a size", spoil=config(hidden_size=None),
        found=("config.invalid-field", "/config.json: hidden_size")),
    Bad(name="no weights", spoil=lambda source: (source / SINGLE).unlink(), found=("source.no-shards", "")),
    Bad(name="weights in another format alone", spoil=lambda source: (source / SINGLE).rename(source / "model.bin"),
        found=("source.no-shards", "")),
    Bad(name="slices", spoil=header(sliced),
        found=("source.layer-slices", f"/{SINGLE}: 'model.embed_tokens.weight'")),
    Bad(name="slices of torch", spoil=header(sliced_by_torch),
        found=("source.layer-slices", f"/{SINGLE}: 'model.embed_tokens.weight'")),
    Bad(name="shards without an index", spoil=lambda source: (source / INDEX).unlink(), num_shards=2,
        found=("source.no-index", "")),
    Bad(name="a single file of another name",
        spoil=lambda source: (source / SINGLE).rename(source / "model.fp16.safetensors"),
        found=("source.no-index", "")),
    Bad(name="files of vLLM's ranks", spoil=lambda source: (source / SINGLE).rename(source / RANK),
        found=("source.vllm-sharded-state", f"/{RANK}")),
    Bad(name="files of torch's ranks", spoil=lambda source: (source / SINGLE).rename(source / RANK_OF_TORCH),
        found=("source.layer-slices", f"/{RANK_OF_TORCH}")),
    Bad(name="files of vLLM's ranks beside the model's index", num_shards=2,
        spoil=lambda source: [(source / name).rename(source / f"model-pp-0-tp-{i}-part-0.safetensors")
                              for i, name in enumerate(SHARDS)],
        found=("source.vllm-sharded-state", "/model-pp-0-tp-0-part-0.safetensors")),
    Bad(name="index names a missing shard", spoil=lambda source: (source / SHARDS[1]).unlink(), num_shards=2,
        found=("source.missing-shard", f"/{INDEX}: weight_map")),
    Bad(name="index of former shards beside a single file",
        spoil=lambda source: [(source / name).unlink() for name in SHARDS] and (source / SINGLE).write_bytes(b""),
        num_shards=2, found=("source.missing-shard", f"/{INDEX}: weight_map")),
    Bad(name="stray shard", spoil=lambda source: (source / "adapter.safetensors").write_bytes(b""), num_shards=2,
        found=("source.stray-shard", "/adapter.safetensors")),
    Bad(name="stray shard beside a single file", spoil=lambda source: (source / "a.safetensors").write_bytes(b""),
        found=("source.no-index", "")),
    Bad(name="index without a map", spoil=index(lambda document: document.pop("weight_map")), num_shards=2,
        found=("source.bad-index", f"/{INDEX}: weight_map")),
    Bad(name="dangling link", spoil=lambda source: (source / "notes.md").symlink_to("gone"),
        found=("store.not-a-file", "/notes.md")),
    Bad(name="linked folder", spoil=lambda source: (source / "original").symlink_to(source.parent),
        found=("source.linked-folder", "/original")),
    Bad(name="name of ours", spoil=lambda source: (source / "source.json").touch(),
        found=("source.reserved-name", "/source.json")),
    *(
        Bad(name=f"name {name}", spoil=text(name, "notes"), found=("source.reserved-name", f"/{name}"))
        for name in (".journal", "adapter.json", ".reshard-unfinished", ".config.json.partial")
    ),
    Bad(name="name that a manifest cannot contain", spoil=lambda source: (source / "a\nb").touch(),
        found=("source.bad-file-name", "/a\nb")),
)  # fmt: skip


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_bad_source_is_refused_and_leaves_nothing(bad: Bad, tmp_path: Path, wording: Callable[[str], None]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_model(source, num_shards=bad.num_shards)
    bad.spoil(source)
    refused = refusal("pack", source, "--layout", "pp=2", "--out", out)
    code, where = bad.found
    assert refused.found == (3, code, f"{source}{where}")
    assert leftovers(out) == []
    is_repeated = bad.name.startswith("name .") and bad.name != "name .journal"
    if (
        code.startswith("source.") and code != "source.not-json" and not is_repeated
    ):  # others are of manifests and stores
        wording(refused.text)


@pytest.mark.parametrize("name", ["none", f"source/{SINGLE}"])
def test_source_that_is_no_folder_is_refused(name: str, tmp_path: Path, wording: Callable[[str], None]) -> None:
    write_model(tmp_path / "source")
    refused = refusal("pack", tmp_path / name, "--layout", "pp=2", "--out", tmp_path / "out")
    assert refused.found == (3, "source.not-a-folder", f"{tmp_path}/{name}")
    wording(refused.text)
    assert leftovers(tmp_path / "out") == []


def test_output_that_exists_is_refused_and_kept(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for flags, code in (((), "output.exists"), (("--force",), "output.not-ours")):
        refused = refusal("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", *flags)
        assert refused.found == (3, code, f"{tmp_path}/out")
        assert files_in(tmp_path / "out") == {"thesis.tex": b"years of work"}
        assert leftovers(tmp_path / "out") == ["out"]


@pytest.mark.parametrize("name", [".journal", ".tokenizer.json.partial"])
def test_manifest_with_a_file_that_a_pack_would_lose_is_refused(
    name: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    write_model(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "old")
    (tmp_path / "old" / name).write_bytes(b"notes")
    file = {"path": name, "nbytes": 5, "digest": digest(b"notes")}
    change_manifest(tmp_path / "old", lambda document: document["files"].insert(0, file))
    assert reshard("verify", tmp_path / "old").code == 0
    for command in (("pack", tmp_path / "old"), ("export", tmp_path / "old", "--to", "hf")):
        refused = refusal(*command, "--out", tmp_path / "new")
        assert refused.found == (3, "source.reserved-name", f"{tmp_path}/old/{name}")
    if name == ".journal":
        wording(refused.text)
    assert leftovers(tmp_path / "new") == []


ODD = os.fsdecode(b"x\xff")


def rename_model(place: Path) -> Path:
    write_model(place / ODD)
    return place / ODD


def rename_parent(place: Path) -> Path:
    write_model(place / ODD / "source")
    return place / ODD / "source"


def add_weights(place: Path) -> Path:
    write_model(place / "source")
    (place / "source" / f"{ODD}.bin").touch()  # left out, and named in the manifest
    return place / "source"


def rename_manifest(place: Path) -> Path:
    write_model(place / "source")
    pack(place / "source", place / "packed")
    (place / "packed").rename(place / ODD)
    return place / ODD


@pytest.mark.parametrize("make", [rename_model, rename_parent, add_weights, rename_manifest])
def test_source_that_a_manifest_could_not_name_is_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path)
    asked = ("pack", source, "--layout", "pp=1", "--out", tmp_path / "out")
    for flags in ((), ("--virtual",), ("--part", "1/2"), ("--dry-run",)):
        refused = refusal(*asked, *flags)
        assert refused.found[:2] == (3, "store.invalid-name")
        assert ODD in refused.found[2]
    assert not any("out" in path.name for path in tmp_path.iterdir())


def test_manifest_that_was_moved_to_such_a_place_is_verified_and_exported(tmp_path: Path) -> None:
    packed = rename_manifest(tmp_path)
    assert reshard("verify", packed, "--json").json["equal"] is True
    assert reshard("export", packed, "--to", "hf", "--out", tmp_path / "exported").code == 0
    assert files_in(tmp_path / "exported") == files_in(tmp_path / "source")


@pytest.mark.parametrize("verb", ["pack", "export"])
def test_output_of_such_a_name_is_refused(verb: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    given = (tmp_path / "packed", "--to", "hf") if verb == "export" else (tmp_path / "source", "--layout", "pp=2")
    assert refusal(verb, *given, "--out", tmp_path / ODD).found == (2, "options.not-utf8", "--out")
    assert not (tmp_path / ODD).exists()
