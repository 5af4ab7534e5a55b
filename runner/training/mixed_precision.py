"""Mixed precision: stages compute in bfloat16, the optimizer steps float32 master weights.

# Note [Master weights]
A parameter is what its stage computes with, in bfloat16. Its master is the same weight in float32: checkpoints
are loaded into it and saved from it, AdamW steps it, and after each step it is rounded into the parameter. The
gradients of a microbatch are bfloat16; gradient accumulation into `.grad` is float32 (`torch.Tensor.grad_dtype`).
`.grad` exists from the start, as zeros, because zero-bubble schedules add to it without autograd. The norm, ties and
gradient clipping read `.grad` alone. Matrices get the same bits as with FSDP2's `MixedPrecisionPolicy`; gradients of
norms, which autograd computes in float32, are not rounded to bfloat16 in between, unlike there. Where parameters are
sharded that policy does all of this, and a parameter is its own master.

# Note [Frozen weights]
A weight that is not trained has the bytes of the files in every checkpoint. Where it is computed with in another dtype,
its master is the weight as files have it: in host memory, for only saves read it. A sharded parameter has that dtype
itself, and FSDP casts what it gathers; what a family keeps in float32 is an exception, and saved so. A buffer of files
that is computed with in bfloat16, such as the bias of a router, has such a master in every run: none changes it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.models.family import BORROWED
from runner.tensors.local_shard import empty_like

_MASTER = "_master"  # an attribute of a parameter


def keep_masters(modules: Iterable[nn.Module], dtype: torch.dtype, frozen: Container[int] = ()) -> None:
    """Allocate a master of this dtype for every parameter that has another dtype, not yet filled.

    `frozen` has the ids of parameters that get none.
    """
    for parameter in _parameters(modules):
        if parameter.dtype == dtype or id(parameter) in frozen:  # kept in float32, or not trained
            continue
        like = torch.empty(parameter.shape, dtype=dtype, device="meta")
        setattr(parameter, _MASTER, empty_like(like, parameter.device))
        parameter.grad_dtype = dtype
        parameter.grad = torch.zeros_like(like, device=parameter.device)


def keep_as_stored(body: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Allocate masters of frozen parameters and of buffers, by name, in the dtypes that files have, not yet filled."""
    named = (*body.named_parameters(remove_duplicate=False), *body.named_buffers(remove_duplicate=False))
    for name, weight in named:
        dtype = dtypes.get(name, weight.dtype)
        if weight.dtype == dtype or name.startswith(BORROWED):  # nothing that is borrowed is saved
            continue
        if isinstance(weight, DTensor):  # of tensor-parallel ranks, which gather it on their device
            setattr(weight, _MASTER, torch.empty_like(weight, dtype=dtype, requires_grad=False))
        else:
            like = torch.empty(weight.shape, dtype=dtype, device="meta")
            setattr(weight, _MASTER, empty_like(like, torch.device("cpu")))


def master_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the weight that is stepped and saved: the master of a parameter or buffer, or itself if it has none."""
    master: torch.Tensor = getattr(parameter, _MASTER, parameter)
    return master


@torch.no_grad()
def round_masters(parameters: Iterable[torch.Tensor]) -> None:
    """Round the masters into the parameters that stages compute with."""
    for parameter in parameters:
        if (master := master_of(parameter)) is not parameter:
            parameter.copy_(master)


def share_master(parameters: Sequence[nn.Parameter]) -> None:
    """Let parameters that share a storage share a master."""
    if (master := master_of(parameters[0])) is not parameters[0]:
        for parameter in parameters[1:]:
            setattr(parameter, _MASTER, master)


def zero_gradient(parameter: nn.Parameter) -> None:
    """Reset a parameter's gradient."""
    if master_of(parameter) is parameter or not parameter.requires_grad:
        parameter.grad = None
    else:
        assert parameter.grad is not None
        parameter.grad.zero_()


def _parameters(modules: Iterable[nn.Module]) -> Iterable[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters())
