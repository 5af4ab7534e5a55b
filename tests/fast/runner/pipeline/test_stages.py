"""Chunks, stage metadata, and the schedule of a single rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from manifests.errors import ManifestError
from manifests.placement import Placement
from runner.config.schema import BatchOptions
from runner.data.sequences import Batch
from runner.models import Family, family_for
from runner.pipeline.chunk import build_chunks, materialize, named_hf_parameters
from runner.pipeline.schedule import Schedule, build_schedule
from runner.pipeline.stage_io import StageIO, form_of
from runner.pipeline.stage_metadata import TensorMetadata, plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from tests.fast.runner.models.test_families import LLAMA
from tests.fast.runner.tiny import CPU, fill, load_model, padded_batch, read_config, save_model, split_evenly
from tests.process.runner.pipeline.nested_cases import Toy

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


def test_wire_of_a_family_that_hands_on_trees_is_traced() -> None:
    metadata = plan_stage_metadata(Toy(), split_evenly(Toy.modules, 4), torch.float32)
    tokens, first, *_, logits = (metadata.form(boundary, 2, 5) for boundary in range(5))
    assert [(tuple(e.shape), e.dtype) for e in tokens.examples()] == [((2, 5), torch.int64)]
    assert [(tuple(e.shape), e.dtype, e.requires_grad) for e in logits.examples()] == [
        ((2, 5, 40), torch.float32, True)
    ]
    assert [str(leaf) for leaf in first.leaves] == [
        *("float32 [2, 5, 16]", "float32 [2, 5, 16]"),  # hidden, and the same for the head
        *("float32 [5, 16]", "float32 [5, 16]", "int64 [2, 5]", "bool [2, 5]"),  # angles, tokens, mask
        *("1", "'toy'", "0.5", "True"),
    ]
    assert metadata.form(1, 2, 9).examples()[0].shape == (2, 9, 16)


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


def test_chunk_has_its_own_modules_under_hugging_face_names() -> None:
    chunks = build_chunks(FAMILY, split_evenly(FAMILY.modules, 5), (1, 4))
    assert [chunk.stage for chunk in chunks] == [1, 4]
    modules = [{fqn.rsplit(".", 3)[0] for fqn, _ in named_hf_parameters(chunk)} for chunk in chunks]
    assert {fqn.split(".self_attn")[0].split(".mlp")[0] for fqn in modules[0]} >= {"model.layers.2"}
    names = [fqn for fqn, _ in named_hf_parameters(chunks[1])]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert all(parameter.is_meta for chunk in chunks for parameter in chunk.parameters())


def test_materialized_chunk_computes_in_the_dtype_asked_for() -> None:
    (chunk,) = build_chunks(FAMILY, ((LAYERS[0],),), (0,))
    materialize(chunk, device=CPU, dtype=torch.bfloat16)
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter)
    found = chunk(torch.ones(1, 8, 16, dtype=torch.bfloat16))
    assert (found.dtype, found.device.type, bool(found.isfinite().all())) == (torch.bfloat16, "cpu", True)


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


@pytest.mark.parametrize("num_stages", [1, 3])
def test_loss_is_the_mean_over_all_valid_tokens(folder: Path, num_stages: int) -> None:
    family = family_for(read_config(folder), max_seq_len=16)
    schedule = one_rank_schedule(family, folder, num_stages)
    batch = padded_batch(0, size=4, seq_len=16)
    logits = load_model(folder)(batch.tokens).logits
    expected = cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()
    loss = schedule.evaluate(batch)
    assert loss is not None
    assert math.isclose(loss, expected, rel_tol=1e-6)
    assert schedule.train(batch) == loss


def test_sequences_of_another_length_are_refused_before_they_meet_stale_buffers(folder: Path) -> None:
    schedule = one_rank_schedule(family_for(read_config(folder), max_seq_len=16), folder, 1)
    short = padded_batch(0, size=4, seq_len=15)
    for act in (schedule.train, schedule.evaluate):
        with pytest.raises(ValueError, match=r"found \(4, 15\)"):
            act(short)


def test_shape_that_is_declared_may_be_any(folder: Path) -> None:
    schedule = one_rank_schedule(family_for(read_config(folder), max_seq_len=16), folder, 2)
    cut = BatchOptions(global_batch=3, microbatch=1, seq_len=9)
    batch = padded_batch(0, size=3, seq_len=9)
    logits = load_model(folder)(batch.tokens).logits
    expected = cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()
    assert schedule.train(batch, cut) == schedule.evaluate(batch, cut) == pytest.approx(expected, rel=1e-6)


def test_batch_counts_its_labels() -> None:
    batch = padded_batch(3)
    assert isinstance(batch, Batch)
    assert batch.num_tokens == int((batch.labels != -100).sum())
