"""Context parallelism on transformers' attention: a rank has a part of each row, and its queries see the whole row.

# Note [Parts of rows]
All of a decoder but its attention computes each token by itself, given its position. So a stage runs on this rank's
tokens with their positions in the whole row, and the attention function of transformers' interface is wrapped: with
`gather`, this rank's queries meet the keys and values of all ranks; with `ulysses`, ranks exchange parts of rows for
heads, and each computes some heads of the whole row. Masks are made by positions, see Note [Document masks].

A layer that is recomputed runs in another microbatch's time: the attention function depends on shapes and ranks alone.
What mixes tokens outside the interface is found by the proof, see Note [Proof of the combination].
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runner.tensors.row_parts import RowParts, places_of

_PER_HEAD = "s_aux"  # the sinks of GPT-OSS: the one tensor, besides positions, that attention functions may get
EAGER = "eager"  # transformers' name of attention that is in the file of a model
Attention = Callable[..., Any]


def attention_over(parts: RowParts, base: str) -> Attention:
    """Return an attention function that computes `base` over the whole rows of which this rank has a part."""
    return partial(_gathered if parts.gathers else _exchanged, parts, attention_of(base))


@cache
def _order(size: int, length: int, device: torch.device) -> torch.Tensor:
    """Return where each place of a row is in the concatenated parts of all ranks."""
    return torch.argsort(torch.cat([places_of(rank, size, length) for rank in range(size)])).to(device)


def attention_of(base: str) -> Attention:
    """Return an attention function of transformers; that of `eager` is in the file of a module's class."""
    function: Attention = _eager_attention if base == EAGER else ALL_ATTENTION_FUNCTIONS[base]
    return function


def _eager_attention(module: nn.Module | _Replaced, *args: Any, **kwargs: Any) -> Any:
    kind = type(module.module if isinstance(module, _Replaced) else module)
    for ancestor in kind.__mro__:
        attention = getattr(sys.modules.get(ancestor.__module__), "eager_attention_forward", None)
        if attention is not None:
            return attention(module, *args, **kwargs)
    raise ValueError(f"{kind.__name__} has no eager attention")


def _gathered(
    parts: RowParts,
    inner: Attention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> Any:
    """Compute the attention of this rank's queries to the keys of all ranks.

    Shapes: query, key, value (B, H, l, D), l = this rank's tokens; the output (B, l, H, D).
    """
    order = _order(parts.size, key.shape[2] * parts.size, key.device)
    key, value = (_gather(part, parts.group).index_select(2, order) for part in (key, value))
    return inner(module, query, key, value, attention_mask, **kwargs)


def _exchanged(
    parts: RowParts,
    inner: Attention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> Any:
    """Compute this rank's heads over whole rows; shapes as `_gathered`.

    Fewer heads of keys than ranks are repeated, so that each rank has those of its queries.
    """
    size, group = parts.size, parts.group
    if key.shape[1] % size:
        repeats = size // key.shape[1] if size % key.shape[1] == 0 else query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(repeats, 1) for heads in (key, value))
    order = _order(size, key.shape[2] * size, key.device)
    query, key, value = (_swap(heads, 1, 2, group).index_select(2, order) for heads in (query, key, value))
    replaced: dict[str, Any] = {"num_key_value_groups": query.shape[1] // key.shape[1]}
    if (sinks := getattr(module, "sinks", None)) is not None:
        replaced["sinks"] = kwargs[_PER_HEAD] = sinks.chunk(size)[parts.rank]
    output, weights = inner(_Replaced(module, replaced), query, key, value, attention_mask, **kwargs)
    return _swap(output.index_select(1, torch.argsort(order)), 1, 2, group), weights


def _gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    whole: torch.Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


def _swap(tensor: torch.Tensor, split: int, joined: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    swapped: torch.Tensor = _Exchange.apply(tensor, split, joined, group)  # type: ignore[no-untyped-call]
    return swapped


class _Gather(torch.autograd.Function):
    """Concatenate the parts of all ranks in dimension 2; the gradient of a part is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group, part = group, part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


class _Exchange(torch.autograd.Function):
    """Split one dimension over ranks, and concatenate their parts in another one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: int, joined: int, group: Any) -> torch.Tensor:
        ctx.split, ctx.joined, ctx.group = split, joined, group
        return _exchange(tensor, split, joined, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, ctx.joined, ctx.split, ctx.group), None, None, None


def _exchange(tensor: torch.Tensor, split: int, joined: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = torch.stack([part.contiguous() for part in tensor.chunk(dist.get_world_size(group), split)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(list(received), dim=joined)


class _Replaced:
    """An attention module as an attention function reads it, with some attributes replaced."""

    def __init__(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
