"""What has no parts of rows is refused by its config; see tests/process/runner/proof for what is found by proof."""

from __future__ import annotations

import pytest
from torch import nn

from manifests.errors import UserError
from runner import NamedFamily
from runner.config.parallel_dims import ParallelDims
from runner.models.family import Family
from runner.parallel.mesh import Mesh
from runner.parallel.rows import split_rows
from tests.fast.runner.models.test_own_families import request
from tests.fast.runner.pipeline.documents import generic


def test_rope_that_depends_on_the_largest_position_and_other_families_are_refused() -> None:
    mesh = Mesh(degrees=ParallelDims(pipeline=1, context=2), rank=1)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    dynamic = generic("Olmo3ForCausalLM", rope_parameters=rope, max_position_embeddings=16)
    families: tuple[tuple[Family, int], ...] = (
        (dynamic, 20),
        (NamedFamily(request(), lambda modules: nn.Identity()), 16),
    )
    for family, seq_len in families:
        with pytest.raises(UserError) as error:
            split_rows(family, mesh, "gather", seq_len)
        assert (error.value.where, error.value.code) == ("--cp", "options.cp-architecture")
