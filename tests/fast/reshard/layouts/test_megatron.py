"""Megatron layout strings: all of Megatron's own behavior, the extensions, and every refusal.

Vectors: NVIDIA/Megatron-LM d98e8a64, `pipeline_parallel_layer_layout.py` and its unit tests and documentation,
run with that code.
"""

from __future__ import annotations

import pytest

from manifests.errors import LayoutError
from reshard.layouts.model import StageLayout, inventory_of_layers
from reshard.layouts.spelling import parse_layout, write_letters


def read(spec: str, num_ranks: int | None, num_layers: int, num_mtp: int = 0) -> StageLayout:
    inventory = inventory_of_layers(num_layers, num_mtp)
    return parse_layout(spec, inventory, num_ranks=num_ranks)


def letters(layout: StageLayout, num_layers: int) -> str:
    """Write a layout out in full: `Et|tttt|t|tL`."""

    def letter(module: str) -> str:
        named = {"model.embed_tokens": "E", "model.norm": "", "lm_head": "L"}
        return named[module] if module in named else "t" if int(module.split(".")[-1]) < num_layers else "m"

    return "|".join("".join(map(letter, stage)) for stage in layout.stages)


def refusal(spec: str, num_ranks: int | None, num_layers: int, num_mtp: int = 0) -> LayoutError:
    with pytest.raises(LayoutError) as error:
        read(spec, num_ranks, num_layers, num_mtp)
    assert error.value.where == "layout"
    return error.value


ACCEPTED = [
    ("Et|t*4|t|tL", 2, 7, 0, "Et|tttt|t|tL"),
    ("E|t*6|t|L", 2, 7, 0, "E|tttttt|t|L"),
    ("E|t*7||L", 2, 7, 0, "E|ttttttt||L"),
    ("Et*3|(tt|)*29,m|L", 8, 61, 1, "Ettt|" + "tt|" * 29 + "m|L"),
    ("Et*3|(tt|)*29,m|L", 16, 61, 1, "Ettt|" + "tt|" * 29 + "m|L"),
    ("Et*2|(tt|)*29,t|mL", 16, 61, 1, "Ett|" + "tt|" * 29 + "t|mL"),
    ("E|t|t*2|t||(t|)*2,t*2,L", 4, 8, 0, "E|t|tt|t||t|t|ttL"),
    ("Et*0|ttL", 2, 2, 0, "E|ttL"),
    ("E|*3tL", 4, 1, 0, "E|||tL"),
    ("Et|tL|", 3, 2, 0, "Et|tL|"),
    ("|Et|tL", 3, 2, 0, "|Et|tL"),
    ("E||t|L", 4, 1, 0, "E||t|L"),
    ("EtL", 1, 1, 0, "EtL"),
    ("Et*1,2|tL", 2, 13, 0, "E" + "t" * 12 + "|tL"),  # commas are dropped even inside a number
    ("E(tt)*2*3|L", 2, 6, 0, "Etttttt|L"),  # the second repeat takes the last letter alone
    ("Eq*0t|tL", 2, 2, 0, "Et|tL"),  # what is repeated 0 times is not checked
    ("E((t)*0t|tL", 2, 2, 0, "Et|tL"),  # nor is the parenthesis inside
    ("Et*0000000000003|tL", 2, 4, 0, "Ettt|tL"),
]


@pytest.mark.parametrize(("spec", "num_ranks", "num_layers", "num_mtp", "stages"), ACCEPTED)
def test_layouts_that_megatron_accepts_mean_the_same_here(spec, num_ranks, num_layers, num_mtp, stages):
    layout = read(spec, num_ranks, num_layers, num_mtp)
    assert letters(layout, num_layers) == stages
    assert layout.spec == spec
    assert (layout.placement.num_ranks, layout.placement.style) == (num_ranks, "loop")


def test_deepseek_v3_on_16_ranks_gives_the_table_of_the_documentation():
    layout = read("Et*3|(tt|)*29,m|L", 16, 61, 1)
    table = [
        [letters(layout, 61).split("|")[stage] for stage in layout.placement.stages_on(rank)] for rank in range(16)
    ]
    assert table == [["Ettt", "tt"], *[["tt", "tt"]] * 13, ["tt", "m"], ["tt", "L"]]


@pytest.mark.parametrize(
    ("spec", "num_layers", "stages"),
    [
        ("Et | t L", 2, "Et|tL"),
        ("E t * 3 |\n(t t |) * 2\tL", 7, "Ettt|tt|tt|L"),
        ("E(t*2|,t)*2,L", 6, "Ett|ttt|tL"),
    ],
)
def test_white_space_is_skipped_as_commas_are(spec, num_layers, stages):
    assert letters(read(spec, None, num_layers), num_layers) == stages


REFUSED = [
    ("Ettt|ttt|L", 2, 6, 0, "layout.indivisible-stages"),
    ("Et*3|(tt|)*29,m|L", 24, 61, 1, "layout.indivisible-stages"),
    ("tE|tL", 2, 2, 0, "layout.misplaced-end"),
    ("Et|t", 2, 2, 0, "layout.misplaced-end"),
    ("EEt|tL", 2, 2, 0, "layout.misplaced-end"),
    ("EtL|tL", 2, 2, 0, "layout.misplaced-end"),
    ("Em|tL", 2, 1, 1, "layout.wrong-order"),
    ("(E)t|tL", 2, 2, 0, "layout.bad-group"),
    ("Ett|tL", 2, 2, 0, "layout.layer-count"),
    ("Et*2|(tt|)*28,m|L", None, 61, 1, "layout.layer-count"),
    ("Et|tL", 2, 2, 1, "layout.layer-count"),
    ("||", 3, 1, 0, "layout.empty"),
    ("Et*1 2|L", 2, 12, 0, "layout.bad-repeat"),
    ("Et|TL", 2, 2, 0, "layout.unknown-letter"),
    ("Et|xL", 2, 2, 0, "layout.unknown-letter"),
    ("Et|3L", 2, 2, 0, "layout.bad-repeat"),
    ("Et*2*3|L", 2, 6, 0, "layout.bad-repeat"),
    ("Et*|L", 2, 1, 0, "layout.bad-repeat"),
    ("*3Et|L", 2, 1, 0, "layout.bad-repeat"),
    ("E()*3t|L", 2, 1, 0, "layout.bad-group"),
    ("Et)|L", 2, 1, 0, "layout.bad-group"),
    ("E((t)*2|L", 2, 2, 0, "layout.bad-group"),
    ("Et*999999999|L", 2, 1, 0, "layout.too-long"),
    ("E((t|)*2t|)*2L", 7, 6, 0, "layout.bad-group"),
    ("Et*" + "9" * 5000 + "|L", 2, 1, 0, "layout.too-long"),
    ("E(|)*5000tL", 1, 1, 0, "layout.too-many-stages"),
    ("Et*1, 2|L", 2, 12, 0, "layout.bad-repeat"),
]


@pytest.mark.parametrize("case", REFUSED, ids=range(27))
def test_bad_layout_strings_are_pointed_at(case, wording):
    *args, code = case
    error = refusal(*args)
    assert error.code == code
    wording(str(error))


@pytest.mark.parametrize(("spec", "meant"), [("Et|(t|)*9L", "Et|t|t|tL"), ("4", "pp=4")])
def test_hint_has_a_layout_that_fits(spec, meant):
    assert f" {meant}" in refusal(spec, None, 4, 0).hint


@pytest.mark.parametrize(("spec", "num_mtp"), [("Et|t|m|mL", 2), ("Et|tm||L", 1)])
def test_mtp_layers_may_be_on_several_or_early_stages(spec, num_mtp):
    assert letters(read(spec, 2, 2, num_mtp), 2) == spec


@pytest.mark.parametrize(
    ("stages", "written"),
    [
        (["Ettt", *["tt"] * 29, "m", "L"], "Et*3|(tt|)*29,m|L"),
        (["E", "", "", "", "", "tL"], "E||*4,tL"),
        (["Et", "t", "t", "tL"], "Et|t|t|tL"),
        (["Etttt", "", "L"], "Et*4||L"),
        (["Et", *["ttt"] * 9, "tttL", ""], "Et|(t*3|)*9,t*3,L|"),
    ],
)
def test_written_letters_are_brief(stages, written):
    assert write_letters(stages) == written
    num_layers, num_mtp = (sum(stage.count(letter) for stage in stages) for letter in "tm")
    assert letters(read(written, None, num_layers, num_mtp), num_layers) == "|".join(stages)
