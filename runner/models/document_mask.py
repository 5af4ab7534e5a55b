"""Packed documents kept apart, on transformers' attention: block-diagonal masks, and positions from 0 in each document.

# Note [Document masks]
transformers makes such masks by itself from `position_ids` that restart at 0, if it gets no mask and the model passes
the positions on where it makes masks. GPT-OSS, Afmoe and BioGPT do not, and documents would silently see each other. So
an attention implementation of another name is registered, with a mask function that knows the documents; its attention
function is the one that the model has anyway. The model gets a mask of ones: it then looks for no documents by itself.
What mixes tokens without a mask, such as linear attention, is found by the proof, see Note [Proof of the combination].

Without documents, transformers looks in every forward whether positions restart, and waits for the device. Rows of a
stage are then whole documents, which it need not ask.

A layer that is recomputed runs when other documents are current, or none. Masks are made before the layers, which take
them as arguments, so nothing reads the current documents then.

The same function makes masks for a context-parallel rank's part of a row, see Note [Parts of rows].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runner.models.context_parallel import EAGER, attention_of, attention_over
from runner.tensors.row_parts import RowParts

_OF_PARTS = "_of_parts"
_positions: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)
_are_rows_whole: ContextVar[bool] = ContextVar("are_rows_whole", default=False)
_find_packed = masking_utils.find_packed_sequence_indices
setattr(  # noqa: B010 - mypy forbids to assign to a function
    masking_utils,
    "find_packed_sequence_indices",
    lambda position_ids: None if _are_rows_whole.get() else _find_packed(position_ids),
)


def mask_rows(model: nn.Module, parts: RowParts | None) -> None:
    """Let a model make masks of the documents of `documents_at`, and compute attention as it does without.

    With `parts`, its input is this rank's part of each row, and its attention is that of whole rows.
    """
    configs: dict[int, Any] = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    for config in configs.values():
        base = config._attn_implementation
        name = base + (_OF_PARTS if parts else "_of_rows")  # a tiny model that is checked meanwhile has whole rows
        AttentionInterface.register(name, attention_over(parts, base) if parts else partial(_of_rows, base))
        AttentionMaskInterface.register(name, partial(_mask, base, parts))
        config._attn_implementation = name


@contextmanager
def registrations_restored() -> Iterator[None]:
    """Let models with parts of rows that are built in the block leave those before it their attention, by one name."""
    registries = ((AttentionInterface, ALL_ATTENTION_FUNCTIONS), (AttentionMaskInterface, ALL_MASK_ATTENTION_FUNCTIONS))
    before = [
        (interface, {name: function for name, function in functions.items() if name.endswith(_OF_PARTS)})
        for interface, functions in registries
    ]
    try:
        yield
    finally:
        for interface, functions in before:
            for name, function in functions.items():
                interface.register(name, function)


@contextmanager
def documents_at(position_ids: torch.Tensor | None) -> Iterator[None]:
    """Make masks of the documents that begin where a position is 0, while the block runs; None: each row is one.

    Shapes: position_ids (B, L), of whole rows.
    """
    token, whole = _positions.set(position_ids), _are_rows_whole.set(position_ids is None)
    try:
        yield
    finally:
        _positions.reset(token)
        _are_rows_whole.reset(whole)


def inputs_of_rows(
    position_ids: torch.Tensor | None, size: tuple[int, ...], parts: RowParts | None, device: torch.device | None
) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward for tokens at these positions; `size` is that of its input.

    Shapes: position_ids (B, L), of whole rows; None: from 0 to L.
    """
    if parts is None:
        if position_ids is None:
            return {}
        return {"position_ids": position_ids, "attention_mask": torch.ones_like(position_ids)}
    length = size[1] * parts.size
    if position_ids is None:
        position_ids = torch.arange(length, device=device).expand(size[0], -1)
    places = parts.places(length).to(device)
    return {"position_ids": position_ids[:, places], "attention_mask": torch.ones_like(position_ids)}


def _of_rows(
    base: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Compute the attention of `base`, of chosen keys alone if there are `indices` (B, Q, K).

    Sparse attention, as of DeepSeek-V3.2, masks the others by itself where the implementation is `sdpa` or `eager` by
    name, and leaves the choice to one of another name.
    """
    if indices is not None:
        assert attention_mask is not None, "the choice depends on it"
        others = torch.ones_like(attention_mask, dtype=torch.bool).scatter(-1, indices.long()[:, None], False)
        hidden = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(others, hidden)
    return attention_of(base)(module, query, key, value, attention_mask, **kwargs)


def _mask(
    base: str,
    parts: RowParts | None,
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return which keys each query sees, (B, 1, Q, L): those that the model's own function allows in its document."""
    positions = _positions.get()
    if positions is None and parts is None:
        mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[base](
            batch_size=batch_size, kv_length=kv_length, mask_function=mask_function, device=device, **kwargs
        )
        return mask
    if positions is None:
        positions = torch.arange(kv_length, device=device).expand(batch_size, -1)
    documents = (positions == 0).cumsum(1)
    queries = torch.arange(kv_length, device=positions.device)
    if parts is not None and parts.gathers:
        queries = parts.places(kv_length).to(positions.device)
    rows = torch.arange(batch_size, device=positions.device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=positions.device)
    allowed = mask_function(rows, head, positions[:, None, queries, None], positions[:, None, None, :])
    allowed = allowed & (documents[:, None, queries, None] == documents[:, None, None, :])
    if base != EAGER:
        return allowed
    dtype = kwargs["dtype"]
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
