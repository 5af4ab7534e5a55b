"""Which tensors a stage stores, and where: in shards of its own, or in spans of the original files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

from manifests.errors import (
    InputError,
    ManifestError,
    ShardError,
    SourceError,
)
from manifests.models import module_of
from manifests.safetensors import Header, in_data_order
from manifests.schema import WEIGHTS, Holds, Manifest, OriginalFile, Shard, Span, Stage
from manifests.slices import Slice, problem_with_slices, slices_in
from manifests.store import check_shard, open_shard
from stores.base import SOURCE_CHANGED, Folder, InputFile, read_file_header
from stores.headers import at_once
from stores.local import LocalFolder
from stores.open import open_store
from stores.remote import check_remote

__all__ = ["Bundles", "TensorAt", "join_slices", "tensors_in"]


@dataclass(frozen=True, slots=True)
class TensorAt:
    """Where the bytes of a tensor are, or of a slice of it: a box of the whole that begins at `offset`.

    `digest` is bare hex, None where nobody has computed it yet.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]  # of what is here
    file: InputFile
    begin: int  # from the start of the file, in bytes
    nbytes: int
    digest: str | None = None
    part: Slice | None = None  # None: the whole tensor

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    @property
    def offset(self) -> tuple[int, ...]:
        return (0,) * len(self.shape) if self.part is None else self.part.offset

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.part is None else self.part.whole_shape


def tensors_in(
    file: InputFile,
    header: Header,
    digests: Mapping[str, str] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[TensorAt]:
    """Return a shard's tensors in the order of their bytes. Names that are among `names` are those very objects.

    Raises:
        InputError: what the header of a bundle's shard says of slices is impossible.
    """
    slices = slices_in(header, str(file)) if digests is not None else {}
    sizes: dict[int, int] = {}  # one object for equal numbers: there may be a million tensors
    return [
        TensorAt(
            names.get(entry.name, entry.name),
            entry.dtype,
            entry.shape,
            file,
            header.nbytes + entry.begin,
            sizes.setdefault(entry.nbytes, entry.nbytes),
            digests[entry.name] if digests else None,
            slices.get(entry.name),
        )
        for entry in in_data_order(header.tensors)
    ]


def join_slices(tensors: Iterable[TensorAt]) -> dict[str, tuple[TensorAt, ...]]:
    """Return the slices of each tensor, in order; of a tensor that is stored whole, that one.

    Raises:
        InputError: a tensor is stored twice, or its slices are not all of it.
    """
    found: dict[str, list[TensorAt]] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, []).append(tensor)
    for name, parts in found.items():
        where = f"{parts[-1].file}: {name!r}"
        if len(parts) > 1 and any(part.part is None for part in parts):
            raise ShardError(where, "is in two shards", code="shard.inconsistent-slices")
        if len({part.dtype for part in parts}) > 1:
            wrong = f"expected {parts[0].dtype} as in other slices, found {parts[-1].dtype}"
            raise ShardError(f"{where}.dtype", wrong, code="shard.inconsistent-slices")
        slices = [part.part for part in parts if part.part is not None]
        if slices and (problem := problem_with_slices(slices)):
            hint = "a shard of this stage is missing or stray: write the bundle again"
            raise ShardError(where, problem, hint, code="shard.inconsistent-slices")
        parts.sort(key=attrgetter("offset"))
    return {name: tuple(parts) for name, parts in found.items()}


class Bundles:
    """The bundles of the manifest in folder `root`. Files are opened, and checked, when a stage needs them.

    Each file is opened once, however often its tensors are asked for and however many stages share it.
    """

    def __init__(self, manifest: Manifest, root: Path | Folder) -> None:
        self.manifest = manifest
        self.root = LocalFolder(root) if isinstance(root, Path) else root
        self._folder: Folder | None = None
        self._originals: dict[int, list[TensorAt]] = {}
        self._shards: dict[Shard, list[TensorAt]] = {}
        self._modules: dict[int, frozenset[str]] = {}  # by stage
        self._ahead: dict[Shard | int, Future[Header]] = {}  # by shard, or by the number of an original file

    def read_ahead(self, stages: Iterable[Stage], holds: Container[Holds] = (WEIGHTS,)) -> None:
        """Read the headers of these stages' files, several at a time, unless they are on this machine.

        One that is refused is refused again by `tensors_on`.
        """
        calls: dict[Shard | int, Callable[[], Header]] = {}
        for stage in stages:
            if not isinstance(self.root, LocalFolder):
                calls |= {shard: partial(self._open_shard, shard) for shard in stage.shards if shard.holds in holds}
            if stage.spans and WEIGHTS in holds and not isinstance(self._open_folder(), LocalFolder):
                calls |= {span.file: partial(self._open_original, span.file) for span in stage.spans}
        self._ahead |= at_once(calls)

    def tensors_on(self, stage: Stage, holds: Holds = WEIGHTS) -> list[TensorAt]:
        """Return the tensors that a stage stores, by their names there, in the order of their bytes in each file.

        A tensor that is stored in slices comes once for each; see `join_slices`.

        Raises:
            InputError: a file is missing, damaged, or not the one that the manifest was written for; a span
                cuts a tensor, or contains one that neither a module nor a tie puts on this stage.
        """
        return [tensor for read in self.parts_of(stage, (holds,)) for tensor in read()]

    def parts_of(self, stage: Stage, holds: Container[Holds]) -> Iterator[Callable[[], list[TensorAt]]]:
        """Yield a call for each file of a stage's bundle, which returns the tensors there as `tensors_on` does."""
        for shard in stage.shards:
            if shard.holds in holds:
                yield partial(self._in_shard, shard)
        if WEIGHTS in holds:
            for number, spans in groupby(stage.spans, attrgetter("file")):
                yield partial(self._in_spans, stage, number, tuple(spans))

    def original_file(self, number: int) -> InputFile:
        """Return a file that spans refer to, unread and unchecked.

        Raises:
            InputError: the folder is malformed or cannot be reached.
        """
        assert self.manifest.virtual is not None
        return self._open_folder().file(self.manifest.virtual.files[number].path)

    def _open_folder(self) -> Folder:
        """Return the folder of the original files."""
        virtual = self.manifest.virtual
        assert virtual is not None
        if self._folder is None:
            check_remote(virtual.location, str(self.root))
            revision = f"@{virtual.revision}" if virtual.revision else ""
            self._folder = open_store(virtual.location + revision)
        return self._folder

    def _in_shard(self, shard: Shard) -> list[TensorAt]:
        if shard not in self._shards:
            header = self._ahead.pop(shard).result() if shard in self._ahead else self._open_shard(shard)
            file = self.root.file(shard.path)
            self._shards[shard] = tensors_in(file, header, header.digests(str(file)))
        return self._shards[shard]

    def _open_shard(self, shard: Shard) -> Header:
        """Read a shard's header and check it against the manifest; what is on this machine, as all do there."""
        file = self.root.file(shard.path)
        if isinstance(self.root, LocalFolder):
            with suppress(InputError):  # it is missing, which is reported better below
                _ = file.nbytes  # from here on the file is the one that is here now
            return open_shard(self.root.path, shard)
        check_shard(str(file), shard, file.nbytes)
        header = read_file_header(file)
        check_shard(str(file), shard, file.nbytes, header)
        return header

    def _in_spans(self, stage: Stage, number: int, spans: Sequence[Span]) -> list[TensorAt]:
        tensors = self._in_original(number)
        found = []
        for span in spans:
            first, last = (bisect_left(tensors, edge, key=attrgetter("begin")) for edge in (span.begin, span.end))
            inside = tensors[first:last]
            if not inside or (inside[0].begin, inside[-1].end) != (span.begin, span.end):
                where = f"stages[{stage.index}].spans: {self.original_file(number)}"
                problem = f"bytes {span.begin} to {span.end} are not whole tensors"
                raise ManifestError(where, problem, code="manifest.wrong-span")
            found += [replace(tensor, name=name) for tensor in inside for name in self._names_on(stage, tensor)]
        return found

    def _in_original(self, number: int) -> list[TensorAt]:
        if number not in self._originals:
            header = self._ahead.pop(number).result() if number in self._ahead else self._open_original(number)
            tensors = tensors_in(self.original_file(number), header)
            self._originals[number] = [tensor for tensor in tensors if tensor.nbytes]
        return self._originals[number]

    def _open_original(self, number: int) -> Header:
        assert self.manifest.virtual is not None
        return _read_original(self.original_file(number), self.manifest.virtual.files[number])

    def _names_on(self, stage: Stage, tensor: TensorAt) -> Sequence[str]:
        """Return the names of a tensor on a stage: its own, or those that are tied to it."""
        if stage.index not in self._modules:
            self._modules[stage.index] = frozenset(stage.modules)
        if module_of(tensor.name, self._modules[stage.index]) is not None:
            return (tensor.name,)
        groups = (group.members for group in self.manifest.ties)
        tied = [members for members in groups if any(member.fqn == tensor.name for member in members)]
        names = [member.fqn for members in tied for member in members if member.stage == stage.index]
        if not names:
            where, problem = f"{tensor.file}: {tensor.name!r}", f"belongs to no module of stage {stage.index}"
            raise ManifestError(where, problem, code="manifest.wrong-span")
        return names


def _read_original(file: InputFile, original: OriginalFile) -> Header:
    """Read an original file's header, if the file still is what it was when the manifest was written."""
    _expect(file, f"{original.nbytes} bytes", f"{file.nbytes} bytes")
    _expect(file, original.pin, file.fingerprint)
    header = read_file_header(file)
    _expect(file, f"header {original.digest}", f"header {header.digest}")
    return header


def _expect(file: InputFile, expected: str, found: str) -> None:
    if found != expected:
        raise SourceError(
            str(file),
            f"expected {expected} (virtual.files of manifest.json), found {found}",
            "the source changed after the manifest was written; write that again with reshard pack --virtual",
            code=SOURCE_CHANGED,
        )
