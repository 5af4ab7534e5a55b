"""The proof of a run's own combination: a tiny model takes a step on the job's ranks, and one process takes it, too.

# Note [Proof of the combination]
Parallelisms that are right by themselves may be wrong together, and most of what is wrong leaves the loss as it is. So
before step 1 a model of the run's own config, with all of its layers and small widths, takes an optimizer step on the
job's own ranks by what the run itself is built of: the same stages, schedule, meshes, activation checkpointing, loss,
data, norm, clipping and optimizer, on CPUs over gloo. Every degree but that of the pipeline is at most 2; other ranks
wait. One process takes the same step with the model's own class, forward and loss, each document by itself. The loss,
the norm, every gradient and every weight must be equal.

Dtypes are one up: bf16 with fp32 masters is fp32 with fp64 masters here, and anything else is fp64, so that what
differs is wrong and not rounded, see Note [Limits of a proof]. Rank 0 alone compares stages in the run's own dtypes,
dropout and compiled code, see Note [Self-check of options].

What differs is tried by itself, so that the message can name a flag.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manifests.digest import digest_bytes
from manifests.errors import ModelError
from runner.distributed.fail_together import from_all_ranks, from_rank_0, raise_on_all_ranks
from runner.distributed.smaller_world import Failure, run_in_world_of
from runner.proof.combination import Combination, Dtype
from runner.proof.stages import ANYWAY
from runner.proof.tiny_step import Distances, farthest, timeout_of, train_tiny
from runner.rundir.records import object_or_empty, read_run_record, versions, write_run_record

OF_COMBINATION = (
    "model.self-check-failed", "model.no-self-check", "model.no-context-parallelism", "model.no-document-mask",
)  # fmt: skip
_OF_DTYPE = ("model.no-self-check", "options.loss")
_MEMORY = "more stages, --dp-shard and --ac save memory, too"
_HINTS: Mapping[str, str] = {
    "config.json": f"change the field, or try --layout pp=1; {ANYWAY}, and wrongly",
    "--cp": f"leave --cp out; {_MEMORY}",
    "--document-mask": "leave it out, or use --no-packing, which has one document in each sequence",
    "--tp": f"remove --tp; {_MEMORY}",
    "--ep": f"remove --ep; {_MEMORY}",
}


def compare(run: Combination, seed: int = 0) -> tuple[Distances | None, str | None]:
    """Compare a step on the job's ranks, which all call this, with that of one process; return what is wrong, too."""
    problem: str | None = None
    dtypes: tuple[Dtype, ...] = ("fp32",) if run.options.compute.has_masters else ("fp64", "fp32")
    for dtype in dtypes:
        usual = timedelta(seconds=run.options.timeout_s)
        outcome = run_in_world_of(run.ranks, timeout_of(run), partial(train_tiny, run, dtype, seed), usual=usual)
        with raise_on_all_ranks("self-check"):
            refusal = outcome.refusal if isinstance(outcome, Failure) else None
            # A whole model that computes in float32 anyway, or a loss with tensors of its own, may not run in fp64.
            if refusal is not None and (refusal.code not in _OF_DTYPE or dtype == dtypes[-1]):
                raise refusal
        outcomes = from_all_ranks(outcome)
        failures = [(rank, result) for rank, result in enumerate(outcomes) if isinstance(result, Failure)]
        if not failures:
            distances = _join([result for result in outcomes if isinstance(result, Distances)])
            return distances, distances.problem
        rank, failure = min(failures, key=lambda item: item[1].is_consequence)
        problem = problem or f"rank {rank} fails with {failure.problem} ({failure.place})"
    return None, problem


def _join(ranks: Sequence[Distances]) -> Distances:
    return replace(
        ranks[0],
        loss=max(rank.loss for rank in ranks),
        norm=max(rank.norm for rank in ranks),
        evaluation=max(rank.evaluation for rank in ranks),
        gradients=farthest(item for rank in ranks for item in rank.gradients.items()),
        weights=farthest(item for rank in ranks for item in rank.weights.items()),
    )


def compare_twice(run: Combination) -> tuple[Distances | None, str | None]:
    """Compare as `compare` does, and what differs once more: a token between two experts is not between them again."""
    distances, problem = compare(run)
    return compare(run, seed=1) if problem and distances is not None else (distances, problem)


def prove(run: Combination) -> dict[str, float]:
    """Check a run's combination; every rank calls this. Returns what differs most, and the seconds that it took."""
    started_s = time.perf_counter()
    distances, problem = compare_twice(run)
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


logger = logging.getLogger("runner")

_KEY = "self_check"


def prove_once(run: Combination, config: Mapping[str, Any], log_dir: Path, *, is_kept: bool) -> None:
    """Check a combination, unless this run's record has the proof; every rank calls this.

    `is_kept`: whether its digest says all that it depends on; code of another package may change.
    """
    digest = _digest(run, config)
    record = read_run_record(log_dir) if is_kept and dist.get_rank() == 0 else None
    if from_rank_0(record is not None and object_or_empty(record.get(_KEY)).get("digest") == digest):
        if dist.get_rank() == 0:
            logger.info("self-check: this combination has passed it in an earlier launch of this run")
        return
    proof = prove(run)
    if dist.get_rank():
        return
    logger.info(
        "self-check: a tiny %s trains on %d rank%s with %s%s as one process trains it: loss to %.0e, norm %.0e, "
        "gradients %.0e, weights %.0e (%.1f s)",
        run.family.architecture, len(run.ranks), "s" * (len(run.ranks) > 1), run.timetable.name, f" {run}".rstrip(),
        proof["loss"], proof["norm"], proof["gradient"], proof["weight"], proof["seconds"],
    )  # fmt: skip
    record = read_run_record(log_dir)
    with contextlib.suppress(OSError):  # training does not depend on it
        if record is not None and is_kept:
            write_run_record(log_dir, {**record, _KEY: {"digest": digest, "ranks": len(run.ranks), **proof}})


def _digest(run: Combination, config: Mapping[str, Any]) -> str:
    options = run.options
    facts = (run.stages, run.timetable, run.degrees, run.has_documents, run.batch, options.compute, options.optim,
             options.balance, options.degrees.context_method, options.lora, options.train_only, options.loss,
             options.batch.seq_len, versions(), _code())  # fmt: skip
    return digest_bytes(f"{json.dumps(config, sort_keys=True, default=str)} {facts}".encode())


def _code() -> str:
    """Return the digest of the runner's own code, whose version may stay while it changes."""
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    return digest_bytes(b"".join(path.read_bytes() for path in paths))
