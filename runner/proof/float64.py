"""Computing in float64 what code computes in float32.

# Note [Float32 as float64]
Norms, routers, rotary embeddings and softmaxes cast to float32 whatever the dtype of the model is. In a model of
float64 that rounds: gradients of stages differ from those of the whole model by up to 3e-7 of a tensor, and with tensor
parallelism by 1e-4, which would hide mistakes. So where a tiny model is compared in float64, every float32 that its
code names is float64, as is torch's default dtype. What remains is the order of sums: of 141 architectures of the
catalogue, each in one stage, no gradient differed by more than 2.1e-14 of the largest in its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import autograd
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **wide)


@contextmanager
def float32_as_float64() -> Iterator[None]:
    """Run a block, on this thread; see Note [Float32 as float64]."""
    engine: Any = autograd
    default, overrides = torch.get_default_dtype(), engine.has_torch_function
    torch.set_default_dtype(torch.float64)
    # A function that is intercepted runs without the mode: the backward is not, as layers are recomputed in it.
    engine.has_torch_function = lambda relevant: False
    try:
        with _Float64():
            yield
    finally:
        engine.has_torch_function = overrides
        torch.set_default_dtype(default)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
