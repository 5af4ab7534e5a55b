"""What a node reports that does not reach the others: each is torchrun's, on this machine, and alone."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("number", "is_taken", "says"),
    [
        (0, False, ".+ 127.0.0.1:PORT: Timed out .+ 1/2 clients joined. CODE\nhint: .+"),
        (1, False, ".+ 127.0.0.1:PORT: The client socket has timed out .+ CODE\nhint: .+"),
        (0, True, "port PORT .+ CODE\nhint: .+"),
    ],
    ids=["first", "second", "port"],
)
def test_node_that_is_alone_ends_with_a_message_and_a_code_that_a_restart_may_fix(
    number: int, is_taken: bool, says: str, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        if is_taken:
            taken.listen()
        else:
            taken.close()
        command = [
            sys.executable, "-m", "runner.launch.agent.agent", "--nnodes", "2", "--nproc-per-node", "1",
            "--max-restarts", "0", "--rdzv-conf", "timeout=3",
            "-m", "runner.train", "packed", "--data", "synthetic", "--log-dir", tmp_path,
        ]  # fmt: skip
        where = {"PET_NODE_RANK": str(number), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **where}, capture_output=True, text=True, timeout=110
        )
    assert done.returncode == 5, done.stderr
    says = says.replace("PORT", str(port)).replace("CODE", r"\[rank\.unmet\]")
    message = f"node {number}, {re.escape(socket.gethostname())}: {says}"
    assert re.fullmatch(rf"error: {message}\n", done.stderr), done.stderr
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["ended"], state["code"], state["error_code"]) == ("failed", 5, "rank.unmet")
    assert re.fullmatch(message, state["error"])
