"""`pp=N`: torchtitan's split, compared with torchtitan's own."""

from __future__ import annotations

from itertools import product

import pytest
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

from manifests.errors import InputError, UsageError
from reshard.layout.inventory import inventory_of_layers
from reshard.layout.model import Layout, compress_modules
from reshard.layout.printing import to_torchtitan
from reshard.layout.spelling import parse_layout
from reshard.layout.split import split_layers


def read(spec: str, num_layers: int, num_mtp: int = 0, num_ranks: int | None = None) -> Layout:
    return parse_layout(spec, inventory_of_layers(num_layers, num_mtp), num_ranks=num_ranks)


def refusal(spec: str, num_layers: int) -> str:
    with pytest.raises(InputError) as error:
        read(spec, num_layers)
    return str(error.value)


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
            refusal(spec, num_layers)
        else:
            layout = read(spec, num_layers)
            assert to_torchtitan(layout, inventory_of_layers(num_layers)) == str(expected).replace("'", '"')
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


def test_stages_are_laid_in_a_loop_unless_v_is_asked_for():
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


def test_mtp_layers_go_with_the_head():
    stages = read("pp=2", 4, num_mtp=1).stages
    assert [compress_modules(stage) for stage in stages] == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-4, model.norm, lm_head",
    ]


def test_schedule_is_kept_as_torch_spells_it():
    assert read("pp=2,vpp=2,schedule=interleaved1f1b", 8).schedule == "Interleaved1F1B"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "pp=6",
            "layout: 6 stages for 3 layers, 1 for the embedding and 1 for the head\n  pp=6\n  ^\nhint: at most pp=5",
        ),
        (
            "pp=2,vpp=3",
            "layout: 6 stages for 3 layers, 1 for the embedding and 1 for the head\n  pp=2,vpp=3\n  ^\n"
            "hint: at most pp=1 with vpp=3",
        ),
        (
            "pp=2, first=5",
            "layout: first=5 is more than the 4 that the smallest stage holds\n  pp=2, first=5\n        ^\n"
            "hint: at most pp=1",
        ),
        (
            "pp=3,last=3",
            "layout: last=3 is more than the 2 that the smallest stage holds\n  pp=3,last=3\n       ^\n"
            "hint: at most pp=2",
        ),
        (
            "pp=2,layers-per-stage=2",
            "layout: layers-per-stage=2 gives 3 stages, not a multiple of 2 ranks\n  pp=2,layers-per-stage=2\n"
            "       ^\nhint: layers-per-stage=3 gives 2",
        ),
        (
            "pp=2,vpp=2,layers-per-stage=3",
            "layout: pp=2,vpp=2,layers-per-stage=3 puts 1 of its 2 stages on each rank, but says vpp=2\n"
            "hint: say vpp=1, or leave it out",
        ),
        ("vpp=2", "layout: says no pp\n  vpp=2\n       ^\nhint: add pp=N, the number of pipeline ranks"),
        ("pp=0", "layout: pp must be a whole number, 1 or more, found '0'\n  pp=0\n  ^"),
        ("pp=2,first=-1", "layout: first must be a whole number, 0 or more, found '-1'\n  pp=2,first=-1\n       ^"),
        ("pp=٣", "layout: pp must be a whole number, 1 or more, found '٣'\n  pp=٣\n  ^"),
        ("pp=2,pp=2", "layout: pp stands twice\n  pp=2,pp=2\n       ^"),
        ("pp=2,vp=2", "layout: 'vp' is not known here\n  pp=2,vp=2\n       ^\nhint: did you mean vpp?"),
        (
            "pp=2,",
            "layout: expected key=value, found ''\n  pp=2,\n       ^\n"
            "hint: known: pp, vpp, style, schedule, first, last and layers-per-stage",
        ),
        (
            "pp=2,style=u",
            "layout: style must be loop or v, found 'u'\n  pp=2,style=u\n       ^",
        ),
        (
            "pp=1,vpp=3,style=v",
            "layout: style v puts exactly 2 stages on each rank, pp=1,vpp=3,style=v puts 3\n"
            "hint: ask for 2 stages, or for style=loop",
        ),
        (
            "pp=1,schedule=DualPipe",
            "layout: schedule must be GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or "
            "DualPipeV, found 'DualPipe'\n  pp=1,schedule=DualPipe\n       ^\nhint: did you mean DualPipeV?",
        ),
        (
            "pp=1,style=loop,schedule=DualPipeV",
            "layout: DualPipeV runs style v, pp=1,style=loop,schedule=DualPipeV says style loop\nhint: say style=v",
        ),
        (
            "pp=1,vpp=2,schedule=1f1b",
            "layout: 1F1B runs 1 stage a rank, pp=1,vpp=2,schedule=1f1b puts 2\n"
            "hint: say schedule=Interleaved1F1B, or leave vpp out",
        ),
        ("pp=99999", "layout: pp=99999 has 99999 stages, more than 4096\nhint: lower pp or vpp"),
    ],
)
def test_refusal_says_where_and_what_to_do(spec, message):
    assert refusal(spec, 3) == message


def test_ranks_of_the_caller_must_be_those_of_the_spec():
    assert read("pp=2", 4, num_ranks=2).placement.num_ranks == 2
    assert read("vpp=2", 8, num_ranks=2).placement.num_stages == 4
    with pytest.raises(UsageError) as error:
        read("pp=2", 4, num_ranks=3)
    assert str(error.value) == "--pp: 3 ranks, but pp=2 is for 2\nhint: leave one of the two out"
    with pytest.raises(UsageError, match="expected 1 rank or more, found 0"):
        read("pp=2", 4, num_ranks=0)
