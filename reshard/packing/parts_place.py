"""Where the parts of a pack are, and what they have written: for folders and for buckets. See Note [Parts]."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from manifests.schema import Manifest
from reshard.packing.bundles import index_file
from reshard.tensors.lazy import MadeFile
from stores.open import Address

OF_PART = re.compile(r"(?P<folder>parts-[0-9a-f]{12})/part-(?P<number>[0-9]{5})-of-(?P<of>[0-9]{5})/.+", re.ASCII)

FileFacts = tuple[int, str]  # size in bytes; ETag of an object, "" of a file


class PartsPlace(Protocol):
    """Where the parts of one output are: beside a folder, or below a prefix."""

    where: str  # the output

    def check_free(self, folder: str, small: Collection[str]) -> bool:
        """Return whether an output can be written; False if the parts in `folder` have been committed already.

        Raises:
            OutputError: something else is there.
        """
        ...

    def address(self, name: str) -> Address: ...
    def files(self) -> Mapping[str, FileFacts]:
        """Return the files of all parts, by paths that start with the folder of their plan."""
        ...

    def load(self, name: str) -> bytes: ...
    def remove(self, where: str) -> None:
        """Remove a part that is damaged."""
        ...

    def committed(self, folders: Collection[str]) -> Manifest | None:
        """Return the manifest if it is published, once what only its commit needed is removed."""
        ...

    def publish(self, merged: Merged) -> Manifest: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What all parts have written: the manifest with final digests, and the part's folder by the path of each file."""

    folder: str
    manifest: Manifest
    folder_of: Mapping[str, str]
    indexed: Mapping[str, Sequence[str]]  # the tensors of each shard that the index lists
    data_nbytes: int  # of these

    def index(self, path_of: Mapping[str, str] | None = None) -> MadeFile:
        """Return the index; `path_of` has the final paths of shards that are not those of the plan."""
        weights = {(path_of or {}).get(path, path): names for path, names in self.indexed.items()}
        return index_file(weights, self.data_nbytes)
