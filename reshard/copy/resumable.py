"""Outputs that outlive a failure: what was verified of them stays, and the same command resumes from it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from manifests.errors import UserError
from manifests.invariants import MANIFEST_NAME
from manifests.owned import FindOwned, files_of_manifest
from manifests.publish import partial_of, publishing
from reshard.copy.destination import BucketTarget, FolderTarget, Target
from reshard.copy.journal import JOURNAL_NAME, Journal, plan_key
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.lazy import WOULD_OVERFLOW
from stores.address import is_url
from stores.base import HUB_MISMATCH, SOURCE_CHANGED
from stores.manifest_file import Address
from stores.object_lock import FindOwnedObjects, Wanted, objects_of_manifest
from stores.object_output import open_output

__all__ = ["keep_only", "open_target"]

# Of errors with which the plan itself ends: what was written may be of two models, or will never be of use.
_REFUSALS = (HUB_MISMATCH, SOURCE_CHANGED, WOULD_OVERFLOW)

_RESUME = "run the same command again to resume"


@contextmanager
def open_target(
    out: Address,
    shards: Sequence[OutputShard],
    *,
    force: bool,
    find_owned: FindOwned = files_of_manifest,
    find_owned_objects: FindOwnedObjects = objects_of_manifest,
    wanted: Collection[str] = (),
    last: str = MANIFEST_NAME,
    check_free: Callable[[Path], None] = lambda out: None,
) -> Iterator[Target]:
    """Yield a place to write `shards` to, which becomes the output when the block ends well.

    When it fails, whatever the reason, what was verified stays for the next run of the same plan, unless the plan
    itself was refused. With `force`, an output is replaced: of a folder the files that `find_owned` returns, in one
    step; of a bucket the objects that `find_owned_objects` returns (see `stores.object_output`). It is refused where
    others' files are in the place of new ones, which are the `wanted`. `check_free` raises where the folder that is
    written in has others' work in it.

    Raises:
        InputError: `out` exists and may not be replaced, is being written, or cannot be.
    """
    key, begun = plan_key(shards), False
    if is_url(out):
        paths = {shard.path for shard in shards}
        names = Wanted(shards=paths, small={*wanted} - paths, last=last, find_owned=find_owned_objects)
        with _interrupted_by_sigterm(), open_output(out, force=force, wanted=names, plan=key) as objects:
            try:
                with _forgotten_when_refused(objects.forget):
                    yield BucketTarget(objects)
            except BaseException as error:
                if objects.is_resumable:
                    _tell(error, f"the objects that were completed stay in {out}: {_RESUME}")
                raise
        return

    def is_resumable(folder: Path) -> bool:
        check_free(Path(out))  # once no other process has the folder, and before anything in it is removed
        return Journal(folder, key).has_work

    try:
        with publishing(
            Path(out),
            force=force,
            find_owned=find_owned,
            wanted=wanted,
            last=last,
            outlives_errors=True,
            is_resumable=is_resumable,
            journal=JOURNAL_NAME,
        ) as folder:
            journal, begun = Journal(folder, key), True
            keep_only(folder, {JOURNAL_NAME, *(shard.path for shard in shards)})
            journal.begin()
            with _forgotten_when_refused(journal.forget):
                yield FolderTarget(folder, journal)
    except BaseException as error:
        partial = partial_of(Path(out))
        if begun and Journal(partial, key).has_work:
            _tell(error, f"what was verified stays in {partial}: {_RESUME}")
        raise


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove what an earlier run left but for these: half-written small files, and others' that were to be kept."""
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
def _forgotten_when_refused(forget: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if error.code in _REFUSALS:
            forget()
        raise


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, a scheduler's for one, interrupt: uploads that nobody aborts take space, and are not listed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may say so
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(error: BaseException, hint: str) -> None:
    if isinstance(error, UserError):
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
    else:
        error.add_note(hint)  # an interrupt, which the command line reports
