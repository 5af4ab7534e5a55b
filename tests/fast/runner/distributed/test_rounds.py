"""Long work on every rank: what makes no progress is not waited for."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from manifests.errors import SourceError, UnreachableError
from runner import train
from runner.config.flags import parse_training
from runner.distributed import rounds
from runner.distributed.rounds import in_rounds
from runner.distributed.watchdog import StallTimer
from runner.distributed.world import World


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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("flag", ["--checkpoint", "--save"])
def test_disk_of_an_output_that_does_not_answer_as_a_run_begins_is_not_waited_for(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def fsync(descriptor: int) -> None:
        answered.wait(20)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(rounds, "_ROUND_S", 0.1)
    monkeypatch.setattr(train, "_LEAST_CLAIM_S", 0.1)
    options = parse_training(
        ["--data", "synthetic", "--log-dir", str(tmp_path), "--timeout", "1", flag, str(tmp_path / "out")]
    )
    with (
        pytest.raises(UnreachableError) as caught,
        train.claim_outputs(options, World(rank=0, local_rank=0, size=1)),
    ):
        pass
    assert (caught.value.code, answered.is_set()) == ("store.stalled", False)
    answered.set()
