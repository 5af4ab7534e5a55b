"""The GPUs and the network that searches and plans assume."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from manifests.errors import UsageError
from manifests.module_times import MeasuredTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A GPU's peak in dense bfloat16 products, and what it sends to others on its node and on other nodes.

    `measured` is the rate that a run has measured, if there is one.

    Units: FLOP/s, and bytes per second in one direction.
    """

    peak: float
    node: float
    network: float
    measured: Literal["node", "network"] | None = None

    def __str__(self) -> str:
        run = {self.measured: " (--from-run)"}
        rates = f"{self.peak / 1e12:g} TFLOP/s, {self.node / 1e9:g} GB/s on a node{run.get('node', '')}"
        return f"{rates}, {self.network / 1e9:g} GB/s between nodes{run.get('network', '')}"


def hardware_in(run: MeasuredTimes, hardware: Hardware) -> Hardware:
    """Return hardware with the rate that a run has measured, if it has: of its slowest link."""
    if run.step is None or run.step.link is None:
        return hardware
    is_node = run.how["num_ranks"] <= run.how["ranks_per_node"]
    link: Literal["node", "network"] = "node" if is_node else "network"
    return replace(hardware, **{link: run.step.link.rate}, measured=link)


# Sources: peaks, the data sheets that torchtitan 0.3.0 quotes in tools/utils.py (`get_peak_flops`); NVLink of the H100,
# 900 GB/s in both directions together ("Introducing NVIDIA HGX H100", developer.nvidia.com); network, an InfiniBand
# adapter of 400 Gb/s for each GPU (benchmarks/llama3_h100_202412_torchtitan.md of torchtitan). The A100's 600 GB/s and
# 200 Gb/s were read on pages of third parties.
HARDWARE: Mapping[str, Hardware] = {
    "a100": Hardware(peak=312e12, node=300e9, network=25e9),
    "h100": Hardware(peak=989e12, node=450e9, network=50e9),
    "h200": Hardware(peak=989e12, node=450e9, network=50e9),
}


def read_hardware(text: str) -> Hardware:
    """Return hardware by its name, or by its rates: `165,32,12.5` in TFLOP/s, GB/s on a node and between nodes."""
    if text.lower() in HARDWARE:
        return HARDWARE[text.lower()]
    match = re.fullmatch(",".join([r"([1-9][0-9]{0,5}(?:\.[0-9]{1,6})?)"] * 3), text)
    if match is None:
        problem = f"expected {', '.join(HARDWARE)} or three rates, found {text[:80]!r}"
        hint = "name TFLOP/s, GB/s on a node and GB/s between nodes, such as 165,32,12.5"
        raise UsageError("--hardware", problem, hint, code="options.hardware")
    peak, node, network = map(float, match.groups())
    return Hardware(peak=peak * 1e12, node=node * 1e9, network=network * 1e9)
