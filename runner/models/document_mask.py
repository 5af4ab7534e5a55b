"""Packed documents kept apart, on transformers' attention: block-diagonal masks, and positions from 0 in each document.

# Note [Document masks]
transformers makes such masks by itself from `position_ids` that restart at 0, if it gets no mask and the model passes
the positions on where it makes masks. GPT-OSS, Afmoe and BioGPT do not, and documents would silently see each other. So
an attention implementation of another name is registered, with a mask function that knows the documents; its attention
function is the one that the model has anyway. The model gets a mask of ones: it then looks for no documents by itself.
What mixes tokens without a mask, such as linear attention, is found by `runner.pipeline.document_check`.

A layer that is recomputed runs when other documents are current, or none. Masks are made before the layers, which take
them as arguments, so nothing reads the current documents then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_EAGER = "eager"
_positions: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)


def mask_documents(model: nn.Module) -> None:
    """Let a model make masks of the documents of `documents_at`, and compute attention as it does without."""
    configs: dict[int, Any] = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    for config in configs.values():
        base = config._attn_implementation
        name = f"{base}_of_documents"
        attention = _eager_attention if base == _EAGER else ALL_ATTENTION_FUNCTIONS[base]
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, partial(_mask, base))
        config._attn_implementation = name


@contextmanager
def documents_at(position_ids: torch.Tensor | None) -> Iterator[None]:
    """Make masks of the documents that begin where a position is 0, while the block runs; None: each row is one.

    Shapes: position_ids (B, L).
    """
    token = _positions.set(position_ids)
    try:
        yield
    finally:
        _positions.reset(token)


def inputs_of_documents(position_ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward for documents at these positions."""
    if position_ids is None:
        return {}
    return {"position_ids": position_ids, "attention_mask": torch.ones_like(position_ids)}


def _mask(base: str, *, mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor | None:
    """Return which keys each query sees, (B, 1, L, L): those that the model's own function allows in its document."""
    positions = _positions.get()
    if positions is None:
        mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[base](mask_function=mask_function, **kwargs)
        return mask
    documents = (positions == 0).cumsum(1)
    rows = torch.arange(len(positions), device=positions.device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=positions.device)
    allowed = mask_function(rows, head, positions[:, None, :, None], positions[:, None, None, :])
    allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    if base != _EAGER:
        return allowed
    dtype = kwargs["dtype"]
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def _eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the attention function in the file of a module's class."""
    for ancestor in type(module).__mro__:
        attention = getattr(sys.modules.get(ancestor.__module__), "eager_attention_forward", None)
        if attention is not None:
            return attention(module, *args, **kwargs)
    raise ValueError(f"{type(module).__name__} has no eager attention")
