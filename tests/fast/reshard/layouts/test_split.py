"""`pp=N`: torchtitan's split, compared with torchtitan's own."""

from __future__ import annotations

from itertools import product

import pytest
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

from manifests.errors import LayoutError, UsageError
from reshard.layouts.model import StageLayout, compress_modules, inventory_of_layers
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


def test_stages_are_placed_in_a_loop_unless_v_is_asked_for():
    loop = read("pp=4,vpp=2", 32).placement
    assert [loop.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    for spec in ("pp=4,style=v", "pp=4,vpp=2,style=v", "pp=4,schedule=DualPipeV", "pp=4,schedule=zbvzerobubble"):
        v = read(spec, 32).placement
        assert [v.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_layers_per_stage_gives_the_number_of_stages():
    layout = read("pp=4,layers-per-stage=9", 32)  # 34 effective layers
    assert (layout.placement.num_stages, layout.placement.num_virtual) == (4, 1)
    assert read("pp=4,layers-per-stage=3", 32).placement.num_virtual == 3
    assert read("layers-per-stage=9", 32).placement.num_ranks == 4


def test_mtp_layers_are_on_the_stage_of_the_head():
    stages = read("pp=2", 4, num_mtp=1).stages
    assert [compress_modules(stage) for stage in stages] == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-4, model.norm, lm_head",
    ]


def test_schedule_is_kept_as_torch_spells_it():
    assert read("pp=2,vpp=2,schedule=interleaved1f1b", 8).schedule == "Interleaved1F1B"


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


@pytest.mark.parametrize(("num_ranks", "code"), [(3, "layout.conflicting-degrees"), (0, "layout.bad-option")])
def test_ranks_of_the_caller_must_be_those_of_the_spec(num_ranks, code, wording):
    assert read("pp=2", 4, num_ranks=2).placement.num_ranks == 2
    assert read("vpp=2", 8, num_ranks=2).placement.num_stages == 4
    with pytest.raises(UsageError) as error:
        read("pp=2", 4, num_ranks=num_ranks)
    assert (error.value.code, error.value.where) == (code, "--pp")
    wording(str(error.value))
