"""A checkpoint that three ranks wrote in shards is packed whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fast.reshard.formats.dcp.test_dcp_source import (
    CONFIGS,
    assert_equal,
    exported,
    huggingface_state,
    torchtitan_state,
)
from tests.process.torchrun import launch


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "qwen3_moe"])
def test_shards_of_three_ranks_become_the_model(kind: str, tmp_path: Path) -> None:
    state = huggingface_state(kind, tmp_path / "model")
    torch.save(torchtitan_state(kind, state), tmp_path / "native.pt")
    launch(3, "reshard/formats/dcp/dcp_worker.py", tmp_path)
    source = tmp_path / "step-7"
    assert len(list(source.glob("*.distcp"))) == 3
    (source / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    assert CONFIGS[kind].num_hidden_layers == 3
    assert_equal(exported(source, "pp=3"), state)
