"""Parallel degrees: from flags and the number of ranks to pipelines, replicas, shards and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from manifests.errors import UserError
from runner.config.parallel_dims import DegreeOptions, ParallelDims
from runner.parallel.mesh import Mesh


@pytest.mark.parametrize(
    ("asked", "world_size", "expected"),
    [
        (DegreeOptions(), 4, ParallelDims(pipeline=4)),
        (DegreeOptions(), 12, ParallelDims(pipeline=4, replicate=3)),
        (DegreeOptions(shard=None), 12, ParallelDims(pipeline=4, shard=3)),
        (DegreeOptions(shard=2), 16, ParallelDims(pipeline=4, replicate=2, shard=2)),
        (DegreeOptions(replicate=2, shard=None), 16, ParallelDims(pipeline=4, replicate=2, shard=2)),
        (DegreeOptions(tensor=2), 8, ParallelDims(pipeline=4, tensor=2)),
        (DegreeOptions(shard=2, expert=2), 8, ParallelDims(pipeline=4, shard=2, expert=2)),
        (
            DegreeOptions(shard=2, tensor=2, expert=4),
            32,
            ParallelDims(pipeline=4, replicate=2, shard=2, tensor=2, expert=4),
        ),
        (DegreeOptions(tensor=2, shard=None), 16, ParallelDims(pipeline=4, shard=2, tensor=2)),
        (DegreeOptions(context=2), 16, ParallelDims(pipeline=4, replicate=2, context=2)),
        (DegreeOptions(context=2, shard=None), 16, ParallelDims(pipeline=4, shard=2, context=2)),
    ],
)
def test_degrees_that_were_not_asked_for_are_found(
    asked: DegreeOptions, world_size: int, expected: ParallelDims
) -> None:
    assert asked.resolve(4, world_size) == expected
    assert expected.world_size == world_size


@pytest.mark.parametrize(
    ("asked", "world_size", "where", "code"),
    [
        (DegreeOptions(), 3, "", "launch.world-size"),
        (DegreeOptions(), 6, "", "launch.world-size"),
        (DegreeOptions(tensor=2), 12, "--tp", "launch.degrees"),
        (DegreeOptions(tensor=2), 4, "--tp", "launch.degrees"),
        (DegreeOptions(context=2), 12, "--cp", "launch.degrees"),
        (DegreeOptions(context=2, shard=3), 16, "--dp-shard", "launch.degrees"),
        (DegreeOptions(shard=3), 16, "--dp-shard", "launch.degrees"),
        (DegreeOptions(expert=2), 8, "--ep", "launch.degrees"),
        (DegreeOptions(shard=2, tensor=3, expert=4), 24, "--ep", "launch.degrees"),
        (DegreeOptions(replicate=3), 8, "--dp-replicate", "launch.degrees"),
        (DegreeOptions(replicate=3, shard=None), 16, "--dp-replicate", "launch.degrees"),
        (DegreeOptions(replicate=2, shard=4), 16, "--dp-replicate", "launch.degrees"),
        (DegreeOptions(replicate=2, shard=3), 16, "--dp-replicate", "launch.degrees"),
    ],
)
def test_degrees_that_do_not_match_the_number_of_ranks_are_refused(
    asked: DegreeOptions, world_size: int, where: str, code: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(UserError) as error:
        asked.resolve(4, world_size)
    assert (error.value.where, error.value.code) == (where, code)
    wording(str(error.value))


def test_ranks_are_numbered_by_pipeline_then_data_then_tensor() -> None:
    degrees = ParallelDims(pipeline=2, replicate=2, shard=3, tensor=2)
    places = [Mesh(degrees=degrees, rank=rank) for rank in range(degrees.world_size)]
    for rank, mesh in enumerate(places):
        assert rank == (mesh.pipeline_rank * degrees.data + mesh.data_rank) * degrees.tensor + mesh.tensor_rank
        assert mesh.replicate_rank == mesh.data_rank // degrees.shard
        assert rank in mesh.pipelines[rank % degrees.per_stage]
    assert sorted(rank for pipeline in places[0].pipelines for rank in pipeline) == list(range(degrees.world_size))
    writers = {(mesh.pipeline_rank, mesh.writer) for mesh in places if mesh.replicate_rank == 0}
    assert len(writers) == degrees.pipeline * places[0].num_writers
    assert (
        str(degrees) == "2 pipeline ranks x 2 data-parallel replicas x 3 data-parallel shards x 2 tensor-parallel parts"
    )


def test_expert_parallel_ranks_are_adjacent_and_every_element_has_one_owner() -> None:
    degrees = ParallelDims(pipeline=2, replicate=2, shard=3, context=2, tensor=2, expert=4)
    places = [Mesh(degrees=degrees, rank=rank) for rank in range(degrees.world_size)]
    assert (degrees.data, degrees.fsdp, degrees.expert_fsdp, degrees.per_stage) == (6, 6, 3, 24)
    for rank, mesh in enumerate(places):
        at = (mesh.pipeline_rank * degrees.data + mesh.data_rank) * degrees.context + mesh.context_rank
        assert rank == at * degrees.tensor + mesh.tensor_rank
        shard = mesh.data_rank % degrees.shard
        assert mesh.writer == (shard * degrees.context + mesh.context_rank) * degrees.tensor + mesh.tensor_rank
    # A dense weight, and experts, which are of other ranks: each of pipeline rank 1, and of its first replica.
    dense, experts = torch.empty(1), _experts()
    assert [rank for rank, mesh in enumerate(places) if mesh.owns(dense)] == [0, 24]
    assert [rank for rank, mesh in enumerate(places) if mesh.owns(experts)] == [0, 1, 2, 3, 24, 25, 26, 27]


def _experts() -> DTensor:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("ep",), _init_backend=False, _rank=0)
    return DTensor.from_local(torch.empty(1), mesh, (Shard(0),), run_check=False)
