"""Training state: invariants across its fields, and the form of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from manifests.codec import decode_manifest, encode_manifest
from manifests.invariants import check_manifest, problems
from manifests.schema import Manifest, OptimizerState
from tests.builders import with_digest
from tests.fast.manifests.drawn_manifests import full_manifest
from tests.fast.manifests.drawn_training import training_manifest
from tests.refusals import refusal, refused

TRAINED = training_manifest()
assert TRAINED.training is not None
TEXT = encode_manifest(TRAINED)
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


def with_first_group(**changes: Any) -> Manifest:
    return with_optimizer(groups=(replace(FIRST, **changes),))


@pytest.mark.parametrize(
    ("manifest", "where"),
    [
        (with_optimizer(groups=()), "training.optimizer.groups"),
        (with_optimizer(groups=(FIRST, FIRST)), "training.optimizer.groups"),
        (with_optimizer(groups=(FIRST, SECOND, SECOND)), "training.optimizer.groups[2].fqns"),
        (with_first_group(beta2=1.0), "training.optimizer.groups[0].beta2"),
        (with_first_group(weight_decay=math.nan), "training.optimizer.groups[0].weight_decay"),
        (with_optimizer(max_norm=-1.0), "training.optimizer.max_norm"),
        (with_optimizer(max_norm=math.inf), "training.optimizer.max_norm"),
        (with_training(step=1 << 63), "training.step"),
        (with_training(num_tokens=-1), "training.num_tokens"),
        (with_training(random=2 * TRAINED.training.random[:1]), "training.random[1]"),
        (with_training(data=replace(DATA, digest="7")), "training.data.digest"),
        (
            with_training(data=replace(DATA, cursor=replace(DATA.cursor, sources=()))),  # type: ignore[type-var]
            "training.data.cursor.sources",
        ),
        (
            replace(TRAINED, stages=(replace(TRAINED.stages[0], nbytes=4353), *TRAINED.stages[1:])),  # weights alone
            "stages[0].nbytes",
        ),
    ],
)
def test_a_broken_invariant_is_refused_with_its_path(
    manifest: Manifest, where: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: check_manifest(manifest))
    assert (error.code, error.where) == ("manifest.inconsistent", f"manifest.json: {where}")
    wording(str(error))


@pytest.mark.parametrize("manifest", [with_training(optimizer=None), replace(TRAINED, training=None)])
def test_optimizer_state_without_an_optimizer_is_refused_shard_by_shard(manifest: Manifest) -> None:
    found = [place for place, _ in problems(manifest)]
    assert found == [f"stages[{stage}].shards[{shard}].holds" for stage in (0, 1, 3) for shard in (1, 2)]


def test_optimizer_without_its_state_is_refused() -> None:
    found = [place for place, _ in problems(replace(TRAINED, stages=full_manifest().stages))]
    assert found == ["training.optimizer"] * 2


@pytest.mark.parametrize(("text", "expected"), [("1", 1.0), ("0", 0.0), ("1e-300", 1e-300), ("0.1", 0.1)])
def test_a_number_may_be_written_with_or_without_a_point(text: str, expected: float) -> None:
    document = TEXT.replace(b'"max_norm": 1.0', b'"max_norm": ' + text.encode())
    training = decode_manifest(with_digest(document)).training
    assert training is not None
    assert training.optimizer is not None
    assert training.optimizer.max_norm == expected


@pytest.mark.parametrize("text", ["-1", "9" * 400, "true", "null", '"1"', "[]"])
def test_a_field_that_is_not_a_number_is_refused(text: str) -> None:
    document = TEXT.replace(b'"max_norm": 1.0', b'"max_norm": ' + text.encode())
    json.loads(document)
    where = "manifest.json: training.optimizer.max_norm"
    assert refused(lambda: decode_manifest(document)) == ("manifest.invalid-field", where)
