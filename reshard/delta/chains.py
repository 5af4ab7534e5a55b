"""log, verify and prune: what a chain has, whether all of it is as it was published, and versions that nobody needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.digest import PREFIX
from manifests.errors import InputError, Parameter, check_count
from manifests.index import INDEX_NAME
from manifests.versions import LOCK_NAME, VERSION_FILE, folder_of
from reshard.checks.compare import hash_each
from reshard.copy.runs import Progress, counting
from reshard.delta.publish import open_base
from reshard.formats.delta.chain import Chain, Version, open_versions
from reshard.formats.delta.codec import BAD_DELTA, check_packages
from reshard.formats.delta.read import check_files, check_state, open_version
from reshard.tensors.comparison import Finding, Findings
from reshard.tensors.lazy import stored_nbytes
from stores.address import is_url
from stores.base import check_whole, read_file_header
from stores.bundles import TensorAt
from stores.folders.lock import locking
from stores.folders.owned import remove_tree
from stores.folders.publish import writing_to


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainEntry:
    """A version of a chain. `num_tensors` are those that it stores; `nbytes` in bytes, of its weights as stored."""

    number: int
    base: int | None
    state: str | None
    num_tensors: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyChainResult:
    """What was verified, and what is wrong. Units: bytes read."""

    location: str
    num_versions: int
    num_tensors: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneResult:
    """The versions that were removed; the oldest that is left is a full one."""

    removed: tuple[int, ...]
    oldest: int


def delta_log(chain: str | Path) -> tuple[ChainEntry, ...]:
    """List the versions of a chain, from indices and headers.

    Raises:
        SourceError: an index is malformed.

    Example:
        >>> [(entry.number, entry.base) for entry in reshard.delta_log("chain")]
        [(1, None)]
    """
    opened = open_versions(chain)
    return tuple(_entry(opened, version) for version in opened.versions())


def verify_delta(
    chain: str | Path, *, base: str | Path | None = None, progress: Progress | None = None
) -> VerifyChainResult:
    """Read every byte of a chain, and compare the digests of full versions and the state that each delta makes.

    `base` is the checkpoint that the first version is a delta of, if the chain has no full version before. Problems are
    reported, not raised.

    Units: bytes; progress is called with bytes done and bytes in total.
    Raises:
        InputError: the chain cannot be listed, or `base` cannot be opened.

    Example:
        >>> reshard.verify_delta("chain").ok
        True
    """
    check_packages()
    opened, findings, num_tensors, nbytes = open_versions(chain), Findings(), 0, 0
    copy = None if base is None else open_base(base)
    for number in _ends_of_lines(opened, findings):
        try:
            checkpoint = open_version(opened, number, base=copy, verifies_each=True)
        except InputError as error:
            findings.add_error(error)
            continue
        tensors = list(checkpoint.tensors.values())
        states = list[TensorAt]()
        counter = counting(progress, sum(tensor.nbytes for tensor in tensors))
        for tensor, digest in zip(tensors, hash_each(tensors, counter, findings, code=BAD_DELTA), strict=True):
            with_digest = tensor if digest is None or tensor.blake3 else replace(tensor, blake3=bytes.fromhex(digest))
            if digest is not None and digest != with_digest.digest:
                problem = f"expected {PREFIX}{tensor.digest}, found {PREFIX}{digest}"
                findings.add(tensor.place, problem, code="shard.digest-mismatch")
            states.append(with_digest)
        try:
            check_state(states, opened.version(number), str(opened))
            check_files(checkpoint, opened.version(number), str(opened))
        except InputError as error:
            findings.add_error(error)
        for item in checkpoint.auxiliary:
            try:
                check_whole(item.file, item.digest)
            except InputError as error:
                findings.add_error(error)
        num_tensors, nbytes = num_tensors + len(tensors), nbytes + sum(map(stored_nbytes, tensors))
    return VerifyChainResult(
        location=str(opened),
        num_versions=len(opened.numbers),
        num_tensors=num_tensors,
        nbytes=nbytes,
        findings=tuple(findings),
    )


def _ends_of_lines(chain: Chain, findings: Findings) -> list[int]:
    """Return the versions before full ones, and the newest: together they are computed from all versions."""
    ends: list[int] = []
    for number in chain.numbers:
        try:
            is_full = chain.version(number).is_full
        except InputError as error:
            findings.add_error(error)
            continue
        if ends and not is_full:
            ends.pop()
        ends.append(number)
    return ends


def prune_delta(chain: str | Path, *, keep: int) -> PruneResult:
    """Remove versions before the full one from which the last `keep` versions are computed.

    Raises:
        UsageError: `keep` is not a positive number.
        LaunchError: another process publishes to the chain, or has taken it over.

    Example:
        >>> reshard.prune_delta("chain", keep=3).removed
        ()
    """
    keep = check_count(Parameter("keep"), keep)
    opened = open_versions(chain)
    oldest = opened.numbers[-min(keep, len(opened.numbers))]
    first = opened.line(oldest)[0].number
    if is_url(chain):
        from stores.objects.client import open_writable

        client = open_writable(chain)
        for number, names in _files_before(opened.folder.names(), first):
            index = f"{folder_of(number)}/{INDEX_NAME}"
            client.remove([index])  # without it, there is no version
            client.remove([name for name in names if name != index])
    else:
        with writing_to(str(chain)), locking(Path(chain) / LOCK_NAME, str(chain), "reshard delta prune") as check_lock:
            for number, _ in _files_before((f"{name}/" for name in os.listdir(chain)), first):
                folder = Path(chain) / folder_of(number)
                check_lock()
                if not folder.is_symlink():  # what it leads to is of others
                    (folder / INDEX_NAME).unlink(missing_ok=True)
                remove_tree(folder, check_lock)
    return PruneResult(removed=tuple(number for number in opened.numbers if number < first), oldest=first)


def _files_before(names: Iterable[str], first: int) -> list[tuple[int, list[str]]]:
    """Return the files of each version before another, the newest first: after a kill, the others have their bases."""
    files: dict[int, list[str]] = {}
    for name in names:
        match = VERSION_FILE.fullmatch(name)
        if match and int(match[1]) < first:
            files.setdefault(int(match[1]), []).append(name)
    return sorted(files.items(), reverse=True)


def _entry(chain: Chain, version: Version) -> ChainEntry:
    stored = [
        tensor.nbytes
        for path in dict.fromkeys(version.weight_map.values())
        for tensor in read_file_header(chain.folder.file(f"{version.folder}/{path}")).tensors
    ]
    return ChainEntry(
        number=version.number, base=version.base, state=version.state, num_tensors=len(stored), nbytes=sum(stored)
    )
