"""Long work on every rank: what makes no progress is not waited for."""

from __future__ import annotations

import threading

import pytest

from manifests.errors import UnreachableError
from runner.distributed.rounds import in_rounds
from runner.distributed.watchdog import StallTimer


@pytest.mark.usefixtures("one_rank")
def test_work_that_makes_no_progress_fails_while_its_thread_waits() -> None:
    answered, timer = threading.Event(), StallTimer(0.1)

    def work(stop: threading.Event) -> None:
        with timer.working():
            assert answered.wait(60)

    with pytest.raises(UnreachableError) as caught:
        in_rounds("load", work, timer=timer)
    assert (caught.value.code, answered.is_set()) == ("store.stalled", False)
    answered.set()
