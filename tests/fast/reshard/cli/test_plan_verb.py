"""`reshard plan` as a command: what it suggests where nothing fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import reshard

TRUE = Path(__file__).parents[4] / "tests" / "data" / "configs"


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ("qwen2-0.5b pp=2 3GB", "pp=4,tp=2 fits"),  # 14 heads, 2 of keys
        ("opt-350m pp=2 1GB", "pp=16,ac=full fits"),  # which has no --tp
        ("llama-3.1-8b pp=32 1200MB --tp 8 --ac full --dtype bf16 --master-dtype fp32 --seq-len 128 --global-batch 2",
         "up to dp-shard=2"),
    ],
)  # fmt: skip
def test_change_that_a_launch_would_refuse_is_not_suggested(asked: str, changes: str) -> None:
    name, layout, limit, *flags = asked.split()
    shown = reshard("plan", TRUE / f"{name}.json", "--layout", layout, "--gpu-memory", limit, *flags).out
    assert changes in shown.splitlines()[2]
