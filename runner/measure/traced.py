"""Seconds of each module from the traces of a run, which have those of each stage. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manifests.errors import LogError
from runner.bundle.packed import Packed
from runner.measure.times import ModuleSeconds
from runner.report.read import read_run
from runner.rundir.run_record import config_of, find_run

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
    found = {}
    for stage, modules in enumerate(stages):
        flops = [packed.shape.work[module].forward_flops(seq_len) for module in modules]
        for module, share in zip(modules, _shares(flops), strict=True):
            found[module] = ModuleSeconds(
                forward_s=share * (forward[stage] + loss[stage]),
                backward_s=share * (backward[stage] or inputs[stage] + weights[stage]),
            )
    names = ("seq_len", "microbatch", "dtype", "recompute")
    return found, {"run": str(folder), **{name: options[name] for name in names if name in options}}


def _shares(flops: list[int]) -> list[float]:
    total = sum(flops)
    return [each / total if total else 1 / len(flops) for each in flops]
