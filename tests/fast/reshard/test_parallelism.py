"""Threads follow the cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard.copy.parallelism import Parallelism, usable_cores


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(48)))
    (tmp_path / "cgroup").write_text("0::/pod/container\n")
    (tmp_path / "pod" / "container").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("pod", "container", "cores"),
    [("max 100000", "max 100000", 48), ("800000 100000", "max 100000", 8), ("max 100000", "250000 100000", 2),
     ("", "50000 100000", 1), ("nonsense", "", 48)],
)  # fmt: skip
def test_quota_of_any_enclosing_cgroup_counts(cgroups: Path, pod: str, container: str, cores: int) -> None:
    for folder, text in ((cgroups / "pod", pod), (cgroups / "pod" / "container", container)):
        if text:
            (folder / "cpu.max").write_text(text + "\n")
    assert usable_cores(cgroups, cgroups / "cgroup") == cores


def test_quota_of_version_1(cgroups: Path) -> None:
    (cgroups / "cgroup").write_text("12:memory:/x\n4:cpu,cpuacct:/pod\n")
    folder = cgroups / "cpu,cpuacct" / "pod"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("400000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(cgroups, cgroups / "cgroup") == 4


def test_without_cgroups_affinity_counts(cgroups: Path) -> None:
    assert usable_cores(cgroups, cgroups / "absent") == 48


def test_number_of_threads_is_kept_and_never_above_the_work() -> None:
    asked = Parallelism(num_threads=5)
    assert [asked.threads_for(count) for count in (0, 3, 100)] == [1, 3, 5]
    assert asked.used.num_threads == 5
