"""How ranks are dealt out: to pipelines, replicas, shards and parts of matrices."""

from __future__ import annotations

import pytest

from manifests.errors import UserError
from runner.config.parallel_dims import DegreeOptions, Degrees
from runner.parallel.mesh import Mesh


@pytest.mark.parametrize(
    ("asked", "world_size", "expected"),
    [
        (DegreeOptions(), 4, Degrees(pipeline=4)),
        (DegreeOptions(), 12, Degrees(pipeline=4, replicate=3)),
        (DegreeOptions(shard=None), 12, Degrees(pipeline=4, shard=3)),
        (DegreeOptions(shard=2), 16, Degrees(pipeline=4, replicate=2, shard=2)),
        (DegreeOptions(replicate=2, shard=None), 16, Degrees(pipeline=4, replicate=2, shard=2)),
        (DegreeOptions(tensor=2), 8, Degrees(pipeline=4, tensor=2)),
        (DegreeOptions(tensor=2, shard=None), 16, Degrees(pipeline=4, shard=2, tensor=2)),
    ],
)
def test_degrees_that_were_not_asked_for_are_found(asked: DegreeOptions, world_size: int, expected: Degrees) -> None:
    assert asked.resolve(4, world_size) == expected
    assert expected.world_size == world_size


@pytest.mark.parametrize(
    ("asked", "world_size", "message"),
    [
        (
            DegreeOptions(),
            3,
            "manifest needs 4 ranks, WORLD_SIZE is 3\n"
            "hint: runner launch MANIFEST --nproc-per-node 4, or reshard pack MANIFEST --layout pp=3 --out DIR",
        ),
        (
            DegreeOptions(),
            6,
            "manifest needs 4 ranks, or a multiple of them, WORLD_SIZE is 6\n"
            "hint: start 4 or 8, or reshard pack MANIFEST --layout pp=6 --out DIR",
        ),
        (
            DegreeOptions(tensor=2),
            12,
            "--tp: expected a divisor of 3, the ranks of each stage, found 2\nhint: start 8 or 16 ranks",
        ),
        (
            DegreeOptions(tensor=2),
            4,
            "--tp: expected a divisor of 1, the ranks of each stage, found 2\nhint: start 8 ranks",
        ),
        (
            DegreeOptions(shard=3),
            16,
            "--dp-shard: 1 replicas of 3 shards are 3 data-parallel ranks for each stage, and 16 ranks over 4 "
            "pipeline ranks and --tp 1 leave 4\nhint: start 12 ranks, or leave --dp-shard out",
        ),
        (
            DegreeOptions(replicate=3),
            8,
            "--dp-replicate: 3 replicas of 1 shards are 3 data-parallel ranks for each stage, and 8 ranks over 4 "
            "pipeline ranks and --tp 1 leave 2\nhint: start 12 ranks, or leave --dp-replicate out",
        ),
        (
            DegreeOptions(replicate=3, shard=None),
            16,
            "--dp-replicate: 3 replicas of 1 shards are 3 data-parallel ranks for each stage, and 16 ranks over 4 "
            "pipeline ranks and --tp 1 leave 4\nhint: start 12 ranks, or leave --dp-replicate out",
        ),
        (
            DegreeOptions(replicate=2, shard=4),
            16,
            "--dp-replicate: 2 replicas of 4 shards are 8 data-parallel ranks for each stage, and 16 ranks over 4 "
            "pipeline ranks and --tp 1 leave 4\nhint: start 32 ranks, or leave --dp-replicate out",
        ),
        (
            DegreeOptions(replicate=2, shard=3),
            16,
            "--dp-replicate: 2 replicas of 3 shards are 6 data-parallel ranks for each stage, and 16 ranks over 4 "
            "pipeline ranks and --tp 1 leave 4\nhint: start 24 ranks, or leave both degrees out",
        ),
    ],
)
def test_ranks_that_cannot_be_dealt_out_are_refused(asked: DegreeOptions, world_size: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        asked.resolve(4, world_size)
    assert str(error.value) == message


def test_ranks_are_numbered_by_pipeline_then_data_then_tensor() -> None:
    degrees = Degrees(pipeline=2, replicate=2, shard=3, tensor=2)
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
