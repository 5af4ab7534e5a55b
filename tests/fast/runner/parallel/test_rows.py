"""What has no parts of rows is refused by its config; see tests/process/runner/proof for what is found by proof."""

from __future__ import annotations

import pytest
from torch import nn

from manifests.errors import UserError
from runner import NamedFamily
from runner.config.parallel_dims import ParallelDims
from runner.models.family import Family
from runner.parallel.mesh import Mesh
from runner.parallel.parallelize import split_rows
from tests.fast.runner.models.test_own_families import request
from tests.fast.runner.pipeline.documents import generic

MESH = Mesh(degrees=ParallelDims(pipeline=1, context=2), rank=1)


def refusal(family: Family, seq_len: int) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        split_rows(family, MESH, "gather", seq_len)
    return error.value.where, error.value.code


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_largest_position_is_refused_beyond_its_context(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 16}  # fmt: skip
    family = generic("Olmo3ForCausalLM", rope_parameters=rope, max_position_embeddings=16)
    assert refusal(family, 20) == ("--cp", "options.cp-architecture")
    split_rows(family, MESH, "gather", 16)


def test_families_of_other_packages_are_refused() -> None:
    family = NamedFamily(request(), lambda modules: nn.Identity())
    assert refusal(family, 16) == ("--cp", "options.cp-architecture")
