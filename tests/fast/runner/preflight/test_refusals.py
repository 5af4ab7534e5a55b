"""Combinations for which torch would compute wrong gradients are refused with an alternative."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import transformers

from manifests.errors import UsageError
from manifests.models import model_shape
from manifests.models.combinations import (
    REFUSED,
    Combination,
    check_combination,
    check_divides,
    check_heads,
    combination_of,
)
from manifests.models.trainable import why_not_expert_parallel
from runner.config.flags import parse_training
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions
from runner.models.tensor_plan import PLANS
from runner.preflight.combinations import part_of, share_of
from tests.builders import llama_config
from tests.fast.manifests.models.built import read_config
from tests.fast.manifests.models.catalogued import stored_by
from tests.matrix import AXES, MODELS, covered_by, matrix, ten

ZERO_BUBBLE: dict[str, Any] = {"schedule": "ZBVZeroBubble", "splits_backward": True}
GENERIC: dict[str, Any] = {"is_generic": True, "architecture": "Olmo3ForCausalLM"}
OWN: dict[str, Any] = {"is_unverified": True, "architecture": "MineForCausalLM"}
LORA: dict[str, Any] = {"has_adapters": True}
MTP: dict[str, Any] = {"num_mtp_layers": 1}
REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({**ZERO_BUBBLE, "is_compiled": True}, "--compile", "schedule.compiled-layers"),
    (
        {"num_tensor": 2, "architecture": "MixtralForCausalLM", "whole_because": "there is no plan"},
        "--tp",
        "options.tp-architecture",
    ),
    ({"num_expert": 2, "experts_because": "it has none"}, "--ep", "options.ep-architecture"),
    ({"num_tensor": 2, "has_loss_chunks": True}, "--loss-chunk", "options.tp-loss-chunk"),
    ({"num_tensor": 2, "is_compiled": True}, "--compile", "options.tp-compiled-layers"),
    ({"num_expert": 2, "is_compiled": True}, "--compile", "options.ep-compiled-layers"),
    ({**OWN, "num_shards": 2}, "--dp-shard", "options.catalogue-combination"),
    ({**GENERIC, "is_compiled": True}, "--compile", "options.catalogue-combination"),
    ({**OWN, "has_loss_chunks": True}, "--loss-chunk", "options.catalogue-combination"),
    ({**OWN, **ZERO_BUBBLE}, "--schedule", "options.catalogue-combination"),
    (
        {"num_context": 2, "is_unverified": True, "architecture": "Gemma4ForCausalLM"},
        "--cp",
        "options.cp-architecture",
    ),
    ({"num_context": 2, "is_compiled": True}, "--cp", "options.cp-combination"),
    ({**LORA, "is_own": True}, "--lora-rank", "options.lora-architecture"),
    ({**LORA, "moves_biases": True}, "--router-bias-rate", "options.lora-combination"),
    ({**LORA, "is_compiled": True}, "--compile", "options.lora-combination"),
    ({"num_mtp_layers": 1, "is_own": True}, "manifest", "manifest.mtp-layers"),
    *(
        ({**MTP, **found}, where, "options.mtp-combination")
        for found, where in (
            ({"is_compiled": True}, "--compile"),
            ({"has_adapters": True}, "--lora-rank"),
            ({"has_own_loss": True}, "--loss"),
        )
    ),
]


@pytest.mark.parametrize(("found", "where", "code"), REFUSALS)
def test_combination_that_trains_wrong_is_refused(
    found: dict[str, Any], where: str, code: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(UsageError) as error:
        check_combination(Combination(**found))
    assert (error.value.where, error.value.code) == (where, code)
    wording(str(error.value))


def test_every_rule_is_tested() -> None:
    applied = [[rule.applies(Combination(**found)) for rule in REFUSED] for found, *_ in REFUSALS]
    assert [row.index(True) for row in applied] == list(range(len(REFUSED)))
    assert all(sum(row) == 1 for row in applied)


def test_all_refusals_are_reported_at_once(wording: Callable[[str], None]) -> None:
    with pytest.raises(UsageError) as error:
        check_combination(Combination(is_compiled=True, num_tensor=2, has_loss_chunks=True))
    assert (error.value.where, error.value.code) == ("--loss-chunk", "options.tp-loss-chunk")
    wording(str(error.value))


def test_data_parallel_pipelines_split_a_batch_evenly(wording: Callable[[str], None]) -> None:
    batch = BatchOptions(global_batch=24, microbatch=2, seq_len=8)
    assert share_of(batch, 3) == BatchOptions(global_batch=8, microbatch=2, seq_len=8)
    for num_replicas in (5, 16):
        with pytest.raises(UsageError) as error:
            share_of(batch, num_replicas)
        assert (error.value.where, error.value.code) == ("--global-batch", "options.batch-size")
        wording(str(error.value))


def test_rows_and_heads_that_do_not_divide_over_context_parallel_ranks_are_refused(
    wording: Callable[[str], None],
) -> None:
    degrees = ParallelDims(pipeline=2, context=2)
    batch = BatchOptions(global_batch=8, microbatch=2, seq_len=12)
    assert part_of(batch, degrees) == BatchOptions(global_batch=8, microbatch=2, seq_len=6)
    with pytest.raises(UsageError) as error:
        part_of(replace(batch, seq_len=14), degrees)
    assert (error.value.where, error.value.code) == ("--seq-len", "options.cp-divisor")
    wording(str(error.value))
    config = {"num_attention_heads": 6}
    check_heads(config, 4, "gather", 1)
    check_heads(config, 3, "ulysses", 2)
    others = ({"n_head": 6}, 4, 1), ({"text_config": {"num_attention_heads_per_layer": [8, 6]}}, 4, 1), (config, 3, 4)
    for other, num_context, num_tensor in (*others, (config, 4, 1)):
        with pytest.raises(UsageError) as error:
            check_heads(other, num_context, "ulysses", num_tensor)
        assert (error.value.where, error.value.code) == ("--cp", "options.cp-divisor")
    wording(str(error.value))


def test_ties_are_checked_every_so_many_steps_and_before_checkpoints() -> None:
    args = ["--data", "synthetic", "--steps", "10"]
    often = parse_training([*args, "--check-ties-every", "4"])
    assert [step for step in range(1, 11) if often.checks_ties_after(step)] == [4, 8]
    saving = parse_training([*args, "--checkpoint", "here", "--checkpoint-every", "3"])
    assert [step for step in range(1, 11) if saving.checks_ties_after(step)] == [3, 6, 9, 10]


def test_tensor_parallel_ranks_have_whole_heads_and_vocabulary_rows(wording: Callable[[str], None]) -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 96}
    shape = model_shape(llama_config())
    check_divides(shape, config, 2, 1)
    check_divides(shape, {**config, "vocab_size": 97}, 1, 1)
    with pytest.raises(UsageError) as error:
        check_divides(shape, config, 4, 1)
    assert (error.value.where, error.value.code) == ("--tp", "options.tp-divisor")
    wording(str(error.value))


@pytest.mark.parametrize(
    "name",
    ["AXK1ForCausalLM", "AfmoeForCausalLM", "BailingHybridForCausalLM", "DeepseekV4ForCausalLM", "FlintForCausalLM",
     "HunYuanMoEV1ForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM", "Lfm2MoeForCausalLM",
     "PhimoeForCausalLM", "YoutuForCausalLM"],
)  # fmt: skip
def test_heads_of_attention_that_a_plan_leaves_whole_need_not_divide(name: str) -> None:
    """As the one head of keys that DeepSeek-V4 has."""
    config = getattr(transformers, name).config_class()
    assert not any("attn" in rule for rule in {*config.base_model_tp_plan, *PLANS.get(config.model_type, ())})
    document, stored = stored_by(name)
    fields, shape = {"num_attention_heads": 8, "num_key_value_heads": 1}, model_shape(document, stored=stored)
    check_divides(shape, fields, 2, 1)
    with pytest.raises(UsageError, match=r"divisor of 97 \(vocab"):
        check_divides(shape, {**fields, "vocab_size": 97}, 2, 1)


@pytest.mark.parametrize("name", ["NemotronHForCausalLM", "Qwen3NextForCausalLM", "MiniMaxForCausalLM"])
def test_heads_of_attention_that_a_plan_shares_must_divide(name: str) -> None:
    """Also where that of some layers is whole, or has another name."""
    document, stored = stored_by(name)
    with pytest.raises(UsageError, match=r"divisor of 1 \(num_key"):
        check_divides(model_shape(document, stored=stored), {"num_key_value_heads": 1}, 2, 1)


@pytest.mark.parametrize("is_read", [True, False])
def test_tensor_parallel_ranks_have_whole_heads_of_layers_that_have_others(is_read: bool) -> None:
    """As Gemma 4 has, in either form of its config, and only with `attention_k_eq_v`."""
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_k_eq_v": is_read}
    of_layers: list[dict[str, Any]] = [{"num_global_key_value_heads": 2}]
    of_layers.append({"per_layer_config": {"5": {"num_key_value_heads": 2} if is_read else {}}})
    for fields in of_layers:
        text = {"text_config": {**config, **fields}}
        check_divides(model_shape(llama_config()), text, 2, 1)
        with pytest.raises(UsageError, match=r"divisor of 2 \(num_") if is_read else nullcontext():
            check_divides(model_shape(llama_config()), text, 4, 1)


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-gpt-oss"])
def test_expert_parallel_ranks_have_as_many_experts_each(name: str, wording: Callable[[str], None]) -> None:
    shape = model_shape(read_config(name))
    assert set(shape.count_experts().values()) == {8}
    check_divides(shape, {}, 1, 4)
    with pytest.raises(UsageError) as error:
        check_divides(shape, {}, 1, 3)
    assert (error.value.where, error.value.code) == ("--ep", "options.ep-divisor")
    wording(str(error.value))


@pytest.mark.parametrize(
    ("architecture", "is_own", "is_distributed"),
    [
        ("Qwen3MoeForCausalLM", False, True),
        ("Glm4MoeForCausalLM", False, True),
        ("LlamaForCausalLM", False, False),  # no experts
        ("DeepseekV4ForCausalLM", False, False),  # stages exchange more than the hidden state
        ("MineForCausalLM", True, True),  # unless ranks find that its family has no plan
    ],
)
def test_experts_are_distributed_by_plans_of_transformers(
    architecture: str, is_own: bool, is_distributed: bool
) -> None:
    assert (combination_of(architecture, is_own=is_own).experts_because == "") == is_distributed


# Every pair of features is either in a run that is compared with one process, or refused before the first step.


# What no run combines, with the code of its refusal.
REFUSED_PAIRS = {
    ("context", "model"): {"options.cp-architecture", "model.no-context-parallelism"},
    ("documents", "model"): {"options.document-mask", "model.no-document-mask"},
    ("expert", "model"): {"options.ep-architecture"},
    ("loss_chunk", "model"): {"options.loss-chunk"},
    ("loss_chunk", "tensor"): {"options.tp-loss-chunk"},
    ("model", "tensor"): {"options.tp-architecture"},
}


def test_every_pair_is_compared_or_refused() -> None:
    pairs = matrix(strength=2)
    covered = set().union(*map(covered_by, pairs.cases))
    for axes in combinations(sorted(AXES), 2):
        for values in product(*(AXES[axis] for axis in axes)):
            pair = frozenset(zip(axes, values, strict=True))
            assert (pair in pairs.refused) != (pair in covered), pair
            assert pair in covered or pairs.refused[pair] & REFUSED_PAIRS[axes], pair


def test_the_ten_have_every_value() -> None:
    values = {(axis, getattr(case, axis)) for case in ten() for axis in AXES if axis not in ("model", "dtype")}
    assert {(axis, value) for axis in AXES if axis not in ("model", "dtype") for value in AXES[axis]} <= values


def test_architectures_are_at_least_twelve_and_eight_have_experts() -> None:
    architectures = {architecture for architecture, _ in MODELS.values()}
    experts = {name for name in architectures if not why_not_expert_parallel(name)}
    assert len(architectures) >= 12
    assert len(experts) >= 8
