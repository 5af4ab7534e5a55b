"""The checkpoint that the self-check saves: where none can be written, it is not tried."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from runner.proof.proving import compare
from tests.fast.runner.proof.combinations import combination

pytestmark = pytest.mark.usefixtures("one_rank")


def test_run_passes_where_no_temporary_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    assert compare(combination("LlamaForCausalLM"))[1] is None
