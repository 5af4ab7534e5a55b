"""Which tensors a stage stores, and where: in shards of its own, or in spans of the original files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from manifests.errors import InputError
from manifests.models import module_of
from manifests.safetensors import Header
from manifests.schema import WEIGHTS, Holds, Manifest, PinnedFile, Shard, Span, Stage
from manifests.store import open_shard
from stores.base import Folder, InputFile, read_file_header
from stores.local import LocalFile
from stores.open import open_store

__all__ = ["Bundles", "TensorAt", "tensors_in"]


@dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor's bytes in a file. `digest` is bare hex, None where nobody has computed it yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: InputFile
    begin: int  # from the start of the file, in bytes
    nbytes: int
    digest: str | None = None

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def tensors_in(file: InputFile, header: Header, digests: Mapping[str, str] | None = None) -> list[TensorAt]:
    """Give a shard's tensors in the order of their bytes."""
    return [
        TensorAt(
            entry.name,
            entry.dtype,
            entry.shape,
            file,
            header.nbytes + entry.begin,
            entry.nbytes,
            digests[entry.name] if digests else None,
        )
        for entry in sorted(header.tensors, key=lambda entry: (entry.begin, entry.end))
    ]


class Bundles:
    """The bundles of the manifest in folder `root`. Files are opened, and checked, when a stage needs them.

    An original file is checked once, however many stages share it.
    """

    def __init__(self, manifest: Manifest, root: Path) -> None:
        self.manifest, self.root = manifest, root
        self._folder: Folder | None = None
        self._originals: dict[int, list[TensorAt]] = {}

    def tensors_on(self, stage: Stage, holds: Holds = WEIGHTS) -> list[TensorAt]:
        """Give the tensors that a stage stores, by their names there, in the order of their bytes in each file.

        Raises:
            InputError: a file is missing, damaged, or not the one that the manifest was written for; a span
                cuts a tensor, or holds one that neither a module nor a tie puts on this stage.
        """
        return [tensor for read in self.parts_of(stage, (holds,)) for tensor in read()]

    def parts_of(self, stage: Stage, holds: Container[Holds]) -> Iterator[Callable[[], list[TensorAt]]]:
        """Give a call for each file of a stage's bundle, which gives the tensors there as `tensors_on` does."""
        for shard in stage.shards:
            if shard.holds in holds:
                yield partial(self._in_shard, shard)
        if WEIGHTS in holds:
            for number, spans in groupby(stage.spans, attrgetter("file")):
                yield partial(self._in_spans, stage, number, tuple(spans))

    def original_file(self, number: int) -> InputFile:
        """Give a file that spans refer to, unread and unchecked.

        Raises:
            InputError: the folder is malformed or cannot be reached.
        """
        virtual = self.manifest.virtual
        assert virtual is not None
        if self._folder is None:
            revision = f"@{virtual.revision}" if virtual.revision else ""
            self._folder = open_store(virtual.location + revision)
        return self._folder.file(virtual.files[number].path)

    def _in_shard(self, shard: Shard) -> list[TensorAt]:
        header, path = open_shard(self.root, shard), self.root / shard.path
        return tensors_in(LocalFile(path), header, header.digests(str(path)))

    def _in_spans(self, stage: Stage, number: int, spans: Sequence[Span]) -> list[TensorAt]:
        tensors = self._in_original(number)
        found = []
        for span in spans:
            first, last = (bisect_left(tensors, edge, key=attrgetter("begin")) for edge in (span.begin, span.end))
            inside = tensors[first:last]
            if not inside or (inside[0].begin, inside[-1].end) != (span.begin, span.end):
                where = f"stages[{stage.index}].spans: {self.original_file(number)}"
                raise InputError(where, f"bytes {span.begin} to {span.end} are not whole tensors")
            found += [replace(tensor, name=name) for tensor in inside for name in self._names_on(stage, tensor)]
        return found

    def _in_original(self, number: int) -> list[TensorAt]:
        assert self.manifest.virtual is not None
        if number not in self._originals:
            file = self.original_file(number)
            header = _read_pinned(file, self.manifest.virtual.files[number])
            self._originals[number] = [tensor for tensor in tensors_in(file, header) if tensor.nbytes]
        return self._originals[number]

    def _names_on(self, stage: Stage, tensor: TensorAt) -> Sequence[str]:
        """Give the names of a tensor on a stage: its own, or those that are tied to it."""
        if module_of(tensor.name, stage.modules) is not None:
            return (tensor.name,)
        groups = (group.members for group in self.manifest.ties)
        tied = [members for members in groups if any(member.fqn == tensor.name for member in members)]
        names = [member.fqn for members in tied for member in members if member.stage == stage.index]
        if not names:
            raise InputError(f"{tensor.file}: {tensor.name!r}", f"belongs to no module of stage {stage.index}")
        return names


def _read_pinned(file: InputFile, pinned: PinnedFile) -> Header:
    """Read an original file's header, if the file still is what it was when the manifest was written."""
    _expect(file, f"{pinned.nbytes} bytes", f"{file.nbytes} bytes")
    _expect(file, pinned.pin, file.pin)
    header = read_file_header(file)
    _expect(file, f"header {pinned.digest}", f"header {header.digest}")
    return header


def _expect(file: InputFile, expected: str, found: str) -> None:
    if found != expected:
        raise InputError(
            str(file),
            f"expected {expected} (virtual.files of manifest.json), found {found}",
            "the source changed after the manifest was written; write that again with reshard pack --virtual",
        )
