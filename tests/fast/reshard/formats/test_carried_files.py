"""Files beside the weights, of any length: copied and hashed a block at a time, in memory that does not grow."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.builders import files_in, llama_config, refusal, reshard, write_model

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


DESCRIBING = ("digests.json", "SHA256SUMS", "x/model.safetensors.sha256", "model.sig")


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


def test_files_that_describe_the_source_are_not_exported_beside_other_bytes(source: Path, tmp_path: Path) -> None:
    packed, back, dcp = tmp_path / "packed", tmp_path / "back", tmp_path / "dcp"
    (source / "SHA256SUMS").write_text("of the source")
    assert reshard("pack", source, "--layout", "pp=2", "--out", packed, "--dtype", "fp32").code == 0
    assert reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "same").code == 0
    assert reshard("export", packed, "--to", "hf", "--out", back).code == 0
    assert reshard("export", tmp_path / "same", "--to", "dcp", "--out", dcp).code == 0
    for out in (packed, back, dcp):
        assert not [name for name in files_in(out) if "SHA256SUMS" in name], out
