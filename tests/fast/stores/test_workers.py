"""Pools of threads whose start is interrupted."""

from __future__ import annotations

import threading

import pytest

from stores.workers import WaitingPool


def test_pool_waits_for_work_whose_submission_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C while a thread starts: the pool does not know the thread, which does what it was given."""
    begun, may_end, ended = threading.Event(), threading.Event(), []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        begun.wait(60)
        raise KeyboardInterrupt

    def work() -> None:
        begun.set()
        may_end.wait(60)
        ended.append(True)

    pool = WaitingPool(2, "interrupted")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(work)
    threading.Timer(0.1, may_end.set).start()
    pool.shutdown()
    assert ended == [True]
