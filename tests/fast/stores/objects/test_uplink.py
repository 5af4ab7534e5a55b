"""How many parts an upload sends at a time, and how long each may take."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from manifests.digest import digest_bytes
from manifests.errors import StoreError
from stores.objects.client import ObjectEntry
from stores.objects.lock import CompletedObjects
from stores.objects.uplink import LEAST_BYTES_PER_S, LONGEST_PART_S, NUM_PARTS, Uplink, part_nbytes

PART = part_nbytes(0)


def send(uplink: Uplink, clock: list[float], nbytes: int, bytes_per_s: float) -> None:
    """Send an upload in pieces that each wait for the line."""
    sent = uplink.begin()
    for _ in range(nbytes // PART):
        with sent.sending(PART):
            clock[0] += PART / bytes_per_s
    with sent.finishing():
        clock[0] += 0.1


def test_slow_line_gets_fewer_parts_at_a_time_and_a_fast_one_all() -> None:
    clock = [0.0]
    uplink = Uplink(lambda: clock[0])
    assert (uplink.num_parts(PART), uplink.num_parts(PART, 16)) == (NUM_PARTS, 16)
    send(uplink, clock, 64 << 20, 0.1e6)
    assert (uplink.num_parts(PART), uplink.num_parts(PART, 16)) == (1, 1)
    send(uplink, clock, 64 << 20, 0.9e6)
    assert uplink.num_parts(PART) == 2
    send(uplink, clock, 64 << 20, 500e6)
    assert uplink.num_parts(PART) == NUM_PARTS


@pytest.mark.parametrize(
    ("nbytes", "part_mib"), [(0, 5), (162_000_000, 5), (400 << 20, 7), (512 << 20, 8), (78 << 30, 8)]
)
def test_parts_of_a_shorter_object_are_shorter_so_that_more_are_sent_at_a_time(nbytes: int, part_mib: int) -> None:
    assert part_nbytes(nbytes) == part_mib << 20


@pytest.mark.parametrize("nbytes", [0, 1, 10_000 * (8 << 20), 10_000 * (8 << 20) + 1, 345 << 30, 1 << 40])
def test_object_of_any_length_fits_in_the_parts_that_a_store_takes(nbytes: int) -> None:
    assert part_nbytes(nbytes) >= 5 << 20  # what S3 takes
    assert nbytes <= part_nbytes(nbytes) * 10_000


def test_part_may_take_as_long_as_the_slowest_line_needs() -> None:
    assert part_nbytes(1 << 30) <= LONGEST_PART_S * LEAST_BYTES_PER_S
    assert LONGEST_PART_S > 30 * 2 * NUM_PARTS  # obstore's own limit, were all parts to share one that takes 30 s


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


@pytest.mark.parametrize(
    "process", [{"pid": 3}, {"pid": 3, "birth": None, "host": 1, "namespace": []}, {"pid": 1e400}, [], None]
)
def test_damaged_process_of_a_record_is_no_process_that_has_exited(process: object) -> None:
    claim = digest_bytes(b"lock")
    record = {
        "plan": "p",
        "claim": claim,
        "folder": "",
        "names": [],
        "stopped": False,
        "process": process,
        "objects": {},
    }
    decoded = CompletedObjects.decode(json.dumps(record).encode())
    assert decoded is None or not decoded.is_over(b"lock")
