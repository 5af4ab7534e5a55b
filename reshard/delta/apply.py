"""apply: bring a folder of weights to a version of a chain, whole and verified at any moment."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.digest import digest_bytes
from manifests.errors import OutputError, Parameter, ShardError, SourceError, UsageError
from manifests.index import INDEX_NAME
from manifests.invariants import MANIFEST_NAME
from manifests.store import read_small_file
from manifests.versions import encode_files
from reshard.copy.destination import check_space, check_unchanged
from reshard.copy.engine import WriteOptions, hash_tensors
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import ByteCounter, Progress, counting
from reshard.delta.copies import check_copy
from reshard.delta.switch import Work
from reshard.formats.delta.chain import Chain, Version, decode_files, open_versions, state_digest
from reshard.formats.delta.codec import check_packages
from reshard.formats.delta.read import (
    auxiliary_at,
    check_state,
    follow,
    open_version,
    with_all_digests,
    with_header_digests,
)
from reshard.formats.huggingface.read import open_checkpoint as open_folder
from reshard.formats.huggingface.weight_map import SINGLE_NAME, read_shard_index
from reshard.formats.table import OpenOptions
from reshard.plans.pack_plan import OutputShard, lay_out_root, lay_out_shard
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, check_digest
from reshard.tensors.comparison import are_of_one_kind
from reshard.tensors.lazy import stored_nbytes
from stores.address import check_local, is_inside, place_of
from stores.base import read_whole
from stores.bundles import TensorAt
from stores.folders.publish import writing_to
from stores.local import LocalFolder

_OF_VERSION = re.compile(r"\.v\d{6,}(?:_\d+)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyResult:
    """The version that a folder has now, and had `before`; None: it was empty.

    `is_recorded`: the chain has the digest of the whole state, as chains of others have not. `is_resumed`: an earlier
    call was killed as it switched to the version of `before`, and this one has finished that. `other_files`: auxiliary
    files that are not the version's, or are missing, of a base that is not in the chain.

    Units: bytes written to shards, and read of the folder and the chain, headers apart; seconds for the verification of
    tensors that stayed as they were, and for hashing the folder's, if its headers have no digests.
    """

    location: str
    number: int
    before: int | None
    state: str | None
    is_recorded: bool
    num_tensors: int
    num_changed: int
    write_nbytes: int
    read_nbytes: int
    verified_nbytes: int
    verify_s: float
    is_resumed: bool = False
    other_files: tuple[str, ...] = ()


def apply_delta(
    chain: str | Path,
    to: str | Path,
    *,
    version: int | None = None,
    quick: bool = False,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> ApplyResult:
    """Bring a folder to a version of a chain, the newest by default, in one pass over the tensors that differ.

    The folder is empty, has a Hugging Face model that is a state of the chain, or was written by this function. A
    version before its own is read from the chain's full version. Every byte is verified, also of tensors that stay as
    they were, unless `quick`, before the folder's index lists it. After a kill at any moment the folder has the old
    weights, the new ones or none that open, and the next call finishes: see Note [Switching to new weights].

    Units: bytes; progress is called with bytes done and bytes in total.
    Raises:
        SourceError: the folder has none of the chain's states (`source.other-base`), or the chain is damaged.
        ShardError: a tensor of the folder is damaged.
        OutputError: there is no space for the shards that change, or the folder has other files.
        UsageError: the folder is inside the chain, or an address (`options.invalid-value`).
        LaunchError: another process applies to this folder.

    Example:
        >>> reshard.publish_delta("model", "chain").number, reshard.apply_delta("chain", "served").number
        (1, 1)
    """
    check_packages()
    check_local(Parameter("to"), to)
    if is_inside(place_of(to), place_of(chain)):
        problem = f"overlaps the chain: {to} is inside {chain}"
        raise UsageError(Parameter("to"), problem, "choose a folder beside it", code="output.overlaps-source")
    opened = open_versions(chain)
    wanted = opened.version(opened.numbers[-1] if version is None else version)
    number = wanted.number
    if wanted.files is None:
        wanted = replace(wanted, files=opened.files(number))
    folder, work = Path(to), Work(Path(to))
    with writing_to(str(folder)), work.locked():
        is_resumed = work.switch()
        began_s = time.monotonic()
        present, before, hashed, published = _present(folder)
        hash_s = time.monotonic() - began_s
        target, before = _target(opened, wanted, present, before, work.deltas)
        if published is None and wanted.files is not None:
            published = opened.files(before or 0) or _files_at(opened, before or 0)
        plan = _plan(folder, target, present, number, published or {})
        if not quick:
            plan = replace(plan, to_verify=[tensor for tensor in plan.unchanged if tensor.name not in hashed])
        check_space(folder, sum(shard.nbytes for shard in plan.shards), work.nbytes, option="to")
        done = _carry_out(plan, target, work, wanted, before, (parallelism or Parallelism()).computing(), progress)
        shutil.rmtree(work.deltas, ignore_errors=True)
        return replace(done, verify_s=hash_s + done.verify_s, is_resumed=is_resumed)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The shards to write and the shard of each tensor in the new index; `unchanged` tensors stay where they are."""

    shards: Sequence[OutputShard]
    weight_map: Mapping[str, str]
    unchanged: Sequence[TensorAt]
    to_verify: Sequence[TensorAt] = ()
    auxiliary: Sequence[AuxiliaryAt]
    removed: Sequence[str]
    num_changed: int


def _present(folder: Path) -> tuple[Checkpoint | None, int | None, Collection[str], Mapping[str, str] | None]:
    """Return what a folder has.

    These are its weights, with digests; the version that its index names; which tensors were hashed; and the auxiliary
    files of that version, if the index lists them.
    """
    if (folder / MANIFEST_NAME).exists():
        problem = f"has a {MANIFEST_NAME}, which would no longer be true"
        hint = "apply to a Hugging Face folder: reshard export MANIFEST --to hf --out DIR"
        raise OutputError(str(folder), problem, hint, code="output.has-manifest")
    if not ((folder / INDEX_NAME).is_file() or (folder / SINGLE_NAME).is_file()):
        if others := sorted(name for name in os.listdir(folder) if name != ".cache"):
            problem = f"has other files than a model's: {others[0]}"
            hint = "choose an empty folder, or one with the weights of a version"
            raise OutputError(str(folder), problem, hint, code="output.not-ours")
        return None, None, (), None
    opened = with_header_digests(open_folder(LocalFolder(folder), OpenOptions()))
    hashed = {name for name, tensor in opened.tensors.items() if tensor.blake3 is None}
    number, files = None, None
    if (folder / INDEX_NAME).is_file():
        where = folder / INDEX_NAME
        metadata = read_shard_index(read_small_file(where), str(where)).metadata
        if isinstance(metadata, dict) and re.fullmatch(r"[0-9]{1,12}", str(metadata.get("version"))):
            number, files = int(str(metadata["version"])), decode_files(metadata, str(where))
    auxiliary = tuple(replace(item, digest=digest_bytes(read_whole(item.file))) for item in opened.auxiliary)
    return replace(with_all_digests(opened), auxiliary=auxiliary), number, hashed, files


def _target(
    chain: Chain, version: Version, present: Checkpoint | None, before: int | None, scratch: Path
) -> tuple[Checkpoint, int | None]:
    """Return a version as it is computed from the folder's, if that is possible, or else from the chain's full one."""
    number = version.number
    if present is None:
        return open_version(chain, number, scratch=scratch), None
    state = state_digest(present.tensors.values())
    before = _number_of(chain, state, before)
    if before is None:
        newest = chain.version(chain.numbers[-1])
        problem = f"is none of the states of {chain}: expected {newest.state} (version {newest.number}), found {state}"
        hint = "apply to an empty folder, or to one with the base of the chain"
        raise SourceError(present.location, problem, hint, code="source.other-base")
    line = chain.line(number, after=before) if before < number else []
    is_base = bool(line) and line[0].base == before and line[0].base_state in (None, state)
    if (is_base or before == number) and before in chain.numbers:
        check_copy(present, chain, before, line)
    if before == number:  # by its weights: other files may be those of another version
        return replace(present, auxiliary=auxiliary_at(present, chain, [version])), before
    if is_base:
        return follow(present, chain, [*line[:-1], version], scratch=scratch), before
    return open_version(chain, number, scratch=scratch), before


def _files_at(chain: Chain, number: int) -> dict[str, str]:
    """Return the auxiliary files of a version that no index lists: those of a full version of slime's."""
    try:
        is_known = chain.line(number)[0].is_full
    except SourceError:  # versions before are missing
        return {}
    return {item.path: item.digest or "" for item in open_version(chain, number).auxiliary} if is_known else {}


def _number_of(chain: Chain, state: str | None, number: int | None) -> int | None:
    """Return the version that has a state: the one of that number, if it does, or another one, or the base of one.

    Versions of others record no states: the folder's number is taken as it is, or else that of their base.
    """
    if number in chain.numbers and chain.version(number).state == state:
        return number
    versions = list[Version]()
    for version in chain.newest_first():
        if version.state == state:
            return version.number
        if version.base_state == state:
            return version.base
        versions.append(version)
    unrecorded = [version.number for version in versions if (version.state, version.base_state) == (None, None)]
    if number in unrecorded or len(unrecorded) == len(versions):
        return number or 0
    oldest = versions[-1]
    return oldest.base if number is None and oldest.base_state is None else None


def _plan(
    folder: Path, target: Checkpoint, present: Checkpoint | None, number: int, published: Collection[str]
) -> _Plan:
    """Plan the shards that change, each with all of its tensors, or new ones if the tensors or their names are others.

    Of the `published` auxiliary files of the version before, those that the target lacks are removed.
    """
    here: Mapping[str, TensorAt] = {} if present is None else present.tensors
    tensors = dict(target.tensors)
    changed = set()
    for name, tensor in tensors.items():
        if (same := here.get(name)) is not None and are_of_one_kind(same, tensor) and same.blake3 == tensor.blake3:
            tensors[name] = same
        else:
            changed.add(name)
    files = {name: Path(str(tensor.file)).relative_to(folder).as_posix() for name, tensor in here.items()}
    stored: dict[str, str] = {}  # by FQN: what files of the model without its head call a tensor
    if present is not None:
        stored = {present.shape.fqn_of(name): name for shard in present.record.shards for name in shard.header.names}
    is_renamed = bool(changed) and any(fqn != name for fqn, name in stored.items())
    is_alike = here.keys() == tensors.keys() and all(are_of_one_kind(here[name], tensors[name]) for name in here)
    if is_alike and not is_renamed:
        groups: dict[str, list[TensorAt]] = {}
        for name, path in files.items():
            groups.setdefault(path, []).append(tensors[name])
    else:
        groups = {shard.path: [*shard.origins] for shard in lay_out_root(tensors.values())}
        changed = set(tensors)
    names = set(files.values())
    shards, unchanged, weight_map = list[OutputShard](), list[TensorAt](), dict[str, str]()
    for path, origins in groups.items():
        if changed.isdisjoint(origin.name for origin in origins):
            unchanged += origins
            weight_map |= {stored[origin.name]: path for origin in origins}
            continue
        new = _versioned(path, number, names)
        shards.append(lay_out_shard(new, origins))
        weight_map |= {origin.name: new for origin in origins}
    listed = set(weight_map.values())
    gone = {name for name in set(published) - {item.path for item in target.auxiliary} if (folder / name).is_file()}
    return _Plan(
        shards=shards,
        weight_map=weight_map,
        unchanged=unchanged,
        auxiliary=[item for item in target.auxiliary if _differs(folder / item.path, item)],
        removed=[*sorted(names - listed), *sorted(gone)],  # weights first: none stay without their files
        num_changed=len(changed),
    )


def _versioned(path: str, number: int, taken: set[str]) -> str:
    stem = _OF_VERSION.sub("", path.removesuffix(".safetensors"))
    name, again = f"{stem}.v{number:06d}.safetensors", 1
    while name in taken:
        name, again = f"{stem}.v{number:06d}_{again}.safetensors", again + 1
    return name


def _differs(path: Path, item: AuxiliaryAt) -> bool:
    """Return whether a file of the folder is not the auxiliary file of a version."""
    if not path.is_file():
        return True
    return digest_bytes(read_small_file(path)) != (item.digest or digest_bytes(read_whole(item.file)))


def _carry_out(
    plan: _Plan,
    target: Checkpoint,
    work: Work,
    version: Version,
    before: int | None,
    parallelism: Parallelism,
    progress: Progress | None,
) -> ApplyResult:
    write_nbytes = sum(origin.nbytes for shard in plan.shards for origin in shard.origins)
    number, verified_nbytes = version.number, sum(tensor.nbytes for tensor in plan.to_verify)
    counter = counting(progress, write_nbytes + verified_nbytes)
    begin = time.monotonic()
    _verify(plan.to_verify, counter)
    verify_s = time.monotonic() - begin
    changes = plan.shards or plan.auxiliary or plan.removed or before != number
    options = WriteOptions(progress=counter, parallelism=parallelism)
    digests = work.write(plan.shards, plan.auxiliary, options) if changes else {}
    tensors = (
        replace(tensor, blake3=bytes.fromhex(digests[name])) if name in digests else tensor
        for name, tensor in target.tensors.items()
    )
    state = check_state(tensors, version, target.location)  # that of a chain without digests is computed only now
    if changes:
        metadata = {"total_size": sum(tensor.nbytes for tensor in target.tensors.values()), "version": f"{number:06d}"}
        metadata |= {"state": state} if state else {}
        metadata |= {} if version.files is None else {"files": encode_files(version.files)}
        index = {"metadata": metadata, "weight_map": dict(plan.weight_map)}
        check_unchanged(plan.shards, plan.auxiliary)
        moved = [shard.path for shard in plan.shards], [item.path for item in plan.auxiliary]
        work.prepare(index, {"shards": moved[0], "auxiliary": moved[1], "removed": plan.removed})
        work.switch()
    digests_now = {item.path: item.digest for item in target.auxiliary}
    return ApplyResult(
        location=str(work.target),
        number=number,
        before=before,
        state=state,
        is_recorded=version.state is not None,
        num_tensors=len(target.tensors),
        num_changed=plan.num_changed,
        write_nbytes=sum(shard.nbytes for shard in plan.shards),
        read_nbytes=sum(stored_nbytes(origin) for shard in plan.shards for origin in shard.origins) + verified_nbytes,
        verified_nbytes=verified_nbytes,
        verify_s=verify_s,
        other_files=tuple(path for path, digest in (version.files or {}).items() if digests_now.get(path) != digest),
    )


def _verify(tensors: Sequence[TensorAt], progress: ByteCounter) -> None:
    """Compare tensors that stay as they are with their digests."""
    for tensor, digest in zip(tensors, hash_tensors(tensors, progress), strict=True):
        try:
            check_digest(tensor, digest)
        except ShardError as error:
            raise error.changed(hint="apply to an empty folder, or copy the file again") from None
