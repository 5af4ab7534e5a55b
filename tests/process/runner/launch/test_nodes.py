"""Ranks on machines with host names and addresses of their own, started as Kubernetes would start them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests.digest import digest_bytes
from runner.bundle.cache_folder import node_folder
from stores.open import open_manifest
from tests.builders import pack
from tests.process.local_jobs import pack_tiny
from tests.servers.network import Network, missing_for_network, start_network

MISSING = missing_for_network()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no network namespaces: {MISSING}")

ROOT = Path(__file__).resolve().parents[4]
NODES = ("node1", "node2", "node10", "node11")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with start_network(tmp_path, NODES, aliases=("tiny-node-0-0.tiny",)) as network:
        yield network


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A model of four stages."""
    return pack_tiny(tmp_path, 4)


def container_of(packed: Path, log: Path, *flags: str | Path, training: tuple[str | Path, ...] = ()) -> dict[str, Any]:
    """Give what each pod of a job on four nodes runs."""
    launch = [
        sys.executable, "-m", "runner.cli", "launch", packed, "--scheduler", "jobset", "--name", "tiny",
        "--nnodes", "4", "--image", "any", "--mount", f"claim:{packed.parent}", "--log-dir", log, *flags, "--dry-run",
        "--", "--data", "synthetic", "--seq-len", "16", "--global-batch", "4", "--device", "cpu", *training,
    ]  # fmt: skip
    text = subprocess.run(launch, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def run_pods(network: Network, container: dict[str, Any], tmp_path: Path, order: tuple[str, ...] = NODES) -> None:
    """Run a pod on each node, begun in this order, and see that all end well.

    Every node has a /DISK of its own, which is `tmp_path / "disk-of-NODE"`.
    """
    # The image's Python is this one.
    command = [sys.executable if word == "python3" else word for word in container["command"]]
    plain = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    opened = os.pathsep.join((str(ROOT / "tests/process/opened"), str(ROOT)))
    own = {"PYTHONPATH": opened, "OMP_NUM_THREADS": "1"}
    running = []
    for node in order:
        for folder in (tmp_path / f"disk-of-{node}", tmp_path / "DISK"):
            folder.mkdir(exist_ok=True)
        mounted = ("bash", "-ec", 'mount --bind "$1" "$2"; shift 2; exec "$@"', "_")
        numbered = {"PET_NODE_RANK": str(NODES.index(node)), "OPENED_LOG": str(tmp_path / node)}
        running.append(
            subprocess.Popen(
                network.on(node, *mounted, tmp_path / f"disk-of-{node}", tmp_path / "DISK", *command),
                cwd=ROOT,
                env={**os.environ, **plain, **own, **numbered},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [one.communicate(timeout=150)[0] for one in running]
    assert [one.returncode for one in running] == [0] * 4, shlex.join(command) + "\n".join(said)


@pytest.mark.slow
def test_every_node_opens_only_its_own_bundles(network: Network, packed: Path, tmp_path: Path) -> None:
    run_pods(network, container_of(packed, tmp_path / "log", training=("--steps", "2")), tmp_path)
    for number, node in enumerate(NODES):
        assert opened_by(node, tmp_path) == {packed / path for path in paths_on(number, packed)}


def opened_by(node: str, tmp_path: Path) -> set[Path]:
    """Return the shards that a node's ranks opened, but for the tiny checkpoint of the self-check."""
    (log,) = tmp_path.glob(f"{node}.*")
    found = {Path(path) for path in log.read_text().split() if "/.self-check-" not in path}
    log.unlink()
    return found


@pytest.mark.slow
def test_every_node_copies_only_its_own_bundles_and_has_the_same_ranks_when_the_job_starts_again(
    network: Network, packed: Path, tmp_path: Path
) -> None:
    log, history = tmp_path / "log", tmp_path / "history"
    saving = ("--checkpoint", history, "--resume", "auto")

    def job(steps: str) -> dict[str, Any]:
        return container_of(
            packed, log, "--stage-to-local", tmp_path / "DISK" / "copies", training=("--steps", steps, *saving)
        )

    run_pods(network, job("2"), tmp_path)
    first = folder_of(packed)
    for number, node in enumerate(NODES):
        own = paths_on(number, packed)
        assert copies_on(node, tmp_path) == {f"{first}/{path}" for path in own}
        there = {packed / path for path in own}
        assert opened_by(node, tmp_path) - written_by(number, history, "2") == there | {
            tmp_path / "DISK" / "copies" / first / path for path in own
        }
    # Queued again, pods come up in any order; names sort as node1, node10, node11, node2.
    run_pods(network, job("4"), tmp_path, order=("node10", "node2", "node11", "node1"))
    second = folder_of(history / "step-000002")
    for number, node in enumerate(NODES):
        assert copies_on(node, tmp_path) == {
            *(f"{first}/{path}" for path in paths_on(number, packed)),
            *(f"{second}/{path}" for path in paths_on(number, history / "step-000002")),
        }
    assert hosts_of_ranks(log) == list(NODES)
    losses = [
        line["step"] for line in map(json.loads, (log / "metrics.jsonl").read_text().splitlines()) if "loss" in line
    ]
    assert losses == [1, 2, 3, 4]


def folder_of(packed: Path) -> str:
    digest = digest_bytes((packed / "manifest.json").read_bytes())
    return node_folder(Path("/"), packed.name, digest).name


def copies_on(node: str, tmp_path: Path) -> set[str]:
    root = tmp_path / f"disk-of-{node}" / "copies"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def written_by(number: int, history: Path, step: str) -> set[Path]:
    """Give the shards of a checkpoint that a rank has opened to write."""
    name = f"step-{int(step):06d}"
    return {history / f".{name}.partial" / path for path in paths_on(number, history / name)}


def paths_on(stage: int, folder: Path) -> set[str]:
    return {shard.path for shard in open_manifest(folder).manifest.stages[stage].shards}


def hosts_of_ranks(log: Path) -> list[str]:
    beats = sorted((log / "heartbeat").glob("rank-*.json"))
    return [json.loads(beat.read_text())["host"] for beat in beats]


@pytest.mark.slow
def test_nodes_with_the_same_stage_read_it_from_the_store_once(network: Network, packed: Path, tmp_path: Path) -> None:
    halves = tmp_path / "pp2"
    pack(packed, halves)
    log = tmp_path / "log"
    flags = ("--stage-to-local", tmp_path / "DISK" / "copies")
    run_pods(network, container_of(halves, log, *flags, training=("--steps", "1", "--dp-replicate", "2")), tmp_path)
    read = [path for node in NODES for path in opened_by(node, tmp_path) if path.is_relative_to(halves)]
    assert sorted(read) == sorted(halves / shard.path for shard in open_manifest(halves).manifest.shards)
    ranks = [
        line for line in map(json.loads, (log / "metrics.jsonl").read_text().splitlines()) if "peer_nbytes" in line
    ]
    nbytes = sum(shard.nbytes for shard in open_manifest(halves).manifest.shards)
    assert [sum(rank[name] for rank in ranks) for name in ("staged_nbytes", "peer_nbytes")] == [2 * nbytes, nbytes]
    first = folder_of(halves)
    for number, node in enumerate(NODES):
        assert copies_on(node, tmp_path) == {f"{first}/{path}" for path in paths_on(number // 2, halves)}
