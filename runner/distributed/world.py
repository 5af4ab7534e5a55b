"""This process's rank, its device, and the process group of all ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from statistics import mean, median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from manifests.errors import LaunchError
from manifests.module_times import Link, ring
from runner.config.flags import Device
from runner.profiling.start import StartTimes

logger = logging.getLogger("runner")

# To measure a link: a bucket of gradients, and elements and columns of factors.
_REDUCED_NBYTES, _MOST_MULTIPLIED, _MOST_COLUMNS = 64 << 20, 1 << 20, 1 << 10
_NUM_REDUCTIONS, _NUM_PRODUCTS, _NUM_SHARED = 3, 20, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's rank, from torchrun's environment variables. Ranks of a node have consecutive numbers."""

    rank: int
    local_rank: int
    size: int
    local_size: int = 1  # ranks on this node
    start: StartTimes = field(default_factory=StartTimes, compare=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World:
        try:
            rank, local_rank, size = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except KeyError as error:
            raise LaunchError(
                "", f"{error} is not set", "runner launch starts the workers", code="launch.no-world"
            ) from error
        local_size = int(environment.get("LOCAL_WORLD_SIZE", local_rank + 1))
        return cls(rank=rank, local_rank=local_rank, size=size, local_size=local_size)


def device_of(world: World, device: Device) -> torch.device:
    """Return the device that this rank trains on."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            "--device",
            f"local rank {world.local_rank} needs its own GPU, found {torch.cuda.device_count()} GPUs on this node",
            "start fewer ranks per node, or use --device cpu",
            code="launch.too-few-gpus",
        )
    return torch.device("cuda", world.local_rank)


def join_world(device: torch.device, timeout_s: int, *, shares_gpu: bool = False) -> None:
    """Create the process group of all ranks; every later wait for another rank ends after `timeout_s`.

    NCCL refuses ranks that share a GPU (`shares_gpu`): they use gloo, through host memory.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "gloo" if shares_gpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def measure_link(device: torch.device, num_tokens: int, hidden_size: int) -> Link | None:
    """Return what this rank sends while all ranks reduce, gather and scatter, and while they share a matrix product.

    The latter takes longer, forward and backward, than one of a rank alone, beside its bytes: the ranks reduce one
    tensor in it. None for one rank. All ranks call this when the run is done, so it fails no run: None, too, if a rank
    has no memory or has left.
    """
    if (size := dist.get_world_size() if dist.is_initialized() else 1) == 1:
        return None
    place, shape = exchange_device(device), (min(num_tokens, -(-_MOST_MULTIPLIED // hidden_size)), hidden_size)

    def reduce_gradients() -> None:
        flat = torch.cat(list(gradients))
        dist.all_reduce(flat)
        gradients.copy_(flat.view_as(gradients))[0, 0].item()  # a GPU has reduced them

    def shard_gradients() -> None:
        flat, part = gradients.view(-1), torch.empty(gradients.numel() // size, device=place)
        dist.reduce_scatter_single(part, torch.cat(list(flat.chunk(size))))
        whole = torch.empty_like(flat)
        dist.all_gather_single(whole, part)
        flat.copy_(whole)[0].item()

    def multiply(factor: torch.Tensor) -> None:
        taken = rows.clone().requires_grad_()
        product = (DTensor.from_local(taken, mesh, [Replicate()]) if isinstance(factor, DTensor) else taken) @ factor
        torch.autograd.backward((product.to_local() if isinstance(product, DTensor) else product).sum())
        assert taken.grad is not None
        taken.grad[0, 0].item()

    try:
        mesh = init_device_mesh(place.type, (size,))
        gradients = torch.zeros(2, _REDUCED_NBYTES // 8 // size * size, device=place)
        rows = torch.zeros(shape, device=place)
        matrix = torch.zeros(hidden_size, min(hidden_size, _MOST_COLUMNS), device=place, requires_grad=True)
        acts = reduce_gradients, shard_gradients
        rate, shard_rate = (2 * ring(size) * gradients.nbytes / median(_seconds(act, _NUM_REDUCTIONS)) for act in acts)
        # A step has hundreds of them, one after the other: the slow ones count, too, and vary most where ranks wait.
        shared_s = mean(_seconds(partial(multiply, DTensor.from_local(matrix, mesh, [Shard(1)])), _NUM_SHARED))
        alone_s = mean(_seconds(partial(multiply, matrix), _NUM_PRODUCTS))
    except RuntimeError as error:
        logger.warning("note: the network's rate was not measured: %s", error)
        return None
    latency_s = max(0.0, shared_s - alone_s - 2 * ring(size) * rows.nbytes / rate)
    return Link(rate=rate, shard_rate=shard_rate, latency_s=latency_s)


def _seconds(act: Callable[[], None], count: int) -> list[float]:
    """Return the seconds of each but the first."""
    ends_s = list[float]()
    for _ in range(1 + count):
        act()
        ends_s.append(time.perf_counter())
    return [end_s - begun_s for begun_s, end_s in pairwise(ends_s)]


def exchange_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where a tensor on `device` must be to be sent or gathered: gloo does that in host memory only.

    Source: torch 2.13, docs/source/distributed.md, "Backends".
    """
    world_group = group or dist.group.WORLD
    if device.type == "cpu" or world_group is None or world_group._get_backend(device).name() != "gloo":
        return device
    return torch.device("cpu")
