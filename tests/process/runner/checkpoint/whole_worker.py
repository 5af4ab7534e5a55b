"""A rank that gathers the weights of every case whole, and in slices, and compares them.

usage: whole_worker.py CASES OUT

CASES is as in parallel_worker.py. OUT/NAME-RANK.json has the names of the tensors that this rank writes with --save and
with --publish, and the largest slice in bytes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from runner.bundle.packed import open_packed
from runner.checkpoint import state
from runner.checkpoint.resume import Origin
from runner.checkpoint.state import Held
from runner.config.flags import parse_training
from runner.distributed.fail_together import from_all_ranks
from runner.distributed.world import World, join_world
from runner.setup import begin

CPU = torch.device("cpu")


def main(cases: Path, out: Path) -> None:
    world, sizes, broadcast, gather = World.from_environment(os.environ), [0], dist.broadcast, DTensor.full_tensor
    join_world(CPU, timeout_s=60)

    def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    for case in json.loads(cases.read_text()):
        launched, options = open_packed(Path(case["root"])), parse_training(["--data", "synthetic", *case["args"]])
        ready = begin(launched, (Origin(folder=launched.root),), options, world, CPU)
        expected = tensors_in(ready.whole_weights()[0])
        before, sizes[:] = (state._GATHERED_NBYTES, state._SLICE_NBYTES), [0]
        state._GATHERED_NBYTES, state._SLICE_NBYTES = case["gathered_nbytes"], case["slice_nbytes"]
        dist.broadcast, DTensor.full_tensor = record, refuse_large(gather, case["gathered_nbytes"])  # type: ignore[assignment]
        saved, published = tensors_in(ready.whole_weights()[0]), tensors_in(ready.published_weights())
        dist.broadcast, DTensor.full_tensor = broadcast, gather  # type: ignore[method-assign]
        state._GATHERED_NBYTES, state._SLICE_NBYTES = before
        every = from_all_ranks(expected)
        check_equal(saved, expected)
        check_equal(published, {fqn: whole for of_rank in every for fqn, whole in of_rank.items() if fqn in published})
        found = [sorted(saved), sorted(published), max(sizes)]
        (out / f"{case['name']}-{world.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def refuse_large(gather: Any, most_nbytes: int) -> Any:
    def gathered(tensor: DTensor) -> torch.Tensor:
        assert tensor.numel() * tensor.element_size() <= most_nbytes, "it would be whole on a device"
        whole: torch.Tensor = gather(tensor)
        return whole

    return gathered


def tensors_in(held: Held) -> dict[str, torch.Tensor]:
    pieces = [piece for kinds in held.values() for pieces in kinds.values() for piece in pieces]
    assert all(piece.is_whole for piece in pieces)
    assert len({piece.fqn for piece in pieces}) == len(pieces)
    return {piece.fqn: piece.memory for piece in pieces}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert tensor.dtype == found[fqn].dtype, fqn
        assert tensor.equal(found[fqn]), fqn


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
