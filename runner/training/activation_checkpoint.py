"""Activation checkpointing: layers keep their input, and recompute their activations once in the backward.

# Note [Recomputed once]
torch's `checkpoint` recomputes a layer in every call of the autograd engine. A backward in two parts calls it once for
the gradients of a stage's inputs, and then once for each group of parameters: 5 to 11 forwards of each layer, of which
all that is not used at once stays in memory until the last. Here a layer is recomputed when a backward needs the first
tensor that autograd saved in it. Each recomputed tensor is freed with the node of the graph that needs it, so a
backward in two parts keeps between them what it would without checkpointing.

# Note [Kept results]
`selective` keeps the results of slow operations as these returned them. Models change some of them in place afterwards
(routers divide `topk`'s weights by their sum), so a kept result is copied before anything writes to its memory. The
memory is what is compared: `matmul` returns its product through `_unsafe_view`, which shares memory but no version
counter, and torch's own selective checkpointing then trains with the changed values (Gemma 3n's AltUp adds to a
product). A result that a layer returns is copied as well: what happens to it later is not seen.

# Note [Recomputed and compiled]
A layer that is one graph is compiled with its recomputation, which decides there what the graph keeps. Where a graph
breaks, as experts take as many tokens as a router says, torch runs its own checkpointing uncompiled, with the mistakes
above. Such a layer is checkpointed here, and what it calls is compiled in parts.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from operator import length_hint
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.exc import UserError as DynamoUserError
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from manifests.errors import ModelError
from manifests.models.training import Recompute
from runner.config.schema import ComputeOptions
from runner.pipeline.chunk import StageChunk, layers_of
from runner.pipeline.heads import chunk_head
from runner.tensors.dtensor import local_of

_aten = torch.ops.aten
# Operations whose results `selective` keeps, because recomputing them is slow. Everything between them is cheap.
_KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten.topk.default,  # of a router: the recomputed choice of experts must be the same
)


def apply_compute_options(chunks: Sequence[StageChunk], num_stages: int, options: ComputeOptions) -> None:
    """Apply the compute options to stages. A checkpointed layer is compiled as a whole."""
    recompute_layers(chunks, options.recompute, is_compiled=options.is_compiled)
    if options.loss_chunk is not None:
        chunk_head(chunks, num_stages, options.loss_chunk)


def recompute_layers(chunks: Iterable[StageChunk], recompute: Recompute, *, is_compiled: bool = False) -> None:
    """Checkpoint every layer, every Nth layer, or all but matrix products and attention (`selective`).

    The forward of a layer is wrapped, not the layer: no parameter name changes, and hooks (FSDP's too) keep working.
    Compilation, of static shapes, is when a layer first runs; layers of one kind share the compiled code.
    """
    every = recompute if isinstance(recompute, int) else 1
    for chunk in chunks:
        for number, layer in layers_of(chunk):
            if recompute != "none" and number % every == 0:
                wrapped = _compiled if is_compiled else partial(partial, _checkpointed)
                layer.forward = wrapped(layer.forward, recompute == "selective")
            elif is_compiled:
                layer.compile(dynamic=False)


def _compiled(forward: Callable[..., Any], is_selective: bool) -> Callable[..., Any]:
    """Compile a layer's forward with its recomputation; see Note [Recomputed and compiled]."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not is_selective:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = partial(create_selective_checkpoint_contexts, list(_KEPT))
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    whole, is_whole = torch.compile(recomputed, dynamic=False, fullgraph=True), True
    in_parts = partial(_checkpointed, torch.compile(forward, dynamic=False), is_selective)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_whole
        if is_whole:
            try:
                return whole(*args, **kwargs)
            except FailOnRecompileLimitHit:  # of another shape than those compiled, which stay
                pass
            except (Unsupported, DynamoUserError):  # before anything has run
                is_whole = False
        return in_parts(*args, **kwargs)

    return run


def _checkpointed(forward: Callable[..., Any], is_selective: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward; see Note [Recomputed once]."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    keeping = _Keeping() if is_selective else None
    run = _LayerRun(forward, args, kwargs, keeping.results if keeping else deque())
    with saved_tensors_hooks(run.save, _LayerRun.unpack), keeping or nullcontext():
        outputs = forward(*args, **kwargs)
    if keeping:
        keeping.copy_results_in((outputs, args, kwargs))  # arguments: some layers write to a dict of them
    return outputs


class _Done(Exception):
    """Everything that a backward needs is recomputed."""


class _Saved:
    """Stands for a tensor that autograd saves, until it is recomputed."""

    __slots__ = ("__weakref__", "form", "run", "tensor")

    def __init__(self, run: _LayerRun, form: tuple[object, ...]) -> None:
        self.run, self.form = run, form
        self.tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Input:
    """A tensor that a layer was called with, without the graph before it."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Input:
        return cls(tensor.detach(), tensor._version, tensor.requires_grad)

    def again(self) -> torch.Tensor:
        if self.tensor._version != self.version:  # the counter is shared with the tensor that was passed
            raise _failed("what it was called with was changed in place afterwards")
        return self.tensor.detach().requires_grad_(self.requires_grad)


class _LayerRun:
    """A forward of a layer, with all that running it again takes."""

    def __init__(self, forward: Callable[..., Any], args: Any, kwargs: Any, results: deque[_Result]) -> None:
        self._forward, self._results = forward, results
        self._inputs = tree_map_only(torch.Tensor, _Input.of, (args, kwargs))
        self._rng, self._device_rng = torch.get_rng_state(), get_device_states(args, kwargs)
        self._saved: list[weakref.ref[_Saved]] = []  # in the order of the forward; the graph keeps them

    def save(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(self, _form(tensor))
        self._saved.append(weakref.ref(saved))
        return saved

    @staticmethod
    def unpack(saved: _Saved) -> torch.Tensor:
        if saved.tensor is None:
            saved.run._recompute()
        assert saved.tensor is not None
        return saved.tensor

    def _recompute(self) -> None:
        args, kwargs = tree_map_only(_Input, _Input.again, self._inputs)
        self._inputs = None
        pending = iter(self._saved)

        @torch.compiler.disable  # type: ignore[untyped-decorator] # called while parts of a layer are compiled
        def fill(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            saved = next(pending)()
            if saved is not None:  # otherwise nothing needs it any more
                if saved.form != _form(tensor):
                    raise _failed("tensors have other shapes")
                saved.tensor = tensor
            if not length_hint(pending):
                raise _Done
            return tensor

        replaying: AbstractContextManager[Any] = _Replaying(self._results) if self._results else nullcontext()
        with (
            torch.random.fork_rng(self._device_rng[0]),
            torch.enable_grad(),
            saved_tensors_hooks(fill, lambda tensor: tensor),
            replaying,
        ):
            torch.set_rng_state(self._rng)
            set_device_states(*self._device_rng)
            try:
                self._forward(*args, **kwargs)
            except _Done:
                self._results.clear()
                return
        raise _failed("it saves fewer tensors")


@dataclass(slots=True)
class _Result:
    """What an operation returned."""

    operation: Any
    leaves: list[Any]
    spec: Any


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keeping(_Watching):  # type: ignore[no-untyped-call]
    """Keep the results of slow operations; see Note [Kept results]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = deque[_Result]()
        self._places: dict[int, list[tuple[list[Any], int]]] = {}  # by memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, name in _written_by(func):
            self.copy_results_in(args[position] if position < len(args) else kwargs.get(name))
        outputs = func(*args, **kwargs)
        if _is_kept(func, args):
            leaves, spec = tree_flatten(tree_map_only(torch.Tensor, torch.Tensor.detach, outputs))
            self.results.append(_Result(func, leaves, spec))
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    self._places.setdefault(_memory_of(leaf), []).append((leaves, index))
        return outputs

    def copy_results_in(self, tree: Any) -> None:
        """Copy the kept results that share memory with these tensors."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                for leaves, index in self._places.pop(_memory_of(tensor), ()):
                    leaves[index] = leaves[index].clone()


class _Replaying(_Watching):  # type: ignore[no-untyped-call]
    """Return kept results instead of running their operations again."""

    def __init__(self, results: deque[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func, args):
            return func(*args, **kwargs or {})
        if not self._results or self._results[0].operation is not func:
            raise _failed("other operations run")
        result = self._results.popleft()
        return tree_unflatten(result.leaves, result.spec)


def _is_kept(operation: Any, args: Any) -> bool:
    """Return whether `selective` keeps the operation's results: not if it draws random numbers, as others then do."""
    if operation not in _KEPT:
        return False
    dropout = _dropout_position(operation)
    return dropout is None or dropout >= len(args) or args[dropout] == 0


@cache
def _dropout_position(operation: Any) -> int | None:
    return next((i for i, argument in enumerate(operation._schema.arguments) if argument.name == "dropout_p"), None)


@cache
def _written_by(operation: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation changes."""
    schema = getattr(operation, "_schema", None)
    arguments: Iterator[tuple[int, Any]] = enumerate(schema.arguments if schema else ())
    return tuple((i, taken.name) for i, taken in arguments if taken.alias_info and taken.alias_info.is_write)


def _memory_of(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype


def _failed(what: str) -> ModelError:
    return ModelError(
        "--ac",
        f"a layer cannot be recomputed: {what}",
        "use --ac none",
        code="model.not-recomputable",
    )
