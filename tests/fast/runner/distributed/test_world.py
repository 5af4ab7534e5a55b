"""The address at which other nodes reach a rank."""

from __future__ import annotations

import pytest

from runner.distributed.world import World, check_reachable
from tests.refusals import refused

SECOND = World(rank=2, local_rank=0, size=4, local_size=2)
ELSEWHERE = {"MASTER_ADDR": "192.0.2.1"}  # of no machine: RFC 5737


@pytest.mark.parametrize("host", ["127.0.1.1", "localhost", "::1", "a" * 64])
def test_node_whose_name_leads_to_loopback_is_refused_before_others_wait_for_it(host: str) -> None:
    assert refused(lambda: check_reachable(SECOND, host, ELSEWHERE)) == ("launch.unreachable-node", host)


def test_node_that_others_reach_is_accepted() -> None:
    check_reachable(SECOND, "0.0.0.0", ELSEWHERE)
    check_reachable(SECOND, "localhost", {**ELSEWHERE, "GLOO_SOCKET_IFNAME": "lo"})
    check_reachable(SECOND, "localhost", {"MASTER_ADDR": "localhost"})  # all on one machine
    check_reachable(World(rank=0, local_rank=0, size=2, local_size=2), "localhost", ELSEWHERE)


@pytest.mark.parametrize("world", [SECOND, World(rank=0, local_rank=0, size=1)])
def test_network_interface_that_this_machine_does_not_have_is_refused(world: World) -> None:
    """gloo would fail on it, and that looks like a lost rank, for which a job is restarted."""
    named = {**ELSEWHERE, "GLOO_SOCKET_IFNAME": "lo,none0"}
    assert refused(lambda: check_reachable(world, "here", named)) == ("launch.unreachable-node", "here")
