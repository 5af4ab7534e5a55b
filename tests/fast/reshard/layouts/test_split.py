"""`pp=N`: torchtitan's split, compared with torchtitan's own."""

from __future__ import annotations

from itertools import product

import pytest
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

from manifests.errors import LayoutError, UsageError
from reshard.layouts.model import StageLayout, inventory_of_layers
from reshard.layouts.spelling import parse_layout, split_layers

_THEIRS = {"model.embed_tokens": "tok_embeddings"}


def read(spec: str, num_layers: int, num_mtp: int = 0, num_ranks: int | None = None) -> StageLayout:
    return parse_layout(spec, inventory_of_layers(num_layers, num_mtp), num_ranks=num_ranks)


def theirs(num_stages: int, num_layers: int, first: int, last: int) -> list[list[str]] | None:
    try:
        return _generate_llm_fqn_per_model_part(num_stages, num_layers, first, last)
    except ValueError:
        return None


def test_split_is_torchtitans_wherever_torchtitan_splits_and_refused_where_it_refuses():
    refused = 0
    for num_stages, num_layers, first, last in product(range(1, 12), range(1, 20), range(4), range(4)):
        expected = theirs(num_stages, num_layers, first, last)
        spec = f"pp={num_stages},first={first},last={last}"
        if expected is None:
            refused += 1
            with pytest.raises(LayoutError):
                read(spec, num_layers)
        else:
            layout = read(spec, num_layers)
            names = [[_THEIRS.get(name, name.removeprefix("model.")) for name in stage] for stage in layout.stages]
            assert names == expected
    assert refused > 500


@pytest.mark.parametrize(
    ("num_stages", "num_layers", "counts"),
    [
        (4, 32, (8, 9, 8, 7)),
        (8, 61, (7, 8, 8, 8, 8, 8, 8, 6)),
        (5, 3, (0, 1, 1, 1, 0)),
        (1, 7, (7,)),
    ],
)
def test_documented_splits(num_stages, num_layers, counts):
    assert split_layers(num_stages, num_layers) == counts


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("pp=6", "layout.uneven-split"),
        ("pp=2,vpp=3", "layout.uneven-split"),
        ("pp=2, first=5", "layout.uneven-split"),
        ("pp=3,last=3", "layout.uneven-split"),
        ("pp=2,layers-per-stage=2", "layout.indivisible-stages"),
        ("pp=2,vpp=2,layers-per-stage=3", "layout.conflicting-degrees"),
        ("vpp=2", "layout.no-ranks"),
        ("pp=0", "layout.bad-option"),
        ("pp=2,first=-1", "layout.bad-option"),
        ("pp=\N{ARABIC-INDIC DIGIT THREE}", "layout.bad-option"),
        ("pp=999999", "layout.bad-option"),
        ("pp=2,pp=2", "layout.repeated-key"),
        ("pp=2,vp=2", "layout.unknown-key"),
        ("pp=2,", "layout.bad-option"),
        ("pp=2,style=u", "layout.bad-option"),
        ("pp=1,vpp=3,style=v", "layout.conflicting-degrees"),
        ("pp=1,schedule=DualPipe", "layout.bad-option"),
        ("pp=1,style=loop,schedule=DualPipeV", "layout.schedule-mismatch"),
        ("pp=1,vpp=2,schedule=1f1b", "layout.schedule-mismatch"),
        ("pp=99999", "layout.too-many-stages"),
    ],
)
def test_bad_options_are_pointed_at(spec, code, wording):
    with pytest.raises(LayoutError) as error:
        read(spec, 3)
    assert (error.value.code, error.value.where) == (code, "layout")
    wording(str(error.value))


@pytest.mark.parametrize(
    ("spec", "num_stages"),
    [
        ("pp=2,schedule=Interleaved1F1B", 4),
        ("balance:params,pp=2,schedule=InterleavedZeroBubble", 4),
        ("pp=2,vpp=3,schedule=Interleaved1F1B", 6),
        ("pp=2,layers-per-stage=1,schedule=LoopedBFS", 8),
        ("pp=2,schedule=1F1B", 2),
        ("pp=1,schedule=Interleaved1F1B", 1),
    ],
)
def test_schedules_of_several_stages_have_two_on_each_rank_as_in_torchtitan(spec: str, num_stages: int) -> None:
    inventory = inventory_of_layers(6)
    layout = parse_layout(spec, inventory, costs={"params": dict.fromkeys(inventory.modules, 1.0)})
    assert len(layout.stages) == layout.placement.num_stages == num_stages


def test_ranks_of_the_caller_must_be_those_of_the_spec(wording):
    assert read("pp=2", 4, num_ranks=2).placement.num_ranks == 2
    assert read("vpp=2", 8, num_ranks=2).placement.num_stages == 4
    with pytest.raises(UsageError) as error:
        read("pp=2", 4, num_ranks=3)
    assert (error.value.code, error.value.where) == ("layout.conflicting-degrees", "--pp")
    wording(str(error.value))
