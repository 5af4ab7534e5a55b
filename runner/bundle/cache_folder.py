"""The local cache: shards on a node's own disk, each copied and verified once, shared by all that need it. No torch.

# Note [Cached shards]
A shard gets its name when it is whole and its digests match. Until then it is `.NAME.partial`, under a lock that is
released when its process dies, so ranks, jobs and restarts never see half a file and never write one twice. Folders are
named by a manifest's digest. A shard found there is checked by its size and its header, which has the digest of every
tensor. There is no fsync: damage by a power loss is found like any other damage.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manifests.command.sizes import show_bytes
from manifests.digest import PREFIX
from manifests.errors import (
    InputError,
    LaunchError,
    OutputError,
    UnreachableError,
    UserError,
    refused_by_system,
)
from manifests.index import share_evenly
from manifests.schema import Holds, Manifest, Shard
from manifests.store import open_shard
from runner.bundle.verified_read import verified_blocks
from stores.base import InputFile
from stores.folders.lock import open_locked
from stores.local import LocalFile

FLAG = "--stage-to-local"
_POLL_S = 0.2
_NAMED = re.compile(r".+-[0-9a-f]{16}")  # as `node_folder` names them


def node_folder(directory: Path, name: str, digest: str) -> Path:
    """Return the folder of a manifest's cached shards on this node.

    `directory` may contain environment variables of the node.
    """
    expanded = os.path.expandvars(directory)
    if "$" in expanded:
        raise InputError(
            f"{FLAG} {directory}",
            "contains an environment variable that is not set on this node",
            "set it for the ranks, or use a path without variables",
            code="options.cache-variable",
        )
    return Path(expanded) / f"{name[:80]}-{digest.removeprefix(PREFIX)[:16]}"


def check_cacheable(manifest: Manifest, where: str) -> None:
    """Check that bundles can be cached."""
    if manifest.virtual is not None:
        raise InputError(
            FLAG,
            f"not supported for virtual bundles: those of {where} are in {manifest.virtual.location}, without digests "
            "to verify a copy with",
            "write bundles: reshard pack without --virtual",
            code="options.cache-virtual",
        )


def shards_of(manifest: Manifest, modules: Container[str], holds: Container[Holds]) -> tuple[Shard, ...]:
    """Return the shards of these kinds of every stage that has one of these modules."""
    stages = (stage for stage in manifest.stages if any(module in modules for module in stage.modules))
    return tuple(shard for stage in stages for shard in stage.shards if shard.holds in holds)


def assign_shards(shards: Iterable[Shard], num_ranks: int) -> tuple[tuple[Shard, ...], ...]:
    """Distribute shards over the ranks of a node, as evenly by bytes as files allow."""
    in_order = sorted(shards, key=lambda shard: (-shard.nbytes, shard.path))
    ranks = share_evenly(((shard.path, shard.nbytes) for shard in in_order), num_ranks)
    return tuple(tuple(shard for shard in in_order if ranks[shard.path] == rank) for rank in range(num_ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFolder:
    """One manifest's cached shards on this node. `limit_s`: how long another process may make no progress on one.

    `beat` is called regularly while shards are copied, verified or waited for, and may raise to end that.
    """

    path: Path
    limit_s: float

    def has(self, shard: Shard) -> bool:
        """Whether a shard is cached, judging by its size and header."""
        try:
            open_shard(self.path, shard)
        except InputError:
            return False
        return True

    def check_room(self, shards: Sequence[Shard]) -> None:
        """Create the folder, and check that the missing shards fit on its disk."""
        with _write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            missing = [shard for shard in shards if not self.has(shard)]
            needed = sum(max(0, shard.nbytes - _nbytes_on_disk(_partial(self.path / shard.path))) for shard in missing)
            disk = shutil.disk_usage(self.path)
            if needed <= disk.free or not disk.total:  # some file systems report 0 blocks
                return
            old = {path.name: sum(map(_nbytes_on_disk, path.rglob("*"))) for path in _others(self.path)}
        others = ", ".join(f"{name} ({show_bytes(nbytes)})" for name, nbytes in old.items())
        raise OutputError(
            f"{FLAG} {self.path.parent}",
            f"{len(missing)} shards need {show_bytes(needed)} more on this node, {show_bytes(disk.free)} are free",
            f"other manifests are cached there: {others}; remove those that no job uses" if others else "",
            code="output.disk-full",
        )

    def ensure(self, file: InputFile, shard: Shard, beat: Callable[[], None] = lambda: None) -> bool:
        """Cache a shard, and return whether it was copied. If another process is copying it, wait for that."""
        target, partial = self.path / shard.path, _partial(self.path / shard.path)
        if self.has(shard):
            return False
        with _write_errors(target):
            if not target.parent.resolve().is_relative_to(self.path.resolve()):
                raise OutputError(str(target.parent), "is a link to another folder", "remove it", code="output.link")
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._lock(partial, beat)
            try:
                if is_missing := not self.has(shard):
                    _copy(file, shard, descriptor, beat)
                    os.replace(partial, target)
                else:
                    partial.unlink()
                return is_missing
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)

    def verify(self, shard: Shard, beat: Callable[[], None] = lambda: None) -> bool:
        """Read a cached shard, and return whether all digests match; a damaged one is removed."""
        path = self.path / shard.path
        try:
            for _ in verified_blocks(LocalFile(path), shard, beat):
                pass
        except InputError:
            with _write_errors(path):
                path.unlink(missing_ok=True)
            return False
        return True

    def _lock(self, partial: Path, beat: Callable[[], None]) -> int:
        """Lock a shard that is being copied, until the returned descriptor is closed."""
        last_nbytes, since_s = -1, time.monotonic()
        # O_NONBLOCK: opening a pipe (FIFO) that nobody reads fails, and does not wait for a reader.
        while (descriptor := open_locked(partial, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)) is None:
            if (nbytes := _nbytes_on_disk(partial)) != last_nbytes:
                last_nbytes, since_s = nbytes, time.monotonic()
            if time.monotonic() - since_s > self.limit_s:
                raise LaunchError(
                    str(partial),
                    f"another process has locked it, and has written nothing for {self.limit_s:.0f} s",
                    f"end that process, or use another {FLAG}",
                    code="launch.cache-stalled",
                )
            beat()
            time.sleep(_POLL_S)
        return descriptor


def _copy(file: InputFile, shard: Shard, descriptor: int, beat: Callable[[], None]) -> None:
    os.ftruncate(descriptor, 0)
    with open(descriptor, "wb", closefd=False) as copy:
        for block in verified_blocks(file, shard, beat):
            copy.write(block)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _nbytes_on_disk(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def _others(folder: Path) -> list[Path]:
    """Return the folders of other manifests beside this one."""
    return sorted(path for path in folder.parent.iterdir() if path != folder and _NAMED.fullmatch(path.name))


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into user errors."""
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = f"choose a folder for {FLAG} that this user can write on every node"
        refusal = refused_by_system(
            str(error.filename or path), error, "cannot be written", hint, code="store.cache-unwritable"
        )
        if isinstance(refusal, UnreachableError):
            raise refusal from error
        # The node's fault, so not an InputError: resuming must not skip the checkpoint for it.
        raise UserError(refusal.where, refusal.problem, refusal.hint, code=refusal.code) from error
