"""Deltas of tensors: the difference of two states, compressed, and the state that a base and its deltas make.

A tensor's delta is zstd of `new ^ old`, byte by byte (`xor`), or of the count, the positions and the values of the
bytes that changed (`overwrite`: uint32, uint32 each, uint8 each, little-endian). Both are decoded; `xor` is written,
since its memory does not grow with the number of changes.

Source: slime, `update_weight_from_disk_delta.py` and its decoder `pull_weights`, July 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol
from zlib import adler32

from manifests.digest import Hasher
from manifests.errors import SourceError, StoreError
from manifests.versions import BLAKE3, LEVEL, XOR
from reshard.tensors.checkpoint import check_digest
from reshard.tensors.lazy import STEP_NBYTES, derive, open_origin
from stores.base import InputFile
from stores.bundles import TensorAt

if TYPE_CHECKING:
    from reshard.transforms import arithmetic

OVERWRITE = "overwrite"
ENCODINGS = (XOR, OVERWRITE)
CHECKSUMS = (BLAKE3, "xxh3-128", "adler32")
BAD_DELTA = "source.bad-delta"
_MOST_WINDOW_NBYTES = 128 << 20  # what a frame may ask for while it is decompressed
_POSITION_NBYTES = 4


class Checksum(Protocol):
    """A hasher of a tensor's bytes."""

    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_checksum(name: str) -> Checksum:
    """Return a hasher of one of the `CHECKSUMS`."""
    if name == "adler32":
        return _Adler32()
    if name == BLAKE3:
        return Hasher()
    hasher: Checksum = _package("xxhash").xxh3_128()
    return hasher


def check_packages() -> None:
    """Refuse to begin with deltas where zstd is missing."""
    _package("zstandard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A tensor's delta of one version: where it is, and the checksum of the tensor's new state.

    `digest` is the BLAKE3 digest of that state, None if it is not recorded.
    """

    stored: TensorAt
    encoding: str
    checksum_format: str
    checksum: str
    digest: bytes | None

    @property
    def where(self) -> str:
        return self.stored.place


def patched(base: TensorAt, patches: Sequence[Patch], how: str, *, verifies_each: bool) -> TensorAt:
    """Return the tensor that deltas make of a base, which is computed when it is read; its digest is the last one's.

    The base is read once, and no state between is stored. The last state's digest, which whoever reads it compares, is
    that of this base alone. Its checksum is compared here if it has no digest; with `verifies_each`, those of all are.
    """
    if not patches:
        return base
    origins = (base, *(patch.stored for patch in patches))
    tensor = derive(base, base.dtype, how, origins, partial(_Patched, base, tuple(patches), verifies_each))
    return replace(tensor, blake3=patches[-1].digest)


class _Patched:
    """A tensor's new state, made of its base's bytes in the memory of whoever reads it."""

    def __init__(self, base: TensorAt, patches: Sequence[Patch], verifies_each: bool) -> None:
        self._base, self._patches, self._begin = base, patches, 0
        last = len(patches) - 1
        self._base_hasher = Hasher() if verifies_each and base.blake3 is not None else None
        self._hashers = {
            number: new_checksum(patch.checksum_format)
            for number, patch in enumerate(patches)
            if verifies_each or (number == last and patch.digest is None)
        }
        self._changes = [_Delta(patch, base.nbytes) for patch in patches]
        self._difference = memoryview(bytearray(min(STEP_NBYTES, base.nbytes)))
        self._stack = ExitStack()
        self._reader = self._stack.enter_context(closing(open_origin(base)))

    def fill(self, part: memoryview) -> None:
        """Fill `part` with the next bytes; with the last ones, verify what has no digest to compare."""
        for first in range(0, len(part), STEP_NBYTES):
            state = part[first : first + STEP_NBYTES]
            self._reader.read_into(state, self._base.begin + self._begin)
            if self._base_hasher is not None:
                self._base_hasher.update(state)
            for number, change in enumerate(self._changes):
                change.apply(state, self._begin, self._difference)
                if number in self._hashers:
                    self._hashers[number].update(state)
            self._begin += len(state)
        if self._begin == self._base.nbytes:
            self._check()
            self.close()

    def close(self) -> None:
        """Close the base, and free what the deltas take: a thread reads many tensors before it closes them all."""
        self._stack.close()
        self._changes, self._difference = [], memoryview(b"")

    def _check(self) -> None:
        if self._base_hasher is not None:
            check_digest(self._base, self._base_hasher.hexdigest())
        for number, hasher in self._hashers.items():
            if hasher.hexdigest() != self._patches[number].checksum:
                raise _other_state(self._patches[number], hasher.hexdigest())
        for change in self._changes:
            change.expect_end()


class _Delta:
    """An open delta of a tensor, with which its state is changed block by block, in order."""

    def __init__(self, patch: Patch, nbytes: int) -> None:
        self._patch, stored = patch, patch.stored
        source: Any = _Stored(stored.file, stored.begin, stored.end)
        decompressor = _package("zstandard").ZstdDecompressor(max_window_size=_MOST_WINDOW_NBYTES)
        self._stream: BinaryIO = decompressor.stream_reader(source, read_size=STEP_NBYTES)
        self._changes = self._read_changes(nbytes) if patch.encoding == OVERWRITE else None

    def apply(self, state: memoryview, begin: int, difference: memoryview) -> None:
        """Change a block that begins at `begin`; `difference` is memory of at least its length."""
        from reshard.transforms.arithmetic import xor_into  # numpy

        if self._changes is None:
            xor_into(state, self._read(difference[: len(state)]))
        else:
            self._changes.apply(state, begin)

    def expect_end(self) -> None:
        if self._read_some(memoryview(bytearray(1))):
            raise _bad_delta(self._patch, "is longer than the tensor that it changes")

    def _read_changes(self, nbytes: int) -> arithmetic.Changes:
        from reshard.transforms.arithmetic import Changes  # numpy

        count = int.from_bytes(self._read(memoryview(bytearray(_POSITION_NBYTES))), "little")
        if count > nbytes:
            raise _bad_delta(self._patch, f"changes {count} bytes of a tensor of {nbytes}")
        positions = self._read(memoryview(bytearray(count * _POSITION_NBYTES)))
        changes = Changes(positions, self._read(memoryview(bytearray(count))))
        if not changes.are_within(nbytes):
            raise _bad_delta(self._patch, f"expected ascending positions below {nbytes}")
        return changes

    def _read(self, buffer: memoryview) -> memoryview:
        part = buffer
        while part:
            count = self._read_some(part)
            if count == 0:
                raise _bad_delta(self._patch, "ends early: it is truncated, or of a tensor of another length")
            part = part[count:]
        return buffer

    def _read_some(self, part: memoryview) -> int:
        try:
            return int(self._stream.readinto(part))  # type: ignore[attr-defined]  # of zstandard's reader
        except _package("zstandard").ZstdError as error:
            raise _bad_delta(self._patch, f"is not valid zstd: {error}") from error


class _Stored:
    """A range of a file as zstandard reads it: the file is opened for each read, since a chain has many."""

    def __init__(self, file: InputFile, begin: int, end: int) -> None:
        self._file, self._at, self._end = file, begin, end

    def read(self, nbytes: int) -> bytes:
        data = bytearray(min(nbytes, self._end - self._at))
        if data:
            with closing(self._file.open(((self._at, self._at + len(data)),))) as reader:
                reader.read_into(memoryview(data), self._at)
            self._at += len(data)
        return bytes(data)


class Encoder:
    """Compresses the difference of a tensor's states, and hashes both; nothing is written while they are equal."""

    def __init__(self, nbytes: int, write: Callable[[bytes], object]) -> None:
        self._nbytes, self._write = nbytes, write
        self._hasher, self._num_equal = Hasher(), 0  # bytes before the first block that differs
        self._new_hasher = self._hasher  # another one once the states differ
        self._frame: Any = None
        self._buffer = memoryview(bytearray(min(STEP_NBYTES, nbytes)))
        self.num_changed = 0  # bytes

    def add(self, old: memoryview, new: memoryview) -> None:
        """Add the next block of both states."""
        from reshard.transforms.arithmetic import xor_of  # numpy

        difference = self._buffer[: len(new)]
        num_changed = xor_of(old, new, difference)
        if self._frame is None:
            if not num_changed:
                self._hasher.update(new)
                self._num_equal += len(new)
                return
            self._new_hasher = self._hasher.copy()
            self._frame = (
                _package("zstandard").ZstdCompressor(level=LEVEL, write_checksum=True).compressobj(size=self._nbytes)
            )
            zeros = bytes(min(self._num_equal, STEP_NBYTES))
            for begin in range(0, self._num_equal, STEP_NBYTES):
                self._write(self._frame.compress(zeros[: min(STEP_NBYTES, self._num_equal - begin)]))
        self._hasher.update(old)
        self._new_hasher.update(new)
        self.num_changed += num_changed
        self._write(self._frame.compress(difference))

    def finish(self) -> tuple[bytes, bytes]:
        """Return the BLAKE3 digests of both states."""
        if self._frame is not None:
            self._write(self._frame.flush())
        return self._hasher.digest(), self._new_hasher.digest()


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        problem, hint = f"deltas require the package {name}", "pip install 'reshard[delta]'"
        raise StoreError(f"package {name}", problem, hint, code="store.missing-package") from error


def _bad_delta(patch: Patch, problem: str) -> SourceError:
    return SourceError(patch.where, problem, "the version is damaged; copy or publish it again", code=BAD_DELTA)


def _other_state(patch: Patch, checksum: str) -> SourceError:
    return SourceError(
        patch.where,
        f"expected a state with {patch.checksum_format} {patch.checksum}, found {checksum}",
        "the base or a delta is damaged, or of another chain; apply a full version",
        code=BAD_DELTA,
    )
