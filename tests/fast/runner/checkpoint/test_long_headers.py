"""A saved shard whose header Hugging Face readers refuse is named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from runner.tensors.local_shard import whole_pieces
from tests.fast.runner.tiny import write_shard

PIECES = whole_pieces({"model.norm.weight": torch.ones(2)})


def test_long_header_of_weights_is_named_and_of_optimizer_state_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runner.checkpoint.shard_file.MOST_READ_HEADER_NBYTES", 10)
    path = "model-00001-of-00001.safetensors"
    write_shard(PIECES, tmp_path, "stage-000/exp_avg/model.safetensors", "exp_avg")
    assert not caplog.messages
    shard = write_shard(PIECES, tmp_path, path)
    (record,) = caplog.records
    assert (record.levelno, record.args) == (logging.WARNING, (tmp_path / path, shard.nbytes - 8))
    monkeypatch.undo()
    caplog.clear()
    write_shard(PIECES, tmp_path, path)
    assert not caplog.messages
