"""Whether the files that an output was made from were changed meanwhile: checked before the commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import AuxiliaryAt
from reshard.tensors.checksums import stored_file
from reshard.tensors.lazy import DerivedFile
from stores.base import InputFile
from stores.local import LocalFile


def check_unchanged(shards: Iterable[OutputShard], auxiliary: Iterable[AuxiliaryAt]) -> None:
    """Refuse to commit an output if local files that it was made from were changed while they were read.

    Files of other stores are compared with their etag at every read.

    Raises:
        SourceError: a file was changed, replaced or removed.
    """
    files = dict.fromkeys(origin.file for shard in shards for origin in shard.origins)
    for file in dict.fromkeys(_all_of((*files, *(item.file for item in auxiliary)))):
        if isinstance(file := stored_file(file), LocalFile):
            file.check_unchanged()


def _all_of(files: Iterable[InputFile]) -> Iterator[InputFile]:
    for file in files:
        if isinstance(file, DerivedFile):
            yield from _all_of(origin.file for origin in file.origins)
        else:
            yield file
