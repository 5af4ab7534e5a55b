"""Work of low priority leaves the cores to others, and is finished by the thread that needs it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator

import pytest

from runner.distributed.rounds import run_at_low_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def steps_of(count: int, gate: threading.Event | None = None) -> Generator[None, None, list[tuple[int, int]]]:
    """Note the thread and the niceness of each step; wait for the gate after the second one."""
    steps = []
    for number in range(count):
        steps.append((threading.get_ident(), niceness()))
        if number == 1 and gate is not None:
            gate.wait(60)
        yield
    return steps


def test_work_has_low_priority_and_leaves_the_caller_as_it_is() -> None:
    before = niceness()
    steps = run_at_low_priority(steps_of(5), most_s=60)
    assert [nice for _, nice in steps] == 5 * [13]
    assert threading.get_ident() not in dict(steps)
    assert niceness() == before != 13


def test_work_that_is_late_is_finished_by_the_caller_from_where_it_was() -> None:
    gate = threading.Event()
    threading.Timer(0.5, gate.set).start()
    steps = run_at_low_priority(steps_of(6, gate), most_s=0.2)
    assert [nice for _, nice in steps] == 2 * [13] + 4 * [niceness()]
    assert {thread for thread, _ in steps[2:]} == {threading.get_ident()}


@pytest.mark.parametrize("most_s", [0, 60])
def test_error_of_the_work_is_the_callers(most_s: float) -> None:
    def fail() -> Generator[None, None, None]:
        yield
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        run_at_low_priority(fail(), most_s)
