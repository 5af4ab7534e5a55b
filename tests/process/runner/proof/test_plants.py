"""Mistakes planted in the code that a run is made of: the proof of a combination that they are wrong in finds each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(400)

MOST_CASES = 12  # of a launch: threads of gloo stay
DOCUMENTS = 1e-12  # how much gradients of packed documents may differ from the sum over each by itself


def case(
    plant: str, architecture: str, pp: int, flags: str = "", *, names: bool = False, **more: Any
) -> dict[str, Any]:
    described = {"plant": plant, "architecture": architecture, "pp": pp, "flags": flags, "names": names,
                 "schedule": None, "vpp": 1, "changes": {}}  # fmt: skip
    return {**described, **more}


EXPERTS, DEEPSEEK, TIED = "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", {"tie_word_embeddings": True}
AUX_LOSS, BIAS_RATE = "--router-aux-loss 0.001", "--router-bias-rate 0.001"
ADAFACTOR = "--optimizer adafactor --dtype bf16 --master-dtype fp32"
MUON = "--optimizer muon --dtype bf16 --master-dtype fp32"
# On two ranks: a mistake of each kind of parallelism; those of `MORE` are slow.
TWO = (
    case("norm_by_the_dense_rule", EXPERTS, 1, "--dp-shard 2 --ep 2"),
    case("position_ids_on_stage_0_only", "LlamaForCausalLM", 2, "--document-mask"),
    case("labels_shifted_after_the_cut", "LlamaForCausalLM", 1, "--cp 2"),
    case("tied_weight_summed_twice", "LlamaForCausalLM", 2, changes=TIED),
    case("heads_norms_not_summed", "Qwen3ForCausalLM", 1, "--tp 2"),
    case("muon_steps_shards_of_a_matrix", "LlamaForCausalLM", 1, f"--dp-shard 2 {MUON}"),
)
MORE = (
    case("last_microbatch_only", "LlamaForCausalLM", 2),
    case("mask_name_without_mask_function", "MistralForCausalLM", 1, "--cp 2"),
    case("norm_of_one_stage", "LlamaForCausalLM", 2),
    case("muon_leaves_a_matrix", "LlamaForCausalLM", 1, f"--dp-shard 2 {MUON}"),
    case("rows_without_gradient_are_halved", "LlamaForCausalLM", 1, f"--dp-shard 2 {ADAFACTOR}"),
    case("experts_averaged", EXPERTS, 1, "--dp-shard 2 --ep 2"),
    case("dynamic_rope_in_parts", "Olmo3ForCausalLM", 1, "--cp 2"),
    case("one_ranks_rows_twice", "LlamaForCausalLM", 1),
    case("mean_of_microbatches", "LlamaForCausalLM", 2),
    case("gradients_averaged_over_replicas", "LlamaForCausalLM", 1, "--dp-replicate 2"),
    case("replicas_not_reduced", "LlamaForCausalLM", 1, "--dp-replicate 2"),
    case("gradients_scaled_by_microbatches", "LlamaForCausalLM", 2),
    case("documents_see_each_other", "GptOssForCausalLM", 1, "--document-mask"),
    case("positions_of_the_part", "LlamaForCausalLM", 1, "--cp 2"),
    case("keys_not_summed_over_parts", "LlamaForCausalLM", 1, "--cp 2"),
    case("one_ranks_part_twice", "LlamaForCausalLM", 1, "--cp 2"),
    case("tied_weights_not_summed", "LlamaForCausalLM", 2, changes=TIED),
    case("tied_weight_counted_twice_in_the_norm", "LlamaForCausalLM", 2, changes=TIED),
    case("norm_of_one_shard", "LlamaForCausalLM", 1, "--dp-shard 2"),
    case("no_clipping", "LlamaForCausalLM", 2),
    case("clipped_twice", "LlamaForCausalLM", 2),
    case("clipped_by_the_stages_own_norm", "LlamaForCausalLM", 2),
    case("masters_not_rounded", "LlamaForCausalLM", 2, "--dtype bf16 --master-dtype fp32"),
    case("decays_nothing", "LlamaForCausalLM", 2),
    case("first_moment_kept_from_before", "LlamaForCausalLM", 2),
    case("recomputed_from_another_input", "LlamaForCausalLM", 2, "--ac full"),
    case("a_chunk_of_the_loss_is_lost", "LlamaForCausalLM", 2, "--loss-chunk 5"),
    case("stages_swapped", "LlamaForCausalLM", 2, vpp=2),
    case("gradient_of_the_first_stage_lost", "LlamaForCausalLM", 2),
    case("attention_without_the_mask_of_the_interface", "Olmo3ForCausalLM", 1, "--cp 2"),
    case("replicas_of_tied_weights_drift", "LlamaForCausalLM", 1, "--dp-shard 2", changes=TIED),
    case("copies_saved_instead_of_masters", "LlamaForCausalLM", 2, "--dtype bf16 --master-dtype fp32"),
    case("slices_swapped_in_a_checkpoint", "LlamaForCausalLM", 1, "--dp-shard 2"),
    case("auxiliary_loss_of_each_rank_in_full", EXPERTS, 1, f"--dp-shard 2 --ep 2 {AUX_LOSS}"),
    case("tokens_of_one_rank_counted", DEEPSEEK, 1, f"--dp-shard 2 --ep 2 {BIAS_RATE}"),
    case("biases_moved_on_one_rank", DEEPSEEK, 1, f"--dp-shard 2 --ep 2 {BIAS_RATE}"),
    case("padding_is_a_document", EXPERTS, 1, f"--document-mask {AUX_LOSS}"),
)
# Without a mistake, and what is refused by name; all but the first three, and one, are slow.
RIGHT = (
    case("", "GptOssForCausalLM", 1, f"--cp 2 --document-mask {AUX_LOSS}"),
    case("", DEEPSEEK, 1, f"--dp-shard 2 --ep 2 --document-mask {BIAS_RATE}"),
    case("", "LlamaForCausalLM", 2, "--dtype bf16 --master-dtype fp32", schedule="ZBVZeroBubble"),
    case("", EXPERTS, 1, f"--dp-shard 2 --ep 2 --ac full {AUX_LOSS}"),
    case("", "LlamaForCausalLM", 2, "--document-mask --loss-chunk 5", changes=TIED),
    case("", "LlamaForCausalLM", 1, f"--dp-shard 2 {MUON}"),
    case("", "Cohere2ForCausalLM", 1, "--dp-shard 2"),
    case("", "Gemma4ForCausalLM", 1, "--dp-replicate 2"),
    case("", "AfmoeForCausalLM", 1, "--cp 2"),
)
REFUSED = tuple(
    case("", name, 1, "--cp 2", names=True)
    for name in ("Lfm2ForCausalLM", "Llama4ForCausalLM", "GPTJForCausalLM", "InklingForCausalLM", "DogeForCausalLM")
)
# Tensor-parallel ranks would draw the same random numbers for different heads.
DROPOUT = case("", "LlamaForCausalLM", 1, "--tp 2", names=True, changes={"attention_dropout": 0.5})


def prove_all(out: Path, cases: Sequence[dict[str, Any]], num_ranks: int = 2) -> list[dict[str, Any]]:
    assert len(cases) <= MOST_CASES
    (out / "cases.json").write_text(json.dumps(cases))
    launch(num_ranks, "runner/proof/proof_worker.py", out / "cases.json", out / "out.json", timeout_s=300)
    results: list[dict[str, Any]] = json.loads((out / "out.json").read_text())
    return results


@pytest.mark.parametrize(
    "cases",
    [
        TWO,
        *(pytest.param(MORE[at : at + MOST_CASES], marks=pytest.mark.slow) for at in range(0, len(MORE), MOST_CASES)),
    ],
)
def test_every_planted_mistake_is_found(cases: Sequence[dict[str, Any]], tmp_path: Path) -> None:
    results = prove_all(tmp_path, cases)
    for planted, result in zip(cases, results, strict=True):
        print(f"{planted['plant']:40}", result["largest"])
        assert result["problem"], planted


@pytest.mark.parametrize(
    ("right", "refused"),
    [(RIGHT[:3], REFUSED[:1]), pytest.param(RIGHT[3:], REFUSED[1:], marks=pytest.mark.slow)],
)
def test_right_combinations_pass_and_others_are_refused_by_name(
    right: Sequence[dict[str, Any]], refused: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    *results, dropout = prove_all(tmp_path, (*right, *refused, DROPOUT))
    assert dropout == {"code": "model.self-check-failed", "where": "--tp"}
    for passed, result in zip(right, results, strict=False):
        assert not result["problem"], (passed, result)
        assert "--document-mask" not in passed["flags"] or result["largest"]["gradient"] <= DOCUMENTS
    for result in results[len(right) :]:
        assert result == {"code": "model.no-context-parallelism", "where": "--cp 2"}


@pytest.mark.slow
def test_packed_documents_in_stages_and_parts_are_the_sum_over_each_by_itself(tmp_path: Path) -> None:
    cases = [case("", name, 2, "--cp 2 --document-mask", **more)
             for name in ("LlamaForCausalLM", "MistralForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM", DEEPSEEK)
             for more in ({}, {"schedule": "ZBVZeroBubble"})]  # fmt: skip
    for tried, result in zip(cases, prove_all(tmp_path, cases, num_ranks=4), strict=True):
        assert max(result["largest"][name] for name in ("loss", "gradient")) <= DOCUMENTS, (tried, result)


def test_a_stage_that_fails_ends_the_proof_on_all_ranks_at_once(tmp_path: Path) -> None:
    """With --tp, whose collectives torch keeps meshes of, and with FSDP: stage 0 waits for stage 1, on other ranks."""
    plant = "backward_fails_on_the_last_stage"
    failing = [case(plant, "LlamaForCausalLM", 2, "--tp 2", names=True),
               case(plant, EXPERTS, 2, "--dp-shard 2 --ep 2", names=True)]  # fmt: skip
    for result in prove_all(tmp_path, failing, num_ranks=4):
        assert result == {"code": "model.self-check-failed", "where": "config.json"}
