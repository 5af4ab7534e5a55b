"""The tensors of a stage and their location: in its shards, or in spans of the original files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

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
from stores.local import LocalFolder
from stores.open import open_store
from stores.workers import at_once


@dataclass(frozen=True, slots=True)
class TensorAt:
    """The location of a tensor's bytes, or of a slice's: a region of the whole tensor that begins at `offset`.

    `blake3` is its digest; None if unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the stored tensor or slice
    file: InputFile
    begin: int  # from the start of the file, in bytes
    nbytes: int
    blake3: bytes | None = None
    part: Slice | None = None  # None: the whole tensor

    @property
    def place(self) -> str:
        return f"{self.file}: {self.name!r}"

    @property
    def digest(self) -> str | None:
        """Its digest in hex, without a prefix."""
        return None if self.blake3 is None else self.blake3.hex()

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    @property
    def offset(self) -> tuple[int, ...]:
        return (0,) * len(self.shape) if self.part is None else self.part.offset

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.part is None else self.part.whole_shape


def tensors_in(file: InputFile, header: Header, digests: Sequence[str] | None = None) -> list[TensorAt]:
    """Return a shard's tensors ordered by offset; hex `digests` are in header order."""
    slices, first = slices_in(header, str(file)) if digests is not None else {}, header.nbytes
    raw = {} if digests is None else dict(zip(header.names, map(bytes.fromhex, digests), strict=True))
    return [
        TensorAt(at.name, at.dtype, at.shape, file, first + at.begin, at.nbytes, raw.get(at.name), slices.get(at.name))
        for at in in_data_order(header.tensors)
    ]


def join_slices(tensors: Iterable[TensorAt]) -> dict[str, tuple[TensorAt, ...]]:
    """Return the slices of each tensor, in order; a tensor that is stored whole is a single one."""
    parts_of: dict[str, list[TensorAt]] = {}
    for tensor in tensors:
        parts_of.setdefault(tensor.name, []).append(tensor)
    for name, parts in parts_of.items():
        where = f"{parts[-1].file}: {name!r}"
        if len(parts) > 1 and any(part.part is None for part in parts):
            raise ShardError(where, "expected in one shard, found in two", code="shard.inconsistent-slices")
        if len({part.dtype for part in parts}) > 1:
            wrong = f"expected {parts[0].dtype} as in other slices, found {parts[-1].dtype}"
            raise ShardError(f"{where}.dtype", wrong, code="shard.inconsistent-slices")
        slices = [part.part for part in parts if part.part is not None]
        if slices and (problem := problem_with_slices(slices)):
            hint = "a shard of this stage is missing, or an unrelated one is present; write the bundle again"
            raise ShardError(where, problem, hint, code="shard.inconsistent-slices")
        parts.sort(key=attrgetter("offset"))
    return {name: tuple(parts) for name, parts in parts_of.items()}


class Bundles:
    """The bundles of the manifest in folder `root`. Files are opened and checked on demand, each once."""

    def __init__(self, manifest: Manifest, root: Path | Folder) -> None:
        self.manifest = manifest
        self.root = LocalFolder(root) if isinstance(root, Path) else root
        self._folder: Folder | None = None
        self._originals: dict[int, list[TensorAt]] = {}
        self._shards: dict[Shard, list[TensorAt]] = {}
        self._modules: dict[int, frozenset[str]] = {}  # by stage
        self._ahead: dict[Shard | int, Future[Header]] = {}  # by shard, or by the number of an original file

    def read_ahead(self, stages: Iterable[Stage], holds: Container[Holds] = (WEIGHTS,)) -> None:
        """Prefetch the headers of these stages' files concurrently, unless they are on this machine.

        Errors are raised by `tensors_on`.
        """
        calls: dict[Shard | int, Callable[[], Header]] = {}
        for stage in stages:
            if not isinstance(self.root, LocalFolder):
                calls |= {shard: partial(self._open_shard, shard) for shard in stage.shards if shard.holds in holds}
            if stage.spans and WEIGHTS in holds and not isinstance(self._open_folder(), LocalFolder):
                calls |= {span.file: partial(self._open_original, span.file) for span in stage.spans}
        self._ahead |= at_once(calls)

    def tensors_on(self, stage: Stage, holds: Holds = WEIGHTS) -> list[TensorAt]:
        """Return the tensors of a stage under their names on it, ordered by offset within each file.

        A tensor in slices occurs once for each slice; see `join_slices`.
        """
        return [tensor for read in self.file_readers(stage, (holds,)) for tensor in read()]

    def file_readers(self, stage: Stage, holds: Container[Holds]) -> Iterator[Callable[[], Iterable[TensorAt]]]:
        """Yield a function for each file of a stage's bundle, which yields its tensors as `tensors_on`."""
        for shard in stage.shards:
            if shard.holds in holds:
                yield partial(self._in_shard, shard)
        if WEIGHTS in holds:
            for number, spans in groupby(stage.spans, attrgetter("file")):
                yield partial(self._in_spans, stage, number, tuple(spans))

    def original_file(self, number: int) -> InputFile:
        """Return a file that spans refer to, without reading or checking it."""
        assert self.manifest.virtual is not None
        return self._open_folder().file(self.manifest.virtual.files[number].path)

    def _open_folder(self) -> Folder:
        virtual = self.manifest.virtual
        assert virtual is not None
        if self._folder is None:
            revision = f"@{virtual.revision}" if virtual.revision else ""
            self._folder = open_store(virtual.location + revision)
        return self._folder

    def _in_shard(self, shard: Shard) -> list[TensorAt]:
        if shard not in self._shards:
            header = self._ahead.pop(shard).result() if shard in self._ahead else self._open_shard(shard)
            file = self.root.file(shard.path)
            self._shards[shard] = tensors_in(file, header, header.digest_table(str(file)))
        return self._shards[shard]

    def _open_shard(self, shard: Shard) -> Header:
        file = self.root.file(shard.path)
        if isinstance(self.root, LocalFolder):
            with suppress(InputError):  # if it is missing, `open_shard` reports it better
                _ = file.nbytes  # records the file's state: later changes are refused
            return open_shard(self.root.path, shard)
        check_shard(str(file), shard, file.nbytes)
        header = read_file_header(file)
        check_shard(str(file), shard, file.nbytes, header)
        return header

    def _in_spans(self, stage: Stage, number: int, spans: Sequence[Span]) -> list[TensorAt]:
        tensors = self._in_original(number)
        in_spans: list[TensorAt] = []
        for span in spans:
            first, last = (bisect_left(tensors, edge, key=attrgetter("begin")) for edge in (span.begin, span.end))
            inside = tensors[first:last]
            if not inside or (inside[0].begin, inside[-1].end) != (span.begin, span.end):
                where = f"stages[{stage.index}].spans: {self.original_file(number)}"
                problem = f"expected whole tensors, found bytes {span.begin} to {span.end}"
                raise ManifestError(where, problem, code="manifest.wrong-span")
            in_spans += [replace(tensor, name=name) for tensor in inside for name in self._names_on(stage, tensor)]
        return in_spans

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
        """Return the names of a tensor on a stage: its own, or those tied to it."""
        if stage.index not in self._modules:
            self._modules[stage.index] = frozenset(stage.modules)
        if module_of(tensor.name, self._modules[stage.index]) is not None:
            return (tensor.name,)
        groups = (group.members for group in self.manifest.ties)
        tied = [members for members in groups if any(member.fqn == tensor.name for member in members)]
        names = [member.fqn for members in tied for member in members if member.stage == stage.index]
        if not names:
            problem = f"is not in a module of stage {stage.index}"
            raise ManifestError(tensor.place, problem, code="manifest.wrong-span")
        return names


def _read_original(file: InputFile, original: OriginalFile) -> Header:
    """Read an original file's header and check that the file is unchanged since the manifest was written."""
    _expect(file, f"{original.nbytes} bytes", f"{file.nbytes} bytes")
    _expect(file, original.pin, file.fingerprint)
    header = read_file_header(file)
    _expect(file, f"header {original.digest}", f"header {header.digest}")
    return header


def _expect(file: InputFile, expected: str, actual: str) -> None:
    if actual != expected:
        raise SourceError(
            str(file),
            f"expected {expected} (virtual.files of manifest.json), found {actual}",
            "the source changed after the manifest was written; pack it again with reshard pack --virtual",
            code=SOURCE_CHANGED,
        )
