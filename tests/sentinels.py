"""Files that are not ours, of every kind, in and around an output: no command may touch them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# What is seen of an entry: its kind and mode, its owner, its bytes or where it leads, and its inode but for folders.
Seen = tuple[int, int, bytes | str, int]


class Sentinels:
    """What was planted in `folder`, and how it was then."""

    def __init__(self, folder: Path, names: frozenset[str]) -> None:
        self._folder, self._names = folder, names
        self._before = self.seen()

    def seen(self) -> dict[str, Seen | None]:
        return {name: _look_at(self._folder / name) for name in self._names}

    def check(self) -> None:
        """Assert that all of them are there as they were."""
        now = self.seen()
        assert {name: now[name] for name in now if now[name] != self._before[name]} == {}


def plant_in(folder: Path, *, beside_ours: str | None = None) -> Sentinels:
    """Put notes, a repository, another checkpoint, links, a read-only file and a pipe below a folder.

    `beside_ours` is a folder of ours that gets a file, too.
    """
    before = set(folder.rglob("*"))
    for name, data in {
        "notes.txt": b"mine",
        "thesis.pdf": b"%PDF",
        "nested/pytorch_model.bin": b"pickled",
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/objects/ab/cdef": b"\x78\x01",
        "nested/step-000010/manifest.json": b'{"format": "theirs"}',
        "nested/step-000010/stage-000/model.safetensors": b"theirs",
        "name with spaces \N{SNOWMAN}": b"",
        **({f"{beside_ours}/notes.txt": b"mine too"} if beside_ours else {}),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / ".git/refs/heads").mkdir(parents=True)
    (folder / "link").symlink_to("notes.txt")
    (folder / "dangling").symlink_to("/nowhere/at/all")
    (folder / "link to a folder").symlink_to("nested")
    (folder / "read only").write_bytes(b"keep")
    (folder / "read only").chmod(0o444)
    (folder / "read-only folder").mkdir()
    (folder / "read-only folder" / "file").write_bytes(b"keep")
    (folder / "read-only folder").chmod(0o555)
    os.mkfifo(folder / "pipe")
    planted = frozenset(path.relative_to(folder).as_posix() for path in set(folder.rglob("*")) - before)
    return Sentinels(folder, planted)


def _look_at(path: Path) -> Seen | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    inode, held = found.st_ino, b""
    if stat.S_ISLNK(found.st_mode):
        return found.st_mode, found.st_uid, os.readlink(path), inode
    if stat.S_ISDIR(found.st_mode):
        inode = 0  # a folder is made again
    elif stat.S_ISREG(found.st_mode):
        held = path.read_bytes()
    return found.st_mode, found.st_uid, held, inode
