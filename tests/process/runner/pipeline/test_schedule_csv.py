"""Our tables, written as CSV and run by torch's schedule runtime on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from manifests.schedules.actions import actions_of
from manifests.schedules.csvtext import write_csv
from manifests.schedules.lowering import lower
from runner.pipeline.torch_runtime import ADAPTER
from tests.fast.manifests.schedules.torch_tables import text_with_waits
from tests.process.runner.pipeline.schedule_csv_worker import TABLES, build_batch, build_stage, loss_of, read_table
from tests.process.torchrun import launch

FORMATS = ("compute_only", "compute_comms")

Gradients = dict[int, list[torch.Tensor]]  # of each stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every table in both formats, and what the ranks made of them."""
    folder = tmp_path_factory.mktemp("schedules")
    for name, table in TABLES.items():
        (folder / f"{name}.compute_only.csv").write_text(write_csv(table))
        (folder / f"{name}.compute_comms.csv").write_text(
            text_with_waits(lower(table)) if ADAPTER.waits_for_sends else write_csv(lower(table))
        )
    launch(2, "runner/pipeline/schedule_csv_worker.py", folder)
    return folder


def accumulate(path: Path) -> Gradients:
    """Give the gradients of one process, each stage adding its microbatches in the order of the table."""
    table = read_table(path)
    stages = [build_stage(stage) for stage in range(table.placement.num_stages)]
    model = nn.Sequential(*stages)
    inputs, targets = (tensor.chunk(table.num_microbatches) for tensor in build_batch(table.num_microbatches))
    parts = [
        torch.autograd.grad(loss_of(model(one), other), list(model.parameters()))
        for one, other in zip(inputs, targets, strict=True)
    ]
    sums: Gradients = {}
    for action in (action for steps in table.ranks for step in steps for action in actions_of(step)):
        if action.kind in "BW":
            new = parts[action.microbatch][2 * action.stage : 2 * action.stage + 2]
            so_far = sums.get(action.stage, [torch.zeros_like(part) for part in new])
            sums[action.stage] = [total + part for total, part in zip(so_far, new, strict=True)]
    return sums


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", TABLES)
def test_step_from_csv_gives_the_gradients_of_one_process(folder: Path, name: str, format_name: str) -> None:
    file = f"{name}.{format_name}.csv"
    found: Gradients = {}
    for rank in range(2):
        found |= torch.load(folder / f"rank{rank}.pt")[file]
    expected = accumulate(folder / file)
    assert found.keys() == expected.keys() == set(range(TABLES[name].placement.num_stages))
    for stage, gradients in expected.items():
        for ours, theirs in zip(gradients, found[stage], strict=True):
            assert torch.equal(ours, theirs), f"stage {stage}"
