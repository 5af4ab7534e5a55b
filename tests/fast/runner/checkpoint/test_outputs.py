"""What a run may replace with `--save`, on file systems that cannot exchange the names of two folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.errors import InputError
from runner.checkpoint.outputs import check_outputs
from runner.config.flags import parse_training
from runner.rundir.records import note_saved, write_run_record
from tests.fast.trained import write_trained


def test_run_replaces_on_nfs_what_it_has_saved_itself_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stores.folders.publish._RENAME_EXCHANGE", 1 << 10)  # the kernel refuses it, with EINVAL
    out, log = write_trained(tmp_path, "pp=2", num_hidden_layers=1), tmp_path / "log"
    options = parse_training(
        ["--data", "synthetic", "--save", str(out), "--force", "--log-dir", str(log), "--steps", "1"]
    )
    log.mkdir()
    write_run_record(log, {"id": "x"})
    with pytest.raises(InputError) as error:
        check_outputs(options)
    assert (error.value.code, error.value.where) == ("output.cannot-replace", f"--save {out}")
    note_saved(log, out)
    check_outputs(options)
