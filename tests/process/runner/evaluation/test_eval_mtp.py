"""`runner eval` of a model with MTP layers is of the model alone, as transformers computes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3ForCausalLM

import runner
from tests.builders import pack
from tests.process.runner.pipeline.mtp_oracle import config_of, random_weights


@pytest.mark.parametrize("layout", ["Ett|ttmL", "Et|ttt|m|L"])  # the third stage borrows the norm
def test_loss_is_that_of_transformers(tmp_path: Path, layout: str) -> None:
    source, rows = tmp_path / "source", torch.randint(1, 96, (6, 13), generator=torch.Generator().manual_seed(0))
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**config_of(1), "dtype": "float32"}))
    weights = {name: tensor.clone() for name, tensor in random_weights(1).items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows.tolist()))
    pack(source, tmp_path / "packed", layout)
    ended = runner.evaluate(tmp_path / "packed", data, seq_len=13, flags=["--tokenized"], self_check=False)
    model = DeepseekV3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert ended.num_tokens == rows[:, 1:].numel()
    assert ended.loss == pytest.approx(expected.item(), abs=1e-6)
