"""Run a job, kill one of its ranks with SIGKILL after a given step and checkpoint, and wait for the job to exit.

python demo/kill_rank.py RANK STEP CHECKPOINT COMMAND ... --log-dir DIR ...
"""

from __future__ import annotations

import json
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
                process = _process_of(rank, command)
                print(f"$ kill -9 {process}   # rank {rank}", flush=True)
                os.kill(process, signal.SIGKILL)
                is_killed = True
    if job.returncode == 0 or not is_killed:
        sys.exit(f"expected the job to fail after rank {rank} was killed, once {checkpoint} existed")
    print(f"exit code {job.returncode}")


def _process_of(rank: int, command: list[str]) -> int:
    """Return the process ID of a rank, which its heartbeat in the log folder has."""
    log = Path(command[command.index("--log-dir") + 1])
    return int(json.loads((log / "heartbeat" / f"rank-{rank:05d}.json").read_text())["pid"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
