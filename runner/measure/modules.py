"""Run a model one module after the other on one device, and time each.

What leaves a module enters the next one, as between stages of a pipeline, so every module gets what it would get there;
only one of them is in memory. Weights are random: times of dense layers do not depend on them, and a router with random
weights uses its experts about evenly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from manifests.models.training import Recompute
from manifests.module_times import MeasuredTimes, ModuleTime, StepTime
from runner.bundle.packed import Packed
from runner.config.flags import Device
from runner.config.schema import Dtype
from runner.distributed.fail_together import exhausted
from runner.distributed.world import World, device_of, num_threads
from runner.measure.after_run import measure_fixed_share
from runner.models import Family, family_of
from runner.models.family import row_inputs_of
from runner.pipeline.chunk import StageChunk, build_chunks, materialize
from runner.pipeline.microbatches import token_loss
from runner.profiling.trace import Recorder
from runner.tensors.heap import compact_heap, return_holes
from runner.tensors.local_shard import FLAG_DTYPES, persistent_buffers
from runner.training.activation_checkpoint import recompute_layers
from runner.training.gradient_norm import sum_squares

_WARMUP = 3  # runs before those that count
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How modules are run: as training would."""

    seq_len: int
    microbatch: int
    dtype: Dtype
    recompute: Recompute
    device: Device
    num_repeats: int


def measure_modules(
    packed: Packed, setting: Setting, *, note: Callable[[str, ModuleTime], None] | None
) -> MeasuredTimes:
    """Return the median seconds of each module. `note` is called with each.

    Of modules that only one stage can have together, the first has the time of all.
    """
    torch.set_num_threads(num_threads(os.environ))  # this and the next line as a rank does
    compact_heap(is_sharded=False)
    device = device_of(World(rank=0, local_rank=0, size=1), setting.device)
    family = family_of(packed, setting.seq_len)
    module_seconds, overhead_s, num_params = dict[str, ModuleTime](), 0.0, 0
    torch.manual_seed(_SEED)
    rows = (setting.microbatch, setting.seq_len)
    crossing: Any = torch.randint(family.vocab_size, rows, device=device)
    context = row_inputs_of(family, crossing)
    for modules in _together(family):
        try:
            (chunk,) = build_chunks(family, (modules,), (0,))
            materialize(chunk, device=device, dtype=FLAG_DTYPES[setting.dtype])
            _fill(chunk.train())
            recompute_layers((chunk,), setting.recompute)
            labels = (
                torch.randint(family.vocab_size, rows, device=device) if modules[-1] == family.modules[-1] else None
            )
            seconds, crossing = _time(partial(chunk, **context), crossing, labels, setting.num_repeats)
            step_s, count = _time_step(chunk)
        except (RuntimeError, MemoryError) as error:
            if (refusal := exhausted(error)) is not None:
                raise refusal.within(modules[0]) from error
            raise
        overhead_s, num_params = overhead_s + step_s, num_params + count
        module_seconds |= {module: ModuleTime(forward=0.0, backward=0.0) for module in modules} | {modules[0]: seconds}
        if note is not None:
            note(" and ".join(modules), seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} thread"
    how = {**asdict(setting), "device": name, "torch": torch.__version__}
    step = StepTime(overhead_s=overhead_s, num_params=num_params) if num_params else None
    tokens, dtype = setting.microbatch * setting.seq_len, FLAG_DTYPES[setting.dtype]
    fixed_share = measure_fixed_share(device, tokens, packed.shape.hidden_size, dtype)
    return MeasuredTimes(modules=module_seconds, how=how, step=step, fixed_share=fixed_share)


def _together(family: Family) -> Iterator[tuple[str, ...]]:
    """Yield the modules to run at a time: one, or several that must be on one stage."""
    groups: Mapping[str, tuple[str, ...]] = {group[0]: group for group in getattr(family, "together", ()) if group}
    inside = {module for group in groups.values() for module in group[1:]}
    for module in family.modules:
        if module not in inside:
            yield groups.get(module, (module,))


@torch.no_grad()
def _fill(chunk: StageChunk) -> None:
    """Fill parameters and buffers that files would have: matrices at random, norms with 1, all else with 0."""
    for module in chunk.body.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if name == "weight" else 0.0)
    for _, buffer in persistent_buffers(chunk.body):
        buffer.zero_()


def _time(
    chunk: Callable[[Any], Any], crossing: Any, labels: torch.Tensor | None, num_repeats: int
) -> tuple[ModuleTime, Any]:
    """Return the median seconds of a chunk for a microbatch, and what leaves it."""
    device = next(iter(pytree.tree_leaves(crossing))).device
    recorder = Recorder(device)
    outputs: Any = None
    recorder.start()
    for repeat in range(_WARMUP + num_repeats):
        arrived = pytree.tree_map(_entering, crossing)
        with recorder.action("F", 0, repeat):
            outputs = chunk(arrived)
            if labels is not None:
                rows = labels.repeat(len(outputs) // len(labels), 1)  # those of MTP layers follow
                outputs = token_loss(outputs, rows, num_tokens=rows.numel())
        return_holes(device.type)
        trained = [
            leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        gradients = [torch.ones_like(leaf) if leaf.dim() == 0 else torch.randn_like(leaf) for leaf in trained]
        with recorder.action("B", 0, repeat):
            torch.autograd.backward(trained, gradients)
        return_holes(device.type)
    recorder.stop()
    ran = [timed for timed in recorder.take() if timed.action.microbatch >= _WARMUP]
    seconds = [median(timed.end_s - timed.start_s for timed in ran if timed.action.kind == kind) for kind in "FB"]
    return ModuleTime(forward=seconds[0], backward=seconds[1]), pytree.tree_map(_leaving, outputs)


def _time_step(chunk: StageChunk) -> tuple[float, int]:
    """Return the median seconds of the gradient norm and AdamW's step, and the number of parameters.

    Of a module that leaves no memory for AdamW's state nothing is known: seconds are used by parameter.
    """
    try:
        return _time_adamw(chunk)
    except (RuntimeError, MemoryError) as error:
        if exhausted(error) is None:
            raise
        return 0.0, 0


def _time_adamw(chunk: StageChunk) -> tuple[float, int]:
    parameters = [parameter for parameter in chunk.body.parameters() if parameter.grad is not None]
    if not parameters:
        return 0.0, 0
    optimizer = torch.optim.AdamW(parameters, fused=chunk.device.type == "cuda")
    seconds = []
    for _ in range(_WARMUP + 1):
        begun_s = time.perf_counter()
        sum_squares([parameter.grad for parameter in parameters if parameter.grad is not None]).sum().item()
        optimizer.step()
        parameters[0].flatten()[0].item()  # a GPU has stepped it
        seconds.append(time.perf_counter() - begun_s)
    return median(seconds[1:]), sum(parameter.numel() for parameter in parameters)


def _entering(leaf: Any) -> Any:
    """Return a tensor as a stage receives it: of no graph yet."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _leaving(leaf: Any) -> Any:
    """Return a tensor without its graph; random numbers in place of infinite ones, which random weights may give."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    is_finite = not leaf.is_floating_point() or bool(leaf.isfinite().all())
    return (leaf.detach() if is_finite else torch.randn_like(leaf)).requires_grad_(leaf.requires_grad)
