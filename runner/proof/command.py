"""`runner prove`: a run's own combination on this machine, or a dump of any trainer's step. No torch until it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from manifests.errors import UsageError, printable
from manifests.invariants import MANIFEST_NAME
from manifests.store import read_small_file
from runner.bundle.packed import opened
from runner.config.command import BeforeTraining
from runner.config.declared import Number, WholeNumber
from runner.config.flags import Device, parse_training, recall, unwritten
from runner.config.parallel_dims import DegreeOptions
from runner.preflight.combinations import balance_flags
from runner.preflight.preflight import check_device, check_request, check_torch
from stores.folders.probe import check_stdout, print_result

if TYPE_CHECKING:
    from runner.proof.against import Compared

_MOST_LISTED = 12
_UNREAD = "unread.jsonl"  # weights and data are not read; unlike synthetic data, it may have documents and rows
_GROUPS = {"Ranks": ("nnodes", "nproc_per_node"), "A dump": ("against", "tolerance", "device")}


@click.command(cls=BeforeTraining, groups=_GROUPS)
@click.argument("model", type=click.Path(), required=False)
@click.option("--nnodes", type=WholeNumber(min=1), metavar="N", default=1, help="Nodes of the job.")
@click.option(
    "--nproc-per-node", type=WholeNumber(min=1), metavar="N",
    show_default="as many as the degrees in the training options need",
    help="Ranks of the job on each node.",
)  # fmt: skip
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="FOLDER",
    help="A dump to compare instead: tokens.safetensors, gradients*.safetensors and step.json.",
)  # fmt: skip
@click.option(
    "--tolerance", type=Number(min=0, min_open=True), metavar="X",
    show_default="1e-5 in float32; in bfloat16 0.0039, or twice transformers' own error",
    help="With --against: difference to allow, relative to the largest element of a gradient.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(get_args(Device)), default="cpu", help="With --against: device to compute on."
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "is_quiet", is_flag=True, help="Print only errors and differences.")
@click.pass_context
def prove(
    context: click.Context, model: str | None, nnodes: int, nproc_per_node: int | None, against: Path | None,
    tolerance: float | None, device: Device, is_json: bool, is_quiet: bool,
) -> None:  # fmt: skip
    """Prove that a run trains as one process does, before it is launched. Exits with code 4 if it does not.

    MODEL is the manifest, and what follows -- are the training flags of runner launch. A tiny model of the config takes
    a step by the run's stages, schedule, degrees and options on up to 16 CPU ranks of this machine, however many the
    job has: degrees are at most 2, and what does not fit is tried in overlapping subsets. Weights and data are not
    read.

    With --against, MODEL is a Hugging Face or packed folder with the weights before a training step, by default the
    dump's own folder: the step of any trainer is compared with transformers' model in one process. The whole model must
    fit into memory: 8 bytes for a parameter, 10 for a dump in bfloat16. docs/my-loss-differs.md describes the files of
    a dump.

    \b
    Examples:
      runner prove ./Qwen3-30B-A3B-pp4 --nnodes 4 --nproc-per-node 8 -- --dp-shard 8 --ep 8 --ac full
      runner prove ./Llama-3.2-1B --against ./dump
    """
    check_stdout()
    if against is not None:
        if context.meta["training"]:
            raise UsageError("--against", "takes no training options", "remove what follows --", code="usage.arguments")
        sys.exit(_prove_dump(model or str(against), against, tolerance, device, is_json=is_json, is_quiet=is_quiet))
    if model is None:
        raise UsageError("MODEL", "is missing", "runner prove MANIFEST -- TRAINING OPTIONS", code="launch.no-manifest")
    sys.exit(_prove_run(model, context.meta["training"], nnodes, nproc_per_node, is_json=is_json, is_quiet=is_quiet))


def _prove_run(
    manifest: str, words: Sequence[str], nnodes: int, nproc_per_node: int | None, *, is_json: bool, is_quiet: bool
) -> int:
    check_torch()
    words = (*unwritten({"--data": ("--data", _UNREAD)}, words), *words)
    options = parse_training(words)
    with opened(manifest, is_staged=True) as (_, launched):
        options = recall(parse_training((*words, *balance_flags(launched, options))), {})
        num_pipeline = launched.manifest.layout.num_ranks
        num_ranks = nnodes * nproc_per_node if nproc_per_node else _ranks_of(options.degrees, num_pipeline)
        degrees = check_request(launched, options, num_ranks)
        if options.resume.source is not None and not is_quiet:
            click.echo(
                "note: --resume is not read: give the flags that a checkpoint recalls, such as --dtype and --optimizer",
                err=True,
            )
        from runner.proof.alone import Request, as_json, table_of, try_here

        request = Request(launched=launched, options=options, degrees=degrees)
        tried = try_here(request)
    is_equal = all(part.problem is None for part in tried)
    if is_json:
        print_result(json.dumps({"version": 1, "equal": is_equal, **as_json(request, tried)}))
    elif not (is_equal and is_quiet):
        print_result(table_of(request, tried))
    return 0 if is_equal else 4


def _ranks_of(degrees: DegreeOptions, num_pipeline: int) -> int:
    """Return the fewest ranks that have these degrees."""
    shard = degrees.shard or 2  # auto
    return num_pipeline * (degrees.replicate or 1) * shard * degrees.context * degrees.tensor


def _prove_dump(
    model: str, against: Path, tolerance: float | None, device: Device, *, is_json: bool, is_quiet: bool
) -> int:
    check_device(device)
    read_small_file(against / "step.json")  # before torch is imported, which takes seconds
    import torch

    from runner.proof.against import compare_dump, read_dump

    dump, folder = read_dump(against), Path(model)
    where = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    whole = folder.parent if folder.name == MANIFEST_NAME else folder
    done = compare_dump(dump, whole, torch.device(where), tolerance)
    if is_json:
        print_result(json.dumps({"version": 1, "equal": not done.differences, "factor": done.factor, **asdict(done)}))
    elif done.differences or not is_quiet:
        print_result(_lines_of_dump(done))
    return 4 if done.differences else 0


def _lines_of_dump(done: Compared) -> str:
    lines = [f"{printable(wrong.name)}: {wrong.problem}" for wrong in done.differences[:_MOST_LISTED]]
    if (more := len(done.differences) - len(lines)) > 0:
        lines.append(f"and {more} more, nearer to the embedding; --json lists all")
    if done.factor is not None:
        cure = "check what the loss is divided by, and whether ranks or microbatches are summed or averaged"
        lines.append(f"all gradients are {done.factor:.4g} times those of one process: {cure}")
    equal = f"equal to one process: loss {done.loss:.7g}, grad norm {done.grad_norm:.7g}, {done.num_tensors} gradients"
    return "\n".join(lines or [f"{equal}, at most {done.largest:.1e} of their largest element off"])
