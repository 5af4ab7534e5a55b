"""`--digests background`: tensors are verified by a thread while the first steps use them.

# Note [Used before verified]
Each stored tensor that ranks of a stage have read is read again, whole, by one of them, and compared with its digest:
mostly from the page cache, and in one block of memory, where a copy of what was read would take as much as the weights.
So the file is verified, not the first reading of it (docs/adr/0020). The thread yields to training, see Note [Yielding
without priorities]. All ranks learn of a mismatch with the totals of a step, and nothing is saved before all of them
have verified everything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from manifests.command.sizes import show_bytes
from manifests.errors import InputError, UnreachableError, UserError
from runner.distributed.rounds import in_rounds, result_of, run_beside_training
from runner.distributed.watchdog import StallTimer
from runner.load.local_cache import LocalCache
from runner.load.verify_parts import ToVerify, verify_whole
from runner.rundir.exit_report import rank_label

logger = logging.getLogger("runner")

# What damaged weights may cause before they are found to be damaged; all ranks raise these alike.
_SYMPTOMS = ("rank.not-finite", "rank.tied-weights-differ", "shard.tied-weights-differ")


class DeferredVerification:
    """The stored tensors that this rank verifies while it trains; without any on all ranks, `is_needed` is false.

    Used as a context manager, it ends its thread when the context is left.
    """

    def __init__(self, cache: LocalCache | None = None, timer: StallTimer | None = None, *, is_needed: bool) -> None:
        self._cache, self._tensors = cache, list[ToVerify]()
        self._is_finished, self._ended = not is_needed, threading.Event()
        self._is_awaited = threading.Event()
        self._running: Future[None] | None = None
        self.timer = timer or StallTimer()
        self.older: Sequence[Path] = ()  # checkpoints that the run could resume from instead, the newest first

    def __enter__(self) -> DeferredVerification:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def add(self, tensors: Sequence[ToVerify]) -> None:
        """Add tensors, before the thread is started."""
        assert self._running is None, "the thread has its tensors"
        self._tensors += tensors

    def start(self) -> None:
        """Start the thread, if it does not run yet and there is anything to verify."""
        if self._running is None and not self._is_finished:
            pool = ThreadPoolExecutor(1, "digests")
            self._running = pool.submit(run_beside_training, self._verify(), self._is_awaited.is_set)
            pool.shutdown(wait=False)

    @property
    def has_failed(self) -> bool:
        """Whether this rank has found a mismatch so far."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def finish(self) -> None:
        """Wait until all ranks have verified everything; every rank calls this."""
        if self._is_finished:
            return
        self.start()
        self._is_awaited.set()
        try:
            assert self._running is not None, "it was started"
            in_rounds("load", partial(result_of, self._running))
        except InputError as error:
            is_repaired = self._cache is not None and self._cache.repair()
            if is_repaired or not self.older or isinstance(error, UnreachableError):
                raise
            hint = f"--digests foreground with --resume auto resumes from an older checkpoint: {self.older[0]}"
            raise error.changed(hint=f"{error.hint}; {hint}") from error
        self._is_finished = True
        nbytes = sum(tensor.at.nbytes for tensor in self._tensors)
        logger.info(
            "[%s] verified %d tensors, %s, in the background",
            rank_label(dist.get_rank()), len(self._tensors), show_bytes(nbytes),
        )  # fmt: skip

    @contextmanager
    def comes_first(self) -> Iterator[None]:
        """Where a block fails as it would with damaged weights, report the damage in its place."""
        try:
            yield
        except UserError as error:
            if error.code in _SYMPTOMS:
                self.finish()
            raise

    def _verify(self) -> Generator[None, None, None]:
        with self.timer.working():
            for tensor in self._tensors:
                for _ in verify_whole(tensor):
                    if self._ended.is_set():
                        raise CancelledError
                    yield
                    self.timer.beat()
