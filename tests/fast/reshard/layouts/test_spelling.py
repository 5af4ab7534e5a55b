"""All spellings are read by one function, and no string breaks it."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import LayoutError, UserError
from manifests.models import model_shape
from reshard.layouts.model import compress_modules, inventory_of_layers, inventory_of_modules
from reshard.layouts.spelling import parse_layout
from tests.steps import steps_of

INVENTORY = inventory_of_layers(5, 1)
COSTS = {name: dict.fromkeys(INVENTORY.modules, 1.0) for name in ("params", "memory")}


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("", "layout.empty"),
        (" \n", "layout.empty"),
        ("pp8", "layout.unknown-spelling"),
        ("pp8,vpp2", "layout.unknown-spelling"),
        ("balnce:params", "layout.unknown-spelling"),
        ("ngpu=4", "layout.unknown-spelling"),
        ("4", "layout.bad-repeat"),
        ("\udcff", "layout.unknown-spelling"),
        ("E" * 20_000, "layout.too-long"),
    ],
    ids=["empty", "blank", "pp8", "pp8,vpp2", "balnce", "ngpu", "number", "surrogate", "long"],
)
def test_what_is_not_a_layout_is_answered_with_what_is(spec, code, wording):
    with pytest.raises(LayoutError) as error:
        parse_layout(spec, INVENTORY)
    assert (error.value.code, error.value.where) == (code, "layout")
    if spec not in (" \n", "4"):
        wording(str(error.value))


def test_spellings_of_one_split_agree():
    inventory = inventory_of_layers(6)
    costs = {"params": dict.fromkeys(inventory.modules, 1.0)}
    specs = ["pp=3,first=0,last=0", "Ett|tt|ttL", "balance:params,pp=3,pin=layers.1@0,pin=model.layers.4@2"]
    stages = {parse_layout(spec, inventory, costs=costs).stages for spec in specs}
    assert len(stages) == 1


def test_layouts_have_the_modules_of_the_models_config():
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    shape = model_shape(config)
    layout = parse_layout("pp=2", inventory_of_modules(shape.modules, shape.num_layers), num_ranks=2)
    assert [compress_modules(stage) for stage in layout.stages] == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-3, model.norm, lm_head",
    ]


def test_modules_are_shown_whatever_their_numbers_are():
    names = ["layers.7", "layers.8", f"layers.{'9' * 5000}", "layers.٣"]
    assert compress_modules(names) == ", ".join(["layers.7-8", *names[2:]])


WORDS = [
    *("pp=", "vpp=", "style=v", "first=", "last=", "layers-per-stage=", "balance:"),
    *("params", "layers.1", "model.norm", "lm_head", "schedule=", "DualPipeV", "pin=", "@", "limit=", "GB"),
    *("1", "2", "4", ",", ",", ",", "E", "t", "|", "(", ")", "*", "L", "m", " "),
]
LETTERS = "EEttttmmLL||||(())**,,0123 9"


def check_total(rng: random.Random, count: int) -> int:
    """Read random strings and count the layouts. Anything but a layout or a UserError escapes."""
    accepted = 0
    for at in range(count):
        parts = rng.choices(LETTERS, k=rng.randint(0, 12)) if at % 4 else rng.choices(WORDS, k=rng.randint(1, 8))
        try:
            layout = parse_layout("".join(parts), INVENTORY, num_ranks=at % 3 or None, costs=COSTS)
        except UserError:
            continue
        accepted += 1
        assert tuple(name for stage in layout.stages for name in stage) == INVENTORY.modules
    return accepted


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_short_strings_are_layouts_or_refused(count):
    assert check_total(random.Random(count), count) > 0


@given(spec=st.text(max_size=40) | st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_any_text_is_a_layout_or_refused(spec):
    with contextlib.suppress(UserError):
        layout = parse_layout(spec, INVENTORY, costs=COSTS)
        assert tuple(name for stage in layout.stages for name in stage) == INVENTORY.modules


@pytest.mark.parametrize(
    "spec",
    [
        *("(" * 5000, "(" * 5000 + ")" * 5000, "t*" * 5000, "|" * 16000, "E" + "t," * 8000, "(t)*9" * 3000),
        *("pp=" * 5000, "," * 16000, "balance:params" + "," * 16000, "balance:" + "pin=a@0," * 1000),
        *("pp=" + "9" * 5000, "limit=" + "9" * 5000, "((((t*9)*9)*9)*9)*9"),
        "balance:params,pp=2,limit=" + "9" * 5000,
    ],
)
def test_hostile_strings_are_refused_in_steps_that_grow_with_them(spec):
    def parse():
        with pytest.raises(UserError):
            parse_layout(spec, INVENTORY, costs=COSTS)

    assert steps_of(parse) < 5000 + 30 * len(spec)
