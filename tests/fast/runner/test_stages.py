"""Chunks, the wire between them, and the schedule of a single rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from manifests.errors import InputError, UsageError
from manifests.placement import Placement
from runner.batches import Batch
from runner.chunk import build_chunks, materialize, named_hf_parameters
from runner.families import Family, family_for
from runner.recipe import BatchOptions
from runner.schedule import Schedule, build_schedule
from runner.wire import plan_wire
from tests.fast.runner.test_families import LLAMA
from tests.fast.runner.tiny import CPU, fill, padded_batch, read_config, save_model, split_evenly

FAMILY = family_for(LLAMA, max_seq_len=8)
EMBEDDING, *LAYERS, NORM, HEAD = FAMILY.modules


def test_cargo_follows_the_embedding_and_the_head() -> None:
    stages = ((), (EMBEDDING,), tuple(LAYERS), (NORM, HEAD), ())
    wire = plan_wire(FAMILY, stages, torch.bfloat16)
    assert wire.cargo == ("tokens", "tokens", "hidden", "hidden", "logits", "logits")
    examples = [wire.example(boundary, 2, 8) for boundary in (0, 2, 4)]
    assert [(tuple(e.shape), e.dtype, e.requires_grad) for e in examples] == [
        ((2, 8), torch.int64, False),
        ((2, 8, 16), torch.bfloat16, True),
        ((2, 8, 40), torch.bfloat16, True),
    ]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            ((EMBEDDING, *LAYERS), (HEAD, NORM)),
            "stages: expected model.norm as module 13 of LlamaForCausalLM, found lm_head",
        ),
        (
            ((EMBEDDING, *LAYERS), (NORM,)),
            "stages: expected 15 modules of LlamaForCausalLM, found 14",
        ),
        (
            ((EMBEDDING, *LAYERS), (NORM, HEAD, "mtp.0")),
            "stages: expected 15 modules of LlamaForCausalLM, found 16",
        ),
    ],
)
def test_stages_that_are_not_the_model_are_refused(stages: tuple[tuple[str, ...], ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        plan_wire(FAMILY, stages, torch.float32)
    assert str(error.value) == message


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
    return build_schedule(
        "GPipe" if num_stages == 1 else "Interleaved1F1B",
        chunks,
        plan_wire(family, stage_modules, torch.float32),
        Placement(num_stages=num_stages, num_ranks=1),
        BatchOptions(global_batch=4, microbatch=2, seq_len=16),
    )


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
    logits = schedule.logits(batch.tokens)
    assert logits is not None
    assert not logits.requires_grad  # evaluation keeps no activations
    expected = cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()
    loss = schedule.evaluate(batch)
    assert loss is not None
    assert math.isclose(loss, expected, rel_tol=1e-6)
    assert schedule.train(batch) == loss


def test_sequences_of_another_length_are_refused_before_they_meet_stale_buffers(folder: Path) -> None:
    schedule = one_rank_schedule(family_for(read_config(folder), max_seq_len=16), folder, 1)
    short = padded_batch(0, size=4, seq_len=15)
    for act in (schedule.train, schedule.evaluate):
        with pytest.raises(ValueError, match=r"expected tokens of shape \(4, 16\), found \(4, 15\)"):
            act(short)
    with pytest.raises(ValueError, match=r"expected tokens of shape \(4, 16\), found \(2, 16\)"):
        schedule.logits(padded_batch(0, size=2, seq_len=16).tokens)


def test_schedule_checks_its_stages_itself() -> None:
    stage_modules = split_evenly(FAMILY.modules, 2)
    wire = plan_wire(FAMILY, stage_modules, torch.float32)
    options = BatchOptions(global_batch=1, microbatch=1, seq_len=8)
    with pytest.raises(UsageError, match="1F1B needs at least 2 microbatches"):
        build_schedule("1F1B", (), wire, Placement(num_stages=2, num_ranks=2), options)


def test_batch_counts_its_labels() -> None:
    batch = padded_batch(3)
    assert isinstance(batch, Batch)
    assert batch.num_tokens == int((batch.labels != -100).sum())
