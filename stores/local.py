"""Files on this machine's file systems."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import InputError, refused_by_system
from manifests.paths import is_unicode
from stores.base import HIDDEN_FOLDERS, Range

__all__ = ["LocalFile", "LocalFolder"]


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def nbytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise refused_by_system(str(self.path), error) from error

    @property
    def pin(self) -> str:
        try:
            found = self.path.stat()
        except OSError as error:
            raise refused_by_system(str(self.path), error) from error
        return f"{found.st_size} bytes, changed at {found.st_mtime_ns}"

    def open(self, ranges: Sequence[Range]) -> LocalReader:
        """Open the file. The kernel reads ahead by itself, so the ranges are not used."""
        return LocalReader(self.path)


class LocalReader:
    """A descriptor of its own, so that the kernel reads ahead for each reader apart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise refused_by_system(str(path), error, "cannot be opened") from error

    def read_into(self, part: memoryview, position: int) -> None:
        while part:
            try:
                found = os.preadv(self._descriptor, [part], position)
            except OSError as error:
                raise refused_by_system(str(self._path), error, f"cannot be read at byte {position}") from error
            if found == 0:
                raise InputError(
                    str(self._path), f"ends at byte {position}", "the file was cut short after its header was read"
                )
            part, position = part[found:], position + found

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder as a source. Links to files are followed wherever they lead: the hub's cache is made of them."""

    path: Path
    kind: str = "huggingface"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def location(self) -> str:
        return str(self.path.resolve())

    @property
    def revision(self) -> None:
        return None

    def names(self) -> tuple[str, ...]:
        """Give every file below the folder but those of hidden folders.

        Raises:
            InputError: a folder that cannot be read, a link to a folder, a name that is no file, or one that
                no manifest could say.
        """
        if not self.path.is_dir():
            problem = "is a file, not a folder" if self.path.exists() else "no such folder"
            raise InputError(str(self), problem, "give the folder that holds config.json and the weights")
        self.check_name()
        return tuple(_files_below(self.path))

    def check_name(self) -> None:
        """Refuse a folder whose path no manifest could say.

        Raises:
            InputError: it is not valid UTF-8.
        """
        _check_unicode(self.location)

    def file(self, name: str) -> LocalFile:
        return LocalFile(self.path / name)


def _files_below(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name not in HIDDEN_FOLDERS)
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():
                raise InputError(str(path), "is a link to a folder", "put the folder itself there, or remove the link")
        for name in sorted(names):
            path = Path(parent, name)
            if not path.is_file():
                raise InputError(str(path), "is no regular file", "a dangling link? remove it or mend it")
            _check_unicode(str(path))
            yield path.relative_to(folder).as_posix()


def _refuse(error: OSError) -> None:
    raise refused_by_system(str(error.filename), error) from error


def _check_unicode(path: str) -> None:
    if not is_unicode(path):
        raise InputError(path, "its name is not valid UTF-8, and a manifest could not say it", "rename it")
