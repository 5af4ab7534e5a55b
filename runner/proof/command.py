"""`runner prove --against`: a dump of a training step, compared with one process. No torch until it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click

from manifests.errors import printable
from manifests.invariants import MANIFEST_NAME
from runner.config.flags import Device
from runner.preflight.preflight import check_device
from stores.folders.probe import check_stdout, print_result

_MOST_LISTED = 12


@click.command()
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option(
    "--against", type=click.Path(path_type=Path), required=True, metavar="FOLDER",
    help="The dump: tokens.safetensors, gradients*.safetensors and step.json.",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(min=0, min_open=True), metavar="X",
    show_default="1e-5 in float32; in bfloat16 0.0039, or twice transformers' own error",
    help="Difference to allow, relative to the largest element of a gradient.",
)  # fmt: skip
@click.option("--device", type=click.Choice(get_args(Device)), default="cpu", help="Device to compute on.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "is_quiet", is_flag=True, help="Print only errors and differences.")
def prove(
    model: Path | None, against: Path, tolerance: float | None, device: Device, is_json: bool, is_quiet: bool
) -> None:
    """Compare a training step of any trainer with transformers' model in one process. Exits with code 4 if it differs.

    MODEL is a Hugging Face or packed folder with the weights before the step; by default, they are in the dump's
    folder. The whole model must fit into memory: 8 bytes for a parameter. docs/my-loss-differs.md describes the files
    of a dump, and how torchtitan or a loop of your own writes them.

    \b
    Example:
      runner prove ./Llama-3.2-1B --against ./dump
    """
    check_stdout()
    check_device(device)
    import torch

    from runner.proof.against import compare_dump
    from runner.proof.dump import read_dump

    dump, folder = read_dump(against), model or against
    where = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    whole = folder.parent if folder.name == MANIFEST_NAME else folder
    done = compare_dump(dump, whole, torch.device(where), tolerance)
    if is_json:
        print_result(json.dumps({"version": 1, "equal": not done.differences, "factor": done.factor, **asdict(done)}))
    elif done.differences or not is_quiet:
        lines = [f"{printable(wrong.name)}: {wrong.problem}" for wrong in done.differences[:_MOST_LISTED]]
        if (more := len(done.differences) - len(lines)) > 0:
            lines.append(f"and {more} more, nearer to the embedding; --json lists all")
        if done.factor is not None:
            cure = "check what the loss is divided by, and whether ranks or microbatches are summed or averaged"
            lines.append(f"all gradients are {done.factor:.4g} times those of one process: {cure}")
        equal = (
            f"equal to one process: loss {done.loss:.7g}, grad norm {done.grad_norm:.7g}, {done.num_tensors} gradients"
        )
        print_result("\n".join(lines or [f"{equal}, at most {done.largest:.1e} of their largest element off"]))
    if done.differences:
        sys.exit(4)
