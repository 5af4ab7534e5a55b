"""Law 9: every hostile file is refused by every verb that reads it, with one error, in little memory and time."""

from __future__ import annotations

import contextlib
import resource
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from runner.bundle.packed import open_packed
from runner.cli import main as run_runner
from runner.load.load import load_tensors
from runner.tensors.local_shard import whole_pieces
from stores.bundles import Bundles
from tests.builders import INDEX, llama_config, pack, reshard, write_model
from tests.fast.reshard.forged import change_manifest
from tests.hostile.make import CONFIGS, FILES, INDEXES, MANIFESTS, SHARD_NAMES, SHARDS, Hostile, write_files
from tests.refusals import refused

pytestmark = pytest.mark.timeout(20)  # none hangs

MAX_NBYTES = 24 << 20  # of Python's memory, at the most
MAX_ADDRESSES = 1 << 30  # of address space that a refusal may add
CONFIG = llama_config(num_hidden_layers=2)
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in one file and in two, and pack it."""
    folder = tmp_path_factory.mktemp("hostile")
    write_model(folder / "one", CONFIG)
    write_model(folder / "two", CONFIG, num_shards=2)
    pack(folder / "one", folder / "packed")
    return folder


@contextlib.contextmanager
def in_little_memory(*, is_traced: bool = True) -> Iterator[None]:
    """Fail what takes much memory, Python's or any other."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_ADDRESSES, hard))
    if is_traced:
        tracemalloc.start()
    try:
        yield
        assert not is_traced or tracemalloc.get_traced_memory()[1] < MAX_NBYTES
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(commands: list[tuple[str | Path, ...]], folder: Path, case: Hostile, file: Path) -> None:
    """Run commands that must all fail with the same code and place, and write nothing anywhere below `folder`.

    Python's own memory is traced, which takes most of a test, for one of them: each has its turn with other files.
    """
    before, expected = everything_in(folder), expected_of(case, file)
    turn = sum(map(ord, case.name)) % len(commands)
    for number, command in enumerate(commands):
        with in_little_memory(is_traced=number == turn):
            ended = reshard(*command, "--json")
        error = ended.json["error"]
        assert (command[0], ended.code, error["code"], error["where"]) == (command[0], 3, *expected)
    assert everything_in(folder) == before


def expected_of(case: Hostile, file: Path) -> tuple[str, str]:
    """Return the code and place of the error about a hostile file."""
    return case.code, case.where.replace("{F}", str(file)).replace("{S}", str(file.parent))


def source_commands(source: Path, good: Path) -> list[tuple[str | Path, ...]]:
    """Return every command that reads a Hugging Face folder."""
    out = source.parent / "out"
    return [
        ("plan", source, "--layout", "pp=2"),
        ("pack", source, "--layout", "pp=2", "--out", out),
        ("pack", source, "--layout", "pp=2", "--out", out, "--virtual"),
        ("verify", good / "packed", "--against", source),
        ("diff", good / "packed", source),
        ("diff", source, good / "packed"),
    ]


def manifest_commands(packed: Path, good: Path) -> list[tuple[str | Path, ...]]:
    """Return every command that reads a manifest."""
    out = packed.parent / "out"
    return [
        ("plan", packed),
        ("pack", packed, "--layout", "pp=1", "--out", out),
        ("export", packed, "--to", "hf", "--out", out),
        ("diff", packed, good / "packed"),
        ("diff", good / "one", packed),
        ("inspect", packed, "--tensors"),
    ]


def test_files_are_what_the_script_makes(tmp_path: Path) -> None:
    write_files(tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {path.relative_to(FILES): path.read_bytes() for path in FILES.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", SHARDS, ids=lambda case: case.name)
def test_hostile_shard_of_a_source(case: Hostile, good: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(good / "one", tmp_path / "source"))
    file = Path(shutil.copy(FILES / "shards" / case.name, source / "model.safetensors"))
    assert_refused(source_commands(source, good), tmp_path, case, file)


@pytest.mark.parametrize("case", SHARDS, ids=lambda case: case.name)
def test_hostile_shard_of_a_bundle(case: Hostile, good: Path, tmp_path: Path) -> None:
    """Size and digest fit what the manifest says: only the reader of the header is left to refuse it."""
    packed = Path(shutil.copytree(good / "packed", tmp_path / "packed"))
    file = Path(shutil.copy(FILES / "shards" / case.name, packed / SHARD))
    begin = 8 + int.from_bytes(case.data[:8], "little")
    fits = {"nbytes": len(case.data), "digest": f"blake3:{blake3(case.data[:begin]).hexdigest()}"}
    change_manifest(packed, lambda document: document["stages"][0]["shards"][0].update(fits))
    if len(case.data) < 8000:  # a manifest cannot say that a file has more bytes of tensors than its size
        change_manifest(packed, lambda document: document["stages"][0].update(nbytes=0))
    expected = expected_of(case, file)
    assert_refused(manifest_commands(packed, good), tmp_path, case, file)
    verified = reshard("verify", packed, "--json")  # which reports all damage that it finds
    first = verified.json["differences"][0]
    assert (verified.code, first["where"]) == (4, expected[1])
    opened = open_packed(packed)
    wanted = whole_pieces({"model.embed_tokens.weight": torch.empty(40, 16)})
    with in_little_memory():
        assert refused(lambda: load_tensors(wanted, Bundles(opened.manifest, packed), opened.shape)) == expected


@pytest.mark.parametrize("case", INDEXES, ids=lambda case: case.name)
def test_hostile_index(case: Hostile, good: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(good / "two", tmp_path / "source"))
    file = Path(shutil.copy(FILES / "indexes" / case.name, source / INDEX))
    assert_refused(source_commands(source, good), tmp_path, case, file)


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case.name)
def test_hostile_config(case: Hostile, good: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(good / "one", tmp_path / "source"))
    file = Path(shutil.copy(FILES / "configs" / case.name, source / "config.json"))
    assert_refused([*source_commands(source, good), ("plan", file, "--layout", "pp=1")], tmp_path, case, file)


@pytest.mark.parametrize("case", MANIFESTS, ids=lambda case: case.name)
def test_hostile_manifest(
    case: Hostile, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    packed = Path(shutil.copytree(good / "packed", tmp_path / "packed"))
    file = Path(shutil.copy(FILES / "manifests" / case.name, packed / "manifest.json"))
    expected = expected_of(case, file)
    assert_refused([*manifest_commands(packed, good), ("verify", packed)], tmp_path, case, file)
    with in_little_memory():
        assert refused(lambda: open_packed(packed)) == expected
    monkeypatch.setattr("sys.argv", ["runner", "launch", str(packed), "--dry-run", "--", "--data", "x", "--steps", "1"])
    with pytest.raises(SystemExit) as ended, in_little_memory():
        run_runner()
    assert ended.value.code == 3
    assert capfd.readouterr().err.startswith(f"error: {expected[1]}: ")


def test_names_of_shards_are_those_of_the_builders(good: Path) -> None:
    assert tuple(sorted(path.name for path in (good / "two").glob("*.safetensors"))) == SHARD_NAMES
