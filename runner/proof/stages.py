"""The self-check: a tiny model of the same config, whole and in the launched stages, must compute the same.

# Note [Self-check]
Families that cut a model by the names of its layers have been compared with the whole model for some values of its
config's fields, or for none. A field may make layers read what other layers leave, add something between them, or add
to the loss. So before the first step a model of the run's own config, with all of its layers and small widths, is run
on the CPU by its own forward and loss, and by the chunks that the run's stages would be, in training mode. Logits must
be bitwise equal, losses and gradients equal to 1e-6 of the largest in a tensor. Two microbatches are in flight, as a
pipeline has them. Random numbers, such as those of dropout, are seeded by name in front of every module. The loss in
evaluation mode, which is all that `runner eval` computes, is compared, too: a model may compute something else there.
`runner.proof.options` then runs them with the options of the run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from manifests.errors import ModelError, UsageError, UserError
from runner.data.rows import IGNORED
from runner.data.sequences import Batch
from runner.models.family import BORROWED, Family, FamilyOutputError, row_inputs_of
from runner.pipeline.chunk import StageChunk, build_chunks, cast, hf_constants, hf_pieces, materialize
from runner.pipeline.heads import loss_of, loss_with_mtp
from runner.pipeline.losses import Loss
from runner.pipeline.microbatches import evaluating
from runner.pipeline.stage_io import StageIO
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.tensors.dtensor import local_of, whole_of

Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]

_CPU = torch.device("cpu")
LENGTH = 12  # of a row, in tokens: longer than the windows, chunks and blocks of a tiny config
_NUM_MICROBATCHES = 2
_TOLERANCE = 1e-6
_MOST_PARAMETERS = 50_000_000
ANYWAY = "--no-self-check trains it nevertheless"


class WholeModel(Protocol):
    """A whole model in float32 on the CPU, with weights.

    Parameters of its `body`, which may be itself, have the names that `Family.build` gives. Called with tokens (B, L),
    it returns logits (B, L, V) and the loss of predicting each token, or each of `labels` that is not IGNORED, from the
    tokens before it.
    """

    @property
    def body(self) -> nn.Module: ...
    def __call__(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def in_files(self) -> Mapping[str, torch.Tensor]:
        """Return its tensors as files have them."""

    def cast(self, dtype: torch.dtype) -> None:
        """Cast its tensors to the dtypes that they have in a model of this one, which need not all be the same."""


@runtime_checkable
class SelfChecked(Family, Protocol):
    """A family whose stages compute bitwise what a whole model does that it is not made of."""

    def tiny(self) -> SelfChecked:
        """Return the family of a tiny model of the same config: the same modules, with small widths."""

    def num_parameters(self) -> int: ...
    def whole(self) -> Any:
        """Return the whole model with random weights: a `WholeModel` and an `nn.Module`.

        Its parameters may have names of their own: what is compared has those of files.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What differs most between stages and the whole model; losses and gradients relative to a tensor's largest."""

    logits: float
    loss: float
    gradients: float

    @property
    def is_equal(self) -> bool:
        return self.logits == 0 and self.loss <= _TOLERANCE and self.gradients <= _TOLERANCE

    @property
    def largest(self) -> float:
        return max(self.logits, self.loss, self.gradients)

    def __str__(self) -> str:
        return f"logits differ by {self.logits:.1e}, losses by {self.loss:.1e}, gradients by {self.gradients:.1e}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholeResult:
    """Of a microbatch by the whole model; `towards` is the gradient of its loss by its logits."""

    tokens: torch.Tensor
    logits: torch.Tensor
    loss: float
    towards: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TinyRun:
    """A tiny model of a config, which has run as a whole, forward and backward."""

    family: SelfChecked
    whole: Any  # a `WholeModel` and an `nn.Module`
    results: tuple[WholeResult, ...]
    dtype: torch.dtype


def check_plain(family: SelfChecked, tiny: TinyRun, stage_modules: Sequence[tuple[str, ...]]) -> None:
    """Check that stages of these modules compute in float32 what the whole model does; see Note [Self-check]."""
    try:
        chunks = build_filled(tiny.family, tiny.whole, stage_modules)
        compared = compare_with_whole(tiny.whole, tiny.results, chunks)
    except UserError:
        raise
    except Exception as error:  # of a forward that gets in a stage what it does not expect
        raise _failed(family, f"a stage fails with {describe(error)}") from error
    if not compared.is_equal:
        raise _failed(family, str(compared))


def gradients_of(
    whole: WholeModel, chunks: Sequence[StageChunk]
) -> Iterator[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
    """Yield each parameter of the whole model with its gradient there, and its gradient in the stages.

    A tied parameter has the sum of what its members in stages have.
    """
    in_stages: dict[str, list[nn.Parameter]] = {}
    for name, parameter in (named for chunk in chunks for named in chunk.body.named_parameters()):
        name = name.replace(BORROWED, "model.", 1) if name.startswith(BORROWED) else name
        in_stages.setdefault(name, []).append(parameter)
    members: dict[nn.Parameter, list[str]] = {}
    for name, parameter in whole.body.named_parameters(remove_duplicate=False):
        members.setdefault(parameter, []).append(name)
    for parameter, names in members.items():
        of_members = (_gradient(member) for name in names for member in in_stages[name])
        yield parameter, _gradient(parameter), sum(of_members, torch.zeros(()))


def run_tiny(family: SelfChecked, dtype: torch.dtype = torch.float32) -> TinyRun:
    """Build a tiny model of a family's config, and run all of it."""
    with errors_of_tiny(family):
        tiny = tiny_of(family)
        whole = tiny.whole()
        for parameter in whole.body.parameters():
            parameter.data = parameter.data.to(dtype)
        results = run_whole(whole, tiny.vocab_size)
        if not all(_gradient(parameter).isfinite().all() for parameter in whole.body.parameters()):
            problem = f"{family.architecture} with these fields computes gradients that are not finite, as a whole"
            hint = f"check its numbers, such as rope_theta; {ANYWAY}"
            raise ModelError("config.json", problem, hint, code="model.no-self-check")
        return TinyRun(family=tiny, whole=whole, results=results, dtype=dtype)


def tiny_of(family: SelfChecked) -> SelfChecked:
    """Return the family of a tiny model of a family's config."""
    with errors_of_tiny(family):
        tiny = family.tiny()
        if tiny.modules != family.modules:
            raise ValueError(f"it has {len(tiny.modules)} modules, not {len(family.modules)}")
        if tiny.num_parameters() > _MOST_PARAMETERS:
            raise ValueError(f"it has {tiny.num_parameters():,} parameters")
        return tiny


@contextmanager
def errors_of_tiny(family: Family) -> Iterator[None]:
    """Run a block that builds or runs a tiny model of a family's config as a whole."""
    try:
        yield
    except (FamilyOutputError, ModelError, UsageError):
        raise
    except Exception as error:  # whatever a model raises of sizes that it was not made for
        raise ModelError(
            "config.json",
            f"no tiny model of {family.architecture} could be run for the self-check: {describe(error)}",
            f"{ANYWAY}: compare the first losses with transformers'",
            code="model.no-self-check",
        ) from error


def run_loss(loss: Loss, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean loss of a batch; what the code of another package raises is an error of --loss."""
    try:
        summed = loss(logits, batch.labels, num_tokens=1, **batch.fields)
    except UserError:
        raise
    except Exception as error:
        if not loss.is_own:
            raise
        problem = f"fails in the self-check, which runs on CPUs with random tokens and fields: {describe(error)}"
        raise _wrong_loss(problem) from error
    return summed / loss.take_count()


def check_gradients(loss: Loss | None, gradients: Iterable[torch.Tensor]) -> None:
    """Check that a loss of another package has gradients by which a step can be compared."""
    if loss is None or not loss.is_own:
        return
    if not 0 < (largest := max(map(largest_of, gradients))) < math.inf:
        kind = "gradients that are not finite" if largest else "no gradients but 0"
        raise _wrong_loss(f"has {kind} in the self-check; it may count none of the random tokens and fields there")


def _wrong_loss(problem: str) -> UsageError:
    hint = "fix it (docs/own-data.md); if it counts none of these tokens, or needs a GPU: --no-self-check and no --cp"
    return UsageError("--loss", problem, hint, code="options.loss")


def _failed(family: SelfChecked, what: str) -> ModelError:
    return ModelError(
        "config.json",
        f"stages of {family.architecture} with these fields do not compute what the whole model does: {what}",
        f"change the field, or try --layout pp=1; {ANYWAY}, and wrongly",
        code="model.self-check-failed",
    )


def describe(error: Exception) -> str:
    """Return the message of a user's error, or the type and the message of another, in one line."""
    return (
        str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    )


def run_whole(whole: Any, vocab_size: int, *, is_training: bool = True) -> tuple[WholeResult, ...]:
    """Run a whole model forward and backward."""
    _seed_by_name(whole.body.train(is_training))
    drawn = torch.Generator().manual_seed(0)
    batches = [torch.randint(vocab_size, (1, LENGTH), generator=drawn) for _ in range(_NUM_MICROBATCHES)]
    outputs = [(tokens, *whole(tokens)) for tokens in batches]
    results = []
    for tokens, logits, loss in outputs:
        logits.retain_grad()
        loss.backward()
        if logits.grad is None:
            raise ValueError("its loss does not depend on its logits")
        results.append(WholeResult(tokens=tokens, logits=logits.detach(), loss=loss.item(), towards=logits.grad))
    return tuple(results)


def compare_with_whole(whole: Any, results: Sequence[WholeResult], chunks: Sequence[StageChunk]) -> Compared:
    """Run all stages, which have the weights of the whole model, and compare them with it."""
    crossed = [forward(chunks, result.tokens) for result in results]
    for result, crossings in zip(results, crossed, strict=True):
        towards: Gradients = (result.towards,)
        for arrived, outgoing in reversed(crossings):
            towards = backward(arrived, outgoing, towards)
    logits = [crossings[-1][1][0].detach() for crossings in crossed]
    losses = [loss_difference(chunks, *pair) for pair in zip(logits, results, strict=True)]
    return Compared(
        logits=max(largest_of(computed - result.logits) for computed, result in zip(logits, results, strict=True)),
        loss=max(*losses, evaluation_difference(whole, chunks, results[0].tokens)),
        gradients=max(difference(computed, expected) for _, expected, computed in gradients_of(whole, chunks)),
    )


def evaluation_difference(whole: Any, chunks: Sequence[StageChunk], tokens: torch.Tensor) -> float:
    """Return by how much the loss of stages, relative to the whole model's, differs in evaluation mode."""
    crossing: Any = tokens
    whole.body.eval()
    with evaluating(chunks):
        _, expected = whole(tokens)
        for chunk in chunks:
            chunk.io = None  # nothing is sent
            crossing = chunk(crossing, **row_inputs_of(chunk.family, tokens))
        loss = loss_of(chunks)(crossing, batch_of(tokens))
    return largest_of((loss - expected) / expected)


def build_filled(
    family: SelfChecked,
    whole: WholeModel,
    stage_modules: Sequence[tuple[str, ...]],
    share: Callable[[StageChunk], None] = lambda chunk: None,
    *,
    dtype: torch.dtype | None = None,
    is_training: bool = True,
) -> tuple[StageChunk, ...]:
    """Build all stages with the weights of the whole model; `share` shares each with other ranks.

    They compute in `dtype`; by default, in that of all parameters of the whole model.
    """
    chunks = build_chunks(family, stage_modules, range(len(stage_modules)))
    files = whole.in_files()
    dtype = dtype or next(whole.body.parameters()).dtype
    metadata = plan_stage_metadata(family, stage_modules, dtype)
    for chunk in chunks:
        cast(chunk, dtype)
        share(chunk)
        materialize(chunk, device=_CPU, dtype=dtype)
        before, after = (metadata.form(chunk.stage + end, 1, LENGTH) for end in (0, 1))
        chunk.io = StageIO(inputs=before, outputs=after)
        with torch.no_grad():
            for parameter in chunk.parameters():
                local_of(parameter).fill_(torch.nan)  # shows where nothing is loaded
            for piece in (*hf_pieces(chunk), *hf_constants(chunk)):
                piece.memory.copy_(files[piece.fqn][piece.part.index])
            for name, parameter in chunk.body.named_parameters():
                if name.startswith(BORROWED):
                    parameter.copy_(files[family.to_hf(name)])
        chunk.body.train(is_training)
        if is_training:
            _seed_by_name(chunk.body)
    return chunks


def forward(chunks: Sequence[StageChunk], tokens: torch.Tensor) -> list[tuple[Tensors, Tensors]]:
    """Return what arrives at each stage, and what leaves it."""
    crossings: list[tuple[Tensors, Tensors]] = []
    outgoing: Tensors = (tokens,)
    context = row_inputs_of(chunks[0].family, tokens)
    for chunk in chunks:
        arrived = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outgoing)
        output = chunk(*arrived, **context)
        outgoing = output if isinstance(output, tuple) else (output,)
        crossings.append((arrived, outgoing))
    return crossings


def backward(arrived: Tensors, outgoing: Tensors, towards: Gradients) -> Gradients:
    """Return the gradients of what arrived at a stage, by those of what left it; None where nothing depends on it."""
    pairs = [(tensor, gradient) for tensor, gradient in zip(outgoing, towards, strict=True) if gradient is not None]
    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    return tuple(tensor.grad for tensor in arrived)


def _seed_by_name(model: nn.Module) -> None:
    """Let a module draw the same random numbers in a stage as in the whole model."""

    def seed(_: nn.Module, __: Any, *, name: str) -> None:
        torch.default_generator.manual_seed(zlib.crc32(name.encode()))

    for name, part in model.named_modules():
        part.register_forward_pre_hook(partial(seed, name=name))


def batch_of(tokens: torch.Tensor) -> Batch:
    """Return a batch of one text, in which each token predicts the next."""
    labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    return Batch(tokens=tokens, labels=labels, num_tokens=labels.shape[1] - 1)


def loss_difference(chunks: Sequence[StageChunk], logits: torch.Tensor, expected: WholeResult) -> float:
    loss = loss_of(chunks, loss_with_mtp(chunks))(logits, batch_of(expected.tokens)).item()
    return abs(loss - expected.loss) / abs(expected.loss)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape) if parameter.grad is None else whole_of(parameter.grad)


def difference(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return largest_of((computed - expected) / expected.abs().max().clamp_min(1e-30))


def largest_of(difference: torch.Tensor) -> float:
    """Return the largest magnitude; infinity where there is no number."""
    return float(difference.abs().nan_to_num(torch.inf).max()) if difference.numel() else 0.0


def rms_of(difference: torch.Tensor) -> float:
    """Return the root mean square; infinity where there is no number."""
    return float(difference.nan_to_num(torch.inf).square().mean().sqrt()) if difference.numel() else 0.0
