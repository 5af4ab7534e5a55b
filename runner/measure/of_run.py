"""The seconds of each module in the traced steps of a run, for `reshard plan --from-run`. No torch."""

from __future__ import annotations

import logging
from pathlib import Path

from manifests.errors import LogError, UserError
from manifests.module_times import TIMES_NAME, MeasuredTimes, ModuleTime
from manifests.store import write_file
from runner.bundle.packed import Packed
from runner.report.read import read_run
from runner.rundir.records import config_of

logger = logging.getLogger("runner")
_HOW = ("seq_len", "microbatch", "dtype", "master_dtype", "ac", "tp", "ep")
_SEQ_LEN = 4096  # of a run whose record lacks it; how FLOPs are divided hardly depends on it


def read_run_times(packed: Packed, log_dir: Path) -> MeasuredTimes:
    """Return the seconds of each module, from the traced steps of a run of this manifest.

    A stage's median time for a microbatch is divided among its modules by their FLOPs.

    Raises:
        LogError: the run has no traced step, or was of other stages.
    """
    run = read_run(log_dir)
    if run.traces is None:
        hint = "trace some of its steps: runner launch … -- --trace 10-20"
        raise LogError(str(log_dir), "no step of the run was traced", hint, code="log.no-trace")
    stages = packed.stage_modules
    if run.traces.placement != packed.manifest.placement:
        raise LogError(
            str(log_dir),
            f"expected a run of {len(stages)} stages on {packed.manifest.placement.num_ranks} ranks (the manifest), "
            f"found {run.traces.placement.num_stages} on {run.traces.placement.num_ranks}",
            code="log.other-stages",
        )
    forward, backward, inputs, weights, loss = (run.traces.seconds_of(kind) for kind in "FBIWL")
    options = config_of(run.record)
    seq_len = int(options.get("seq_len", _SEQ_LEN))
    times = {}
    for stage, modules in enumerate(stages):
        flops = [packed.shape.work[module].forward_flops(seq_len) for module in modules]
        for module, share in zip(modules, _shares(flops), strict=True):
            times[module] = ModuleTime(
                forward=share * (forward[stage] + loss[stage]),
                backward=share * (backward[stage] or inputs[stage] + weights[stage]),
            )
    return MeasuredTimes(modules=times, how={name: options[name] for name in _HOW if name in options})


def write_run_times(packed: Packed, log_dir: Path) -> None:
    """Write the times of a run that has ended into its folder; a failure is logged, and does not fail the run."""
    path = log_dir / TIMES_NAME
    try:
        write_file(path, read_run_times(packed, log_dir).encode(), is_durable=False)
    except UserError as error:
        logger.warning("note: %s is not written: %s", path, error)
    except OSError as error:
        logger.warning("note: %s cannot be written: %s", path, error.strerror)


def _shares(flops: list[int]) -> list[float]:
    total = sum(flops)
    return [count / total if total else 1 / len(flops) for count in flops]
