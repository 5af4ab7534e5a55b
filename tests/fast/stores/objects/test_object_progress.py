"""The record of completed objects: of those that end together, few requests."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from manifests.errors import StoreError
from stores.objects.client import ObjectEntry
from stores.objects.lock import CompletedObjects


class Bucket:
    """Counts what is written; the first write waits until it may end, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.written, self.begun, self.may_end, self._fails = list[bytes](), threading.Event(), threading.Event(), fails

    def put(self, name: str, data: bytes) -> None:
        self.written.append(data)
        if len(self.written) == 1:
            self.begun.set()
            assert self.may_end.wait(10)
            if self._fails:
                raise StoreError(name, "refused", code="store.denied")


def entry(number: int) -> dict[str, ObjectEntry]:
    return {f"{number}": ObjectEntry(name=f"{number}", nbytes=number, etag=f"{number}")}


@pytest.mark.parametrize("fails", [False, True])
def test_objects_that_are_completed_during_a_write_are_in_the_next_one(fails: bool) -> None:
    bucket, progress, added = Bucket(fails=fails), CompletedObjects("plan", b"lock"), threading.Semaphore(0)

    def add(number: int) -> None:
        added.release()
        progress.add(bucket, entry(number))

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(progress.add, bucket, entry(0))
        assert bucket.begun.wait(10)
        others = [pool.submit(add, number) for number in (1, 2, 3)]
        for _ in others:
            assert added.acquire(timeout=10)
        while len(progress.completed({f"{number}": entry(number)[f"{number}"] for number in range(4)})) < 4:
            pass  # the last of them is about to wait
        bucket.may_end.set()
    assert (first.exception() is not None) is fails
    assert [other.exception() for other in others] == [None, None, None]
    assert len(bucket.written) == 2
    assert json.loads(bucket.written[-1])["objects"].keys() == {"0", "1", "2", "3"}


@pytest.mark.parametrize("process", [{"pid": 3}, {"pid": 3, "birth": None, "host": 1, "namespace": []}, [], None])
def test_damaged_process_of_a_record_is_no_process_that_has_exited(process: object) -> None:
    record = {"plan": "p", "claim": "c", "folder": "", "names": [], "stopped": False, "process": process, "objects": {}}
    decoded = CompletedObjects.decode(json.dumps(record).encode())
    assert decoded is None or not decoded.is_over(b"lock")
