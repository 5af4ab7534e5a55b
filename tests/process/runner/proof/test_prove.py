"""`runner prove MANIFEST`: a run's combination on this machine, whole, or in subsets of its degrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runner.commands import cli
from tests.builders import pack
from tests.fast.manifests.models.built import build, perturb, read_config
from tests.process.torchrun import fork_context

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prove")
    perturb(build(read_config("tiny-qwen3-moe"))).save_pretrained(folder / "model")
    return pack(folder / "model", folder / "packed", "pp=2")


def prove(*arguments: object) -> Result:
    fork_context()  # whose process has imported what ranks need
    return CliRunner().invoke(cli, ["prove", *map(str, arguments)])


def test_a_combination_of_64_ranks_is_proven_on_4(packed: Path) -> None:
    flags = ("--dp-shard", 8, "--ep", 8, "--global-batch", 64, "--ac", "full")  # 4 replicas
    done = prove(packed, "--nnodes", 8, "--nproc-per-node", 8, "--json", "--", *flags)
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["version"], document["equal"], document["degrees"]["shard"]) == (1, True, 8)
    (tried,) = document["tried"]
    assert (tried["schedule"], tried["dtype"], tried["problem"]) == ("1F1B", "fp64", None)
    assert {name: degree for name, degree in tried["degrees"].items() if degree > 1} == {
        "pipeline": 2, "replicate": 2, "shard": 2, "expert": 2,
    }  # fmt: skip
    assert max(tried["differences"].values()) <= 1e-10
