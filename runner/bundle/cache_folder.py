"""Copies of shards on a node's own disk: each made once, checked on its way, shared by all who need it. No torch.

# Note [Copies]
A copy gets its name when it is whole and its digests are right. Until then it is `.NAME.partial`, under a lock that
a kill releases, so that ranks, jobs and restarts never see half a file and never write one twice at once. Folders are
named by a manifest's digest. Whoever finds a copy there checks its size and its header, which holds the digest of every
tensor. Nothing is brought to disk by force: what a loss of power damages is found like any other damage.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import threading
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manifests.digest import PREFIX
from manifests.errors import (
    InputError,
    LaunchError,
    OutputError,
    UnreachableError,
    UserError,
    refused_by_system,
)
from manifests.schema import Holds, Manifest, Shard
from manifests.store import open_shard
from runner.bundle.verified_read import verified_blocks
from stores.base import InputFile
from stores.local import LocalFile

__all__ = ["FLAG", "CacheFolder", "assign_shards", "check_cacheable", "node_folder", "shards_of"]

FLAG = "--stage-to-local"
_POLL_S = 0.2
_NAMED = re.compile(r".+-[0-9a-f]{16}")  # as `node_folder` names them


def node_folder(directory: Path, name: str, digest: str) -> Path:
    """Give the folder that copies of a manifest's shards are in, on whichever node asks.

    `directory` may name environment variables of the node.

    Raises:
        UserError: the node has no such variable.
    """
    found = os.path.expandvars(directory)
    if "$" in found:
        raise InputError(
            f"{FLAG} {directory}",
            "names a variable that is not set on this node",
            "set it for the ranks, or name a path",
            code="options.cache-variable",
        )
    return Path(found) / f"{name[:80]}-{digest.removeprefix(PREFIX)[:16]}"


def check_cacheable(manifest: Manifest, where: str) -> None:
    """Raise where bundles are no files of their own.

    Raises:
        UserError: they are virtual.
    """
    if manifest.virtual is not None:
        raise InputError(
            FLAG,
            f"the bundles of {where} are virtual: they lie in {manifest.virtual.location}, without digests that a copy "
            "could be checked by",
            "reshard pack without --virtual writes bundles",
            code="options.cache-virtual",
        )


def shards_of(manifest: Manifest, modules: Container[str], holds: Container[Holds]) -> tuple[Shard, ...]:
    """Give the shards, of these kinds, of every stage that has one of these modules."""
    stages = (stage for stage in manifest.stages if any(module in modules for module in stage.modules))
    return tuple(shard for stage in stages for shard in stage.shards if shard.holds in holds)


def assign_shards(shards: Iterable[Shard], num_ranks: int) -> tuple[tuple[Shard, ...], ...]:
    """Deal shards out to the ranks of a node, as evenly in bytes as files allow."""
    dealt: list[list[Shard]] = [[] for _ in range(num_ranks)]
    given = [0] * num_ranks
    for shard in sorted(shards, key=lambda shard: (-shard.nbytes, shard.path)):
        rank = min(range(num_ranks), key=given.__getitem__)
        dealt[rank].append(shard)
        given[rank] += shard.nbytes
    return tuple(map(tuple, dealt))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFolder:
    """One manifest's copies on this node. `limit_s`: how long another process may write one and get nowhere."""

    path: Path
    limit_s: float

    def has(self, shard: Shard) -> bool:
        """Whether a shard's copy is there, by its size and header."""
        try:
            open_shard(self.path, shard)
        except InputError:
            return False
        return True

    def check_room(self, shards: Sequence[Shard]) -> None:
        """Make the folder, and raise unless what is missing there fits its disk.

        Raises:
            UserError: with the bytes that are needed and free, and the copies of other manifests that lie there.
        """
        with _said(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            missing = [shard for shard in shards if not self.has(shard)]
            needed = sum(max(0, shard.nbytes - _nbytes_on_disk(_partial(self.path / shard.path))) for shard in missing)
            free = shutil.disk_usage(self.path).free
            if needed <= free:
                return
            old = {path.name: sum(map(_nbytes_on_disk, path.rglob("*"))) for path in _others(self.path)}
        others = ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in old.items())
        raise OutputError(
            f"{FLAG} {self.path.parent}",
            f"{len(missing)} shards need {needed} bytes more on this node, {free} are free",
            f"copies for other manifests are there: {others}; remove what no job uses" if others else "",
            code="output.disk-full",
        )

    def ensure(self, file: InputFile, shard: Shard, stop: threading.Event) -> bool:
        """Make a shard's copy be there, and give whether it had to be made. Waits for who else is making it.

        Raises:
            InputError: the shard is damaged.
            UserError: the disk is full or cannot be written, or the other maker gets nowhere.
            CancelledError: `stop` was set.
        """
        target, partial = self.path / shard.path, _partial(self.path / shard.path)
        if self.has(shard):
            return False
        with _said(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.parent.resolve().is_relative_to(self.path.resolve()):
                raise OutputError(str(target.parent), "is a link that leads elsewhere", "remove it", code="output.link")
            descriptor = self._lock(partial, stop)
            try:
                if is_missing := not self.has(shard):
                    _copy(file, shard, descriptor, stop)
                    os.replace(partial, target)
                else:
                    partial.unlink()
                return is_missing
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)

    def verify(self, shard: Shard, stop: threading.Event) -> bool:
        """Read a copy that is there, and give whether all digests are right; one that is damaged is removed."""
        path = self.path / shard.path
        try:
            for _ in verified_blocks(LocalFile(path), shard, stop):
                pass
        except InputError:
            with _said(path):
                path.unlink(missing_ok=True)
            return False
        return True

    def _lock(self, partial: Path, stop: threading.Event) -> int:
        """Hold a copy that is being made, until the descriptor is closed."""
        seen, since_s = -1, time.monotonic()
        while True:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(partial, flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(partial, descriptor):
                    return descriptor
                wait_s = 0.0  # its maker has renamed it
            except BlockingIOError:
                wait_s = _POLL_S
            nbytes = os.fstat(descriptor).st_size
            os.close(descriptor)
            if nbytes != seen:
                seen, since_s = nbytes, time.monotonic()
            if time.monotonic() - since_s > self.limit_s:
                raise LaunchError(
                    str(partial),
                    f"another process has it, and has written nothing for {self.limit_s:.0f} s",
                    f"end that process, or take another {FLAG}",
                    code="launch.cache-stalled",
                )
            if stop.wait(wait_s):
                raise CancelledError


def _copy(file: InputFile, shard: Shard, descriptor: int, stop: threading.Event) -> None:
    os.ftruncate(descriptor, 0)
    with open(descriptor, "wb", closefd=False) as copy:
        for block in verified_blocks(file, shard, stop):
            copy.write(block)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _nbytes_on_disk(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def _others(folder: Path) -> list[Path]:
    """Give the folders of copies of other manifests, beside this one."""
    return sorted(path for path in folder.parent.iterdir() if path != folder and _NAMED.fullmatch(path.name))


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """Say in a sentence what the disk refuses."""
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "the disk has filled up since the copy was begun: remove what no job uses"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = f"{FLAG} names a folder that this user can write on every node"
        said = refused_by_system(
            str(error.filename or path), error, "cannot be written", hint, code="store.cache-unwritable"
        )
        if isinstance(said, UnreachableError):
            raise said from error
        # The node's fault, and no InputError: not one to pass over a checkpoint for.
        raise UserError(said.where, said.problem, said.hint, code=said.code) from error
