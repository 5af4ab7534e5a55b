"""How files reach the disk: the same bytes by every road, modes that the umask leaves, synced before they show."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stores.direct_io import BLOCK_NBYTES, Io, OutputFile, aligned_buffer
from tests.builders import files_in, llama_config, pack, reshard, run, write_model

CONFIG = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write some megabytes, so that blocks and sectors are filled."""
    folder = tmp_path_factory.mktemp("options") / "source"
    write_model(folder, CONFIG, num_shards=3)
    return folder


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("flags", [("--io", "direct"), ("--io", "buffered"), ("--no-sync",)], ids=" ".join)
def test_every_road_to_the_disk_writes_the_same_bytes(flags: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "plain")
    pack(source, tmp_path / "asked", "pp=2", *flags)
    assert files_in(tmp_path / "asked") == files_in(tmp_path / "plain")
    assert reshard("export", tmp_path / "asked", "--to", "hf", "--out", tmp_path / "back", *flags).code == 0
    assert files_in(tmp_path / "back") == files_in(source)


@pytest.mark.parametrize("verb", ["pack", "apply"])
def test_file_system_that_does_not_report_its_space_is_not_taken_for_full(
    verb: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE reports 0 blocks where the program behind it has no statfs."""
    run("delta", "publish", source, "--chain", tmp_path / "chain")
    space = dict.fromkeys(("f_blocks", "f_bfree", "f_bavail"), 0)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**space, f_frsize=4096))
    if verb == "pack":
        pack(source, tmp_path / "out")
    else:
        run("delta", "apply", tmp_path / "chain", "--to", tmp_path / "out")


@pytest.mark.usefixtures("strict_umask")
def test_files_have_the_modes_that_the_umask_leaves(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out")
    assert reshard("export", tmp_path / "out", "--to", "hf", "--out", tmp_path / "back").code == 0
    found = [tmp_path / "out", tmp_path / "back", *(tmp_path / "out").rglob("*"), *(tmp_path / "back").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o640}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o750}


@pytest.mark.parametrize("verb", ["pack", "export"])
def test_everything_is_on_disk_before_the_folder_has_its_name(
    verb: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is asked as ever; what it is asked to sync, and when the rename comes, is written down."""
    events, synced = list[str](), list[str]()
    fsync, rename = os.fsync, os.rename
    out, partial = tmp_path / "out", tmp_path / ".out.partial"

    def noted_fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if events[-1] == str(partial):
            synced[:] = os.listdir(partial)
        fsync(descriptor)

    def noted_rename(old: Path, new: Path) -> None:
        events.append(f"{old} -> {new}")
        rename(old, new)

    pack(source, tmp_path / "packed")
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    command = {"pack": ("pack", source, "--layout", "pp=3"), "export": ("export", tmp_path / "packed", "--to", "hf")}
    assert reshard(*command[verb], "--out", out).code == 0
    committed = events.index(f"{partial} -> {out}")
    assert sorted(synced) == sorted(path.name for path in out.iterdir()), "a power failure would bring the journal back"
    for path in [out, *out.rglob("*")]:
        name = partial / path.relative_to(out)
        names = {str(name), str(name.with_name(f".{name.name}.partial"))}  # small files are renamed
        assert not names.isdisjoint(events[:committed]), name
    # The record beside an export, of the files that --force may replace, comes after the commit.
    record = [] if verb == "pack" else [str(tmp_path / "..out.exported.json.partial"), str(tmp_path)]
    assert events[committed + 1 :] == [str(tmp_path), *record]


NUM_BLOCKS = 40


def write(path: Path, io: Io, *, is_synced: bool) -> list[int]:
    """Write a file of different blocks from the last to the first half; return the cached ones, before it is synced."""
    buffer, file = aligned_buffer(), OutputFile(path, NUM_BLOCKS * BLOCK_NBYTES, io, is_synced=is_synced)
    for number in (*range(NUM_BLOCKS // 2, NUM_BLOCKS), *range(NUM_BLOCKS // 2)):
        buffer[:] = bytes([number]) * BLOCK_NBYTES
        file.write(buffer, 0, BLOCK_NBYTES, number * BLOCK_NBYTES)
    file.finish(b"", sync=is_synced)
    return cached_blocks(path)


def cached_blocks(path: Path) -> list[int]:
    """Return the blocks of which a page is cached: by mincore(2), since even a read without waiting reads ahead."""
    num_pages = BLOCK_NBYTES // mmap.PAGESIZE
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        view = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(mapped)), pages)
        del view  # or the mapping cannot be closed
        assert not failed
    return [number for number in range(NUM_BLOCKS) if any(pages[number * num_pages : (number + 1) * num_pages])]


def test_pages_are_let_go_once_they_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[tuple[object, ...]]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(("fsync",)))
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *advice: events.append(advice))
    write(tmp_path / "unsynced", "buffered", is_synced=False)
    assert events == []
    write(tmp_path / "synced", "buffered", is_synced=True)
    assert events[-2:] == [("fsync",), (0, 0, os.POSIX_FADV_DONTNEED)]


@pytest.mark.slow  # the kernel may free pages when it likes
@pytest.mark.usefixtures("real_fsync")
def test_what_was_written_and_synced_is_not_in_the_page_cache(tmp_path: Path) -> None:
    kept = write(tmp_path / "kept", "buffered", is_synced=False)
    assert len(kept) > NUM_BLOCKS // 2
    descriptor = os.open(tmp_path / "kept", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if cached_blocks(tmp_path / "kept"):
        pytest.skip("a file system in memory")
    assert write(tmp_path / "synced", "buffered", is_synced=True) == []


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("is_synced", [True, False])
def test_a_file_has_its_bytes_in_whatever_order_they_are_written(tmp_path: Path, io: Io, is_synced: bool) -> None:
    write(tmp_path / "file", io, is_synced=is_synced)
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(bytes([number]) * BLOCK_NBYTES for number in range(NUM_BLOCKS))
