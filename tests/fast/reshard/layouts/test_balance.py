"""`balance:COST`: the best split for given costs, within pins and the memory limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import pytest

from bench.layouts import MODELS, Row, balanced_bounds, compare, show, uniform_bounds
from manifests.errors import LayoutError
from manifests.placement import Placement
from reshard.layouts.model import StageLayout, inventory_of_layers
from reshard.layouts.solve import Problem, Split, solve
from reshard.layouts.spelling import parse_layout
from tests.fast.manifests.models.built import TRUE
from tests.steps import steps_of

INVENTORY = inventory_of_layers(8)
SIZES = {module: 10 if ".layers." in module else 30 for module in INVENTORY.modules} | {"model.norm": 1}
COSTS = {"params": SIZES, "memory": SIZES, "flops": SIZES | {"model.embed_tokens": 0}}


def read(spec: str, costs: dict[str, dict[str, float]] | None = None) -> StageLayout:
    return parse_layout(spec, INVENTORY, costs=COSTS if costs is None else costs)


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


Key = tuple[object, ...]


def problem(costs, num_ranks, num_virtual=1, style="loop", **more) -> Problem:
    placement = Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks, style=style)
    return Problem(costs=tuple(costs), placement=placement, **more)


def per_stage(values, bounds) -> list[Fraction]:
    exact = [Fraction(str(value)) for value in values]
    return [sum(exact[start:stop], Fraction(0)) for start, stop in pairwise(bounds)]


def per_rank(asked: Problem, values, bounds) -> list[Fraction]:
    totals = [Fraction(0)] * asked.placement.num_ranks
    for stage, value in enumerate(per_stage(values, bounds)):
        totals[asked.placement.rank_of(stage)] += value
    return totals


def fits(asked: Problem, bounds) -> bool:
    if any(not bounds[stage] <= item < bounds[stage + 1] for item, stage in asked.pins):
        return False
    if asked.memory_limit is None:
        return True
    used = per_rank(asked, asked.memory, bounds)
    for stage, nbytes in enumerate(per_stage(asked.activations, bounds)):
        used[asked.placement.rank_of(stage)] += nbytes * (asked.in_flight or [0] * len(bounds))[stage]
    return max(used) <= asked.memory_limit


def key(asked: Problem, bounds) -> Key:
    """Return what is minimized: all of it with one stage per rank, otherwise the first two."""
    stages = per_stage(asked.costs, bounds)
    slowest = (max(stages), max(per_rank(asked, asked.costs, bounds)))
    if asked.placement.num_virtual > 1:
        return slowest
    parted = sum(cut in asked.together for cut in bounds[1:-1])
    sizes = sum((stop - start) ** 2 for start, stop in pairwise(bounds))
    return (*slowest, parted, sum(value * value for value in stages), sizes, bounds)


def best_of_all(asked: Problem) -> Key | None:
    num_items, num_cuts = len(asked.costs), asked.placement.num_stages - 1
    splits = ((0, *cuts, num_items) for cuts in combinations_with_replacement(range(num_items + 1), num_cuts))
    return min((key(asked, bounds) for bounds in splits if fits(asked, bounds)), default=None)


SHAPES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (2, 2), (3, 2), (2, 2), (3, 2), (1, 3), (2, 3)]


def random_problem(rng: random.Random) -> Problem:
    num_items = rng.randint(1, 8)
    num_ranks, num_virtual = rng.choice(SHAPES)
    largest = rng.choice([1, 3, 10, 100])
    costs = [rng.randint(0, largest) for _ in range(num_items)]
    memory = tuple(rng.randint(0, 10) for _ in range(num_items)) if rng.random() < 0.6 else ()
    limit = rng.uniform(0.7, 2) * max(1, sum(memory) / num_ranks) if memory else None
    num_stages = num_ranks * num_virtual
    keeps = bool(memory) and rng.random() < 0.5
    return problem(
        [cost / 10 for cost in costs] if rng.random() < 0.2 else costs,
        num_ranks,
        num_virtual,
        "v" if num_virtual == 2 and rng.random() < 0.5 else "loop",
        memory=memory,
        activations=tuple(rng.randint(0, 3) for _ in range(num_items)) if keeps else (),
        in_flight=tuple(rng.randint(0, 3) for _ in range(num_stages)) if keeps else (),
        memory_limit=int(limit) if limit and rng.random() < 0.7 else limit,
        pins=tuple((rng.randrange(num_items), rng.randrange(num_stages)) for _ in range(rng.choice([0, 0, 0, 1, 2]))),
        together=frozenset([num_items - 1]) if rng.random() < 0.3 else frozenset(),
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_split_equals_brute_force_on_200_random_problems(seed):
    rng, unsolvable = random.Random(seed), 0
    for _ in range(200):
        asked = random_problem(rng)
        found, expected = solve(asked), best_of_all(asked)
        if found is None or expected is None:
            assert (found, expected) == (None, None), asked
            unsolvable += 1
            continue
        assert fits(asked, found.bounds), asked
        assert key(asked, found.bounds) == expected, asked
        assert found.proven
    assert 20 < unsolvable < 100


def test_floats_count_as_the_decimals_they_print_as():
    # In binary 0.1 + 0.2 > 0.3, which would make the second stage the only slowest one.
    assert solve(problem([0.3, 0.1, 0.2], 2)) == Split(bounds=(0, 1, 3), proven=True)
    assert solve(problem([0.1, 0.2, 0.3, 0.3], 3)) == Split(bounds=(0, 2, 3, 4), proven=True)


def deepseek_v3_costs() -> list[int]:
    """Parameters: embedding, 3 dense layers, 58 with 256 experts, norm, head."""
    return [926_679_040, *[583_485_440] * 3, *[11_507_288_064] * 58, 7_168, 926_679_040]


@pytest.mark.parametrize("style", ["loop", "v"])
def test_deepseek_v3_on_16_ranks_of_2_stages_solves_in_few_steps(style):
    asked = problem(deepseek_v3_costs(), 16, 2, style)
    split = solve(asked)
    assert split is not None
    assert split.proven
    assert max(per_stage(asked.costs, split.bounds)) == 2 * 11_507_288_064
    assert max(per_rank(asked, asked.costs, split.bounds)) == 4 * 11_507_288_064
    assert steps_of(lambda: solve(asked)) < 150_000


def test_search_with_many_stages_per_rank_stops_and_says_that_it_did():
    head = 128_256 * 4096
    asked = problem([head, *[218_112_000] * 32, 4096, head], 8, 4)
    split = solve(asked)
    assert split is not None
    assert not split.proven
    assert max(per_stage(asked.costs, split.bounds)) == head  # this one is proven without the search
    assert fits(asked, split.bounds)


# The solver on true model shapes, beside DeepSpeed's and torchtitan's splits.


DOCUMENT = Path(__file__).parents[4] / "docs" / "layouts.md"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for name in MODELS for row in compare(name)]


@pytest.mark.parametrize(
    ("weights", "num_stages", "bounds"),
    [  # given by DeepSpeed's partition_balanced
        ([4, 48, 41, 44, 12, 15, 40, 20], 3, (0, 3, 6, 8)),  # whose slowest stage has 93: 87 is possible
        ([1, 1, 1, 1], 2, (0, 2, 4)),
        ([0, 1, 1, 1, 1, 1, 0, 0], 2, (0, 4, 8)),
        ([5, 1, 1, 1], 4, (0, 1, 2, 3, 4)),
        ([5, 1], 4, (0, 1, 2, 2, 2)),
    ],
)
def test_bounds_of_deepspeed_are_those_that_it_returns(
    weights: Sequence[int], num_stages: int, bounds: Sequence[int]
) -> None:
    assert balanced_bounds(weights, num_stages) == bounds
    assert uniform_bounds(10, 4) == (0, 3, 6, 8, 10)


def test_no_split_of_theirs_has_a_faster_slowest_stage_or_rank(rows: list[Row]) -> None:
    assert {row.model for row in rows} == set(TRUE)
    for row in rows:
        for theirs in (row.deepspeed, row.torchtitan):
            assert row.reshard.stage <= theirs.stage * (1 + 1e-12), row
            assert row.reshard.rank <= theirs.rank * (1 + 1e-12), row


def test_the_documented_table_is_the_one_computed(rows: list[Row]) -> None:
    assert show(rows) in DOCUMENT.read_text()
