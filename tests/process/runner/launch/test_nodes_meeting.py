"""What a node reports that does not reach the others: each is torchrun's, on this machine, and alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from runner.rundir.records import RunState, write_state
from tests.process.forked import Forked

# By what is wrong: the node's number, and what it says.
ALONE = {
    "first": (0, ".+ 127.0.0.1:PORT: Timed out .+ 1/2 clients joined. CODE\nhint: .+"),
    "second": (1, ".+ 127.0.0.1:PORT: The client socket has timed out .+ CODE\nhint: .+"),
    "port": (0, "port PORT .+ CODE\nhint: .+"),
    "flags": (1, ".+ 127.0.0.1:PORT: The client socket has timed out .+ CODE\nhint: .+"),  # as those of runner eval
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, int]]:
    """Let all nodes wait at once; return the log folder, the port and the exit code of each."""
    place, nodes = tmp_path_factory.mktemp("nodes"), dict[str, tuple[Path, int, Forked]]()
    with ExitStack() as stack:
        for name, (number, _) in ALONE.items():
            taken = stack.enter_context(socket.socket())
            taken.bind(("", 0))
            port = taken.getsockname()[1]
            if name == "port":
                taken.listen()
            else:
                taken.close()
            (log := place / name).mkdir()
            write_state(log, RunState(step=3, ended="stopped", code=130))  # of an attempt that was evicted
            where = {"PET_NODE_RANK": str(number), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
            flags = ("--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port))
            given, environment = (flags, {}) if name == "flags" else ((), where)
            words = (
                *given,
                "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0", "--rdzv-conf", "timeout=3",
                "-m", "runner.train", "packed", "--data", "synthetic", "--log-dir", str(log),
            )  # fmt: skip
            agent = Forked(
                words, {**os.environ, **environment}, log / "output", log / "errors", "runner.launch.agent.agent"
            )
            stack.callback(agent.kill)
            nodes[name] = (log, port, agent)
        return {name: (log, port, agent.wait(110)) for name, (log, port, agent) in nodes.items()}


@pytest.mark.parametrize("name", ALONE)
def test_node_that_is_alone_ends_with_a_message_and_a_code_that_a_restart_may_fix(
    name: str, ended: dict[str, tuple[Path, int, int]]
) -> None:
    (log, port, code), (number, says) = ended[name], ALONE[name]
    errors = (log / "errors").read_text()
    assert code == 5, errors
    says = says.replace("PORT", str(port)).replace("CODE", r"\[rank\.unmet\]")
    message = f"node {number}, {re.escape(socket.gethostname())}: {says}"
    assert re.fullmatch(rf"error: {message}\n", errors), errors
    state = json.loads((log / "state.json").read_text())
    assert (state["ended"], state["code"], state["error_code"]) == ("failed", 5, "rank.unmet")
    assert re.fullmatch(message, state["error"])


def is_listening(port: int) -> bool:
    tables = [table for name in ("tcp", "tcp6") if (table := Path("/proc/net", name)).exists()]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_signal_ends_a_node_at_once_that_waits_for_another(number: signal.Signals, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
    words = (
        "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port), "--nnodes", "2",
        "--nproc-per-node", "1", "--rdzv-conf", "timeout=60", "-m", "runner.train", "packed", "--data", "synthetic",
        "--log-dir", str(tmp_path / "log"),
    )  # fmt: skip
    agent = Forked(words, os.environ, tmp_path / "output", tmp_path / "errors", "runner.launch.agent.agent")
    try:
        deadline_s = time.monotonic() + 60
        while not is_listening(port):
            assert agent.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        agent.send_signal(number)
        assert agent.wait(20) == 130
    finally:
        agent.kill()
    assert (tmp_path / "errors").read_text() == f"interrupted by {number.name}\n"
