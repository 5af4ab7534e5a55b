"""Memory estimates: what autograd keeps, what schedules hold, what ties share."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig

from bench import measure
from manifests.models import ModelShape, is_expert, model_shape
from manifests.models.memory import Memory, MemoryEstimate, estimate_memory, memory_of
from manifests.models.training import POLICIES, Training, scores_nbytes
from manifests.placement import Placement
from manifests.schedules.actions import Action, Table
from manifests.schedules.tables import schedule_table
from runner.models.context_parallel import attention_of, attention_over
from runner.tensors.row_parts import RowParts
from tests.fast.manifests.models.built import build, read_config
from tests.fast.manifests.models.catalogued import quiet, save_tiny, stored_by
from tests.fast.runner.tiny import SIZES
from tests.process.runner.pipeline.mtp_oracle import NEXT, shape_of

FP32 = Training(policy=POLICIES["fp32"], microbatch=2, seq_len=8)
WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512}
WIDE_HEADS = {**WIDE, "head_dim": 48}
WIDE_EXPERTS = {**WIDE_HEADS, "moe_intermediate_size": 128}
WIDE_LATENTS = {
    **WIDE, "moe_intermediate_size": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "q_lora_rank": 96,
}  # fmt: skip


def kept_of_layer(
    config: dict[str, Any], index: int, dtype: torch.dtype, seq_len: int = 32, *, is_masked: bool = False
) -> int:
    """Give the bytes that autograd keeps of one layer on the CPU.

    Tensors that hold no activation are not counted: weights, rotary tables, indices.
    """
    batch = 2
    model = build(config).to(dtype)
    layer, position = model.model.layers[index], torch.arange(seq_len)[None]
    hidden = torch.randn(batch, seq_len, config["hidden_size"], dtype=dtype, requires_grad=True)
    tables = model.model.rotary_emb(hidden, position)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *tables)}
    mask = torch.ones(batch, 1, seq_len, seq_len, dtype=torch.bool) if is_masked else None
    kept, held = {}, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # so that no storage is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, position_embeddings=tables, attention_mask=mask, position_ids=position)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "changes", "index", "tolerance"),
    [
        ("tiny-llama", WIDE_HEADS, 0, 0),
        ("tiny-qwen3", WIDE_HEADS, 0, 0),
        ("tiny-qwen2", WIDE, 0, 0),
        ("tiny-phi3", WIDE, 0, 0),
        ("tiny-phi", {**WIDE, "hidden_act": "gelu"}, 0, 1e-3),  # a CPU keeps statistics in bfloat16
        ("tiny-qwen3-moe", WIDE_EXPERTS, 1, 0),  # a dense layer
        # transformers runs expert by expert, with copies of its own.
        ("tiny-qwen3-moe", WIDE_EXPERTS, 0, 0.1),
        ("tiny-deepseek-v3", WIDE_LATENTS, 0, 0.01),
        ("tiny-deepseek-v3", WIDE_LATENTS, 1, 0.1),
        ("tiny-deepseek-v3", {**WIDE_LATENTS, "q_lora_rank": None}, 0, 0.01),
        ("tiny-gpt-oss", WIDE_HEADS, 1, 0.06),  # experts as above
        ("tiny-gemma2", WIDE_HEADS, 1, 0.02),
    ],
)
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_kept_activations_are_those_of_autograd(
    name: str, changes: dict[str, Any], index: int, tolerance: float, policy: str
) -> None:
    config = read_config(name, **changes)
    work = model_shape(config).work[f"model.layers.{index}"]
    dtype = torch.float32 if policy == "fp32" else torch.bfloat16
    if policy == "bf16" and "deepseek" in name:  # on the CPU, attention with narrower values computes in float32 then
        tolerance = 0.2
    kept = kept_of_layer(config, index, dtype)
    training = replace(FP32, policy=POLICIES[policy], seq_len=32, host_memory="fast")
    scores, *_ = scores_nbytes(work, training)
    ours = 2 * 32 * (POLICIES[policy].compute * work.saved + 4 * work.saved_fp32 + scores)
    assert ours == pytest.approx(kept, rel=tolerance)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-gemma2", "tiny-llama"])
def test_what_attention_of_several_operations_keeps_grows_with_the_square_of_a_row(name: str, policy: str) -> None:
    config, dtype = read_config(name), torch.float32 if policy == "fp32" else torch.bfloat16
    work = model_shape(config).work["model.layers.1"]
    short, long = (kept_of_layer(config, 1, dtype, seq_len) for seq_len in (64, 128))
    squares = long - 2 * short  # what grows with the length alone is in both
    ours = [
        2 * length * scores_nbytes(work, replace(FP32, policy=POLICIES[policy], seq_len=length, host_memory="fast"))[0]
        for length in (64, 128)
    ]
    assert ours[1] - 2 * ours[0] == pytest.approx(squares, rel=0.03, abs=1)


def test_peaks_on_a_gpu_are_those_planned() -> None:
    """As tests/gpu recorded them in bfloat16; in float32, attention of heads that share keys was several operations."""
    recorded = json.loads((measure.ROOT / "bench/results/gpu-memory.json").read_text())
    sizes = {**SIZES, **recorded["model"]}
    shape = model_shape(LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).to_dict())
    for num_ranks in (1, 2):
        placement = Placement(num_stages=num_ranks, num_ranks=num_ranks)
        stages = [shape.modules] if num_ranks == 1 else [shape.modules[:13], shape.modules[13:]]
        for policy in (POLICIES["bf16"], POLICIES["mixed"]):
            training = Training(policy=policy, microbatch=2, seq_len=2048)
            planned = estimate_memory(shape, stages, schedule_table("1F1B", placement, 4), training)
            for rank, measured in zip(planned.ranks, recorded["runs"][f"{policy.name}-{num_ranks}"], strict=True):
                assert rank.total == pytest.approx(measured["peak_nbytes"], rel=0.04), (policy.name, num_ranks)


def kept_by_attention(config: dict[str, Any], training: Training, *, is_masked: bool) -> int:
    """Give the bytes that autograd keeps of attention, and of its output, on a rank with a part of each row."""
    batch, length = training.microbatch, training.num_tokens // training.microbatch
    parts = RowParts(rank=0, size=training.context, gathers=not training.exchanges_heads)
    attention = attention_over(parts, "sdpa") if is_masked and parts.size > 1 else attention_of("sdpa")
    layer = build(config).model.layers[0].self_attn
    heads = (config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"])
    inputs = [
        torch.randn(batch, length, number, layer.head_dim, requires_grad=True).transpose(1, 2) for number in heads
    ]
    num_queries = training.seq_len if training.exchanges_heads else length
    mask = torch.ones(batch, 1, num_queries, training.seq_len, dtype=torch.bool) if is_masked else None
    kept, held = {}, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = attention(layer, *inputs, mask, dropout=0.0, scaling=layer.scaling)[0]
        torch.nn.functional.linear(output.reshape(batch, length, -1), layer.o_proj.weight)
    return sum(kept.values())


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    "changes",
    [
        {"keeps_documents": True},
        {"context": 2, "shard": 2},
        {"context": 2, "shard": 2, "exchanges_heads": True},
    ],
    ids=["documents", "gather", "ulysses"],
)
def test_masks_and_the_keys_of_whole_rows_are_kept(changes: dict[str, Any]) -> None:
    config = read_config("tiny-llama", **WIDE_HEADS, num_attention_heads=8, num_key_value_heads=4)
    shape, plain = model_shape(config), replace(FP32, seq_len=32, shard=changes.get("shard", 1), host_memory="compact")
    masked = replace(plain, **changes)
    by_masks, without = (kept_by_attention(config, masked, is_masked=is_masked) for is_masked in (True, False))
    part = replace(plain, seq_len=32 // masked.context)  # as long as the rank's part
    planned, of_part = (memory_of(shape, training, 1)["model.layers.0"] for training in (masked, part))
    assert planned - of_part == by_masks - without


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-phi3"])
@pytest.mark.parametrize("num_keys", [8, 4, 2])
def test_masks_are_kept_and_keys_that_heads_share_are_repeated(name: str, num_keys: int) -> None:
    config = read_config(name, **WIDE, num_attention_heads=8, num_key_value_heads=num_keys)
    config.pop("head_dim", None)
    masked, plain = (kept_of_layer(config, 0, torch.float32, is_masked=is_masked) for is_masked in (True, False))
    shape, training = model_shape(config), replace(FP32, seq_len=32, host_memory="compact")
    planned = [
        memory_of(shape, replace(training, keeps_documents=is_masked), 1)["model.layers.0"]
        for is_masked in (True, False)
    ]
    assert planned[0] - planned[1] == masked - plain


def test_recomputed_layers_keep_the_mask_of_their_stage() -> None:
    shape, full = model_shape(read_config("tiny-llama")), replace(FP32, recompute="full")
    one = Placement(num_stages=1, num_ranks=1)
    (plain,), (masked,) = (
        estimate(shape, "GPipe", one, 1, training).ranks for training in (full, replace(full, keeps_documents=True))
    )
    assert masked.activations - plain.activations == 2 * 8 * 8


def test_recomputed_layers_keep_a_mask_of_each_kind() -> None:
    full, one = replace(FP32, recompute="full"), Placement(num_stages=1, num_ranks=1)
    shapes = [model_shape(read_config("tiny-gemma3", sliding_window=window)) for window in (9, 4)]
    (wide, packed), (narrow, both) = (
        [
            estimate(shape, "GPipe", one, 1, training).ranks[0].activations
            for training in (full, replace(full, keeps_documents=True))
        ]
        for shape in shapes
    )
    assert [packed - wide, narrow - wide, both - wide] == [2 * 8 * 8 * number for number in (2, 1, 2)]


def estimate(
    shape: ModelShape, schedule: str, placement: Placement, num_microbatches: int, training: Training = FP32
) -> MemoryEstimate:
    bounds = [round(len(shape.modules) * stage / placement.num_stages) for stage in range(placement.num_stages + 1)]
    stages = [shape.modules[start:stop] for start, stop in pairwise(bounds)]
    return estimate_memory(shape, stages, schedule_table(schedule, placement, num_microbatches), training)


@pytest.mark.parametrize(
    ("policy", "reduced", "nbytes"),
    [
        *(("fp32", reduced, 8 + 12 / 4) for reduced in (2, 4)),
        ("bf16", 2, 4 + 6 / 4),
        ("bf16", 4, 6 + 6 / 4),  # gradients are accumulated in the wider dtype of masters and reduction
        *(("mixed", reduced, 6 + 12 / 4) for reduced in (2, 4)),
    ],
)
def test_fsdp_shards_what_the_optimizer_steps_and_gathers_the_rest(policy: str, reduced: int, nbytes: float) -> None:
    shape, dtypes = model_shape(read_config("tiny-llama")), replace(POLICIES[policy], reduce=reduced)
    training = Training(policy=dtypes, microbatch=1, seq_len=4, shard=4)
    (rank,) = estimate(shape, "GPipe", Placement(num_stages=1, num_ranks=1), 1, training).ranks
    assert rank.state == nbytes * shape.num_params


def test_tensor_parallel_ranks_share_matrices_and_each_has_the_norms() -> None:
    shape = model_shape(read_config("tiny-qwen3-moe"))
    norms = sum(shape.count_params(fqn) for fqn in shape.tensors if len(shape.tensors[fqn]) == 1)
    routers = sum(shape.count_params(fqn) for fqn in shape.tensors if fqn.endswith("mlp.gate.weight"))
    assert norms
    assert routers
    one, two = (
        estimate(shape, "GPipe", Placement(num_stages=1, num_ranks=1), 1, replace(FP32, tensor=degree)).ranks[0]
        for degree in (1, 2)
    )
    assert one.weights == 4 * shape.num_params
    assert two.weights == 2 * (shape.num_params + norms + routers)
    assert one.activations / 2 < two.activations < one.activations  # residuals are whole


def test_expert_parallel_ranks_share_experts_and_fsdp_shards_those_over_fewer_ranks() -> None:
    shape = model_shape(read_config("tiny-qwen3-moe"))
    experts = sum(shape.count_params(fqn) for fqn in shape.tensors if is_expert(fqn))
    others = shape.num_params - experts
    assert experts
    for degrees, expected in (
        ({"shard": 2, "expert": 2}, 8 * (others + experts // 2) + 12 * (others // 2 + experts // 2)),
        ({"shard": 4, "expert": 2}, 8 * (others + experts // 2) + 12 * (others // 4 + experts // 4)),
    ):
        training = replace(FP32, **degrees)
        (rank,) = estimate(shape, "GPipe", Placement(num_stages=1, num_ranks=1), 1, training).ranks
        assert rank.state == expected
    shared = replace(FP32, tensor=2, expert=2)
    (rank,) = estimate(shape, "GPipe", Placement(num_stages=1, num_ranks=1), 1, shared).ranks
    (whole,) = estimate(shape, "GPipe", Placement(num_stages=1, num_ranks=1), 1, replace(FP32, tensor=2)).ranks
    assert not shared.is_sharded
    assert rank.state == whole.state  # each has half of the experts, or half of each


def test_selective_checkpointing_keeps_what_matrices_and_attention_give() -> None:
    shape = model_shape(read_config("tiny-llama"))
    # q, k, v, attention and its output; gate, up and the MLP's output; the layer's input.
    width, keys, ffn = 32, 16, 80
    config = read_config("tiny-llama")
    assert (config["hidden_size"], config["intermediate_size"]) == (width, ffn)
    asked = replace(FP32, recompute="selective")
    kept = memory_of(shape, asked, 1)["model.layers.0"] - memory_of(shape, asked, 0)["model.layers.0"]
    assert kept == FP32.num_tokens * 4 * (2 * width + 2 * keys + width + 2 * ffn + width + width)


@pytest.mark.parametrize(("policy", "nbytes"), [("fp32", 0), ("bf16", 4), ("mixed", 0)])
def test_cpus_round_a_bfloat16_gradient_of_a_weight_out_of_a_float32_one(policy: str, nbytes: int) -> None:
    """With master weights, which accumulate a gradient in float32, there are four bytes besides anyhow."""
    shape, layer = model_shape(read_config("tiny-llama", num_key_value_heads=4)), "model.layers.0"
    training = Training(policy=POLICIES[policy], microbatch=1, seq_len=64)
    table = schedule_table("GPipe", Placement(num_stages=1, num_ranks=1), 1)
    gpu, cpu = (
        estimate_memory(shape, [(layer,)], table, replace(training, host_memory=policy)).ranks[0].temporary
        for policy in (None, "compact")
    )
    assert cpu - gpu == nbytes * max(map(shape.count_params, shape.by_module()[layer]))


@pytest.mark.parametrize(
    ("policy", "shard", "tensor", "gathered"),
    [("fp32", 1, 1, 0), ("fp32", 2, 1, 1), ("fp32", 1, 2, 0), ("mixed", 1, 2, 1)],
)
def test_malloc_keeps_what_a_step_frees_up_to_the_optimizer_state_in_its_place(
    policy: str, shard: int, tensor: int, gathered: int
) -> None:
    shape, table = (
        model_shape(read_config("tiny-llama", num_key_value_heads=4)),
        schedule_table("GPipe", Placement(num_stages=1, num_ranks=1), 1),
    )
    for seq_len in (8, 4096):
        training = Training(policy=POLICIES[policy], microbatch=1, seq_len=seq_len, shard=shard, tensor=tensor)
        gpu, compact, fast = (
            estimate_memory(shape, [shape.modules], table, replace(training, host_memory=host_memory)).ranks[0]
            for host_memory in (None, "compact", "fast")
        )
        assert gpu.total <= compact.total
        freed = compact.total - compact.state
        holes = min(freed, compact.optimizer) + gathered * (compact.weights + compact.gradients)
        assert fast.total == compact.total + holes
        assert fast.state == compact.state


@pytest.mark.parametrize("name", ["BailingHybridForCausalLM", "Ernie4_5_MoeForCausalLM"])
def test_parameters_kept_in_float32_are_counted_as_from_pretrained_has_them(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name, tie_word_embeddings=False)
    with quiet():
        whole = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.bfloat16)
    config, stored = stored_by(name, tie_word_embeddings=False)
    shape, nbytes = model_shape(config, stored=stored), sum(parameter.nbytes for parameter in whole.parameters())
    num_params = sum(parameter.numel() for parameter in whole.parameters())
    assert 2 * num_params < nbytes < 4 * num_params
    one = Placement(num_stages=1, num_ranks=1)
    (plain,) = estimate(shape, "1F1B", one, 1, replace(FP32, policy=POLICIES["bf16"])).ranks
    assert (plain.weights, plain.gradients, plain.optimizer) == (nbytes, nbytes, 2 * nbytes)
    (mixed,) = estimate(shape, "1F1B", one, 1, replace(FP32, policy=POLICIES["mixed"])).ranks
    masters = sum(4 * parameter.numel() for parameter in whole.parameters() if parameter.dtype == torch.bfloat16)
    assert (mixed.weights, mixed.gradients, mixed.optimizer) == (nbytes, 4 * num_params, 8 * num_params + masters)


def test_hidden_states_in_float32_are_sent_as_such() -> None:
    config, stored = stored_by("MambaForCausalLM")
    training, buffers = replace(FP32, policy=POLICIES["bf16"]), {}
    for value in (None, True, False):
        fields = {key: field for key, field in config.items() if key != "residual_in_fp32"}
        fields |= {} if value is None else {"residual_in_fp32": value}
        shape = model_shape(fields, stored=stored)
        two = estimate(shape, "1F1B", Placement(num_stages=2, num_ranks=2), 4, training)
        buffers[value] = two.ranks[1].receive_buffers
    assert 0 < 2 * buffers[False] == buffers[True] == buffers[None]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_does_not_depend_on_the_number_of_microbatches(name: str, recompute: Any) -> None:
    shape = model_shape(read_config("tiny-llama", num_hidden_layers=22))
    num_stages = 4 if name == "1F1B" else 8
    style: Any = "v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop"
    placement = Placement(num_stages=num_stages, num_ranks=4, style=style)
    few, many = (estimate(shape, name, placement, count, replace(FP32, recompute=recompute)) for count in (8, 256))
    assert few == many


def test_split_backward_has_what_it_recomputed_and_the_gradients_of_weights_results_until_its_second_part() -> None:
    shape, layer = model_shape(read_config("tiny-llama")), ("model.layers.0",)
    placement = Placement(num_stages=2, num_ranks=1)
    steps = [Action(stage=stage, kind=kind, microbatch=0) for kind, stage in (("F", 0), ("F", 1), ("I", 1), ("I", 0))]
    steps += [Action(stage=stage, kind="W", microbatch=0) for stage in (1, 0)]
    table = Table(placement=placement, num_microbatches=1, ranks=(tuple(steps),))
    layers = [layer, ("model.layers.1",)]
    none, full = (
        estimate_memory(shape, layers, table, replace(FP32, recompute=recompute)).stages
        for recompute in ("none", "full")
    )
    assert full[1].activations == none[1].activations  # both at the end of I
    # Of q, k, v, o, gate, up, down and both norms: what they give.
    width, keys, ffn = 32, 16, 80
    gradients = 4 * FP32.num_tokens * (width + 2 * keys + width + 2 * ffn + width + 2 * width)
    saved = memory_of(shape, FP32, 1)["model.layers.1"] - memory_of(shape, FP32, 0)["model.layers.1"]
    assert none[1].activations == saved + gradients
    assert full[0].activations == 4 * FP32.num_tokens * width  # W does the whole backward of the first stage


def test_whole_backwards_of_a_stage_that_splits_another_one_recompute_in_the_same_memory() -> None:
    shape, count = model_shape(read_config("tiny-llama", num_hidden_layers=4)), 65
    layers = [tuple(f"model.layers.{2 * stage + number}" for number in (0, 1)) for stage in (0, 1)]
    kinds = dict.fromkeys(range(count), "B")
    peaks = []
    for last in ("B", "IW"):  # of a microbatch after all others, which are in memory together
        kinds[count - 1] = last
        groups = [range(count - 1), range(count - 1, count)]
        ranks = tuple(
            tuple(
                Action(stage=stage, kind=kind, microbatch=number)  # type: ignore[arg-type]
                for group in groups
                for number, kind in (*((n, "F") for n in group), *((n, part) for n in group for part in kinds[n]))
            )
            for stage in (0, 1)
        )
        table = Table(placement=TWO, num_microbatches=count, ranks=ranks)
        memory = estimate_memory(shape, layers, table, replace(FP32, recompute="full")).ranks[1]
        peaks.append(memory.activations + memory.temporary)
    assert peaks[0] == peaks[1]


def test_tied_weight_is_one_on_its_rank_with_a_gradient_for_each_name() -> None:
    shape = model_shape(read_config("tiny-llama", tie_word_embeddings=True))
    embedding = 96 * 32
    one = estimate(shape, "GPipe", Placement(num_stages=1, num_ranks=1), 1).ranks[0]
    assert one == Memory(
        weights=4 * shape.num_params,
        gradients=4 * (shape.num_params + embedding),
        optimizer=8 * shape.num_params,
        activations=one.activations,
        temporary=one.temporary,
    )
    two = estimate(shape, "GPipe", Placement(num_stages=2, num_ranks=2), 1).ranks
    assert sum(rank.weights for rank in two) == 4 * (shape.num_params + embedding)
    assert sum(rank.optimizer for rank in two) == 8 * (shape.num_params + embedding)
    v = estimate(shape, "ZBVZeroBubble", Placement(num_stages=4, num_ranks=2, style="v"), 4)
    assert v.stages[3].gradients - v.stages[3].weights == 4 * embedding
    assert sum(rank.weights for rank in v.ranks) == 4 * shape.num_params


# Estimates of MTP layers: what they keep, what the head keeps for them, what their stage borrows.


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
    # Three norms and their results, besides their inputs in float32.
    assert kept["mtp"] == kept["model.layers.3"] + nbytes * 6 * width + 3 * 2 * 8 * 4 * (width + 1)
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
