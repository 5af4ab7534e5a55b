"""`balance:COST`: the best split for given costs, within pins and the memory limit."""

from __future__ import annotations

import pytest

from manifests.errors import LayoutError
from reshard.layouts.inventory import compress_modules, inventory_of_layers
from reshard.layouts.model import StageLayout
from reshard.layouts.spelling import parse_layout

INVENTORY = inventory_of_layers(8)
SIZES = {module: 10 if ".layers." in module else 30 for module in INVENTORY.modules} | {"model.norm": 1}
COSTS = {"params": SIZES, "memory": SIZES, "flops": SIZES | {"model.embed_tokens": 0}}


def read(spec: str, costs: dict[str, dict[str, float]] | None = None) -> StageLayout:
    return parse_layout(spec, INVENTORY, costs=COSTS if costs is None else costs)


def shown(layout: StageLayout) -> list[str]:
    return [compress_modules(stage) for stage in layout.stages]


def test_the_slowest_stage_is_as_cheap_as_can_be():
    assert shown(read("balance:params,pp=3")) == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-6",
        "model.layers.7, model.norm, lm_head",
    ]
    assert shown(read("balance:flops,pp=3"))[0] == "model.embed_tokens, model.layers.0-3"


def test_first_and_last_module_stay_on_the_first_and_last_stage():
    layout = read("balance:flops,pp=4,vpp=2,style=v")
    assert layout.stages[0][0] == "model.embed_tokens"
    assert layout.stages[-1][-1] == "lm_head"
    assert layout.placement.rank_of(0) == layout.placement.rank_of(7) == 0


def test_pins_are_kept_and_may_move_even_the_ends():
    stages = read("balance:params,pp=3,pin=layers.0@1,pin=model.norm@1").stages
    assert stages[0] == ("model.embed_tokens",)
    assert stages[1][-1] == "model.norm"
    assert read("balance:params,pp=3,pin=lm_head@1").stages[2] == ()


def test_limit_bounds_the_memory_of_a_rank_over_all_its_stages():
    layout = read("balance:params,pp=2,vpp=2,limit=75B")
    held = [
        sum(SIZES[module] for stage in layout.placement.stages_on(rank) for module in layout.stages[stage])
        for rank in range(2)
    ]
    assert max(held) <= 75
    assert read("balance:params,pp=3,limit=0.05kB").stages == read("balance:params,pp=3").stages


def test_norm_and_head_are_split_only_where_that_is_cheaper():
    sizes = dict.fromkeys(INVENTORY.modules, 10.0) | {"model.norm": 1.0, "lm_head": 30.0}
    assert shown(read("balance:params,pp=5", {"params": sizes}))[-1] == "lm_head"  # 30 beats 31
    sizes["model.layers.3"] = 40.0
    assert shown(read("balance:params,pp=10", {"params": sizes}))[-1] == "model.norm, lm_head"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("balance:parms,pp=3", "layout.unknown-cost"),
        ("balance:bytes,pp=3", "layout.missing-costs"),
        ("balance:time,pp=3", "layout.missing-costs"),
        ("balance:params,pp=12", "layout.too-many-stages"),
        ("balance:params,pp=3,pin=norm@1,pin=layers.5@2", "layout.conflicting-pins"),
        ("balance:params,pp=3,pin=nrom@1", "layout.unknown-module"),
        ("balance:params,pp=3,pin=norm@3", "layout.bad-pin"),
        ("balance:params,pp=3,pin=norm", "layout.bad-pin"),
        ("balance:params,pp=3,limit=lots", "layout.bad-option"),
        ("balance:params,pp=3,limit=29B", "layout.memory-limit"),
        ("balance:params,pp=3,limit=40B", "layout.memory-limit"),
        ("balance:params,pp=3,limit=49B", "layout.memory-limit"),
    ],
)
def test_bad_balance_is_refused(spec, code, wording):
    with pytest.raises(LayoutError) as error:
        read(spec)
    assert (error.value.code, error.value.where) == (code, "layout")
    wording(str(error.value))


def test_a_search_that_hits_its_step_limit_says_so(caplog, wording):
    inventory = inventory_of_layers(32)
    sizes = {module: 218_112_000 if ".layers." in module else 525_336_576 for module in inventory.modules}
    sizes["model.norm"] = 4096
    parse_layout("balance:params,pp=8,vpp=4", inventory, costs={"params": sizes})
    (message,) = caplog.messages
    assert message.startswith("balance:params,pp=8,vpp=4: ")
    wording(message)
    caplog.clear()
    parse_layout("balance:params,pp=8,vpp=2", inventory, costs={"params": sizes})
    assert caplog.messages == []


@pytest.mark.parametrize("cost", [None, -1, float("nan"), float("inf")])
def test_a_cost_that_is_missing_or_not_finite_is_refused_by_module(cost):
    sizes = {module: size for module, size in SIZES.items() if module != "model.norm"}
    if cost is not None:
        sizes["model.norm"] = cost
    with pytest.raises(LayoutError) as error:
        read("balance:params,pp=2", {"params": sizes})
    assert (error.value.code, error.value.where) == ("layout.bad-cost", "params of model.norm")
