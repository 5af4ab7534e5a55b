"""Numbers of any size, on the command line and in layouts: refused by a code and a place, before anything is made."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from reshard.cli.command import cli as reshard_cli
from reshard.layouts.degrees import MOST_COUNT
from runner.commands import cli as runner_cli
from runner.config.flags import training_command
from tests.builders import reshard

pytestmark = pytest.mark.timeout(30)  # none hangs

BILLION, HUGE = 10**9, 10**400


@pytest.mark.parametrize(
    "spec",
    [
        f"pp=2,first={MOST_COUNT + 1},layers-per-stage=3",
        f"pp=2,last={BILLION - 1},layers-per-stage=3",
        f"pp={BILLION - 1}",
        f"pp=2,vpp={BILLION}",
        f"balance:params,pp={BILLION - 1}",
        f"E|t*{BILLION}|L",
    ],
)
def test_number_in_a_layout_beyond_its_bound_is_refused(spec: str) -> None:
    ended = reshard("layout", spec, "--layers", "4", "--json")
    assert (ended.code, ended.json["error"]["where"]) == (2, "layout")


def _integers(command: click.Command, name: str) -> Iterator[tuple[str, click.Parameter]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for verb in command.list_commands(context):
            found = command.get_command(context, verb)
            assert found is not None
            yield from _integers(found, f"{name} {verb}")
    for param in command.params:
        if isinstance(param.type, click.types.IntParamType):
            yield f"{name} {param.opts[0]}", param


@pytest.mark.parametrize("command", [reshard_cli, runner_cli, training_command], ids=["reshard", "runner", "training"])
def test_every_whole_number_of_the_commands_has_an_upper_bound(command: click.Command) -> None:
    integers = dict(_integers(command, ""))
    assert integers
    for param in integers.values():
        with pytest.raises(click.BadParameter):
            param.type.convert(str(HUGE), param, None)
