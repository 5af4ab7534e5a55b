"""Training state: what spans its fields, and what a number is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError
from manifests.invariants import check_manifest
from manifests.schema import Manifest, OptimizerState
from tests.builders import without_digest
from tests.fast.manifests.drawn_manifests import full_manifest
from tests.fast.manifests.drawn_training import training_manifest

TRAINED = training_manifest()
assert TRAINED.training is not None
TEXT = without_digest(encode_manifest(TRAINED))
OPTIMIZER = TRAINED.training.optimizer
assert OPTIMIZER is not None
FIRST, SECOND = OPTIMIZER.groups
DATA = TRAINED.training.data
assert DATA is not None


def with_training(**changes: Any) -> Manifest:
    assert TRAINED.training is not None
    return replace(TRAINED, training=replace(TRAINED.training, **changes))


def with_optimizer(**changes: Any) -> Manifest:
    assert isinstance(OPTIMIZER, OptimizerState)
    return with_training(optimizer=replace(OPTIMIZER, **changes))


def refusal(manifest: Manifest) -> str:
    with pytest.raises(InputError) as error:
        check_manifest(manifest)
    return str(error.value)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (with_optimizer(groups=()), "training.optimizer.groups: expected at least one"),
        (
            with_optimizer(groups=(FIRST, FIRST)),
            "training.optimizer.groups: expected at most one group without fqns: the one for all other parameters",
        ),
        (
            with_optimizer(groups=(FIRST, SECOND, SECOND)),
            "training.optimizer.groups[2].fqns: 'model.norm.weight' is in a group already",
        ),
        (
            with_optimizer(groups=(replace(FIRST, beta2=1.0),)),
            "training.optimizer.groups[0].beta2: expected a number below 1, found 1.0",
        ),
        (
            with_training(random=2 * TRAINED.training.random[:1]),
            "training.random[1]: rank 0 has a state of 'cpu' already",
        ),
        (
            with_training(data=replace(DATA, digest="7")),
            "training.data.digest: expected blake3: and 64 hex digits, found '7'",
        ),
        (
            with_training(data=replace(DATA, cursor=replace(DATA.cursor, sources=()))),  # type: ignore[type-var]
            "training.data.cursor.sources: expected at least one",
        ),
    ],
)
def test_a_broken_truth_is_named_by_its_path(manifest: Manifest, message: str) -> None:
    assert refusal(manifest) == f"manifest.json: {message}"


def test_moments_without_an_optimizer_are_refused_shard_by_shard() -> None:
    lines = [
        f"  stages[{stage}].shards[{shard}].holds: moments need training.optimizer, which is null"
        for stage in (0, 1, 3)
        for shard in (1, 2)
    ]
    assert refusal(with_training(optimizer=None)).splitlines() == ["manifest.json: 6 problems:", *lines]
    assert refusal(replace(TRAINED, training=None)).splitlines() == ["manifest.json: 6 problems:", *lines]


def test_optimizer_without_moments_is_refused() -> None:
    assert refusal(replace(TRAINED, stages=full_manifest().stages)).splitlines() == [
        "manifest.json: 2 problems:",
        "  training.optimizer: expected null: no shard holds exp_avg",
        "  training.optimizer: expected null: no shard holds exp_avg_sq",
    ]


def test_bytes_of_a_stage_are_those_of_its_weights() -> None:
    stages = (replace(TRAINED.stages[0], nbytes=4353), *TRAINED.stages[1:])
    assert refusal(replace(TRAINED, stages=stages)) == (
        "manifest.json: stages[0].nbytes: its shards are smaller than 4353 bytes"
    )


@pytest.mark.parametrize(("text", "expected"), [("1", 1.0), ("0", 0.0), ("1e-300", 1e-300), ("0.1", 0.1)])
def test_a_number_may_be_written_with_or_without_a_point(text: str, expected: float) -> None:
    document = TEXT.replace(b'"max_norm": 1.0', b'"max_norm": ' + text.encode())
    training = decode_manifest(document).training
    assert training is not None
    assert training.optimizer is not None
    assert training.optimizer.max_norm == expected


@pytest.mark.parametrize("text", ["-1", "1e400", "9" * 400, "true", "null", '"1"', "[]"])
def test_what_is_no_number_is_refused(text: str) -> None:
    document = TEXT.replace(b'"max_norm": 1.0', b'"max_norm": ' + text.encode())
    json.loads(document)
    with pytest.raises(InputError, match=r"^manifest\.json: training\.optimizer\.max_norm: expected a number"):
        decode_manifest(document)
