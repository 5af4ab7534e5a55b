"""Printing layouts in other spellings: what is printed reads back as the same layout."""

from __future__ import annotations

import json
import tomllib
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manifests.errors import LayoutError
from manifests.placement import Placement
from reshard.layout.inventory import Inventory, inventory_of_layers, inventory_of_modules
from reshard.layout.model import SCHEDULES, SINGLE_STAGE_SCHEDULES, StageLayout, cut_modules
from reshard.layout.printing import SPELLINGS, print_layout
from reshard.layout.spelling import parse_layout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[StageLayout, Inventory]:
    """Draw any layout: empty stages, MTP layers, both styles, schedules."""
    inventory = inventory_of_layers(draw(st.integers(1, 12)), draw(st.integers(0, 2)))
    num_ranks, num_virtual = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    style = draw(st.sampled_from(["loop", "v"])) if num_virtual == 2 else "loop"
    placement = Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks, style=style)
    cuts = st.integers(0, len(inventory.modules))
    bounds = sorted(draw(cuts) for _ in range(placement.num_stages - 1))
    schedules = [
        name
        for name, of in SCHEDULES.items()
        if of == style and (num_virtual == 1 or name not in SINGLE_STAGE_SCHEDULES)
    ]
    return (
        StageLayout(
            spec="",
            stages=cut_modules(inventory.modules, (0, *bounds, len(inventory.modules))),
            placement=placement,
            schedule=draw(st.none() | st.sampled_from(schedules)),
        ),
        inventory,
    )


def read_again(spelling: str, text: str, layout: StageLayout, inventory: Inventory, folder: Path) -> StageLayout:
    """Read what was printed, with the number of ranks, which not every spelling has."""
    spec = text
    if spelling in ("toml", "torchtitan"):
        path = folder / f"layout.{'toml' if spelling == 'toml' else 'json'}"
        path.write_text(text)
        spec = str(path)
    ranks = None if spelling == "toml" else layout.placement.num_ranks
    return parse_layout(spec, inventory, num_ranks=ranks, costs=costs_of(inventory))


def costs_of(inventory: Inventory) -> dict[str, dict[str, float]]:
    return {"params": {module: 3.0 if "layers" in module else 2.0 for module in inventory.modules}}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(drawn=layouts(), spelling=st.sampled_from(sorted(SPELLINGS)))
def test_what_is_printed_reads_back_as_the_same_layout(tmp_path, drawn, spelling):
    layout, inventory = drawn
    try:
        text = print_layout(spelling, layout, inventory, costs_of(inventory))
    except LayoutError:
        if spelling in ("megatron", "deepspeed"):  # the others can express every layout
            return
        raise
    again = read_again(spelling, text, layout, inventory, tmp_path)
    assert again.stages == layout.stages
    if spelling == "toml":
        assert (again.placement, again.schedule) == (layout.placement, layout.schedule)
    if spelling == "megatron":
        ranks = range(layout.placement.num_stages)
        assert [again.placement.rank_of(s) for s in ranks] == [layout.placement.rank_of(s) for s in ranks]


@given(drawn=layouts())
def test_megatron_string_is_one_that_megatron_reads(drawn):
    layout, inventory = drawn
    try:
        text = print_layout("megatron", layout, inventory)
    except LayoutError:
        return
    strict = parse_layout(text, inventory, num_ranks=layout.placement.num_ranks, strict_megatron=True)
    assert strict.stages == layout.stages


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    ranks=st.integers(1, 6),
    virtual=st.integers(1, 2),
    method=st.sampled_from(["pp={ranks}", "uniform,pp={ranks}", "parameters,pp={ranks}", "type:layer,pp={ranks}"]),
    num_layers=st.integers(1, 20),
)
def test_every_computed_layout_reads_back_through_toml_and_torchtitan(tmp_path, ranks, virtual, method, num_layers):
    inventory = inventory_of_layers(num_layers)
    try:
        layout = parse_layout(f"{method.format(ranks=ranks)},vpp={virtual}", inventory, costs=costs_of(inventory))
    except LayoutError:
        return
    for spelling in ("toml", "torchtitan"):
        text = print_layout(spelling, layout, inventory)
        assert read_again(spelling, text, layout, inventory, tmp_path).stages == layout.stages


def layout_of(spec: str, inventory: Inventory, num_ranks: int | None = None) -> StageLayout:
    return parse_layout(spec, inventory, num_ranks=num_ranks, costs=costs_of(inventory))


def test_deepseek_v3_in_every_spelling():
    inventory = inventory_of_layers(61, 1)
    layout = layout_of("Et*3|(tt|)*29,m|L", inventory, 16)
    assert print_layout("megatron", layout, inventory) == "Et*3|(tt|)*29,m|L"
    stages = json.loads(print_layout("torchtitan", layout, inventory))
    assert stages[0] == ["tok_embeddings", "layers.0", "layers.1", "layers.2"]
    assert stages[-2:] == [["mtp_layers.0"], ["norm", "lm_head"]]
    document = tomllib.loads(print_layout("toml", layout, inventory))
    assert document["num_ranks"] == 16
    assert document["stages"][0] == ["model.embed_tokens", "model.layers.0-2"]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("uniform,pp=3", "uniform,pp=3"),
        ("Ett|ttt|ttt|L", "uniform,pp=4"),
        ("Ettt|ttt|ttL", "parameters,pp=3"),
        ("Ett|tt|tt|ttL", "type:DecoderLayer,pp=4"),
    ],
)
def test_deepspeed_names_the_method_that_makes_these_cuts(spec, text):
    inventory = inventory_of_layers(8)
    assert print_layout("deepspeed", layout_of(spec, inventory), inventory, costs_of(inventory)) == text


@pytest.mark.parametrize(
    ("spelling", "spec", "num_mtp", "num_ranks"),
    [
        ("deepspeed", "Et|tttttt|tL", 0, None),
        ("deepspeed", "pp=2,vpp=2", 0, None),
        ("megatron", "cut=lm_head", 0, None),
        ("megatron", "pp=2,style=v", 0, None),
        ("megatron", "Et*4|t*4|m|mL", 2, 2),
        ("megatron", "Et*4|t*4,m*2||L", 2, 2),
    ],
)
def test_a_layout_that_a_spelling_cannot_express_is_refused(spelling, spec, num_mtp, num_ranks, wording):
    inventory = inventory_of_layers(8, num_mtp)
    with pytest.raises(LayoutError) as error:
        print_layout(spelling, layout_of(spec, inventory, num_ranks), inventory, costs_of(inventory))
    assert (error.value.code, error.value.where) == ("layout.inexpressible", "layout")
    wording(str(error.value))


def test_torchtitan_has_no_name_for_a_second_input():
    modules = ("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f", "lm_head")
    inventory = inventory_of_modules(modules, 1)
    layout = layout_of("EtL", inventory)
    assert layout.stages == (modules,)
    assert print_layout("megatron", layout, inventory) == "EtL"
    with pytest.raises(LayoutError) as error:
        print_layout("torchtitan", layout, inventory)
    assert error.value.code == "layout.inexpressible"


def test_bounds_of_printed_stages_cover_the_model():
    inventory = inventory_of_layers(61)
    layout = layout_of("pp=16", inventory)
    ends = list(accumulate(len(stage) for stage in json.loads(print_layout("torchtitan", layout, inventory))))
    assert ends[-1] == len(inventory.modules)
