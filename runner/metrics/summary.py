"""What a run prints before its first step and after its last."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from manifests.command.sizes import show_bytes
from manifests.models import ModelShape
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims


def opening(
    shape: ModelShape, options: TrainOptions, degrees: ParallelDims, schedule: str, device: str, first_step: int
) -> Sequence[str]:
    """Return lines on the model, on its ranks, and on the tokens of a step and of the run.

    `first_step` is the first step of this run, counted from 1.
    """
    compute, batch = options.compute, options.batch
    masters = "" if compute.master_dtype == compute.dtype else f" with masters in {compute.master_dtype}"
    plural = "s" * (degrees.world_size > 1)
    size = batch.global_batch // degrees.data // batch.microbatch
    replicas = " on each data-parallel rank" if degrees.data > 1 else ""
    tokens, steps = batch.global_batch * batch.seq_len, options.steps - first_step + 1
    return (
        f"{shape.architecture}, {shape.num_params:,} parameters in {compute.dtype}{masters}",
        f"{degrees.world_size} {device} rank{plural}: {degrees}; {schedule}, {size} microbatches of {batch.microbatch} "
        f"x {batch.seq_len} tokens{replicas}",
        f"steps {first_step} to {options.steps}, of {tokens:,} tokens each, {steps * tokens:,} in all: "
        + shlex.join(options.data.sources),
    )  # fmt: skip


def next_command(options: TrainOptions, base: str, *, has_state: bool) -> str:
    """Return the command line that people need after a run of the model `base`, which may have optimizer state."""
    if (saved := options.save) is None:
        return shlex.join(("runner", "report", str(options.log_dir)))
    if options.lora is None:
        return shlex.join(("reshard", "export", str(saved), "--to", "hf", "--out", f"{saved}-hf"))
    if not has_state:
        return shlex.join(("reshard", "merge", base, str(saved), "--out", f"{saved}-merged"))
    # merge refuses optimizer state, which would not be that of the merged weights.
    export = shlex.join(("reshard", "export", base, "--to", "hf", "--out", f"{saved}-base"))
    return f"{export} && {next_command(options, f'{saved}-base', has_state=False)}"


def how_to_resume(options: TrainOptions, launched: str, base: str) -> str:
    """Return how a run that was stopped is resumed. Its adapters may be of another base than what was launched."""
    if options.lora is None or base == launched:
        return "--resume auto resumes from it"
    return f"launch {shlex.quote(base)}, the base of its adapters, with --resume auto to resume from it"


def closing(
    *, num_steps: int, num_tokens: int, seconds: float, peaks_nbytes: Sequence[int], following: str
) -> Sequence[str]:
    """Return lines on what was trained, and the command that follows. `peaks_nbytes` are of every rank."""
    most = max(range(len(peaks_nbytes)), key=peaks_nbytes.__getitem__)
    steps = "1 step" if num_steps == 1 else f"{num_steps:,} steps"
    return (
        f"trained {steps}, {num_tokens:,} tokens, in {seconds:.1f} s: {num_tokens / seconds:,.0f} tokens/s;"
        f" peak memory {show_bytes(peaks_nbytes[most])}, on rank {most}",
        f"next: {following}",
    )
