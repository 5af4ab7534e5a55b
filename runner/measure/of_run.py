"""The seconds of each module in the traced steps of a run, for `reshard plan --from-run`. No torch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from manifests.errors import LogError, UserError
from manifests.models.adapters import is_adapter
from manifests.models.shape import is_expert, is_layer, module_of
from manifests.module_times import TIMES_NAME, Link, MeasuredTimes, ModuleTime, StepTime, whole_s
from manifests.store import write_file
from runner.bundle.packed import Packed
from runner.config.parallel_dims import ParallelDims
from runner.report.read import RunLog, Traces, read_run
from runner.rundir.records import config_of

logger = logging.getLogger("runner")
_HOW = (
    "seq_len", "microbatch", "dtype", "master_dtype", "ac", "tp", "cp", "cp_method", "ep", "document_mask",
    "num_ranks", "ranks_per_node", "device",
)  # fmt: skip
_NBYTES = {"bf16": 2}
_SEQ_LEN = 4096  # of a run whose record lacks it; how FLOPs are divided hardly depends on it


def read_run_times(
    packed: Packed,
    log_dir: Path,
    degrees: ParallelDims | None = None,
    link: Link | None = None,
    trained: Mapping[str, int] | None = None,
    fixed_share: float = 0.0,
) -> MeasuredTimes:
    """Return the seconds of each module, from the traced steps of a run of this manifest, and of the rest of a step.

    A stage's median time for a microbatch is divided among its modules by their FLOPs. On a single pipeline rank, the
    backward is timed as a whole, and divided among the modules of all stages. `degrees` are those of the run, by
    default one rank for each stage, `link` is that of `measure_link`, and `trained` has the numbers of parameters that
    the run trains, by default all; `fixed_share` is that of `measure_fixed_share`.
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
    how = {name: options[name] for name in _HOW if name in options}
    work = [[packed.shape.work[module].forward_flops(seq_len) for module in modules] for modules in stages]
    if packed.manifest.placement.num_ranks == 1:  # without a pipeline, one backward runs through all stages
        backward = tuple(sum(backward) * share for share in _shares(list(map(sum, work))))
    times = {}
    for stage, (modules, flops) in enumerate(zip(stages, work, strict=True)):
        backward_s = backward[stage] or inputs[stage] + weights[stage]
        if stage and not backward[stage]:  # the first stage runs its whole backward as W
            backward_s = whole_s(how, backward_s, sum(map(is_layer, modules)))
        for module, share in zip(modules, _shares(flops), strict=True):
            times[module] = ModuleTime(
                forward=share * (forward[stage] + loss[stage]),
                backward=share * backward_s,
            )
    degrees = degrees or ParallelDims(pipeline=packed.manifest.placement.num_ranks)
    every = {fqn: packed.shape.count_params(fqn) for fqn in packed.shape.tensors}
    trained = every if trained is None else trained
    how["trained"] = "all" if trained.keys() == every.keys() else "part"
    step = _step_time(packed, run, run.traces, degrees, link, trained)
    return MeasuredTimes(modules=times, how=how, step=step, fixed_share=fixed_share)


def _step_time(
    packed: Packed,
    run: RunLog,
    traces: Traces,
    degrees: ParallelDims,
    link: Link | None,
    trained: Mapping[str, int],
) -> StepTime | None:
    """Return what traced steps took beside their schedules, without the reduction of gradients at the link's rate."""
    seconds = {line["step"]: line["step_s"] for line in run.steps if "step_s" in line}
    traced = [(seconds[step.step], step.timeline) for step in traces.steps if step.step in seconds]
    if not traced:
        return None
    nbytes = _NBYTES.get(config_of(run.record).get("reduce_dtype", "fp32"), 4)
    counts = _count_on_ranks(packed, degrees, trained)
    num_params = max(dense // degrees.fsdp + experts // degrees.expert_fsdp for dense, experts in counts)
    overhead_s = median(step_s - timeline.makespan_s for step_s, timeline in traced)
    planned = traces.planned()
    num_gaps = max(sum(ran.action.kind not in "WL" for ran in spans) for spans in planned.ranks)
    has_gaps = len(planned.ranks) > 1 and degrees.fsdp == 1  # with FSDP, weights are gathered between actions
    gap_s = max(0.0, traces.seconds - planned.makespan_s) / num_gaps if has_gaps else 0.0
    step = StepTime(overhead_s=max(0.0, overhead_s), num_params=max(1, num_params), link=link, gap_s=gap_s)
    if link is None:
        return step
    sent_s = max(  # weights are gathered in the schedule
        link.reduction_s(0, nbytes * dense, shards=degrees.fsdp, replicas=degrees.replicate)
        + link.reduction_s(0, nbytes * experts, shards=degrees.expert_fsdp, replicas=degrees.replicate)
        for dense, experts in counts
    )
    return replace(step, overhead_s=max(0.0, overhead_s - sent_s))


def _count_on_ranks(packed: Packed, degrees: ParallelDims, trained: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the trained parameters of each pipeline rank before FSDP shards them: dense ones, and those of experts.

    Experts are apart only with expert parallelism.
    """
    placement, work = packed.manifest.placement, packed.shape.work
    rank_of = {
        module: placement.rank_of(stage) for stage, modules in enumerate(packed.stage_modules) for module in modules
    }
    dense, experts = Counter[int](), Counter[int]()
    for fqn, count in trained.items():
        module = module_of(fqn, work)
        if module not in rank_of:  # dropped
            continue
        if degrees.expert > 1 and is_expert(fqn) and not is_adapter(fqn):
            experts[rank_of[module]] += count
        else:
            dense[rank_of[module]] += count
    return [(dense[rank] // degrees.tensor, experts[rank] // degrees.expert) for rank in range(placement.num_ranks)]


def write_run_times(log_dir: Path, read: Callable[[], MeasuredTimes]) -> None:
    """Write the times of a run that has ended into its folder; a failure is logged, and does not fail the run."""
    path = log_dir / TIMES_NAME
    try:
        write_file(path, read().encode(), is_durable=False)
    except UserError as error:
        logger.warning("note: %s is not written: %s", path, error)
    except OSError as error:
        logger.warning("note: %s cannot be written: %s", path, error.strerror)


def _shares(flops: list[int]) -> list[float]:
    total = sum(flops)
    return [count / total if total else 1 / len(flops) for count in flops]
