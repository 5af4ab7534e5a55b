"""Recomputed layers, chunked heads and masters, on one rank: same numbers, less memory, finer weights."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from manifests.errors import UsageError
from manifests.models.training import Recompute
from manifests.placement import Placement
from manifests.schedules.actions import Action, Table
from manifests.schedules.lowering import lower
from manifests.schema import StateKind
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions, ComputeOptions, OptimOptions
from runner.data.sequences import Batch
from runner.models import family_for
from runner.parallel.mesh import Mesh
from runner.parallel.parallelize import Parallel, parallelize
from runner.pipeline.chunk import StageChunk, build_chunks, layers_of, materialize, named_hf_parameters
from runner.pipeline.schedule import Pipeline, Schedule, build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import Timetable, find_timetable
from runner.tensors.dtensor import local_of
from runner.training.activation_checkpoint import apply_compute_options
from runner.training.mixed_precision import keep_masters, master_of, round_masters
from runner.training.optimizer import Optimizer
from tests.fast.manifests.models import built
from tests.fast.runner.tiny import CPU, fill, padded_batch, read_config, save_model, split_evenly

BATCH = BatchOptions(global_batch=4, microbatch=2, seq_len=32)
HALF = ComputeOptions(dtype="bf16", master_dtype="bf16")
MIXED = ComputeOptions(dtype="bf16", master_dtype="fp32")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, num_hidden_layers=4)
    return path


def build(folder: Path, options: ComputeOptions, num_stages: int = 1) -> tuple[tuple[StageChunk, ...], Schedule]:
    family = family_for(read_config(folder), max_seq_len=BATCH.seq_len)
    stage_modules = split_evenly(family.modules, num_stages)
    placement = Placement(num_stages=num_stages, num_ranks=1)
    chunks = build_chunks(family, stage_modules, range(num_stages))
    dtype = DTYPES[options.dtype]
    fill(chunks, folder, dtype)
    if options.has_masters:
        keep_masters(chunks, torch.float32)
        whole = build_chunks(family, stage_modules, range(num_stages))
        fill(whole, folder)
        for (_, parameter), (_, weight) in zip(parameters_of(chunks), parameters_of(whole), strict=True):
            master_of(parameter).copy_(weight.detach())
        round_masters(parameter for _, parameter in parameters_of(chunks))
    apply_compute_options(chunks, num_stages, options)
    timetable = find_timetable("1F1B", placement, BATCH.num_microbatches)
    return chunks, build_schedule(timetable, chunks, plan_stage_metadata(family, stage_modules, dtype), BATCH)


def parameters_of(chunks: Iterable[StageChunk]) -> list[tuple[str, torch.nn.Parameter]]:
    return [item for chunk in chunks for item in named_hf_parameters(chunk)]


def gradients_of(chunks: Iterable[StageChunk]) -> Mapping[str, torch.Tensor]:
    return {fqn: parameter.grad for fqn, parameter in parameters_of(chunks) if parameter.grad is not None}


def train(folder: Path, options: ComputeOptions, num_stages: int = 1) -> tuple[float, Mapping[str, torch.Tensor]]:
    """Give loss and gradients of a forward and backward."""
    chunks, schedule = build(folder, options, num_stages)
    batch = padded_batch(0, size=4)
    loss = schedule.train(batch)
    assert loss is not None
    assert schedule.evaluate(batch) == pytest.approx(loss.item(), rel=1e-6)
    return loss.item(), gradients_of(chunks)


def peak_nbytes_of(work: Callable[[], object]) -> int:
    """Return the most memory that torch's allocator gave out at a time meanwhile."""
    gc.disable()  # what earlier tests left would be freed, and subtracted
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            work()
    finally:
        gc.enable()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def peak_nbytes(folder: Path, options: ComputeOptions) -> int:
    _, schedule = build(folder, options)
    return peak_nbytes_of(lambda: schedule.train(padded_batch(0, size=4)))


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[float, Mapping[str, torch.Tensor]]:
    return train(folder, ComputeOptions())


@pytest.mark.parametrize("recompute", ["full", "selective", 2, 3])
def test_recomputed_layers_give_the_same_bits(
    folder: Path, recompute: Recompute, plain: tuple[float, Mapping[str, torch.Tensor]]
) -> None:
    loss, gradients = plain
    again, found = train(folder, ComputeOptions(recompute=recompute), num_stages=2)
    assert again == loss
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[fqn], gradient) for fqn, gradient in gradients.items())


def test_the_more_is_recomputed_the_less_is_kept(folder: Path) -> None:
    ways: tuple[Recompute, ...] = ("full", 2, "selective", "none")
    full, half, selective, none = (peak_nbytes(folder, ComputeOptions(recompute=way)) for way in ways)
    assert full < half < none
    assert full < selective < none
    assert full < 0.6 * none


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 1000])
def test_head_in_chunks_gives_the_same_gradients(
    folder: Path, num_tokens: int, plain: tuple[float, Mapping[str, torch.Tensor]]
) -> None:
    loss, gradients = plain
    again, found = train(folder, ComputeOptions(loss_chunk=num_tokens), num_stages=2)
    assert again == pytest.approx(loss, rel=1e-6)
    for fqn, gradient in gradients.items():
        assert float((found[fqn] - gradient).norm() / gradient.norm()) < 1e-6, fqn


def test_chunks_bound_the_memory_of_logits(tmp_path: Path) -> None:
    save_model(tmp_path, num_hidden_layers=1, vocab_size=4000, hidden_size=16, intermediate_size=32)
    logits_nbytes = BATCH.microbatch * BATCH.seq_len * 4000 * 4
    whole, chunked = (peak_nbytes(tmp_path, ComputeOptions(loss_chunk=size)) for size in (None, 8))
    assert whole - chunked > 2 * logits_nbytes


def test_head_must_be_on_the_last_stage(folder: Path, wording: Callable[[str], None]) -> None:
    family = family_for(read_config(folder), max_seq_len=8)
    chunks = build_chunks(family, (family.modules, ()), (0, 1))
    with pytest.raises(UsageError) as error:
        apply_compute_options(chunks, 2, ComputeOptions(loss_chunk=8))
    assert (error.value.where, error.value.code) == ("--loss-chunk", "options.loss-chunk")
    wording(str(error.value))


def test_model_that_changes_its_logits_after_the_head_is_refused(wording: Callable[[str], None]) -> None:
    family = family_for(built.read_config("tiny-gemma2"), max_seq_len=8)
    chunks = build_chunks(family, (family.modules,), (0,))
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=torch.float32)
    for _, parameter in parameters_of(chunks):
        torch.nn.init.normal_(parameter)
    with pytest.raises(UsageError) as error:
        apply_compute_options(chunks, 1, ComputeOptions(loss_chunk=8))
    assert (error.value.where, error.value.code) == ("--loss-chunk", "options.loss-chunk")
    wording(str(error.value))


def steps(folder: Path, options: ComputeOptions, count: int) -> tuple[list[float], tuple[StageChunk, ...]]:
    chunks, schedule = build(folder, options)
    optimizer = Optimizer(parameters_of(chunks), OptimOptions(lr=1e-3, max_norm=0))
    losses = []
    for step in range(count):
        optimizer.zero_gradients()
        loss = schedule.train(padded_batch(step % 4, size=4))
        assert loss is not None
        losses.append(loss.item())
        optimizer.step(step)
    return losses, chunks


def test_masters_follow_float32_closely_and_keep_what_bfloat16_would_lose(folder: Path) -> None:
    expected, wanted = steps(folder, ComputeOptions(), 20)
    mixed, chunks = steps(folder, MIXED, 20)
    _, halves = steps(folder, HALF, 20)
    assert expected[-1] < expected[0] - 1
    assert max(abs(found - loss) for found, loss in zip(mixed, expected, strict=True)) < 0.02
    weights = dict(parameters_of(wanted))
    off_by = [
        sum(
            float((master_of(each).detach().float() - weights[fqn].detach()).square().sum())
            for fqn, each in parameters_of(run)
        )
        for run in (chunks, halves)
    ]
    assert off_by[0] < 0.25 * off_by[1]
    for fqn, parameter in parameters_of(chunks):
        assert (parameter.dtype, master_of(parameter).dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(parameter, master_of(parameter).bfloat16()), fqn
        assert not torch.equal(parameter.float(), master_of(parameter)), fqn


def test_gradients_of_microbatches_are_added_up_in_float32(folder: Path) -> None:
    chunks, schedule = build(folder, MIXED)
    schedule.train(padded_batch(0, size=4))
    found = {fqn: gradient.clone() for fqn, gradient in gradients_of(chunks).items()}
    check_equal(found, add_up(folder, MIXED, 0, BATCH.microbatch))


def add_up(folder: Path, compute: ComputeOptions, step: int, microbatch: int) -> Mapping[str, torch.Tensor]:
    """Add up, in float32, the gradients that autograd alone computes of each microbatch."""
    alike = replace(compute, master_dtype=compute.dtype)
    batch, gradients = padded_batch(step, size=BATCH.global_batch), list[Mapping[str, torch.Tensor]]()
    for begin in range(0, BATCH.global_batch, microbatch):
        chunks, _ = build(folder, alike)
        rows = batch.rows(begin, microbatch)
        logits = chunks[0].body(rows.tokens).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, rows.labels.flatten(), reduction="sum")
        torch.autograd.backward(loss / batch.num_tokens)
        gradients.append(gradients_of(chunks))
    return {fqn: reduce(torch.add, [part[fqn].float() for part in gradients]) for fqn in gradients[0]}


def check_equal(gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for fqn, gradient in expected.items():
        assert gradients[fqn].dtype == gradient.dtype
        assert torch.equal(gradients[fqn], gradient), fqn


def test_masters_take_the_steps_that_torch_takes_in_float32(folder: Path) -> None:
    chunks, schedule = build(folder, MIXED)
    optimizer = Optimizer(parameters_of(chunks), OptimOptions(lr=1e-3, max_norm=0))
    weights = {fqn: torch.nn.Parameter(master_of(parameter).clone()) for fqn, parameter in parameters_of(chunks)}
    reference = torch.optim.AdamW(weights.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        optimizer.zero_gradients()
        schedule.train(padded_batch(step, size=4))
        for fqn, gradient in gradients_of(chunks).items():
            weights[fqn].grad = gradient.clone()
        reference.step()
        optimizer.step(step)
    for fqn, parameter in parameters_of(chunks):
        assert torch.equal(master_of(parameter), weights[fqn]), fqn
        first = optimizer.state_of(parameter, StateKind(name="exp_avg", shape="parameter"))
        assert first is not None
        assert torch.equal(first, reference.state[weights[fqn]]["exp_avg"]), fqn


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """One rank that FSDP can shard over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_masters_get_the_gradients_of_fsdps_mixed_precision(folder: Path, alone: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (whole,), _ = build(folder, ComputeOptions())
    for module in (*(layer for _, layer in layers_of(whole)), whole.body):
        fully_shard(module, mesh=alone, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator] # gloo has no other
    batch = padded_batch(0, size=4)
    for rows in (slice(0, 2), slice(2, 4)):
        whole.body.set_requires_gradient_sync(rows.start > 0)  # type: ignore[operator]
        logits = whole.body(batch.tokens[rows]).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, batch.labels[rows].flatten(), reduction="sum")
        torch.autograd.backward(loss / batch.num_tokens)
    chunks, schedule = build(folder, MIXED)
    schedule.train(batch)
    found = gradients_of(chunks)
    for fqn, parameter in named_hf_parameters(whole):
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(found[fqn], parameter.grad.to_local()), fqn


@pytest.mark.parametrize("backward", ["IIIIWWWW", "IWIWIWIW"])
def test_split_backwards_accumulate_shards_in_float32(folder: Path, alone: DeviceMesh, backward: str) -> None:
    """Where several second parts follow each other, too: the gradients are those of whole backwards, bit by bit."""
    assert alone.size() == 1
    check_equal(*(gradients_of_shards(folder, MIXED, backward=kinds) for kinds in (backward, "BBBB")))


# Gradients are reduced in another dtype than that of masters.
REDUCED: Mapping[str, ComputeOptions] = {
    "mixed": replace(MIXED, reduce_dtype="bf16"),
    "fp32": ComputeOptions(reduce_dtype="bf16"),
    "bf16": HALF,
}


@pytest.mark.parametrize("name", REDUCED)
def test_shards_accumulate_in_the_wider_dtype_of_masters_and_reduction(
    folder: Path, alone: DeviceMesh, name: str
) -> None:
    """A rank alone reduces nothing: its sums are rounded once, to the dtype of masters."""
    assert alone.size() == 1
    compute = REDUCED[name]
    sums, master = add_up(folder, compute, 0, 1), DTYPES[compute.master_dtype]
    check_equal(gradients_of_shards(folder, compute), {fqn: gradient.to(master) for fqn, gradient in sums.items()})


def shard(chunks: tuple[StageChunk, ...], folder: Path, compute: ComputeOptions) -> Parallel:
    """Fill chunks, and let FSDP shard them over all ranks."""
    master, reduced = (DTYPES[name] for name in (compute.master_dtype, compute.reduce_dtype))
    fill(chunks, folder, master)
    sizes = (1, 1, dist.get_world_size(), 1)
    mesh = Mesh(
        degrees=ParallelDims(pipeline=1, shard=2),
        rank=dist.get_rank(),
        device_mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
    )
    for chunk in chunks:
        parallelize(chunk, mesh, compute)
    return Parallel(mesh=mesh, chunks=chunks, reduce_dtype=reduced, dtype=master)


def test_shards_of_a_head_that_is_trained_alone_accumulate_in_float32(folder: Path, alone: DeviceMesh) -> None:
    """Its loss in chunks is computed after the body, of which no output has a gradient."""
    assert alone.size() == 1
    family = family_for(read_config(folder), max_seq_len=BATCH.seq_len)
    chunks, compute = build_chunks(family, (family.modules,), (0,)), replace(MIXED, loss_chunk=16)
    chunks[0].freeze(lambda fqn: fqn.startswith("lm_head."))
    parallel = shard(chunks, folder, compute)
    apply_compute_options(chunks, 1, compute)
    options, placement = replace(BATCH, global_batch=1, microbatch=1), Placement(num_stages=1, num_ranks=1)
    metadata = plan_stage_metadata(family, (family.modules,), torch.bfloat16)
    schedule = build_schedule(find_timetable("1F1B", placement, 1), chunks, metadata, options)

    def gradient_of(rows: Batch) -> torch.Tensor:
        chunks[0].zero_grad()
        parallel.defer_gradient_sync()
        schedule.train(rows, replace(options, global_batch=len(rows.tokens)))
        parallel.reduce_gradients()
        (gradient,) = gradients_of(chunks).values()
        return local_of(gradient).clone()

    batch = padded_batch(0, size=BATCH.global_batch)
    parts = [gradient_of(batch.rows(number, 1)) for number in range(BATCH.global_batch)]
    assert torch.equal(gradient_of(batch), reduce(torch.add, parts))


def gradients_of_shards(
    folder: Path, compute: ComputeOptions, step: int = 0, backward: str = "BBBB"
) -> Mapping[str, torch.Tensor]:
    """Run microbatches of one row through two stages that FSDP shards over all ranks.

    `backward` has the kinds of the last stage's actions.
    """
    family = family_for(read_config(folder), max_seq_len=BATCH.seq_len)
    stage_modules = split_evenly(family.modules, 2)
    chunks, options = build_chunks(family, stage_modules, range(2)), replace(BATCH, microbatch=1)
    parallel = shard(chunks, folder, compute)
    microbatches = range(options.num_microbatches)
    actions = [Action(stage=stage, kind="F", microbatch=number) for stage in range(2) for number in microbatches]
    counts: Counter[str] = Counter()
    for kind in backward:
        actions.append(Action(stage=1, kind=kind, microbatch=counts[kind]))
        counts[kind] += 1
    actions += (Action(stage=0, kind="B", microbatch=number) for number in microbatches)
    placement = Placement(num_stages=2, num_ranks=1)
    table = lower(Table(placement=placement, num_microbatches=len(microbatches), ranks=(tuple(actions),)))
    metadata = plan_stage_metadata(family, stage_modules, DTYPES[compute.dtype])
    timetable = Timetable(name="split", placement=placement, file=table)
    pipeline = Pipeline(timetable, chunks, metadata, options, parallel.mesh.pipeline)
    parallel.defer_gradient_sync()
    pipeline.train(padded_batch(step, size=options.global_batch))
    parallel.reduce_gradients()
    return {fqn: local_of(gradient) for fqn, gradient in gradients_of(chunks).items()}
