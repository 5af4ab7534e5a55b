"""The seconds in which modules send."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.models import model_shape
from reshard.estimate.module_seconds import HARDWARE, ModuleSeconds
from tests.fast.manifests.models.catalogued import stored_by


@pytest.mark.parametrize(
    ("architecture", "field"), [("Qwen3MoeForCausalLM", "num_experts_per_tok"), ("Ernie4_5_MoeForCausalLM", "moe_k")]
)
def test_experts_receive_a_token_as_often_as_the_config_says_by_any_name(architecture: str, field: str) -> None:
    config, stored = stored_by(architecture)
    routed = [routed_s({**config, field: number}, stored) for number in (1, 3)]
    assert routed[1] == pytest.approx(3 * routed[0])
    assert routed[0] > 0


def test_configs_may_say_for_each_layer_how_many_experts_a_token_has() -> None:
    """As that of Hunyuan-A13B, which was refused."""
    config, stored = stored_by("HunYuanMoEV1ForCausalLM")
    alike, fewer = ({**config, "moe_topk": numbers} for numbers in ([2, 2, 2, 2], [2, 1, 2, 2]))
    whole, listed, changed = (
        model_shape(each, stored=stored).work for each in ({**config, "moe_topk": 2}, alike, fewer)
    )
    assert listed == whole
    assert [name for name in whole if changed[name] != whole[name]] == ["model.layers.1"]
    assert changed["model.layers.1"].flops < whole["model.layers.1"].flops
    assert routed_s(alike, stored) == routed_s({**config, "moe_topk": 2}, stored)


def routed_s(config: dict[str, Any], stored: Any) -> float:
    """Return what expert parallelism adds to the seconds of all modules."""
    seconds = ModuleSeconds(
        model_shape(config, stored=stored), config, seq_len=64, hardware=HARDWARE["h100"], efficiency=0.5, per_node=8,
        measured=None,
    )  # fmt: skip
    totals = [sum(time.total for time in seconds.times(1, expert, 1, 1, "none", 2).values()) for expert in (1, 2)]
    return totals[1] - totals[0]
