"""One stage's modules, built on the meta device, its parameters by Hugging Face names, and its head in chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manifests.errors import UsageError
from manifests.models import module_of
from manifests.models.mtp import layer_number
from runner.data.rows import IGNORED
from runner.models.family import Family, OnTransformers, check_output
from runner.pipeline.stage_io import StageIO
from runner.tensors.dtensor import local_of, local_regions
from runner.tensors.local_shard import Piece, empty_like, persistent_buffers

# With its Hugging Face FQN; if it consists of several tensors, with the first one's.
NamedParameter = tuple[str, nn.Parameter]


class StageChunk(nn.Module):
    """The modules of one stage; its input is the output of the previous stage (see `runner.pipeline.stage_metadata`).

    A stage without modules returns its input. In a pipeline, `io` describes how input and output are flattened into
    tensors.
    """

    def __init__(self, family: Family, stage: int, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.family, self.stage, self.module_names = family, stage, modules
        self.body = family.build(modules)
        self.device = torch.device("meta")
        self.frozen: frozenset[str] = frozenset()  # names in the body of parameters that the run does not train
        self.dtypes: Mapping[str, torch.dtype] = {}  # of those of them that have others than computation, by name
        self.io: StageIO | None = None
        self.head: ChunkedHead | None = None  # if logits are computed in chunks of tokens
        # Adds gradients after a backward that FSDP does not see: the second part of a split one, or of the head alone.
        self.accumulate: Callable[[], None] = lambda: None

    def forward(self, *arrived: Any, **context: torch.Tensor) -> Any:
        """Run the modules; `context` is what every stage gets of a microbatch, see `runner.pipeline.microbatches`."""
        if self.io is None:
            (given,) = arrived
            return self._run(given, context)
        return self.io.outputs.pack(self._run(self.io.inputs.unpack(arrived), context), arrived)

    def freeze(self, trains: Callable[[str], bool]) -> None:
        """Train only the parameters of which it is true.

        Raises:
            UsageError: it is true of some of the tensors of files that are one parameter.
        """
        for name, parameter in self.body.named_parameters():
            fqns = self._fqns_of(name, parameter)
            trained = [fqn for fqn in fqns if trains(fqn)]
            if not trained:
                self.frozen |= {name}
                parameter.requires_grad_(False)
            elif len(trained) < len(fqns):
                other = next(fqn for fqn in fqns if fqn not in trained)
                problem = f"matches {trained[0]}, and not {other}, which is one parameter with it"
                hint = "match all tensors of a parameter, such as gate_proj and up_proj of all experts of a layer"
                raise UsageError("--train-only", problem, hint, code="options.train-only")

    def frozen_dtypes(self, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Return the dtypes that files have of frozen parameters, by name; `stored` are those of tensors, by FQN."""
        return self._dtypes_in(
            stored, ((name, weight) for name, weight in self.body.named_parameters() if name in self.frozen)
        )

    def buffer_dtypes(self, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Return the dtypes that files have of buffers in bfloat16, as `frozen_dtypes` of parameters.

        Only of transformers' modules: those of others may change theirs in a forward.
        """
        buffers = persistent_buffers(self.body) if isinstance(self.family, OnTransformers) else ()
        return self._dtypes_in(stored, ((name, buffer) for name, buffer in buffers if buffer.dtype == torch.bfloat16))

    def _dtypes_in(
        self, stored: Mapping[str, torch.dtype], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, torch.dtype]:
        dtypes: dict[str, torch.dtype] = {}
        for name, tensor in tensors:
            if of_files := [stored[fqn] for fqn in self._fqns_of(name, tensor) if fqn in stored]:
                dtypes[name] = reduce(torch.promote_types, of_files)
        return dtypes

    def _fqns_of(self, name: str, tensor: torch.Tensor) -> list[str]:
        pieces = self.family.pieces(name, tensor, (0,) * tensor.dim())
        return [piece.fqn for piece in pieces] or [self.family.to_hf(name)]  # what is borrowed is its owner's

    def trained_fqns(self) -> list[str]:
        """Return what files have of the parameters that the run trains and this rank has a part of."""
        frozen = self.frozen_ids()
        return [piece.fqn for piece in hf_pieces(self, lambda weight: None if id(weight) in frozen else weight)]

    @property
    def has_adapters(self) -> bool:
        """Whether the run trains adapters, and checkpoints refer to the rest."""
        return getattr(self.family, "adapters", None) is not None

    def frozen_ids(self) -> set[int]:
        """Return the ids of the parameters that the run does not train."""
        return {id(parameter) for name, parameter in self.body.named_parameters() if name in self.frozen}

    def _run(self, given: Any, context: dict[str, torch.Tensor]) -> Any:
        if not self.module_names:
            return given
        output = self.body(given, **context)
        if not self.family.hands_on_trees:
            check_output(self.body, given, output)
        return output


class ChunkedHead:
    """The head of the last stage, applied in the loss instead of in the forward.

    # Note [Chunked loss]
    The stage outputs its hidden states, and the loss computes the logits of `num_tokens` of them, sums their
    cross-entropy and frees them; the backward recomputes them. That is one extra product with the head's weight for
    every three. `torch.nn.functional.linear_cross_entropy` avoids it by computing gradients in the forward, but then
    keeps one as large as the weight for every microbatch in flight. The gradients of chunks are summed in another
    order than those of a whole microbatch: equal to about 1e-7.

    Shapes: hidden (B, L, D), labels (B, L).
    """

    def __init__(self, module: nn.Module, num_tokens: int) -> None:
        self.module, self.num_tokens = module, num_tokens
        self.width = width_of(module)  # of hidden; less than the layers' width in some models
        self._project: Callable[[torch.Tensor], torch.Tensor] = module.forward
        module.forward = self._forward  # hooks on the module still run

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """Return a microbatch's contribution to the loss; see `runner.pipeline.microbatches.token_loss`."""
        summed: torch.Tensor = self.module(hidden, labels)
        return summed / num_tokens

    def _forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return hidden
        parts = zip(
            torch.split(hidden.flatten(0, 1), self.num_tokens),
            torch.split(labels.flatten(), self.num_tokens),
            strict=True,
        )
        summed = [checkpoint(self._sum, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(summed).sum()

    def _sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(self.module.get_parameter("weight").dtype)  # float32 where the model makes that of logits
        logits = self._project(hidden).float()
        return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


def width_of(head: nn.Module) -> int:
    """Return D, the width of a head's input."""
    weight = head.get_parameter("weight")
    return weight.shape[1]


def build_chunks(
    family: Family, stage_modules: Sequence[tuple[str, ...]], stages: Iterable[int]
) -> tuple[StageChunk, ...]:
    """Build only these stages, on the meta device; `stage_modules` has the modules of every stage."""
    return tuple(StageChunk(family, stage, stage_modules[stage]) for stage in stages)


def float32_names(chunk: StageChunk, dtype: torch.dtype) -> Collection[str]:
    """Return the names in a chunk's body of what a model of this dtype keeps in float32."""
    return chunk.family.float32_names(dtype) if isinstance(chunk.family, OnTransformers) else ()


def cast(chunk: StageChunk, dtype: torch.dtype, compute_dtype: torch.dtype | None = None) -> None:
    """Cast a chunk's parameters, and its buffers to the dtype of computation, except for what stays in float32."""
    compute_dtype = compute_dtype or dtype
    exact = float32_names(chunk, compute_dtype)
    dtypes = {
        id(tensor): torch.float32
        if name in exact
        else chunk.dtypes.get(name, compute_dtype if name in chunk.frozen else dtype)
        for name, tensor in chunk.body.named_parameters()
    }
    for name, buffer in chunk.body.named_buffers():
        dtypes[id(buffer)] = torch.float32 if name in exact else compute_dtype

    def cast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtypes.get(id(tensor), dtype)) if tensor.is_floating_point() else tensor

    chunk._apply(cast_tensor)  # type: ignore[no-untyped-call]


def materialize(
    chunk: StageChunk, *, device: torch.device, dtype: torch.dtype, compute_dtype: torch.dtype | None = None
) -> None:
    """Allocate a chunk on `device`: uninitialized parameters of `dtype`, and computed buffers; see `cast`."""
    cast(chunk, dtype, compute_dtype)
    chunk._apply(lambda tensor: empty_like(tensor, device))  # type: ignore[no-untyped-call] # as to_empty does
    chunk.device = device
    chunk.family.init_buffers(chunk.body, device)


def named_hf_parameters(chunk: StageChunk) -> Iterator[NamedParameter]:
    """Yield each parameter of a chunk with its Hugging Face FQN, numbered as in the whole model."""
    for name, parameter in chunk.body.named_parameters():
        yield chunk.family.to_hf(name), parameter


def hf_pieces(
    chunk: StageChunk, of: Callable[[nn.Parameter], torch.Tensor | None] = lambda weight: weight
) -> Iterator[Piece]:
    """Yield this rank's part of a chunk's parameters, or of what `of` returns for each, by Hugging Face FQN."""
    for name, parameter in chunk.body.named_parameters():
        tensor = of(parameter)
        if tensor is not None:
            yield from pieces_of(chunk, name, tensor)


def pieces_of(chunk: StageChunk, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
    """Yield this rank's part of a tensor that is placed as the parameter `name` of a chunk's body is."""
    if local_of(tensor).numel():
        for memory, offset in local_regions(tensor):
            yield from chunk.family.pieces(name, memory.detach(), offset)


def hf_constants(
    chunk: StageChunk, of: Callable[[torch.Tensor], torch.Tensor] = lambda buffer: buffer
) -> Iterator[Piece]:
    """Yield a chunk's persistent buffers, or what `of` returns for each: they are loaded and saved, but not trained.

    Every rank that shares the stage has all of them.
    """
    for name, buffer in persistent_buffers(chunk.body):
        yield from chunk.family.pieces(name, of(buffer), (0,) * buffer.dim())


def part_of(chunk: StageChunk, module: str) -> nn.Module:
    """Return the submodule of a chunk's body for a Hugging Face module such as `lm_head`."""
    names = [
        name.split(".")[:-1]
        for name, _ in chunk.body.named_parameters()
        if module_of(chunk.family.to_hf(name), chunk.module_names) == module
    ]
    assert names, module
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return chunk.body.get_submodule(".".join(parts[0] for parts in common))


def layers_of(chunk: StageChunk) -> Iterator[tuple[int, nn.Module]]:
    """Yield a chunk's decoder layers, numbered as in the whole model."""
    for module in chunk.module_names:
        if (number := layer_number(chunk.family.architecture, module)) is not None:
            yield number, part_of(chunk, module)
