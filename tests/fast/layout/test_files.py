"""Explicit layouts: TOML and JSON files of module lists, and cuts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manifests.errors import InputError, UsageError
from reshard.layout.inventory import inventory_of_layers
from reshard.layout.model import Layout, compress_modules
from reshard.layout.spelling import parse_layout

NUM_LAYERS = 8


def read(spec: str, num_ranks: int | None = None, num_mtp: int = 0) -> Layout:
    return parse_layout(spec, inventory_of_layers(NUM_LAYERS, num_mtp), num_ranks=num_ranks)


def shown(layout: Layout) -> list[str]:
    return [compress_modules(stage) for stage in layout.stages]


def written(tmp_path: Path, name: str, content: object) -> str:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def refusal(tmp_path: Path, name: str, content: object) -> str:
    path = written(tmp_path, name, content)
    with pytest.raises(InputError) as error:
        read(path)
    return str(error.value).replace(path, name)


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


def test_wildcards_take_what_matches_and_mtp_layers_are_layers(tmp_path):
    path = written(tmp_path, "layout.toml", 'stages = [["embed_tokens"], ["layers.*"], ["*norm"], ["lm*"]]')
    assert shown(read(path, num_mtp=1))[1] == "model.layers.0-8"
    named = written(tmp_path, "m.toml", 'stages = [["*embeddings", "layers.0-7"], ["mtp_layers.0", "norm", "output"]]')
    assert shown(read(named, num_mtp=1))[1] == "model.layers.8, model.norm, lm_head"


def test_file_says_ranks_style_and_schedule_and_stages_may_be_empty(tmp_path):
    content = 'num_ranks = 2\nschedule = "zbvzerobubble"\nstages = [[], ["*"], [], []]'
    layout = read(written(tmp_path, "layout.toml", content))
    assert shown(layout) == ["", "model.embed_tokens, model.layers.0-7, model.norm, lm_head", "", ""]
    assert (layout.placement.style, layout.placement.num_ranks, layout.schedule) == ("v", 2, "ZBVZeroBubble")


def test_ranks_of_the_caller_must_be_those_of_the_file(tmp_path):
    path = written(tmp_path, "layout.json", {"stages": [["*"], []], "num_ranks": 2})
    with pytest.raises(UsageError, match="--pp: 1 rank, but"):
        read(path, num_ranks=1)
    assert read(written(tmp_path, "bare.json", [["*"], []]), num_ranks=1).placement.num_virtual == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            'stages = [["embed_tokens", "layers.0-3"], ["layers.5-7", "norm", "lm_head"]]',
            "l.toml: stages: no stage holds model.layers.4\n"
            "hint: model.layers.4 belongs on stage 0, or at the start of the next",
        ),
        (
            'stages = [["layers.0-3"], ["layers.4-7", "norm", "lm_head"]]',
            "l.toml: stages: no stage holds model.embed_tokens\n"
            "hint: model.embed_tokens belongs on stage 0, or at the start of the next",
        ),
        (
            'stages = [["embed_tokens", "layers.0-4"], ["layers.4-7", "norm", "lm_head"]]',
            "l.toml: stages[1]: model.layers.4 is on stage 0 already\nhint: leave it on one stage",
        ),
        (
            'stages = [["embed_tokens", "layers.0-3"], ["layers.4-7", "nrom", "lm_head"]]',
            "l.toml: stages[1]: 'nrom' is no module of the model\nhint: did you mean norm?",
        ),
        (
            'stages = [["embed_tokens", "layers.0-3"], ["layers.4-8", "norm", "lm_head"]]',
            "l.toml: stages[1]: 'layers.8' is no module of the model\nhint: the last layer is model.layers.7",
        ),
        (
            'stages = [["embed_tokens", "layers.0-3"], ["layers.7-4", "norm", "lm_head"]]',
            "l.toml: stages[1]: 'layers.7-4' ends before it starts\nhint: write layers.4-7",
        ),
        (
            'stages = [["embed_tokens", "layers.*.*"], ["norm", "lm_head"]]',
            "l.toml: stages[0]: 'layers.*.*' has more than one *\nhint: write one * for each name",
        ),
        (
            'stages = [["embed_tokens", "blocks.*", "visual"]]',
            "l.toml: 2 problems:\n"
            "  stages[0]: 'blocks.*' matches no module\n"
            "  stages[0]: 'visual' is no module of the model\n"
            "hint: the modules are model.embed_tokens, model.layers.0-7, model.norm, lm_head",
        ),
        (
            'stages = [["embed_tokens", "layers.4-7"], ["layers.0-3", "norm", "lm_head"]]',
            "l.toml: stages[0]: model.layers.4-7 must run after model.layers.3, which is on stage 1\n"
            "hint: number the stages in the order the modules run",
        ),
        (
            "stages = []",
            "l.toml: stages: expected a list of lists of module names, found an empty list\n"
            'hint: stages = [["model.embed_tokens", "layers.0-7"], ["layers.8-15", "norm", "lm_head"]]',
        ),
        (
            "num_ranks = 2",
            "l.toml: stages: expected a list of lists of module names, found nothing\n"
            'hint: stages = [["model.embed_tokens", "layers.0-7"], ["layers.8-15", "norm", "lm_head"]]',
        ),
        ('stages = ["*"]', "l.toml: stages[0]: expected a list of module names, found a string"),
        ("stages = [[1]]", "l.toml: stages[0][0]: expected a module name, found a number"),
        ('stages = [["*"]]\nrank = 1', "l.toml: rank: is not known here\nhint: did you mean num_ranks?"),
        (
            'stages = [["*"]]\nx = 1',
            "l.toml: x: is not known here\nhint: known: stages, num_ranks, style and schedule",
        ),
        ('stages = [["*"]]\nnum_ranks = 0', "l.toml: num_ranks: expected a whole number from 1 to 4096, found 0"),
        (
            'stages = [["*"]]\nnum_ranks = true',
            "l.toml: num_ranks: expected a whole number from 1 to 4096, found true or false",
        ),
        (
            f'stages = [["*"]]\nnum_ranks = 0x{"f" * 9999}',
            "l.toml: num_ranks: expected a whole number from 1 to 4096, found a number",
        ),
        ('stages = [["*"]]\nstyle = "u"', "l.toml: style: expected loop or v, found 'u'"),
        ('stages = [["*"]]\nstyle = ["v"]', "l.toml: style: expected loop or v, found a list"),
        (
            'stages = [["*"], []]\nnum_ranks = 3',
            "layout: l.toml has 2 stages, which do not divide over 3 ranks\nhint: 2 stages need PP 1 or 2",
        ),
        ("stages = [[", "l.toml: is not TOML: Invalid value (at end of document)"),
    ],
)
def test_bad_toml_is_refused_by_stage_and_name(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    Path("l.toml").write_text(content)
    with pytest.raises(InputError) as error:
        read("l.toml")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.json", "[[", "l.json: is not JSON: Expecting value: line 1 column 3 (char 2)"),
        ("l.json", '{"stages": 1, "stages": 2}', "l.json: is not JSON: key 'stages' stands twice"),
        ("l.json", "3", "l.json: expected a JSON object, found a number"),
        ("l.json", "[" * 100_000, "l.json: is not JSON: "),
        ("l.json", '{"stages":' * 100_000, "l.json: is nested too deeply"),
        ("l.toml", "stages = " + "[" * 100_000, "l.toml: is not TOML: "),
        ("l.json", b"[\xff]", "l.json: is not JSON: "),
        ("l.toml", b"\xff", "l.toml: is not TOML: "),
        ("l.toml", b"#" * (5 << 20), "l.toml: is larger than 4194304 bytes"),
        ("l.json", [[]] * 5000, "l.json: stages: 5000 stages, more than 4096"),
    ],
)
def test_hostile_files_are_refused_in_one_sentence(tmp_path, name, content, message):
    assert refusal(tmp_path, name, content).startswith(message)


@pytest.mark.parametrize("spec", ["nowhere.toml", "\0.json", "a" * 5000 + ".toml", "/.toml", "\udcff.json"])
def test_a_file_that_is_not_there_is_refused(spec):
    with pytest.raises(InputError) as error:
        read(spec)
    assert "no such file" in str(error.value) or "cannot be read" in str(error.value)


def test_cuts_start_new_stages():
    layout = read("cut=model.layers.2,layers.5,lm_head,pp=2")
    assert shown(layout) == [
        "model.embed_tokens, model.layers.0-1",
        "model.layers.2-4",
        "model.layers.5-7, model.norm",
        "lm_head",
    ]
    assert (layout.placement.num_ranks, layout.placement.num_virtual) == (2, 2)
    assert read("cut=layers.2,layers.5,lm_head,style=v").placement.num_ranks == 2
    assert read("cut=layers.4").placement.num_ranks == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "cut=layers.5,layers.3",
            "layout: model.layers.3 runs before model.layers.5\n  cut=layers.5,layers.3\n               ^\n"
            "hint: name the cuts once each, in the order the modules run",
        ),
        (
            "cut=layers.5,layers.5",
            "layout: model.layers.5 starts the stage before already\n  cut=layers.5,layers.5\n               ^\n"
            "hint: name the cuts once each, in the order the modules run",
        ),
        (
            "cut=model.layers.8",
            "layout: 'model.layers.8' is no module of the model\n  cut=model.layers.8\n      ^\n"
            "hint: the last layer is model.layers.7",
        ),
        (
            "cut=layers.4,pp=3",
            "layout: cut=layers.4,pp=3 has 2 stages, which do not divide over 3 ranks\nhint: 2 stages need PP 1 or 2",
        ),
        (
            "cut=layers.4,first=3",
            "layout: 'first' is not known here\n  cut=layers.4,first=3\n               ^\n"
            "hint: known: pp, vpp, style and schedule",
        ),
    ],
)
def test_bad_cuts_are_pointed_at(spec, message):
    with pytest.raises(InputError) as error:
        read(spec)
    assert str(error.value) == message
