"""Starts real ranks on this machine as torchrun does, out of a process that has imported what they need.

torchrun's ranks import torch, torchtitan and transformers for themselves, which takes each of them most of ten
seconds, and far longer than most tests. Here one process imports them, once for all tests, and is forked. What
torchrun itself does, `tests/process/runner/launch/test_launch.py` and others see through `runner launch`.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import TCPStore

from tests.no_fsync import stop_fsync

ROOT = Path(__file__).resolve().parents[2]
_HOST = "localhost"
_IMPORTED = (
    "pytest",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.run",
    "transformers",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "runner.train",
    "runner.evaluation.evaluate",
    "runner.models.generic",
    "tests.fast.runner.tiny",
    "tests.process.preloaded",
    "tests.process.runner.training_jobs",
)


@dataclass(frozen=True, slots=True)
class Rank:
    """A process, and the file that it prints to."""

    process: ForkServerProcess
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code; None if it still runs."""
        self.process.join(timeout_s)
        return self.process.exitcode

    def wait_for(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.said:
            assert self.process.is_alive(), self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


@contextmanager
def started(
    num_ranks: int, script: str, *arguments: str | Path, folders: Sequence[Path] = (), **environment: str
) -> Iterator[list[Rank]]:
    """Start a script below this folder on so many gloo ranks, each in its folder or in ROOT, and leave none of them."""
    context = fork_context()
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    argv = (str(Path(__file__).parent / script), *map(str, arguments))
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(store.port)}
    ranks = []
    with TemporaryDirectory() as place:
        try:
            for rank, folder in enumerate(folders or num_ranks * [ROOT]):
                own, log = {"RANK": str(rank), "LOCAL_RANK": str(rank)}, Path(place, f"rank{rank}")
                target = (argv, {**shared, **own, **environment}, folder, log)
                ranks.append(Rank(context.Process(target=_run, args=target, daemon=True), log))
                ranks[-1].process.start()
            yield ranks
        finally:
            for started_rank in ranks:
                started_rank.process.kill()
            for started_rank in ranks:
                started_rank.process.join()
                started_rank.process.close()


def launch(num_ranks: int, script: str, *arguments: str | Path, timeout_s: float = 150) -> list[str]:
    """Run a script below this folder on so many gloo ranks, which must all succeed; return what each printed.

    On a busy machine, TEST_PATIENCE in the environment is a factor for its time.
    """
    timeout_s *= float(os.environ.get("TEST_PATIENCE", "1"))
    with started(num_ranks, script, *arguments) as ranks:
        processes = [rank.process for rank in ranks]
        is_done = _wait(processes, time.monotonic() + timeout_s)
        codes, printed = [process.exitcode for process in processes], [rank.said for rank in ranks]
    said = "\n".join(f"rank {rank}: {text[-4000:]}" for rank, text in enumerate(printed))
    assert is_done, f"not done after {timeout_s} s, ended with {codes}\n{said}"
    assert codes == [0] * num_ranks, f"ended with {codes}\n{said}"
    return printed


def fork_context() -> ForkServerContext:
    """Start the process that is forked, in the folder that our own modules are found from."""
    context, before = get_context("forkserver"), Path.cwd()
    context.set_forkserver_preload(list(_IMPORTED))
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)
    return context


def _wait(processes: list[ForkServerProcess], until_s: float) -> bool:
    """Wait until all processes have ended well, or one has not."""
    running = list(processes)
    while running:
        if not connection.wait([process.sentinel for process in running], max(0.0, until_s - time.monotonic())):
            return False
        for process in running:
            process.join(0)
        if any(process.exitcode for process in processes):
            time.sleep(1)  # the others say what they have seen of it
            return True
        running = [process for process in running if process.exitcode is None]
    return True


def _run(argv: tuple[str, ...], environment: Mapping[str, str], folder: Path, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR=_HOST, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    stop_fsync()
    gc.freeze()  # no collection goes through what was imported
    os.chdir(folder)
    sys.argv, sys.path[:0] = list(argv), [str(Path(argv[0]).parent)]  # as Python does
    runpy.run_path(argv[0], run_name="__main__")
