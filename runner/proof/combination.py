"""The proof of a run's own combination: a tiny model takes a step on the job's ranks, and one process takes it, too.

# Note [Proof of the combination]
Parallelisms that are right by themselves may be wrong together, and most of what is wrong leaves the loss as it is. So
before step 1 a model of the run's own config, with all of its layers and small widths, takes an optimizer step on the
job's own ranks by what the run itself is built of: the same stages, schedule, meshes, activation checkpointing, loss,
data, norm, clipping and optimizer, on CPUs over gloo. Every degree but that of the pipeline is at most 2; other ranks
wait. One process takes the same step with the model's own class, forward and loss, each document by itself. The loss,
the norm, every gradient and every weight must be equal.

Dtypes are one up: bf16 with fp32 masters is fp32 with fp64 masters here, and anything else is fp64, so that what
differs is wrong and not rounded. What transformers computes in float32 anyway differs by up to 4e-5. Rank 0 alone
compares stages in the run's own dtypes, dropout and compiled code, see Note [Self-check of options].

What differs is tried by itself, so that the message can name a flag.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from manifests.errors import ModelError, UserError
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions, ComputeOptions
from runner.config.trained import trained_by
from runner.data.sequences import Rows as RankRows
from runner.data.sequences import rows_of
from runner.distributed.fail_together import from_all_ranks, from_rank_0, raise_on_all_ranks
from runner.distributed.smaller_world import Failure, run_in_world_of
from runner.parallel.mesh import build_mesh
from runner.parallel.rows import keep_documents, split_rows
from runner.pipeline.chunk import StageChunk, hf_constants, hf_pieces
from runner.pipeline.timetable import Timetable
from runner.proof.reference import LENGTH, Reference, draw_rows, run_reference
from runner.proof.stages import ANYWAY, SelfChecked, errors_of_tiny, tiny_of
from runner.tensors.local_shard import FLAG_DTYPES, Piece
from runner.training.build import Stages, build_engine, build_stages
from runner.training.mixed_precision import master_of, round_masters
from runner.training.step import Engine, eval_step, train_step

logger = logging.getLogger("runner")

Dtype = Literal["fp32", "fp64"]  # of a tiny model
_CPU = torch.device("cpu")
_LEAST_TIMEOUT = timedelta(minutes=30)  # others wait while one process takes its step
_MOST_LARGE = 32  # microbatches of a pipeline that have several rows
_CHUNK = 5  # tokens of a chunk of the loss: fewer than a tiny microbatch has
# By the dtype of computation: what may differ. Sums are in another order; some models compute in float32 anyway.
_LIMITS: Mapping[Dtype, Mapping[str, float]] = {
    "fp64": {"loss": 1e-6, "norm": 2e-6, "gradient": 1e-4, "weight": 1e-4, "evaluation loss": 1e-5},
    "fp32": {"loss": 1e-5, "norm": 2e-5, "gradient": 1e-3, "weight": 1e-3, "evaluation loss": 1e-4},
}
OF_COMBINATION = (
    "model.self-check-failed", "model.no-self-check", "model.no-context-parallelism", "model.no-document-mask",
)  # fmt: skip
_MEMORY = "more stages, --dp-shard and --ac save memory, too"
_HINTS: Mapping[str, str] = {
    "config.json": f"change the field, or try --layout pp=1; {ANYWAY}, and wrongly",
    "--cp": f"leave --cp out; {_MEMORY}",
    "--document-mask": "leave it out, or use --no-pack, which has one document in each sequence",
    "--tp": f"remove --tp; {_MEMORY}",
    "--ep": f"remove --ep; {_MEMORY}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What a run is made of, and what is compared of it."""

    family: SelfChecked
    stages: Stages
    timetable: Timetable
    degrees: ParallelDims
    options: TrainOptions
    has_documents: bool = False

    @property
    def tiny_degrees(self) -> ParallelDims:
        full = self.degrees
        few = {dim: min(getattr(full, dim), 2) for dim in ("replicate", "shard", "context", "tensor", "expert")}
        if min(full.expert, full.expert_fsdp) > 1 and few["shard"] * few["context"] * few["tensor"] == 2:
            few["shard"] = min(full.shard, 4)  # experts that several ranks have are sharded, too
        return ParallelDims(pipeline=full.pipeline, **few)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the job that have the tiny model, in order."""
        full, few = self.degrees, self.tiny_degrees
        return tuple(
            (((stage * full.replicate + replica) * full.shard + shard) * full.context + part) * full.tensor + slice_
            for stage in range(full.pipeline)
            for replica in range(few.replicate)
            for shard in range(few.shard)
            for part in range(few.context)
            for slice_ in range(few.tensor)
        )

    @property
    def batch(self) -> BatchOptions:
        """One pipeline's part of a batch, with the rows' whole length."""
        run, most = self.options.batch, self.options.batch.num_microbatches // self.degrees.data
        counts: Sequence[int] = range(min(most, max(2, 2 * self.degrees.pipeline)), most + 1)
        if self.timetable.file is not None:
            counts = (self.timetable.file.num_microbatches,)
        count = next(count for count in counts if self._supports(count))
        microbatch = min(run.microbatch, 2 if count <= _MOST_LARGE else 1)  # one process takes all rows at once
        return BatchOptions(global_batch=count * microbatch, microbatch=microbatch, seq_len=LENGTH)

    def _supports(self, num_microbatches: int) -> bool:
        try:
            self.timetable.check(num_microbatches)
        except UserError:
            return False
        return True

    def compute(self, dtype: Dtype) -> ComputeOptions:
        """Return the run's options with another dtype of computation, and chunks that a tiny row has several of."""
        run = self.options.compute
        chunk = None if run.loss_chunk is None else min(run.loss_chunk, _CHUNK)
        master = "fp64" if run.has_masters else dtype
        dtypes: dict[str, Any] = {"dtype": dtype, "master_dtype": master, "reduce_dtype": master}
        return replace(run, loss_chunk=chunk, is_compiled=False, **dtypes)

    def __str__(self) -> str:
        """Write the features on the command line."""
        return " ".join(flag for flag, _ in self.features())

    def features(self) -> Iterator[tuple[str, Combination]]:
        """Yield each feature beside stages and schedule, as written on the command line, and a run with it alone."""
        run, degrees = self.options.compute, self.degrees
        plain = replace(
            self,
            degrees=ParallelDims(pipeline=degrees.pipeline),
            has_documents=False,
            options=replace(self.options, compute=replace(run, recompute="none", loss_chunk=None)),
        )
        if self.has_documents:
            yield "--document-mask", replace(plain, has_documents=True)
        for flag, dim in (
            ("--cp", "context"),
            ("--tp", "tensor"),
            ("--dp-shard", "shard"),
            ("--dp-replicate", "replicate"),
        ):
            if (degree := getattr(degrees, dim)) > 1:
                tried = getattr(self.tiny_degrees, dim)
                shown = f"{flag} {degree}" + (f" (as {tried})" if tried < degree else "")
                yield shown, replace(plain, degrees=replace(plain.degrees, **{dim: 2}))
        if degrees.expert > 1:
            shown = f"--ep {degrees.expert}" + (" (as 2)" if degrees.expert > 2 else "")
            shard = 4 if degrees.expert_fsdp > 1 and degrees.shard > 2 else 2
            yield shown, replace(plain, degrees=replace(plain.degrees, shard=shard, expert=2))
        if run.recompute != "none":
            alone = replace(plain.options.compute, recompute=run.recompute)
            yield f"--ac {run.recompute}", replace(plain, options=replace(plain.options, compute=alone))
        if run.loss_chunk is not None:
            alone = replace(plain.options.compute, loss_chunk=run.loss_chunk)
            yield f"--loss-chunk {run.loss_chunk}", replace(plain, options=replace(plain.options, compute=alone))
        yield "", plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Distances:
    """By how much a rank's step differs from that of one process; gradients and weights by Hugging Face FQN."""

    loss: float
    norm: float
    evaluation: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    missing: tuple[str, ...] = ()  # weights that no rank has

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

    def problem(self, dtype: Dtype) -> str | None:
        """Say what differs by more than it may: first of all gradients, those that differ most."""
        limits, wrong = _LIMITS[dtype], list[str]()
        gradients = sorted(self.gradients.items(), key=lambda item: -item[1])
        far = [(fqn, distance) for fqn, distance in gradients if not distance <= limits["gradient"]]
        if far:
            shown = ", ".join(f"of {fqn} by {distance:.1e}" for fqn, distance in far[:3])
            wrong.append(f"{len(far)} of {len(gradients)} gradients differ by more than {limits['gradient']:.0e} of "
                         f"the largest in a tensor: {shown}")  # fmt: skip
        wrong += [f"the {name} differs by {distance:.1e}" for name, distance in self.largest.items()
                  if name != "gradient" and not distance <= limits[name]]  # fmt: skip
        wrong += [f"no rank has {', '.join(self.missing[:3])}"] if self.missing else []
        return "; ".join(wrong) or None


def train_tiny(run: Combination, dtype: Dtype, seed: int, rank: int) -> Distances:
    """Take a step of a tiny model on the ranks of this world, which all call this, and compare it with one process."""
    with torch.random.fork_rng(devices=()), _without_schedules():
        degrees, timeout = run.tiny_degrees, _timeout(run)
        options = replace(run.options, timeout_s=int(timeout.total_seconds()))
        mesh = build_mesh(degrees, rank, _CPU, timeout)
        family = tiny_of(run.family)
        batch = run.batch
        if run.has_documents:
            keep_documents(family, 1)
        rows = draw_rows(seed, batch.global_batch * degrees.data, family.vocab_size, is_masked=run.has_documents)
        master = FLAG_DTYPES[run.compute(dtype).master_dtype]
        ties = [tuple(member.fqn for member in group.members) for group in run.stages.ties]
        trains = trained_by(options, ties)
        reference: Reference | None = None
        if rank == 0:
            with errors_of_tiny(family):
                reference = run_reference(seed, family, run.stages.ties, rows, options.optim, master, trains)
        reference = from_rank_0(reference)
        assert reference is not None
        if degrees.tensor > 1 and not reference.is_training:
            raise ModelError(
                "--tp",
                f"{run.family.architecture} with these fields draws random numbers in training, such as those of "
                "dropout, and each tensor-parallel rank would draw its own",
                _HINTS["--tp"],
                code="model.self-check-failed",
            )
        if degrees.context > 1:
            split_rows(family, mesh, options.degrees.context_method)
        options = replace(options, compute=run.compute(dtype), optim=reference.optim)
        chunks = build_stages(family, run.stages, options.compute, mesh, _CPU, trains)
        for chunk in chunks:
            _fill(chunk, reference)
        batch = replace(batch, seq_len=LENGTH // degrees.context)
        engine = build_engine(run.stages, chunks, options, run.timetable, mesh, batch)
        for chunk in chunks:
            chunk.train(reference.is_training)
        rank_rows = rows_of(rows.batch(), RankRows(number=mesh.data_rank, count=degrees.data))
        rank_rows = rank_rows.part(mesh.context_rank, degrees.context)
        report = train_step(engine, rank_rows, 0)
        weights = _weight_distances(chunks, reference)
        gradients = _gradient_distances(engine, chunks, reference)
        evaluation = eval_step(engine, rank_rows)
        present = {fqn for names in from_all_ranks((*weights,)) for fqn in names}
        return Distances(
            loss=abs(report.loss - reference.loss) / abs(reference.loss),
            norm=abs(report.grad_norm - reference.norm) / reference.norm,
            evaluation=abs(evaluation - reference.evaluation) / abs(reference.evaluation),
            gradients=gradients,
            weights=weights,
            missing=tuple(sorted(reference.gradients.keys() - present)),
        )


@contextmanager
def _without_schedules() -> Iterator[None]:
    """Let torch not print the whole table of a schedule where a stage fails."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _fill(chunk: StageChunk, reference: Reference) -> None:
    with torch.no_grad():
        for piece in (*hf_pieces(chunk, master_of), *hf_constants(chunk)):
            piece.memory.copy_(reference.weights[piece.fqn][_region(piece)])
        round_masters(chunk.parameters())


def _gradient_distances(engine: Engine, chunks: Sequence[StageChunk], reference: Reference) -> dict[str, float]:
    def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        if not engine.optimizer.steps(parameter):
            return None
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    pieces = [piece for chunk in chunks for piece in hf_pieces(chunk, gradient_of)]
    return _farthest((piece.fqn, reference.distance(piece.memory, piece.fqn, _region(piece))) for piece in pieces)


def _weight_distances(chunks: Sequence[StageChunk], reference: Reference) -> dict[str, float]:
    """Return by how much masters, and what stages compute with, differ after the step."""
    pieces = [piece for chunk in chunks for piece in (*hf_pieces(chunk, master_of), *hf_pieces(chunk))]
    return _farthest(
        (piece.fqn, reference.weight_distance(piece.memory, piece.fqn, _region(piece))) for piece in pieces
    )


def _farthest(distances: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the largest distance of each name."""
    by_name: dict[str, float] = {}
    for fqn, distance in distances:
        by_name[fqn] = max(distance, by_name.get(fqn, 0.0))
    return by_name


def _region(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.memory.shape, strict=True))


def _timeout(run: Combination) -> timedelta:
    return max(timedelta(seconds=run.options.timeout_s), _LEAST_TIMEOUT)


def compare(run: Combination, seed: int = 0) -> tuple[Distances | None, str | None]:
    """Compare a step on the job's ranks, which all call this, with that of one process; return what is wrong as well.

    Raises:
        UserError: on all ranks alike, where the tiny model or what the run asks of it is refused.
    """
    problem: str | None = None
    dtypes: tuple[Dtype, ...] = ("fp32",) if run.options.compute.has_masters else ("fp64", "fp32")
    for dtype in dtypes:
        usual = timedelta(seconds=run.options.timeout_s)
        outcome = run_in_world_of(run.ranks, _timeout(run), partial(train_tiny, run, dtype, seed), usual=usual)
        with raise_on_all_ranks("self-check"):
            refusal = outcome.refusal if isinstance(outcome, Failure) else None
            # A whole model that computes in float32 anyway may not run in fp64.
            if refusal is not None and (refusal.code != "model.no-self-check" or dtype == dtypes[-1]):
                raise refusal
        outcomes = from_all_ranks(outcome)
        failures = [(rank, result) for rank, result in enumerate(outcomes) if isinstance(result, Failure)]
        if not failures:
            distances = _join([result for result in outcomes if isinstance(result, Distances)])
            return distances, distances.problem(dtype)
        rank, failure = min(failures, key=lambda item: item[1].is_consequence)
        problem = problem or f"rank {rank} fails with {failure.problem} ({failure.place})"
    return None, problem


def _join(ranks: Sequence[Distances]) -> Distances:
    return Distances(
        loss=max(rank.loss for rank in ranks),
        norm=max(rank.norm for rank in ranks),
        evaluation=max(rank.evaluation for rank in ranks),
        gradients=_farthest(item for rank in ranks for item in rank.gradients.items()),
        weights=_farthest(item for rank in ranks for item in rank.weights.items()),
        missing=ranks[0].missing,
    )


def prove(run: Combination) -> dict[str, float]:
    """Check a run's combination; every rank calls this. Returns what differs most, and the seconds that it took.

    Raises:
        ModelError: on all ranks alike, if it trains something else than one process does.
    """
    started_s = time.perf_counter()
    distances, problem = compare(run)
    if problem and distances is not None:
        distances, problem = compare(run, seed=1)  # a token between two experts is not between them again
    if problem:
        where = ""
        for flag, alone in reversed(tuple(run.features())):
            if by_itself := compare(alone)[1]:
                where, problem = flag or "config.json", by_itself
                break
        with raise_on_all_ranks("self-check"):
            if dist.get_rank() == 0:
                raise _failed(run, where or str(run) or "config.json", problem)
    assert distances is not None
    return {**distances.largest, "seconds": time.perf_counter() - started_s}


def _failed(run: Combination, where: str, problem: str) -> ModelError:
    flag = where.split()[0]
    hint = _HINTS.get(flag, f"remove {flag}" if flag.startswith("--") else _HINTS["config.json"])
    problem = (
        f"a tiny {run.family.architecture} with these fields does not train on {len(run.ranks)} ranks with "
        f"{run.timetable.name} as one process trains it: {problem}"
    )
    if flag == "--cp":
        return ModelError(where, problem, hint, code="model.no-context-parallelism")
    if flag == "--document-mask":
        return ModelError(where, problem, hint, code="model.no-document-mask")
    return ModelError(where, problem, hint, code="model.self-check-failed")
