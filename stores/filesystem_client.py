"""Any other store that fsspec knows (`memory://`, `http://`, `sftp://`, …), as a fallback."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from manifests.errors import InputError, SourceError, StoreError
from stores.address import without_queries
from stores.base import SOURCE_CHANGED
from stores.object_client import ObjectEntry
from stores.uplink import NUM_PARTS
from stores.web_session import open_session

__all__ = ["FilesystemClient", "open_filesystem"]

# What changes when a file does, as the file systems of fsspec call it.
_MARKS = ("ETag", "etag", "Last-Modified", "last_modified", "LastModified", "mtime", "updated", "created")

# More than any checkpoint has. A web server may make up folders in folders for ever.
_MOST_FOLDERS = 100_000
_MOST_LEVELS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesystemClient:
    url: str
    root: str
    filesystem: Any = field(repr=False)  # fsspec ships no types

    def entries(self) -> Iterator[ObjectEntry]:
        """Yield every file below the folder, each looked up: listings say other things of a file, or too little.

        Raises:
            StoreError: it cannot be listed, or has too many folders; whoever counts the files need not take them all.
        """
        for path in self._paths():
            yield self.look_up(path.removeprefix(self.root).lstrip("/"))

    def _paths(self) -> Iterator[str]:
        """Yield the files' paths, folder by folder: `find` would end only after all, on some servers never."""
        walk = iter(self.filesystem.walk(self.root, detail=True, on_error=_refuse_unread))
        num_folders, root_depth = 0, None
        while True:
            with _explained(self.url):
                found = next(walk, None)
            if found is None:
                return
            path, folders, files = found
            depth = path.count("/")
            root_depth = depth if root_depth is None else root_depth
            num_folders += len(folders)
            if depth - root_depth > _MOST_LEVELS or num_folders > _MOST_FOLDERS:
                problem = f"contains more than {_MOST_FOLDERS} folders, or more than {_MOST_LEVELS} levels of them"
                raise StoreError(self.url, problem, "name the folder of one checkpoint", code="store.too-many-files")
            yield from (str(info["name"]) for info in files.values())

    def look_up(self, name: str) -> ObjectEntry:
        where = f"{self.url}/{name}"
        with _explained(where):
            facts: Mapping[str, Any] = self.filesystem.info(f"{self.root}/{name}")
        nbytes = facts.get("size")
        if not isinstance(nbytes, int):
            raise StoreError(where, "the store does not say how long it is", code="store.no-length")
        mark = next((str(facts[key]) for key in _MARKS if facts.get(key)), None)
        return ObjectEntry(name=name, nbytes=nbytes, etag=mark)

    def load(self, name: str) -> bytes:
        entry = self.look_up(name)
        return b"".join(self.read(entry, 0, entry.nbytes)) if entry.nbytes else b""

    def read(self, entry: ObjectEntry, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a range, once they are there and the file is found to be as it was."""
        where = f"{self.url}/{entry.name}"
        # Not `cat_file`: that takes in whatever a server sends that ignores ranges.
        options = {"cache_type": "none", "size": entry.nbytes}
        with _explained(where), self.filesystem.open(f"{self.root}/{entry.name}", "rb", **options) as file:
            file.seek(begin)
            data = file.read(end - begin)
        if self.look_up(entry.name) != entry:
            raise SourceError(
                where,
                "was changed after it was listed",
                "start again, so that all is read as it is now",
                code=SOURCE_CHANGED,
            )
        yield memoryview(data)

    @property
    def is_atomic(self) -> bool:
        return False

    def settled(self) -> FilesystemClient:
        return self

    def make_folder(self) -> None:
        """Make the folder, where the file system has any, so that it can be listed."""
        with _explained(self.url, "written"):
            self.filesystem.makedirs(self.root, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, in place of one that is there."""
        upload = self.upload(name, len(data))
        upload.write(data)
        upload.finish()

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one: fsspec has no way to do both at once."""
        with _explained(f"{self.url}/{name}", "written"):
            if self.filesystem.exists(f"{self.root}/{name}"):
                return False
        self.put(name, data)
        return True

    def upload(self, name: str, nbytes: int, num_parts: int = NUM_PARTS) -> _FileUpload:
        """Begin a file. What is there of it before it is finished depends on the file system."""
        where, path = f"{self.url}/{name}", f"{self.root}/{name}"
        with _explained(where, "written"):
            self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self.filesystem.open(path, "wb")
        return _FileUpload(where=where, path=path, filesystem=self.filesystem, file=file)

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            with _explained(f"{self.url}/{name}", "removed"):
                self.filesystem.rm_file(f"{self.root}/{name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileUpload:
    where: str
    path: str
    filesystem: Any
    file: Any

    def write(self, data: bytes | memoryview) -> None:
        with _explained(self.where, "written"):
            self.file.write(data)

    def finish(self) -> None:
        try:
            with _explained(self.where, "written"):
                self.file.close()
        except InputError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Close the file, which on most file systems makes it appear, and remove it."""
        with suppress(Exception):  # what made us abandon it may still be so
            self.file.close()
        with _explained(self.where, "removed"):
            if self.filesystem.exists(self.path):
                self.filesystem.rm_file(self.path)


def open_filesystem(url: str) -> FilesystemClient:
    """Open a folder by an address that fsspec understands.

    Raises:
        InputError: fsspec is not installed, or has nothing for this scheme, or needs a package for it.
    """
    scheme = url.partition("://")[0]
    authority = url.partition("://")[2].partition("/")[0]
    if ":" in authority.rpartition("@")[0]:
        problem = "a password does not belong in an address"
        raise StoreError(f"{scheme}://…", problem, code="store.credentials-in-address")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        problem = f"{scheme}:// is read with fsspec"
        raise StoreError(url, problem, "pip install fsspec", code="store.missing-package") from error
    options = {"get_client": open_session} if scheme in ("http", "https") else {}
    with _explained(url):
        filesystem, root = url_to_fs(url, use_listings_cache=False, **options)
    return FilesystemClient(url=url.rstrip("/"), root=root.rstrip("/"), filesystem=filesystem)


def _refuse_unread(error: OSError) -> None:
    """Raise what stopped a listing: fsspec lists a folder as empty that it cannot read."""
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _explained(where: str, verb: str = "read") -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        # Over HTTP, every failure to look a file up is this one; the cause says more.
        cause = error.__cause__
        if isinstance(cause, InputError):  # of our own checks
            raise cause from error
        if cause is None or getattr(cause, "status", None) == 404:
            raise StoreError(where, "there is no such file", code="store.no-such-file") from error
        raise StoreError(where, f"cannot be {verb}: {without_queries(str(cause))}", code="store.refused") from error
    except NotImplementedError as error:
        problem = f"cannot be {verb}: this kind of store does not support that"
        raise StoreError(where, problem, code="store.unsupported") from error
    except Exception as error:  # file systems from anywhere, each with errors of its own
        problem = f"cannot be {verb}: {without_queries(str(error)) or type(error).__name__}"
        raise StoreError(where, problem, code="store.refused") from error
