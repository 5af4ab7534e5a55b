"""Learning rates against schedules of torch and transformers, and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import get_wsd_schedule

from manifests.schedules.learning_rate import rate_at
from runner.config.flags import parse_training
from runner.config.schema import Decay, OptimOptions

PEAK, MINIMUM, STEPS = 3e-4, 3e-5, 60
WARMUP, STABLE = 8, 20


def rates_of(make: Callable[[torch.optim.Optimizer], Any], steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule: LRScheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return [float(rate) for rate in rates]


def options(decay: Decay, warmup: int = 0, stable: int = 0, minimum: float = 0.0) -> OptimOptions:
    return OptimOptions(
        lr=PEAK, warmup_steps=warmup, stable_steps=stable, decay=decay, decay_steps=STEPS, min_lr=minimum
    )


def ours(chosen: OptimOptions) -> list[float]:
    return [rate_at(step, chosen.schedule) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("decay", "after"),
    [
        ("constant", lambda optimizer: ConstantLR(optimizer, factor=1.0)),
        ("linear", lambda optimizer: LinearLR(optimizer, 1.0, MINIMUM / PEAK, total_iters=STEPS - WARMUP)),
        ("cosine", lambda optimizer: CosineAnnealingLR(optimizer, STEPS - WARMUP, eta_min=MINIMUM)),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own (torch 2.13.0)
def test_rate_is_that_of_torchs_schedules(decay: Decay, after: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        warmup = LinearLR(optimizer, 1 / WARMUP, 1.0, total_iters=WARMUP - 1)
        return SequentialLR(optimizer, [warmup, after(optimizer)], [WARMUP])

    assert ours(options(decay, WARMUP, minimum=MINIMUM)) == pytest.approx(rates_of(make), rel=1e-9)


@pytest.mark.parametrize(("decay", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")])
@pytest.mark.parametrize("stable", [0, STABLE])
def test_rate_is_that_of_transformers_wsd(decay: Decay, theirs: str, stable: int) -> None:
    expected = rates_of(
        lambda optimizer: get_wsd_schedule(
            optimizer,
            num_warmup_steps=WARMUP,
            num_stable_steps=stable,
            num_decay_steps=STEPS - WARMUP - stable,
            decay_type=theirs,
            min_lr_ratio=MINIMUM / PEAK,
        )
    )
    found = ours(options(decay, WARMUP, stable, MINIMUM))
    assert found[WARMUP:] == pytest.approx(expected[WARMUP:], rel=1e-9)  # before, theirs begins at the minimum


@pytest.mark.parametrize("decay", ["linear", "cosine", "sqrt"])
def test_rate_stays_at_its_end(decay: Decay) -> None:
    chosen = options(decay, WARMUP, STABLE, MINIMUM)
    assert [rate_at(step, chosen.schedule) for step in (STEPS, STEPS + 1, 10 * STEPS)] == pytest.approx([MINIMUM] * 3)


def test_dtypes_follow_one_another() -> None:
    dtypes = [
        parse_training(["--data", "synthetic", *args.split()]).compute
        for args in ("", "--dtype bf16", "--dtype bf16 --master-dtype fp32", "--dtype bf16 --reduce-dtype fp32")
    ]
    assert [(each.dtype, each.master_dtype, each.reduce_dtype) for each in dtypes] == [
        ("fp32", "fp32", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("bf16", "fp32", "fp32"),
        ("bf16", "bf16", "fp32"),
    ]
