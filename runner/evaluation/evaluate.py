"""The loss of a model over a text: what `runner eval` prints, and a run after its last step."""

from __future__ import annotations

import json
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import torch

from manifests.errors import DataError, ModelError, UsageError
from manifests.schedules.rules import default_schedule
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.data_position import check_same_files, digests_of
from runner.config.flags import parse_training
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import SYNTHETIC, BatchOptions, ComputeOptions, DataOptions
from runner.data.rows import Skipped, log_skipped
from runner.data.sequences import Batch, Rows, read_once, rows_of
from runner.distributed.fail_together import (
    errors_of_rank,
    from_all_ranks,
    from_rank_0,
    raise_on_all_ranks,
    reading_on_rank,
    to_first_rank,
)
from runner.distributed.rank_process import run_rank
from runner.distributed.rounds import in_rounds
from runner.distributed.watchdog import StallTimer
from runner.distributed.world import World, check_reachable, device_of, join_world
from runner.evaluation.options import EvalOptions, parse_eval
from runner.evaluation.scores import Recorded, Scores, TokenLosses, writing_scores
from runner.load.load import LoadReport, Reading, load_tensors
from runner.load.local_cache import check_same_manifest
from runner.models import Family, family_of
from runner.parallel.mesh import Mesh, build_mesh
from runner.parallel.parallelize import keep_documents
from runner.pipeline.chunk import build_chunks, hf_constants, hf_pieces, materialize
from runner.pipeline.schedule import Schedule, build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.preflight.preflight import check_world
from runner.proof.combination import Combination
from runner.proof.options import RunOptions, self_check
from runner.proof.proving import prove
from runner.proof.stages import SelfChecked
from runner.rundir.exit_report import set_rank_label, stages_of
from runner.tensors.heap import compact_heap
from runner.tensors.local_shard import FLAG_DTYPES
from runner.training.build import Stages, ties_of
from runner.training.ties import build_ties, check_loaded, follow_leaders
from stores.bundles import Bundles
from stores.folders.probe import print_result
from stores.open import ReadManifest, open_manifest

logger = logging.getLogger("runner")


def main() -> None:
    words = sys.argv[1:]
    run_rank(lambda world: evaluate(parse_eval(words), world), is_json="--json" in words, is_quiet="--quiet" in words)


def evaluate(options: EvalOptions, world: World) -> None:
    """Print the loss of a manifest's model over a text, with --json on every node; every rank calls this.

    Raises:
        UserError: on all ranks alike, if the loss is infinite or not a number, or if one of them fails.
    """
    manifest, device = meet(options, world)
    started_s = time.perf_counter()
    skipped = Skipped(on_skip=log_skipped if world.rank == 0 else None)
    with raise_on_all_ranks("manifest"):
        packed = open_packed(manifest)
    loss, num_tokens = loss_over(options, packed, world, device, skipped)
    # runner.evaluate reads the object of its own node.
    if (world.local_rank if options.is_json else world.rank) == 0:
        counts = {"skipped_documents": skipped.count} if options.data.skip_bad_documents else {}
        _print(loss, num_tokens, time.perf_counter() - started_s, counts, is_json=options.is_json)
    if world.rank == 0 and options.out is not None:
        logger.info("written: %s", options.out)


def loss_over(
    options: EvalOptions, packed: Packed, world: World, device: torch.device, skipped: Skipped | None = None
) -> tuple[float, int]:
    """Return the mean loss over the tokens of a text, and their number; the ranks have met."""
    num_ranks = packed.manifest.placement.num_ranks
    degrees = ParallelDims(pipeline=num_ranks, replicate=world.size // num_ranks)
    mesh = build_mesh(degrees, world.rank, device, timedelta(seconds=options.timeout_s))
    _check_same_flags(options)
    check_same_data("--data", options.data)
    scores = TokenLosses(options.top_k, keeps_rows=options.out is not None)
    family, schedule = read_model(packed, options, world, mesh, device, scores)
    # One microbatch per rank keeps all of them busy.
    sizes = BatchOptions(
        global_batch=num_ranks * options.microbatch, microbatch=options.microbatch, seq_len=options.seq_len
    )
    with raise_on_all_ranks("data"):
        # Every rank reads all of it, and so knows where it ends.
        batches = read_once(
            options.data,
            replace(sizes, global_batch=degrees.replicate * sizes.global_batch),
            folder=packed.root,
            vocab_size=family.vocab_size,
            padded_length=family.padded_length,
            skipped=skipped,
            keeps_unlabeled=options.out is not None,
        )
    rows, sums = Rows(number=mesh.data_rank, count=degrees.replicate), list[tuple[float, int]]()
    with ExitStack() as stack:
        file: Scores | None = None
        for batch in reading_on_rank(world.rank, batches):
            schedule.evaluate(rows_of(batch, rows), cut_as(sizes, batch))
            sums_here, recorded = scores.take()
            sums += [part for of_rank in from_all_ranks(sums_here) for part in of_rank]
            if options.out is not None:
                ranks = to_first_rank(recorded)
                with raise_on_all_ranks("scores"):
                    if world.rank == 0:
                        file = file or stack.enter_context(writing_scores(options.out, options))
                        file.add(batch, _join(ranks))
        num_tokens = sum(count for _, count in sums)
        loss = math.fsum(part for part, _ in sums) / max(1, num_tokens)
        check_loss(loss, num_tokens)
        with raise_on_all_ranks("scores"):
            stack.close()
    return loss, num_tokens


def check_same_data(flag: str, data: DataOptions) -> None:
    """Check that every rank, which reads all of it, finds the same files; every rank calls this."""
    with raise_on_all_ranks("data"):
        digests = digests_of(data)
    shared = from_rank_0(digests)
    with raise_on_all_ranks("data"):
        check_same_files(flag, data, digests, shared)


def _check_same_flags(options: EvalOptions) -> None:
    """Check that ranks read and record the same: each node has a command of its own."""
    what = (options.out is None, options.top_k, options.hidden_states)
    sizes = (len(options.sources), options.seq_len, options.microbatch)
    flags = (options.text, *sizes, options.dtype, *what)
    shared = from_rank_0(flags)
    with raise_on_all_ranks("options"):
        if flags != shared:
            problem = "its flags for what is read, computed or written are not those of rank 0"
            hint = "repeat the command on each node, with another --node-rank"
            raise DataError("runner eval", problem, hint, code="data.differs-between-ranks")


def _join(ranks: Iterable[Recorded]) -> Recorded:
    """Return what was recorded of all rows of a batch: ranks of a stage are in the order of their rows."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in (item for recorded in ranks for item in recorded.items()):
        parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def mean_loss(
    loss_of: Callable[[Batch], tuple[float, float | None]], batches: Iterable[Batch], where: str = "--data"
) -> tuple[float, int]:
    """Return the mean loss over the valid tokens of all batches, and their number.

    `loss_of` returns the mean over the tokens of a batch, and what the loss counts in their place, if anything.
    """
    losses, counts, num_tokens = list[float](), list[float](), 0
    for batch in batches:
        loss, count = loss_of(batch)
        losses.append(loss * batch.num_tokens)
        counts.append(batch.num_tokens if count is None else count)
        num_tokens += sum(sample.num_tokens for sample in batch.samples)  # batch.num_tokens is 1 at least
    total = math.fsum(counts)
    loss = math.fsum(losses) / (total or 1)
    check_loss(loss, total, where)
    return loss, num_tokens


def check_loss(loss: float, count: float, where: str = "--data") -> None:
    """Check a mean loss over `count` tokens, or what it counts in their place."""
    if not count:
        raise DataError(where, "expected text, found no token that counts in the loss", code="data.no-tokens")
    if not math.isfinite(loss):
        hint = "check that the weights are finite, or use --dtype fp32"
        raise ModelError("", f"the loss is {loss}", hint, code="model.not-finite")


def cut_as(cut: BatchOptions, batch: Batch) -> BatchOptions:
    """Return batch sizes for rows as long as those of this batch."""
    return replace(cut, seq_len=batch.tokens.shape[1])


def meet(options: EvalOptions, world: World) -> tuple[ReadManifest, torch.device]:
    """Meet the other ranks; return the manifest, and this rank's device."""
    with errors_of_rank(world.rank):
        read = open_manifest(options.manifest)
    manifest = read.manifest
    check_world(manifest, world.size)
    set_rank_label(world.rank, stages_of(manifest, world.rank, world.size))
    with errors_of_rank(world.rank):
        check_reachable(world, socket.gethostname())
        device = device_of(world, options.device)
    join_world(device, options.timeout_s)
    check_same_manifest(str(read), read.digest)
    return read, device


def read_model(
    packed: Packed, options: EvalOptions, world: World, mesh: Mesh, device: torch.device, scores: TokenLosses
) -> tuple[Family, Schedule]:
    """Build this rank's stages and read their weights; return the family, and a schedule that evaluates batches.

    It records the losses of tokens in `scores`.
    """
    dtype = FLAG_DTYPES[options.dtype]
    manifest = packed.manifest
    with raise_on_all_ranks("load"):
        family = family_of(packed, options.seq_len)
        if options.top_k > family.vocab_size:
            problem = f"expected at most {family.vocab_size}, the size of the vocabulary, found {options.top_k}"
            raise UsageError("--top-k", problem, code="options.scores")
        if options.text.document_mask:
            keep_documents(family, options.seq_len)
        if options.self_check and world.rank == 0:
            compute = ComputeOptions(dtype=options.dtype, master_dtype=options.dtype)
            self_check(family, packed.stage_modules, RunOptions(compute=compute))
    placement, stages = manifest.placement, Stages.of(packed)
    whole = BatchOptions(global_batch=2 * placement.num_stages, microbatch=1, seq_len=options.seq_len)
    timetable = find_timetable(default_schedule(placement), placement, whole.num_microbatches)
    if options.text.document_mask and isinstance(family, SelfChecked):
        training = parse_training(("--data", SYNTHETIC, "--timeout", str(options.timeout_s)))
        num_rows = whole.global_batch * options.microbatch * mesh.degrees.replicate
        sizes = replace(whole, global_batch=num_rows, microbatch=options.microbatch)
        prove(Combination(family=family, stages=stages, timetable=timetable, degrees=mesh.degrees,
                          options=replace(training, batch=sizes), has_documents=True))  # fmt: skip
    with raise_on_all_ranks("load"):
        chunks = build_chunks(family, packed.stage_modules, manifest.placement.stages_on(mesh.pipeline_rank))
        if device.type == "cpu":
            compact_heap(is_sharded=False)  # nothing is planned for an evaluation
        for chunk in chunks:
            materialize(chunk, device=device, dtype=dtype)
        weights = [piece for chunk in chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))]
    timer = StallTimer(options.timeout_s)

    def load(stop: threading.Event) -> LoadReport:
        how = Reading(stop=stop, timer=timer)
        return load_tensors(weights, Bundles(manifest, packed.root), packed.shape, num_ranks=world.local_size, how=how)

    report = in_rounds("load", load, timer=timer)
    with raise_on_all_ranks("load"):
        check_loaded(manifest.ties, chunks)
        if options.hidden_states is not None:
            scores.watch(chunks, options.hidden_states)
    if world.rank == 0:
        for name in packed.unnamed:
            logger.warning("warning: %s is not listed in %s, so it is not verified", name, packed.where)
        if report.num_unverified:
            logger.warning(
                "warning: tensors of virtual bundles have no digests: size, mtime and header of their files were "
                "checked, their bytes were not verified"
            )
    ties = ties_of(family, stages)
    follow_leaders(build_ties(ties, chunks, placement, timedelta(seconds=options.timeout_s), mesh.pipelines))
    metadata = plan_stage_metadata(family, packed.stage_modules, dtype)
    return family, build_schedule(timetable, chunks, metadata, whole, mesh.pipeline, scores)


def _print(loss: float, num_tokens: int, took_s: float, counts: Mapping[str, int], *, is_json: bool) -> None:
    if is_json:
        shown = {"loss": loss, "perplexity": _perplexity(loss), "num_tokens": num_tokens, "seconds": took_s, **counts}
        print_result(json.dumps({"version": 1, **shown}))
        return
    skipped = "".join(f", {count} documents skipped" for count in counts.values())
    text = f"loss {loss:.6f} over {num_tokens:,} tokens, perplexity {_perplexity(loss):.6g}, in {took_s:.1f} s"
    print_result(text + skipped)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(710) overflows a double


if __name__ == "__main__":
    main()
