"""The loss of a model over a text: what `runner eval` prints, and a run after its last step."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from manifests.errors import DataError, ModelError
from manifests.probe import print_result
from runner.bundle.packed import Packed, open_packed
from runner.config.schema import BatchOptions
from runner.data.bad import Skipped, log_skipped
from runner.data.batches import Batch
from runner.data.sequences import read_once
from runner.distributed.fail_together import together
from runner.distributed.rank_process import run_rank
from runner.distributed.world import World
from runner.evaluation.command import EvalOptions, parse_eval
from runner.evaluation.reader import meet, read_model
from runner.training.gradient_norm import StepTotals


def mean_loss(loss_of: Callable[[Batch], float], batches: Iterable[Batch], where: str = "--data") -> tuple[float, int]:
    """Return the mean loss over the valid tokens of all batches, and their number.

    Raises:
        DataError: there are none; on all ranks alike.
    """
    losses, num_tokens = [], 0
    for batch in batches:
        losses.append(loss_of(batch) * batch.num_tokens)
        num_tokens += batch.num_tokens
    if not num_tokens:
        raise DataError(where, "expected text, found no token to predict", code="data.no-tokens")
    return math.fsum(losses) / num_tokens, num_tokens


def evaluate(options: EvalOptions, world: World) -> None:
    """Print the loss of a manifest's model over a text; every rank calls this.

    Raises:
        UserError: on all ranks alike, if the loss is infinite or not a number, or if one of them fails.
    """
    root, manifest, device = meet(options.read, world)
    started_s = time.perf_counter()
    skipped = Skipped(on_skip=log_skipped if world.rank == 0 else None)
    with together("manifest"):
        packed = open_packed(root, manifest)
    loss, num_tokens = loss_over(options, packed, world, device, skipped)
    if not math.isfinite(loss):
        raise ModelError(
            "",
            f"the loss is {loss}",
            "check that the weights are finite, or use --dtype fp32",
            code="model.not-finite",
        )
    if world.rank == 0:
        counts = {"skipped_documents": skipped.count} if options.data.skip_bad_documents else {}
        _print(loss, num_tokens, time.perf_counter() - started_s, counts, is_json=options.read.is_json)


def loss_over(
    options: EvalOptions, packed: Packed, world: World, device: torch.device, skipped: Skipped | None = None
) -> tuple[float, int]:
    """Return the mean loss over the tokens of a text, and their number; the ranks have met."""
    model = read_model(packed, options.read, world, device, max_seq_len=options.seq_len)
    # One microbatch per rank keeps all of them busy.
    cut = BatchOptions(
        global_batch=model.num_ranks * options.microbatch, microbatch=options.microbatch, seq_len=options.seq_len
    )
    totals = StepTotals((), (), device=device)
    with together("data"):
        # Every rank reads all of it, and so knows where it ends.
        batches = read_once(
            options.data,
            cut,
            folder=packed.root,
            vocab_size=model.vocab_size,
            padded_length=model.family.padded_length,
            skipped=skipped,
        )
    return mean_loss(lambda batch: totals.reduce_loss(model.schedule.evaluate(batch, cut_as(cut, batch))), batches)


def cut_as(cut: BatchOptions, batch: Batch) -> BatchOptions:
    """Return batch sizes for rows as long as those of this batch."""
    return replace(cut, seq_len=batch.tokens.shape[1])


def main() -> None:
    words = sys.argv[1:]
    run_rank(lambda world: evaluate(parse_eval(words), world), is_json="--json" in words, is_quiet="--quiet" in words)


def _print(loss: float, num_tokens: int, took_s: float, counts: Mapping[str, int], *, is_json: bool) -> None:
    if is_json:
        shown = {"loss": loss, "perplexity": _perplexity(loss), "num_tokens": num_tokens, "seconds": took_s, **counts}
        print_result(json.dumps({"version": 1, **shown}))
        return
    skipped = "".join(f", {count} documents skipped" for count in counts.values())
    said = f"loss {loss:.6f} over {num_tokens:,} tokens, perplexity {_perplexity(loss):.6g}, in {took_s:.1f} s"
    print_result(said + skipped)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(710) overflows a double


if __name__ == "__main__":
    main()
