"""Ties, norm, clip and step, on one rank without processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from manifests.errors import InputError, RankError
from manifests.placement import Placement
from manifests.schedules.learning_rate import rate_at
from runner.config.loss import BalanceOptions
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions, OptimOptions
from runner.data.rows import RowForm
from runner.models import family_for
from runner.models.family import Family
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import StageChunk, build_chunks, materialize, named_hf_parameters
from runner.pipeline.losses import Loss
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.profiling.trace import Clock
from runner.tensors.local_shard import persistent_buffers
from runner.training.expert_balance import balance_experts
from runner.training.gradient_norm import StepTotals, clip_gradients, sum_squares
from runner.training.mixed_precision import keep_masters, master_of, round_masters
from runner.training.optimizer import Optimizer
from runner.training.step import Engine, eval_counted, train_step
from runner.training.ties import Tie, build_ties, check_equal, check_loaded, lead_parameters, sync_gradients
from tests.fast.manifests.models.built import read_config as read_tiny
from tests.fast.runner.tiny import (
    CPU,
    EMBEDDING,
    HEAD,
    fill,
    head_tie,
    padded_batch,
    read_config,
    save_model,
    split_evenly,
)

READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "nonzero", "equal")
OPTIM = OptimOptions(lr=1e-2, max_norm=0.5, warmup_steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, num_hidden_layers=2, tie_word_embeddings=True)
    return path


def summed_and_counted(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def build(
    folder: Path, num_stages: int, loss: Loss | None = None
) -> tuple[tuple[StageChunk, ...], tuple[Tie, ...], Engine]:
    family = family_for(read_config(folder), max_seq_len=16)
    stage_modules = split_evenly(family.modules, num_stages)
    placement = Placement(num_stages=num_stages, num_ranks=1)
    chunks = build_chunks(family, stage_modules, range(num_stages))
    fill(chunks, folder)
    ties = build_ties([head_tie(stage_modules)], chunks, placement, timedelta(seconds=1))
    return chunks, ties, engine_of(family, stage_modules, chunks, ties, loss)


def engine_of(
    family: Family,
    stage_modules: Sequence[tuple[str, ...]],
    chunks: tuple[StageChunk, ...],
    ties: tuple[Tie, ...],
    loss: Loss | None = None,
    balance: BalanceOptions | None = None,
) -> Engine:
    placement = Placement(num_stages=len(stage_modules), num_ranks=1)
    parameters = lead_parameters(chunks, ties)
    batch = BatchOptions(global_batch=4, microbatch=1, seq_len=16)
    timetable = find_timetable("1F1B", placement, batch.num_microbatches)
    metadata = plan_stage_metadata(family, stage_modules, torch.float32)
    schedule = build_schedule(timetable, chunks, metadata, batch, loss=loss)
    clock = Clock(timetable.planned(batch.num_microbatches), 0)
    totals = StepTotals(parameters, ties, device=CPU, num_times=clock.num_times)
    mesh = Mesh(degrees=ParallelDims(pipeline=1), rank=0)
    return Engine(
        schedule=schedule,
        ties=ties,
        totals=totals,
        optimizer=Optimizer(parameters, OPTIM),
        clock=clock,
        loss=loss,
        balance=balance and balance_experts(chunks, balance, batch, mesh, is_compiled=False),
    )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_tied_weight_is_one_storage_with_one_leader(folder: Path, num_stages: int) -> None:
    chunks, ties, engine = build(folder, num_stages)
    named = dict(item for chunk in chunks for item in named_hf_parameters(chunk))
    assert named[EMBEDDING].data_ptr() == named[HEAD].data_ptr()
    assert [fqn for fqn, _ in engine.optimizer.parameters] == [fqn for fqn in named if fqn != HEAD]
    assert [(tie.fqn, tie.ranks, tie.is_counted_here, tie.group) for tie in ties] == [(EMBEDDING, (0,), True, None)]
    check_equal(ties)

    train_step(engine, padded_batch(0, size=4, seq_len=16), 0)
    assert torch.equal(named[EMBEDDING], named[HEAD])
    assert named[HEAD].grad is None


def test_copies_that_differ_in_masters_alone_are_refused(folder: Path) -> None:
    family = family_for(read_config(folder), max_seq_len=16)
    chunks = build_chunks(family, [family.modules], [0])
    fill(chunks, folder, torch.bfloat16)
    keep_masters(chunks, torch.float32)
    named, tie = dict(named_hf_parameters(chunks[0])), head_tie([tuple(family.modules)])
    for parameter in named.values():
        master_of(parameter).copy_(parameter.detach())
    check_loaded([tie], chunks)
    master_of(named[HEAD])[0, 0] *= 1 + 2**-20
    round_masters(named.values())
    assert torch.equal(named[HEAD], named[EMBEDDING])
    with pytest.raises(InputError) as error:
        check_loaded([tie], chunks)
    assert (error.value.code, error.value.where) == ("shard.tied-weights-differ", f"tied weight {EMBEDDING}")


def test_norm_is_exact_and_clipping_keeps_the_direction() -> None:
    parameters = [(name, nn.Parameter(torch.zeros(3))) for name in ("a", "b", "c")]
    for (_, parameter), value in zip(parameters, (2.0, -1.0, None), strict=True):
        parameter.grad = None if value is None else torch.full((3,), value)
    totals = StepTotals(parameters, (), device=CPU).reduce(0.25, 7)
    assert (totals.loss, totals.num_tokens) == (0.25, 7)
    assert totals.norm == pytest.approx(math.sqrt(15), rel=1e-15)
    clip_gradients([parameter for _, parameter in parameters], totals.norm, 1.5)
    factor = torch.tensor(1.5 / (math.sqrt(15) + 1e-6))
    first, second = parameters[0][1].grad, parameters[1][1].grad
    assert first is not None
    assert second is not None
    assert torch.equal(first, torch.full((3,), 2.0) * factor)
    assert torch.equal(second, -torch.ones(3) * factor)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_step_reads_the_device_once(num_stages: int, folder: Path) -> None:
    """Each read waits for a GPU. Those of torch's optimizer are of its own counts of steps, which are on the host."""
    _, _, engine = build(folder, num_stages, Loss(summed_and_counted, RowForm()))
    assert reads_of(engine) == [["tolist"], ["tolist"]]


def test_tokens_of_experts_are_in_what_is_read_anyway() -> None:
    family = family_for(read_tiny("tiny-deepseek-v3"), max_seq_len=16)
    stage_modules = split_evenly(family.modules, 2)
    reads = []
    for options in (None, BalanceOptions(), BalanceOptions(bias_rate=0.1)):
        chunks = build_chunks(family, stage_modules, range(2))
        for chunk in chunks:
            materialize(chunk, device=CPU, dtype=torch.float32)
            for tensor in (*chunk.parameters(), *(buffer for _, buffer in persistent_buffers(chunk.body))):
                nn.init.normal_(tensor, std=0.05)
        reads.append(reads_of(engine_of(family, stage_modules, chunks, (), balance=options)))
    assert reads[0][0].count("tolist") == 1
    assert reads[0] == reads[1] == reads[2]


def reads_of(engine: Engine) -> list[list[str]]:
    """Return what reads the device in each of two steps, outside torch's optimizer."""
    reads: list[list[str]] = []

    class Reads(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            caller = str(sys._getframe(1).f_globals["__name__"])
            if getattr(function, "__name__", "") in READS and not caller.startswith("torch.optim."):
                reads[-1].append(function.__name__)
            return function(*args, **kwargs or {})

    for step in range(2):
        reads.append([])
        batch = padded_batch(step, size=4, seq_len=16, vocab_size=96)
        with Reads():
            report = train_step(engine, batch, step)
        assert report.loss > 0
        assert (report.experts is None) == (engine.balance is None)
    return reads


def test_norm_of_a_large_gradient_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(10, 10))
    parameter.grad = torch.arange(100.0).view(10, 10).t()
    whole = StepTotals([("a", parameter)], (), device=CPU)
    monkeypatch.setattr("runner.training.gradient_norm._CPU_PART", 7)
    assert whole.reduce(None, 0).norm == pytest.approx(math.sqrt(sum(n * n for n in range(100))), rel=1e-15)


def test_parameter_without_a_gradient_of_its_own_counts_as_zero_on_its_device() -> None:
    """Meta tensors meet no other device's, as a GPU's do not; that they hold no numbers shows last."""
    meta = torch.device("meta")
    parameters = [(name, nn.Parameter(torch.zeros(3, device=meta))) for name in ("a", "b")]
    parameters[0][1].grad = torch.ones(3, device=meta)
    with pytest.raises(RuntimeError, match=r"is not on the expected device cpu!$"):
        torch.stack([torch.zeros(()), torch.zeros((), device=meta)])
    with pytest.raises(NotImplementedError, match=r"^Cannot copy out of meta tensor; no data!$"):
        StepTotals(parameters, (), device=meta).reduce(None, 0)


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_loss_that_is_not_finite_stops_the_step_where_all_gradients_are(loss: float) -> None:
    with pytest.raises(RankError) as error:
        StepTotals([], (), device=CPU).reduce(loss, 1)
    assert (error.value.code, error.value.where) == ("rank.not-finite", "")


@pytest.mark.parametrize("count", [0.0, -2.0])
def test_loss_over_no_positive_count_stops_the_step(count: float) -> None:
    totals = StepTotals([], (), device=CPU)
    with pytest.raises(RankError) as error:
        totals.reduce(3.0, 4, count)
    assert error.value.code == "rank.not-finite"
    assert totals.reduce(0.0, 4, 0.0).loss == 0.0


def test_step_reports_what_torch_computes(folder: Path) -> None:
    _, _, engine = build(folder, 2)
    model_chunks, ties, _ = build(folder, 1)
    model = model_chunks[0].body
    named = dict(named_hf_parameters(model_chunks[0]))
    reference = torch.optim.AdamW(
        [p for fqn, p in named.items() if fqn != HEAD], lr=0.0, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(3):
        batch = padded_batch(step, size=4, seq_len=16)
        loss = torch.nn.functional.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        for parameter in named.values():
            parameter.grad = None
        torch.autograd.backward(loss)
        sync_gradients(ties)
        norm = nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], 0.5)
        reference.param_groups[0]["lr"] = rate_at(step, OPTIM.schedule)
        reference.step()
        assert eval_counted(engine, batch)[0] == pytest.approx(loss.item(), rel=1e-5)
        report = train_step(engine, batch, step)
        assert report.loss == pytest.approx(loss.item(), rel=1e-5)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert (report.num_tokens, report.lr) == (batch.num_tokens, rate_at(step, OPTIM.schedule))


@pytest.mark.parametrize("decays", [True, False])
def test_vectors_decay_unless_the_option_says_otherwise(decays: bool) -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    options = OptimOptions(lr=0.5, weight_decay=0.1, weight_decay_1d=decays)
    optimizer = Optimizer((("one", matrix), ("two", vector)), options)
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0)
    assert matrix.tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert vector.tolist() == [pytest.approx(0.95) if decays else 1.0] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [1 << 18, 1 << 10])
def test_squares_are_summed_in_float64(part: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the small ones would be lost beside the large one."""
    monkeypatch.setattr("runner.training.gradient_norm._CPU_PART", part)
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 257), (7,), (1,), (0,)]
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    gradients[0][0, 0] = 1e4
    exact = [math.fsum(value * value for value in gradient.flatten().tolist()) for gradient in gradients]
    assert sum_squares(gradients).tolist() == pytest.approx(exact, rel=1e-12)
