"""An output in a bucket: the prefix appears when its last object is written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, wait
from contextlib import contextmanager
from dataclasses import dataclass

from manifests.digest import digest_bytes
from manifests.safetensors import parse_header
from manifests.schema import AuxiliaryFile
from reshard.copy.engine import InOrder, WriteOptions, WrittenShard
from reshard.copy.parallelism import UploadPlan
from reshard.plans.pack_plan import OutputShard
from stores.base import Blocks, InputFile
from stores.objects.output import ObjectTarget, open_output
from stores.workers import WaitingPool


@dataclass(frozen=True, slots=True)
class BucketTarget:
    """A prefix in a bucket, to which shards are uploaded concurrently, each from its header on.

    Digests in the header that are not known are computed before. Remote shards that fit into memory are kept there
    meanwhile; otherwise those tensors are read twice, and must have the same bytes both times. Memory: that of
    `Parallelism`, for parts, or half for parts and half for requests to the source. Small files are sent beside.
    """

    objects: ObjectTarget

    def put(self, name: str, data: bytes) -> None:
        self.objects.put(name, data)

    def copy(self, name: str, file: InputFile, digest: str | None = None) -> AuxiliaryFile:
        blocks = Blocks(file, digest)
        self.objects.copy(name, blocks)
        return AuxiliaryFile(path=name, nbytes=blocks.nbytes, digest=blocks.digest)

    def write_shards(self, shards: Sequence[OutputShard], options: WriteOptions) -> tuple[WrittenShard, ...]:
        stop = threading.Event()

        def progress(nbytes: int) -> None:
            if stop.is_set():
                raise CancelledError
            options.progress(nbytes)

        plan = UploadPlan.of(shards, options.parallelism)
        origins = (origin for shard in shards for origin in shard.origins)
        readers = threading.Semaphore(plan.num_readers)

        def upload(shard: OutputShard) -> WrittenShard:
            return self._upload(shard, plan, InOrder(shard, progress, prefetcher), readers)

        with (
            WaitingPool(plan.uploads.num_objects, "upload") as pool,
            # Parts are sent from the memory of responses, without a copy.
            plan.reading.prefetcher(
                plan.num_readers, stop, origins, stream_nbytes=plan.stream_nbytes, reuses=False
            ) as prefetcher,
        ):
            try:
                jobs = [pool.submit(upload, shard) for shard in shards]
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        options.parallelism.add(prefetcher)
        return tuple(job.result() for job in jobs)

    def written(self, names: Collection[str]) -> dict[str, tuple[int, str]]:
        written = self.objects.written()
        return {name: (written[name].nbytes, written[name].etag or "") for name in names}

    def commit(self, name: str, data: bytes) -> None:
        self.objects.commit(data, name)

    def _upload(
        self, shard: OutputShard, plan: UploadPlan, source: InOrder, readers: threading.Semaphore
    ) -> WrittenShard:
        before, digests = plan.read_before(shard), None
        if (header := self._completed(shard)) is not None:
            source.progress(sum(tensor.nbytes for tensor in (*before, *shard.origins)))
            return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=digest_bytes(header))
        if plan.is_kept:
            with readers:
                digests = source.hash_and_keep()
        elif shard.with_digests:
            computed = iter(source.hash(before))
            digests = [origin.digest or next(computed) for origin in shard.origins]
        header = shard.header_with(digests)
        writer = self.objects.writer(shard.path, shard.nbytes, header, plan.uploads.num_parts(shard.nbytes))
        source.write(writer, digests)
        writer.finish()
        return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=digest_bytes(header))

    def _completed(self, shard: OutputShard) -> bytes | None:
        """Return the header of a shard that an interrupted run of this plan uploaded, if there is one."""
        header = self.objects.completed(shard.path, shard.nbytes, shard.header_nbytes)
        if header is None or not shard.with_digests:
            return header if header == shard.header else None
        parsed = parse_header(header[8:], data_nbytes=shard.nbytes - len(header), where=shard.path)
        if parsed.names != [origin.name for origin in shard.origins]:
            return None
        digests = parsed.digest_table(shard.path)
        is_known = all(origin.digest in (None, digest) for origin, digest in zip(shard.origins, digests, strict=True))
        return header if is_known and shard.header_with(digests) == header else None


@contextmanager
def open_prefix(out: str, wanted: Collection[str], *, force: bool, plan: str, last: str) -> Iterator[BucketTarget]:
    """Yield a target below a prefix for these files; with `force`, it takes the place of any unfinished output."""
    with _interrupted_by_sigterm(), open_output(out, force=force, wanted=wanted, plan=plan, last=last) as objects:
        yield BucketTarget(objects)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, as from a scheduler, interrupt: uploads that are not aborted take space, and are not listed."""
    is_main = threading.current_thread() is threading.main_thread()  # only that one may set handlers
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
