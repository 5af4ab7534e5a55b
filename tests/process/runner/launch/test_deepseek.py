"""DeepSeek-V3 at its true shape, as sparse files: planned, packed, and launched on 256 nodes, as a dry run."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from bench.sparse import write_sparse
from tests.builders import pack, reshard
from tests.process.local_jobs import ROOT, runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEGREES = ("--ep", 64, "--dp-shard", 64)
GPU_MEMORY = ("--gpu-memory", "80GB")
MOST_S = 5  # of processor time


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In BF16 and without the module that predicts further tokens: the rest is what trains."""
    folder = tmp_path_factory.mktemp("deepseek")
    config = json.loads((ROOT / "tests" / "data" / "configs" / "deepseek-v3.json").read_text())
    del config["quantization_config"]
    write_sparse(folder / "source", {**config, "num_nextn_predict_layers": 0}, 163)
    return pack(folder / "source", folder / "packed", "pp=16", "--virtual")


def processor_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def test_its_plan_fits_into_80_gb_and_takes_seconds(packed: Path) -> None:
    before_s = processor_s()
    flags = ("--dtype", "bf16", "--master-dtype", "fp32", "--ac", "full", "--global-batch", 1024, *GPU_MEMORY, "--json")
    done = reshard("plan", packed, *map(str, (*DEGREES, *flags)))
    assert processor_s() - before_s < MOST_S
    assert done.code == 0, done.err
    plan: dict[str, Any] = json.loads(done.out)
    assert (plan["num_stages"], plan["num_ranks"]) == (16, 16)
    totals = [rank["memory_nbytes"]["total"] for rank in plan["ranks"]]
    # The first rank has the embedding and three dense layers, whose weights and gradients are whole while it computes.
    assert max(totals) == totals[0] < plan["assumed"]["memory_limit_nbytes"] == 80 * 2**30
    # Of the second's 4 layers' experts in bf16, 1 of 64 ranks has 4; of the rest 1 of 64 shards, but while it computes.
    experts = 4 * 4 * 3 * 7168 * 2048 * 2
    assert experts < totals[1] / 4
    assert 0 < plan["ranks"][1]["memory_nbytes"]["optimizer"] - 3 * 2 * experts < experts / 4  # masters and moments


def test_a_search_says_what_it_assumes_of_the_networks_that_all_to_alls_cross(packed: Path) -> None:
    done = reshard("plan", packed, "--gpus", "2048", "--ep", "64", "--tp", "1", *GPU_MEMORY)
    assert done.code == 0, done.err
    assert re.search(r"450 GB/s on a node, 50 GB/s between nodes", done.out)
    assert "\n--ep: all-to-alls " in done.out
    alone = reshard("plan", packed, "--gpus", "2048", "--ep", "1", *GPU_MEMORY)
    assert "all-to-alls" not in alone.out


def test_a_job_of_256_nodes_is_written_for_slurm(packed: Path) -> None:
    where = ("--scheduler", "slurm", "--nnodes", 256, "--nproc-per-node", 8, *GPU_MEMORY, "--dry-run")
    flags = ("--data", "synthetic", "--dtype", "bf16", "--ac", "full", "--global-batch", 2048, "--seq-len", 4096)
    done = runner("launch", packed, *where, "--", *DEGREES, *flags)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=256" in done.stdout
    assert "--nnodes 256 --nproc-per-node 8" in done.stdout
    assert len([line for line in done.stderr.splitlines() if line.startswith("node ")]) == 256
