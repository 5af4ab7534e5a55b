"""Files on this machine's file systems."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from manifests.errors import InputError, SourceError, StoreError, UnreachableError, refused_by_system
from manifests.paths import is_unicode, open_regular
from stores.address import OBJECT_SCHEMES
from stores.base import HIDDEN_FOLDERS, SOURCE_CHANGED, Range


class _State(NamedTuple):
    """Changes when a file is written or replaced, even if its mtime is restored.

    Not by new and removed links to it, which change its ctime, too: later checkpoints of a run link to shards.
    """

    nbytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    num_links: int

    def is_same(self, other: _State) -> bool:
        is_linked = max(self.num_links, other.num_links) > 1
        return self[:3] == other[:3] and (is_linked or self.ctime_ns == other.ctime_ns)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file in the state of its first access: later reads return that state, or fail.

    A file that this process writes itself `may_change`.
    """

    path: Path
    may_change: bool = field(default=False, compare=False, repr=False)
    _seen: list[_State] = field(default_factory=list, init=False, compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def nbytes(self) -> int:
        return self._first().nbytes

    @property
    def fingerprint(self) -> str:
        first = self._first()
        return f"{first.nbytes} bytes, changed at {first.mtime_ns}"

    def open(self, ranges: Sequence[Range]) -> LocalReader:
        """Open the file. The ranges are not used: the kernel reads ahead."""
        reader = LocalReader(self.path)
        try:
            if not self.may_change:
                if not self._seen:
                    self._seen.append(reader.state())
                reader.expect(self._seen[0])
        except BaseException:
            reader.close()
            raise
        return reader

    def check_unchanged(self) -> None:
        """Check that the file is unchanged since the first access."""
        if not self._first().is_same(_state_of(self.path)):
            raise _changed(self.path)

    def _first(self) -> _State:
        if self.may_change:
            return _state_of(self.path)
        if not self._seen:
            self._seen.append(_state_of(self.path))
        return self._seen[0]


class ChangedError(SourceError, UnreachableError):
    """A file that somebody writes, or whose permissions somebody changes: a later attempt may read it."""


class LocalReader:
    """A reader with its own descriptor, so that the kernel reads ahead for each reader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._expected: _State | None = None
        try:
            self._descriptor = open_regular(path)
        except OSError as error:
            raise refused_by_system(str(path), error, "cannot be opened", code="store.unreadable") from error

    def state(self) -> _State:
        return _in_short(os.fstat(self._descriptor))

    def expect(self, state: _State) -> None:
        """Refuse the file unless it is in this state, now and after each read."""
        self._expected = state
        self._check()

    def read_into(self, part: memoryview, position: int) -> None:
        while part:
            try:
                num_read = os.preadv(self._descriptor, [part], position)
            except OSError as error:
                problem = f"cannot be read at byte {position}"
                raise refused_by_system(str(self._path), error, problem, code="store.unreadable") from error
            if num_read == 0:
                raise ChangedError(
                    str(self._path),
                    f"unexpected end of file at byte {position}",
                    "the file was truncated after its header was read",
                    code=SOURCE_CHANGED,
                )
            part, position = part[num_read:], position + num_read
        self._check()

    def close(self) -> None:
        os.close(self._descriptor)

    def _check(self) -> None:
        if self._expected is not None and not self._expected.is_same(self.state()):
            raise _changed(self._path)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder as a source. Links to files are followed anywhere: the hub's cache consists of them."""

    path: Path
    kind: str = "huggingface"
    _files: dict[str, LocalFile] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def location(self) -> str:
        return str(self.path.resolve())

    @property
    def revision(self) -> None:
        return None

    def names(self) -> tuple[str, ...]:
        """Return every file below the folder, except in hidden folders."""
        if not self.path.is_dir():
            problem = "is a file, not a folder" if self.path.exists() else "no such folder"
            hint = "name the folder of config.json and the weights"
            scheme, _, rest = str(self).partition(":/")
            if rest and scheme in ("hf", *OBJECT_SCHEMES):
                hint = f"write {scheme}://{rest}"
            raise SourceError(str(self), problem, hint, code="source.not-a-folder")
        self.check_name()
        return tuple(_files_below(self.path))

    def check_name(self) -> None:
        """Refuse a folder whose path cannot be stored in a manifest."""
        _check_unicode(self.location)

    def file(self, name: str) -> LocalFile:
        """Return a file, always the same object, so that its first state is shared by all readers."""
        return self._files.setdefault(name, LocalFile(self.path / name))


def _files_below(folder: Path) -> Iterator[str]:
    root = folder.resolve()
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name not in HIDDEN_FOLDERS)
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink() and not _is_listed(path.resolve(), root):
                hint = "replace the link with the folder, or remove it"
                raise SourceError(str(path), "is a link to a folder", hint, code="source.linked-folder")
        for name in sorted(names):
            path = Path(parent, name)
            if not path.is_file():
                hint = "it may be a dangling link; fix or remove it"
                raise StoreError(str(path), "is not a regular file", hint, code="store.not-a-file")
            _check_unicode(str(path))
            yield path.relative_to(folder).as_posix()


def _is_listed(target: Path, root: Path) -> bool:
    """Whether what a link points to is listed under its own name, as that of `runner-log/latest` is."""
    return target.is_relative_to(root) and set(HIDDEN_FOLDERS).isdisjoint(target.relative_to(root).parts)


def _state_of(path: Path) -> _State:
    try:
        return _in_short(path.stat())
    except OSError as error:
        raise refused_by_system(str(path), error, code="store.unreadable") from error


def _in_short(status: os.stat_result) -> _State:
    return _State(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns, status.st_nlink)


def _changed(path: Path) -> InputError:
    return ChangedError(
        str(path),
        "changed or replaced while it was read",
        "run again when nothing writes to it",
        code=SOURCE_CHANGED,
    )


def _refuse(error: OSError) -> None:
    raise refused_by_system(str(error.filename), error, code="store.unreadable") from error


def _check_unicode(path: str) -> None:
    if not is_unicode(path):
        raise StoreError(path, "expected a name in valid UTF-8", "rename it", code="store.invalid-name")
