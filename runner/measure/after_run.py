"""What the ranks of a traced run measure once it is done: their link, and what a microbatch takes beside its tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import mean, median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from manifests.module_times import Link, ring
from runner.distributed.world import exchange_device

logger = logging.getLogger("runner")

# A bucket of gradients; elements and columns of factors, and elements of those that no rank shares, on a GPU.
_REDUCED_NBYTES, _MOST_MULTIPLIED, _MOST_COLUMNS, _MOST_ON_GPU = 64 << 20, 1 << 20, 1 << 10, 1 << 25
_NUM_REDUCTIONS, _NUM_PRODUCTS, _NUM_SHARED = 3, 20, 100


def measure_fixed_share(device: torch.device, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> float:
    """Return the share of a matrix product's time that so many tokens take as one does, forward and backward.

    See Note [What each microbatch takes] of `manifests.module_times`. 0 if there is no memory for it.
    """
    most = (_MOST_ON_GPU if device.type == "cuda" else _MOST_MULTIPLIED) // hidden_size
    fewer = max(1, min(num_tokens, most))
    seconds: dict[int, list[float]] = {fewer: [], 2 * fewer: []}
    try:
        matrix = torch.zeros(hidden_size, min(hidden_size, _MOST_COLUMNS), device=device, dtype=dtype)
        matrix.requires_grad_()
        for _ in range(1 + _NUM_PRODUCTS):
            for count, ran in seconds.items():
                rows = torch.zeros(count, hidden_size, device=device, dtype=dtype, requires_grad=True)
                begun_s = time.perf_counter()
                torch.autograd.backward((rows @ matrix).sum())
                assert matrix.grad is not None
                matrix.grad[0, 0].item()  # a GPU is done
                ran.append(time.perf_counter() - begun_s)
    except RuntimeError as error:
        logger.warning("note: what a microbatch takes beside its tokens was not measured: %s", error)
        return 0.0
    once_s, twice_s = (median(ran[1:]) for ran in seconds.values())
    fixed_s, token_s = max(0.0, 2 * once_s - twice_s), max(0.0, twice_s - once_s) / fewer
    return fixed_s / (fixed_s + num_tokens * token_s)


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
