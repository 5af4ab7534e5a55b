"""Reading ahead: a thread reads and tokenizes the next batches while the rank trains, and copies them to its GPU."""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from manifests.errors import RankError
from runner.data.own import SharedCounts
from runner.data.sequences import Batch
from runner.data.shared import SharedReading, StoppedReading
from runner.distributed.fail_together import from_all_ranks, to_first_rank
from runner.rundir.exit_report import rank_label

_NUM_AHEAD = 2  # batches
_STOP_S = 10.0  # for other ranks to stop as well
_HEADER = struct.Struct("<QQ")  # the length of a message, and of the longest one
_FIRST_NBYTES = 32 << 10  # of a message, in its first collective

T = TypeVar("T")


class GroupExchange:
    """The ranks of a process group, which read the same data; see `runner.data.shared.Exchange`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.label = rank_label(dist.get_rank())

    def gather(self, value: T) -> Sequence[T]:
        return from_all_ranks(value, self._group)

    def collect(self, value: T) -> Sequence[T]:
        return to_first_rank(value, self._group)

    def scatter(self, values: Sequence[T]) -> T:
        """Send with one collective what is short: `scatter_object_list` always takes three."""
        pickled = [pickle.dumps(value) for value in values]
        most = max(map(len, pickled), default=0)
        heads = [_HEADER.pack(len(data), most) + data[:_FIRST_NBYTES] for data in pickled]
        nbytes, most = _HEADER.unpack((head := self._scatter(heads, _HEADER.size + _FIRST_NBYTES))[: _HEADER.size])
        rest = self._scatter([data[_FIRST_NBYTES:] for data in pickled], most - _FIRST_NBYTES)
        value: T = pickle.loads((head[_HEADER.size :] + rest)[:nbytes])
        return value

    def _scatter(self, values: Sequence[bytes], nbytes: int) -> bytes:
        """Scatter bytes, padded to `nbytes`."""
        if nbytes <= 0:
            return b""
        received = torch.empty(nbytes, dtype=torch.uint8)
        padded = [torch.frombuffer(bytearray(value.ljust(nbytes)), dtype=torch.uint8) for value in values]
        dist.scatter(received, padded or None, group=self._group, group_src=0)
        return received.numpy().tobytes()


class ReadAhead:
    """Batches that a thread reads before they are needed.

    Leaving the context ends the thread, on all ranks that read together; after an error, it is not waited for.
    """

    def __init__(
        self, batches: Iterator[Batch], device: torch.device, shared: SharedReading | SharedCounts | None = None
    ) -> None:
        self._batches, self._device, self._shared = batches, device, shared
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._copied: deque[torch.cuda.Event] = deque()  # of batches on a GPU
        self._error: BaseException | None = None  # raised where no batch follows those that are ready
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        return self._thread.ident

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._shared is not None:
            self._shared.stop()
        if error is None:
            self._thread.join(_STOP_S)

    def take(self) -> tuple[Batch, float]:
        """Return the next batch, and how many seconds it was waited for: 0 if it was ready."""
        started_s, waited_s = time.perf_counter(), 0.0
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
                waited_s = time.perf_counter() - started_s
            batch = self._ready.popleft()
            self._changed.notify_all()
        if self._copies is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._copied.popleft())
            for tensor in batch.tensors:
                tensor.record_stream(stream)
        return batch, waited_s

    def _run(self) -> None:
        error: BaseException = EOFError("no batch follows")
        shared = self._shared
        try:
            if self._copies is not None:
                torch.cuda.set_device(self._device)
            for batch in self._batches:
                if not self._put(batch):
                    break
        except StoppedReading:
            error, shared = RankError("", "another rank has stopped reading data", code="rank.lost"), None
            error.is_elsewhere = True
        except BaseException as caught:
            error = caught
        with self._changed:
            self._error = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed)
        if shared is not None:
            with contextlib.suppress(Exception):  # another rank has exited
                shared.leave()

    def _put(self, batch: Batch) -> bool:
        """Add a batch once there is room for it; false: no batch is needed any more."""
        if self._copies is not None:
            batch = self._copy(batch, self._copies)
        with self._changed:
            self._ready.append(batch)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < _NUM_AHEAD)
            return not self._is_closed

    def _copy(self, batch: Batch, stream: torch.cuda.Stream) -> Batch:
        with torch.cuda.stream(stream):
            copy = batch.map(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            self._copied.append(stream.record_event())
        return copy
