"""Run a job, kill one of its ranks with SIGKILL after a given step and checkpoint, and wait for the job to exit.

python demo/kill_rank.py RANK STEP CHECKPOINT COMMAND ...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(rank: int, step: int, checkpoint: Path, command: list[str]) -> None:
    is_due = is_killed = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            is_due = is_due or line.startswith(f"step {step}/")
            if is_due and not is_killed and (checkpoint / "manifest.json").exists():
                print(f"$ kill -9 {_process_of(rank, job.pid)}   # rank {rank}", flush=True)
                os.kill(_process_of(rank, job.pid), signal.SIGKILL)
                is_killed = True
    if job.returncode == 0 or not is_killed:
        sys.exit(f"expected the job to fail after rank {rank} was killed, once {checkpoint} existed")
    print(f"exit code {job.returncode}")


def _process_of(rank: int, job: int) -> int:
    """Return the process ID of a rank: the descendant of the job whose environment has its RANK."""
    waiting = [job]
    for process in waiting:
        if f"RANK={rank}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return process
        children = Path(f"/proc/{process}/task/{process}/children").read_text()
        waiting += map(int, children.split())
    sys.exit(f"no process of rank {rank}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
