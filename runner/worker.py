"""One rank of a training job, top to bottom."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist

from manifests.errors import InputError, RankError, UserError
from manifests.invariants import MANIFEST_NAME, check_model
from manifests.jsontext import parse_json_object
from manifests.models import model_shape
from manifests.schema import Manifest, TrainingState
from manifests.store import read_manifest, read_small_file
from runner.batches import Batch
from runner.chunk import StageChunk, build_chunks, materialize, named_hf_parameters
from runner.families import family_for
from runner.launch.local import check_world
from runner.load import load_bundle
from runner.metrics import Metrics
from runner.norm import StepTotals
from runner.optim import Optimizer
from runner.options import TrainOptions, parse_training
from runner.recipe import check_schedule, default_schedule
from runner.save import save_weights
from runner.schedule import build_schedule
from runner.sequences import read_batches, read_once
from runner.step import Engine, eval_step, train_step
from runner.ties import build_ties, check_equal, check_loaded, lead_parameters
from runner.together import AloneError, alone, together
from runner.wire import plan_wire

__all__ = ["main"]

logger = logging.getLogger("runner")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Who this process is, as torchrun says in the environment."""

    rank: int
    local_rank: int
    size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World:
        try:
            rank, local_rank, size = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except KeyError as error:
            raise InputError("", f"{error} is not set", "runner launch starts the workers") from error
        return cls(rank=rank, local_rank=local_rank, size=size)


def train(path: Path, options: TrainOptions, world: World) -> None:
    """Train the model of a manifest; every rank calls this."""
    manifest = read_manifest(path)
    check_world(manifest, world.size)
    device = _device(options, world)
    join_world(device, options)

    with together("load"):
        chunks = load_stages(manifest, path.parent, options, device, world)
    engine = build_engine(manifest, chunks, options, device)
    check_equal(engine.ties)
    metrics = Metrics(options.log_dir / "metrics.jsonl" if world.rank == 0 else None, num_steps=options.steps)
    vocab_size = chunks[0].family.vocab_size
    batches: Iterator[Batch | None] = repeat(None)
    with together("data"):
        if engine.schedule.has_first or engine.schedule.has_last:
            batches = read_batches(options.data, options.batch, folder=path.parent, vocab_size=vocab_size)

    trained = manifest.training or TrainingState(step=0, num_tokens=0)
    for step in range(options.steps):
        started_s = time.perf_counter()
        with alone(world.rank):
            batch = next(batches)
        report = train_step(engine, batch, step)
        metrics.step(step + 1, report, time.perf_counter() - started_s)
        trained = TrainingState(step=trained.step + 1, num_tokens=trained.num_tokens + report.num_tokens)
    check_equal(engine.ties)
    if options.eval_data is not None:
        metrics.evaluation(options.steps, *evaluate(engine, options, path.parent, vocab_size))
    if options.save is not None:
        tensors = {chunk.stage: dict(named_hf_parameters(chunk)) for chunk in chunks}
        save_weights(tensors, manifest, path.parent, options.save, trained, force=options.force)
        metrics.saved(options.save)


def join_world(device: torch.device, options: TrainOptions) -> None:
    """Meet the other ranks. Every later wait for one of them ends after the timeout."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s))


def load_stages(
    manifest: Manifest, root: Path, options: TrainOptions, device: torch.device, world: World
) -> tuple[StageChunk, ...]:
    """Build this rank's stages on the meta device, then fill them from their own bundles."""
    config = _config(manifest, root)
    family = family_for(config, max_seq_len=options.batch.seq_len)
    shape = model_shape(config)
    check_model(manifest, shape, str(root / MANIFEST_NAME))
    chunks = build_chunks(family, _modules(manifest), manifest.placement.stages_on(world.rank))
    for chunk in chunks:
        materialize(chunk, device=device, dtype=_DTYPES[options.dtype])
        report = load_bundle(
            dict(named_hf_parameters(chunk)), manifest, manifest.stages[chunk.stage], root, shape.ignored_suffixes
        )
        logger.info(
            "[rank %d stage %d] loaded %d tensors, %.2f GiB in %.2f s",
            world.rank,
            report.stage,
            report.num_tensors,
            report.nbytes / 2**30,
            report.load_s,
        )
    check_loaded(manifest.ties, chunks)
    return chunks


def build_engine(
    manifest: Manifest, chunks: tuple[StageChunk, ...], options: TrainOptions, device: torch.device
) -> Engine:
    """Tie, schedule and optimize what was loaded. Every rank calls this: it creates process groups."""
    placement = manifest.placement
    name = options.schedule or manifest.layout.schedule or default_schedule(placement)
    schedule = check_schedule(name, placement, options.batch.num_microbatches)
    wire = plan_wire(chunks[0].family, _modules(manifest), _DTYPES[options.dtype])
    ties = build_ties(manifest.ties, chunks, placement, timedelta(seconds=options.timeout_s))
    parameters = lead_parameters(chunks, ties)
    return Engine(
        schedule=build_schedule(schedule, chunks, wire, placement, options.batch),
        ties=ties,
        totals=StepTotals(parameters, ties, device=device),
        optimizer=Optimizer(parameters, options.optim),
    )


def evaluate(engine: Engine, options: TrainOptions, root: Path, vocab_size: int) -> tuple[float, int]:
    """Give the mean loss over the valid tokens of the evaluation data, and their number."""
    assert options.eval_data is not None
    with together("evaluation data"):
        # Every rank reads it all, so that every rank knows when it ends.
        batches = read_once(options.eval_data, options.batch, folder=root, vocab_size=vocab_size)
    losses, num_tokens = [], 0
    for batch in batches:
        losses.append(eval_step(engine, batch) * batch.num_tokens)
        num_tokens += batch.num_tokens
    return math.fsum(losses) / num_tokens, num_tokens


def main() -> None:
    """Run one rank; end with its exit code. What all ranks know is said by rank 0 alone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    path, *training = sys.argv[1:]
    world, code = World.from_environment(os.environ), 0
    try:
        train(Path(path), parse_training(training), world)
    except UserError as error:
        code = error.exit_code
        if world.rank == 0 or isinstance(error, AloneError):
            logger.error("error: %s", error)
    except Exception as error:
        code = _report(error, world)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a peer may be gone: waiting for it in destroy_process_group could hang
    dist.destroy_process_group()


def _device(options: TrainOptions, world: World) -> torch.device:
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise InputError(
            "--device",
            f"rank {world.local_rank} of this machine needs a GPU of its own, found {torch.cuda.device_count()}",
            "start fewer ranks here, or take --device cpu",
        )
    return torch.device("cuda", world.local_rank)


def _config(manifest: Manifest, root: Path) -> dict[str, object]:
    digest = next((file.digest for file in manifest.files if file.path == "config.json"), None)
    if digest is None:
        raise InputError(str(root / MANIFEST_NAME), "config.json is not among its files")
    path = root / "config.json"
    return parse_json_object(read_small_file(path, digest), str(path))


def _modules(manifest: Manifest) -> tuple[tuple[str, ...], ...]:
    return tuple(stage.modules for stage in manifest.stages)


def _report(error: Exception, world: World) -> int:
    """Say what ended this rank: a lost peer in a line, our own bug with its traceback."""
    if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
        reason = str(error).splitlines()[0].partition(". ")[0][:200]
        logger.error("[rank %d] another rank is gone or too slow: %s", world.rank, reason)
        return RankError.exit_code
    logger.error("[rank %d] %s", world.rank, traceback.format_exc())
    return 1


if __name__ == "__main__":
    main()
