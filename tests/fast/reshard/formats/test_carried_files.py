"""Files beside the weights, of any length: copied and hashed a block at a time, in memory that does not grow."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save

from tests.builders import edit_manifest, files_in, llama_config, refusal, reshard, write_model
from tests.fast.reshard.formats.dcp.test_dcp_source import huggingface_state, save_in_halves
from tests.fast.reshard.formats.deepspeed.test_deepspeed_source import GOLDEN as DEEPSPEED
from tests.fast.reshard.formats.megatron.test_megatron import GOLDEN as MEGATRON

NBYTES = 48 << 20
MOST_NBYTES = 12 << 20  # of Python's memory
GIB = 1 << 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    write_model(folder, llama_config())
    return folder


def run(*args: str | Path) -> int:
    """Run the command, and return the most memory that Python had for it."""
    tracemalloc.start()
    try:
        ended = reshard(*args)
        assert ended.code == 0, ended.err
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_file_passes_every_verb_in_blocks(source: Path, tmp_path: Path) -> None:
    long = source / "extra" / "long.dat"
    long.parent.mkdir()
    with open(long, "wb") as file:
        file.truncate(NBYTES)
        file.seek(NBYTES // 2)
        file.write(b"in the middle")
    packed, again, back = tmp_path / "packed", tmp_path / "again", tmp_path / "back"
    pack = ("pack", source, "--layout", "pp=2", "--out", tmp_path / "parts", "--part")
    for args in (
        ("pack", source, "--layout", "pp=2", "--out", packed),
        ("verify", packed),
        ("pack", packed, "--layout", "pp=1", "--out", again),
        ("export", again, "--to", "hf", "--out", back),
        (*pack, "1/2"),
        (*pack, "2/2"),
        ("commit", tmp_path / "parts"),
    ):
        assert run(*args) < MOST_NBYTES, args
    assert files_in(back) == files_in(source)


def test_a_long_file_that_is_damaged_is_named(source: Path, tmp_path: Path) -> None:
    (source / "long.dat").write_bytes(bytes(3 << 20))
    packed = tmp_path / "packed"
    run("pack", source, "--layout", "pp=2", "--out", packed)
    with open(packed / "long.dat", "r+b") as file:
        file.seek(2 << 20)
        file.write(b"?")
    ended = reshard("verify", packed)
    assert ended.code == 4
    assert str(packed / "long.dat") in ended.out + ended.err
    out = tmp_path / "out"
    ended = reshard("pack", packed, "--layout", "pp=1", "--out", out, "--json")
    assert (ended.code, ended.json["error"]["code"]) == (3, "source.digest-mismatch")
    assert ended.json["error"]["where"] == str(packed / "long.dat")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.slow
def test_a_file_of_more_than_a_gibibyte_is_packed(source: Path, tmp_path: Path) -> None:
    with open(source / "long.dat", "wb") as file:
        file.truncate(GIB + 1)
    assert run("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed") < MOST_NBYTES
    assert (tmp_path / "packed" / "long.dat").stat().st_size == GIB + 1


ATTRIBUTES = ".gitattributes"
DESCRIBING = ("digests.json", "SHA256SUMS", "x/model.safetensors.sha256", "model.sig", ATTRIBUTES)


def test_files_that_describe_the_files_of_the_source_are_set_apart_and_exported_where_they_were(
    source: Path, tmp_path: Path
) -> None:
    packed, again, back = tmp_path / "packed", tmp_path / "again", tmp_path / "back"
    for name in (*DESCRIBING, "README.md.txt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"{name} of the source")
    (source / "digests.json").unlink()
    assert reshard("check", source, "--digests", "write").code == 0
    assert reshard("pack", source, "--layout", "pp=2", "--out", packed).code == 0
    assert not any((packed / name).exists() for name in DESCRIBING)
    assert refusal("check", packed, "--digests", "verify").found[1] == "source.no-digests"
    assert reshard("check", packed, "--digests", "write").code == 0
    assert reshard("check", packed, "--digests", "verify").code == 0
    assert reshard("verify", packed, "--against", source).code == 0
    assert reshard("pack", packed, "--layout", "pp=1", "--out", again).code == 0
    assert reshard("export", again, "--to", "hf", "--out", back).code == 0
    assert files_in(back) == files_in(source)


def test_gitattributes_in_the_root_as_older_versions_pack_them_may_have_changed(source: Path, tmp_path: Path) -> None:
    packed, again, back = tmp_path / "packed", tmp_path / "again", tmp_path / "back"
    (source / ATTRIBUTES).write_text("of the source")
    assert reshard("pack", source, "--layout", "pp=2", "--out", packed).code == 0
    move_to_root(packed, ATTRIBUTES)
    assert reshard("verify", packed, "--against", source).code == 0
    (packed / ATTRIBUTES).write_text("of the repository")
    assert reshard("verify", packed).code == 0
    assert reshard("pack", packed, "--layout", "pp=1", "--out", again).code == 0
    assert not (again / ATTRIBUTES).exists()
    assert reshard("export", again, "--to", "hf", "--out", back).code == 0
    assert files_in(back) == {**files_in(source), ATTRIBUTES: b"of the repository"}


def test_gitattributes_that_an_export_leaves_out_are_no_difference(source: Path, tmp_path: Path) -> None:
    packed, dcp, again, chain = (tmp_path / name for name in ("packed", "dcp", "again", "chain"))
    (source / ATTRIBUTES).write_text("of the source")
    assert reshard("pack", source, "--layout", "pp=2", "--out", packed).code == 0
    assert reshard("export", packed, "--to", "dcp", "--out", dcp).code == 0
    assert reshard("pack", dcp, "--layout", "pp=2", "--out", again).code == 0
    assert reshard("delta", "publish", packed, "--chain", chain).code == 0
    for one, other in ((again, packed), (again, source), (packed, dcp), (packed, chain)):
        assert reshard("verify", one, "--against", other).code == 0, other


def move_to_root(packed: Path, name: str) -> None:
    def change(document: dict[str, Any]) -> None:
        file = next(file for file in document["files"] if file["path"] == f"source-files/{name}")
        file["path"] = name

    (packed / "source-files" / name).rename(packed / name)
    edit_manifest(packed, change)


def test_files_that_describe_the_source_are_not_exported_beside_other_bytes(source: Path, tmp_path: Path) -> None:
    packed, back, dcp = tmp_path / "packed", tmp_path / "back", tmp_path / "dcp"
    (source / "SHA256SUMS").write_text("of the source")
    assert reshard("pack", source, "--layout", "pp=2", "--out", packed, "--dtype", "fp32").code == 0
    assert reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "same").code == 0
    assert reshard("export", packed, "--to", "hf", "--out", back).code == 0
    assert reshard("export", tmp_path / "same", "--to", "dcp", "--out", dcp).code == 0
    for out in (packed, back, dcp):
        assert not [name for name in files_in(out) if "SHA256SUMS" in name], out


def source_of(kind: str, place: Path) -> Path:
    if kind == "dcp":
        return save_in_halves(place / "source", "llama", huggingface_state("llama", place / "model"))
    golden = DEEPSPEED / "gpt2-universal" if kind == "deepspeed" else MEGATRON / "llama-trained"
    return Path(shutil.copytree(golden, place / "source"))


@pytest.mark.parametrize("kind", ["dcp", "deepspeed", "megatron"])
def test_other_weights_and_records_of_training_beside_a_checkpoint_are_left_out(kind: str, tmp_path: Path) -> None:
    """A model.safetensors in the packed folder would be read in place of its shards, and step counts resumed from."""
    source = source_of(kind, tmp_path)
    assert reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "expected").code == 0
    names = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.gguf"}
    names |= {"trained.json", "optimizer-steps.json"}
    for name in {*names, "presharded/tp_2/model-00001.safetensors", "original/CONSOLIDATED.safetensors"}:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"{}")
    packed = tmp_path / "packed"
    ended = reshard("pack", source, "--layout", "pp=2", "--out", packed)
    assert ended.code == 0, ended.err
    assert set(json.loads((packed / "manifest.json").read_text())["source"]["left_out"]) >= names
    assert all(f"left out: {name} " in ended.err for name in names)
    assert files_in(packed).keys() == files_in(tmp_path / "expected").keys()
    assert reshard("verify", packed).code == 0


def test_digests_of_a_megatron_checkpoint_are_left_out(tmp_path: Path) -> None:
    """As `dist_checkpointing.save(verify_integrity=True)` writes them; its loader refuses other files beside them."""
    source = source_of("megatron", tmp_path)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()}
    (source / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": digests}))
    packed = tmp_path / "packed"
    assert reshard("pack", source, "--layout", "pp=2", "--out", packed).code == 0
    for target in ("hf", "megatron"):
        assert reshard("export", packed, "--to", target, "--out", tmp_path / target).code == 0
    names = [name for out in ("packed", "hf", "megatron") for name in files_in(tmp_path / out)]
    assert "iter_0000001/config.json" in names
    assert not [name for name in names if "integrity.json" in name]


def test_optimizer_state_of_the_trainer_of_transformers_is_said_to_be_left_out(source: Path, tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt"):
        (source / name).write_bytes(b"")
    ended = reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed")
    (warning,) = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    assert "optimizer.pt" in warning
    assert json.loads((tmp_path / "packed" / "manifest.json").read_text())["training"] is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_state_of_the_trainer_of_transformers_is_left_out(source: Path, tmp_path: Path) -> None:
    """As it saves FSDP's shards beside a model.safetensors."""
    assert reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "expected").code == 0
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        save({"weight": torch.ones(2)}, checkpoint_id=source / name, no_dist=True)
    names = {path.relative_to(source).as_posix() for path in source.rglob("*_0/*")}
    assert len(names) == 4
    ended = reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed")
    assert ended.code == 0, ended.err
    (warning,) = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    assert "optimizer_0" in warning
    assert all(f"left out: {name} " in ended.err for name in names)
    assert files_in(tmp_path / "packed").keys() == files_in(tmp_path / "expected").keys()
    assert reshard("verify", tmp_path / "packed").code == 0
