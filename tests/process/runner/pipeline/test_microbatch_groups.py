"""Numbers of microbatches that do not divide into rounds, or are fewer than stages: the losses of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.schedules.csvtext import write_csv
from manifests.schedules.tables import schedule_table
from runner.report.read import read_run
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.runner.tiny import save_model
from tests.process.runner.training_jobs import job, losses_of, run_jobs

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

FLAGS = ("--data", "synthetic", "--seq-len", 16, "--lr", 1e-2, "--steps", 2)
GROUPS = ("--global-batch", 5, "--schedule", "Interleaved1F1B", "--microbatch-group", 3)


def test_uneven_groups_and_few_microbatches_train_as_one_rank_does(tmp_path: Path) -> None:
    save_model(tmp_path / "source", num_hidden_layers=4, hidden_size=32)
    packed = {layout: tmp_path / f"packed-{layout}" for layout in ("pp=1", "pp=2,vpp=2", "pp=2")}
    for layout, folder in packed.items():
        pack(tmp_path / "source", folder, layout)
    megatron = schedule_table("Interleaved1F1B", open_manifest(packed["pp=2,vpp=2"]).manifest.placement, 5,
                              microbatch_group=3)  # fmt: skip
    (tmp_path / "table.csv").write_text(write_csv(megatron))
    logs = {name: tmp_path / name for name in ("alone", "five", "file", "one", "few")}
    file = ("--global-batch", 5, "--schedule", tmp_path / "table.csv")
    run_jobs(1, [
        job(packed["pp=1"], logs["alone"], *FLAGS, "--global-batch", 5),
        job(packed["pp=1"], logs["one"], *FLAGS, "--global-batch", 1),
    ])  # fmt: skip
    run_jobs(2, [
        job(packed["pp=2,vpp=2"], logs["five"], *FLAGS, *GROUPS, "--trace", "2"),
        job(packed["pp=2,vpp=2"], logs["file"], *FLAGS, *file),
        job(packed["pp=2"], logs["few"], *FLAGS, "--global-batch", 1, "--schedule", "1F1B"),
    ])  # fmt: skip
    assert losses_of(logs["five"]) == losses_of(logs["file"]) == pytest.approx(losses_of(logs["alone"]), rel=1e-6)
    assert losses_of(logs["few"]) == pytest.approx(losses_of(logs["one"]), rel=1e-6)
    traces = read_run(logs["five"]).traces
    assert traces is not None
    assert sum(map(len, traces.planned().ranks)) == sum(map(len, megatron.ranks))
    for rank, spans in enumerate(traces.steps[0].timeline.ranks):
        assert [str(span.action) for span in spans if span.action.kind in "FB"] == list(map(str, megatron.ranks[rank]))
