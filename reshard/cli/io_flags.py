"""The flags of --simulate-io."""

from __future__ import annotations

import functools
import math
from typing import Any

import click

from reshard.cli.options import Command, WholeNumber, with_flags

__all__ = ["io_flags"]

_GBIT = 1e9 / 8  # bytes
_RATE = click.FloatRange(min=1e-3, max=1e9)
_IO = (
    click.option("--simulate-io", is_flag=True, help="Also simulate reading the stages from a remote store."),
    click.option(
        "--streams", "num_streams", type=WholeNumber(min=1, most=1024), default=64, metavar="N",
        help="Simulated: concurrent requests of each node.",
    ),
    click.option(
        "--latency-ms", type=_RATE, default=40.0, metavar="MS", help="Simulated: time until a request is answered.",
    ),
    click.option("--stream-mb-s", type=_RATE, default=90.0, metavar="MB", help="Simulated: MB/s of one connection."),
    click.option(
        "--link-gbit", type=_RATE, default=100.0, metavar="GBIT", help="Simulated: Gb/s of each node's link.",
    ),
    click.option(
        "--disk-gb-s", type=_RATE, metavar="GB", show_default="no limit",
        help="Simulated: GB/s that each node's disk writes.",
    ),
    click.option(
        "--store-gbit", type=_RATE, metavar="GBIT", show_default="no limit",
        help="Simulated: Gb/s of the store, for all nodes.",
    ),
    click.option(
        "--ranks-per-node", type=WholeNumber(min=1), default=8, metavar="N",
        help="Simulated: pipeline ranks of each node.",
    ),
)  # fmt: skip


def io_flags(command: Command) -> Command:
    """Add the flags of --simulate-io, which the command receives as `links`: None without it."""

    @functools.wraps(command)
    def gathered(
        *, simulate_io: bool, num_streams: int, latency_ms: float, stream_mb_s: float, link_gbit: float,
        disk_gb_s: float | None, store_gbit: float | None, ranks_per_node: int, **others: Any,
    ) -> Any:  # fmt: skip
        if not simulate_io:
            return command(links=None, **others)
        from reshard.operations.simulate_io import Links

        links = Links(
            num_streams=num_streams,
            latency_s=latency_ms / 1e3,
            stream_rate=stream_mb_s * 1e6,
            link_rate=link_gbit * _GBIT,
            disk_rate=disk_gb_s * 1e9 if disk_gb_s else math.inf,
            store_rate=store_gbit * _GBIT if store_gbit else math.inf,
            ranks_per_node=ranks_per_node,
        )
        return command(links=links, **others)

    return with_flags(gathered, _IO)
