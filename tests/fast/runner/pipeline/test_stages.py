"""Chunks, stage metadata, and the schedule of a single rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from manifests.errors import ManifestError
from manifests.placement import Placement
from runner.config.schema import BatchOptions
from runner.models import Family, family_for
from runner.pipeline.chunk import build_chunks
from runner.pipeline.schedule import Schedule, build_schedule
from runner.pipeline.stage_io import StageIO, form_of
from runner.pipeline.stage_metadata import TensorMetadata, plan_stage_metadata
from runner.pipeline.timetable import find_timetable
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


def test_sequences_of_another_length_are_refused_before_they_meet_stale_buffers(folder: Path) -> None:
    schedule = one_rank_schedule(family_for(read_config(folder), max_seq_len=16), folder, 1)
    short = padded_batch(0, size=4, seq_len=15)
    for act in (schedule.train, schedule.evaluate):
        with pytest.raises(ValueError, match=r"found \(4, 15\)"):
            act(short)
