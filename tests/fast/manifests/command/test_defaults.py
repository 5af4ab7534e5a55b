"""Tests of the defaults that `reshard plan` and training share."""

from __future__ import annotations

import click
import pytest

from manifests.command import defaults
from manifests.errors import UsageError
from manifests.placement import Placement, Style
from manifests.schedules.rules import SCHEDULES, check_schedule
from reshard.cli.plan import plan
from reshard.estimate.assumptions import Assumptions
from runner.config.flags import training_command

# Training's number of ranks says the replicas, and a checkpoint the optimizer, which is adamw in a new run; a plan's
# batch grows with its stages, see the next test.
_DERIVED = {
    "--dp-replicate": ("1", "None"), "--optimizer": (defaults.OPTIMIZER, "None"),
    "--global-batch": ("None", str(defaults.GLOBAL_BATCH)),
}  # fmt: skip


def _defaults_of(command: click.Command, args: list[str]) -> dict[str, str]:
    values = command.make_context("", args).params
    return {flag: str(values[str(param.name)]) for param in command.params for flag in param.opts}


def test_plan_and_training_have_the_same_default_for_every_flag_of_a_step_that_both_have() -> None:
    of_plan = _defaults_of(plan, ["SOURCE"])
    of_training = _defaults_of(training_command, ["--data", "synthetic"])
    shared = {"--global-batch", "--microbatch", "--seq-len", "--dtype", "--master-dtype", "--optimizer", "--schedule"}
    shared |= {
        "--ac",
        "--ema",
        "--loss-chunk",
        "--dp-replicate",
        "--dp-shard",
        "--tp",
        "--cp",
        "--cp-method",
        "--ep",
        "--microbatch-group",
    }
    # Neither is of the step: what a plan overwrites, and what it prints.
    assert of_plan.keys() & of_training.keys() == shared | {"--force", "--quiet", "--allocator"}
    differing = {flag: (of_plan[flag], of_training[flag]) for flag in shared if of_plan[flag] != of_training[flag]}
    assert differing == _DERIVED


@pytest.mark.parametrize("style", ["loop", "v"])
def test_default_microbatches_are_those_of_training_or_suit_every_schedule_of_more_stages(style: Style) -> None:
    for num_ranks in range(1, 20):
        for num_virtual in (2,) if style == "v" else (1, 2, 3):
            placement = Placement(num_ranks=num_ranks, num_stages=num_ranks * num_virtual, style=style)
            number = Assumptions().microbatches_for(placement)
            assert number == max(defaults.GLOBAL_BATCH, placement.num_stages)
            codes = {_code(schedule, placement, number) for schedule in SCHEDULES}
            assert codes == {None, "schedule.other-placement"}


def _code(schedule: str, placement: Placement, num_microbatches: int) -> str | None:
    try:
        check_schedule(schedule, placement, num_microbatches)
    except UsageError as error:
        return error.code
    return None
