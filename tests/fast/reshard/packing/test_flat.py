"""A packed folder is a Hugging Face folder: each tensor of the model once, in the root, with an index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from manifests.index import INDEX_NAME
from manifests.paths import shard_path
from stores.open import open_manifest
from tests.builders import (
    EMBEDDING,
    HEAD,
    files_in,
    llama_config,
    llama_shapes,
    pack,
    random_tensors,
    read_safetensors,
    reshard,
    write_model,
)
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained

GOLDEN = Path(__file__).parents[3] / "data" / "golden"
SOURCE = GOLDEN / "source-of-packed-v1"
NORM = "model.norm.weight"


def weight_map(folder: Path) -> dict[str, str]:
    document = json.loads((folder / INDEX_NAME).read_bytes())
    assert document.keys() == {"metadata", "weight_map"}
    return dict(document["weight_map"])


def in_root(folder: Path) -> dict[str, set[str]]:
    """Return the names that the `safetensors` library finds in each file of the root."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            found[path.name] = set(file.keys())
    return found


@pytest.mark.parametrize("layout", ["pp=1", "pp=2", "pp=3", "pp=2,vpp=2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("most", ["45GB", "2KB", "1B"])
def test_the_root_has_every_tensor_of_the_model_once_as_the_index_says(
    layout: str, tied: bool, most: str, tmp_path: Path
) -> None:
    tensors = write_model(tmp_path / "source", llama_config(tie_word_embeddings=tied), num_shards=2)
    out = pack(tmp_path / "source", tmp_path / "out", layout, "--max-shard-size", most)
    files = in_root(out)
    assert sorted(files) == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert weight_map(out) == {fqn: name for name, fqns in files.items() for fqn in fqns}
    assert sum(map(len, files.values())) == len(tensors) == len(weight_map(out))
    total = json.loads((out / INDEX_NAME).read_bytes())["metadata"]["total_size"]
    assert total == sum(len(tensor.data) for tensor in tensors.values())
    assert reshard("verify", out).code == 0


@pytest.mark.parametrize("most", ["45GB", "3KB", "1B"])
def test_shards_of_a_stage_are_consecutive_and_no_larger_than_asked(most: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    manifest = open_manifest(pack(tmp_path / "source", tmp_path / "out", "pp=4", "--max-shard-size", most)).manifest
    of_stages = [[shard.path for shard in stage.shards] for stage in manifest.stages]
    assert [path for paths in of_stages for path in paths] == sorted(shard.path for shard in manifest.shards)
    assert all(of_stages)
    assert (max(map(len, of_stages)) > 1) == (most != "45GB")
    if most == "3KB":  # more than the largest tensor
        for shards in of_stages:
            for path in shards:
                tensors = read_safetensors((tmp_path / "out" / path).read_bytes())
                assert sum(len(tensor.data) for tensor in tensors.values()) <= 3 << 10


def test_tied_replica_of_another_stage_is_in_that_stages_folder_and_not_in_the_index(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "source", llama_config(tie_word_embeddings=True))
    out = pack(tmp_path / "source", tmp_path / "out")
    replicas = "stage-001/tied/model.safetensors"
    assert [shard.path for shard in open_manifest(out).manifest.stages[1].shards] == [
        "model-00002-of-00002.safetensors", replicas
    ]  # fmt: skip
    assert read_safetensors((out / replicas).read_bytes()) == {HEAD: tensors[EMBEDDING]}
    assert HEAD not in weight_map(out)


def test_replica_that_the_source_stores_too_is_in_the_index_once(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(llama_config())
    tensors[HEAD] = tensors[EMBEDDING]
    write_model(tmp_path / "source", config, tensors)
    out = pack(tmp_path / "source", tmp_path / "out")
    assert weight_map(out).keys() == tensors.keys() - {HEAD}
    assert reshard("verify", out).code == 0
    assert reshard("export", out, "--to", "hf", "--out", tmp_path / "again").code == 0
    assert files_in(tmp_path / "again") == files_in(tmp_path / "source")


def test_optimizer_state_is_in_folders_of_the_stages(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2", tie_word_embeddings=True)
    out = pack(trained, tmp_path / "out", "pp=3", "--max-shard-size", "2KB")
    manifest = open_manifest(out).manifest
    moments = {shard.path for shard in manifest.shards if shard.holds != "weights"}
    assert all(path.startswith(("stage-000/exp_avg", "stage-001/exp_avg", "stage-002/exp_avg")) for path in moments)
    of_first = [path for path in moments if path.startswith("stage-000/exp_avg/")]
    assert shard_path(0, "exp_avg", number=0, of=len(of_first)) in of_first
    assert len(of_first) > 1
    assert set(weight_map(out).values()) == set(in_root(out))
    assert reshard("verify", out).code == 0


def test_virtual_bundles_and_those_beside_them_get_no_index_and_the_command_says_so(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=2)
    for args, folders in ((("--virtual",), set()), (("--stages", "1-2"), {"stage-001", "stage-002"})):
        packed = reshard("pack", tmp_path / "source", "--layout", "pp=4", *args, "--out", tmp_path / "out", "--force")
        assert f"without {INDEX_NAME}" in packed.out
        assert not list((tmp_path / "out").glob("model*"))
        assert {path.name for path in (tmp_path / "out").glob("stage-*")} == folders
        assert reshard("verify", tmp_path / "out").code == 0
    all_of_them = reshard(
        "pack", tmp_path / "source", "--layout", "pp=4", "--stages", "0-3", "--out", tmp_path / "out", "--force"
    )
    assert f"without {INDEX_NAME}" not in all_of_them.out
    assert len(weight_map(tmp_path / "out")) == len(llama_shapes(llama_config()))


def test_slices_get_no_index_unless_they_are_merged(tmp_path: Path) -> None:
    sliced = write_trained(tmp_path, "pp=2")
    cut_up(sliced, CUTS["rows"])
    copied = reshard("pack", sliced, "--layout", "pp=1", "--out", tmp_path / "copied")
    assert f"without {INDEX_NAME}" in copied.out
    assert not list((tmp_path / "copied").glob("model*"))
    merged = pack(sliced, tmp_path / "merged", "pp=1", "--merge-slices")
    assert weight_map(merged).keys() == llama_shapes(llama_config()).keys()


def _missing(document: dict[str, Any]) -> None:
    del document["weight_map"][NORM]


def _moved(document: dict[str, Any]) -> None:
    document["weight_map"][NORM] = "model-00001-of-00002.safetensors"


def _unknown(document: dict[str, Any]) -> None:
    document["weight_map"]["model.extra.weight"] = "model-00002-of-00002.safetensors"


def _total(document: dict[str, Any]) -> None:
    document["metadata"]["total_size"] += 1


def _no_metadata(document: dict[str, Any]) -> None:
    del document["metadata"]


@pytest.mark.parametrize(
    ("change", "where", "stages"),
    [
        (_missing, "weight_map", [1]),
        (_moved, "weight_map", [0, 1]),
        (_unknown, "weight_map", [1]),
        (_total, "metadata.total_size", []),
        (_no_metadata, "metadata.total_size", []),
    ],
)
def test_verify_refuses_an_index_that_disagrees_with_the_manifest(
    change: Callable[[dict[str, Any]], object], where: str, stages: list[int], tmp_path: Path
) -> None:
    write_model(tmp_path / "source")
    index = pack(tmp_path / "source", tmp_path / "out") / INDEX_NAME
    document = json.loads(index.read_bytes())
    change(document)
    index.write_text(json.dumps(document))
    found = reshard("verify", tmp_path / "out", "--json")
    assert (found.code, [each["where"] for each in found.json["differences"]]) == (4, [f"{index}: {where}"])
    of_stages = [reshard("verify", tmp_path / "out", "--stage", str(stage)).code for stage in (0, 1)]
    assert of_stages == [4 if stage in stages else 0 for stage in (0, 1)]


@pytest.mark.parametrize("text", [None, b"{", b'{"weight_map": []}'])
def test_verify_refuses_a_missing_or_damaged_index(text: bytes | None, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    index = pack(tmp_path / "source", tmp_path / "out") / INDEX_NAME
    index.unlink() if text is None else index.write_bytes(text)
    found = reshard("verify", tmp_path / "out", "--json")
    assert found.code == 4
    assert [each["where"].partition(": ")[0] for each in found.json["differences"]] == [str(index)]


def test_golden_folder_is_verified_exported_and_resharded_for_ever(tmp_path: Path) -> None:
    folder = GOLDEN / "packed-v1-flat"
    assert reshard("verify", folder, "--against", SOURCE).code == 0
    assert reshard("export", folder, "--to", "hf", "--out", tmp_path / "exported").code == 0
    assert files_in(tmp_path / "exported") == files_in(SOURCE)
    pack(folder, tmp_path / "again")
    wanted = {path: data for path, data in files_in(folder).items() if path != "manifest.json"}
    assert {path: data for path, data in files_in(tmp_path / "again").items() if path != "manifest.json"} == wanted


def test_header_that_the_hub_does_not_read_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "source", llama_config())
    files = pack(tmp_path / "source", tmp_path / "out").glob("*.safetensors")
    sizes = {file.name: 8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files}
    for most, warned in ((max(sizes.values()), 0), (min(sizes.values()) - 1, len(sizes))):
        monkeypatch.setattr("reshard.packing.pack.MOST_READ_HEADER_NBYTES", most)
        shown = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", "--force").err
        assert sum(f"{name} takes {nbytes} bytes" in shown for name, nbytes in sizes.items()) == warned
