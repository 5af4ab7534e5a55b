"""What is assumed about a training run, where neither the model nor the layout says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from manifests.command import defaults
from manifests.errors import InputError, Parameter, UsageError, as_int, check_choice, check_count
from manifests.models.training import ContextMethod, HostMemory, Recompute
from manifests.module_times import MOST_MEASURED, MeasuredTimes, ModuleTime, StepTime
from manifests.optimizer_groups import PRESETS
from manifests.placement import Placement
from manifests.schedules.actions import Table
from manifests.schedules.csvtext import is_schedule_file, read_schedule_file
from manifests.schedules.rules import check_schedule, default_schedule, schedule_named
from manifests.schedules.tables import schedule_table
from reshard.layouts.model import StageLayout

Policy = Literal["fp32", "bf16", "mixed"]
TrainingDtype = Literal["fp32", "bf16"]
MOST_PASSES = 1 << 19  # forward and backward, of the longest step to simulate
_COUNTS = (
    "microbatch_group", "num_microbatches", "global_batch", "microbatch", "seq_len", "replicate", "shard", "tensor",
    "context", "expert", "memory_limit", "loss_chunk",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What to assume about a training run; None: the layout's value, or a default that supports its stages.

    `schedule` is the name of a pipeline schedule, such as "1F1B", or a .csv file of its actions; `microbatch_group` is
    Megatron-Core's `microbatch_group_size_per_vp_stage`, of Interleaved1F1B. A step has `num_microbatches` on each
    data-parallel replica, or as many as `global_batch`, the sequences of a step, makes of them (default: as
    training's, or as many as there are stages if that is more); they are `microbatch` sequences of `seq_len` tokens.
    `dtype` is that of weights, "fp32" or "bf16"; `master_dtype` that of gradients, master weights and optimizer state,
    by default the same; `optimizer` is that of `runner launch`, a name or a file, and `ema` the decay of an average of
    the weights, or 0. `replicate` is the number of data-parallel replicas of each stage (DDP, HSDP), `shard` that of
    the ranks that shard it (FSDP), `tensor` the tensor-parallel degree, and `expert` the number of ranks, of those that
    share one copy, that have different experts. `recompute` is activation checkpointing: "none", "full", "selective"
    (all but matrix products and attention), or N for every Nth layer. Logits and loss are computed in chunks of
    `loss_chunk` tokens; None: of a whole microbatch. `host_memory` is what ranks on CPUs do with freed memory; None: on
    GPUs. `measured` has the time of each module, and `overhead` what a step takes besides; `run` has both as a run
    measured them, from which a plan derives those of its own degrees.

    Units: `memory_limit` in bytes per rank, `measured` in seconds per microbatch.
    """

    schedule: str | None = None
    microbatch_group: int | None = None
    num_microbatches: int | None = None
    global_batch: int | None = None
    microbatch: int = defaults.MICROBATCH
    seq_len: int = defaults.SEQ_LEN
    dtype: TrainingDtype = defaults.DTYPE
    master_dtype: TrainingDtype | None = None
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    context_method: ContextMethod = defaults.CONTEXT_METHOD
    expert: int = 1
    optimizer: str = defaults.OPTIMIZER
    ema: float = 0.0
    recompute: Recompute = defaults.RECOMPUTE
    loss_chunk: int | None = None
    host_memory: HostMemory | None = None
    memory_limit: int | None = None
    measured: Mapping[str, ModuleTime] | None = None
    overhead: StepTime | None = None
    run: MeasuredTimes | None = None

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "recompute"):  # JSON has no integers of NumPy
            object.__setattr__(self, name, as_int(getattr(self, name)))

    @property
    def num_per_stage(self) -> int:
        """The number of ranks that share each stage."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def policy(self) -> Policy:
        """The dtypes' name in estimates; bf16 with masters in fp32 is "mixed"."""
        return self.dtype if self.master_dtype in (None, self.dtype) else "mixed"

    @property
    def dtypes(self) -> str:
        """The dtypes in words."""
        return "bf16 with masters in fp32" if self.policy == "mixed" else self.dtype

    def schedule_for(self, layout: StageLayout) -> str:
        """Return the name of the schedule to assume for a layout; a single rank runs its microbatches in turn."""
        name = self.schedule or layout.schedule or default_schedule(layout.placement)
        if layout.placement.num_ranks > 1 or is_schedule_file(name):
            return name
        schedule_named(name)  # refuses an unknown name
        return default_schedule(layout.placement)

    def check_schedule(self, layout: StageLayout) -> str:
        """Return the canonical name of the schedule to assume for a layout, or its file.

        Raises:
            UsageError: it does not support these stages and microbatches.
            ScheduleError: the file cannot be read or run.
        """
        name, number = self.schedule_for(layout), self.microbatches_for(layout.placement)
        if not is_schedule_file(name):
            return check_schedule(name, layout.placement, number, microbatch_group=self.microbatch_group)
        table = read_schedule_file(Path(name), layout.placement, microbatch_group=self.microbatch_group)
        if table.num_microbatches != number:
            problem = f"{name} has {table.num_microbatches} microbatches, found {number}"
            hint = f"pass {Parameter('assumed.num_microbatches', table.num_microbatches)}"
            raise UsageError(Parameter("assumed.num_microbatches"), problem, hint, code="schedule.microbatches")
        return name

    def table_for(self, layout: StageLayout) -> Table:
        """Return the actions of a step with the schedule to assume for a layout; it raises as `check_schedule` does."""
        name, number = self.check_schedule(layout), self.microbatches_for(layout.placement)
        if is_schedule_file(name):
            return read_schedule_file(Path(name), layout.placement)
        return schedule_table(name, layout.placement, number, microbatch_group=self.microbatch_group)

    def microbatches_for(self, placement: Placement) -> int:
        """Return the number of microbatches per step to assume."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        number = (self.global_batch or defaults.GLOBAL_BATCH) // (self.replicate * self.shard * self.microbatch)
        # Every schedule supports as many as there are stages.
        return max(1, number) if self.global_batch else max(placement.num_stages, number)


def check_assumptions(assumed: Assumptions) -> None:
    """Refuse assumptions that are invalid or conflict, before a source is opened."""
    if not isinstance(assumed, Assumptions):
        problem = f"expected reshard.Assumptions, found {str(assumed)[:80]}"
        raise UsageError(Parameter("assumed"), problem, code="options.invalid-value")
    for field, text in (("schedule", assumed.schedule or ""), ("optimizer", assumed.optimizer)):
        if not isinstance(text, str):
            problem = f"expected text, found {str(text)[:80]!r}"
            raise UsageError(Parameter(f"assumed.{field}"), problem, code="options.invalid-value")
    if not 0 <= assumed.ema < 1:  # nan, too
        problem = f"expected a number >= 0 and < 1, found {assumed.ema}"
        raise UsageError(Parameter("assumed.ema"), problem, code="options.invalid-value")
    check_choice(Parameter("assumed.dtype"), assumed.dtype, get_args(TrainingDtype))
    if assumed.master_dtype is not None:
        check_choice(Parameter("assumed.master_dtype"), assumed.master_dtype, get_args(TrainingDtype))
    if (assumed.dtype, assumed.master_dtype) == ("fp32", "bf16"):
        name, dtype = Parameter("assumed.master_dtype"), Parameter("assumed.dtype", "fp32")
        raise UsageError(name, f"bf16 has less precision than {dtype}", code="options.master-dtype")
    kinds, *_ = get_args(Recompute)
    if type(assumed.recompute) is not int:
        check_choice(Parameter("assumed.recompute"), assumed.recompute, get_args(kinds))
    if assumed.host_memory is not None:
        check_choice(Parameter("assumed.host_memory"), assumed.host_memory, get_args(HostMemory))
    if not assumed.optimizer.endswith(".toml"):
        check_choice(Parameter("assumed.optimizer"), assumed.optimizer, (*PRESETS, "FILE.toml"))
    if not isinstance(assumed.overhead, StepTime | None):
        problem = f"expected a StepTime, found {str(assumed.overhead)[:80]}"
        raise UsageError(Parameter("assumed.overhead"), problem, code="options.invalid-value")
    if assumed.run is not None:
        check_run(assumed.run, "assumed.run.how")
    for counted in (*_COUNTS, *(["recompute"] if type(assumed.recompute) is int else [])):
        if (count := getattr(assumed, counted)) is not None:
            check_count(Parameter(f"assumed.{counted}"), count)
    check_choice(Parameter("assumed.context_method"), assumed.context_method, get_args(ContextMethod))
    if assumed.seq_len % (chunks := 2 * assumed.context) and assumed.context > 1:
        degree, problem = Parameter("assumed.context"), f"expected a multiple of {chunks}, twice"
        raise UsageError(Parameter("assumed.seq_len"), f"{problem} {degree}", code="options.cp-divisor")
    if (per_replica := assumed.shard * assumed.context * assumed.tensor) % assumed.expert:
        problem = f"expected a divisor of {per_replica}, the ranks that share one copy of a stage's weights, found"
        hint = f"add {Parameter('assumed.shard', assumed.expert)}, if the model has experts"
        raise UsageError(Parameter("assumed.expert"), f"{problem} {assumed.expert}", hint, code="launch.degrees")
    if assumed.tensor > 1 and assumed.loss_chunk is not None:
        chunk, degree = Parameter("assumed.loss_chunk"), Parameter("assumed.tensor")
        raise UsageError(
            chunk,
            f"conflicts with {degree}: a tensor-parallel LM head computes the logits of all tokens at once",
            f"remove {chunk}",
            code="options.tp-loss-chunk",
        )
    size = assumed.replicate * assumed.shard * assumed.microbatch
    if (batch := assumed.global_batch) is not None:
        if assumed.num_microbatches is not None:
            problem = f"conflicts with {Parameter('assumed.num_microbatches')}"
            raise UsageError(Parameter("assumed.global_batch"), problem, "remove one of them", code="options.conflict")
        if batch % size:
            problem = f"expected a multiple of {size}, a microbatch of all data-parallel ranks, found {batch}"
            hint = f"pass {Parameter('assumed.global_batch', max(size, batch - batch % size))}"
            raise UsageError(Parameter("assumed.global_batch"), problem, hint, code="options.batch-size")


def check_run(run: MeasuredTimes, where: str) -> None:
    """Refuse times of a run without the options that they depend on, which are found at `where`."""
    link = () if run.step is None or run.step.link is None else ("num_ranks", "ranks_per_node")
    degrees = (name for name in ("tp", "cp", "ep", "ranks_per_node") if name in run.how)
    for name in ("seq_len", "microbatch", *degrees, *link):
        if type(number := run.how.get(name)) is not int or not 1 <= number <= MOST_MEASURED:
            problem = f"expected a number from 1 up, found {str(number)[:80]}"
            raise InputError(f"{where}.{name}", problem, code="options.cost-file")
    for name in ("dtype", "master_dtype"):
        if (dtype := run.how.get(name, "fp32")) not in get_args(TrainingDtype):
            problem = f"expected {' or '.join(get_args(TrainingDtype))}, found {str(dtype)[:80]}"
            raise InputError(f"{where}.{name}", problem, code="options.cost-file")


def num_passes(placement: Placement, num_microbatches: int) -> int:
    """Count the forward and backward passes of a step, over microbatches and stages."""
    return 2 * placement.num_stages * num_microbatches
