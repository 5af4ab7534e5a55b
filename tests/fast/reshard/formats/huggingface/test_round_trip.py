"""Law 2: a pack's export is its source, byte for byte, whatever the layout and however often it changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import consolidate_distributed_checkpoint

from stores.open import open_manifest
from tests.builders import (
    DTYPE_BITS,
    EMBEDDING,
    HEAD,
    Tensor,
    files_in,
    llama_config,
    pack,
    random_tensors,
    read_safetensors,
    refusal,
    reshard,
    run,
    without_digest,
    write_model,
)
from tests.fast.reshard.drawn_folders import Folder, folders, specs


def digests_in(out: Path) -> dict[str, str]:
    """Return what each tensor's digest is said to be, in every bundle."""
    return {row["fqn"]: row["blake3"] for row in reshard("inspect", out, "--tensors", "--json").json["tensors"]}


@settings(max_examples=25)
@given(folders(), st.data())
def test_export_of_a_pack_is_the_source_byte_for_byte(folder: Folder, data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        source, packed, exported = Path(place, "source"), Path(place, "packed"), Path(place, "exported")
        folder.write(source)
        spec = data.draw(specs(folder.config["num_hidden_layers"], Path(place)))
        pack(source, packed, spec)
        run("export", packed, "--to", "hf", "--out", exported)
        assert files_in(exported) == folder.files


@settings(max_examples=15)
@given(folders(), st.data())
def test_packing_a_manifest_equals_packing_its_source(folder: Folder, data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        source, first, again, fresh = (Path(place, name) for name in ("source", "first", "again", "fresh"))
        folder.write(source)
        num_layers = folder.config["num_hidden_layers"]
        pack(source, first, data.draw(specs(num_layers, Path(place))))
        spec = data.draw(specs(num_layers, Path(place)))
        pack(first, again, spec)
        pack(source, fresh, spec)
        packed, expected = files_in(again), files_in(fresh)
        manifest = json.loads(without_digest(packed.pop("manifest.json")))
        assert [parent.pop("location") for parent in manifest["parents"]] == [str(first)]
        assert manifest | {"parents": []} == json.loads(without_digest(expected.pop("manifest.json")))
        assert packed == expected


@pytest.mark.parametrize("tied", [False, True])
def test_four_stages_to_two_and_back_keep_every_digest(tied: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=tied), num_shards=3)
    pack(tmp_path / "source", tmp_path / "a", "pp=4")
    pack(tmp_path / "a", tmp_path / "b")
    pack(tmp_path / "b" / "manifest.json", tmp_path / "c", "pp=4")
    assert digests_in(tmp_path / "a") == digests_in(tmp_path / "b") == digests_in(tmp_path / "c")
    first, last = files_in(tmp_path / "a"), files_in(tmp_path / "c")
    assert {name for name in first if first[name] != last[name]} == {"manifest.json"}
    locations = [parent.location for parent in open_manifest(tmp_path / "c").manifest.parents]
    assert locations == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_pack_replaces_the_very_manifest_that_it_reads(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "out", "pp=4")
    before = digests_in(tmp_path / "out")
    pack(tmp_path / "out", tmp_path / "out", "pp=2", "--force")
    assert open_manifest(tmp_path / "out").manifest.layout.num_stages == 2
    assert digests_in(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_bundles_of_every_dtype_open_with_the_library_and_hold_the_same_bytes(dtype: str, tmp_path: Path) -> None:
    config = llama_config()
    tensors = write_model(tmp_path / "source", config, random_tensors(config, dtypes=[dtype]))
    pack(tmp_path / "source", tmp_path / "out")
    found: dict[str, Tensor] = {}
    for shard in sorted((tmp_path / "out").rglob("*.safetensors")):
        found |= read_safetensors(shard.read_bytes())
    assert found == tensors


def test_each_untied_fqn_is_in_exactly_one_bundle(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(), num_shards=2)
    pack(tmp_path / "source", tmp_path / "out", "pp=3")
    names = []
    for shard in sorted((tmp_path / "out").rglob("*.safetensors")):
        with safe_open(shard, "np") as file:
            names += file.keys()
    assert sorted(names) == sorted(random_tensors(llama_config()))


@pytest.mark.parametrize(("stored", "stage"), [(EMBEDDING, 1), (HEAD, 0)])
def test_tied_copy_that_the_source_lacks_is_in_the_bundle_of_the_stage_that_uses_it(
    stored: str, stage: int, tmp_path: Path
) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors[stored] = tensors.pop(EMBEDDING)
    write_model(tmp_path / "source", config, tensors)
    pack(tmp_path / "source", tmp_path / "out")
    missing = HEAD if stored == EMBEDDING else EMBEDDING
    bundle = read_safetensors((tmp_path / f"out/stage-00{stage}/tied/model.safetensors").read_bytes())
    assert bundle[missing] == tensors[stored]
    (tie,) = open_manifest(tmp_path / "out").manifest.ties
    assert (tie.owner.fqn, [replica.fqn for replica in tie.replicas]) == (stored, [missing])


@pytest.mark.parametrize("tied", [False, True])
def test_model_that_transformers_saved_comes_back_and_loads(tied: bool, tmp_path: Path) -> None:
    sizes = {key: value for key, value in llama_config().items() if key not in ("architectures", "model_type")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "tie_word_embeddings": tied}))
    model.save_pretrained(tmp_path / "source", max_shard_size="10KB")
    pack(tmp_path / "source", tmp_path / "out", "pp=3")
    run("export", tmp_path / "out", "--to", "hf", "--out", tmp_path / "exported")
    assert len(files_in(tmp_path / "source")) > 4
    assert files_in(tmp_path / "exported") == files_in(tmp_path / "source")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_rotary_frequencies_of_old_files_travel_with_their_layer(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    name = "model.layers.3.self_attn.rotary_emb.inv_freq"
    tensors[name] = Tensor(dtype="F32", shape=(2,), data=b"rotating")
    write_model(tmp_path / "source", llama_config(), tensors)
    pack(tmp_path / "source", tmp_path / "out")
    run("export", tmp_path / "out", "--to", "hf", "--out", tmp_path / "exported")
    assert files_in(tmp_path / "exported") == files_in(tmp_path / "source")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_folder_that_torchs_writer_of_hugging_face_folders_wrote_comes_back(tmp_path: Path) -> None:
    """It notes an offset of each tensor, also where one rank saves them whole."""
    write_model(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    files = {name: 1 + number % 2 for number, name in enumerate(state)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "saved"), fqn_to_index_mapping=files)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    with safe_open(tmp_path / "saved" / "model-00001-of-00002.safetensors", "pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"])[EMBEDDING] == {"saved_offsets": [0, 0]}
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "saved")
    pack(tmp_path / "saved", tmp_path / "packed")
    run("check", tmp_path / "packed", "--against", tmp_path / "model", "--bytes")
    run("export", tmp_path / "packed", "--to", "hf", "--out", tmp_path / "exported")
    assert files_in(tmp_path / "exported") == files_in(tmp_path / "saved")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_files_of_ranks_that_torchs_writer_wrote_are_refused_until_transformers_merges_them(tmp_path: Path) -> None:
    """Those of `save_pretrained(..., distributed_checkpoint=True)`."""
    write_model(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "ranks"), save_distributed=True)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "ranks")
    (file,) = (tmp_path / "ranks").glob("*.safetensors")
    refused = refusal("pack", tmp_path / "ranks", "--layout", "pp=2", "--out", tmp_path / "packed")
    assert refused.found == (3, "source.layer-slices", str(file))
    consolidate_distributed_checkpoint(tmp_path / "ranks", tmp_path / "merged")
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "merged")
    pack(tmp_path / "merged", tmp_path / "packed")
    run("check", tmp_path / "packed", "--against", tmp_path / "model", "--bytes")
