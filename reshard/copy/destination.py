"""Where an output is written: a folder here, a bucket in `reshard.copy.bucket`. Both appear atomically.

After a failure verified data is kept, and the same command resumes from it. Before the commit, the files that the
output was made from are checked for changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from manifests.command.sizes import show_bytes
from manifests.errors import OutputError, Parameter, SourceError, UsageError, UserError
from manifests.invariants import MANIFEST_NAME
from manifests.schema import AuxiliaryFile
from manifests.store import write_file
from reshard.copy.engine import WriteOptions, WrittenShard, write_shards
from reshard.copy.journal import JOURNAL_NAME, Journal, is_working_name, plan_key
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.checksums import stored_file
from reshard.tensors.lazy import OTHER_ADAPTER, WOULD_OVERFLOW, DerivedFile, read_together
from stores.address import is_inside, is_url, place_of
from stores.base import HUB_MISMATCH, SOURCE_CHANGED, Blocks, InputFile
from stores.folders.owned import FindOwned, files_of_manifest
from stores.folders.publish import partial_of, publishing, reserving
from stores.local import LocalFile
from stores.open import Address

if TYPE_CHECKING:
    from reshard.copy.bucket import BucketTarget

Target: TypeAlias = "FolderTarget | BucketTarget"


def check_apart(out: Address, checkpoint: Checkpoint, *, may_replace: bool, option: str = "out") -> None:
    """Refuse an output that overlaps what it is read from, whichever names lead there.

    With `may_replace`, a manifest may be replaced by its own repack, which has the same bytes.
    """
    place = place_of(out)
    for number, source in enumerate(_locations(checkpoint)):
        origin = place_of(source)
        if is_inside(place, origin) or is_inside(origin, place):
            inner, outer = (out, source) if is_inside(place, origin) else (source, out)
            problem = f"overlaps the source: {inner} is inside {outer}"
            raise UsageError(Parameter(option), problem, "choose a folder beside it", code="output.overlaps-source")
        if place == origin and not (may_replace and number == 0):
            problem, hint = "is the source itself, which is never replaced", f"choose another {Parameter(option)}"
            raise OutputError(str(out), problem, hint, code="output.overlaps-source")


def check_space(folder: Path, needed_nbytes: int, reused_nbytes: int = 0, *, option: str = "out") -> None:
    """Refuse to start writing in a folder what its disk has no space for, with what will be overwritten."""
    disk = shutil.disk_usage(folder)
    free_nbytes = disk.free + reused_nbytes
    if disk.total and needed_nbytes > free_nbytes:  # some file systems report 0 blocks
        problem = f"the disk has {show_bytes(free_nbytes)} free, expected at least {show_bytes(needed_nbytes)}"
        raise OutputError(str(folder), problem, f"choose another disk for {Parameter(option)}", code="output.disk-full")


def _locations(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a checkpoint's folder, that of its original files, and the targets of links among those."""
    yield checkpoint.location
    if checkpoint.manifest is None and checkpoint.source.kind == "delta":
        yield checkpoint.location.rpartition("@")[0]
    if checkpoint.originals is not None:
        if checkpoint.manifest is not None:
            yield checkpoint.originals.location
        for file in checkpoint.originals.files.values():
            if isinstance(file, LocalFile):
                yield str(file.path.resolve())


@dataclass(frozen=True, slots=True)
class FolderTarget:
    """A folder that appears when its `publishing` block ends; with a journal, an interrupted run can be resumed.

    `reshard.copy.bucket.BucketTarget` has the same methods.
    """

    folder: Path
    journal: Journal | None = None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)

    def copy(self, name: str, file: InputFile, digest: str | None = None) -> AuxiliaryFile:
        """Copy a file of any length, a block at a time, and verify its digest if there is one."""
        path, blocks = self.folder / name, Blocks(file, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, blocks)
        return AuxiliaryFile(path=name, nbytes=blocks.nbytes, digest=blocks.digest)

    def write_shards(self, shards: Sequence[OutputShard], options: WriteOptions) -> tuple[WrittenShard, ...]:
        # What an interrupted run left here will be overwritten.
        reused = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())
        check_space(self.folder.parent, sum(shard.nbytes for shard in shards), reused)
        return write_shards(shards, self.folder, replace(options, journal=self.journal))

    def written(self, names: Collection[str]) -> dict[str, tuple[int, str]]:
        """Return the size of each of these files, which are complete, and its ETag, "" in a folder."""
        return {name: ((self.folder / name).stat().st_size, "") for name in names}

    def commit(self, name: str, data: bytes) -> None:
        """Write the file that makes the output valid."""
        self.put(name, data)  # the folder loses its journal later, as it gets its name


def copy_files(files: Sequence[AuxiliaryAt], target: Target) -> tuple[AuxiliaryFile, ...]:
    """Copy auxiliary files byte for byte, verifying known digests."""
    for item in files:
        if is_working_name(item.path):  # of a manifest; for other sources it was checked before
            problem = "this name is reserved for files under construction"
            raise SourceError(str(item.file), problem, "leave the file out", code="source.reserved-name")
    read = read_together([item.file for item in files])
    return tuple(target.copy(item.path, file, item.digest) for item, file in zip(files, read, strict=True))


def check_unchanged(shards: Iterable[OutputShard], auxiliary: Iterable[AuxiliaryAt]) -> None:
    """Refuse to commit an output if local files that it was made from were changed while they were read.

    Files of other stores are compared with their etag at every read.
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


# Errors after which a plan cannot be resumed: its output may be of two models, or useless.
_FATAL = (HUB_MISMATCH, OTHER_ADAPTER, SOURCE_CHANGED, WOULD_OVERFLOW)

_RESUME = "run the same command again to resume"


@contextmanager
def open_target(
    out: Address,
    shards: Sequence[OutputShard],
    *,
    force: bool,
    find_owned: FindOwned = files_of_manifest,
    wanted: Collection[str] = (),
    last: str = MANIFEST_NAME,
    is_reserved: bool = False,
) -> Iterator[Target]:
    """Yield a target to write `shards` to, which becomes the output when the block succeeds.

    If it fails, verified data is kept for the next run of the same plan, unless the error is one after which the plan
    cannot be resumed. With `force`, the files of a folder that `find_owned` returns are replaced in one step; in a
    bucket, it takes the place of an unfinished output. Other files that would be overwritten by the `wanted` ones are
    refused; the `last` of these commits it. An output that `is_reserved` is in a place that the caller has locked.
    """
    key, begun = plan_key(shards), False
    wanted = {*wanted, *(shard.path for shard in shards)}
    if is_url(out):
        from reshard.copy.bucket import open_prefix  # clients of object stores

        with open_prefix(out, wanted, force=force, plan=key, last=last) as prefix:
            try:
                with _discarded_if_fatal(prefix.objects.forget):
                    yield prefix
            except BaseException as error:
                if prefix.objects.is_resumable:
                    _add_hint(error, f"completed objects are kept in {out}; {_RESUME}")
                raise
        return

    def is_resumable(folder: Path) -> bool:
        return Journal(folder, key).has_work

    reserved: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
    if not is_reserved:
        reserved = reserving(Path(out))
    try:
        with (
            reserved as check_reserved,
            publishing(
                Path(out),
                force=force,
                find_owned=find_owned,
                wanted=wanted,
                outlives_errors=True,
                is_resumable=is_resumable,
            ) as folder,
        ):
            journal, begun = Journal(folder, key), True
            keep_only(folder, {JOURNAL_NAME, *(shard.path for shard in shards)})
            journal.begin(wanted)
            with _discarded_if_fatal(journal.forget):
                yield FolderTarget(folder, journal)
            check_reserved()
    except BaseException as error:
        partial = partial_of(Path(out))
        if begun and Journal(partial, key).has_work:
            _add_hint(error, f"verified data is kept in {partial}; {_RESUME}")
        raise


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove everything from a folder but these files."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700 | path.stat().st_mode)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in names:
            path.unlink()


@contextmanager
def _discarded_if_fatal(discard: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if error.code in _FATAL:
            discard()
        raise


def _add_hint(error: BaseException, hint: str) -> None:
    if isinstance(error, UserError):
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
    else:
        error.add_note(hint)  # of an interrupt, which the command prints
