"""What a run trains: patterns, ties, targets of adapters, and what of a PEFT folder is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from manifests.errors import UserError
from manifests.models import model_shape
from manifests.models.adapters import adapter_sizes, matches_target, parse_peft_config, parse_target
from manifests.models.memory import estimate_memory
from manifests.models.training import POLICIES, HostMemory, Training
from manifests.placement import Placement
from manifests.schedules.tables import schedule_table
from runner.config.flags import parse_training
from runner.config.memory import planned_memory
from runner.config.parallel_dims import ParallelDims
from runner.config.trained import check_trained, trained_by, trained_params
from runner.tensors.dtensor import local_of
from runner.training.mixed_precision import keep_as_stored, master_of
from tests.builders import EMBEDDING, HEAD
from tests.fast.manifests.models.built import read_config
from tests.process.runner.pipeline.mtp_oracle import shape_of

SHAPE = model_shape(read_config("tiny-llama"))
BASE = ["--data", "synthetic"]
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("target", "module", "matches"),
    [
        ("q_proj,v_proj", "model.layers.0.self_attn.v_proj", True),
        ("q_proj", "model.layers.0.self_attn.rq_proj", False),
        ("all-linear", "model.layers.0.mlp.up_proj", True),
        (r".*\.3\..*_proj", "model.layers.3.mlp.up_proj", True),
        (r"\d", "model.layers.3.mlp.up_proj", False),  # of the whole name
    ],
)
def test_target_matches_modules_as_peft_matches_them(target: str, module: str, matches: bool) -> None:
    assert matches_target(parse_target(target), module) is matches


def test_tied_parameters_are_trained_if_one_of_them_is() -> None:
    ties = [("model.embed_tokens.weight", "lm_head.weight")]
    trains = trained_by(parse_training([*BASE, "--train-only", "lm_head", "--train-only", r"layers\.1\."]), ties)
    assert trains is not None
    assert [trains(fqn) for fqn in ("model.embed_tokens.weight", "model.norm.weight")] == [True, False]
    assert trains("model.layers.1.mlp.up_proj.weight")
    assert trained_by(parse_training(BASE), ties) is None


def test_copies_in_mtp_layers_train_the_embedding_and_the_head() -> None:
    shape, place = shape_of(1), Placement(num_stages=1, num_ranks=1, style="loop")
    layer = f"model.layers.{shape.num_layers}."
    copies = {f"{layer}embed_tokens.weight", f"{layer}shared_head.head.weight"}
    assert copies <= shape.tensors.keys()
    options = parse_training([*BASE, "--train-only", re.escape(layer)])
    expected = {EMBEDDING, HEAD, *(fqn for fqn in shape.tensors if fqn.startswith(layer))}
    assert trained_params(options, shape).keys() == expected
    table, degrees = schedule_table("1F1B", place, 1), ParallelDims(pipeline=1)
    (planned,) = planned_memory(shape, [shape.modules], table, options, degrees).stages
    assert planned.gradients == 4 * sum(map(shape.count_params, expected))
    assert planned.optimizer == 2 * planned.gradients


def test_run_with_adapters_trains_them_alone() -> None:
    options = parse_training([*BASE, "--lora-rank", "4"])
    trains = trained_by(options, ())
    assert trains is not None
    assert trains("model.layers.0.mlp.up_proj.lora_A.weight")
    assert not trains("model.layers.0.mlp.up_proj.weight")
    assert options.lora is not None
    assert options.lora.scale == 1.0
    assert trained_params(options, SHAPE) == dict(adapter_sizes(SHAPE, "all-linear", 4, has_experts=False))


@pytest.mark.parametrize(
    ("flags", "where", "code"),
    [
        (["--lora-rank", "4", "--train-only", "x"], "--train-only", "options.conflict"),
        (["--lora-rank", "4", "--lora-experts", "--lora-dropout", "0.1"], "--lora-dropout", "options.conflict"),
        (["--lora-rank", "4", "--lora-dropout", "0.1", "--tp", "2"], "--lora-dropout", "options.conflict"),
        (["--lora-rank", "4", "--lora-target", "*"], "--lora-target *", "options.invalid-value"),
        (["--train-only", "("], "--train-only (", "options.invalid-value"),
        (["--train-only", "nothing"], "--train-only nothing", "options.trains-nothing"),
        (["--lora-rank", "4", "--lora-target", "nothing"], "--lora-target nothing", "options.trains-nothing"),
        (["--lora-rank", "4", "--lora-target", "lm_head"], "--lora-target lm_head", "options.trains-nothing"),
    ],
)
def test_what_trains_nothing_or_conflicts_is_refused(flags: list[str], where: str, code: str) -> None:
    with pytest.raises(UserError) as error:
        check_trained(parse_training([*BASE, *flags]), SHAPE)
    assert (error.value.where, error.value.code) == (where, code)


@pytest.mark.parametrize(
    ("fields", "place", "code"),
    [
        ({"peft_type": "IA3"}, "peft_type", "source.adapter-kind"),
        ({"use_dora": True}, "use_dora", "source.adapter-kind"),
        ({"bias": "all"}, "bias", "source.adapter-kind"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights", "source.adapter-kind"),
        ({"r": 0}, "r", "source.bad-adapter"),
        ({"r": 2.5}, "r", "source.bad-adapter"),
        ({"r": 10**400}, "r", "source.bad-adapter"),
        ({"lora_alpha": 10**400}, "lora_alpha", "source.bad-adapter"),
        ({"rank_pattern": {"q_proj": 2.7}}, "rank_pattern", "source.bad-adapter"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern", "source.bad-adapter"),
        ({"target_modules": [1]}, "target_modules", "source.bad-adapter"),
        ({"exclude_modules": "("}, "exclude_modules", "source.bad-adapter"),
        ({"layers_to_transform": [True]}, "layers_to_transform", "source.bad-adapter"),
        ({"layers_to_transform": 0, "target_modules": "q"}, "layers_to_transform", "source.bad-adapter"),
        ({"layers_to_transform": 0, "layers_pattern": "("}, "layers_pattern", "source.bad-adapter"),
        ({"layers_pattern": ["h"]}, "layers_pattern", "source.bad-adapter"),
    ],
)
def test_config_of_another_adapter_is_refused(fields: dict[str, Any], place: str, code: str) -> None:
    with pytest.raises(UserError) as error:
        parse_peft_config(json.dumps({**PEFT, **fields}).encode(), "here")
    assert (error.value.where, error.value.code) == (f"here: {place}", code)


def test_ranks_and_scales_follow_patterns() -> None:
    fields = {**PEFT, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.q_proj": 6}}
    config = parse_peft_config(json.dumps(fields).encode(), "here")
    assert [config.rank_of(name) for name in ("model.layers.0.q_proj", "model.layers.0.k_proj")] == [2, 4]
    assert [config.scale_of(name, 2) for name in ("model.layers.0.q_proj", "model.layers.1.q_proj")] == [4.0, 3.0]
    assert replace(config, is_rank_scaled=True).scale_of("k_proj", 4) == 4.0


@pytest.mark.parametrize(("field", "value"), [("rank_pattern", {"q_proj": 2}), ("modules_to_save", ["lm_head"])])
def test_training_starts_with_no_folder_that_has_more(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PEFT, field: value}))
    with pytest.raises(UserError) as error:
        parse_training([*BASE, "--lora-from", str(tmp_path)])
    assert error.value.code == "source.adapter-kind"


def test_folder_of_some_layers_and_not_of_excluded_modules_trains_these(tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "exclude_modules": ["v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PEFT, **fields}))
    options = parse_training([*BASE, "--lora-from", str(tmp_path)])
    adapted = {fqn.partition(".lora")[0] for fqn in trained_params(options, SHAPE)}
    assert adapted == {"model.layers.1.self_attn.q_proj"}


def test_modules_that_a_config_does_not_name_are_left_to_peft_whichever_are_excluded() -> None:
    fields = {**PEFT, "target_modules": None, "exclude_modules": ["v_proj"]}
    assert parse_peft_config(json.dumps(fields).encode(), "here").target is None


def test_dropout_of_a_folder_is_refused_with_tensor_parallelism(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PEFT, "lora_dropout": 0.1}))
    flags = [*BASE, "--lora-from", str(tmp_path)]
    assert parse_training(flags).lora is not None
    with pytest.raises(UserError) as error:
        parse_training([*flags, "--tp", "2"])
    assert (error.value.where, error.value.code) == (f"--lora-from {tmp_path}", "options.conflict")


def test_frozen_weights_need_no_gradients_and_no_optimizer_state() -> None:
    table = schedule_table("1F1B", Placement(num_stages=1, num_ranks=1, style="loop"), 1)
    sizes = dict(adapter_sizes(SHAPE, "all-linear", 4, has_experts=False))
    run = Training(policy=POLICIES["mixed"], microbatch=1, seq_len=16, adapters=sizes, trains=lambda fqn: fqn in sizes)
    (memory,) = estimate_memory(SHAPE, [SHAPE.modules], table, run).ranks
    num_frozen, num_trained = SHAPE.num_params, sum(sizes.values())
    assert memory.weights == 2 * (num_frozen + num_trained)
    assert (memory.gradients, memory.optimizer) == (4 * num_trained, 12 * num_trained)


def test_dropout_of_adapters_is_planned() -> None:
    table = schedule_table("1F1B", Placement(num_stages=1, num_ranks=1, style="loop"), 1)
    activations = []
    for flags in ((), ("--lora-dropout", "0.1")):
        options = parse_training([*BASE, "--lora-rank", "4", "--lora-target", "down_proj", *flags, "--dtype", "bf16"])
        plan = planned_memory(SHAPE, [SHAPE.modules], table, options, ParallelDims(pipeline=1))
        activations.append(plan.ranks[0].activations)
    num_inputs = SHAPE.num_layers * SHAPE.tensors["model.layers.0.mlp.down_proj.weight"][1]
    assert activations[1] - activations[0] == 3 * options.batch.microbatch * options.batch.seq_len * num_inputs


@pytest.mark.parametrize(
    ("stored", "degrees", "host_memory", "nbytes"),
    [
        ("float32", ParallelDims(pipeline=1), "compact", 4),  # a copy in host memory
        ("float32", ParallelDims(pipeline=1), None, 0),  # which a GPU does not have
        ("bfloat16", ParallelDims(pipeline=1), "compact", 0),
        ("float32", ParallelDims(pipeline=1, shard=2), None, 1),  # half of 4 bytes instead of 2
    ],
)
def test_frozen_weights_are_planned_as_files_have_them(
    stored: str, degrees: ParallelDims, host_memory: HostMemory | None, nbytes: int
) -> None:
    table = schedule_table("1F1B", Placement(num_stages=1, num_ranks=1, style="loop"), 1)
    options = parse_training([*BASE, "--train-only", "lm_head", "--dtype", "bf16"])
    plan = partial(planned_memory, SHAPE, [SHAPE.modules], table, options, degrees, host_memory=host_memory)
    before, after = (plan(config=config).stages[0].optimizer for config in (None, {"dtype": stored}))
    assert after - before == nbytes * (SHAPE.num_params - SHAPE.count_params("lm_head.weight"))


@pytest.mark.usefixtures("two_ranks")
def test_frozen_parts_of_tensor_parallel_ranks_are_planned_as_files_have_them_on_their_device() -> None:
    table = schedule_table("1F1B", Placement(num_stages=1, num_ranks=1, style="loop"), 1)
    options, degrees = parse_training([*BASE, "--train-only", "norm"]), ParallelDims(pipeline=1, tensor=2)
    before, after = (
        planned_memory(SHAPE, [SHAPE.modules], table, options, degrees, config=config).stages[0].optimizer
        for config in (None, {"dtype": "bfloat16"})
    )
    matrix = torch.nn.Linear(4, 4, bias=False, device="meta").requires_grad_(False)
    matrix.weight = torch.nn.Parameter(
        distribute_tensor(matrix.weight, init_device_mesh("cpu", (2,)), [Shard(0)]), False
    )
    keep_as_stored(matrix, {"weight": torch.bfloat16})
    master = local_of(master_of(matrix.weight))
    assert (master.dtype, master.device, master.numel()) == (torch.bfloat16, matrix.weight.device, 8)
    matrices = (SHAPE.count_params(fqn) for fqn, dims in SHAPE.tensors.items() if len(dims) > 1)
    assert after - before == 2 * sum(matrices) // 2
