"""Parallel degrees: from flags and the number of ranks to pipelines, replicas, shards and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
        (DegreeOptions(tensor=2, shard=None), 16, ParallelDims(pipeline=4, shard=2, tensor=2)),
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
        (DegreeOptions(shard=3), 16, "--dp-shard", "launch.degrees"),
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
        assert mesh.data_rank == mesh.replicate_rank * degrees.shard + mesh.shard_rank
        assert rank in mesh.pipelines[rank % degrees.per_stage]
    assert sorted(rank for pipeline in places[0].pipelines for rank in pipeline) == list(range(degrees.world_size))
    writers = {(mesh.pipeline_rank, mesh.writer) for mesh in places if mesh.replicate_rank == 0}
    assert len(writers) == degrees.pipeline * places[0].num_writers
    assert (
        str(degrees) == "2 pipeline ranks x 2 data-parallel replicas x 3 data-parallel shards x 2 tensor-parallel parts"
    )
