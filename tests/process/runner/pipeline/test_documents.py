"""Packed documents in pipelines of two ranks: loss and gradients are the sums over the documents by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fast.runner.pipeline.documents import CONFIGS
from tests.process.torchrun import launch

FEW = ("MistralForCausalLM",)


def check(out: Path, architectures: tuple[str, ...]) -> None:
    launch(2, "runner/pipeline/documents_worker.py", out, *architectures, timeout_s=240)
    first, second = (json.loads((out / f"{rank}.json").read_text()) for rank in range(2))
    assert len(first) == 2 * len(architectures)
    for case in first:
        tolerance = CONFIGS[case.split()[0]][1]
        losses = [ranks[case][0] for ranks in (first, second)]
        gradients = {**first[case][1], **second[case][1]}
        assert len(gradients) == len(first[case][1]) + len(second[case][1]) > 30, case
        assert max(*losses, *gradients.values()) <= tolerance, (case, gradients)


def test_packed_documents_train_in_a_pipeline_as_each_by_itself(tmp_path: Path) -> None:
    check(tmp_path, FEW)


@pytest.mark.slow
def test_packed_documents_of_every_kind_train_in_a_pipeline_as_each_by_itself(tmp_path: Path) -> None:
    check(tmp_path, tuple(name for name in CONFIGS if name not in FEW))
