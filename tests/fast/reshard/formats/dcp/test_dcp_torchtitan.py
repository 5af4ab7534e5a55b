"""Models that torchtitan's of the same family is not; its own adapters and model code are the oracle."""

from __future__ import annotations

import json
from pathlib import Path

from tests.builders import pack, refusal
from tests.fast.reshard.formats.dcp.test_dcp_source import huggingface_state, save, torchtitan_state


def pair_halves(folder: Path) -> None:
    """Let RoPE pair the halves of heads; that of torchtitan's DeepSeek-V3, `ComplexRoPE`, pairs adjacent rows."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_interleave": False}))


def test_rope_of_other_rows_than_torchtitans_is_refused(tmp_path: Path) -> None:
    state = huggingface_state("deepseek_v3", tmp_path / "model")
    source = save(tmp_path / "step-7", "deepseek_v3", torchtitan_state("deepseek_v3", state))
    for folder in (tmp_path / "model", source):
        pair_halves(folder)
    packed, out = pack(tmp_path / "model", tmp_path / "packed"), tmp_path / "out"
    exported = refusal("export", packed, "--to", "dcp", "--for", "torchtitan", "--out", out)
    repacked = refusal("pack", source, "--layout", "pp=2", "--out", out)
    for folder, refused in ((packed, exported), (source, repacked)):
        assert refused.found == (3, "model.not-in-torchtitan", f"{folder}: config.json: rope_interleave")
    assert not out.exists()
