"""Jobs that `runner launch` starts on this machine, watched and ended by tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runner.profiling.step_times import _age_s
from tests.builders import pack
from tests.fast.runner.tiny import save_model
from tests.process.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--data", "synthetic", "--seq-len", "16", "--global-batch", "8", "--timeout", "8", "--no-self-check")


def pack_tiny(folder: Path, num_stages: int) -> Path:
    """Save a tiny tied model in `folder` and pack it in so many stages."""
    save_model(folder / "tied", tie_word_embeddings=True)
    return pack(folder / "tied", folder / f"pp{num_stages}", f"pp={num_stages}")


def runner(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the `runner` command to its end."""
    words = [word if isinstance(word, bytes) else str(word) for word in arguments]
    command: Sequence[str | bytes] = [sys.executable, "-m", "runner.cli", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=110
    )


def forked_runner(
    *arguments: object, output: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the `runner` command to its end as `runner` does, forked from a process that has imported torch.

    Its standard output goes to a file, if one is given.
    """
    words = [str(word) for word in arguments]
    with TemporaryDirectory() as place:
        streams = (output or Path(place, "output"), Path(place, "errors"))
        process = Forked(words, {**os.environ, **environment}, *streams)
        try:
            code = process.wait(110)
        finally:
            process.kill()
        out, err = ("" if path == output else path.read_text() for path in streams)
    return subprocess.CompletedProcess(words, code, out, err)


class Run:
    """A launched job, its log folder and the processes of its ranks, all of them forked."""

    def __init__(self, packed: Path, log: Path, *training: str | Path, **environment: str) -> None:
        self.log, self.output = log, log / "output"
        log.mkdir(exist_ok=True)
        self.output.touch()
        arguments = ["launch", packed, "--", *SMALL, "--log-dir", log, *training]
        words, own = [str(word) for word in arguments], {**os.environ, **environment}
        self.process: Forked | subprocess.Popen[bytes]
        # torch reads some variables as it is imported; no process that was forked after CUDA was asked for may use it
        if any(name.startswith("TORCH_") for name in environment) or "cuda" in training:
            with open(self.output, "a") as stream:
                command = [sys.executable, "-m", "runner.cli", *words]
                self.process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=stream, stderr=stream)
        else:
            self.process = Forked(words, own, self.output)

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def beats(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.log / "heartbeat").glob("rank-*.json"))]

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.log / "state.json").read_text())
        return found

    def ranks(self) -> list[int]:
        """Give the processes of the ranks, by rank."""
        return [beat["pid"] for beat in self.beats]

    def losses(self) -> list[float]:
        lines = map(json.loads, (self.log / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def wait_until(self, is_so: Callable[[], bool], limit_s: float = 90) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: f"step {step}/" in self.said)


@contextlib.contextmanager
def launched(packed: Path, log: Path, *training: str | Path, **environment: str) -> Iterator[Run]:
    """Launch a job, and leave nothing of it."""
    run = Run(packed, log, *training, **environment)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        for beat in run.beats:
            if time.time() - _age_s(str(beat["pid"])) <= beat["time"]:  # else another process has its number now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat["pid"], signal.SIGKILL)


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not are_gone(pids):
        assert time.monotonic() < deadline, f"still there after {limit_s} s: {pids}"
        time.sleep(0.1)
