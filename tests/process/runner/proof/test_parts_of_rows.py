"""Every architecture of the catalogue with --cp 2: trained as one process trains it, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.models.catalogue import catalogued
from manifests.models.combinations import REFUSED, combination_of
from manifests.models.trainable import generic_entry
from tests.process.runner.proof.test_plants import MOST_CASES, case, prove_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# State over tokens, convolutions, and attention that transformers' interface does not call, or not alone.
NOT_SPLIT = frozenset[str]()
NAMES = tuple(
    name
    for name in catalogued()
    if generic_entry(name) is not None
    and not any(rule.applies(combination_of(name, "transformers", num_context=2)) for rule in REFUSED)
)


@pytest.mark.parametrize("begin", range(0, len(NAMES), MOST_CASES))
def test_architectures_train_on_parts_of_rows_or_are_refused(begin: int, tmp_path: Path) -> None:
    names = NAMES[begin : begin + MOST_CASES]
    results = prove_all(tmp_path, [case("", name, 1, "--cp 2", names=True) for name in names])
    refused = {name: (result["code"], result.get("where")) for name, result in zip(names, results, strict=True)
               if result["code"]}  # fmt: skip
    print(refused)
    assert refused == {name: ("model.no-context-parallelism", "--cp 2") for name in names if name in NOT_SPLIT}
