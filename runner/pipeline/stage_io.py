"""Whatever a stage hands on, as the tensors that torch's pipelining can carry.

# Note [What crosses a boundary]
torch carries tensors from a stage to the next one, and nothing else; a tensor that a later stage
wants travels through all stages in between. So the structure of what crosses each boundary, with all
in it that is no tensor, is found once for each shape of batch (see `runner.pipeline.stage_metadata`), on every rank
alike, and only tensors are sent. What a stage hands on is held against it every time: gloo takes a
shorter message, or one of another dtype, into a longer buffer in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Constant", "Form", "FormError", "StageIO", "TensorForm", "form_of"]


class FormError(ValueError):
    """A stage hands on something else than was agreed: a mistake in a model's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorForm:
    """A tensor, but for its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """What is no tensor: a number, a word, None. The same for every microbatch."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What crosses a boundary between stages: dicts, lists and tuples, nested as `tree` says, and their leaves."""

    tree: pytree.TreeSpec
    leaves: tuple[TensorForm | Constant, ...]

    def examples(self) -> tuple[torch.Tensor, ...]:
        """Give tensors without memory for those that travel."""
        return tuple(
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
            for leaf in self.leaves
            if isinstance(leaf, TensorForm)
        )

    def pack(self, handed_on: Any, arrived: Sequence[torch.Tensor] = ()) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Give the tensors of what a stage hands on: one as it is, several as a tuple.

        `arrived` are those that the stage was given. torch takes gradients between what arrives and
        what leaves, and detaches what leaves in place: each of them becomes a tensor of its own.

        Raises:
            FormError: it is not of this form.
        """
        leaves, tree = pytree.tree_flatten(handed_on)
        if tree != self.tree:
            raise FormError(f"a stage hands on {_in_a_line(tree)}, expected {_in_a_line(self.tree)}")
        taken = {id(tensor) for tensor in arrived}
        packed = []
        for found, expected in zip(leaves, self.leaves, strict=True):
            _check(found, expected)
            if isinstance(expected, TensorForm):
                if id(found) in taken or found._is_view() or not found.is_contiguous():
                    found = found.clone(memory_format=torch.contiguous_format)
                taken.add(id(found))
                packed.append(found)
        return packed[0] if len(packed) == 1 else tuple(packed)

    def unpack(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Give back what was packed."""
        arriving = iter(tensors)
        return pytree.tree_unflatten(list(self._fill(arriving)), self.tree)

    def _fill(self, arriving: Iterator[torch.Tensor]) -> Iterator[Any]:
        for leaf in self.leaves:
            yield leaf.value if isinstance(leaf, Constant) else next(arriving)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageIO:
    """What a stage is given and what it hands on."""

    inputs: Form
    outputs: Form


def form_of(value: Any) -> Form:
    """Give the form of a value."""
    leaves, tree = pytree.tree_flatten(value)
    return Form(tree=tree, leaves=tuple(map(_leaf_of, leaves)))


def _in_a_line(tree: pytree.TreeSpec) -> str:
    return " ".join(str(tree).split())


def _leaf_of(leaf: Any) -> TensorForm | Constant:
    if isinstance(leaf, torch.Tensor):
        return TensorForm(shape=tuple(leaf.shape), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
    return Constant(value=leaf)


def _check(found: Any, expected: TensorForm | Constant) -> None:
    if isinstance(expected, Constant):
        if isinstance(found, torch.Tensor) or type(found) is not type(expected.value) or found != expected.value:
            raise FormError(f"a stage hands on {_leaf_of(found)}, expected {expected} as for every microbatch")
    elif not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise FormError(f"a stage hands on {_leaf_of(found)}, expected {expected}")
