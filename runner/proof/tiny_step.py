"""A step of a tiny model on the ranks of a world, by what the run is built of, and how far it is from one process.

# Note [Limits of a proof]
In fp64 nothing rounds but sums in another order, see Note [Float32 as float64]: 1e-10 for all. With fp32 copies of fp64
masters each gradient may differ by 4 times what rounding the whole model to fp32 changes it by, at least 1e-5 and at
most 1e-3 (a token between two experts may choose another one, which changes all of it), and so may the norm, by at
least 2e-5: all gradients are clipped by it. The loss may differ by 1e-5. A weight after the step may differ by 1e-3 of
the learning rate: epsilon is a tenth of the largest gradient. Adafactor and others have no such epsilon, and may step
an element of gradient 0, such as of a bias of keys, by what rounding leaves: where it is below 1e-6 of the largest
gradient, or below what it may differ by, a weight may differ by a tenth of the learning rate, and with classes by their
dotted names, which may step by the sign, by twice the rate. Muon's updates, in bfloat16, may differ by half of their
root mean square, and in fp64 by 5e-8: right ones of the catalogue differed by up to 0.33 in fp32, those of halves of a
matrix by 0.67 and more.

# Note [Float32 as float64]
Norms, routers, rotary embeddings and softmaxes cast to float32 whatever the dtype of the model is. In a model of
float64 that rounds: gradients of stages differ from those of the whole model by up to 3e-7 of a tensor, and with tensor
parallelism by 1e-4, which would hide mistakes. So where a tiny model is compared in float64, every float32 that its
code names is float64, as is torch's default dtype. What remains is the order of sums: of 141 architectures of the
catalogue, each in one stage, no gradient differed by more than 2.1e-14 of the largest in its tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import autograd
from torch.overrides import TorchFunctionMode

from manifests.errors import ModelError
from runner.config.parallel_dims import ParallelDims
from runner.config.trained import trained_by
from runner.data.sequences import Batch, rows_of
from runner.data.sequences import Rows as RankRows
from runner.distributed.fail_together import from_all_ranks, from_rank_0
from runner.parallel.mesh import build_mesh
from runner.parallel.parallelize import keep_documents, split_rows
from runner.pipeline.chunk import StageChunk, hf_constants, hf_pieces
from runner.proof.combination import Combination, Dtype
from runner.proof.reference import Balance, Reference, draw_rows, run_reference
from runner.proof.saved import reload_problem
from runner.proof.stages import LENGTH, errors_of_tiny, tiny_of
from runner.tensors.local_shard import FLAG_DTYPES
from runner.training.build import build_engine, build_stages, names_of, ties_of
from runner.training.mixed_precision import master_of, round_masters
from runner.training.step import Engine, eval_counted, train_step


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


_CPU = torch.device("cpu")
_LEAST_TIMEOUT = timedelta(minutes=30)  # others wait while one process takes its step
# What may differ, by the dtype of computation; see Note [Limits of a proof].
LIMITS: Mapping[Dtype, Mapping[str, float]] = {
    "fp64": dict.fromkeys(("loss", "norm", "gradient", "weight", "evaluation loss"), 1e-10),
    "fp32": {"loss": 1e-5, "norm": 2e-5, "gradient": 1e-3, "weight": 1e-3, "evaluation loss": 1e-4},
}
_LEAST_ALLOWED = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Distances:
    """By how much a rank's step differs from that of one process; gradients and weights by Hugging Face FQN."""

    dtype: Dtype
    loss: float
    norm: float
    evaluation: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    allowed: Mapping[str, float]  # of gradients
    allowed_norm: float
    reloaded: str | None = None  # what is wrong with a checkpoint of it
    missing: tuple[str, ...]  # weights that no rank has

    @property
    def largest(self) -> dict[str, float]:
        gradient, weight = (max(distances.values(), default=0.0) for distances in (self.gradients, self.weights))
        return {
            "loss": self.loss,
            "norm": self.norm,
            "gradient": gradient,
            "weight": weight,
            "evaluation loss": self.evaluation,
        }

    @property
    def worst(self) -> str:
        """The name of the gradient that differs most, by its limit."""
        return max(self.gradients, key=lambda fqn: self.gradients[fqn] / self.allowed[fqn], default="")

    @property
    def limits(self) -> dict[str, float]:
        gradient = self.allowed.get(self.worst, LIMITS[self.dtype]["gradient"])
        return {**LIMITS[self.dtype], "norm": self.allowed_norm, "gradient": gradient}

    @property
    def problem(self) -> str | None:
        """What differs by more than it may: first of all gradients, those that differ most."""
        limits, wrong = self.limits, list[str]()
        far = [fqn for fqn, distance in self.gradients.items() if not distance <= self.allowed[fqn]]
        if far:
            far.sort(key=lambda fqn: -self.gradients[fqn])
            shown = ", ".join(f"of {fqn} by {self.gradients[fqn]:.1e}" for fqn in far[:3])
            wrong.append(f"{len(far)} of {len(self.gradients)} gradients differ by more than {limits['gradient']:.0e} "
                         f"of the largest in a tensor: {shown}")  # fmt: skip
        wrong += [f"the {name} differs by {distance:.1e}" for name, distance in self.largest.items()
                  if name != "gradient" and not distance <= limits[name]]  # fmt: skip
        wrong += [f"no rank has {', '.join(self.missing[:3])}"] if self.missing else []
        wrong += [self.reloaded] if self.reloaded else []
        return "; ".join(wrong) or None


def train_tiny(run: Combination, dtype: Dtype, seed: int, rank: int) -> Distances:
    """Take a step of a tiny model on the ranks of this world, which all call this, and compare it with one process."""
    wide = float32_as_float64() if dtype == "fp64" else nullcontext()
    degrees, timeout = run.tiny_degrees, timeout_of(run)
    with torch.random.fork_rng(devices=()), _without_schedules(), wide, _registrations_restored(degrees):
        options = replace(run.options, timeout_s=int(timeout.total_seconds()), balance=run.balance)
        mesh = build_mesh(degrees, rank, _CPU, timeout)
        family = tiny_of(run.family)
        batch = run.batch
        if run.has_documents:
            keep_documents(family, 1)
        form = None if run.loss is None else run.loss.form
        num_rows = batch.global_batch * degrees.data
        is_balanced = run.balance.is_on
        rows = draw_rows(seed, num_rows, family.vocab_size, is_masked=run.has_documents, form=form)
        ties = ties_of(family, run.stages)
        trains = trained_by(options, map(names_of, ties))
        reference: Reference | None = None
        if rank == 0:
            with errors_of_tiny(family):
                dtypes = (FLAG_DTYPES[dtype], FLAG_DTYPES[run.compute(dtype).master_dtype])
                parts = _parts_of(rows.batch(), batch.microbatch, degrees)
                balance = Balance(options=run.balance, parts=parts) if is_balanced else None
                reference = run_reference(seed, family, ties, rows, options.optim, *dtypes, trains, run.loss, balance)
        reference = from_rank_0(reference)
        assert reference is not None
        if degrees.tensor > 1 and not reference.is_training:
            raise ModelError(
                "--tp",
                f"{run.family.architecture} with these fields draws random numbers in training, such as those of "
                "dropout, which tensor-parallel ranks would draw alike for different heads",
                "remove --tp",
                code="model.self-check-failed",
            )
        if degrees.context > 1:
            split_rows(family, mesh, options.degrees.context_method)
        options = replace(options, compute=run.compute(dtype), optim=reference.optim)
        chunks = build_stages(family, run.stages, options.compute, mesh, _CPU, trains)
        for chunk in chunks:
            _fill(chunk, reference)
        batch = replace(batch, seq_len=LENGTH // degrees.context)
        engine = build_engine(run.stages, chunks, options, run.timetable, mesh, batch, run.loss)
        for chunk in chunks:
            chunk.train(reference.is_training)
        rank_rows = rows_of(rows.batch(), RankRows(number=mesh.data_rank, count=degrees.data))
        rank_rows = rank_rows.part(mesh.context_rank, degrees.context)
        report = train_step(engine, rank_rows, 0)
        loss = report.loss + options.loss.mtp_weight * (report.mtp_loss or 0.0)
        if report.experts is not None:
            loss += run.balance.aux_loss * (report.experts.aux_loss or 0.0)
        allowed = {fqn: _allowed(dtype, rounding, _LEAST_ALLOWED) for fqn, rounding in reference.rounding.items()}
        weights = _weight_distances(chunks, reference, allowed)
        gradients = _gradient_distances(engine, chunks, reference)
        evaluation, count = eval_counted(engine, rank_rows)
        evaluation *= rank_rows.num_tokens / count if count else 1.0
        present = {fqn for names in from_all_ranks((*weights,)) for fqn in names}
        distances = Distances(
            dtype=dtype,
            loss=abs(loss - reference.loss) / abs(reference.loss),
            norm=abs(report.grad_norm - reference.norm) / (reference.norm or 1.0),  # 0: no gradient is clipped
            evaluation=abs(evaluation - reference.evaluation) / abs(reference.evaluation),
            gradients=gradients,
            weights=weights,
            allowed=allowed,
            allowed_norm=_allowed(dtype, reference.norm_rounding, LIMITS["fp32"]["norm"]),
            missing=tuple(sorted(reference.gradients.keys() - present)),
        )
    return replace(distances, reloaded=reload_problem(run, chunks, engine, mesh, reference))


def _parts_of(batch: Batch, microbatch: int, degrees: ParallelDims) -> tuple[torch.Tensor, ...]:
    """Return the places of the tokens of each microbatch on each rank that has other tokens than the rest."""
    places = replace(batch, tokens=torch.arange(batch.tokens.numel()).view_as(batch.tokens))
    of_ranks = (
        rows_of(places, RankRows(number=number, count=degrees.data)).part(context, degrees.context).tokens
        for number in range(degrees.data)
        for context in range(degrees.context)
    )
    return tuple(part.flatten() for tokens in of_ranks for part in torch.split(tokens, microbatch))


def _allowed(dtype: Dtype, rounding: float, least: float) -> float:
    """Return by how much a gradient or the norm may differ, see Note [Limits of a proof]."""
    most = LIMITS[dtype]["gradient"]
    return most if dtype == "fp64" else min(max(least, 4 * rounding), most)


@contextmanager
def _without_schedules() -> Iterator[None]:
    """Let torch not print the whole table of a schedule where a stage fails."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _registrations_restored(degrees: ParallelDims) -> AbstractContextManager[None]:
    """Let the stages of the run, which are built already, keep their attention."""
    if degrees.context == 1:
        return nullcontext()
    from runner.models.document_mask import registrations_restored

    return registrations_restored()


def _fill(chunk: StageChunk, reference: Reference) -> None:
    with torch.no_grad():
        for piece in (*hf_pieces(chunk, master_of), *hf_constants(chunk)):
            piece.memory.copy_(reference.weights[piece.fqn][piece.part.index])
        round_masters(chunk.parameters())


def _gradient_distances(engine: Engine, chunks: Sequence[StageChunk], reference: Reference) -> dict[str, float]:
    def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        if not engine.optimizer.steps(parameter):
            return None
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    pieces = [piece for chunk in chunks for piece in hf_pieces(chunk, gradient_of)]
    return farthest((piece.fqn, reference.distance(piece)) for piece in pieces)


def _weight_distances(
    chunks: Sequence[StageChunk], reference: Reference, allowed: Mapping[str, float]
) -> dict[str, float]:
    """Return by how much masters, what stages compute with, and buffers differ after the step."""
    pieces = [piece for chunk in chunks for piece in (*hf_pieces(chunk, master_of), *hf_pieces(chunk))]
    pieces += [piece for chunk in chunks for piece in hf_constants(chunk) if piece.memory.is_floating_point()]
    return farthest((piece.fqn, reference.weight_distance(piece, allowed.get(piece.fqn, 0.0))) for piece in pieces)


def farthest(distances: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the largest distance of each name."""
    by_name: dict[str, float] = {}
    for fqn, distance in distances:
        by_name[fqn] = max(distance, by_name.get(fqn, 0.0))
    return by_name


def timeout_of(run: Combination) -> timedelta:
    return max(timedelta(seconds=run.options.timeout_s), _LEAST_TIMEOUT)
