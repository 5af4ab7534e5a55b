"""What both commands share: sizes of memory, which have one reading everywhere, and the environment of processes."""

from __future__ import annotations

import os
import re
import sys
from io import StringIO
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.command import defaults
from manifests.command.console import expand_home, print_error
from manifests.command.interpreter import leave_out_working_folder, module_command, safe_environment
from manifests.command.sizes import parse_size, read_size, write_size
from manifests.errors import UsageError
from manifests.placement import Placement, Style
from manifests.schedules.rules import SCHEDULES, check_schedule
from reshard.cli.plan import plan
from reshard.estimate.assumptions import Assumptions
from runner.config.flags import training_command


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        ("/a:/b", "/a:/b"),
        (":/a", "/a"),
        ("/a::/b:", "/a:/b"),
        (".:/a:src:../b", "/a"),
        ("", ""),
        (":", ""),
    ],
)
def test_pythonpath_has_only_absolute_entries(given: str, safe: str) -> None:
    assert safe_environment({"PYTHONPATH": given, "A": "b"}) == {"PYTHONPATH": safe, "A": "b", "PYTHONSAFEPATH": "1"}


def test_modules_are_run_without_the_working_folder() -> None:
    assert list(module_command("a.b", "c", python="python3")) == ["python3", "-P", "-m", "a.b", "c"]


def test_relative_entries_leave_the_path_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for relative in ("", ".", "src"):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((relative, "/modules")))
        monkeypatch.setattr(sys, "path", [str((tmp_path / relative).resolve()), "/modules", "/lib"])
        leave_out_working_folder()
        assert sys.path == ["/modules", "/lib"]


@pytest.mark.parametrize("word", ["--out=~/x", "~/x", "~", "--data=~/texts/*.txt"])
def test_home_is_expanded_where_shells_do_not(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home(word) == word.replace("~", str(tmp_path))


@pytest.mark.parametrize("text", ["80GB", "80GiB", "80G", "80 GB", "80gib", "80g", "0.078125TB", str(80 << 30)])
def test_memory_of_an_80_gb_card_is_one_number_however_it_is_written(text: str) -> None:
    assert parse_size(text) == 80 << 30


@pytest.mark.parametrize("text", ["80", "1048575", "79.5", "0", "0GB", "-1GB", "1e9", "80iB", "GB", "", "80 apples"])
def test_number_that_has_no_unit_or_is_no_size_is_refused(text: str) -> None:
    assert parse_size(text) is None
    with pytest.raises(UsageError) as error:
        read_size("--gpu-memory", text)
    assert (error.value.code, error.value.where) == ("options.memory-size", "--gpu-memory")


@pytest.mark.parametrize(
    ("text", "sizes"), [("80", [80 << 30]), ("1500", [1500 << 20, 1500]), ("500000", [500_000 << 20, 500_000])]
)
def test_units_that_a_number_without_one_may_have_are_suggested(text: str, sizes: list[int]) -> None:
    with pytest.raises(UsageError) as error:
        read_size("--max-shard-size", text)
    assert [parse_size(word.rstrip(",")) for word in error.value.hint.split() if word[0].isdigit()] == sizes


@given(st.integers(1, 1 << 20), st.sampled_from([1, 1 << 10, 1 << 20, 1 << 30, 1 << 40]))
def test_size_that_is_written_is_read_back(number: int, unit: int) -> None:
    assert parse_size(write_size(number * unit)) == number * unit


@pytest.mark.parametrize(
    ("is_terminal", "variables", "is_colored"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_errors_have_color_on_a_terminal_unless_it_is_unwanted(
    is_terminal: bool, variables: dict[str, str], is_colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = print_error(UsageError("--lr", "is wrong", "fix it", code="usage.arguments"), is_json=False)
    assert code == UsageError.exit_code
    assert ("\x1b[" in stream.getvalue()) == is_colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert plain == "error: --lr: is wrong [usage.arguments]\nhint: fix it\n"


# Tests of the defaults that `reshard plan` and training share.


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
