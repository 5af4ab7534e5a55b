"""DeepSpeed's partition methods: the same bounds for `uniform`, the optimum for the balanced ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from manifests.errors import LayoutError
from manifests.placement import Placement
from reshard.layouts.deepspeed import balanced_bounds, uniform_bounds
from reshard.layouts.inventory import inventory_of_layers, inventory_of_modules
from reshard.layouts.model import StageLayout, compress_modules
from reshard.layouts.solve import Problem, solve
from reshard.layouts.spelling import parse_layout

INVENTORY = inventory_of_layers(8)


def read(spec: str, costs: dict[str, dict[str, float]] | None = None) -> StageLayout:
    return parse_layout(spec, INVENTORY, costs=costs)


def shown(layout: StageLayout) -> list[str]:
    return [compress_modules(stage) for stage in layout.stages]


@pytest.mark.parametrize(
    ("num_items", "num_stages", "bounds"),
    [(10, 4, (0, 3, 6, 8, 10)), (3, 4, (0, 1, 2, 3, 3)), (4, 4, (0, 1, 2, 3, 4)), (7, 1, (0, 7))],
)
def test_uniform_gives_deepspeeds_bounds(num_items, num_stages, bounds):
    assert uniform_bounds(num_items, num_stages) == bounds


def test_uniform_distributes_embedding_layers_norm_and_head_as_items():
    assert shown(read("uniform,pp=4")) == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-4",
        "model.layers.5-7",
        "model.norm, lm_head",
    ]
    assert read("uniform,pp=2,vpp=2").placement.num_virtual == 2
    assert shown(read("uniform,pp=13"))[-3:] == ["lm_head", "", ""]


@pytest.mark.parametrize(
    ("weights", "num_stages", "bounds"),
    [  # given by DeepSpeed's partition_balanced
        ([4, 48, 41, 44, 12, 15, 40, 20], 3, (0, 3, 6, 8)),
        ([1, 1, 1, 1], 2, (0, 2, 4)),
        ([0, 1, 1, 1, 1, 1, 0, 0], 2, (0, 4, 8)),
        ([5, 1, 1, 1], 4, (0, 1, 2, 3, 4)),
        ([5, 1], 4, (0, 1, 2, 2, 2)),
    ],
)
def test_balanced_bounds_are_those_deepspeed_gives(weights, num_stages, bounds):
    assert balanced_bounds(weights, num_stages) == bounds


def test_our_optimum_beats_deepspeeds_balance_where_that_misses_it():
    weights = (4, 48, 41, 44, 12, 15, 40, 20)

    def slowest(bounds: tuple[int, ...]) -> int:
        return max(sum(weights[start:stop]) for start, stop in pairwise(bounds))

    split = solve(Problem(costs=weights, placement=Placement(num_stages=3, num_ranks=3)))
    assert split is not None
    assert (slowest(balanced_bounds(weights, 3)), slowest(split.bounds)) == (93, 87)


def test_parameters_balances_the_parameters_that_the_caller_gives():
    params = {module: 10.0 if ".layers." in module else 30.0 for module in INVENTORY.modules} | {"model.norm": 1.0}
    layout = read("parameters,pp=3", {"params": params})
    assert shown(layout) == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-6",
        "model.layers.7, model.norm, lm_head",
    ]
    assert layout.stages == read("balance:params,pp=3", {"params": params}).stages


@pytest.mark.parametrize(
    "spec",
    ["type:decoderlayer,pp=4", "type:D[e]{1,1}coder,pp=4", "type:^Dec.*,pp=2,vpp=2", "type:decoder|x,vpp=2,pp=2"],
)
def test_type_counts_the_modules_whose_class_matches(spec):
    assert shown(read(spec)) == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-3",
        "model.layers.4-5",
        "model.layers.6-7, model.norm, lm_head",
    ]


def test_type_knows_the_classes_of_a_models_family():
    inventory = inventory_of_modules(INVENTORY.modules, 8, "LlamaForCausalLM")
    assert len(parse_layout("type:LlamaDecoderLayer,pp=2", inventory).stages) == 2


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("type:Transformer,pp=2", "layout.no-match"),
        ("type:a(b,pp=2", "layout.bad-regex"),
        ("type:,pp=2", "layout.bad-regex"),
        ("parameters,pp=2", "layout.missing-costs"),
        ("uniform,pp=2,first=3", "layout.unknown-key"),
    ],
)
def test_bad_partition_method_is_refused(spec, code, wording):
    with pytest.raises(LayoutError) as error:
        read(spec)
    assert (error.value.code, error.value.where) == (code, "layout")
    wording(str(error.value))


@pytest.mark.parametrize("pattern", ["(" * 300, "a{99999999999999}", "(?P<x>a)(?P<x>b)", "[[a", "(((((((((("])
def test_hostile_expressions_are_refused_or_match_nothing(pattern):
    with pytest.raises(LayoutError):
        read(f"type:{pattern},pp=2")
