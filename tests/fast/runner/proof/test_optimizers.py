"""The self-check of runs with other optimizers than plain AdamW: right ones pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner.proof.proving import compare
from runner.proof.reference import Reference
from runner.tensors.local_shard import whole_pieces
from tests.fast.runner.proof.combinations import combination

pytestmark = pytest.mark.usefixtures("one_rank")
MASTERS = ("--dtype", "bf16", "--master-dtype", "fp32")
UNCLIPPED = '[[group]]\nalgorithm = "adamw"\nclip = false\n'


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (UNCLIPPED, ()),
        (f'{UNCLIPPED}patterns = ["*mlp*"]\n[[group]]\nalgorithm = "adamw"\n', ("--train-only", "mlp")),
    ],
    ids=["one group", "the trained group"],
)
def test_a_run_that_clips_nothing_passes(text: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(text)
    distances, problem = compare(combination("LlamaForCausalLM", 1, "--optimizer", str(file), *flags))
    assert problem is None
    assert distances is not None
    assert distances.norm == 0


# A bias of keys shifts all scores of a query, so that its gradient is 0 but for rounding: alone, and fused with others.
@pytest.mark.parametrize(
    ("architecture", "dtypes"),
    [("GPTNeoXForCausalLM", ()), ("OPTForCausalLM", MASTERS)],
)
def test_biases_of_keys_pass_with_adafactor(architecture: str, dtypes: tuple[str, ...]) -> None:
    assert compare(combination(architecture, 1, "--optimizer", "adafactor", *dtypes))[1] is None


@pytest.mark.parametrize(("factor", "dtypes"), [(1, ()), (2, ()), (2, MASTERS)])
def test_biases_of_keys_pass_with_steps_by_the_sign(factor: int, dtypes: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(f'[[group]]\nalgorithm = "tests.toy_optimizers.Signs"\nrate_factor = {factor}\n')
    assert compare(combination("OPTForCausalLM", 1, "--optimizer", str(file), *dtypes))[1] is None


def test_step_by_the_sign_of_a_gradient_that_rounding_may_change_may_be_the_opposite() -> None:
    rate, weight = 1e-2, torch.zeros(2, dtype=torch.float64)
    reference = Reference(
        weights={"weight": weight},
        gradients={"weight": torch.tensor([1.0, 1e-4])},
        stepped={"weight": weight - rate},
        loss=1.0,
        scales={"weight": 1.0},
        rounding={"weight": 0.0},
        norm=1.0,
        norm_rounding=0.0,
        evaluation=1.0,
        optim=combination("LlamaForCausalLM").options.optim,
        coarse=frozenset(),
        scale_free={"weight": 2 * rate},
        is_training=True,
    )
    (opposite,) = whole_pieces({"weight": torch.tensor([-rate, rate], dtype=torch.float64)})
    assert reference.weight_distance(opposite, 1e-3) == pytest.approx(0)
    assert reference.weight_distance(opposite, 1e-5) == pytest.approx(2)
