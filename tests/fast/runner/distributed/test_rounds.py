"""Long work on every rank: what makes no progress is not waited for."""

from __future__ import annotations

import threading

import pytest

from manifests.errors import SourceError, UnreachableError
from runner.distributed import rounds
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


@pytest.mark.usefixtures("one_rank")
def test_an_error_that_is_known_is_raised_though_another_rank_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False])  # another rank still works, and has ended at the second exchange

    def work(stop: threading.Event) -> None:
        raise SourceError("x", "is damaged", code="source.truncated")

    monkeypatch.setattr(rounds, "is_true_for_all", lambda *_: next(answers))
    with pytest.raises(SourceError) as caught:
        in_rounds("load", work)
    assert caught.value.code == "source.truncated"
