"""A packed model opened for `runner eval`, by one rank in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from runner.bundle.packed import open_packed
from runner.config.parallel_dims import ParallelDims
from runner.distributed.world import World
from runner.evaluation.evaluate import read_model
from runner.evaluation.options import parse_eval
from runner.evaluation.scores import TokenLosses
from runner.parallel.mesh import Mesh
from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(rank=0, local_rank=0, size=1, local_size=1)
    dist.destroy_process_group()


@pytest.mark.parametrize("flags", [(), ("--no-self-check",)])
def test_generic_family_is_compared_with_the_whole_model_before_it_is_read(
    flags: tuple[str, ...], world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path / "source", "Olmo3ForCausalLM")
    pack(tmp_path / "source", tmp_path / "packed", "pp=1", "--quiet")
    options = parse_eval([str(tmp_path / "packed"), "--data", "a.txt", "--seq-len", "8", *flags])
    with caplog.at_level(logging.INFO, "runner"):
        mesh = Mesh(degrees=ParallelDims(pipeline=1), rank=0)
        read_model(open_packed(tmp_path / "packed"), options, world, mesh, torch.device("cpu"), TokenLosses())
    assert ("self-check: a tiny Olmo3ForCausalLM" in caplog.text) == (not flags)
