"""`runner eval`, which starts ranks on this machine, and `runner.evaluate`, which runs it. No torch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from manifests.command.interpreter import module_command
from manifests.errors import DataError, RankError, UsageError, UserError
from manifests.models.trainable import check_trainable
from runner.bundle.packed import check_tokenizer, open_packed
from runner.checkpoint.adapter_record import check_launched
from runner.evaluation.options import PARAMETERS, EvalOptions, eval_options
from runner.launch.here import ALONE, launch_here
from runner.launch.nodes import check_ranks
from runner.preflight.preflight import check_device, check_documents, check_model
from stores.folders.probe import check_new_file, check_stdout
from stores.open import open_manifest

_ARGS = "runner.args"
_NEGATED = frozenset(flag for parameter in PARAMETERS for flag in parameter.secondary_opts)


class _Verb(click.Command):
    """A command whose arguments are passed to the ranks as given; `--` among them is ignored."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            args.remove("--")
        ctx.meta[_ARGS] = tuple(args)
        return super().parse_args(ctx, args)


@click.command("eval", cls=_Verb, params=[*PARAMETERS])
@click.option("--dry-run", is_flag=True, help="Print the command that starts the ranks, and stop.")
@click.pass_context
def eval_command(context: click.Context, /, dry_run: bool, **values: Any) -> None:
    """Print the loss of MANIFEST's model over a text: the mean over all tokens, each predicted once.

    Starts one rank for each pipeline rank of the manifest, on this machine, under torchrun; with more ranks, replicas
    share the text. On several nodes, run it on each.

    \b
    Example:
      runner eval ./Llama-3.2-1B-pp2 --data held-out.jsonl --seq-len 2048 --out scores.parquet
    """
    options = eval_options(values)
    read = open_manifest(options.manifest)
    manifest = read.manifest
    check_trainable(manifest.model.architecture, is_described=manifest.model.description is not None)
    packed = open_packed(read)
    check_launched(packed)
    check_model(packed)
    check_stdout()
    num_ranks = manifest.layout.num_ranks
    nproc_per_node = options.nproc_per_node or max(1, num_ranks // options.nnodes)
    check_ranks(num_ranks, options.nnodes, nproc_per_node)
    if options.out is not None and options.node_rank == 0:
        if options.out.suffix != ".parquet":
            problem = f"expected a name that ends in .parquet, found {options.out}"
            raise UsageError("--out", problem, code="options.scores-suffix")
        check_new_file(options.out, "--out", force=options.force)
        if find_spec("pyarrow") is None:
            raise DataError(
                "--out", "writing Parquet requires pyarrow", "pip install pyarrow", code="data.needs-pyarrow"
            )
    if not dry_run:
        check_device(options.device)
        check_documents("--data", options.data)
    if not options.text.is_tokenized:
        check_tokenizer(read.root)
    # --dry-run is for the launcher, which prints the command.
    words = [word for word in context.meta[_ARGS] if word != "--dry-run"]
    launch_here(
        words,
        nproc_per_node=nproc_per_node,
        dry_run=dry_run,
        worker="runner.evaluation.evaluate",
        quiet=options.is_quiet,
        meeting=_meeting(options),
    )


def _meeting(options: EvalOptions) -> tuple[str, ...]:
    """Return torchrun's flags for where nodes meet."""
    if options.nnodes == 1:
        return ALONE
    assert options.rendezvous is not None, "checked with the options"
    host, _, port = options.rendezvous.rpartition(":")
    numbers = ("--nnodes", str(options.nnodes), "--node-rank", str(options.node_rank))
    return (*numbers, "--master-addr", host, "--master-port", port)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The mean loss of a model over the tokens of a text."""

    loss: float
    perplexity: float
    num_tokens: int
    seconds: float
    skipped_documents: int = 0


def evaluate(
    manifest: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    flags: Sequence[str] = (),
    **options: str | int | Path | None,
) -> Evaluation:
    """Evaluate a packed model on ranks of this machine, as `runner eval` does.

    `data` are files, folders or globs. `out` is a Parquet file with the loss of each token. Other `options` are those
    of the command, such as `seq_len=2048`, `dtype="bf16"` or `top_k=5`; `flags` are written as there, such as
    `["--tokenized", "--force"]`. On several nodes, call it on each: all return the same loss.

    Raises:
        UserError: as the command prints it.

    Example:
        >>> runner.evaluate("model-pp2", "held-out.jsonl", seq_len=2048, out="scores.parquet").num_tokens
        81920
    """
    sources = data if isinstance(data, Iterable) and not isinstance(data, str) else (data,)
    words = [str(manifest), *(word for source in sources for word in ("--data", str(source)))]
    for name, value in {"out": out, **options}.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{word}"] if value else [f"--no-{word}"] if f"--no-{word}" in _NEGATED else []
        else:
            words += [] if value is None else [f"--{word}", str(value)]
    command = module_command("runner.cli", "eval", *words, *flags, "--quiet", "--json")
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        problem = f"exited with code {done.returncode}: {reason}"
        raise RankError("runner eval", problem, code="rank.ended") from error
    if "error" in answer:
        failure = answer["error"]
        raise UserError(failure["where"], failure["problem"], failure.get("hint") or "", code=failure["code"])
    del answer["version"]
    return Evaluation(**answer)
