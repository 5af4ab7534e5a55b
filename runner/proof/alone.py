"""The proof of a run's combination on this machine alone, without its weights, data and ranks, as `runner prove` does.

# Note [Ranks of a proof]
Sixteen processes that each import torch take minutes on a laptop. So one process imports what ranks need and is forked:
multiprocessing's fork server, which starts no thread before. Ranks meet over a file, on gloo.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, parent_process, util
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from manifests.command.console import table
from manifests.command.interpreter import safe_environment
from manifests.errors import RankError, UserError
from runner.bundle.packed import Packed
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims
from runner.models import family_of
from runner.pipeline.losses import loss_of_run
from runner.preflight.combinations import timetable_of
from runner.proof.combination import Combination, describe_degrees, subsets_of
from runner.proof.proving import compare_twice
from runner.proof.stages import SelfChecked
from runner.proof.tiny_step import Distances
from runner.training.algorithms import plan_groups
from runner.training.build import Stages, apply_model_options
from stores.folders.publish import TMPDIR, temporary_folder, writing_to

_PRELOADED = ("runner.proof.alone", "runner.models.generic")
_Outcome = tuple[Distances | None, str | None, float]  # what a rank found: what differs, and seconds
_PATIENCE_S = 5.0  # for the others, once a rank has ended
_LONGEST_TMPDIR = 60  # characters: with the fork server's socket in it, a path may have 107


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A run to check: its packed model, options and degrees."""

    launched: Packed
    options: TrainOptions
    degrees: ParallelDims


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What was tried of a combination, and how far it was from one process; None: a rank failed."""

    run: Combination
    distances: Distances | None
    problem: str | None
    seconds: float


def combination_of(request: Request) -> Combination:
    """Return the combination of a run."""
    launched, degrees = request.launched, request.degrees
    options, _ = plan_groups(request.options, launched.shape, None, launched.where)
    family = family_of(launched, options.batch.seq_len)
    apply_model_options(family, options)
    assert isinstance(family, SelfChecked), family.architecture
    return Combination(
        family=family,
        stages=Stages.of(launched),
        timetable=timetable_of(launched.manifest, options, degrees),
        degrees=degrees,
        options=options,
        has_documents=options.data.document_mask,
        loss=loss_of_run(options, is_split=degrees.context > 1),
    )


def try_here(request: Request) -> list[Tried]:
    """Try a combination on ranks of this machine."""
    subsets = subsets_of(combination_of(request))
    num_ranks = max(subset.degrees.world_size for subset in subsets)
    context = _server_without_gpus()
    receiver, sender = context.Pipe(duplex=False)
    with temporary_folder("runner-") as folder:
        ranks = [
            context.Process(target=_run_rank, args=(request, rank, num_ranks, str(folder), sender), daemon=True)
            for rank in range(num_ranks)
        ]
        try:
            for rank in ranks:
                rank.start()
            sender.close()
            outcome = _receive(receiver, ranks)
        finally:
            for rank in ranks:
                with suppress(ValueError):
                    rank.kill()
                    rank.join()
    if isinstance(outcome, UserError):
        raise outcome
    return [
        Tried(run=run, distances=distances, problem=problem, seconds=seconds)
        for run, (distances, problem, seconds) in zip(subsets, outcome, strict=True)
    ]


def _server_without_gpus() -> Any:
    """Return the context of a fork server that sees no GPU, and no code of the working folder.

    Imports ask for one, and a process that is forked after that may not use it: not even torch's AdamW could be built.
    """
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    before, folder = dict(os.environ), tempfile.tempdir
    with writing_to(*TMPDIR):
        is_long = len(tempfile.gettempdir()) > _LONGEST_TMPDIR
    os.environ |= {**safe_environment(), "CUDA_VISIBLE_DEVICES": ""}
    if is_long:
        tempfile.tempdir = "/tmp"
    hint = f"set TMPDIR to a path of at most {_LONGEST_TMPDIR} characters that this user can write"
    try:
        with writing_to("TMPDIR", hint):
            util.get_temp_dir()  # where its socket is
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
        tempfile.tempdir = folder
    return context


def _receive(receiver: Any, ranks: Sequence[BaseProcess]) -> Any:
    """Return what rank 0 sends, or raise what ended a rank."""
    running = list(ranks)
    while running:
        ready = connection.wait([receiver, *(rank.sentinel for rank in running)])
        if receiver in ready:
            with suppress(EOFError):
                return receiver.recv()
        failed = [rank for rank in running if rank.exitcode]
        if failed:
            if receiver.poll(_PATIENCE_S):
                with suppress(EOFError):
                    return receiver.recv()
            break
        running = [rank for rank in running if rank.exitcode is None]
    number, code = next(((number, rank.exitcode) for number, rank in enumerate(ranks) if rank.exitcode), (0, 0))
    ended = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
    hint = "each rank needs about 300 MiB: use a machine with more memory" if code == -signal.SIGKILL else ""
    raise RankError(f"rank {number}", f"{ended} while the combination was tried", hint, code="rank.lost")


def _run_rank(request: Request, rank: int, num_ranks: int, folder: str, sender: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its ranks
    threading.Thread(target=_end_with_command, daemon=True).start()
    warnings.simplefilter("ignore")
    os.dup2(2, 1)  # gloo prints that it is connected
    torch.set_num_threads(1)
    timeout = timedelta(seconds=request.options.timeout_s)
    meeting = f"file://{folder}/ranks"
    outcome: list[_Outcome] | UserError
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks, timeout=timeout)
        outcome = [_try(subset) for subset in subsets_of(combination_of(request))]
    except UserError as error:
        outcome = error.changed()
    except Exception:
        traceback.print_exc()
        os._exit(1)
    if rank == 0:
        sender.send(outcome)
    os._exit(0)  # connections of others may be closed already


def _end_with_command() -> None:
    """End this rank when the command has ended, as when it was killed."""
    command = parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _try(run: Combination) -> _Outcome:
    started_s = time.perf_counter()
    return *compare_twice(run), time.perf_counter() - started_s


_COLUMNS = ("loss", "norm", "gradient", "weight", "evaluation loss")
_HEAD = ("tried", "ranks", "stages", *_COLUMNS, "seconds")


def as_json(request: Request, tried: Sequence[Tried]) -> dict[str, Any]:
    return {
        "architecture": request.launched.shape.architecture,
        "degrees": asdict(request.degrees),
        "tried": [
            {
                "degrees": asdict(part.run.degrees),
                "stages": part.run.stages.placement.num_stages,
                "schedule": part.run.timetable.name,
                "options": _options(part.run),
                "problem": part.problem,
                "seconds": part.seconds,
                **({} if (distances := part.distances) is None else {
                    "dtype": distances.dtype,
                    "differences": distances.largest,
                    "limits": distances.limits,
                    "worst_gradient": distances.worst,
                }),
            }
            for part in tried
        ],
    }  # fmt: skip


def table_of(request: Request, tried: Sequence[Tried]) -> str:
    """Write a row for each part of the combination, and what differs."""
    rows = [_row(request, part) for part in tried]
    limits = next((part.distances.limits for part in tried if part.distances is not None), None)
    if limits is not None:
        rows.append(("at most", "", "", *(f"{limits[name]:.0e}" for name in _COLUMNS), ""))
    run = tried[0].run
    flags = f" {options}" if (options := _options(run)) else ""
    first = f"a tiny {run.family.architecture}, {run.timetable.name}{flags}: differences from one process"
    problems = [
        f"{describe_degrees(part.run.degrees, request.degrees)}: {part.problem}" for part in tried if part.problem
    ]
    return "\n".join((first, table(_HEAD, rows, left_columns=frozenset(_HEAD[:1])), *problems))


def _row(request: Request, part: Tried) -> tuple[str, ...]:
    degrees, num_stages = part.run.degrees, part.run.stages.placement.num_stages
    differences = [f"{part.distances.largest[name]:.0e}" if part.distances else "-" for name in _COLUMNS]
    shown = describe_degrees(degrees, request.degrees)
    return shown, str(degrees.world_size), str(num_stages), *differences, f"{part.seconds:.1f}"


def _options(run: Combination) -> str:
    """Write the features beside degrees on the command line."""
    compute = run.options.compute
    dtypes = f"--dtype {compute.dtype}" + (f" --master-dtype {compute.master_dtype}" if compute.has_masters else "")
    others = str(replace(run, degrees=ParallelDims(pipeline=run.degrees.pipeline)))
    return f"{dtypes} {others}".strip()
