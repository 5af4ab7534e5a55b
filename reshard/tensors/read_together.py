"""Small files that are elsewhere, requested at the same time and read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from manifests.index import split_by_size
from manifests.jsontext import MAX_CONFIG_NBYTES
from reshard.tensors.lazy import MemoryFile
from stores.base import Folder, InputFile, read_head, read_whole
from stores.headers import at_once
from stores.prefetch import RemoteFile

_MOST_NBYTES = 64 << 20  # in memory at a time
_MOST_HEADS = 256  # of 128 KiB


def read_together(files: Sequence[InputFile]) -> Iterator[InputFile]:
    """Yield files in order; remote ones are in memory, unless they are long.

    Raises:
        InputError: as `read_whole`.
    """
    for batch in split_by_size(files, lambda file: file.nbytes, _MOST_NBYTES):
        remote = [file for file in batch if isinstance(file, RemoteFile) and file.nbytes <= MAX_CONFIG_NBYTES]
        data = at_once({file: partial(read_whole, file) for file in remote})
        for file in batch:
            yield MemoryFile(str(file), data.pop(file).result(), file.fingerprint) if file in data else file


class FolderInPart:
    """A folder, whose files of these names are read together now, and with them the `heads` of remote shards."""

    def __init__(self, folder: Folder, names: Sequence[str], shards: Sequence[str]) -> None:
        self._folder = folder
        files = [folder.file(name) for name in names]
        remote = [file for file in map(folder.file, shards[:_MOST_HEADS]) if isinstance(file, RemoteFile)]
        calls: dict[InputFile, Callable[[], bytes]] = {file: partial(read_head, file) for file in remote}
        with ThreadPoolExecutor(1, thread_name_prefix="heads") as beside:
            heads = beside.submit(at_once, calls)
            self._read = dict(zip(names, read_together(files), strict=True))
        self.heads = heads.result()  # a failure is raised where one is used
        self.kind, self.location, self.revision = folder.kind, folder.location, folder.revision

    def __str__(self) -> str:
        return str(self._folder)

    def names(self) -> tuple[str, ...]:
        return self._folder.names()

    def file(self, name: str) -> InputFile:
        return self._read.get(name) or self._folder.file(name)
