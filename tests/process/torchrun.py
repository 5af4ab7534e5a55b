"""Starts real ranks on this machine as torchrun does, out of a process that has imported what they need.

torchrun's ranks import torch, torchtitan and transformers for themselves, which takes each of them most of ten
seconds, and far longer than most tests. Here one process imports them, once for all tests, and is forked. What
torchrun itself does, `tests/process/test_launch.py` and others see through `runner launch`.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
_HOST = "localhost"
_IMPORTED = (
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers",
    "runner.train",
    "runner.evaluation.evaluate",
    "runner.evaluation.generate",
    "runner.models.deepseek_v3",
    "runner.models.gpt_oss",
    "runner.models.llama",
    "runner.models.qwen3",
    "runner.models.transformers",
)


def launch(num_ranks: int, script: str, *arguments: str | Path, timeout_s: float = 150) -> None:
    """Run a script of this folder on so many gloo ranks, and see that all of them end well.

    On a busy machine, TEST_PATIENCE in the environment is a factor for its time.
    """
    timeout_s *= float(os.environ.get("TEST_PATIENCE", "1"))
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    _start_server()
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(num_ranks)]
        argv = (str(ROOT / "tests" / "process" / script), *map(str, arguments))
        processes = [
            context.Process(target=_run, args=(argv, rank, num_ranks, store.port, log), daemon=True)
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            process.start()
        is_done = _wait(processes, time.monotonic() + timeout_s)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
            process.close()
        said = "\n".join(f"rank {rank}: {log.read_text()[-4000:]}" for rank, log in enumerate(logs) if log.exists())
    assert is_done, f"not done after {timeout_s} s\n{said}"
    assert codes == [0] * num_ranks, f"ended with {codes}\n{said}"


def _start_server() -> None:
    """Start the process that is forked, in the folder that our own modules are found from."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)


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


def _run(argv: tuple[str, ...], rank: int, num_ranks: int, port: int, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR=_HOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    os.chdir(ROOT)
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")
