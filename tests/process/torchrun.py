"""Starts real ranks on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(num_ranks: int, script: str, *arguments: str | Path, timeout_s: float = 150) -> None:
    """Run a script of this folder on so many gloo ranks, and see that all of them end well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*torchrun, f"tests/process/{script}", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        timeout=timeout_s,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
