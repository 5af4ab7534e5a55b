"""Write a checkpoint: every rank writes the bundles of its own stages, rank 0 checks that it sees them, and commits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath

import torch.distributed as dist

from manifests import __version__
from manifests.digest import digest_bytes
from manifests.errors import CheckpointError, InputError, system_errors
from manifests.index import INDEX_NAME, encode_index
from manifests.invariants import MANIFEST_NAME, SOURCE_FILES
from manifests.models.adapters import RECORD_NAME
from manifests.paths import status_of
from manifests.schema import WEIGHTS, AuxiliaryFile, Holds, Manifest, Parent, Shard, Stage, TrainingState
from manifests.store import read_small_file, write_file, write_manifest
from manifests.trained import DATA_FILES, RUN_FILES, STEPS_NAME, TRAINED_NAME, encode_steps, encode_trained
from runner.bundle.packed import Packed
from runner.checkpoint.adapter_record import AdapterRecord
from runner.checkpoint.shard_file import Before, Digests, hash_pieces, header_of, shard_of, write_shard
from runner.checkpoint.state import Held, ShardToWrite, divide_into_shards, nbytes_of
from runner.distributed.fail_together import from_all_ranks
from runner.distributed.rounds import in_rounds, run_beside_training
from runner.distributed.watchdog import StallTimer
from runner.tensors.local_shard import Piece
from stores.base import Blocks
from stores.folders.owned import files_of_manifest
from stores.folders.publish import Swap, exchange, publishing
from stores.local import LocalFile

logger = logging.getLogger(__name__)
_Planned = dict[str, tuple[list[str], int] | None]  # FQNs and bytes of the shards that the index lists, by path
_LEAST_NBYTES_PER_S = 128 << 20  # a save beside training that is slower yields to it no longer
PAUSES_S = (0.1, 0.3, 1.0, 3.0)
_HINT = "--checkpoint and --save must be in a folder that all nodes share"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveContext:
    """What all checkpoints of a run have in common: the manifest that it trains, in `root`, and its parents.

    `num_writers` ranks write a stage, each its own shards. The run was started from `root` or `named`, and never prunes
    them.
    """

    manifest: Manifest
    root: Path
    parents: tuple[Parent, ...]
    named: Path | None = None  # the checkpoint of --resume, unless that is auto
    num_writers: int = 1
    adapters: AdapterRecord | None = None  # of a run that trains adapters; see Note [Checkpoints of adapters]
    trained: tuple[str, ...] | None = None  # of a run that freezes other parameters
    contents: Mapping[str, bytes] = field(default_factory=dict)  # of auxiliary files, which are in `root` otherwise

    @property
    def records(self) -> dict[str, bytes]:
        """The small files that say what is trained, by name."""
        records = {} if self.adapters is None else {RECORD_NAME: self.adapters.encode()}
        return records if self.trained is None else {TRAINED_NAME: encode_trained(self.trained)}

    def with_contents(self) -> SaveContext:
        """Return it with the auxiliary files in memory: `root` may be replaced or removed while a run trains."""
        files = self.manifest.files
        contents = {file.path: read_small_file(self.root / file.path, file.compared_digest) for file in files}
        return replace(self, contents=contents)

    @classmethod
    def of(cls, launched: Packed, origin: Packed, *, num_writers: int, named: Path | None = None) -> SaveContext:
        """Return the context of a run that trains `launched`, and started from the weights of `origin`."""
        made_anew = (SOURCE_FILES, *RUN_FILES)
        files = tuple(file for file in launched.manifest.files if not file.path.startswith(made_anew))
        return cls(
            manifest=replace(launched.manifest, files=files),
            root=launched.root,
            parents=(*origin.manifest.parents, origin.read.parent),
            named=named,
            num_writers=num_writers,
        )


def save(
    state: Held,
    context: SaveContext,
    out: Path,
    training: TrainingState,
    *,
    data_files: Mapping[str, bytes] | None = None,
    steps: Mapping[str, int] | None = None,
    swap: Swap | None = None,
    group: dist.ProcessGroup | None = None,
    timer: StallTimer | None = None,
    is_awaited: Callable[[], bool] = lambda: True,
    before: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Write the state of all ranks as a checkpoint at `out`, and return the bytes that were written.

    Shards that are as in `before`, a checkpoint of the same run, are linked: see Note [Tensors that are stored once].
    Every rank of the group calls this, with the same `training` but for `random`, the RNG state of each rank, and the
    data cursor and `data_files`, small files about the data, which are rank 0's, and for `steps`, the step counts of
    its parameters that are not the checkpoint's, by FQN. `timer` beats while this rank writes. `swap` replaces a
    checkpoint at `out`; without it, one is refused. `check` is called on rank 0 before the commit, and may raise.
    Until it `is_awaited`, training continues, and comes first. Nothing is at `out` before every bundle is on disk.

    # Note [A disk that hangs]
    What rank 0 does alone, creating and committing the folder, is done in rounds as well: the others do not time out
    while its disk hangs, and its own watchdog, to which `timer` beats, ends the job and names the rank.
    """
    timer, is_rank_0 = timer or StallTimer(), dist.get_rank() == 0
    past, digests = in_rounds("save", partial(_read_and_hash, before, state, timer, is_awaited), group)

    def divide(stage: int, holds: Holds, pieces: Sequence[Piece]) -> list[list[Piece]]:
        return past.divide(stage, holds, pieces, digests, context.trained)

    # No reader takes a folder of slices or of adapters for a model.
    ties = None if context.num_writers > 1 or context.adapters is not None else context.manifest.ties
    shards = divide_into_shards(state, group, divide, ties=ties)
    planned = _gather_planned(shards, group)
    with ExitStack() as stack:

        def begin(stop: threading.Event) -> list[str]:
            if not is_rank_0:
                return []
            with timer.working():
                names = {path for of_rank in planned for path in of_rank}
                names |= {*(file.path for file in context.manifest.files), *DATA_FILES, INDEX_NAME, MANIFEST_NAME}
                names |= {STEPS_NAME, *context.records}
                target = publishing(
                    out, force=swap is not None, find_owned=files_of_manifest, wanted=names, swap=swap or exchange
                )
                return [str(stack.enter_context(target))]

        shared: list[list[str]] = [in_rounds("save", begin, group)]
        dist.broadcast_object_list(shared, src=0, group=group)
        target = Path(shared[0][0])
        write = partial(_write_own, state, context, target, shards, timer, is_awaited, (past, digests))
        written, nbytes = in_rounds("save", write, group)
        gathered = from_all_ranks((written, training.random, nbytes, steps or {}), group)

        def finish(stop: threading.Event) -> None:
            if not is_rank_0:
                return
            stages = _join_stages(stage for part, *_ in gathered for stage in part)
            random = tuple(state for _, states, *_ in gathered for state in states)
            differing = {fqn: count for *_, of_rank in gathered for fqn, count in of_rank.items()}
            files = {**(data_files or {}), **({STEPS_NAME: encode_steps(differing)} if differing else {})}
            with timer.working():
                _commit(context, stages, target, replace(training, random=random), files, planned, timer)
                check()
                stack.close()

        in_rounds("save", finish, group)
    return sum(nbytes for _, _, nbytes, _ in gathered)


def _gather_planned(shards: Mapping[int, Sequence[ShardToWrite]], group: dist.ProcessGroup | None) -> list[_Planned]:
    """Return the shards that each rank will write, on rank 0."""
    planned: _Planned = {
        shard.path: ([piece.fqn for piece in shard.pieces], sum(piece.memory.nbytes for piece in shard.pieces))
        if shard.is_indexed
        else None
        for of_stage in shards.values()
        for shard in of_stage
    }
    gathered: list[_Planned] | None = [{}] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(planned, gathered, dst=0, group=group)
    return gathered or []


def _read_and_hash(
    before: Path | None, state: Held, timer: StallTimer, is_awaited: Callable[[], bool], stop: threading.Event
) -> tuple[Before, Digests]:
    """Return what the checkpoint before has, and the digests of this rank's tensors; nothing without one."""
    if before is None:
        return Before(), {}
    with timer.working():
        past, hashing = Before.read(before, state.keys()), hash_pieces(state, partial(_is_cancelled, timer, stop))
        return past, run_beside_training(hashing, hurrying(state, is_awaited))


def _write_own(
    state: Held,
    context: SaveContext,
    folder: Path,
    shards: Mapping[int, Sequence[ShardToWrite]],
    timer: StallTimer,
    is_awaited: Callable[[], bool],
    stored: tuple[Before, Digests],
    stop: threading.Event,
) -> tuple[list[Stage], int]:
    """Write or link this rank's shards in the folder that rank 0 has created; return them and the bytes written."""
    past, digests = stored
    is_cancelled, nbytes = partial(_is_cancelled, timer, stop), 0

    def write() -> Generator[None, None, list[Stage]]:
        nonlocal nbytes
        stages = []
        for index, kinds in state.items():
            written = []
            for shard in shards[index]:
                of_kind = digests.get((index, shard.holds))
                if of_kind is not None:
                    same = shard_of(shard.path, shard.holds, header_of(shard.pieces, of_kind), shard.pieces)
                    if past.link(same, folder):
                        written.append(same)
                        continue
                at = (folder, shard.path, shard.holds)
                written.append((yield from write_shard(shard.pieces, *at, is_cancelled, of_kind)))
                nbytes += written[-1].nbytes
            stages.append(_as_written(context.manifest.stages[index], tuple(written), kinds[WEIGHTS]))
        return stages

    with timer.working():
        check_folder(folder)
        return run_beside_training(write(), hurrying(state, is_awaited)), nbytes


def hurrying(state: Held, is_awaited: Callable[[], bool]) -> Callable[[], bool]:
    """Return whether work on a state that begins now no longer yields to training: it is awaited, or takes long."""
    late_s = time.monotonic() + nbytes_of(state) / _LEAST_NBYTES_PER_S
    return lambda: is_awaited() or time.monotonic() > late_s


def _is_cancelled(timer: StallTimer, stop: threading.Event) -> bool:
    timer.beat()
    return stop.is_set()


def _as_written(stage: Stage, shards: tuple[Shard, ...], weights: Sequence[Piece]) -> Stage:
    """Return a stage with the shards, tensors and bytes of one rank alone."""
    return replace(
        stage,
        shards=shards,
        spans=(),
        num_tensors=sum(piece.is_first for piece in weights),
        nbytes=sum(piece.memory.nbytes for piece in weights),
    )


def _join_stages(written: Iterable[Stage]) -> dict[int, Stage]:
    """Join what several ranks have written of each stage."""
    stages: dict[int, Stage] = {}
    for part in written:
        whole = stages.get(part.index)
        stages[part.index] = (
            part
            if whole is None
            else replace(
                whole,
                shards=(*whole.shards, *part.shards),
                num_tensors=whole.num_tensors + part.num_tensors,
                nbytes=whole.nbytes + part.nbytes,
            )
        )
    return stages


def _commit(
    context: SaveContext,
    stages: Mapping[int, Stage],
    folder: Path,
    training: TrainingState,
    data_files: Mapping[str, bytes],
    planned: Sequence[_Planned],
    timer: StallTimer,
) -> None:
    check_sizes(folder, {shard.path: shard.nbytes for stage in stages.values() for shard in stage.shards})
    files = context.manifest.files
    for auxiliary in files:
        timer.beat()
        target = folder / auxiliary.path
        target.parent.mkdir(parents=True, exist_ok=True)
        data = context.contents.get(auxiliary.path)
        blocks = Blocks(LocalFile(context.root / auxiliary.path), auxiliary.compared_digest) if data is None else data
        write_file(target, blocks)
    records = context.records if training.optimizer or context.adapters else {}
    for name, data in {**data_files, **records}.items():
        write_file(folder / name, data)
        files = (*files, AuxiliaryFile(path=name, nbytes=len(data), digest=digest_bytes(data)))
    weights = {path: listed for of_rank in planned for path, listed in of_rank.items() if listed is not None}
    if weights:
        names = {path: weights[path][0] for path in sorted(weights)}
        write_file(folder / INDEX_NAME, encode_index(names, sum(nbytes for _, nbytes in weights.values())))
    write_manifest(
        folder,
        replace(
            context.manifest,
            created_by=f"runner {__version__}",
            stages=tuple(stages[index] for index in sorted(stages)),
            files=files,
            parents=context.parents,
            training=training,
            virtual=None,
        ),
    )


def check_folder(folder: Path) -> None:
    """Check that a folder which rank 0 has created is visible here."""

    def find_error() -> InputError | None:
        if _nbytes_of(folder) is not None:
            return None
        return CheckpointError(
            str(folder),
            "rank 0 created this folder, and this node does not see it",
            _HINT,
            code="checkpoint.not-shared",
        )

    _retry(find_error)


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Check that the shards which ranks have written in a folder are visible here; none of them is read."""
    _retry(lambda: _first_wrong(folder, sizes))


def _retry(find_error: Callable[[], InputError | None]) -> None:
    """Look a few times: NFS may answer from a node's cache for a while."""
    for pause_s in PAUSES_S:
        if find_error() is None:
            return
        time.sleep(pause_s)
    if (error := find_error()) is not None:
        raise error


def _first_wrong(folder: Path, sizes: Mapping[str, int]) -> InputError | None:
    above = {folder / parent for name in sizes for parent in PurePosixPath(name).parents}
    for parent in sorted(above):
        with suppress(OSError):
            os.listdir(parent)  # opening a folder makes NFS ask its server
    for name, expected in sizes.items():
        path = folder / name
        nbytes = _nbytes_of(path)
        if nbytes is None:
            return CheckpointError(
                str(path),
                "another rank wrote this shard, and this node does not see it",
                _HINT,
                code="checkpoint.not-shared",
            )
        if nbytes != expected:
            return CheckpointError(
                str(path),
                f"expected the {expected} bytes that a rank has written, found {nbytes}",
                _HINT,
                code="checkpoint.not-shared",
            )
    return None


def _nbytes_of(path: Path) -> int | None:
    with system_errors(path, code="checkpoint.unreadable"):
        status = status_of(path)
    return None if status is None else status.st_size
