"""Every pair of features is either in a run that is compared with one process, or refused before the first step."""

from __future__ import annotations

from itertools import combinations, product

from manifests.models.trainable import why_not_expert_parallel
from tests.matrix import AXES, MODELS, covered_by, dozen, matrix

# What no run combines, with the code of its refusal.
REFUSED = {
    ("context", "model"): {"options.cp-architecture", "model.no-context-parallelism"},
    ("documents", "model"): {"options.document-mask", "model.no-document-mask"},
    ("expert", "model"): {"options.ep-architecture"},
    ("loss_chunk", "model"): {"options.loss-chunk"},
    ("loss_chunk", "tensor"): {"options.tp-loss-chunk"},
    ("model", "tensor"): {"options.tp-architecture"},
}


def test_every_pair_is_compared_or_refused() -> None:
    pairs = matrix(strength=2)
    covered = set().union(*map(covered_by, pairs.cases))
    for axes in combinations(sorted(AXES), 2):
        for values in product(*(AXES[axis] for axis in axes)):
            pair = frozenset(zip(axes, values, strict=True))
            assert (pair in pairs.refused) != (pair in covered), pair
            assert pair in covered or pairs.refused[pair] & REFUSED[axes], pair


def test_the_dozen_has_every_value() -> None:
    values = {(axis, getattr(case, axis)) for case in dozen() for axis in AXES if axis not in ("model", "dtype")}
    assert {(axis, value) for axis in AXES if axis not in ("model", "dtype") for value in AXES[axis]} <= values


def test_architectures_are_at_least_twelve_and_eight_have_experts() -> None:
    architectures = {architecture for architecture, _ in MODELS.values()}
    experts = {name for name in architectures if not why_not_expert_parallel(name, "transformers")}
    assert len(architectures) >= 12
    assert len(experts) >= 8
