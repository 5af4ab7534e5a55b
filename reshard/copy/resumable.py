"""Outputs that survive a failure: verified data is kept, and the same command resumes from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.errors import UserError
from manifests.invariants import MANIFEST_NAME
from reshard.copy.destination import FolderTarget, Target
from reshard.copy.journal import JOURNAL_NAME, Journal, plan_key
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.lazy import WOULD_OVERFLOW
from stores.address import is_url
from stores.base import HUB_MISMATCH, SOURCE_CHANGED
from stores.folders.owned import FindOwned, files_of_manifest
from stores.folders.publish import partial_of, publishing
from stores.open import Address

if TYPE_CHECKING:
    from stores.objects.lock import FindOwnedObjects

# Errors after which a plan cannot be resumed: its output may be of two models, or useless.
_FATAL = (HUB_MISMATCH, SOURCE_CHANGED, WOULD_OVERFLOW)

_RESUME = "run the same command again to resume"


@contextmanager
def open_target(
    out: Address,
    shards: Sequence[OutputShard],
    *,
    force: bool,
    find_owned: FindOwned = files_of_manifest,
    find_owned_objects: FindOwnedObjects | None = None,  # None: those of a manifest
    wanted: Collection[str] = (),
    last: str = MANIFEST_NAME,
) -> Iterator[Target]:
    """Yield a target to write `shards` to, which becomes the output when the block succeeds.

    If it fails, verified data is kept for the next run of the same plan, unless the error is one after which the plan
    cannot be resumed. With `force`, an existing output is replaced: in a folder the files that `find_owned`
    returns, in one step; in a bucket the objects that `find_owned_objects` returns (see `stores.objects.output`). Other
    files that would be overwritten by the `wanted` ones are refused.

    Raises:
        OutputError: `out` exists and may not be replaced, is being written by another process, or cannot be written.
    """
    key, begun = plan_key(shards), False
    if is_url(out):
        from reshard.copy.bucket import open_prefix  # clients of object stores

        paths = {shard.path for shard in shards}
        small = {*wanted} - paths
        with open_prefix(out, paths, small, last=last, force=force, plan=key, find_owned=find_owned_objects) as prefix:
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

    try:
        with publishing(
            Path(out),
            force=force,
            find_owned=find_owned,
            wanted=wanted,
            outlives_errors=True,
            is_resumable=is_resumable,
        ) as folder:
            journal, begun = Journal(folder, key), True
            keep_only(folder, {JOURNAL_NAME, *(shard.path for shard in shards)})
            journal.begin({*wanted, *(shard.path for shard in shards)})
            with _discarded_if_fatal(journal.forget):
                yield FolderTarget(folder, journal)
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
