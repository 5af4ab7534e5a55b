"""Truths that span a manifest's fields: each is checked, and all that are broken are named at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from manifests.errors import InputError
from manifests.invariants import check_manifest, check_model, problems
from manifests.models import ModelShape
from manifests.paths import problem_with_path
from manifests.schema import Layout, Manifest, Shard, Span, TieGroup, TieMember, TrainingState
from tests.fast.manifests.drawn_manifests import digest_of, full_manifest, virtual_manifest
from tests.fast.manifests.drawn_manifests import manifests as drawn_manifests

FULL, VIRTUAL = full_manifest(), virtual_manifest()
MODULES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=2,
    modules=MODULES,
    tensors={f"{module}.weight": (4288,) if module == MODULES[0] else (0,) for module in MODULES},
    ties=(("model.embed_tokens.weight", "lm_head.weight"),),
)
PARAMS = (4288, 0, 0, 0)  # of each stage


def with_stage(position: int, /, **changes: Any) -> Manifest:
    stages = list(FULL.stages)
    stages[position] = replace(stages[position], **changes)
    return replace(FULL, stages=tuple(stages))


def with_layout(**changes: Any) -> Manifest:
    layout: Layout = replace(FULL.layout, **changes)
    return replace(FULL, layout=layout)


def with_spans(position: int, /, *spans: tuple[int, int, int]) -> Manifest:
    """Give a stage of the virtual manifest these spans, (file, begin, end)."""
    stages = list(VIRTUAL.stages)
    found = tuple(Span(file=file, begin=begin, end=end) for file, begin, end in spans)
    nbytes = sum(end - begin for _, begin, end in spans)
    stages[position] = replace(stages[position], shards=(), spans=found, nbytes=nbytes)
    return replace(VIRTUAL, stages=tuple(stages))


def with_virtual(**changes: Any) -> Manifest:
    assert VIRTUAL.virtual is not None
    return replace(VIRTUAL, virtual=replace(VIRTUAL.virtual, **changes))


def with_pinned(position: int, /, **changes: Any) -> Manifest:
    assert VIRTUAL.virtual is not None
    files = list(VIRTUAL.virtual.files)
    files[position] = replace(files[position], **changes)
    return with_virtual(files=tuple(files))


def with_tie(owner: TieMember, *replicas: TieMember) -> Manifest:
    return replace(FULL, ties=(TieGroup(owner=owner, replicas=replicas),))


@given(drawn_manifests())
def test_a_manifest_that_was_drawn_by_the_rules_breaks_none(manifest: Manifest) -> None:
    assert list(problems(manifest)) == []


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (with_layout(num_stages=6, num_ranks=3), "layout.num_stages: expected 4 (stages), found 6"),
        (
            with_layout(num_ranks=3),
            "layout.num_stages: expected num_ranks x num_virtual = 6, at least 1, found 4",
        ),
        (with_layout(num_ranks=1, num_virtual=4), "layout.num_virtual: expected 2 (style v), found 4"),
        (with_stage(1, index=2), "stages[1].index: expected 1, found 2"),
        (with_stage(3, rank=1), "stages[3].rank: expected 0 (style v), found 1"),
        (with_stage(3, virtual=0), "stages[3].virtual: expected 1 (style v), found 0"),
        (
            with_stage(2, modules=("model.layers.1",)),
            "stages[2].modules: 'model.layers.1' is on stage 1 already",
        ),
        (with_stage(0, nbytes=4353), "stages[0].nbytes: its shards are smaller than 4353 bytes"),
        (
            with_stage(2, shards=(Shard(path="config.json", nbytes=0, digest=digest_of("0")),)),
            "files[0].path: 'config.json' is taken by stages[2].shards[0]",
        ),
        (
            with_stage(2, shards=(Shard(path="manifest.json", nbytes=0, digest=digest_of("0")),)),
            "stages[2].shards[0].path: 'manifest.json' is taken by manifest.json itself",
        ),
        (
            with_stage(2, shards=(Shard(path="../key", nbytes=0, digest=digest_of("0")),)),
            "stages[2].shards[0].path: expected a path that stays below its folder, found '../key'",
        ),
        (
            with_stage(2, shards=(Shard(path="a", nbytes=0, digest="sha256:" + 64 * "0"),)),
            "stages[2].shards[0].digest: expected blake3: and 64 hex digits, found 'sha256:" + 64 * "0" + "'",
        ),
        (
            replace(FULL, parents=(replace(FULL.parents[0], digest="blake3:" + 64 * "F"),)),
            "parents[0].digest: expected blake3: and 64 hex digits, found 'blake3:" + 64 * "F" + "'",
        ),
        (with_tie(FULL.ties[0].owner), "ties[0].replicas: expected at least one"),
        (with_tie(FULL.ties[0].owner, FULL.ties[0].owner), "ties[0]: 'model.embed_tokens.weight' is tied twice"),
        (
            with_tie(FULL.ties[0].owner, TieMember(fqn="lm_head.weight", stage=4)),
            "ties[0]: 'lm_head.weight' names stage 4, there are 4",
        ),
        (
            with_tie(FULL.ties[0].owner, TieMember(fqn="lm_head.weight", stage=2)),
            "ties[0]: 'lm_head.weight' belongs to no module of stage 2",
        ),
        (
            replace(VIRTUAL, stages=(*VIRTUAL.stages[:1], *FULL.stages[1:]), virtual=None),
            "stages[0].spans: expected none: virtual is null",
        ),
        (replace(VIRTUAL, stages=FULL.stages), "virtual: expected null: no stage has spans"),
        (
            replace(VIRTUAL, training=TrainingState(step=0, num_tokens=0)),
            "training: expected null: nobody trained what the original files hold",
        ),
        (with_virtual(location="models"), "virtual.location: expected an absolute path or a URL, found 'models'"),
        (
            with_pinned(0, path="../model.safetensors"),
            "virtual.files[0].path: expected a path that stays below its folder, found '../model.safetensors'",
        ),
        (
            with_pinned(1, path="model-00001.safetensors"),
            "virtual.files[1].path: 'model-00001.safetensors' is taken by virtual.files[0]",
        ),
        (
            with_pinned(0, digest="blake3:"),
            "virtual.files[0].digest: expected blake3: and 64 hex digits, found 'blake3:'",
        ),
        (
            replace(VIRTUAL, stages=(replace(VIRTUAL.stages[0], shards=FULL.stages[0].shards), *VIRTUAL.stages[1:])),
            "stages[0].spans: expected none beside shards: a bundle is the one or the other",
        ),
        (
            replace(VIRTUAL, stages=(replace(VIRTUAL.stages[0], nbytes=255), *VIRTUAL.stages[1:])),
            "stages[0].nbytes: expected 256 (its spans), found 255",
        ),
        (with_spans(0, (2, 0, 128)), "stages[0].spans[0].file: expected less than 2 (virtual.files), found 2"),
        (
            with_spans(0, (1, 0, 0)),
            "stages[0].spans[0]: expected begin < end <= 328 (virtual.files[1].nbytes), found 0 and 0",
        ),
        (
            with_spans(0, (0, 80, 209)),
            "stages[0].spans[0]: expected begin < end <= 208 (virtual.files[0].nbytes), found 80 and 209",
        ),
        (with_spans(0, (1, 72, 100), (0, 80, 208)), "stages[0].spans[1]: expected to begin after the span before it"),
        (with_spans(0, (1, 72, 100), (1, 90, 200)), "stages[0].spans[1]: expected to begin after the span before it"),
        (
            with_spans(1, (1, 190, 210)),
            "2 problems:\n"
            "  stages[1].spans: overlap those of stage 0 from byte 190 of virtual.files[1] on, "
            "and nothing is tied between them\n"
            "  stages[3].spans: overlap those of stage 1 from byte 200 of virtual.files[1] on, "
            "and nothing is tied between them",
        ),
    ],
)
def test_a_broken_invariant_is_named_by_its_path(manifest: Manifest, message: str) -> None:
    with pytest.raises(InputError) as error:
        check_manifest(manifest)
    assert str(error.value) == f"manifest.json: {message}"


def test_every_broken_invariant_is_reported_at_once() -> None:
    broken = replace(
        with_stage(1, index=7, rank=0, nbytes=10**6),
        files=(replace(FULL.files[0], path="/etc/passwd"), replace(FULL.files[1], digest="blake3:")),
    )
    with pytest.raises(InputError) as error:
        check_manifest(broken, "OUT/manifest.json")
    assert str(error.value) == (
        "OUT/manifest.json: 5 problems:\n"
        "  stages[1].index: expected 1, found 7\n"
        "  stages[1].rank: expected 1 (style v), found 0\n"
        "  stages[1].nbytes: its shards are smaller than 1000000 bytes\n"
        "  files[0].path: expected a relative path with / between its parts and no control characters, "
        "found '/etc/passwd'\n"
        "  files[1].digest: expected blake3: and 64 hex digits, found 'blake3:'"
    )


def test_of_very_many_problems_twenty_are_shown_and_the_rest_counted() -> None:
    file = replace(FULL.files[0], digest="")
    files = tuple(replace(file, path=f"file-{index}") for index in range(100))
    with pytest.raises(InputError) as error:
        check_manifest(replace(FULL, files=files))
    lines = str(error.value).splitlines()
    assert lines[0] == "manifest.json: 100 problems:"
    assert lines[-1] == "  and 80 more"
    assert len(lines) == 22


def with_params(manifest: Manifest, *counts: int) -> Manifest:
    stages = zip(manifest.stages, counts, strict=True)
    return replace(manifest, stages=tuple(replace(stage, num_params=count) for stage, count in stages))


def test_a_manifest_with_the_parameters_of_its_config_holds_its_model() -> None:
    check_model(with_params(FULL, *PARAMS), SHAPE)


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_with_another_number_of_parameters_than_its_modules_have_is_refused(stage: int) -> None:
    counts = [count + (index == stage) for index, count in enumerate(PARAMS)]
    with pytest.raises(InputError) as error:
        check_model(with_params(FULL, *counts), SHAPE)
    assert error.value.where == f"manifest.json: stages[{stage}].num_params"


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (
            replace(FULL, model=replace(FULL.model, architecture="MistralForCausalLM", num_params=1)),
            "manifest.json: 2 problems:\n"
            "  model.architecture: expected LlamaForCausalLM (config.json), found MistralForCausalLM\n"
            "  model.num_params: expected 4288 (config.json), found 1",
        ),
        (with_stage(1, modules=()), "manifest.json: stages: no stage holds model.layers.1"),
        (
            with_stage(2, modules=("model.layers.2",)),
            "manifest.json: stages: 'model.layers.2' stands where the model of config.json has another module",
        ),
        (
            with_stage(3, modules=("lm_head", "model.norm")),
            "manifest.json: stages: 'lm_head' stands where the model of config.json has another module",
        ),
        (
            replace(FULL, ties=()),
            "manifest.json: ties: expected model.embed_tokens.weight = lm_head.weight (config.json)",
        ),
    ],
)
def test_a_manifest_that_is_not_the_configs_model_is_refused(manifest: Manifest, message: str) -> None:
    with pytest.raises(InputError) as error:
        check_model(with_params(manifest, *PARAMS), SHAPE)
    assert str(error.value) == message


def test_ties_that_the_config_does_not_have_are_refused() -> None:
    with pytest.raises(InputError) as error:
        check_model(with_params(FULL, *PARAMS), replace(SHAPE, ties=(), tensors={**SHAPE.tensors}))
    assert str(error.value) == "manifest.json: ties: expected none (config.json)"


@pytest.mark.parametrize("path", ["a", "a/b", "...", ".hidden", "a b", "ä/ö", "a.", "x" * 240])
def test_a_path_below_the_folder_is_allowed(path: str) -> None:
    assert problem_with_path(path) is None


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "expected a path of 1 to 1024 characters, found 0"),
        ("x" * 1025, "expected a path of 1 to 1024 characters, found 1025"),
        ("/a", "expected a relative path with / between its parts and no control characters"),
        ("a\\b", "expected a relative path with / between its parts and no control characters"),
        ("a\x00", "expected a relative path with / between its parts and no control characters"),
        ("a\x1b[2J", "expected a relative path with / between its parts and no control characters"),
        ("..", "expected a path that stays below its folder"),
        ("a/../../b", "expected a path that stays below its folder"),
        ("a/./b", "expected a path that stays below its folder"),
        ("a//b", "expected a path that stays below its folder"),
        ("a/", "expected a path that stays below its folder"),
        ("a\ud800", "expected a path that is valid Unicode"),
        ("a/" + "ä" * 121, "expected parts of at most 240 bytes"),
    ],
)
def test_a_path_that_climbs_or_cannot_be_written_is_refused(path: str, problem: str) -> None:
    assert problem_with_path(path) == problem
