"""Architectures whose tokens meet outside of transformers' attention interface are refused for context parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manifests.errors import UserError
from runner import NamedFamily
from runner.config.parallel_dims import ParallelDims
from runner.models.family import Family
from runner.parallel.mesh import Mesh
from runner.proof.context import check_rows, split_rows
from tests.fast.runner.models.test_own_families import request
from tests.fast.runner.pipeline.documents import generic

# A convolution; attention without the interface; a bias by the distance of tokens; a mask of the layer's own.
ELSEWHERE = ("Lfm2ForCausalLM", "GPTJForCausalLM", "InklingForCausalLM", "Llama4ForCausalLM", "DogeForCausalLM")


@pytest.mark.parametrize("architecture", ["AfmoeForCausalLM", "GptOssForCausalLM", "Olmo3ForCausalLM"])
def test_tokens_that_meet_in_attention_alone_are_split(architecture: str) -> None:
    check_rows(generic(architecture))


@pytest.mark.parametrize("architecture", ELSEWHERE)
def test_tokens_that_meet_elsewhere_are_refused(architecture: str) -> None:
    with pytest.raises(UserError) as error:
        check_rows(generic(architecture))
    assert (error.value.where, error.value.code) == ("--cp", "model.no-context-parallelism")


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()], ids=["no", "its own"])
def test_attention_without_the_mask_of_the_interface_is_refused(
    mask: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(f"transformers.models.olmo3.modeling_olmo3.{name}", lambda *args, **kwargs: mask)
    with pytest.raises(UserError) as error:
        check_rows(generic("Olmo3ForCausalLM"))
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
