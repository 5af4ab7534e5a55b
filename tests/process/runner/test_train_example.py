"""`examples/train.py` on two ranks: its losses are those of transformers in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import reshard
from tests.fast.runner.tiny import SIZES, load_model, save_model
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS, MICROBATCHES, BATCH, SEQ_LEN = 3, 4, 8, 32


def expected_losses(model: Path) -> list[float]:
    """Train the whole model in this process as the example says that it does."""
    module, losses = load_model(model).train(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(SIZES["vocab_size"], (BATCH, SEQ_LEN + 1), generator=generator)
        optimizer.zero_grad()
        logits = module(tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_example_trains_two_ranks_to_the_losses_of_one_process(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    reshard.pack(tmp_path / "model", tmp_path / "pp2", "pp=2")
    printed = "".join(launch(2, "../../examples/train.py", tmp_path / "pp2", "--steps", str(STEPS)))
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(expected_losses(tmp_path / "model"), abs=2e-5)
