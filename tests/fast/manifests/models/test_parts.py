"""What a rank has of a model's tensors, against what transformers' plans shard."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from manifests.models import model_shape
from manifests.models.catalogue import catalogued
from manifests.models.parts import sizes_of
from manifests.models.trainable import generic_entry, why_not_tensor_parallel
from manifests.models.training import POLICIES, Training
from runner.models.generic import Generic
from runner.tensors.dtensor import local_of
from tests.fast.manifests.models.catalogued import config_of, quiet, stored_by

# Attention, shared experts, embeddings of layers, mixers and a head that plans leave whole; and all of it shared.
FEW = ("DeepseekV4ForCausalLM", "Gemma3nForCausalLM", "JambaForCausalLM", "LlamaForCausalLM", "LongcatFlashForCausalLM",
       "NemotronHForCausalLM", "Qwen2MoeForCausalLM")  # fmt: skip
SHARED = tuple(name for name in catalogued() if not why_not_tensor_parallel(name))


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    "architecture", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SHARED]
)
def test_tensor_parallel_ranks_have_as_many_parameters_as_planned(architecture: str) -> None:
    entry = generic_entry(architecture)
    assert entry is not None
    with quiet():
        config, stored = stored_by(architecture)
        family = Generic(entry, config_of(architecture).to_dict(), max_seq_len=1)
        module = family.build(family.modules)
        family.shard(module, init_device_mesh("cpu", (2,)))
    sizes = sizes_of(
        model_shape(config, stored=stored), Training(policy=POLICIES["bf16"], microbatch=1, seq_len=8, tensor=2)
    )
    planned = sum(sum(sizes[name].values()) for name in family.modules)
    # Plans count biases whole, some of which are shared.
    assert planned == pytest.approx(sum(local_of(parameter).numel() for parameter in module.parameters()), rel=0.01)
