"""Ranks on machines with host names and addresses of their own, started as Kubernetes would start them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fast.runner.tiny import save_model
from tests.servers.network import Network, missing_for_network, start_network

MISSING = missing_for_network()
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(MISSING is not None, reason=f"no network namespaces: {MISSING}"),
]

ROOT = Path(__file__).resolve().parents[2]
NODES = ("node1", "node2", "node10", "node11")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with start_network(tmp_path, NODES, aliases=("tiny-node-0-0.tiny",)) as network:
        yield network


def test_every_node_opens_only_its_own_bundles(network: Network, tmp_path: Path) -> None:
    save_model(tmp_path / "tied", tie_word_embeddings=True)
    packed = tmp_path / "pp4"
    reshard = [sys.executable, "-m", "reshard.cli", "pack", tmp_path / "tied", "--layout", "pp=4", "--out", packed]
    subprocess.run(reshard, cwd=ROOT, check=True, capture_output=True, timeout=60)
    launch = [
        sys.executable, "-m", "runner.cli", "launch", packed, "--scheduler", "jobset", "--name", "tiny",
        "--nnodes", "4", "--image", "any", "--log-dir", tmp_path / "log", "--dry-run",
        "--", "--data", "synthetic", "--seq-len", "16", "--global-batch", "4", "--steps", "2", "--device", "cpu",
    ]  # fmt: skip
    text = subprocess.run(launch, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    # The image's Python is this one.
    command = [sys.executable if word == "python3" else word for word in container["command"]]
    plain = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    opened = os.pathsep.join((str(ROOT / "tests/process/opened"), str(ROOT)))
    own = {"PYTHONPATH": opened, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            network.on(node, *command),
            cwd=ROOT,
            env={**os.environ, **plain, **own, "PET_NODE_RANK": str(number), "OPENED_LOG": str(tmp_path / node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, node in enumerate(NODES)
    ]
    said = [one.communicate(timeout=90)[0] for one in running]
    assert [one.returncode for one in running] == [0] * 4, shlex.join(command) + "\n".join(said)
    for number, node in enumerate(NODES):
        (log,) = tmp_path.glob(f"{node}.*")
        assert set(log.read_text().split()) == {str(packed / f"stage-00{number}" / "model.safetensors")}
