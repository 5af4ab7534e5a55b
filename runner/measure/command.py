"""`runner measure`: the seconds of each module of a packed model, for `reshard --cost`. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import click

from manifests.errors import LogError, OutputError
from manifests.models.trainable import Implementation
from manifests.models.training import parse_recompute
from manifests.store import write_file
from runner.bundle.packed import Packed, open_packed
from runner.config.declared import DtypeName, WholeNumber
from runner.config.flags import Device
from runner.config.schema import Dtype
from runner.preflight.preflight import check_device
from runner.profiling.step_times import ModuleSeconds
from runner.report.read import read_run
from runner.rundir.records import config_of, find_run
from stores.folders.probe import check_new_file, print_result


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The file to write: times.json."
)
@click.option(
    "--run", type=click.Path(path_type=Path), metavar="LOG_DIR", show_default="run the modules here",
    help="Take the times from the traced steps of a run of this manifest.",
)  # fmt: skip
@click.option("--seq-len", type=WholeNumber(min=1), default=4096, help="Tokens in a sequence, as in training.")
@click.option("--microbatch", type=WholeNumber(min=1), default=1, help="Sequences per microbatch, as in training.")
@click.option("--dtype", type=DtypeName(get_args(Dtype)), default="fp32", help="Dtype of weights and activations.")
@click.option("--ac", default="none", metavar="none|full|selective|N", help="Activation checkpointing, as in training.")
@click.option(
    "--implementation", type=click.Choice(get_args(Implementation)), default=None,
    show_default="torchtitan, if it is installed and has the architecture", help="Whose modules to run.",
)  # fmt: skip
@click.option("--device", type=click.Choice(get_args(Device)), default="auto", help="Device to compute on.")
@click.option(
    "--repeats", type=WholeNumber(min=1, max=1000), default=10, help="Runs of each module; the median counts."
)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("--quiet", is_flag=True, help="Print only errors.")
def measure(
    manifest: Path, out: Path, run: Path | None, seq_len: int, microbatch: int, dtype: Dtype, ac: str,
    implementation: Implementation | None, device: Device, repeats: int, force: bool, quiet: bool,
) -> None:  # fmt: skip
    """Measure the seconds that each module of MANIFEST's model takes, forward and backward, for one microbatch.

    Modules are built, filled with random weights, and run one after the other on one device, so the model need not
    fit: only its largest module must. `reshard plan` and `pack` balance by the result with `--cost`.

    \b
    Examples:
      runner measure ./packed --seq-len 4096 --dtype bf16 --out times.json
      reshard plan ./packed --layout balance:time,pp=8 --cost times.json --seq-len 4096
    """
    check_new_file(out, "--out", force=force)
    recompute = parse_recompute(ac)
    packed = open_packed(manifest)
    if run is not None:
        seconds, how = read_seconds(packed, run)
    else:
        check_device(device)
        from runner.measure.modules import Setting, measure_modules

        setting = Setting(
            seq_len=seq_len, microbatch=microbatch, dtype=dtype, recompute=recompute, device=device,
            implementation=implementation, num_repeats=repeats,
        )  # fmt: skip
        seconds, how = measure_modules(packed, setting, note=None if quiet else _note)
    _write(out, seconds, how)
    if not quiet:
        slowest = max(seconds, key=lambda module: seconds[module].total)
        total_s = sum(times.total for times in seconds.values())
        print_result(f"measured {len(seconds)} modules, {total_s * 1e3:.2f} ms for a "
                     f"microbatch; the slowest is {slowest}, {seconds[slowest].total * 1e3:.2f} ms: {out}")  # fmt: skip


def _note(module: str, seconds: ModuleSeconds) -> None:
    click.echo(
        f"{module}: forward {seconds.forward_s * 1e3:.3f} ms, backward {seconds.backward_s * 1e3:.3f} ms", err=True
    )


def _write(out: Path, seconds: Mapping[str, ModuleSeconds], how: Mapping[str, Any]) -> None:
    modules = {
        module: {"forward_s": times.forward_s, "backward_s": times.backward_s} for module, times in seconds.items()
    }
    text = json.dumps({"version": 1, "measured": how, "modules": modules}, indent=1) + "\n"
    try:
        write_file(out, text.encode(), is_durable=False)
    except OSError as error:
        raise OutputError(str(out), f"cannot be written: {error.strerror}", code="output.unwritable") from error


_SEQ_LEN = 4096  # of a run whose record lacks it; how FLOPs are divided hardly depends on it


def read_seconds(packed: Packed, log_dir: Path) -> tuple[dict[str, ModuleSeconds], dict[str, Any]]:
    """Return the seconds of each module, and where they are from.

    A stage's median time for a microbatch is divided among its modules by their FLOPs.

    Raises:
        LogError: the run has no traced step, or was of other stages.
    """
    folder = find_run(log_dir)
    run = read_run(folder)
    if run.traces is None:
        hint = "trace some of its steps: runner launch … -- --trace 10-20"
        raise LogError(str(folder), "no step of the run was traced", hint, code="log.no-trace")
    stages = packed.stage_modules
    if run.traces.placement != packed.manifest.placement:
        raise LogError(
            str(folder),
            f"expected a run of {len(stages)} stages on {packed.manifest.placement.num_ranks} ranks (the manifest), "
            f"found {run.traces.placement.num_stages} on {run.traces.placement.num_ranks}",
            "give the manifest that the run trained",
            code="log.other-stages",
        )
    forward, backward, inputs, weights, loss = (run.traces.seconds_of(kind) for kind in "FBIWL")
    options = config_of(run.record)
    seq_len = int(options.get("seq_len", _SEQ_LEN))
    seconds = {}
    for stage, modules in enumerate(stages):
        flops = [packed.shape.work[module].forward_flops(seq_len) for module in modules]
        for module, share in zip(modules, _shares(flops), strict=True):
            seconds[module] = ModuleSeconds(
                forward_s=share * (forward[stage] + loss[stage]),
                backward_s=share * (backward[stage] or inputs[stage] + weights[stage]),
            )
    names = ("seq_len", "microbatch", "dtype", "recompute")
    return seconds, {"run": str(folder), **{name: options[name] for name in names if name in options}}


def _shares(flops: list[int]) -> list[float]:
    total = sum(flops)
    return [count / total if total else 1 / len(flops) for count in flops]
