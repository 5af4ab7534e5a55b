"""Architectures whose tokens meet outside of transformers' attention interface are refused for context parallelism."""

from __future__ import annotations

import pytest
from torch import nn

from manifests.errors import UserError
from runner import NamedFamily
from runner.config.parallel_dims import ParallelDims
from runner.models.family import Family
from runner.parallel.context_check import check_rows, split_rows
from runner.parallel.mesh import Mesh
from tests.fast.runner.models.test_own_families import request
from tests.fast.runner.pipeline.documents import generic

# A convolution; attention without the interface; a bias by the distance of tokens.
ELSEWHERE = ("Lfm2ForCausalLM", "GPTJForCausalLM", "InklingForCausalLM", "Llama4ForCausalLM")


@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "Olmo3ForCausalLM"])
def test_tokens_that_meet_in_attention_alone_are_split(architecture: str) -> None:
    check_rows(generic(architecture))


@pytest.mark.parametrize("architecture", ELSEWHERE)
def test_tokens_that_meet_elsewhere_are_refused(architecture: str) -> None:
    with pytest.raises(UserError) as error:
        check_rows(generic(architecture))
    assert (error.value.where, error.value.code) == ("--cp", "model.no-context-parallelism")


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
            split_rows(family, mesh, seq_len, "gather")
        assert (error.value.where, error.value.code) == ("--cp", "options.cp-architecture")
