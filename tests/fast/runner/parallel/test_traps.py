"""Where parallelisms go wrong without an error, and the tests that would see it; refusals, and the tests of each."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.process.runner.proof import plants, test_plants

TESTS = Path(__file__).parents[3]
_COLLECTIVES = (
    "process/runner/parallel/test_expert_collectives.py::"
    "test_actions_run_the_collectives_of_their_layers_in_the_same_order_on_all_ranks_of_a_stage"
)
_TEN = "process/runner/parallel/test_matrix.py::test_ten_combinations_train_as_transformers_does"
_MATRIX = "process/runner/parallel/test_matrix.py::test_all_combinations_train_as_transformers_does"
_BY_NAME = "process/runner/proof/test_plants.py::test_right_combinations_pass_and_others_are_refused_by_name"
_DOCUMENTS = "fast/runner/pipeline/test_documents.py::test_architectures_keep_documents_apart_or_are_refused"
_ROPE = (
    "fast/runner/parallel/test_rows.py::test_rope_that_depends_on_the_largest_position_is_refused_beyond_its_context"
)
_RULES = "fast/runner/preflight/test_refusals.py::test_combination_that_trains_wrong_is_refused"

# By trap: the tests, or the mistakes that are planted in the proof, that hold it.
TRAPS: Mapping[str, tuple[str, ...]] = {
    "a split backward recomputes a layer in I, and in W once for every group of parameters": (
        _COLLECTIVES,
        "fast/runner/training/test_activation_checkpoint.py::test_layers_run_twice_for_a_microbatch_with_dropout_too",
    ),
    "a rank that no token is sent to leaves out collectives of the backward (all_reduce)": (_MATRIX,),  # one-expert
    "experts' implementation 'auto' is all_reduce, which GPT-OSS fails with": (_COLLECTIVES, _MATRIX),
    "the norm counts experts by the rule of dense parameters": (_TEN, "norm_by_the_dense_rule"),
    "a mesh caches offsets without the rank, and ranks read the experts of others": (_TEN, _MATRIX),
    "zig-zag positions look like packed documents, if the model gets no mask of ones": (_TEN,),
    "without a mask function of the same name, masks are None": ("mask_name_without_mask_function",),
    "frequencies of dynamic and longrope RoPE depend on the largest position of a rank": (
        _ROPE,
        "dynamic_rope_in_parts",
    ),
    "a layer is recomputed in another microbatch's time, with other documents": (_TEN, _MATRIX),
    "positions reach the first stage alone": ("position_ids_on_stage_0_only",),
    "GPT-OSS, Afmoe and BioGPT ignore positions where they make masks": ("documents_see_each_other", _DOCUMENTS),
    "labels are shifted after rows are split": ("labels_shifted_after_the_cut",),
    "gradients of keys are not summed over parts": ("keys_not_summed_over_parts",),
}
# By what is refused: before ranks start, or by the proof on them.
REFUSALS: Mapping[str, tuple[str, ...]] = {
    "--ep without experts": (_RULES,),
    "--ep that does not divide the experts": (
        "fast/runner/preflight/test_refusals.py::test_expert_parallel_ranks_have_as_many_experts_each",
    ),
    "--cp that does not divide rows, or heads of ulysses": (
        "fast/runner/preflight/test_refusals.py::"
        "test_rows_and_heads_that_do_not_divide_over_context_parallel_ranks_are_refused",
    ),
    "--cp with --compile": (_RULES,),
    "--cp and --document-mask of families that are not transformers'": (
        "fast/runner/parallel/test_rows.py::test_families_of_other_packages_are_refused",
        "fast/runner/pipeline/test_documents.py::test_families_of_other_packages_are_refused",
    ),
    "--cp and --document-mask with dynamic and longrope RoPE beyond its context": (
        _ROPE,
        "fast/runner/pipeline/test_documents.py::"
        "test_rope_that_depends_on_the_longest_document_is_refused_beyond_its_context",
    ),
    "--cp where tokens meet outside of attention": (_BY_NAME,),
    "--document-mask where tokens meet without a mask": (_DOCUMENTS,),
    "--router-aux-loss and --router-bias-rate of other routers": (
        "fast/runner/preflight/test_request.py::test_what_cannot_balance_experts_is_refused_by_architecture",
    ),
    "--tp with dropout": (_BY_NAME,),
}


@pytest.mark.parametrize("what", [*TRAPS, *REFUSALS])
def test_each_trap_and_refusal_has_a_test(what: str) -> None:
    for test in {**TRAPS, **REFUSALS}[what]:
        path, _, name = test.rpartition("::")
        if not path:
            assert name in plants.PLANTS
            assert name in {case["plant"] for case in (*test_plants.TWO, *test_plants.MORE)}
            continue
        functions = [node.name for node in ast.parse((TESTS / path).read_text()).body
                     if isinstance(node, ast.FunctionDef)]  # fmt: skip
        assert name in functions, test


def test_mistakes_are_planted_in_code_that_exists() -> None:
    for name in plants.PLANTS:
        with pytest.MonkeyPatch.context() as patch:
            plants.plant(name, patch)
