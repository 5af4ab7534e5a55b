"""A stage's inputs and outputs, flattened into the tensors that torch's pipelining can send.

# Note [What crosses a boundary]
torch sends only tensors, from a stage to the next one; a tensor that a later stage needs travels through all stages in
between. So the structure of what crosses each boundary, including everything that is not a tensor, is found once for
each batch shape (see `runner.pipeline.stage_metadata`), identically on every rank, and only tensors are sent. Every
output is checked against it: gloo silently receives a shorter message, or one of another dtype, into a longer buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


class FormError(ValueError):
    """A stage's output differs from its declared form: a bug in a model's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorForm:
    """Shape, dtype and requires_grad of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A value that is not a tensor, such as a number, a string or None. The same for every microbatch."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The structure of what crosses a boundary between stages: a tree of dicts, lists and tuples, and its leaves."""

    tree: pytree.TreeSpec
    leaves: tuple[TensorForm | Constant, ...]

    def examples(self) -> tuple[torch.Tensor, ...]:
        """Return meta tensors for those that are sent."""
        return tuple(
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
            for leaf in self.leaves
            if isinstance(leaf, TensorForm)
        )

    def pack(self, output: Any, inputs: Sequence[torch.Tensor] = ()) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the tensors of a stage's output: one as it is, several as a tuple.

        `inputs` are the tensors that the stage received. torch computes gradients between inputs and outputs, and
        detaches outputs in place, so each output must be a separate tensor.
        """
        leaves, tree = pytree.tree_flatten(output)
        if tree != self.tree:
            raise FormError(f"a stage's output is {_in_a_line(tree)}, expected {_in_a_line(self.tree)}")
        taken = {id(tensor) for tensor in inputs}
        packed = []
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            _check(leaf, expected)
            if isinstance(expected, TensorForm):
                if id(leaf) in taken or leaf._is_view() or not leaf.is_contiguous():
                    leaf = leaf.clone(memory_format=torch.contiguous_format)
                has_gradient = leaf.is_floating_point() and (expected.requires_grad or len(self.leaves) == 1)
                if torch.is_grad_enabled() and has_gradient and not leaf.requires_grad:
                    leaf.requires_grad_()  # of first stages of which nothing is trained: schedules run their backward
                taken.add(id(leaf))
                packed.append(leaf)
        return packed[0] if len(packed) == 1 else tuple(packed)

    def unpack(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output that was packed."""
        received = iter(tensors)
        return pytree.tree_unflatten(list(self._fill(received)), self.tree)

    def _fill(self, received: Iterator[torch.Tensor]) -> Iterator[Any]:
        for leaf in self.leaves:
            yield leaf.value if isinstance(leaf, Constant) else next(received)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageIO:
    """The forms of a stage's input and output."""

    inputs: Form
    outputs: Form


def form_of(value: Any) -> Form:
    """Return the form of a value."""
    leaves, tree = pytree.tree_flatten(value)
    return Form(tree=tree, leaves=tuple(map(_leaf_of, leaves)))


def _in_a_line(tree: pytree.TreeSpec) -> str:
    return " ".join(str(tree).split())


def _leaf_of(leaf: Any) -> TensorForm | Constant:
    if isinstance(leaf, torch.Tensor):
        return TensorForm(shape=tuple(leaf.shape), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
    return Constant(value=leaf)


def _check(leaf: Any, expected: TensorForm | Constant) -> None:
    if isinstance(expected, Constant):
        if isinstance(leaf, torch.Tensor) or type(leaf) is not type(expected.value) or leaf != expected.value:
            raise FormError(f"a stage's output has {_leaf_of(leaf)}, expected {expected} as for every microbatch")
    elif not isinstance(leaf, torch.Tensor) or (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
        raise FormError(f"a stage's output has {_leaf_of(leaf)}, expected {expected}")
