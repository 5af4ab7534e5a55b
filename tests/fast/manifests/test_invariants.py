"""Invariants across a manifest's fields: each is checked, and all violations are reported at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from manifests.invariants import check_manifest, check_model, problems
from manifests.models import ModelShape
from manifests.paths import problem_with_path
from manifests.schema import (
    AlgorithmOption,
    Layout,
    Manifest,
    OptimizerState,
    Shard,
    Span,
    TieGroup,
    TieMember,
    TrainingState,
)
from tests.fast.manifests.drawn_manifests import digest_of, full_manifest, virtual_manifest
from tests.fast.manifests.drawn_manifests import manifests as drawn_manifests
from tests.fast.manifests.drawn_training import training_manifest
from tests.refusals import refusal, refused

FULL, VIRTUAL = full_manifest(), virtual_manifest()
MODULES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
TIED = (("model.embed_tokens.weight", "lm_head.weight"),)
SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=2,
    modules=MODULES,
    tensors={f"{module}.weight": (4288,) if module == MODULES[0] else (0,) for module in MODULES},
    ties=TIED,
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
    """Return the virtual manifest with these spans, (file, begin, end), for one stage."""
    stages = list(VIRTUAL.stages)
    found = tuple(Span(file=file, begin=begin, end=end) for file, begin, end in spans)
    nbytes = sum(end - begin for _, begin, end in spans)
    stages[position] = replace(stages[position], shards=(), spans=found, nbytes=nbytes)
    return replace(VIRTUAL, stages=tuple(stages))


def with_virtual(**changes: Any) -> Manifest:
    assert VIRTUAL.virtual is not None
    return replace(VIRTUAL, virtual=replace(VIRTUAL.virtual, **changes))


def with_original(position: int, /, **changes: Any) -> Manifest:
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
    ("manifest", "where"),
    [
        (with_layout(num_stages=6, num_ranks=3), "layout.num_stages"),
        (with_layout(num_ranks=3), "layout.num_stages"),
        (with_layout(num_ranks=1, num_virtual=4), "layout.num_virtual"),
        (with_stage(1, index=2), "stages[1].index"),
        (with_stage(3, rank=1), "stages[3].rank"),
        (with_stage(3, virtual=0), "stages[3].virtual"),
        (with_stage(2, modules=("model.layers.1",)), "stages[2].modules"),
        (with_stage(0, nbytes=4353), "stages[0].nbytes"),
        (with_stage(2, shards=(Shard(path="config.json", nbytes=0, digest=digest_of("0")),)), "files[0].path"),
        (
            with_stage(2, shards=(Shard(path="manifest.json", nbytes=0, digest=digest_of("0")),)),
            "stages[2].shards[0].path",
        ),
        (with_stage(2, shards=(Shard(path="../key", nbytes=0, digest=digest_of("0")),)), "stages[2].shards[0].path"),
        (with_stage(2, shards=(Shard(path="a", nbytes=0, digest="sha256:" + 64 * "0"),)), "stages[2].shards[0].digest"),
        (replace(FULL, parents=(replace(FULL.parents[0], digest="blake3:" + 64 * "F"),)), "parents[0].digest"),
        (with_tie(FULL.ties[0].owner), "ties[0].replicas"),
        (with_tie(FULL.ties[0].owner, FULL.ties[0].owner), "ties[0]"),
        (with_tie(FULL.ties[0].owner, TieMember(fqn="lm_head.weight", stage=4)), "ties[0]"),
        (with_tie(FULL.ties[0].owner, TieMember(fqn="lm_head.weight", stage=2)), "ties[0]"),
        (replace(VIRTUAL, stages=(*VIRTUAL.stages[:1], *FULL.stages[1:]), virtual=None), "stages[0].spans"),
        (replace(VIRTUAL, stages=FULL.stages), "virtual"),
        (replace(VIRTUAL, training=TrainingState(step=0, num_tokens=0)), "training"),
        (with_virtual(location="models"), "virtual.location"),
        (with_original(0, path="../model.safetensors"), "virtual.files[0].path"),
        (with_original(1, path="model-00001.safetensors"), "virtual.files[1].path"),
        (with_original(0, digest="blake3:"), "virtual.files[0].digest"),
        (
            replace(VIRTUAL, stages=(replace(VIRTUAL.stages[0], shards=FULL.stages[0].shards), *VIRTUAL.stages[1:])),
            "stages[0].spans",
        ),
        (replace(VIRTUAL, stages=(replace(VIRTUAL.stages[0], nbytes=255), *VIRTUAL.stages[1:])), "stages[0].nbytes"),
        (with_spans(0, (2, 0, 128)), "stages[0].spans[0].file"),
        (with_spans(0, (1, 0, 0)), "stages[0].spans[0]"),
        (with_spans(0, (0, 80, 209)), "stages[0].spans[0]"),
        (with_spans(0, (1, 72, 100), (0, 80, 208)), "stages[0].spans[1]"),
        (with_spans(0, (1, 72, 100), (1, 90, 200)), "stages[0].spans[1]"),
        (with_spans(1, (1, 190, 210)), ""),
    ],
)
def test_a_broken_invariant_is_refused_with_its_path(
    manifest: Manifest, where: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: check_manifest(manifest))
    assert (error.code, error.where) == ("manifest.inconsistent", f"manifest.json{where and ': '}{where}")
    wording(str(error))


def test_every_broken_invariant_is_reported_at_once(wording: Callable[[str], None]) -> None:
    broken = replace(
        with_stage(1, index=7, rank=0, nbytes=10**6),
        files=(replace(FULL.files[0], path="/etc/passwd"), replace(FULL.files[1], digest="blake3:")),
    )
    error = refusal(lambda: check_manifest(broken, "OUT/manifest.json"))
    assert (error.where, len(error.problem.splitlines())) == ("OUT/manifest.json", 6)
    wording(str(error))


def test_of_very_many_problems_twenty_are_shown_and_the_rest_counted() -> None:
    file = replace(FULL.files[0], digest="")
    files = tuple(replace(file, path=f"file-{index}") for index in range(100))
    lines = str(refusal(lambda: check_manifest(replace(FULL, files=files)))).splitlines()
    assert (len(lines), lines[-1]) == (22, "  and 80 more")


def with_params(manifest: Manifest, *counts: int) -> Manifest:
    stages = zip(manifest.stages, counts, strict=True)
    return replace(manifest, stages=tuple(replace(stage, num_params=count) for stage, count in stages))


def test_a_manifest_with_the_parameters_of_its_config_is_accepted() -> None:
    check_model(with_params(FULL, *PARAMS), SHAPE)


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_with_another_number_of_parameters_than_its_modules_have_is_refused(stage: int) -> None:
    counts = [count + (index == stage) for index, count in enumerate(PARAMS)]
    code, where = refused(lambda: check_model(with_params(FULL, *counts), SHAPE))
    assert (code, where) == ("manifest.inconsistent", f"manifest.json: stages[{stage}].num_params")


@pytest.mark.parametrize(
    ("manifest", "ties", "where"),
    [
        (replace(FULL, model=replace(FULL.model, architecture="MistralForCausalLM", num_params=1)), TIED, ""),
        (with_stage(1, modules=()), TIED, ": stages"),
        (with_stage(2, modules=("model.layers.2",)), TIED, ": stages"),
        (with_stage(3, modules=("lm_head", "model.norm")), TIED, ": stages"),
        (replace(FULL, ties=()), TIED, ": ties"),
        (FULL, (), ": ties"),
    ],
)
def test_a_manifest_of_another_model_than_the_config_is_refused(
    manifest: Manifest, ties: Any, where: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: check_model(with_params(manifest, *PARAMS), replace(SHAPE, ties=ties)))
    assert (error.code, error.where) == ("manifest.inconsistent", f"manifest.json{where}")
    wording(str(error))


def test_a_path_that_climbs_or_cannot_be_written_is_refused(wording: Callable[[str], None]) -> None:
    climbing, control = ("..", "a/../../b", "a/./b", "a//b", "a/"), ("/a", "a\\b", "a\x00", "a\x1b[2J")
    problems = [problem_with_path(path) for path in ("", "x" * 1025, *climbing, *control, "a\ud800", "a/" + "ä" * 121)]
    assert len(set(problems) - {None}) == 6
    wording("\n".join(map(str, dict.fromkeys(problems))))


TRAINED = training_manifest()
assert TRAINED.training is not None
OPTIMIZER = TRAINED.training.optimizer
assert OPTIMIZER is not None
FIRST, SECOND = OPTIMIZER.groups
DATA = TRAINED.training.data
assert DATA is not None


def with_training(**changes: Any) -> Manifest:
    assert TRAINED.training is not None
    return replace(TRAINED, training=replace(TRAINED.training, **changes))


def with_optimizer(**changes: Any) -> Manifest:
    assert isinstance(OPTIMIZER, OptimizerState)
    return with_training(optimizer=replace(OPTIMIZER, **changes))


def with_first_group(**changes: Any) -> Manifest:
    return with_optimizer(groups=(replace(FIRST, **changes),))


@pytest.mark.parametrize(
    ("manifest", "where"),
    [
        (with_optimizer(groups=()), "training.optimizer.groups"),
        (with_optimizer(groups=(FIRST, FIRST)), "training.optimizer.groups"),
        (with_optimizer(groups=(FIRST, SECOND, SECOND)), "training.optimizer.groups[2].fqns"),
        (with_first_group(beta2=1.0), "training.optimizer.groups[0].beta2"),
        (with_first_group(weight_decay=math.nan), "training.optimizer.groups[0].weight_decay"),
        (with_optimizer(max_norm=-1.0), "training.optimizer.max_norm"),
        (with_optimizer(max_norm=math.inf), "training.optimizer.max_norm"),
        (with_training(step=1 << 63), "training.step"),
        (with_training(num_tokens=-1), "training.num_tokens"),
        (with_training(random=2 * TRAINED.training.random[:1]), "training.random[1]"),
        (with_training(data=replace(DATA, digest="7")), "training.data.digest"),
        (
            with_training(data=replace(DATA, cursor=replace(DATA.cursor, sources=()))),  # type: ignore[type-var]
            "training.data.cursor.sources",
        ),
        (
            replace(TRAINED, stages=(replace(TRAINED.stages[0], nbytes=4353), *TRAINED.stages[1:])),  # weights alone
            "stages[0].nbytes",
        ),
    ],
)
def test_a_broken_invariant_of_training_state_is_refused_with_its_path(
    manifest: Manifest, where: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: check_manifest(manifest))
    assert (error.code, error.where) == ("manifest.inconsistent", f"manifest.json: {where}")
    wording(str(error))


@pytest.mark.parametrize("value", ["[" * 200_000, "0.9.5"])
def test_option_of_an_optimizer_that_is_not_json_is_refused(value: str) -> None:
    options = (AlgorithmOption(name="momentum", value=value),)
    assert [place for place, _ in problems(with_first_group(options=options))] == [
        "training.optimizer.groups[0].options"
    ]


@pytest.mark.parametrize("manifest", [with_training(optimizer=None), replace(TRAINED, training=None)])
def test_optimizer_state_without_an_optimizer_is_refused_shard_by_shard(manifest: Manifest) -> None:
    found = [place for place, _ in problems(manifest)]
    assert found == [f"stages[{stage}].shards[{shard}].holds" for stage in (0, 1, 3) for shard in (1, 2)]


def test_optimizer_without_its_state_is_refused() -> None:
    found = [place for place, _ in problems(replace(TRAINED, stages=full_manifest().stages))]
    assert found == ["training.optimizer"] * 2
