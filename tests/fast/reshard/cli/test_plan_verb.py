"""`reshard plan` as a command: flags that conflict, what it suggests, and one object with --json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import refusal, reshard
from tests.fast.reshard.configs import modules_of, write_config, write_times

TRUE = Path(__file__).parents[4] / "tests" / "data" / "configs"


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ("qwen2-0.5b pp=2 3GB", "pp=4,tp=2 fits"),  # 14 heads, 2 of keys
        ("opt-350m pp=2 1GB", "pp=16,ac=full fits"),  # which has no --tp
        ("llama-3.1-8b pp=32 1200MB --tp 8 --ac full --dtype bf16 --master-dtype fp32 --seq-len 128 --global-batch 2",
         "up to dp-shard=2"),
    ],
)  # fmt: skip
def test_change_that_a_launch_would_refuse_is_not_suggested(asked: str, changes: str) -> None:
    name, layout, limit, *flags = asked.split()
    shown = reshard("plan", TRUE / f"{name}.json", "--layout", layout, "--gpu-memory", limit, *flags).out
    assert changes in shown.splitlines()[2]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Return a file of times that says with which options they were measured."""
    times = write_times(tmp_path / "times.json", dict.fromkeys(modules_of(4), (0.1, 0.2)))
    document = {**json.loads(times.read_text()), "measured": {"seq_len": 4096, "microbatch": 1, "dtype": "fp32"}}
    times.write_text(json.dumps(document))
    return times


def test_times_of_a_file_conflict_with_those_of_a_run(measured: Path, tmp_path: Path) -> None:
    asked = ("plan", write_config(tmp_path / "config.json"), "--layout", "pp=2", "--cost", measured)
    assert refusal(*asked, "--from-run", tmp_path).found == (2, "options.conflict", "--cost")


def test_times_of_another_number_of_tokens_are_noted(measured: Path, tmp_path: Path) -> None:
    asked = ("plan", write_config(tmp_path / "config.json"), "--layout", "pp=2", "--cost", measured)
    assert "measured with --seq-len 4096," in reshard(*asked).err
    for flags in (("--seq-len", "4096"), ("--quiet",)):
        planned = reshard(*asked, *flags)
        assert (planned.code, planned.err) == (0, "")


def test_picture_that_cannot_be_drawn_is_one_object_with_json(tmp_path: Path) -> None:
    asked = ("plan", write_config(tmp_path / "config.json"), "--layout", "pp=2", "--microbatches", "300000")
    found = refusal(*asked, "--draw", tmp_path / "plan.svg").found
    assert found == (2, "options.too-many-microbatches", "--draw")


def test_white_space_before_the_colon_of_a_balanced_layout_changes_nothing(tmp_path: Path) -> None:
    asked = ("plan", write_config(tmp_path / "config.json"), "--gpu-memory", "300KB", "--layout")
    assert refusal(*asked, "balance:params,pp=2").found == refusal(*asked, "balance : params,pp=2").found
    assert reshard("plan", tmp_path / "config.json", "--layout", "balance :memory,pp=2").code == 0
