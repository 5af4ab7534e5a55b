"""Estimates of MTP layers: what they keep, what the head keeps for them, what their stage borrows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manifests.models import ModelShape
from manifests.models.memory import estimate_memory, memory_of
from manifests.models.training import POLICIES, Training
from manifests.placement import Placement
from manifests.schedules.tables import schedule_table
from tests.process.runner.pipeline.mtp_oracle import NEXT, shape_of

FP32 = Training(policy=POLICIES["fp32"], microbatch=2, seq_len=8)
ONE, TWO = Placement(num_stages=1, num_ranks=1), Placement(num_stages=2, num_ranks=2)


def costs(shape: ModelShape, training: Training) -> dict[str, int]:
    """Give the activations of one microbatch that each module keeps."""
    without, with_one = (memory_of(shape, training, number) for number in (0, 1))
    return {module: with_one[module] - without[module] for module in shape.modules}


@pytest.mark.parametrize("policy", ["fp32", "mixed"])
def test_an_mtp_layer_beside_the_decoder_costs_what_a_decoder_layer_does(policy: str) -> None:
    shape, training = shape_of(1, beside=NEXT), replace(FP32, policy=POLICIES[policy])
    width, nbytes = shape.hidden_size, 2 * 8 * training.policy.compute
    kept = costs(shape, training)
    assert kept["mtp"] == kept["model.layers.3"] + nbytes * 6 * width + 3 * 2 * 8 * 4  # three norms and their results
    full = costs(shape, replace(training, recompute="full"))
    assert full["mtp"] == full["model.layers.3"] == nbytes * width
    work, last, head = (shape.work[module] for module in ("mtp", "model.layers.3", "lm_head"))
    assert work.flops == last.flops + 2 * width * 2 * width + head.flops
    assert work.flops_per_key == last.flops_per_key > 0


@pytest.mark.parametrize(("depth", "beside"), [(1, NEXT), (2, "")])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_head_keeps_the_logits_of_mtp_layers(depth: int, beside: str, recompute: Any) -> None:
    shape, training = shape_of(depth, beside=beside), replace(FP32, recompute=recompute)
    plain = shape.without(shape.optional)
    assert costs(shape, training)["lm_head"] == (1 + depth) * costs(plain, training)["lm_head"]
    in_chunks = replace(training, loss_chunk=4)
    assert costs(shape, in_chunks)["lm_head"] == 0
    kept, other = (costs(shape, options) for options in (training, in_chunks))
    assert all(kept[module] == other[module] for module in shape.optional)
    (chunked,), (alone,) = (
        estimate_memory(model, [model.modules], schedule_table("GPipe", ONE, 1), in_chunks).ranks
        for model in (shape, plain)
    )
    assert chunked.temporary >= alone.temporary


def test_a_stage_borrows_the_embedding_for_its_mtp_layer() -> None:
    shape, table = shape_of(1, beside=NEXT), schedule_table("1F1B", TWO, 2)
    stages = shape.modules[:-3], shape.modules[-3:]
    first, second = estimate_memory(shape, stages, table, FP32).stages
    of_tensors = [
        sum(4 * shape.count_params(fqn) for module in stage for fqn in shape.by_module()[module]) for stage in stages
    ]
    borrowed = 4 * shape.count_params("model.embed_tokens.weight")
    assert [first.weights, second.weights] == [of_tensors[0], of_tensors[1] + borrowed]
    assert [first.gradients, second.gradients] == [of_tensors[0], of_tensors[1] + borrowed]
    on_one = estimate_memory(shape, stages, schedule_table("Interleaved1F1B", replace(TWO, num_ranks=1), 2), FP32)
    assert [stage.weights for stage in on_one.stages] == of_tensors  # one copy on a rank
