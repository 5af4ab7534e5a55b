"""Chunks, stage metadata, and the schedule of a single rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manifests.errors import ManifestError, UsageError
from manifests.placement import Placement
from runner.config.flags import parse_training
from runner.config.schema import BatchOptions
from runner.data.rows import IGNORED, RowForm
from runner.models import Family, family_for
from runner.pipeline import losses
from runner.pipeline.chunk import StageChunk, build_chunks, layers_of
from runner.pipeline.losses import Loss, PerRow, loss_of_run
from runner.pipeline.microbatches import evaluating
from runner.pipeline.schedule import Schedule, build_schedule
from runner.pipeline.stage_io import FormError, StageIO, form_of
from runner.pipeline.stage_metadata import TensorMetadata, plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from tests.fast.manifests.models import built
from tests.fast.runner.models.test_families import LLAMA
from tests.fast.runner.tiny import fill, padded_batch, read_config, save_model, split_evenly

FAMILY = family_for(LLAMA, max_seq_len=8)
EMBEDDING, *LAYERS, NORM, HEAD = FAMILY.modules


def test_cargo_follows_the_embedding_and_the_head() -> None:
    stages = ((), (EMBEDDING,), tuple(LAYERS), (NORM, HEAD), ())
    metadata = plan_stage_metadata(FAMILY, stages, torch.bfloat16)
    assert isinstance(metadata, TensorMetadata)
    assert metadata.contents == ("tokens", "tokens", "hidden", "hidden", "logits", "logits")
    examples = [example for boundary in (0, 2, 4) for example in metadata.form(boundary, 2, 8).examples()]
    assert [(tuple(e.shape), e.dtype, e.requires_grad) for e in examples] == [
        ((2, 8), torch.int64, False),
        ((2, 8, 16), torch.bfloat16, True),
        ((2, 8, 40), torch.bfloat16, True),
    ]


@pytest.mark.parametrize(
    "stages",
    [
        ((EMBEDDING, *LAYERS), (HEAD, NORM)),
        ((EMBEDDING, *LAYERS), (NORM,)),
        ((EMBEDDING, *LAYERS), (NORM, HEAD, "mtp.0")),
    ],
)
def test_stages_that_are_not_the_model_are_refused(
    stages: tuple[tuple[str, ...], ...], wording: Callable[[str], None]
) -> None:
    with pytest.raises(ManifestError) as error:
        plan_stage_metadata(FAMILY, stages, torch.float32)
    assert (error.value.where, error.value.code) == ("stages", "manifest.wrong-modules")
    wording(str(error.value))


def test_stage_without_modules_hands_on_its_input_and_its_gradient() -> None:
    (chunk,) = build_chunks(FAMILY, ((),), (0,))
    sent = torch.randn(2, 8, 16, requires_grad=True)
    assert chunk(sent) is sent  # on one rank
    chunk.io = StageIO(inputs=form_of(sent), outputs=form_of(sent))
    received = chunk(sent)
    assert received is not sent
    assert torch.equal(received, sent)
    received.backward(torch.full_like(sent, 3.0))
    assert sent.grad is not None
    assert bool((sent.grad == 3).all())
    assert list(chunk.parameters()) == []


def one_rank_schedule(family: Family, folder: Path, num_stages: int) -> Schedule:
    stage_modules = split_evenly(family.modules, num_stages)
    chunks = build_chunks(family, stage_modules, range(num_stages))
    fill(chunks, folder)
    batch = BatchOptions(global_batch=4, microbatch=2, seq_len=16)
    timetable = find_timetable("DualPipeV", Placement(num_stages=num_stages, num_ranks=1), batch.num_microbatches)
    return build_schedule(timetable, chunks, plan_stage_metadata(family, stage_modules, torch.float32), batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, num_hidden_layers=2)
    return path


@pytest.mark.parametrize("pattern", [r"experts\.3\.", "up_proj"])
def test_one_expert_of_those_in_one_parameter_is_not_trained_alone(
    pattern: str, wording: Callable[[str], None]
) -> None:
    family = family_for(built.read_config("tiny-qwen3-moe"), max_seq_len=8)
    (chunk,) = build_chunks(family, (family.modules,), (0,))
    with pytest.raises(UsageError) as error:
        chunk.freeze(lambda fqn: re.search(pattern, fqn) is not None)
    assert (error.value.where, error.value.code) == ("--train-only", "options.train-only")
    wording(str(error.value))
    (chunk,) = build_chunks(family, (family.modules,), (0,))
    chunk.freeze(lambda fqn: ".experts." in fqn or "down_proj" in fqn)
    assert all("experts" in fqn or "down_proj" in fqn for fqn in chunk.trained_fqns())


def test_sequences_of_another_length_are_refused_before_they_meet_stale_buffers(folder: Path) -> None:
    schedule = one_rank_schedule(family_for(read_config(folder), max_seq_len=16), folder, 1)
    short = padded_batch(0, size=4, seq_len=15)
    for act in (schedule.train, schedule.evaluate):
        with pytest.raises(ValueError, match=r"found \(4, 15\)"):
            act(short)


def test_module_that_was_built_in_evaluation_mode_is_still_in_it_after_an_evaluation() -> None:
    (chunk,) = build_chunks(FAMILY, (FAMILY.modules,), (0,))
    _, frozen = next(layers_of(chunk))
    frozen.eval()
    modes = [module.training for module in chunk.modules()]
    assert chunk.training
    with evaluating([chunk]):
        assert not any(module.training for module in chunk.modules())
    assert not frozen.training
    assert [module.training for module in chunk.modules()] == modes


class Merged(nn.Module):
    """A layer that merges its adapter into its weight in evaluation mode, as those of loralib do."""

    is_merged = False

    def train(self, mode: bool = True) -> Self:
        self.is_merged = not mode
        return super().train(mode)


def test_modules_act_on_the_mode_that_they_return_to_after_an_evaluation() -> None:
    trained, frozen = Merged(), Merged().eval()
    with evaluating([nn.Sequential(trained, frozen)]):
        assert trained.is_merged
    assert not trained.is_merged
    assert frozen.is_merged


def test_module_that_several_parents_share_returns_to_its_own_mode_after_an_evaluation() -> None:
    shared = nn.Linear(1, 1)
    frozen = nn.Sequential(shared).eval()
    shared.train()
    with evaluating([nn.Sequential(shared, frozen)]):
        assert not shared.training
    assert shared.training
    assert not frozen.training


# What a loss of another package may ask of a run, and return.


def of_labels_alone(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    if not (labels != IGNORED).any():
        return logits.new_zeros(()), 0
    return logits.logsumexp(-1).sum(), len(labels)


def test_loss_that_is_a_constant_without_labels_has_gradients_of_zero(folder: Path) -> None:
    family = family_for(read_config(folder), max_seq_len=16)
    chunks = build_chunks(family, (family.modules,), (0,))
    fill(chunks, folder)
    options = BatchOptions(global_batch=1, microbatch=1, seq_len=16)
    timetable = find_timetable("1F1B", Placement(num_stages=1, num_ranks=1), 1)
    metadata = plan_stage_metadata(family, (family.modules,), torch.float32)
    schedule = build_schedule(timetable, chunks, metadata, options, loss=Loss(of_labels_alone, RowForm(), is_own=True))
    batch = padded_batch(0, size=1, seq_len=16)
    loss = schedule.train(replace(batch, labels=torch.full_like(batch.labels, IGNORED)))
    assert loss == 0
    gradients = [parameter.grad for parameter in chunks[0].parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    loss = schedule.train(batch)
    assert loss is not None
    assert loss != 0


def test_loss_of_detached_logits_is_refused() -> None:
    detached = Loss(lambda logits, labels: (logits.detach().sum(), labels.numel()), RowForm(), is_own=True)
    logits = torch.ones(1, 4, 8, requires_grad=True)
    with pytest.raises(UsageError) as error:
        detached(logits, torch.ones(1, 4, dtype=torch.long), num_tokens=4)
    assert error.value.code == "options.loss"
    with torch.no_grad():
        assert detached(logits, torch.ones(1, 4, dtype=torch.long), num_tokens=4) == 8


DATA = ("--data", "rows.jsonl", "--tokenized", "--loss", "pairs")


def pairs(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    return logits.sum(), len(labels) // 2


def load(monkeypatch: pytest.MonkeyPatch, function: Any, *flags: str) -> Loss | None:
    monkeypatch.setattr(losses, "load_entry_point", lambda *names: function)
    return loss_of_run(parse_training([*DATA, *flags]), is_split=False)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--microbatch", "3", "--global-batch", "6"),
        ("--microbatch", "2", "--shuffle"),
        ("--microbatch", "2", "--data-weight", "1"),
        ("--microbatch", "2", "--skip-bad-documents"),
    ],
)
def test_loss_over_pairs_is_refused_where_they_are_torn(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "num_together", 2, raising=False)
    with pytest.raises(UsageError) as error:
        load(monkeypatch, pairs, *flags)
    assert (error.value.code, error.value.where) == ("options.loss", "--loss pairs")
    loss = load(monkeypatch, pairs, "--microbatch", "4")
    assert loss is not None
    assert loss.num_together == 2


class Pairs:
    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *, reference: PerRow) -> tuple[torch.Tensor, int]:
        return reference.sum(), len(labels)


@pytest.mark.parametrize("function", [partial(Pairs()), Pairs, Pairs().__call__, 1])
def test_loss_whose_fields_are_not_to_be_read_is_refused(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as error:
        load(monkeypatch, function)
    assert (error.value.code, error.value.where) == ("options.loss", "--loss pairs")
    loss = load(monkeypatch, Pairs())
    assert loss is not None
    assert loss.form.per_row == ("reference",)


class PairsModule(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor, *, reference: PerRow) -> tuple[torch.Tensor, int]:
        return reference.sum(), len(labels)


def test_fields_of_a_loss_that_is_a_module_are_those_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = load(monkeypatch, PairsModule())
    assert loss is not None
    assert loss.form.per_row == ("reference",)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.weight * logits.sum(), len(labels)


def test_loss_with_parameters_that_no_optimizer_would_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as error:
        load(monkeypatch, Weighted())
    assert (error.value.code, error.value.where) == ("options.loss", "--loss pairs")
    assert load(monkeypatch, Weighted().requires_grad_(False)) is not None


def of_checkers(logits: Logits, labels: torch.Tensor) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return logits.sum(), len(labels)


def of_checkers_with_fields(logits: Logits, labels: torch.Tensor, *, reference: PerRow) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return logits.sum(), len(labels)


def test_annotations_for_type_checkers_alone_are_refused_only_where_a_loss_has_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load(monkeypatch, of_checkers) is not None
    with pytest.raises(UsageError) as error:
        load(monkeypatch, of_checkers_with_fields)
    assert (error.value.code, error.value.where) == ("options.loss", "--loss pairs")


# Nested outputs of stages as tensors, and back.


CONSTANTS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.randint(0, 2, shape).to(draw(DTYPES))


TREES = st.recursive(
    st.one_of(CONSTANTS, tensors()),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
    ),
    max_leaves=8,
)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


@given(TREES)
def test_what_is_unpacked_is_what_was_packed(value: Any) -> None:
    form = form_of(value)
    with torch.no_grad():  # a lone output is else made to require a gradient, as the test below shows
        packed = form.pack(value)
    sent = (packed,) if isinstance(packed, torch.Tensor) else packed
    assert same(form.unpack(sent), value)
    assert [(e.shape, e.dtype) for e in form.examples()] == [(tensor.shape, tensor.dtype) for tensor in sent]
    assert form == form_of(value)


HIDDEN = torch.empty(2, 3)
DECLARED = {"hidden": HIDDEN, "layer": 3, "mask": None}


@pytest.mark.parametrize(
    "output",
    [
        {**DECLARED, "hidden": HIDDEN[:1]},
        {**DECLARED, "hidden": HIDDEN.bfloat16()},
        {**DECLARED, "hidden": None},
        {**DECLARED, "layer": 4},
        {**DECLARED, "layer": True},
        {**DECLARED, "mask": HIDDEN},
        [HIDDEN, 3, None],
    ],
)
def test_output_of_another_form_than_declared_is_refused(output: Any, wording: Callable[[str], None]) -> None:
    with pytest.raises(FormError) as error:
        form_of(DECLARED).pack(output)
    wording(str(error.value))


class Block(nn.Module):
    """A layer of two matrices, which have one name in their modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = (nn.ModuleDict({"proj": nn.Linear(2, 2)}) for _ in range(2))


def test_layer_is_found_by_what_its_parameters_names_begin_with() -> None:
    blocks = nn.ModuleList([Block(), Block()])
    body = nn.ModuleDict({"layers": blocks})
    family: Any = SimpleNamespace(
        architecture="MineForCausalLM", modules=(), build=lambda modules: body, to_hf=lambda name: name
    )
    chunk = StageChunk(family, 0, ("layers.0", "layers.1"))
    assert [layer for _, layer in layers_of(chunk)] == list(blocks)
