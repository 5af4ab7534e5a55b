"""The self-check of a run's own options: dtypes, activation checkpointing, chunked loss, compilation, split backwards.

# Note [Self-check of options]
Stages that are right by themselves (Note [Self-check]) may be wrong with an option: a layer that changes its input in
place is another layer when it is recomputed. So the tiny model's stages run a second time with all options of the run
at once, and its logits, losses and gradients are compared with the whole model's, tensor by tensor. In float32 they may
differ by 1e-6 of a tensor. In bfloat16 the whole model has the dtypes that it is read with (`from_pretrained` keeps
some tensors in float32), which those of stages must be, too, and they may differ by one rounding; where an option adds
in another order, as chunks of the loss do, also by twice what the whole model's differ from its own in float32. If that
fails, each option is tried by itself, to name it. Compiled code draws other random numbers, and seeding every module
would compile it in other parts than the run's: both sides run in evaluation mode.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from manifests.errors import ModelError, UserError
from runner.config.schema import ComputeOptions
from runner.models.family import Family
from runner.pipeline.chunk import StageChunk, build_chunks, cast
from runner.pipeline.heads import loss_of, loss_with_mtp, output_form
from runner.pipeline.stage_io import StageIO
from runner.pipeline.torch_runtime import backward_input
from runner.proof.stages import (
    ANYWAY,
    Gradients,
    SelfChecked,
    Tensors,
    TinyRun,
    backward,
    batch_of,
    build_filled,
    check_plain,
    describe,
    forward,
    gradients_of,
    run_tiny,
    run_whole,
)
from runner.tensors.local_shard import FLAG_DTYPES
from runner.training.activation_checkpoint import apply_compute_options
from runner.training.mixed_precision import keep_masters

logger = logging.getLogger("runner")

_CHUNK = 5  # tokens of a chunk of the loss: fewer than a tiny microbatch has
_TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # of the norm of a tensor
_COMPILED = 1e-5  # in float32: compiled code adds in another order
_LEAST = 1e-2  # of the largest norm of a gradient: what is smaller may be nothing but rounding
_DIFFER = "do not compute what the whole model does"
_HINTS: Mapping[str, str] = {
    "--compile": "remove it; to compile on a CPU, as this check does, takes a C++ compiler and torch's headers",
    "--dtype": "train with --dtype fp32",
    "--ac": "remove it, or use another mode of --ac",
    "--schedule": "use a schedule that does not split the backward, such as 1F1B or Interleaved1F1B",
}

Outcome = Mapping[str, torch.Tensor]  # in float32: logits and loss of each microbatch, and gradients, by what they are


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The options that change how a run computes losses and gradients; the defaults change nothing."""

    compute: ComputeOptions = field(default_factory=ComputeOptions)
    splitting: str | None = None  # the schedule, if it splits the backward

    def __str__(self) -> str:
        return " ".join(flag for flag, _ in self.combinations())

    def combinations(self) -> Iterator[tuple[str, RunOptions]]:
        """Yield every option that changes something, as written on the command line, and a run with it alone."""
        plain, compute = ComputeOptions(), self.compute
        if compute.dtype != plain.dtype:
            masters = f" --master-dtype {compute.master_dtype}" if compute.has_masters else ""
            casts = replace(plain, dtype=compute.dtype, master_dtype=compute.master_dtype)
            yield f"--dtype {compute.dtype}{masters}", RunOptions(compute=casts)
        if compute.recompute != plain.recompute:
            yield f"--ac {compute.recompute}", RunOptions(compute=replace(plain, recompute=compute.recompute))
        if compute.loss_chunk is not None:
            yield f"--loss-chunk {compute.loss_chunk}", RunOptions(compute=replace(plain, loss_chunk=_CHUNK))
        if compute.is_compiled:
            yield "--compile", RunOptions(compute=replace(plain, is_compiled=True))
        if self.splitting is not None:
            yield f"--schedule {self.splitting}", RunOptions(splitting=self.splitting)


def self_check(family: Family, stage_modules: Sequence[tuple[str, ...]], run: RunOptions) -> None:
    """Check stages of these modules, if the family can be, and log the seconds; see `check_stages`."""
    if isinstance(family, SelfChecked):
        check_s, num_stages = check_stages(family, stage_modules, run), len(stage_modules)
        options = f" with {run}" if str(run) else ""
        logger.info("self-check: a tiny %s is the same whole and in %d %s%s (%.1f s)", family.architecture,
                    num_stages, "stage" if num_stages == 1 else "stages", options, check_s)  # fmt: skip


def check_stages(family: SelfChecked, stage_modules: Sequence[tuple[str, ...]], run: RunOptions | None = None) -> float:
    """Check that stages of these modules compute what the whole model does, plainly and with the options of a run.

    See Note [Self-check] and Note [Self-check of options]. Returns the seconds that it took.
    """
    started_s = time.perf_counter()
    run = run or RunOptions()
    options = tuple(run.combinations())
    with torch.random.fork_rng(devices=()):
        tiny = run_tiny(family)
        check_plain(family, tiny, stage_modules)
        if options and (problem := _difference(tiny, stage_modules, run)):
            where = str(run)
            for flag, alone in options if len(options) > 1 else ():
                if by_itself := _difference(run_tiny(family), stage_modules, alone):
                    where, problem = flag, by_itself
                    break
            raise _failed(family, where, problem)
    return time.perf_counter() - started_s


def _failed(family: SelfChecked, where: str, problem: str) -> ModelError:
    wrongly = ", and wrongly" if problem.startswith(_DIFFER) else ""
    return ModelError(
        where,
        f"stages of {family.architecture} are right without it, and with it {problem}",
        f"{_HINTS.get(where.split()[0], 'remove it')}; {ANYWAY}{wrongly}",
        code="model.self-check-failed",
    )


def _difference(tiny: TinyRun, stage_modules: Sequence[tuple[str, ...]], run: RunOptions) -> str | None:
    """Return what differs most between stages with these options and the whole model, if it is too much.

    The whole model gets the run's dtypes, and keeps them.
    """
    if run.compute.is_compiled:
        for parameter in tiny.whole.body.parameters():
            parameter.grad = None
        results = run_whole(tiny.whole, tiny.family.vocab_size, is_training=False)
        tiny = replace(tiny, results=results)
    exact = rounded = _whole_outcome(tiny)
    if run.compute.dtype != "fp32":
        tiny = _with_casts(tiny, run.compute)
        if problem := _wrong_dtype(tiny):
            return f"{_DIFFER}: {problem}"
        rounded = _whole_outcome(tiny)
    try:
        outcome = _stage_outcome(tiny, stage_modules, run)
    except UserError:
        raise
    except Exception as error:  # of a layer that cannot be recomputed, say
        return f"fail with {describe(error)}"
    is_reordered = run.compute.loss_chunk is not None or run.compute.is_compiled
    tolerance = _COMPILED if run.compute.is_compiled else 0.0
    tolerance = max(tolerance, _TOLERANCES[FLAG_DTYPES[run.compute.dtype]])
    norms = (value.norm().nan_to_num(0.0, 0.0).item() for name, value in rounded.items() if name.startswith(_GRADIENT))
    least = _LEAST * max(norms)
    worst, most = "", 1.0
    for name, value in outcome.items():
        expected = rounded[name]
        is_same = torch.isclose(value, expected, rtol=0, atol=0, equal_nan=True) & ~expected.isfinite()
        value, expected, unrounded = (tensor.masked_fill(is_same, 0) for tensor in (value, expected, exact[name]))
        norm = expected.norm().item()
        allowed = tolerance * max(norm, least)
        if is_reordered:
            allowed += 2 * (expected - unrounded).norm().item()
        ratio = (value - expected).norm().nan_to_num(torch.inf).item() / max(allowed, 1e-30)
        if math.isnan(ratio):
            return f"{_DIFFER}: {name} is not finite in the whole model, and another in stages"
        if ratio > most:
            share, limit = (number / max(norm, 1e-30) for number in (ratio * allowed, allowed))
            worst, most = f"{name} differs by {share:.1e} of its norm, expected at most {limit:.1e}", ratio
    return f"{_DIFFER}: {worst}" if worst else None


_GRADIENT = "the gradient of "


def _whole_outcome(tiny: TinyRun) -> Outcome:
    logits = [result.logits for result in tiny.results]
    losses = [torch.tensor(result.loss) for result in tiny.results]
    gradients = {parameter: parameter.grad for parameter in tiny.whole.body.parameters()}
    return _outcome(tiny, logits, losses, gradients)


def _with_casts(tiny: TinyRun, compute: ComputeOptions) -> TinyRun:
    """Run the whole model with the dtypes of a run."""
    dtype = FLAG_DTYPES[compute.dtype]
    try:
        tiny.whole.cast(dtype)
        if compute.has_masters:
            keep_masters([tiny.whole.body], FLAG_DTYPES[compute.master_dtype])
        results = run_whole(tiny.whole, tiny.family.vocab_size, is_training=not compute.is_compiled)
        return replace(tiny, results=results, dtype=dtype)
    except Exception as error:  # of an operation that takes float32 alone
        raise ModelError(
            f"--dtype {compute.dtype}",
            f"no tiny model of {tiny.family.architecture} could be run in it for the self-check: {describe(error)}",
            f"train with --dtype fp32; {ANYWAY}: compare the first losses with transformers'",
            code="model.no-self-check",
        ) from error


def _wrong_dtype(tiny: TinyRun) -> str | None:
    """Return the first tensor that has another dtype in stages than in the whole model, if there is one."""
    (chunk,) = build_chunks(tiny.family, (tiny.family.modules,), (0,))
    cast(chunk, tiny.dtype)
    computed, expected = _dtypes_of(chunk.body), _dtypes_of(tiny.whole.body)
    for name, dtype in expected.items():
        if computed[name] != dtype:
            return f"{name} is {computed[name]} in a stage, and {dtype} in the whole model".replace("torch.", "")
    return None


def _dtypes_of(body: torch.nn.Module) -> Mapping[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*body.named_parameters(), *body.named_buffers())}


def _stage_outcome(tiny: TinyRun, stage_modules: Sequence[tuple[str, ...]], run: RunOptions) -> Outcome:
    compute = run.compute
    is_training = not compute.is_compiled
    chunks = build_filled(tiny.family, tiny.whole, stage_modules, dtype=tiny.dtype, is_training=is_training)
    if compute.has_masters:
        keep_masters(chunks, FLAG_DTYPES[compute.master_dtype])
    if compute.loss_chunk is not None:
        compute = replace(compute, loss_chunk=min(compute.loss_chunk, _CHUNK))
    apply_compute_options(chunks, len(stage_modules), compute)
    for chunk in chunks:
        assert chunk.io is not None
        outputs = output_form(chunk, chunk.io.outputs)
        chunk.io = StageIO(inputs=chunk.io.inputs, outputs=outputs) if len(chunks) > 1 else None  # nothing is sent
    loss_fn, losses, crossed = loss_of(chunks, loss_with_mtp(chunks)), [], []
    for result in tiny.results:
        crossings = forward(chunks, result.tokens)
        (output,) = crossings[-1][1]
        losses.append(loss_fn(output, batch_of(result.tokens)))
        crossed.append(crossings)
    logits = [] if chunks[-1].head else [crossings[-1][1][0].detach() for crossings in crossed]
    is_split = run.splitting is not None
    deferred = [_backward(chunks, *passed, is_split=is_split) for passed in zip(crossed, losses, strict=True)]
    for backward_weights in (step for steps in deferred for step in steps):
        backward_weights()
    gradients = {parameter: gradient for parameter, _, gradient in gradients_of(tiny.whole, chunks)}
    return _outcome(tiny, logits, [loss.detach() for loss in losses], gradients)


def _backward(
    chunks: Sequence[StageChunk], crossings: Sequence[tuple[Tensors, Tensors]], loss: torch.Tensor, *, is_split: bool
) -> tuple[Callable[[], object], ...]:
    """Run a microbatch's backward through all stages; return the second parts, those of the weights, if it is split.

    The first stage runs all of its backward in the second part, as in torch's schedules.
    """
    second: list[Callable[[], object]] = []
    towards: Gradients = (torch.ones_like(loss),)
    for chunk, (arrived, outputs) in zip(reversed(chunks), reversed(crossings), strict=True):
        outgoing = (loss,) if chunk is chunks[-1] else outputs
        if not is_split:
            towards = backward(arrived, outgoing, towards)
        elif chunk.stage == 0:
            second.append(partial(backward, arrived, outgoing, towards))
        else:
            second.append(backward_input(outgoing, towards, arrived, chunk))
            towards = tuple(tensor.grad for tensor in arrived)
    return tuple(second)


def _outcome(
    tiny: TinyRun,
    logits: Sequence[torch.Tensor],
    losses: Sequence[torch.Tensor],
    gradients: Mapping[torch.nn.Parameter, torch.Tensor | None],
) -> Outcome:
    names = {parameter: name for name, parameter in tiny.whole.body.named_parameters()}
    return {
        **{f"the logits of microbatch {number}": tensor.float() for number, tensor in enumerate(logits)},
        **{f"the loss of microbatch {number}": loss.float() for number, loss in enumerate(losses)},
        **{
            _GRADIENT + names[parameter]: torch.zeros(parameter.shape) if gradient is None else gradient.float().clone()
            for parameter, gradient in gradients.items()
        },
    }
