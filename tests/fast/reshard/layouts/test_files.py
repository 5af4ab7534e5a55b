"""Explicit layouts: TOML and JSON files of module lists, and cuts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manifests.errors import InputError, LayoutError
from manifests.placement import Placement
from manifests.schedules.rules import SINGLE_STAGE_SCHEDULES
from reshard.layouts.files import to_toml, write_layout
from reshard.layouts.model import (
    SCHEDULES,
    Inventory,
    StageLayout,
    compress_modules,
    cut_modules,
    inventory_of_layers,
)
from reshard.layouts.spelling import parse_layout

NUM_LAYERS = 8


def read(spec: str, num_ranks: int | None = None, num_mtp: int = 0) -> StageLayout:
    return parse_layout(spec, inventory_of_layers(NUM_LAYERS, num_mtp), num_ranks=num_ranks)


def shown(layout: StageLayout) -> list[str]:
    return [compress_modules(stage) for stage in layout.stages]


def written(tmp_path: Path, name: str, content: object) -> str:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


HALVES = ["model.embed_tokens, model.layers.0-3", "model.layers.4-7, model.norm, lm_head"]


@pytest.mark.parametrize(
    "content",
    [
        'stages = [["model.embed_tokens", "layers.0-3"], ["model.layers.4-7", "norm", "lm_head"]]',
        'num_ranks = 2\nstyle = "loop"\nstages = [["embed_tokens", "layers.0-3"], ["layers.4-7", "norm", "lm_head"]]',
        'stages = [["tok_embeddings", "layers.0", "layers.1-2", "layers.3"], ["layers.4-7", "norm", "output"]]',
        'stages = [["layers.3", "layers.0-2", "embed*"], ["lm_head", "norm", "layers.4-7"]]',
    ],
)
def test_toml_lists_are_read_by_any_name_and_in_any_order_within_a_stage(tmp_path, content):
    path = written(tmp_path, "layout.toml", content)
    layout = read(path)
    assert shown(layout) == HALVES
    assert layout.spec == path
    assert layout.placement.num_ranks == 2


@pytest.mark.parametrize(
    "stages",
    [
        [["tok_embeddings", *(f"layers.{at}" for at in range(4))], ["layers.4-7", "norm", "lm_head"]],
        [
            ["model.embed_tokens", *(f"model.layers.{at}" for at in range(4)), "model.rotary_emb"],
            [*(f"model.layers.{at}" for at in range(4, 8)), "model.norm", "lm_head", "model.rotary_emb"],
        ],
    ],
    ids=["torchtitan", "NeMo AutoModel"],
)
def test_json_lists_of_other_trainers_are_read(tmp_path, stages):
    assert shown(read(written(tmp_path, "bare.json", stages))) == HALVES
    assert shown(read(written(tmp_path, "object.JSON", {"stages": stages}))) == HALVES


def test_file_sets_ranks_style_and_schedule_and_stages_may_be_empty(tmp_path):
    content = 'num_ranks = 2\nschedule = "zbvzerobubble"\nstages = [[], ["*"], [], []]'
    layout = read(written(tmp_path, "layout.toml", content))
    assert shown(layout) == ["", "model.embed_tokens, model.layers.0-7, model.norm, lm_head", "", ""]
    assert (layout.placement.style, layout.placement.num_ranks, layout.schedule) == ("v", 2, "ZBVZeroBubble")


HEAD, TAIL = '"embed_tokens", "layers.0-3"', '"norm", "lm_head"'
BAD_TOML = [
    (f'stages = [[{HEAD}], ["layers.5-7", {TAIL}]]', "layout.uncovered-module", "l.toml: stages"),
    (f'stages = [["layers.0-3"], ["layers.4-7", {TAIL}]]', "layout.uncovered-module", "l.toml: stages"),
    (f'stages = [[{HEAD}, "layers.4"], ["layers.4-7", {TAIL}]]', "layout.module-twice", "l.toml: stages[1]"),
    (f'stages = [[{HEAD}], ["layers.4-7", "nrom", "lm_head"]]', "layout.unknown-module", "l.toml: stages[1]"),
    (f'stages = [[{HEAD}], ["layers.4-8", {TAIL}]]', "layout.unknown-module", "l.toml: stages[1]"),
    (f'stages = [[{HEAD}], ["layers.7-4", {TAIL}]]', "layout.unknown-module", "l.toml: stages[1]"),
    (f'stages = [["embed_tokens", "layers.*.*"], [{TAIL}]]', "layout.unknown-module", "l.toml: stages[0]"),
    ('stages = [["embed_tokens", "blocks.*", "visual"]]', "layout.unknown-module", "l.toml"),
    (f'stages = [["embed_tokens", "layers.4-7"], ["layers.0-3", {TAIL}]]', "layout.wrong-order", "l.toml: stages[0]"),
    ("stages = []", "layout.invalid-field", "l.toml: stages"),
    ("num_ranks = 2", "layout.invalid-field", "l.toml: stages"),
    ('stages = ["*"]', "layout.invalid-field", "l.toml: stages[0]"),
    ("stages = [[1]]", "layout.invalid-field", "l.toml: stages[0][0]"),
    ('stages = [["*"]]\nrank = 1', "layout.unknown-key", "l.toml: rank"),
    ('stages = [["*"]]\nx = 1', "layout.unknown-key", "l.toml: x"),
    ('stages = [["*"]]\nnum_ranks = 0', "layout.invalid-field", "l.toml: num_ranks"),
    ('stages = [["*"]]\nnum_ranks = true', "layout.invalid-field", "l.toml: num_ranks"),
    (f'stages = [["*"]]\nnum_ranks = 0x{"f" * 9999}', "layout.invalid-field", "l.toml: num_ranks"),
    ('stages = [["*"]]\nstyle = "u"', "layout.invalid-field", "l.toml: style"),
    ('stages = [["*"]]\nstyle = ["v"]', "layout.invalid-field", "l.toml: style"),
    ('stages = [["*"], []]\nnum_ranks = 3', "layout.indivisible-stages", "layout"),
    ("stages = [[", "layout.not-toml", "l.toml"),
]


@pytest.mark.parametrize(("content", "code", "where"), BAD_TOML, ids=range(len(BAD_TOML)))
def test_bad_toml_is_refused_by_stage_and_name(tmp_path, monkeypatch, content, code, where, wording):
    monkeypatch.chdir(tmp_path)
    Path("l.toml").write_text(content)
    with pytest.raises(LayoutError) as error:
        read("l.toml")
    assert (error.value.code, error.value.where) == (code, where)
    if code != "layout.not-toml":  # which ends in Python's own words
        wording(str(error.value))


HOSTILE = [
    ("l.json", "[[", "layout.not-json", ""),
    ("l.json", '{"stages": 1, "stages": 2}', "source.not-json", ""),
    ("l.json", "3", "source.not-an-object", ""),
    ("l.json", "[" * 100_000, "layout.not-json", ""),
    ("l.json", '{"stages":' * 100_000, "source.json-too-deep", ""),
    ("l.toml", "stages = " + "[" * 100_000, "layout.not-toml", ""),
    ("l.json", b"[\xff]", "layout.not-json", ""),
    ("l.toml", b"\xff", "layout.not-toml", ""),
    ("l.toml", b"#" * (5 << 20), "layout.file-too-large", ""),
    ("l.json", [[]] * 5000, "layout.too-many-stages", ": stages"),
]


@pytest.mark.parametrize(("name", "content", "code", "place"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_are_refused(tmp_path, name, content, code, place):
    path = written(tmp_path, name, content)
    with pytest.raises(InputError) as error:
        read(path)
    assert (error.value.code, error.value.where) == (code, path + place)


@pytest.mark.parametrize(
    "spec", ["nowhere.toml", "\0.json", "a" * 5000 + ".toml", "/.toml", "\udcff.json"], ids=range(5)
)
def test_a_file_that_does_not_exist_is_refused(spec):
    with pytest.raises(LayoutError) as error:
        read(spec)
    assert error.value.code in ("layout.no-file", "layout.unreadable")


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


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("spec", ["E t*4|\n t*4 L", "caf\N{LATIN SMALL LETTER E WITH ACUTE}.toml", "\N{ROCKET}.toml"])
def test_file_that_is_written_reads_back_whatever_its_layout_was_called(tmp_path, monkeypatch, spec, suffix):
    monkeypatch.chdir(tmp_path)
    if spec.endswith(".toml"):
        written(tmp_path, spec, 'stages = [["embed*", "layers.0-3"], ["layers.4-7", "norm", "lm_head"]]')
    layout = read(spec)
    write_layout(layout, Path(f"again.{suffix}"))
    again = read(f"again.{suffix}")
    assert (again.stages, again.spec) == (layout.stages, spec.replace("\n", " "))


def test_deepseek_v3_as_toml():
    layout = parse_layout("Et*3|(tt|)*29,m|L", inventory_of_layers(61, 1), num_ranks=16)
    document = tomllib.loads(to_toml(layout))
    assert document["num_ranks"] == 16
    assert document["stages"][0] == ["model.embed_tokens", "model.layers.0-2"]
    assert document["stages"][-2:] == [["model.layers.61"], ["model.norm", "lm_head"]]
