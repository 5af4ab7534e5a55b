"""The loss of a model over a text: what `runner eval` prints, and a run after its last step."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from manifests.errors import InputError
from runner.data.batches import Batch
from runner.data.sequences import read_once
from runner.life.rank import run_rank
from runner.life.together import together
from runner.life.world import World
from runner.loading.packed import open_packed
from runner.reading.reader import meet, read_model
from runner.reading.verbs import EvalOptions, parse_eval
from runner.recipe import BatchOptions
from runner.training.norm import StepTotals

__all__ = ["evaluate", "loss_over", "main", "mean_loss"]


def mean_loss(loss_of: Callable[[Batch], float], batches: Iterable[Batch]) -> tuple[float, int]:
    """Give the mean loss over the valid tokens of all batches, and their number."""
    losses, num_tokens = [], 0
    for batch in batches:
        losses.append(loss_of(batch) * batch.num_tokens)
        num_tokens += batch.num_tokens
    return math.fsum(losses) / num_tokens, num_tokens


def evaluate(options: EvalOptions, world: World) -> None:
    """Print the loss of a manifest's model over a text; every rank calls this.

    Raises:
        UserError: on all ranks alike, if it is infinite or not a number, or whatever else one of them met.
    """
    root, device = meet(options.read, world)
    started_s = time.perf_counter()
    loss, num_tokens = loss_over(options, root, world, device)
    if not math.isfinite(loss):
        raise InputError("", f"the loss is {loss}", "the weights are not finite, or --dtype is too low for them")
    if world.rank == 0:
        _print(loss, num_tokens, time.perf_counter() - started_s, is_json=options.read.is_json)


def loss_over(options: EvalOptions, root: Path, world: World, device: torch.device) -> tuple[float, int]:
    """Give the mean loss over the tokens of a text, and their number; the ranks have met."""
    with together("manifest"):
        packed = open_packed(root)
    model = read_model(packed, options.read, world, device, max_seq_len=options.seq_len)
    # A microbatch for each rank keeps all of them busy.
    cut = BatchOptions(
        global_batch=model.num_ranks * options.microbatch, microbatch=options.microbatch, seq_len=options.seq_len
    )
    totals = StepTotals((), (), device=device)
    with together("data"):
        # Every rank reads it all, so that every rank knows when it ends.
        batches = read_once(options.data, cut, folder=root, vocab_size=model.vocab_size)
    return mean_loss(lambda batch: totals.reduce_loss(model.schedule.evaluate(batch, cut)), batches)


def main() -> None:
    run_rank(lambda world: evaluate(parse_eval(sys.argv[1:]), world), is_json="--json" in sys.argv)


def _print(loss: float, num_tokens: int, took_s: float, *, is_json: bool) -> None:
    if is_json:
        shown = {"loss": loss, "perplexity": _perplexity(loss), "num_tokens": num_tokens, "seconds": took_s}
        print(json.dumps({"version": 1, **shown}), flush=True)
        return
    print(
        f"loss {loss:.6f} over {num_tokens:,} tokens, perplexity {_perplexity(loss):.6g}, in {took_s:.1f} s", flush=True
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # e to the 710 is beyond a double


if __name__ == "__main__":
    main()
