"""Heads whose logits are made a few tokens at a time, on every family: the same numbers, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.errors import UsageError
from manifests.placement import Placement
from runner.config.schema import BatchOptions, ComputeOptions
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, hf_pieces
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.training.activation_checkpoint import apply_compute_options
from tests.fast.manifests.models.built import DECODERS, TINY
from tests.fast.runner.models.decoders import Variant, fill_pieces, save_decoder, variant_ids
from tests.fast.runner.models.test_families import LLAMA
from tests.fast.runner.tiny import padded_batch, read_config, split_evenly
from tests.process.runner.training.memory_worker import status_nbytes

BATCH = BatchOptions(global_batch=4, microbatch=2, seq_len=20)
CAPPED = "tiny-gemma2"
MODELS: tuple[Variant, ...] = (
    *((name, {}) for name in (*TINY, *DECODERS) if name != CAPPED),
    (CAPPED, {"final_logit_softcapping": None}),
    ("tiny-opt", {"word_embed_proj_dim": 16}),  # a head that is narrower than the model, as OPT-350m's
    ("tiny-opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("tiny-falcon", {"tie_word_embeddings": True}),
)


def train(folder: Path, options: ComputeOptions) -> tuple[float, Mapping[str, torch.Tensor]]:
    """Give the loss of a batch on two stages of one rank, and gradients."""
    family = family_for(read_config(folder), max_seq_len=BATCH.seq_len)
    stages = split_evenly(family.modules, 2)
    chunks = tuple(StageChunk(family, stage, modules) for stage, modules in enumerate(stages))
    fill_pieces(chunks, folder)
    apply_compute_options(chunks, 2, options)
    timetable = find_timetable("1F1B", Placement(num_stages=2, num_ranks=1), BATCH.num_microbatches)
    schedule = build_schedule(timetable, chunks, plan_stage_metadata(family, stages, torch.float32), BATCH)
    batch = padded_batch(0, size=4, seq_len=20, vocab_size=96)
    loss = schedule.train(batch)
    assert loss is not None
    assert schedule.evaluate(batch) == pytest.approx(loss.item(), rel=1e-6)
    pieces = (piece for chunk in chunks for piece in hf_pieces(chunk, lambda weight: weight.grad))
    return loss.item(), {piece.fqn: piece.memory for piece in pieces}


FEW = {CAPPED, "tiny-opt", "tiny-gpt2", "tiny-deepseek-v3", "tiny-gpt-oss", "tiny-mpt"}  # heads of each form, and ties


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=name, marks=() if variant[0] in FEW or variant[1] else pytest.mark.slow)
        for variant, name in zip(MODELS, variant_ids(MODELS), strict=True)
    ],
)
def test_head_in_chunks_gives_the_same_loss_and_gradients(variant: Variant, tmp_path: Path) -> None:
    name, changes = variant
    save_decoder(tmp_path, name, **changes)
    loss, gradients = train(tmp_path, ComputeOptions())
    again, found = train(tmp_path, ComputeOptions(loss_chunk=7))
    assert again == pytest.approx(loss, rel=1e-6)
    assert found.keys() == gradients.keys()
    for fqn, gradient in gradients.items():
        assert (found[fqn] - gradient).norm() <= 1e-6 * (gradient.norm() or 1.0), fqn


@pytest.mark.parametrize("changes", [{}, {"final_logit_softcapping": 5.0}])
def test_capped_logits_are_refused_in_chunks(changes: dict[str, Any], tmp_path: Path) -> None:
    save_decoder(tmp_path, CAPPED, **changes)
    with pytest.raises(UsageError) as refused:
        train(tmp_path, ComputeOptions(loss_chunk=7))
    assert (refused.value.where, refused.value.code) == ("--loss-chunk", "options.loss-chunk")


def test_head_without_its_neighbours_is_refused_in_chunks_alike(tmp_path: Path) -> None:
    """A last stage of the head alone, as narrow as it is."""
    save_decoder(tmp_path, "tiny-opt", word_embed_proj_dim=16)
    family = family_for(read_config(tmp_path), max_seq_len=BATCH.seq_len)
    chunk = StageChunk(family, 1, family.modules[-1:])
    fill_pieces([chunk], tmp_path)
    apply_compute_options([chunk], 2, ComputeOptions(loss_chunk=7))
    assert chunk.head is not None
    assert chunk.head.width == 16


def test_dtype_of_logits_is_known_without_the_memory_of_a_head() -> None:
    """This one takes 2 GiB."""
    config = {**LLAMA, "vocab_size": 1 << 18, "hidden_size": 4096}
    family = family_for(config, max_seq_len=8)
    halves = family.modules[:1], family.modules[1:]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status_nbytes("VmRSS")
    metadata = plan_stage_metadata(family, halves, torch.bfloat16)
    assert metadata.form(2, 1, 8).examples()[0].dtype == torch.bfloat16
    assert status_nbytes("VmHWM") - before < 1 << 28
