"""A rank that trains every case it is given, and saves its part of what came of it.

usage: parallel_worker.py CASES OUT

CASES is a JSON list of {"name": …, "root": …, "args": […], "origin": …}; the last is null, or names the case from
whose checkpoint this one goes on. OUT/NAME-RANK.pt is what this rank found, OUT/NAME-saved the checkpoint after the
first step, or after number "saves". "rows" and "documents" of a case of tests/matrix.py are what it trains on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from runner import setup
from runner.bundle.packed import open_packed
from runner.checkpoint.data_position import find_data
from runner.checkpoint.resume import Origin, remember
from runner.checkpoint.save import save
from runner.config.flags import parse_training
from runner.distributed.world import World, join_world
from runner.load.load import Reading, plan_reads, read_planned
from runner.pipeline.chunk import hf_constants, hf_pieces
from runner.setup import Ready, begin
from runner.tensors.local_shard import Piece
from runner.training.mixed_precision import master_of
from runner.training.rng import rng_state
from runner.training.step import eval_counted, train_step
from stores.base import InputFile, Range, Reader
from stores.bundles import Bundles
from stores.local import LocalFolder
from tests.fast.runner.tiny import padded_batch
from tests.process.runner.parallel.matrix_reference import matrix_batch
from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE
from tests.process.runner.training_jobs import COMPARED

CPU = torch.device("cpu")
STEPS = 2
LocalPiece = tuple[
    str, tuple[int, ...], tuple[int, ...], torch.Tensor
]  # name, whole shape, offset, and what lies there


@dataclass(frozen=True)
class Counted:
    """A folder on this machine, and every range that was read of its files."""

    folder: LocalFolder
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    kind, location, revision = "local", "", None

    def names(self) -> tuple[str, ...]:
        return self.folder.names()

    def file(self, name: str) -> InputFile:
        return CountedFile(self, name)


@dataclass(frozen=True)
class CountedFile:
    counted: Counted
    name: str

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def nbytes(self) -> int:
        return self.counted.folder.file(self.name).nbytes

    @property
    def fingerprint(self) -> str:
        return self.counted.folder.file(self.name).fingerprint

    def open(self, ranges: Sequence[Range]) -> Reader:
        return CountedReader(self, self.counted.folder.file(self.name).open(ranges))


@dataclass(frozen=True)
class CountedReader:
    file: CountedFile
    reader: Reader

    def read_into(self, part: memoryview, position: int) -> None:
        self.file.counted.ranges.append((self.file.name, position, position + len(part)))
        self.reader.read_into(part, position)

    def close(self) -> None:
        self.reader.close()


def run_case(case: dict[str, Any], out: Path, world: World) -> dict[str, Any]:
    launched = open_packed(Path(case["root"]))
    origin = out / f"{case['origin']}-saved" if case["origin"] else launched.root
    flags = ("--resume", str(origin)) if case["origin"] else ()
    data = () if "--data" in case["args"] else ("--data", "synthetic")
    is_compared = launched.manifest.model.architecture in COMPARED  # by the whole test, with one process
    options = parse_training([*data, *case["args"], *flags, *(("--no-self-check",) if is_compared else ())])
    with pytest.MonkeyPatch.context() as patch:
        if "rows" in case:  # every gradient of these is compared: a proof would take longer than the step
            patch.setattr(setup, "prove_once", lambda *args, **kwargs: None)
        ready = begin(launched, (Origin(folder=origin),), options, world, CPU)
    found: dict[str, Any] = {"loaded": ready.loaded.nbytes, "num_parts": ready.loaded.num_parts, "read": read_of(ready)}
    found["verified"] = ready.loaded.verified_nbytes
    found["stages"] = [chunk.stage for chunk in ready.chunks]
    if case["origin"]:
        found["begun"] = state_of(ready)
    engine, schedule = ready.engine, ready.engine.schedule
    reports = []
    first = ready.training.step if ready.training else 0
    for step in range(first, case.get("until", STEPS)):
        whole = matrix_batch(step, case) if "rows" in case else padded_batch(step, vocab_size=VOCAB_SIZE)
        is_needed = schedule.has_first or schedule.has_last or whole.positions is not None
        batch = ready.rows_of(whole) if is_needed else None
        loss = eval_counted(engine, batch)[0] if "rows" not in case else None
        reports.append((train_step(engine, batch, step), loss))
        if step == 0:
            found["gradients"] = local_pieces(ready, lambda weight: weight.grad)
        if step + 1 == case.get("saves", 1):
            found["saved"] = state_of(ready)
            save_state(ready, out / f"{case['name']}-saved", world.rank, step + 1)
    found["experts"] = [report.experts for report, _ in reports]
    found["reports"] = [(report.loss, report.grad_norm, report.num_tokens, loss) for report, loss in reports]
    found["weights"] = local_pieces(ready, master_of)
    return found


def state_of(ready: Ready) -> list[LocalPiece]:
    """Give what this rank writes of the weights and moments."""
    kinds = (kind for kinds in ready.held_state().values() for kind in kinds.items())
    return [(f"{holds} {piece.fqn}", *rest_of(piece)) for holds, pieces in kinds for piece in pieces]


def save_state(ready: Ready, folder: Path, rank: int, step: int) -> None:
    """Save what there is after a step."""
    data = find_data(ready.options, None, None).position
    state = remember(ready.options, ready.launched.shape, step=step, num_tokens=1, data=data)
    save(ready.held_state(), ready.save_context, folder, replace(state, random=(rng_state(rank, CPU),)))


def local_pieces(ready: Ready, of: Any) -> list[LocalPiece]:
    pieces = (piece for chunk in ready.chunks for piece in hf_pieces(chunk, of))
    return [(piece.fqn, *rest_of(piece)) for piece in pieces]


def rest_of(piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    return piece.shape, piece.offset, piece.memory.clone()


def read_of(ready: Ready) -> list[tuple[str, int, int]]:
    """Return the ranges that this rank reads into its weights; those that it reads to verify parts come on top."""
    counted = Counted(LocalFolder(ready.origin.root))
    pieces = [piece for chunk in ready.chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))]
    read_planned(plan_reads(pieces, Bundles(ready.origin.manifest, counted), ready.origin.shape), Reading())
    return counted.ranges


def main(cases: Path, out: Path) -> None:
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    for case in json.loads(cases.read_text()):
        torch.save(run_case(case, out, world), out / f"{case['name']}-{world.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
