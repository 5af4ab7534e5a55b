"""Seconds of modules for a microbatch, by FLOPs or as a run measured them, with what ranks send; and the hardware.

# Note [Time of a step]
Ranks compute at a share of their GPU's peak, and wait for what they send: nothing overlaps. A layer's tensor-parallel
ranks reduce a tensor for each matrix that they share, two of them forward: the results of attention and MLP, and the
gradients of what each other matrix takes; for experts, one forward and one backward. Experts receive each token's
hidden state, and send it back, as many times as a token has experts, each tensor-parallel rank for a part of the
tokens. Context-parallel ranks gather the keys and values of whole rows (`--cp-method gather`), and reduce their
gradients; with `--cp-method ulysses` they exchange queries, keys, values and results for heads of whole rows, and the
gradients of each. Gradients are reduced, and sharded weights gathered, once per step. Rings move (n - 1) / n of a
tensor to gather or to scatter it, and twice that to reduce it everywhere. Groups of adjacent ranks that fit on a node
use its links.

# Note [Attention with a mask]
A part of a row attends to the whole row with a mask, for which there is no FlashAttention; so do heads with ulysses,
rows with `--document-mask`, and layers whose window is no longer than a row. Measured once, by hand, on an H100 on
2026-11-26, forward and backward in bfloat16, with heads of 128, the parts of a row one after the other. Of 8,192
tokens, with 16 heads, 2 of keys: 2.36 ms with a causal flag, and 7.6 ms with masks for 2 ranks, 8.8 ms for 4. Of 32,768
tokens, with 8 heads, 1 of keys: 13.8 ms, and 62 ms with masks. The default efficiency is that of steps with
FlashAttention, so attention's FLOPs have its time already, and a mask adds the difference: 5.2, 6.4 and 48 ms, which
are 1.0, 1.3 and 1.2 times what those FLOPs take at 326 TFLOP/s, 5.1, 5.1 and 40 ms. So their time is multiplied by 2.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Literal

from manifests.command import defaults
from manifests.errors import UsageError
from manifests.models import ModelShape, is_expert
from manifests.models.config import CONFIG_NAME, ConfigReader
from manifests.models.parts import is_divided
from manifests.models.shape import BACKWARD_SHARE, is_layer
from manifests.models.training import POLICIES, ContextMethod, Recompute, parse_recompute
from manifests.module_times import MeasuredTimes, ModuleTime, ring
from reshard.estimate.assumptions import Assumptions
from reshard.estimate.costs import times_of


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


_INSTANT = Hardware(peak=inf, node=inf, network=inf)  # of a run that measured no link: what ranks send is left out
_MASKED = 2.2
_NUM_RESULTS = 2  # of a layer, attention's and the MLP's, which its tensor-parallel ranks reduce


def with_times_of_run(shape: ModelShape, config: Mapping[str, Any], assumed: Assumptions) -> Assumptions:
    """Return the assumptions with the times of their run, for their degrees and tokens."""
    run = assumed.run
    assert run is not None, "checked by the caller"
    is_linked = run.step is not None and run.step.link is not None
    hardware = hardware_in(run, read_hardware(defaults.HARDWARE)) if is_linked else _INSTANT
    seconds = ModuleSeconds(
        shape, config, seq_len=assumed.seq_len, hardware=hardware, efficiency=1.0,
        per_node=defaults.GPUS_PER_NODE, measured=replace(run, modules=times_of(shape, assumed.seq_len, run.modules)),
        context_method=assumed.context_method,
    )  # fmt: skip
    degrees, nbytes = (assumed.tensor, assumed.expert, assumed.context), POLICIES[assumed.policy].compute
    times = seconds.times(*degrees, assumed.microbatch, assumed.recompute, nbytes)
    return replace(assumed, measured=times, overhead=run.step)


class ModuleSeconds:
    """Seconds of a model's modules; `measured` has the times of each, in a run."""

    def __init__(
        self, shape: ModelShape, config: Mapping[str, Any], *, seq_len: int, hardware: Hardware, efficiency: float,
        per_node: int, measured: MeasuredTimes | None, context_method: ContextMethod = "gather",
    ) -> None:  # fmt: skip
        self._shape, self._seq_len, self._measured = shape, seq_len, measured
        self._hardware, self._efficiency, self._per_node = hardware, efficiency, per_node
        self._method, self._how = context_method, {} if measured is None else measured.how
        owned = shape.by_module()
        self._has_experts = {module: any(map(is_expert, owned[module])) for module in shape.modules}
        self._num_matrices = {  # that tensor-parallel ranks share; experts reduce as two of them do
            module: 2 * has_experts + sum(self._is_matrix(fqn) for fqn in owned[module])
            for module, has_experts in self._has_experts.items()
        }
        fields = section if isinstance(section := config.get("text_config"), Mapping) else config
        self._top_k = max(ConfigReader(fields, CONFIG_NAME).experts_per_token(), default=1)
        link = None if measured is None or measured.step is None else measured.step.link
        self._latency_s = 0.0 if link is None else link.latency_s

    def _is_matrix(self, fqn: str) -> bool:
        return is_divided(fqn, self._shape) and not is_expert(fqn) and self._shape.count_params(fqn) > 0  # no scales

    def times(
        self, tensor: int, expert: int, context: int, microbatch: int, recompute: Recompute, nbytes: int
    ) -> Mapping[str, ModuleTime]:
        """Return the seconds of each module for one microbatch; see Note [Time of a step].

        Units: `nbytes` of an element that ranks send.
        """
        times, row_tokens = {}, microbatch * self._seq_len
        for module in self._shape.modules:
            forward, backward = self._compute(module, row_tokens // context, tensor, context)
            sent = self._sending(module, tensor, expert, context, self._method, row_tokens, nbytes, self._per_node)
            again = _recomputed(recompute) * (forward + sent.forward) if is_layer(module) else 0.0
            times[module] = ModuleTime(forward=forward + sent.forward, backward=backward + sent.backward + again)
        return times

    def rate(self, num_adjacent: int, per_node: int | None = None) -> float:
        """Return the bytes per second that each of so many adjacent ranks sends to the others."""
        is_on_node = (per_node or self._per_node) % num_adjacent == 0
        return self._hardware.node if is_on_node else self._hardware.network

    def _sending(
        self, module: str, tensor: int, expert: int, context: int, method: ContextMethod, row_tokens: int, nbytes: int,
        per_node: int,
    ) -> ModuleTime:  # fmt: skip
        """Return the seconds in which a module sends hidden states, and keys or what ulysses exchanges for heads."""
        rate = partial(self.rate, per_node=per_node)
        hidden, reduction_s, routed_s = row_tokens // context * self._shape.hidden_size * nbytes, 0.0, 0.0
        if is_layer(module) and tensor > 1:
            reduction_s = self._latency_s + 2 * ring(tensor) * hidden / rate(tensor)
        if self._has_experts[module]:
            routed_s = 2 * ring(expert) * self._top_k * hidden / tensor / rate(expert)
        work, is_exchange = self._shape.work[module], method == "ulysses"
        # For each key, 2 FLOPs for an element of a query, and of a result.
        elements = (work.flops_per_key / 2 + work.keys) / context if is_exchange else work.keys
        gathered_s = ring(context) * row_tokens * elements * nbytes / tensor / rate(tensor * context)
        num_gradients = max(_NUM_RESULTS, self._num_matrices[module] - _NUM_RESULTS)
        return ModuleTime(
            forward=_NUM_RESULTS * reduction_s + routed_s + gathered_s,
            backward=num_gradients * reduction_s + routed_s + (1 if is_exchange else 2) * gathered_s,
        )

    def _flops(self, module: str, context: int, row: int) -> float:
        """Return a token's forward FLOPs, attention's by their time in such rows: see Note [Attention with a mask]."""
        work, window = self._shape.work[module], self._shape.windows.get(module, 0)
        is_masked = context > 1 or self._how.get("document_mask") or 0 < window <= row
        factor = _MASKED if is_masked else 1.0
        return work.flops + factor * work.flops_per_key * self._seq_len

    def _compute(self, module: str, tokens: int, tensor: int, context: int) -> tuple[float, float]:
        """Return the seconds in which a module computes forward and backward, without recomputation.

        Of measured ones, what the run itself sent is subtracted, unless it takes longer at these rates.
        """
        flops = self._flops(module, context, self._seq_len)
        if self._measured is None:
            forward = flops * tokens / (self._hardware.peak * self._efficiency * tensor)
            return forward, BACKWARD_SHARE * forward
        how, scale = self._measured.how, self._measured.scale_to(tokens, tensor)
        degrees = how.get("tp", 1), how.get("ep", 1), how.get("cp", 1)
        method: ContextMethod = "ulysses" if how.get("cp_method") == "ulysses" else "gather"
        scale *= flops / self._flops(module, degrees[2], how["seq_len"]) if flops else 1.0
        nbytes = POLICIES["bf16" if how.get("dtype") == "bf16" else "fp32"].compute
        per_node = how.get("ranks_per_node", self._per_node)
        sent = self._sending(module, *degrees, method, how["microbatch"] * how["seq_len"], nbytes, per_node)
        forward, backward = self._measured.modules[module].forward, self._measured.modules[module].backward
        if is_layer(module):
            backward -= _recomputed(parse_recompute(str(how.get("ac", "none")))) * forward
        if forward < sent.forward or backward < sent.backward:
            return scale * forward, scale * max(0.0, backward)
        return scale * (forward - sent.forward), scale * (backward - sent.backward)


def _recomputed(recompute: Recompute) -> float:
    """Return the share of layers of which --ac repeats the forward."""
    return 1.0 if recompute == "full" else 1 / recompute if isinstance(recompute, int) else 0.0
