"""What torch or torchtitan would train wrong is refused with its reason and the nearest right choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import UsageError
from manifests.store import read_manifest
from runner.config.flags import parse_training
from runner.config.schema import BatchOptions
from runner.launch.combinations import REFUSED, Combination, check_combination, check_divides, combine, share_of
from runner.pipeline.timetable import choose_timetable
from tests.builders import reshard, write_model

ZERO_BUBBLE: dict[str, Any] = {"schedule": "ZBVZeroBubble", "splits_backward": True}
UNSPLIT = "a schedule with whole backwards on stages in a loop, such as 1F1B or Interleaved1F1B"
REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {**ZERO_BUBBLE, "recompute": "selective"},
        "--ac: selective recomputation does not work with ZBVZeroBubble, which goes through a backward in two parts\n"
        f"hint: take --ac full, or {UNSPLIT}",
    ),
    (
        {**ZERO_BUBBLE, "is_compiled": True},
        "--compile: a compiled layer has one backward, and ZBVZeroBubble cuts it in two: gradients come out wrong\n"
        f"hint: leave --compile out, or take {UNSPLIT}",
    ),
    (
        {"num_tensor": 2, "architecture": "MixtralForCausalLM"},
        "--tp: there is no way to cut MixtralForCausalLM over tensor-parallel ranks that is known to train right\n"
        "hint: leave --tp out, or share memory with --dp-shard; it is known for DeepseekV3ForCausalLM, "
        "GptOssForCausalLM, LlamaForCausalLM, MistralForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM",
    ),
    (
        {"num_tensor": 2, "has_loss_chunks": True},
        "--loss-chunk: a head that is cut over tensor-parallel ranks gives its logits whole, not a few tokens at a "
        "time\nhint: leave --loss-chunk out",
    ),
    (
        {"num_tensor": 2, "is_compiled": True},
        "--compile: compiled layers are not known to train right where tensor-parallel ranks share them\n"
        "hint: leave --compile out, or --tp",
    ),
    (
        {"num_mtp_layers": 1},
        "manifest: layers for multi-token prediction (MTP) cannot be trained: torchtitan has no pipeline for them\n"
        "hint: pack again without them: num_nextn_predict_layers 0 in config.json, and --drop for each of their "
        "tensors",
    ),
]


@pytest.mark.parametrize(("found", "message"), REFUSALS)
def test_combination_that_trains_wrong_is_refused(found: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_combination(Combination(**found))
    assert str(error.value) == message


def test_every_rule_is_tested() -> None:
    applied = [[rule.applies(Combination(**found)) for rule in REFUSED] for found, _ in REFUSALS]
    assert [row.index(True) for row in applied] == list(range(len(REFUSED)))
    assert all(sum(row) == 1 for row in applied)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"is_compiled": True, "recompute": "selective"},
        {**ZERO_BUBBLE, "recompute": "full"},
        {**ZERO_BUBBLE, "recompute": 2},
        {"num_tensor": 2},
    ],
)
def test_combination_that_is_known_to_be_right_passes(found: dict[str, Any]) -> None:
    check_combination(Combination(**found))


def test_all_refusals_are_said_at_once() -> None:
    with pytest.raises(UsageError) as error:
        check_combination(Combination(**ZERO_BUBBLE, is_compiled=True, recompute="selective"))
    assert str(error.value) == (
        "--ac: selective recomputation does not work with ZBVZeroBubble, which goes through a backward in two parts\n"
        "--compile: a compiled layer has one backward, and ZBVZeroBubble cuts it in two: gradients come out wrong "
        f"(leave --compile out, or take {UNSPLIT})\n"
        f"hint: take --ac full, or {UNSPLIT}"
    )


def test_pipelines_side_by_side_share_a_batch_evenly() -> None:
    batch = BatchOptions(global_batch=24, microbatch=2, seq_len=8)
    assert share_of(batch, 3) == BatchOptions(global_batch=8, microbatch=2, seq_len=8)
    for num_replicas, message in (
        (5, "expected a multiple of 10, --microbatch 2 times 5 pipelines side by side, found 24\nhint: take 20 or 30"),
        (16, "expected a multiple of 32, --microbatch 2 times 16 pipelines side by side, found 24\nhint: take 32"),
    ):
        with pytest.raises(UsageError) as error:
            share_of(batch, num_replicas)
        assert str(error.value) == f"--global-batch: {message}"


def test_combination_is_read_from_manifest_options_and_timetable(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    packed = reshard("pack", tmp_path / "model", "--layout", "pp=2,vpp=2,style=v", "--out", tmp_path / "packed")
    assert packed.code == 0, packed.err
    manifest = read_manifest(tmp_path / "packed")
    options = parse_training(["--data", "synthetic", "--ac", "selective", "--compile", "--global-batch", "4"])
    found = combine(manifest, options, choose_timetable(options.schedule, manifest, options.batch.num_microbatches))
    assert found == Combination(schedule="ZBVZeroBubble", splits_backward=True, recompute="selective", is_compiled=True)
    # Layers numbered after the model's are for multi-token prediction.
    last = replace(manifest.stages[-1], modules=(*manifest.stages[-1].modules, "model.layers.4", "model.layers.5"))
    longer = replace(manifest, stages=(*manifest.stages[:-1], last))
    assert combine(longer, options, choose_timetable(None, manifest, 4)).num_mtp_layers == 2


def test_ties_are_checked_every_so_many_steps_and_before_checkpoints() -> None:
    args = ["--data", "synthetic", "--steps", "10"]
    often = parse_training([*args, "--check-ties-every", "4"])
    assert [step for step in range(1, 11) if often.checks_ties_after(step)] == [4, 8]
    saving = parse_training([*args, "--checkpoint", "here", "--checkpoint-every", "3"])
    assert [step for step in range(1, 11) if saving.checks_ties_after(step)] == [3, 6, 9, 10]


def test_matrices_are_cut_into_whole_heads_and_words() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 96}
    check_divides(config, 2)
    check_divides({**config, "vocab_size": 97}, 1)
    with pytest.raises(UsageError) as error:
        check_divides(config, 4)
    assert str(error.value) == "--tp: expected a divisor of 2 (num_key_value_heads of config.json), found 4"
