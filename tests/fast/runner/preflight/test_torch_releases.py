"""Releases of torch: which are refused, which are noted, and what their pipeline runtimes are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from manifests.errors import InputError
from manifests.placement import Placement
from manifests.schedules.lowering import lower
from manifests.schedules.rules import SCHEDULES
from manifests.schedules.tables import schedule_table
from runner.launch.agent import agent
from runner.launch.here import launch_here
from runner.pipeline.torch_runtime import ADAPTER, ADAPTERS
from runner.preflight.preflight import LEAST, TESTED, check_torch

_OLD, _NEW = ADAPTERS


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_send_is_waited_for_at_once_where_torch_tracks_sends_and_nothing_else_differs(schedule: str) -> None:
    is_v = schedule in ("ZBVZeroBubble", "DualPipeV")
    num_stages = 2 if schedule in ("GPipe", "1F1B") else 4
    placement = Placement(num_stages=num_stages, num_ranks=2, style="v" if is_v else "loop")
    for steps in lower(schedule_table(schedule, placement, 4)).ranks:
        plain, waits = list(_OLD.actions(steps)), list(_NEW.actions(steps))
        assert plain == list(map(str, steps))
        assert [action for action in waits if "WAIT" not in action] == plain
        sends = [action for action in plain if "SEND" in action]
        assert sends
        assert [waits[waits.index(send) + 1] for send in sends] == [send.replace("SEND", "WAIT_SEND") for send in sends]
        for action in ADAPTER.actions(steps):  # of this torch, which reads it
            assert isinstance(_Action.from_str(action).computation_type, _ComputationType)


@pytest.mark.parametrize("found", ["2.12.1", "2.9.0+cu128", "1.13.1"])
def test_older_torch_is_refused(found: str) -> None:
    with pytest.raises(InputError) as error:
        check_torch(found)
    assert (error.value.code, error.value.where) == ("system.wrong-version", f"torch {found}")


@pytest.mark.parametrize("found", ["2.16.0", "2.16.0a0+git0123abc", "3.0.0"])
def test_newer_torch_is_noted_with_what_was_tested(found: str) -> None:
    note = check_torch(found)
    assert found in note
    assert all(release in note for release in TESTED)


def test_tested_releases_begin_with_the_least() -> None:
    assert TESTED[0].startswith(".".join(map(str, LEAST)))


def test_launcher_and_agent_refuse_the_installed_torch_if_it_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "torch-2.12.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        launch_here(["manifest.json"], nproc_per_node=1, dry_run=True)
    assert error.value.code == "system.wrong-version"
    monkeypatch.setattr(sys, "argv", ["agent", "-m", "runner.train", "manifest.json", "--data", "synthetic"])
    assert agent._run(tmp_path) == InputError.exit_code
    assert "torch 2.12.1" in capsys.readouterr().err
