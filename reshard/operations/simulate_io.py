"""plan --simulate-io: when every stage is on its node, by simulating each request to the store (discrete events).

Every node reads its stages one after the other, in the requests of a pack, so many at a time. A request is answered
after a latency; then its connection, its node's link and disk, and the store limit its rate. Requests that share a
limit get equal parts of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from reshard.plans.pack_plan import PackPlan, StagePlan
from stores.prefetch import REQUEST_NBYTES, join_ranges
from stores.ranges import cut

__all__ = ["IoSimulation", "Links", "simulate_io", "simulate_requests"]

_MOST_STREAMS = 1024
_SLACK = 1.05  # of the time that the most streams take
_SAMPLE = 1 << 14  # requests from which that is found
_GOLDEN = (5**0.5 - 1) / 2
_ROUNDING_NBYTES = 1.0  # less than that is left of a request only by rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The store and the network to assume; rates in bytes per second, infinite where nothing limits them."""

    num_streams: int = 64  # requests of a node at a time
    latency_s: float = 0.04  # of a request, until its first byte; the mean
    jitter: float = 0.5  # of the latency, either way: without any, all requests of a node would wait at the same time
    stream_rate: float = 90e6  # of one connection, as S3 has it
    link_rate: float = math.inf  # of each node
    disk_rate: float = math.inf  # of each node
    store_rate: float = math.inf  # of all nodes together
    ranks_per_node: int = 8

    @property
    def node_rate(self) -> float:
        return min(self.link_rate, self.disk_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class IoSimulation:
    """When each stage is read, in seconds, and what limits the node that is last.

    `node_rate` is what that node reads in bytes per second; with `enough_streams`, it takes at most 5 % longer than
    with any number.
    """

    links: Links
    num_nodes: int
    nbytes: int
    ready_s: tuple[float, ...]
    node_rate: float
    bottleneck: str
    enough_streams: int

    @property
    def total_s(self) -> float:
        return max(self.ready_s, default=0.0)


def simulate_io(plan: PackPlan, links: Links) -> IoSimulation:
    """Simulate reading every stage of a plan onto the nodes of its ranks."""
    nodes: dict[int, list[StagePlan]] = {}
    for stage in plan.stages:
        nodes.setdefault(stage.rank // links.ranks_per_node, []).append(stage)
    requests = {stage.index: list(_requests_of(stage)) for stage in plan.stages}
    of_nodes = [[nbytes for stage in stages for nbytes in requests[stage.index]] for stages in nodes.values()]
    ready_s = [0.0] * len(plan.stages)
    finished = simulate_requests(of_nodes, links)
    for stages, times_s in zip(nodes.values(), finished, strict=True):
        bounds = accumulate((len(requests[stage.index]) for stage in stages), initial=0)
        for stage, (first, last) in zip(stages, pairwise(bounds), strict=True):
            ready_s[stage.index] = max(times_s[first:last], default=0.0)
    slowest = max(range(len(of_nodes)), key=lambda node: max(finished[node], default=0.0))
    last_s, own = max(finished[slowest], default=0.0), of_nodes[slowest]
    alone = replace(links, store_rate=math.inf, link_rate=min(links.link_rate, links.store_rate / len(of_nodes)))
    return IoSimulation(
        links=links,
        num_nodes=len(of_nodes),
        nbytes=sum(map(sum, of_nodes)),
        ready_s=tuple(ready_s),
        node_rate=sum(own) / last_s if last_s else 0.0,
        bottleneck=_bottleneck(own, links, len(of_nodes)),
        enough_streams=_enough_streams(own[:_SAMPLE], alone),
    )


def simulate_requests(nodes: Sequence[Sequence[int]], links: Links) -> list[list[float]]:
    """Return when each request of each node has its last byte; requests, in bytes, are sent in this order."""
    if math.isinf(links.store_rate):  # then nodes do not affect each other
        return [_simulate([_Node(requests, links)], links)[0] for requests in nodes]
    return _simulate([_Node(requests, links) for requests in nodes], links)


class _Node:
    """The requests of one node: waiting for an answer, or served at equal rates.

    `served` counts the bytes of a request that has been served since the start, so that the order in which requests end
    does not depend on the rate.
    """

    def __init__(self, requests: Sequence[int], links: Links) -> None:
        self.finished_s = [0.0] * len(requests)
        self._requests, self._links, self._next = requests, links, 0
        self._asked: list[tuple[float, int]] = []
        self._served = 0.0
        self._running: list[tuple[float, int]] = []
        self.rate = 0.0  # of each running request
        for _ in range(links.num_streams):
            self._ask(0.0)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def next_s(self, now_s: float) -> float:
        """Return the time of the next event."""
        answered_s = self._asked[0][0] if self._asked else math.inf
        if not self._running:
            return answered_s
        return min(answered_s, now_s + (self._running[0][0] - self._served) / self.rate)

    def advance(self, now_s: float, passed_s: float) -> None:
        """Serve for `passed_s`, until `now_s`, which is not after this node's next event."""
        self._served += self.rate * passed_s
        while self._running and self._running[0][0] - self._served < _ROUNDING_NBYTES:
            self.finished_s[heapq.heappop(self._running)[1]] = now_s
            self._ask(now_s)
        while self._asked and self._asked[0][0] <= now_s:
            number = heapq.heappop(self._asked)[1]
            heapq.heappush(self._running, (self._served + self._requests[number], number))

    def _ask(self, now_s: float) -> None:
        if self._next < len(self._requests):
            spread = 2 * (self._next * _GOLDEN % 1) - 1  # evenly over -1 to 1, in an order that repeats nothing
            latency_s = self._links.latency_s * (1 + self._links.jitter * spread)
            heapq.heappush(self._asked, (now_s + latency_s, self._next))
            self._next += 1


def _simulate(nodes: Sequence[_Node], links: Links) -> list[list[float]]:
    now_s = 0.0
    while True:
        for node, rate in zip(nodes, _rates([node.num_running for node in nodes], links), strict=True):
            node.rate = rate
        next_s = min(node.next_s(now_s) for node in nodes)
        if math.isinf(next_s):
            return [node.finished_s for node in nodes]
        for node in nodes:
            node.advance(next_s, next_s - now_s)
        now_s = next_s


def _rates(counts: Sequence[int], links: Links) -> list[float]:
    """Return the rate of each node's running requests: fair shares of the store, within the limits of the node."""
    own = [min(links.stream_rate, links.node_rate / count) if count else 0.0 for count in counts]
    left, num_left, level = links.store_rate, sum(counts), math.inf
    for rate, count in sorted(zip(own, counts, strict=True)):
        if count:
            level = left / num_left
            if rate > level:
                break
            left, num_left, level = left - rate * count, num_left - count, math.inf
    return [min(rate, level) for rate in own]


def _requests_of(stage: StagePlan) -> Iterator[int]:
    """Yield the bytes of each request that a pack sends for a stage."""
    for shard in stage.shards:
        for _, begin, end in join_ranges((each.file, each.begin, each.end) for each in shard.in_data_order):
            yield from (last - first for first, last in cut(begin, end, REQUEST_NBYTES))


def _bottleneck(requests: Sequence[int], links: Links, num_nodes: int) -> str:
    """Return which limit is the lowest for a node: its requests, its link, its disk or the store."""
    mean_nbytes = sum(requests) / max(1, len(requests))
    request_s = links.latency_s + mean_nbytes / links.stream_rate
    limits = {
        "requests": links.num_streams * mean_nbytes / request_s,
        "link": links.link_rate,
        "disk": links.disk_rate,
        "store": links.store_rate / num_nodes,
    }
    return min(limits, key=limits.__getitem__)


def _enough_streams(requests: Sequence[int], links: Links) -> int:
    """Return the smallest power of two of streams with which a node is about as fast as with any number."""

    def taken_s(num_streams: int) -> float:
        (finished,) = simulate_requests([requests], replace(links, num_streams=num_streams))
        return max(finished, default=0.0)

    least_s, number = taken_s(_MOST_STREAMS), 1
    while number < _MOST_STREAMS and taken_s(number) > _SLACK * least_s:
        number *= 2
    return number
