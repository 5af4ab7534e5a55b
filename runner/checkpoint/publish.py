"""Publish a run's weights as versions of a chain, which `reshard delta` reads, beside training.

# Note [Publishing beside training]
A rank keeps the last published state of its tensors, in the dtype of the chain, and memory for the next one. After a
step its weights are cast into that memory, which is the only pause. Then a thread hashes them, and writes what changed
of its own tensors as shards of the new version. Ranks that share a stage, as with --dp-shard, gather one tensor after
the other, and each keeps and publishes a part of them. Rank 0 writes the index when all shards are there, and the
version exists. A delta is of the version before, by the digest of the whole state: a run whose weights at the start are
not the newest version's, because it resumes from an earlier step, publishes a full version first. A run that has no
step left publishes one unless the chain has these weights: later versions may be others'. No version is ever removed.
In a bucket, rank 0 locks the version's prefix, as `reshard delta publish` does, and takes the place of a publisher that
is at it or was killed; each rank looks whether the lock is still there before an object of its own appears. A publish
that fails leaves the prefix locked, and the next one takes its place, so that no rank waits for its objects' removal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist

from manifests.digest import digest_bytes
from manifests.errors import UserError
from manifests.index import INDEX_NAME, replicas_elsewhere
from manifests.invariants import QUANTIZED_CONFIG, QUANTIZED_SOURCE, SOURCE_NAME
from manifests.jsontext import parse_config, parse_json_object
from manifests.models import ModelShape
from manifests.models.config import CONFIG_NAME, encode_config, says_tied, with_dtype, without_ties
from manifests.schema import GIT_ATTRIBUTES_NAME, WEIGHTS
from manifests.store import read_small_file, write_file
from manifests.versions import LOCK_NAME, digest_of_state, encode_files, encode_version, folder_of, metadata_of
from runner.checkpoint.async_save import InFlight
from runner.checkpoint.save import SaveContext, check_folder, check_sizes, hurrying
from runner.checkpoint.shard_file import NAMES, check_not_cancelled, hash_pieces, write_delta, write_shard
from runner.checkpoint.state import Held, HostCopy, divide_into_shards
from runner.config.schema import PublishOptions
from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks
from runner.distributed.rounds import in_rounds, run_beside_training
from runner.distributed.watchdog import StallTimer
from runner.tensors.local_shard import FLAG_DTYPES, Piece
from stores.address import is_url
from stores.base import Blocks, InputFile, read_whole
from stores.folders.lock import locking
from stores.folders.publish import publishing, temporary_folder
from stores.local import LocalFile, LocalFolder
from stores.objects.client import open_writable
from stores.objects.lock import check_lock
from stores.objects.output import ObjectTarget, open_output
from stores.open import open_store
from stores.versions import check_chain, files_of_version, numbers_in

_Written = tuple[list[str], int, str | None]  # of a shard: FQNs, bytes, and its ETag in a bucket

_PATIENCE_S = 30.0  # with another publisher, or a prune of the chain


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """The result of one publish: bytes over all ranks, and this rank's seconds.

    `number` is None if nothing had changed, or it failed; `is_full` otherwise.
    """

    location: str
    step: int
    stall_s: float
    number: int | None = None
    is_full: bool = False
    num_tensors: int = 0
    num_changed: int = 0
    nbytes: int = 0
    publish_s: float = 0.0
    failure: UserError | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """A rank's tensors in the dtype of the chain, their digests, and the digest of the whole state."""

    pieces: Mapping[str, Piece]
    digests: Mapping[str, str]
    whole: str
    num_tensors: int


class Publisher(InFlight[PublishReport]):
    """Publishes the weights of all ranks, one version at a time; see Note [Publishing beside training].

    Every rank calls `publish` after the same steps.
    """

    def __init__(
        self,
        options: PublishOptions,
        context: SaveContext,
        shape: ModelShape,
        weights: Held,
        timeout: timedelta,
        timer: StallTimer,
    ) -> None:
        super().__init__("publish")
        self._chain, self._is_remote, self._timer = options.chain.rstrip("/"), is_url(options.chain), timer
        with raise_on_all_ranks("publish"):
            if self._is_remote and dist.get_rank() == 0:  # a folder is looked at by the launcher, too
                check_chain(open_store(self._chain), f"--publish {options.chain}")
            self._files = _files_of(context, NAMES[FLAG_DTYPES[options.dtype]]) if dist.get_rank() == 0 else {}
        self._file_digests = {name: digest_bytes(data) for name, data in self._files.items()}
        self._replicas = replicas_elsewhere(context.manifest.ties)
        self._patience_s = min(_PATIENCE_S, timeout.total_seconds() / 4)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        state, exact = self._chosen(weights), (*shape.untrained_suffixes, *shape.float32_suffixes)
        self._shards = {
            shard.path: [piece.fqn for piece in shard.pieces]
            for shards in divide_into_shards(state, self._group, ties=context.manifest.ties).values()
            for shard in shards
        }
        self._paths = [path for of_rank in from_all_ranks([*self._shards]) for path in of_rank]

        def dtype_of(piece: Piece) -> torch.dtype:
            is_cast = piece.fqn in shape.tensors and not piece.fqn.endswith(exact)
            return FLAG_DTYPES[options.dtype] if is_cast else piece.memory.dtype

        self._memory = [HostCopy(state, dtype_of), HostCopy(state, dtype_of)]  # of the last state, and the next
        self._start = self._memory[0].fill(state)
        self._last: _State | None = None
        self._check_lock: Callable[[], None] = lambda: None  # of a chain in a folder, on rank 0
        self._output: ObjectTarget | None = None  # on rank 0, the version that is written to a bucket

    def publish(self, weights: Held, step: int, *, has_trained: bool = True) -> None:
        """Publish the weights after a step; of a run that `has_trained` none, unless a version has them."""
        started_s = time.perf_counter()
        self._wait()
        self._has_trained = has_trained
        state = self._memory[1].fill(self._chosen(weights))
        report = PublishReport(location=self._chain, step=step, stall_s=time.perf_counter() - started_s)
        self._begin(self._publish, state, report, time.perf_counter())

    def _chosen(self, weights: Held) -> Held:
        """Return what versions have of a rank's weights: each tensor of the model once."""
        return {
            stage: {WEIGHTS: tuple(piece for piece in kinds[WEIGHTS] if piece.fqn not in self._replicas)}
            for stage, kinds in weights.items()
        }

    def _publish(self, state: Held, report: PublishReport, begun_s: float) -> PublishReport:
        try:
            report = self._write_version(state, report)
        except UserError as error:
            report = replace(report, failure=error)
        return replace(report, publish_s=time.perf_counter() - begun_s)

    def _write_version(self, state: Held, report: PublishReport) -> PublishReport:
        """Write a version if anything has changed; every rank's thread calls this."""
        last = self._last = self._last or self._hashed(self._start)
        new = self._hashed(state)
        with ExitStack() as stack:
            shared = [in_rounds("publish", partial(self._open_version, stack, last, new), self._group)]
            dist.broadcast_object_list(shared, src=0, group=self._group)
            assert shared[0] is not None
            number, is_delta, place = shared[0]
            if is_delta and new.whole == last.whole:
                return replace(report, num_tensors=new.num_tensors)
            write = partial(
                self._write_own,
                number,
                place,
                new,
                last if is_delta else None,
                hurrying(state, self._is_awaited.is_set),
            )
            shards = from_all_ranks(in_rounds("publish", write, self._group), self._group)
            written = {path: shard for of_rank in shards for path, shard in of_rank.items()}
            metadata = metadata_of(number, new.whole, last.whole, is_full=not is_delta)

            def finish(stop: Event) -> None:
                if dist.get_rank() == 0:
                    with self._timer.working():
                        self._commit(place, metadata, written)
                        stack.close()

            in_rounds("publish", finish, self._group)
        self._last, self._memory = new, self._memory[::-1]
        return replace(
            report,
            location=f"{self._chain}/{folder_of(number)}",
            number=number,
            is_full=not is_delta,
            num_tensors=new.num_tensors,
            num_changed=sum(len(fqns) for fqns, _, _ in written.values()),
            nbytes=sum(nbytes for _, nbytes, _ in written.values()),
        )

    def _hashed(self, state: Held) -> _State:
        def work(stop: Event) -> Mapping[str, str]:
            with self._timer.working():
                steps = hash_pieces(state, partial(self._is_cancelled, stop))
                digests = run_beside_training(steps, hurrying(state, self._is_awaited.is_set))
            return {fqn: digest for of_kind in digests.values() for fqn, digest in of_kind.items()}

        digests = in_rounds("publish", work, self._group)
        pieces = {piece.fqn: piece for kinds in state.values() for piece in kinds[WEIGHTS]}
        tensors = [(fqn, NAMES[piece.memory.dtype], piece.shape, digests[fqn]) for fqn, piece in pieces.items()]
        gathered = [tensor for of_rank in from_all_ranks(tensors, self._group) for tensor in of_rank]
        return _State(pieces, digests, digest_of_state(gathered), len(gathered))

    def _open_version(
        self, stack: ExitStack, last: _State, new: _State, stop: Event
    ) -> tuple[int, bool, str | bytes] | None:
        """Return, on rank 0, the next version's number, whether it is a delta, and the folder to write in.

        In a bucket, that is the lock of its prefix. It is empty where the newest version has these weights already.
        """
        if dist.get_rank():
            return None
        with self._timer.working():
            if self._is_remote:
                numbers = numbers_in(store := open_store(self._chain))
            else:
                Path(self._chain).mkdir(parents=True, exist_ok=True)
                lock = Path(self._chain) / LOCK_NAME
                doing, patience_s = "publishes weights there", self._patience_s
                self._check_lock = stack.enter_context(locking(lock, self._chain, doing, patience_s=patience_s))
                numbers = numbers_in(store := LocalFolder(Path(self._chain)))
            number = (numbers[-1] if numbers else 0) + 1
            bases = numbers[-1:] if self._has_trained else numbers[::-1]
            is_delta = any(self._is_base(store.file(f"{folder_of(base)}/{INDEX_NAME}"), last) for base in bases)
            if is_delta and new.whole == last.whole:
                return number, is_delta, ""
            wanted = (*self._paths, *self._files, INDEX_NAME)
            if self._is_remote:
                place = f"{self._chain}/{folder_of(number)}"
                self._output = open_output(place, force=True, wanted=wanted, last=INDEX_NAME)
                try:
                    self._output.check_lock()  # once the names are recorded, other ranks may write
                except BaseException:
                    self._output.abort()
                    raise
                return number, is_delta, self._output.lock
            out = Path(self._chain) / folder_of(number)
            target = publishing(out, force=False, find_owned=files_of_version, wanted=wanted)
            return number, is_delta, str(stack.enter_context(target))

    def _is_base(self, index: InputFile, last: _State) -> bool:
        """Return whether a version has a state and the model's auxiliary files."""
        self._timer.beat()
        metadata = parse_json_object(read_whole(index), str(index)).get("metadata")
        version = metadata if isinstance(metadata, dict) else {}
        return version.get("state") == last.whole and version.get("files") == encode_files(self._file_digests)

    def _write_own(
        self,
        number: int,
        place: str | bytes,
        new: _State,
        base: _State | None,
        hurries: Callable[[], bool],
        stop: Event,
    ) -> dict[str, _Written]:
        """Write this rank's shards of a full version, or of a delta of `base`."""
        is_cancelled, written = partial(self._is_cancelled, stop), dict[str, _Written]()
        shards = {
            path: changed
            for path, fqns in self._shards.items()
            if (changed := [fqn for fqn in fqns if base is None or new.digests[fqn] != base.digests[fqn]])
        }

        def write(root: Path, path: str) -> Generator[None, None, int]:
            if base is None:
                pieces = [new.pieces[fqn] for fqn in shards[path]]
                shard = yield from write_shard(pieces, root, path, WEIGHTS, is_cancelled, new.digests)
                return shard.nbytes
            pairs = {fqn: (base.pieces[fqn].memory, new.pieces[fqn].memory) for fqn in shards[path]}
            return (yield from write_delta(root / path, pairs, new.digests, is_cancelled))

        with self._timer.working():
            if isinstance(place, str):
                check_folder(Path(place))
                for path, fqns in shards.items():
                    written[path] = fqns, run_beside_training(write(Path(place), path), hurries), None
                return written
            prefix = open_writable(f"{self._chain}/{folder_of(number)}").settled()

            def check() -> None:
                self._timer.beat()
                check_lock(prefix, place)

            with temporary_folder("publish-") as root:
                for path, fqns in shards.items():  # one at a time: the disk may have no room for all
                    nbytes, file = run_beside_training(write(root, path), hurries), root / path
                    prefix.writer(path, nbytes, check).write_all(_blocks_until(is_cancelled, file))
                    written[path] = fqns, nbytes, prefix.look_up(path).etag
                    file.unlink()
        return written

    def _commit(self, place: str | bytes, metadata: Mapping[str, str], written: Mapping[str, _Written]) -> None:
        """Write the auxiliary files of a full version, and the index, with which it exists."""
        weight_map = {fqn: path for path, (fqns, _, _) in written.items() for fqn in fqns}
        files = {} if "base_version" in metadata else dict(self._files)
        index = encode_version(metadata, self._file_digests, weight_map)
        if isinstance(place, str):
            check_sizes(Path(place), {path: nbytes for path, (_, nbytes, _) in written.items()})
            for name, data in {**files, INDEX_NAME: index}.items():
                self._timer.beat()
                (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(Path(place) / name, data)
            self._check_lock()  # right before the folder gets its name
            return
        assert self._output is not None, "rank 0 has opened it"
        for name, (_, nbytes, etag) in written.items():
            self._output.note(name, nbytes, etag)
        for name, data in files.items():
            self._timer.beat()
            self._output.put(name, data)
        self._timer.beat()
        self._output.commit(index, INDEX_NAME)

    def _is_cancelled(self, stop: Event) -> bool:
        self._timer.beat()
        return stop.is_set()


def _blocks_until(is_cancelled: Callable[[], bool], file: Path) -> Iterator[memoryview]:
    for block in Blocks(LocalFile(file)):
        check_not_cancelled(file, is_cancelled)
        yield block


def _files_of(context: SaveContext, dtype: str) -> dict[str, bytes]:
    """Return the model's auxiliary files; its config has the dtype of the chain, and ties what the manifest ties."""
    files = {
        file.path: read_small_file(context.root / file.path, file.compared_digest)
        for file in context.manifest.files
        if file.path not in (SOURCE_NAME, QUANTIZED_CONFIG, QUANTIZED_SOURCE, GIT_ATTRIBUTES_NAME)  # of the source
    }
    config = parse_config(files[CONFIG_NAME], str(context.root / CONFIG_NAME))
    updated = with_dtype(config, dtype)
    if says_tied(config) and not context.manifest.ties:
        updated = without_ties(updated)
    if updated != config:
        files[CONFIG_NAME] = encode_config(updated)
    return files
