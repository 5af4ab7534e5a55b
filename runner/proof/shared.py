"""A tiny model whose parameters ranks share, compared with the whole of it on each of these ranks."""

from __future__ import annotations

import time
from functools import partial

import torch

from manifests.errors import ModelError, UserError
from runner.config.schema import ComputeOptions
from runner.parallel.mesh import Mesh
from runner.parallel.parallelize import Parallel, parallelize
from runner.proof.stages import (
    Compared,
    SelfChecked,
    build_filled,
    difference,
    gradients_of,
    loss_difference,
    run_tiny,
)

# What transformers computes in float32 whatever the weights are, such as linear attention, differs by 1e-6; what a plan
# leaves out, by far more.
TOLERANCE = 1e-5
_SEED = 0  # of the weights, on all ranks


def check_shared(family: SelfChecked, mesh: Mesh) -> float:
    """Check that a tiny model computes on the ranks of a mesh, which all call this, what the whole model does.

    Returns the seconds that it took.

    Raises:
        ModelError: it computes something else, or cannot be built, sharded or run.
    """
    started_s = time.perf_counter()
    try:
        compared = compare_shared(family, mesh)
    except UserError:
        raise
    except Exception as error:  # of modules that do not expect to have a part of their parameters
        raise _failed(family, mesh, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    if compared.largest > TOLERANCE:
        raise _failed(family, mesh, str(compared))
    return time.perf_counter() - started_s


def compare_shared(family: SelfChecked, mesh: Mesh, dtype: torch.dtype | None = None) -> Compared:
    """Compare a tiny model, whose parameters the ranks of a mesh share, with the whole of it.

    Tensor-parallel ranks do so in float64: their sums are in another order, and in float32 that is more than 1e-6.
    FSDP does not in float64 where a model keeps some parameters in float32.

    Raises:
        Exception: whatever a model raises that cannot be shared like that.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        dtype = dtype or (torch.float64 if mesh.degrees.tensor > 1 else torch.float32)
        tiny = run_tiny(family, dtype)
        share = partial(parallelize, mesh=mesh, compute=ComputeOptions())
        (chunk,) = build_filled(tiny.family, tiny.whole, (tiny.family.modules,), share)
        chunk.io = None  # nothing crosses to other stages; logits may be in float32
        parallel = Parallel(mesh=mesh, chunks=(chunk,), reduce_dtype=dtype, dtype=dtype)
        parallel.defer_gradient_sync()
        rank_results = tiny.results[mesh.data_rank :: mesh.degrees.data]
        crossed = [(chunk(result.tokens), result) for result in rank_results]
        for logits, result in crossed:
            torch.autograd.backward(logits, result.towards)
        parallel.reduce_gradients()
    return Compared(
        logits=max(difference(logits.detach(), result.logits) for logits, result in crossed),
        loss=max(loss_difference(logits.detach(), result) for logits, result in crossed),
        gradients=max(difference(gradient, expected) for _, expected, gradient in gradients_of(tiny.whole, (chunk,))),
    )


def _failed(family: SelfChecked, mesh: Mesh, what: str) -> ModelError:
    flag = "--ep" if mesh.degrees.expert > 1 else "--tp"
    return ModelError(
        flag,
        f"{family.architecture} with these fields, sharded by transformers' plan, does not compute what the whole "
        f"model does: {what}",
        f"remove {flag}; more stages and --dp-shard save memory, too",
        code="model.self-check-failed",
    )
