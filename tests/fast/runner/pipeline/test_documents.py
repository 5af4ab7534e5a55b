"""Packed documents: loss and gradients are the sums over the documents by themselves, or the model is refused."""

from __future__ import annotations

import pytest
from torch import nn

from manifests.errors import UserError
from manifests.models.catalogue import catalogued
from manifests.models.trainable import generic_entry
from manifests.placement import Placement
from runner import NamedFamily
from runner.parallel.parallelize import keep_documents
from runner.proof.proving import prove
from tests.fast.runner.models.test_own_families import request
from tests.fast.runner.pipeline.documents import CONFIGS, Alone, generic
from tests.fast.runner.proof.combinations import combination

FAST = (("LlamaForCausalLM", 1), ("MistralForCausalLM", 2), ("GptOssForCausalLM", 2))
# State over tokens without a mask, masks or positions of the model's own, and sparse attention by its own choice.
LEAKING = (
    "BailingHybridForCausalLM", "BambaForCausalLM", "DeepseekV4ForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM",
    "FalconMambaForCausalLM", "GraniteMoeHybridForCausalLM", "InklingForCausalLM", "JambaForCausalLM",
    "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm3ForCausalLM", "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration", "Mamba2ForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM",
    "MiniMaxM3VLForCausalLM", "NemotronHForCausalLM", "OlmoHybridForCausalLM", "OpenAIGPTLMHeadModel",
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "xLSTMForCausalLM",
)  # fmt: skip
# The first takes no positions where transformers makes masks, the second chooses keys by a mask.
FEW = ("BioGptForCausalLM", "DeepseekV32ForCausalLM", "Lfm2ForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "num_stages"),
    [
        pytest.param(name, count, marks=() if (name, count) in FAST else pytest.mark.slow)
        for name in CONFIGS
        for count in (1, 2)
    ],
)
def test_packed_documents_train_as_each_by_itself(architecture: str, num_stages: int) -> None:
    alone = Alone(architecture)
    loss, gradients = alone.differences("GPipe", Placement(num_stages=num_stages, num_ranks=1), 0)
    assert loss <= alone.tolerance
    assert len(gradients) == len(dict(alone.whole.named_parameters()))
    assert max(gradients.values()) <= alone.tolerance


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "architecture",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
        for name in catalogued()
        if generic_entry(name) is not None
    ],
)
def test_architectures_keep_documents_apart_or_are_refused(architecture: str) -> None:
    run = combination(architecture, 1, "--document-mask", "--microbatch", "2")
    if architecture not in LEAKING:
        assert prove(run)["gradient"] <= 1e-4
        return
    with pytest.raises(UserError) as error:
        prove(run)
    assert (error.value.where.split(": ")[-1], error.value.code) == ("--document-mask", "model.no-document-mask")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_document_is_refused_beyond_its_context(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 16}  # fmt: skip
    family = generic("Olmo3ForCausalLM", rope_parameters=rope, max_position_embeddings=16)
    keep_documents(family, 16)
    with pytest.raises(UserError) as error:
        keep_documents(family, 17)
    assert (error.value.where, error.value.code) == ("--document-mask", "options.document-mask")


def test_families_of_other_packages_are_refused() -> None:
    with pytest.raises(UserError) as error:
        keep_documents(NamedFamily(request(), lambda modules: nn.Identity()), 16)
    assert (error.value.where, error.value.code) == ("--document-mask", "options.document-mask")
