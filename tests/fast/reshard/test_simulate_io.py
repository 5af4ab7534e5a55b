"""plan --simulate-io: requests to a store, in cases that can be computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.operations.simulate_io import Links, simulate_requests
from tests.builders import reshard
from tests.fast.reshard.configs import write_config

# 10 B/s a connection, no latency
LINKS: dict[str, Any] = {"latency_s": 0.0, "jitter": 0.0, "stream_rate": 10.0}
KIB = 1024


@pytest.mark.parametrize(
    ("nodes", "links", "expected"),
    [
        pytest.param([[90]], {}, [[9.0]], id="a connection"),
        pytest.param([[90]], {"latency_s": 1.0}, [[10.0]], id="a latency before it"),
        pytest.param([[10] * 4], {"num_streams": 2}, [[1.0, 1.0, 2.0, 2.0]], id="two at a time"),
        pytest.param(
            [[10] * 4], {"num_streams": 2, "latency_s": 1.0}, [[2.0, 2.0, 4.0, 4.0]], id="each with a latency"
        ),
        pytest.param([[10] * 4], {"link_rate": 20.0}, [[2.0] * 4], id="a link"),
        pytest.param([[10] * 4], {"disk_rate": 8.0, "link_rate": 20.0}, [[5.0] * 4], id="a disk"),
        pytest.param([[10, 30]], {"link_rate": 10.0}, [[2.0, 4.0]], id="a link that one leaves"),
        pytest.param([[10], [30]], {"store_rate": 10.0}, [[2.0], [4.0]], id="a store that one leaves"),
        pytest.param([[10], [10, 10]], {"store_rate": 15.0}, [[2.0], [2.0, 2.0]], id="a store, by requests"),
        pytest.param(
            [[10], [10, 10]], {"store_rate": 18.0, "link_rate": 8.0}, [[1.25], [2.5, 2.5]], id="more than links take"
        ),
        pytest.param(
            [[12], [12, 12]], {"store_rate": 14.0, "link_rate": 8.0}, [[2.0], [3.0, 3.0]], id="store, then link"
        ),
        pytest.param([[10], [10]], {}, [[1.0], [1.0]], id="nodes apart"),
        pytest.param([[], [10]], {"store_rate": 10.0}, [[], [1.0]], id="nothing to read"),
    ],
)
def test_requests_end_when_their_limits_say(
    nodes: list[list[int]], links: dict[str, float], expected: list[list[float]]
) -> None:
    found = simulate_requests([[KIB * each for each in node] for node in nodes], _links(links))
    assert [pytest.approx(node, abs=1e-2) for node in expected] == found


def test_requests_of_a_node_do_not_all_wait_at_the_same_time() -> None:
    links = Links(num_streams=200, latency_s=0.04, stream_rate=90e6, link_rate=6e9)
    ((*_, last_s),) = (sorted(each) for each in simulate_requests([[8 << 20] * 8000], links))
    assert 8000 * (8 << 20) / 6e9 < last_s < 1.05 * 8000 * (8 << 20) / 6e9


def _links(said: dict[str, float]) -> Links:
    """Return links whose rates are in KiB/s, so that rounding to bytes does not show."""
    rates = {**LINKS, **said}
    return Links(**{name: KIB * value if name.endswith("rate") else value for name, value in rates.items()})


def test_plan_says_when_stages_are_read_and_what_limits_that(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", vocab_size=64)
    plan = ("plan", config, "--layout", "pp=2")
    assert reshard(*plan, "--json").json["io"] is None
    slow = ("--simulate-io", "--stream-mb-s", 0.001, "--latency-ms", 1000, "--ranks-per-node", 1)
    found = reshard(*plan, *slow, "--json").json
    io, sizes = found["io"], [stage["nbytes"] for stage in found["stages"]]
    assert (io["num_nodes"], io["nbytes"], io["bottleneck"]) == (2, sum(sizes), "requests")
    assert io["ready_s"] == pytest.approx([0.5 + nbytes / 1e3 for nbytes in sizes])  # a stage is one request
    assert (io["total_s"], io["enough_streams"]) == (max(io["ready_s"]), 1)
    one = reshard(*plan, *slow, "--ranks-per-node", 2, "--streams", 1, "--json").json["io"]
    assert one["ready_s"] == pytest.approx([0.5 + sizes[0] / 1e3, 0.5 + 1.118 + sum(sizes) / 1e3], rel=1e-3)
    for limit, flags in {
        "link": ("--link-gbit", 0.001),
        "disk": ("--disk-gb-s", 0.001),
        "store": ("--store-gbit", 0.001),
    }.items():
        assert reshard(*plan, "--simulate-io", "--stream-mb-s", 1e6, *flags, "--json").json["io"]["bottleneck"] == limit
    said = reshard(*plan, *slow).out
    assert f"simulated: 2 nodes read {sum(sizes) / 1024:.2f} KiB" in said, said
