"""`balance:COST`: costs in, the best split out, pins and memory kept."""

from __future__ import annotations

import pytest

from manifests.errors import InputError
from reshard.layout.inventory import inventory_of_layers
from reshard.layout.model import Layout, compress_modules
from reshard.layout.spelling import parse_layout

INVENTORY = inventory_of_layers(8)
SIZES = {module: 10 if ".layers." in module else 30 for module in INVENTORY.modules} | {"model.norm": 1}
COSTS = {"params": SIZES, "memory": SIZES, "flops": SIZES | {"model.embed_tokens": 0}}


def read(spec: str, costs: dict[str, dict[str, float]] | None = None) -> Layout:
    return parse_layout(spec, INVENTORY, costs=COSTS if costs is None else costs)


def shown(layout: Layout) -> list[str]:
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


def test_pins_hold_and_may_move_even_the_ends():
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


def test_parting_norm_and_head_is_left_to_those_who_need_it():
    sizes = dict.fromkeys(INVENTORY.modules, 10.0) | {"model.norm": 1.0, "lm_head": 30.0}
    assert shown(read("balance:params,pp=5", {"params": sizes}))[-1] == "lm_head"  # 30 beats 31
    sizes["model.layers.3"] = 40.0
    assert shown(read("balance:params,pp=10", {"params": sizes}))[-1] == "model.norm, lm_head"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "balance:parms,pp=3",
            "layout: balance by params, bytes, flops, time or memory, not 'parms'\n  balance:parms,pp=3\n          ^\n"
            "hint: did you mean params?",
        ),
        (
            "balance:bytes,pp=3",
            "layout: balance:bytes needs the bytes of every module, which are not known here\n"
            "hint: sizes come from a model: reshard plan SOURCE --layout balance:bytes,pp=3",
        ),
        (
            "balance:time,pp=3",
            "layout: balance:time needs the time of every module, which are not known here\n"
            "hint: measured times come from a file: --cost times.json",
        ),
        (
            "balance:params,pp=12",
            "layout: 12 stages for 11 modules, some would be empty\n  balance:params,pp=12\n                 ^\n"
            "hint: lower pp or vpp",
        ),
        (
            "balance:params,pp=3,pin=norm@1,pin=layers.5@2",
            "layout: this pin contradicts those before it\n  balance:params,pp=3,pin=norm@1,pin=layers.5@2\n"
            "                                 ^\nhint: stages follow the order the modules run in",
        ),
        (
            "balance:params,pp=3,pin=nrom@1",
            "layout: 'nrom' is no module of the model\n  balance:params,pp=3,pin=nrom@1\n"
            "                          ^\nhint: did you mean norm?",
        ),
        (
            "balance:params,pp=3,pin=norm@3",
            "layout: there is no stage 3\n  balance:params,pp=3,pin=norm@3\n                               ^\n"
            "hint: the stages are 0 to 2",
        ),
        (
            "balance:params,pp=3,pin=norm",
            "layout: a pin is MODULE@STAGE\n  balance:params,pp=3,pin=norm\n                          ^\n"
            "hint: write pin=lm_head@3",
        ),
        (
            "balance:params,pp=3,limit=lots",
            "layout: limit must be a size with a unit, found 'lots'\n  balance:params,pp=3,limit=lots\n"
            "                      ^\nhint: write 80GB, which is 80GiB",
        ),
        (
            "balance:params,pp=3,limit=29B",
            "layout: a rank may hold 29 bytes; model.embed_tokens alone takes 30 bytes\n"
            "hint: raise limit=SIZE (or --memory-limit), or use more ranks",
        ),
        (
            "balance:params,pp=3,limit=40B",
            "layout: a rank may hold 40 bytes; the model takes 141 bytes over 3 ranks\n"
            "hint: raise limit=SIZE (or --memory-limit), or use more ranks",
        ),
        (
            "balance:params,pp=3,limit=49B",
            "layout: a rank may hold 49 bytes; no contiguous split was found that fits\n"
            "hint: raise limit=SIZE (or --memory-limit), or use more ranks",
        ),
    ],
)
def test_refusal_says_where_and_what_to_do(spec, message):
    with pytest.raises(InputError) as error:
        read(spec)
    assert str(error.value) == message


def test_a_search_that_was_cut_short_says_so(caplog):
    inventory = inventory_of_layers(32)
    sizes = {module: 218_112_000 if ".layers." in module else 525_336_576 for module in inventory.modules}
    sizes["model.norm"] = 4096
    parse_layout("balance:params,pp=8,vpp=4", inventory, costs={"params": sizes})
    assert caplog.messages == ["balance:params,pp=8,vpp=4: the search was cut short; there may be a better split"]
    caplog.clear()
    parse_layout("balance:params,pp=8,vpp=2", inventory, costs={"params": sizes})
    assert caplog.messages == []


@pytest.mark.parametrize("cost", [None, -1, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused_by_module(cost):
    sizes = {module: size for module, size in SIZES.items() if module != "model.norm"}
    if cost is not None:
        sizes["model.norm"] = cost
    with pytest.raises(InputError) as error:
        read("balance:params,pp=2", {"params": sizes})
    found = "nothing" if cost is None else str(cost)
    assert str(error.value) == f"params of model.norm: expected a number, 0 or more, found {found}"
