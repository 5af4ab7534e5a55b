"""`runner measure`: the seconds of each module of a packed model, for `reshard plan --cost`. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from manifests.command import defaults
from manifests.errors import system_errors
from manifests.models.training import parse_recompute
from manifests.module_times import ModuleTime
from manifests.store import write_file
from runner.bundle.packed import open_packed
from runner.config.declared import DtypeName, LocalManifest, WholeNumber
from runner.config.flags import Device
from runner.config.schema import Dtype
from runner.preflight.preflight import check_device
from stores.folders.probe import check_new_file, print_result


@click.command()
@click.argument("manifest", type=LocalManifest())
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The file to write: times.json."
)
@click.option(
    "--seq-len", type=WholeNumber(min=1), default=defaults.SEQ_LEN, help="Tokens in a sequence, as in training."
)
@click.option("--microbatch", type=WholeNumber(min=1), default=1, help="Sequences per microbatch, as in training.")
@click.option("--dtype", type=DtypeName(get_args(Dtype)), default="fp32", help="Dtype of weights and activations.")
@click.option("--ac", default="none", metavar="none|full|selective|N", help="Activation checkpointing, as in training.")
@click.option("--device", type=click.Choice(get_args(Device)), default="auto", help="Device to compute on.")
@click.option(
    "--repeats", type=WholeNumber(min=1, max=1000), default=10, help="Runs of each module; the median counts."
)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("--quiet", is_flag=True, help="Print only errors.")
def measure(
    manifest: Path, out: Path, seq_len: int, microbatch: int, dtype: Dtype, ac: str,
    device: Device, repeats: int, force: bool, quiet: bool,
) -> None:  # fmt: skip
    """Measure the seconds that each module of MANIFEST's model takes, forward and backward, for one microbatch.

    Modules are built, filled with random weights, and run one after the other on one device, so the model need not
    fit: only its largest module must. `reshard plan` and `layout` balance by the result with `--cost`, and write the
    layout for `pack` with `--write`. A run that traces steps writes such a file, too: LOG_DIR/times.json.

    \b
    Examples:
      runner measure ./packed --seq-len 4096 --dtype bf16 --out times.json
      reshard plan ./packed --layout balance:time,pp=8 --cost times.json --seq-len 4096 --dtype bf16
    """
    check_new_file(out, "--out", force=force)
    recompute = parse_recompute(ac)
    packed = open_packed(manifest)
    check_device(device)
    from runner.measure.modules import Setting, measure_modules

    setting = Setting(
        seq_len=seq_len, microbatch=microbatch, dtype=dtype, recompute=recompute, device=device,
        num_repeats=repeats,
    )  # fmt: skip
    times = measure_modules(packed, setting, note=None if quiet else _note)
    with system_errors(out, "cannot be written", code="output.unwritable"):
        write_file(out, times.encode(), is_durable=False)
    if not quiet:
        seconds = times.modules
        slowest = max(seconds, key=lambda module: seconds[module].total)
        total_s = sum(times.total for times in seconds.values())
        print_result(f"measured {len(seconds)} modules, {total_s * 1e3:.2f} ms for a "
                     f"microbatch; the slowest is {slowest}, {seconds[slowest].total * 1e3:.2f} ms: {out}")  # fmt: skip


def _note(module: str, seconds: ModuleTime) -> None:
    click.echo(f"{module}: forward {seconds.forward * 1e3:.3f} ms, backward {seconds.backward * 1e3:.3f} ms", err=True)
