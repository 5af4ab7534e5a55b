"""Any other store that fsspec knows (`memory://`, `http://`, `sftp://`, …), as a fallback: read, never written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from manifests.errors import InputError
from stores.object_client import ObjectEntry

__all__ = ["FilesystemClient", "open_filesystem"]

# What changes when a file does, as the file systems of fsspec call it.
_MARKS = ("ETag", "etag", "Last-Modified", "last_modified", "LastModified", "mtime", "updated", "created")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesystemClient:
    url: str
    root: str
    filesystem: Any = field(repr=False)  # fsspec ships no types

    def entries(self) -> Iterator[ObjectEntry]:
        """Give every file below the folder, each looked up: listings say other things of a file, or too little."""
        with _explained(self.url):
            paths = self.filesystem.find(self.root)
        for path in paths:
            yield self.look_up(str(path).removeprefix(self.root).lstrip("/"))

    def look_up(self, name: str) -> ObjectEntry:
        where = f"{self.url}/{name}"
        with _explained(where):
            facts: Mapping[str, Any] = self.filesystem.info(f"{self.root}/{name}")
        nbytes = facts.get("size")
        if not isinstance(nbytes, int):
            raise InputError(where, "the store does not say how long it is")
        mark = next((str(facts[key]) for key in _MARKS if facts.get(key)), None)
        return ObjectEntry(name=name, nbytes=nbytes, etag=mark)

    def read(self, entry: ObjectEntry, begin: int, end: int) -> Iterator[memoryview]:
        """Give the bytes of a range, once they are there and the file is found to be as it was."""
        where = f"{self.url}/{entry.name}"
        # Not `cat_file`: that takes in whatever a server sends that ignores ranges.
        options = {"cache_type": "none", "size": entry.nbytes}
        with _explained(where), self.filesystem.open(f"{self.root}/{entry.name}", "rb", **options) as file:
            file.seek(begin)
            data = file.read(end - begin)
        if self.look_up(entry.name) != entry:
            raise InputError(where, "was changed after it was listed", "start again, so that all is read as it is now")
        yield memoryview(data)


def open_filesystem(url: str) -> FilesystemClient:
    """Open a folder by an address that fsspec understands.

    Raises:
        InputError: fsspec is not installed, or has nothing for this scheme, or needs a package for it.
    """
    scheme = url.partition("://")[0]
    authority = url.partition("://")[2].partition("/")[0]
    if ":" in authority.rpartition("@")[0]:
        raise InputError(f"{scheme}://…", "a password does not belong in an address")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise InputError(url, f"{scheme}:// is read with fsspec", "pip install fsspec") from error
    with _explained(url):
        filesystem, root = url_to_fs(url, use_listings_cache=False)
    return FilesystemClient(url=url.rstrip("/"), root=root.rstrip("/"), filesystem=filesystem)


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        # Over HTTP, every failure to look a file up is this one; the cause says more.
        cause = error.__cause__
        is_absent = cause is None or getattr(cause, "status", None) == 404
        raise InputError(where, "there is no such file" if is_absent else f"cannot be read: {cause}") from error
    except Exception as error:  # file systems from anywhere, each with errors of its own
        raise InputError(where, f"cannot be read: {error or type(error).__name__}") from error
