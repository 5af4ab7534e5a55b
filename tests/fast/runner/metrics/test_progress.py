"""What a run shows: a bar where there is a terminal, every Nth line where there is none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from runner.metrics.progress import StepProgress


def test_every_nth_step_and_the_last_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StepProgress(7, first_step=1, every=3)
    for step in range(2, 8):
        progress.step(step, "brief", f"line {step}")
    progress.say("saved")
    progress.close()
    assert capsys.readouterr().out == "line 3\nline 6\nline 7\nsaved\n"


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Give a terminal: the end that its user looks at, and the one that a program writes to."""
    user, program = pty.openpty()
    os.set_blocking(user, False)
    fcntl.ioctl(user, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    with open(program, "w") as stream:
        yield user, stream
    os.close(user)


def read_all(terminal: int) -> str:
    parts = []
    with contextlib.suppress(BlockingIOError):  # all is read
        while True:
            parts.append(os.read(terminal, 1 << 16))
    return b"".join(parts).decode()


def test_terminal_shows_a_bar_with_loss_and_time_left_and_other_lines_above_it(
    terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    user, stream = terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    progress = StepProgress(10, first_step=4, every=2)
    for step in range(5, 11):
        progress.step(step, f"loss {step / 2:.4f}, 1,234 tokens/s", f"line {step}")
        if step == 7:
            progress.say("saved step-000007")
    progress.close()
    stream.flush()
    shown = read_all(user)
    assert [number in shown for number in ("line 6", "line 7", "line 8")] == [True, False, True]
    assert "| 4/10 [" in shown  # what an earlier attempt has done counts as done
    assert "| 10/10 [" in shown
    assert "loss 5.0000, 1,234 tokens/s]" in shown
    assert "<" in shown  # time gone < time left
    assert "saved step-000007\r\n" in shown
