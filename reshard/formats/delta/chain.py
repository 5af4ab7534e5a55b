"""A chain of versions in a folder or a bucket, `weight_v000001` and so on: what their indices and headers say.

# Note [A version of a chain]
Each version is a folder with an index, which is written last: without it, there is no version. A full version is a
Hugging Face folder. A delta has safetensors files of compressed differences to the version before (see
`reshard.formats.delta.codec`), for the tensors that changed, with the checksum of each one's new state in the header's
`__metadata__`. The index of a delta says `version`, `base_version`, `delta_encoding`, `compression_format` and
`checksum_format` in its `metadata`. slime, its patch of SGLang and miles write and read that.

What we add to `metadata`, and they ignore: `state`, the digest of all tensors of the version, changed or not;
`base_state`, that of its base; and `files`, the digests of the auxiliary files, of which a delta contains those that
changed. So a chain is verified from its first full version on, without a byte of the weights being read; a chain of
others has checksums of changed tensors alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from manifests.digest import PREFIX, digest_bytes, is_digest, split_digests
from manifests.errors import Parameter, SourceError
from manifests.index import ADAPTER_NAMES, INDEX_NAME
from manifests.jsontext import parse_json_object
from manifests.paths import problem_with_path
from manifests.safetensors import DIGESTS_KEY
from manifests.schema import GIT_ATTRIBUTES_NAME
from manifests.store import write_file
from manifests.versions import BLAKE3, ZSTD, digest_of_state, folder_of
from reshard.formats.auxiliary import names_weights
from reshard.formats.delta.codec import BAD_DELTA, CHECKSUMS, ENCODINGS, Patch
from reshard.formats.huggingface.weight_map import read_shard_index
from reshard.formatting import list_words
from stores.address import SCHEME, is_url, place_of
from stores.base import Blocks, Folder, InputFile, read_file_header, read_whole
from stores.bundles import TensorAt, tensors_in
from stores.local import LocalFile, LocalFolder
from stores.open import Address, open_store
from stores.versions import numbers_in
from stores.workers import at_once

_AT_VERSION = re.compile(r"(.+)@([0-9]{1,12})", re.DOTALL)
_NUM_TOGETHER = 16  # indices


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """What the index of a version says. `base` is None for a full version; `state` where it is not recorded.

    `shards` and `files` are paths in the version's folder; `files` are all auxiliary files, with digests.
    """

    number: int
    base: int | None
    encoding: str
    checksum_format: str
    state: str | None
    base_state: str | None
    files: Mapping[str, str] | None
    weight_map: Mapping[str, str]

    @property
    def is_full(self) -> bool:
        return self.base is None

    @property
    def folder(self) -> str:
        return folder_of(self.number)


def split_version(source: str) -> tuple[str, int | None]:
    """Return the address of a chain and the version of `CHAIN@N`; anything else is returned as it is.

    So is the whole name of something that exists, for which a prefix of a bucket is listed.
    """
    match = _AT_VERSION.fullmatch(source)
    if match is None or source.startswith(SCHEME):
        return source, None
    place = place_of(source) if is_url(source) else source  # a path, of file://
    if open_store(source).names() if is_url(place) else os.path.lexists(place):
        return source, None
    return (match[1], int(match[2])) if is_url(source) or os.path.isdir(match[1]) else (source, None)


@dataclass(frozen=True, slots=True)
class ChainAt:
    """A chain as a source, at a version: the folder that `Format.open_checkpoint` gets."""

    folder: Folder
    number: int | None  # None: the newest
    kind: str = "delta"
    revision: None = None

    def __str__(self) -> str:
        return self.location

    @property
    def location(self) -> str:
        return self.folder.location if self.number is None else f"{self.folder.location}@{self.number}"

    def names(self) -> tuple[str, ...]:
        return self.folder.names()

    def file(self, name: str) -> InputFile:
        return self.folder.file(name)


@dataclass(frozen=True, slots=True)
class Chain:
    """The complete versions below a folder, in ascending order."""

    folder: Folder
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.folder)

    def version(self, number: int) -> Version:
        """Read the index of a version."""
        if number not in self.numbers:
            ends = dict.fromkeys(self.numbers[:1] + self.numbers[-1:])
            there = " to ".join(map(str, ends)) or "none"
            problem, hint = f"no version {number}; the chain has {there}", "reshard delta log CHAIN lists them"
            raise SourceError(str(self), problem, hint, code="source.no-version")
        return _read_version(self.folder, number)

    def versions(self) -> list[Version]:
        """Read the indices of all versions."""
        return [*self.newest_first()][::-1]

    def newest_first(self, numbers: Sequence[int] | None = None) -> Iterator[Version]:
        """Read the indices of versions, of all by default; one that is malformed raises when it is that one's turn."""
        numbers = self.numbers if numbers is None else numbers
        calls = {number: partial(self.version, number) for number in reversed(numbers)}
        for read in at_once(calls).values():  # those after a failure may be missing
            yield read.result()

    def files(self, number: int) -> Mapping[str, str] | None:
        """Return the digests of a version's auxiliary files; one of slime's has those of the version before, if any."""
        with suppress(SourceError):  # versions before are missing
            return next((version.files for version in reversed(self.line(number)) if version.files is not None), None)
        return None

    def find_file(self, path: str, number: int) -> InputFile | None:
        """Return an auxiliary file as a version has it: from the last one that contains it."""
        names = [f"{folder_of(other)}/{path}" for other in reversed(self.numbers) if other <= number]
        if isinstance(self.folder, LocalFolder):
            root = self.folder.path
            name = next((name for name in names if (root / name).is_file()), None)
        else:
            listed = set(self.folder.names())
            name = next((name for name in names if name in listed), None)
        return None if name is None else self.folder.file(name)

    def line(self, number: int, after: int = 0) -> list[Version]:
        """Return the versions that make up a version, in order: from the newest full one on, or those `after` another.

        The first is a delta if the chain has no full version before, or where its base is `after`.
        """
        versions: list[Version] = []
        self.version(number)
        for end in range(self.numbers.index(number) + 1, 0, -_NUM_TOGETHER):
            for version in self.newest_first(self.numbers[max(0, end - _NUM_TOGETHER) : end]):
                if version.number > after:
                    versions.insert(0, version)
                if version.is_full or version.number <= after:
                    _check_line(versions, str(self))
                    return versions
        _check_line(versions, str(self))
        return versions


def open_chain(address: Address) -> Chain:
    """List the versions of a chain; a folder that does not exist has none."""
    return list_versions(open_store(str(address)))


def open_versions(address: Address) -> Chain:
    """Open a chain that has versions; `CHAIN@N` is one of them, and no chain."""
    place, number = split_version(str(address))
    chain = open_chain(place)
    if number is not None or not chain.numbers:
        hint = "check the path for typos; reshard delta publish writes the first one"
        hint = hint if number is None else f"name {place}, and the version as {Parameter('version', number)}"
        raise SourceError(str(address), "has no versions", hint, code="source.no-version")
    return chain


def list_versions(folder: Folder) -> Chain:
    return Chain(folder, numbers_in(folder))


def read_patches(folder: Folder, version: Version, scratch: Path | None = None) -> dict[str, Patch]:
    """Read the headers of a delta; files that are elsewhere are copied to `scratch` as a whole, if there is one.

    Otherwise each tensor would be a request, for each version.
    """
    patches: dict[str, Patch] = {}
    paths = dict.fromkeys(version.weight_map.values())
    files = {path: folder.file(f"{version.folder}/{path}") for path in paths}
    if scratch is not None and not isinstance(folder, LocalFolder):
        copies = at_once({path: partial(_copied, file, scratch) for path, file in files.items()})
        files = {path: copy.result() for path, copy in copies.items()}
    headers = at_once({path: partial(read_file_header, file) for path, file in files.items()})
    for path, file in files.items():
        header = headers[path].result()
        table = iter(split_digests(header.metadata.get(DIGESTS_KEY, "")) or ())  # beside checksums that are not BLAKE3
        for tensor in tensors_in(file, header):
            checksum = header.metadata.get(tensor.name)
            if version.weight_map.get(tensor.name) != path or checksum is None or tensor.dtype != "U8":
                problem = "is not as the index lists it, or has no checksum in __metadata__"
                raise SourceError(tensor.place, problem, _AGAIN, code=BAD_DELTA)
            digest = checksum if version.checksum_format == BLAKE3 else next(table, None)
            patches[tensor.name] = Patch(
                stored=tensor,
                encoding=version.encoding,
                checksum_format=version.checksum_format,
                checksum=checksum,
                digest=None if digest is None else _raw_digest(digest, tensor),
            )
    if missing := version.weight_map.keys() - patches.keys():
        where = f"{folder.file(f'{version.folder}/{INDEX_NAME}')}: weight_map[{min(missing)[:80]!r}]"
        raise SourceError(where, "is in no shard of this version", _AGAIN, code=BAD_DELTA)
    return patches


def _copied(file: InputFile, scratch: Path) -> InputFile:
    """Return a copy of a file; that of an interrupted run is used again, if the file is the same."""
    copy = scratch / digest_bytes(f"{file} {file.fingerprint}".encode()).removeprefix(PREFIX)
    if not copy.is_file():
        scratch.mkdir(parents=True, exist_ok=True)
        write_file(copy, Blocks(file))
    return LocalFile(copy)


def state_digest(tensors: Iterable[TensorAt]) -> str | None:
    """Return the digest of a state; None if that of a tensor is not known."""
    parts = [(tensor.name, tensor.dtype, tensor.shape, tensor.digest) for tensor in tensors]
    hashed = [(name, dtype, shape, digest) for name, dtype, shape, digest in parts if digest is not None]
    return digest_of_state(hashed) if len(hashed) == len(parts) else None


_AGAIN = "the version is damaged; copy or publish it again"


def _read_version(folder: Folder, number: int) -> Version:
    file = folder.file(f"{folder_of(number)}/{INDEX_NAME}")
    where = str(file)
    index = read_shard_index(read_whole(file), where)
    metadata = index.metadata if isinstance(index.metadata, dict) else {}
    for path in sorted(set(index.weight_map.values())):
        if problem := problem_with_path(path):
            raise SourceError(f"{where}: weight_map", f"{problem}, found {path[:80]!r}", code="source.bad-index")
    base, encoding, checksum_format = None, "", BLAKE3
    if "delta_encoding" in metadata:
        encoding = _choice(metadata, "delta_encoding", ENCODINGS, where)
        _choice(metadata, "compression_format", (ZSTD,), where)
        checksum_format = _choice(metadata, "checksum_format", CHECKSUMS, where)
        base = _number(metadata, "base_version", where)
        if _number(metadata, "version", where) != number or base >= number:
            problem = f"expected version {number} of an earlier base, found {metadata['version']} of {base}"
            raise SourceError(f"{where}: metadata", problem, _AGAIN, code=BAD_DELTA)
    return Version(
        number=number,
        base=base,
        encoding=encoding,
        checksum_format=checksum_format,
        state=_digest(metadata.get("state"), where),
        base_state=_digest(metadata.get("base_state"), where),
        files=decode_files(metadata, where),
        weight_map=index.weight_map,
    )


def _choice(metadata: Mapping[str, object], key: str, choices: Sequence[str], where: str) -> str:
    value = metadata.get(key)
    if value not in choices:
        problem = f"expected {list_words(choices)}, found {str(value)[:80]!r}"
        raise SourceError(f"{where}: metadata.{key}", problem, code=BAD_DELTA)
    return str(value)


def _number(metadata: Mapping[str, object], key: str, where: str) -> int:
    value = str(metadata.get(key))
    if not re.fullmatch(r"[0-9]{1,12}", value):
        raise SourceError(f"{where}: metadata.{key}", f"expected a number, found {value[:80]!r}", code=BAD_DELTA)
    return int(value)


def _digest(value: object, where: str) -> str | None:
    if value is None or (isinstance(value, str) and is_digest(value)):
        return value
    raise SourceError(f"{where}: metadata", f"expected a digest, found {str(value)[:80]!r}", code=BAD_DELTA)


def decode_files(metadata: Mapping[str, object], where: str) -> Mapping[str, str] | None:
    """Return the digests of auxiliary files by path, from an index's metadata; None if it does not list them."""
    if metadata.get("files") is None:
        return None
    files = parse_json_object(str(metadata["files"]).encode(), f"{where}: metadata.files")
    for path, digest in files.items():
        is_weight = names_weights(path) or path in ADAPTER_NAMES
        if is_weight or problem_with_path(path) or not isinstance(digest, str) or not is_digest(digest):
            raise SourceError(f"{where}: metadata.files", f"is malformed at {path[:80]!r}", code=BAD_DELTA)
    return {path: digest for path, digest in files.items() if path != GIT_ATTRIBUTES_NAME}  # of an older version


def _raw_digest(digest: str, tensor: TensorAt) -> bytes:
    if not is_digest(PREFIX + digest):
        raise SourceError(tensor.place, f"expected a BLAKE3 digest, found {digest[:80]!r}", _AGAIN, code=BAD_DELTA)
    return bytes.fromhex(digest)


def _check_line(versions: Sequence[Version], where: str) -> None:
    for before, version in pairwise(versions):
        if version.base != before.number:
            problem = f"version {version.number} is a delta of version {version.base}, which is missing"
            raise SourceError(where, problem, "copy the missing version", code="source.broken-chain")
        if None not in (before.state, version.base_state) and before.state != version.base_state:
            problem = (
                f"version {version.number} is a delta of another state than that of version {before.number}: "
                f"{version.base_state}, not {before.state}"
            )
            hint = "versions of two runs are mixed; copy one of the chains again"
            raise SourceError(where, problem, hint, code="source.broken-chain")
