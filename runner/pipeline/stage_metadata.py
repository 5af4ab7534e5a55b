"""Stage metadata: structure, shapes and dtypes of what stages send, known on every rank before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from manifests.errors import ManifestError
from runner.models.family import Family, row_inputs_of
from runner.pipeline.chunk import StageChunk, build_chunks, cast, part_of, width_of
from runner.pipeline.stage_io import Form, form_of

Content = Literal["tokens", "hidden", "logits"]


class StageMetadata(Protocol):
    """The forms at the boundaries between stages: boundary s is before stage s, the last one after the last stage."""

    def form(self, boundary: int, batch: int, seq_len: int, *, is_training: bool = True) -> Form:
        """Return the form at a boundary for microbatches of `batch` sequences of `seq_len` tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMetadata:
    """One tensor before each stage and after the last: `contents[s]` enters stage s and leaves stage s - 1.

    Shapes: tokens (B, L), hidden (B, L, D), logits (B, L, V); B = sequences, L = tokens.
    """

    contents: tuple[Content, ...]
    hidden_size: int
    vocab_size: int
    dtypes: tuple[torch.dtype, ...]  # at each boundary, but of tokens

    def form(self, boundary: int, batch: int, seq_len: int, *, is_training: bool = True) -> Form:
        contents = self.contents[boundary]
        if contents == "tokens":
            return form_of(torch.empty(batch, seq_len, dtype=torch.int64, device="meta"))
        width = self.hidden_size if contents == "hidden" else self.vocab_size
        return form_of(
            torch.empty(batch, seq_len, width, dtype=self.dtypes[boundary], device="meta", requires_grad=True)
        )


@dataclass(kw_only=True, slots=True, eq=False)
class TracedMetadata:
    """Nested inputs and outputs, found by running the whole model on the meta device.

    Every rank does so by itself, without memory or communication, and with the same result.
    """

    family: Family
    stage_modules: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    share: Callable[[StageChunk], None] = lambda chunk: None  # shards the matrices of a stage, as ranks have it
    chunks: tuple[StageChunk, ...] = ()  # built at the first run
    _forms: dict[tuple[int, int, bool], tuple[Form, ...]] = field(default_factory=dict)  # of the most recent shapes

    def form(self, boundary: int, batch: int, seq_len: int, *, is_training: bool = True) -> Form:
        is_training |= getattr(self.family, "mtp", None) is None  # otherwise the same
        key = (batch, seq_len, is_training)
        if key not in self._forms:
            if len(self._forms) == _MOST_SHAPES:
                del self._forms[next(iter(self._forms))]
            self._forms[key] = self.run(torch.empty(batch, seq_len, dtype=torch.int64, device="meta"), is_training)
        return self._forms[key][boundary]

    def run(self, crossing: Any, is_training: bool = True) -> tuple[Form, ...]:
        """Return the forms of what enters the first stage, which is given, and of what leaves each."""
        if not self.chunks:
            self.chunks = build_chunks(self.family, self.stage_modules, range(len(self.stage_modules)))
            for chunk in self.chunks:
                cast(chunk, self.dtype)
                self.share(chunk)
                self.family.init_buffers(chunk.body, chunk.device)
        # transformers looks at the values of masks, unless a tensor is fake,
        # or counts the tokens of an expert, unless sizes may be symbols.
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.set_grad_enabled(is_training):
            crossing = torch.empty_like(crossing)
            context = row_inputs_of(self.family, crossing)
            forms = [form_of(crossing)]
            for chunk in self.chunks:
                crossing = chunk(crossing, **context)
                forms.append(form_of(crossing))
        return tuple(forms)


_MOST_SHAPES = 16


def plan_stage_metadata(
    family: Family,
    stage_modules: Sequence[tuple[str, ...]],
    dtype: torch.dtype,
    share: Callable[[StageChunk], None] = lambda chunk: None,
) -> StageMetadata:
    """Return the metadata of a pipeline with these modules on its stages, computing in `dtype`.

    `share` shards the matrices of a stage where ranks have some of its heads, which may be what it outputs.

    Stages of a family that hands on trees may output anything that `runner.pipeline.stage_io` can flatten; its first
    module takes tokens, its last returns logits. Stages of all others output one tensor. Families
    with an attribute `adds_in_float32` may hand on float32: from layers if it is true, from the head where that does.
    """
    listed = [module for modules in stage_modules for module in modules]
    for position, (expected, listed_module) in enumerate(zip(family.modules, listed, strict=False)):
        if expected != listed_module:
            raise ManifestError(
                "stages",
                f"expected {expected} as module {position} of {family.architecture}, found {listed_module}",
                code="manifest.wrong-modules",
            )
    if len(listed) != len(family.modules):
        raise ManifestError(
            "stages",
            f"expected {len(family.modules)} modules of {family.architecture}, found {len(listed)}",
            code="manifest.wrong-modules",
        )
    if family.hands_on_trees:
        return TracedMetadata(family=family, stage_modules=tuple(stage_modules), dtype=dtype, share=share)
    first, last = family.modules[0], family.modules[-1]
    contents: list[Content] = ["tokens"]
    for modules in stage_modules:
        arrived = "hidden" if first in modules else contents[-1]
        contents.append("logits" if last in modules else arrived)
    dtypes = (dtype,) * len(contents)
    if dtype != torch.float32 and hasattr(family, "adds_in_float32"):
        dtypes = _traced_dtypes(family, stage_modules, contents, dtype)
    return TensorMetadata(
        contents=tuple(contents), hidden_size=family.hidden_size, vocab_size=family.vocab_size, dtypes=dtypes
    )


def _traced_dtypes(
    family: Family, stage_modules: Sequence[tuple[str, ...]], contents: Sequence[Content], dtype: torch.dtype
) -> tuple[torch.dtype, ...]:
    """Return the dtype at each boundary, which depends on no length."""
    if getattr(family, "adds_in_float32", False):
        tokens = torch.empty(1, 2, dtype=torch.int64, device="meta")
        forms = TracedMetadata(family=family, stage_modules=tuple(stage_modules), dtype=dtype).run(tokens)
        return tuple(tensor.dtype for form in forms for tensor in form.examples())
    (alone,) = build_chunks(family, (family.modules[-1:],), (0,))
    cast(alone, dtype)
    width = width_of(part_of(alone, family.modules[-1]))
    family.init_buffers(alone.body, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):  # on the CPU, as what models make there is
        for module in alone.body.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
        logits = alone(torch.empty(1, 2, width, dtype=dtype))
    return tuple(logits.dtype if content == "logits" else dtype for content in contents)
