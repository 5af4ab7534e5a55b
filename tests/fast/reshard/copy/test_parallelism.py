"""Threads follow the cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard.copy.parallelism import Parallelism
from stores.objects.uplink import part_nbytes
from stores.workers import threads_for_ranks, usable_cores


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


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 32), (4, 12), (48, 2)])
def test_ranks_of_a_node_share_its_cores(num_ranks: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stores.workers.usable_cores", lambda: 48)
    assert threads_for_ranks(num_ranks) == num_threads


def test_without_cgroups_affinity_counts(cgroups: Path) -> None:
    assert usable_cores(cgroups, cgroups / "absent") == 48


@pytest.mark.parametrize(
    ("sizes", "asked", "memory_mib", "expected"),
    [
        pytest.param([5 << 30] * 4, None, 640, (4, 16), id="large shards"),
        pytest.param([10 << 20] * 4000, None, 640, (25, 2), id="small shards"),
        pytest.param([5 << 30], None, 640, (1, 64), id="one shard"),
        pytest.param([200 << 30] * 8, None, 640, (6, 4), id="parts of 21 MiB"),
        pytest.param([5 << 30] * 4, 8, 640, (2, 4), id="--streams 8"),
        pytest.param([5 << 30] * 4, None, 80, (2, 4), id="little memory"),
        pytest.param([5 << 30] * 4, None, 4, (1, 1), id="least memory"),
        pytest.param([198_000_000, 138_000_000, 138_000_000, 175_000_000], None, 640, (4, 19), id="two rounds"),
        pytest.param([], None, 640, (1, 1), id="nothing"),
    ],
)
def test_uploads_fill_the_streams_and_the_memory(
    sizes: list[int], asked: int | None, memory_mib: int, expected: tuple[int, int]
) -> None:
    parallelism = Parallelism(num_streams=asked, memory_nbytes=memory_mib << 20)
    found = parallelism.uploads_of(sizes)
    assert (found.num_objects, found.num_parts(max(sizes, default=0))) == expected
    num_parts = sum(map(found.num_parts, sorted(sizes)[-found.num_objects :]))
    assert parallelism.used.num_streams == num_parts <= (asked or 102)
    kept_nbytes = (num_parts + found.num_objects) * part_nbytes(max(sizes, default=0))
    assert kept_nbytes <= max(memory_mib << 20, 2 * part_nbytes(max(sizes, default=0)))


@pytest.mark.parametrize(
    ("sizes_mib", "asked", "expected"),
    [
        pytest.param([95] * 8, None, (4, 19), id="as many as fit"),
        pytest.param([95] * 3, None, (3, 19), id="all of them"),
        pytest.param([10] * 4000, None, (40, 2), id="small shards"),
        pytest.param([300, 101, 1], None, (1, 60), id="one at a time"),
        pytest.param([401], None, None, id="too long"),
        pytest.param([95] * 8, 2, (2, 1), id="--streams 2"),
    ],
)
def test_shards_are_kept_between_reading_and_sending_where_they_fit_into_memory(
    sizes_mib: list[int], asked: int | None, expected: tuple[int, int] | None
) -> None:
    parallelism = Parallelism(num_streams=asked, memory_nbytes=400 << 20)
    found = parallelism.uploads_of_kept([count << 20 for count in sizes_mib])
    assert (found and (found.num_objects, found.num_parts(max(sizes_mib) << 20))) == expected
