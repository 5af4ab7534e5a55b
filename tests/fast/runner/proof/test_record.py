"""A proof is kept in the run's record, by all that it depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed as dist

from runner.proof import proving
from runner.proof.combination import Combination
from runner.proof.proving import prove_once
from runner.rundir.records import read_run_record, write_run_record
from tests.fast.runner.proof.combinations import combination

RUN = {"id": "a" * 32, "launches": [{}]}


@pytest.fixture
def run() -> Iterator[Combination]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield combination("LlamaForCausalLM")
    dist.destroy_process_group()


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[Combination]:
    """The combinations that are proven, which still are."""
    runs: list[Combination] = []
    prove = proving.prove
    monkeypatch.setattr(proving, "prove", lambda run: runs.append(run) or prove(run))  # type: ignore[func-returns-value]
    return runs


def test_a_restart_of_the_same_combination_is_not_proven_again(
    run: Combination, proven: list[Combination], tmp_path: Path
) -> None:
    write_run_record(tmp_path, RUN)
    for _ in range(2):
        prove_once(run, {"hidden_size": 64}, tmp_path, is_kept=True)
    assert len(proven) == 1
    kept = read_run_record(tmp_path)
    assert kept is not None
    assert kept["self_check"]["gradient"] <= 1e-5
    assert kept["launches"] == RUN["launches"]
    longer = replace(run, options=replace(run.options, batch=replace(run.options.batch, seq_len=4096)))
    prove_once(longer, {"hidden_size": 64}, tmp_path, is_kept=True)  # by which a RoPE may have other frequencies
    assert len(proven) == 2
    prove_once(run, {"hidden_size": 128}, tmp_path, is_kept=True)
    other = replace(run, options=replace(run.options, compute=replace(run.options.compute, recompute="full")))
    prove_once(other, {"hidden_size": 128}, tmp_path, is_kept=True)
    prove_once(other, {"hidden_size": 128}, tmp_path, is_kept=False)
    assert len(proven) == 5


def test_without_a_record_every_launch_is_proven(run: Combination, proven: list[Combination], tmp_path: Path) -> None:
    for _ in range(2):
        prove_once(run, {}, tmp_path, is_kept=True)
    assert len(proven) == 2
    assert read_run_record(tmp_path) is None
