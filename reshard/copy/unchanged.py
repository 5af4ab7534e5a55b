"""Whether the files that an output was made of are still those that were read: asked before it is committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import CarriedAt
from reshard.tensors.lazy import DerivedFile
from stores.base import InputFile
from stores.local import LocalFile

__all__ = ["check_unchanged"]


def check_unchanged(shards: Iterable[OutputShard], carried: Iterable[CarriedAt]) -> None:
    """Refuse to commit what was made of files on this machine that somebody wrote to meanwhile.

    Files of other stores are pinned by their etag whenever they are read.

    Raises:
        InputError: naming the first file that was changed, replaced or removed.
    """
    files = dict.fromkeys(origin.file for shard in shards for origin in shard.origins)
    for file in dict.fromkeys(_all_of((*files, *(item.file for item in carried)))):
        if isinstance(file, LocalFile):
            file.check_unchanged()


def _all_of(files: Iterable[InputFile]) -> Iterator[InputFile]:
    for file in files:
        if isinstance(file, DerivedFile):
            yield from _all_of(origin.file for origin in file.origins)
        else:
            yield file
