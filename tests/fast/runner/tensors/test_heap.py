"""Which memory policy a rank on the host takes, by what its node and control groups leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.tensors.heap import available_nbytes, choose_host_memory

GIB = 1 << 30


def node(root: Path, groups: str, **files: str) -> Path:
    """Write what the kernel tells: 64 GiB available on the node, and control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 134217728 kB\nMemAvailable: 67108864 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("planned", "available", "policy"),
    [(10 * GIB, 11 * GIB, "fast"), (10 * GIB, 11 * GIB - 1, "compact"), (1, None, "compact")],
)
def test_auto_is_fast_where_its_plan_fits_with_a_margin(planned: int, available: int | None, policy: str) -> None:
    assert choose_host_memory("auto", planned, available) == policy
    assert choose_host_memory("fast", planned, available) == "fast"
    assert choose_host_memory("compact", planned, available) == "compact"


def test_a_control_group_limits_all_below_it_and_its_page_cache_is_free(tmp_path: Path) -> None:
    root = node(
        tmp_path, "0::/job/step\n", job__memory_DOT_max=str(8 * GIB), job__memory_DOT_current=str(6 * GIB),
        job__memory_DOT_stat=f"anon 7\ninactive_file {GIB}\nactive_file {GIB}\n", job__step__memory_DOT_max="max\n",
        job__step__memory_DOT_current="1",
    )  # fmt: skip
    assert available_nbytes(2, root) == 2 * GIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    first = node(tmp_path / "2", "0::/\n", memory_DOT_max=str(4 * GIB), memory_DOT_current=str(5 * GIB))
    assert available_nbytes(1, first) == 0
    second = node(
        tmp_path / "1", "4:memory:/docker/abc\n3:cpu:/\n", memory__memory_DOT_limit_in_bytes=str(4 * GIB),
        memory__memory_DOT_usage_in_bytes=str(3 * GIB), memory__memory_DOT_stat=f"active_file 7\ninactive_file 7\n"
        f"total_inactive_file {GIB // 2}\ntotal_active_file {3 * GIB // 2}\n",
    )  # fmt: skip
    assert available_nbytes(1, second) == 3 * GIB
