"""The self-check of runs with other optimizers than plain AdamW: right ones pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.proof.proving import compare
from tests.fast.runner.proof.combinations import combination

pytestmark = pytest.mark.usefixtures("one_rank")
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
    [("GPTNeoXForCausalLM", ()), ("OPTForCausalLM", ("--dtype", "bf16", "--master-dtype", "fp32"))],
)
def test_biases_of_keys_pass_with_adafactor(architecture: str, dtypes: tuple[str, ...]) -> None:
    assert compare(combination(architecture, 1, "--optimizer", "adafactor", *dtypes))[1] is None


@pytest.mark.parametrize("factor", [1, 2])
def test_biases_of_keys_pass_with_steps_by_the_sign(factor: int, tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(f'[[group]]\nalgorithm = "tests.toy_optimizers.Signs"\nrate_factor = {factor}\n')
    assert compare(combination("OPTForCausalLM", 1, "--optimizer", str(file)))[1] is None
