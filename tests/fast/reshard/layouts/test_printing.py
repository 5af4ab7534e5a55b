"""A layout written as TOML reads back as the same layout."""

from __future__ import annotations

import tomllib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manifests.errors import LayoutError
from manifests.placement import Placement
from reshard.layouts.files import to_toml
from reshard.layouts.inventory import Inventory, inventory_of_layers
from reshard.layouts.model import SCHEDULES, SINGLE_STAGE_SCHEDULES, StageLayout, cut_modules
from reshard.layouts.spelling import parse_layout


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


def read_again(text: str, inventory: Inventory, folder: Path) -> StageLayout:
    path = folder / "layout.toml"
    path.write_text(text)
    return parse_layout(str(path), inventory)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(drawn=layouts())
def test_what_is_written_reads_back_as_the_same_layout(tmp_path, drawn):
    layout, inventory = drawn
    again = read_again(to_toml(layout), inventory, tmp_path)
    assert (again.stages, again.placement, again.schedule) == (layout.stages, layout.placement, layout.schedule)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    ranks=st.integers(1, 6),
    virtual=st.integers(1, 2),
    method=st.sampled_from(["pp={ranks}", "balance:params,pp={ranks}"]),
    num_layers=st.integers(1, 20),
)
def test_every_computed_layout_reads_back(tmp_path, ranks, virtual, method, num_layers):
    inventory = inventory_of_layers(num_layers)
    costs = {"params": {module: 3.0 if "layers" in module else 2.0 for module in inventory.modules}}
    try:
        layout = parse_layout(f"{method.format(ranks=ranks)},vpp={virtual}", inventory, costs=costs)
    except LayoutError:
        return
    assert read_again(to_toml(layout), inventory, tmp_path).stages == layout.stages


def test_deepseek_v3_as_toml():
    layout = parse_layout("Et*3|(tt|)*29,m|L", inventory_of_layers(61, 1), num_ranks=16)
    document = tomllib.loads(to_toml(layout))
    assert document["num_ranks"] == 16
    assert document["stages"][0] == ["model.embed_tokens", "model.layers.0-2"]
    assert document["stages"][-2:] == [["model.layers.61"], ["model.norm", "lm_head"]]
