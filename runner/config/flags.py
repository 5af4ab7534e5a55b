"""What follows `--` on `runner launch`: the training options, read by the launcher and by every rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import click
from click.core import ParameterSource

from manifests.errors import UsageError
from manifests.schedules import SCHEDULES
from runner.config.declared import Whole, build, flag, group, parameters_of
from runner.config.parallel_dims import DegreeOptions
from runner.config.schema import (
    BatchOptions,
    CheckpointOptions,
    ComputeOptions,
    DataOptions,
    Dtype,
    OptimOptions,
    ResumeOptions,
)

__all__ = ["TrainOptions", "flag_of", "is_training_flag", "parse_training", "recall", "training_command", "unwritten"]

Device = Literal["auto", "cpu", "cuda"]
_WRITTEN = ParameterSource.COMMANDLINE


def _parse_trace(text: str | None) -> range:
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(
            "--trace", f"expected a step, or two with - between them, found {text!r}", code="options.invalid-value"
        )
    return range(first, last + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """One training run. `timeout_s` bounds every wait for another rank, `step_timeout_s` every step, in seconds.

    `values` are those of the flags by the names of their parameters, and `given` the ones that were written.
    """

    steps: int = flag("--steps", type=Whole(min=0), written_default=10, help="Optimizer steps of the whole run.")
    batch: BatchOptions = group(BatchOptions)
    schedule: str | None = flag(
        "--schedule", type=click.Path(), metavar="NAME|FILE.csv",
        show_default="the manifest's; else 1F1B, or Interleaved1F1B or ZBVZeroBubble for several stages a rank",
        help=f"Pipeline schedule: {', '.join(SCHEDULES)}; or a table of actions.",
    )  # fmt: skip
    data: DataOptions = group(DataOptions)
    eval_sources: tuple[str, ...] = flag(
        "--eval-data", type=click.Path(), multiple=True, metavar="PATH",
        help="Text whose loss is reported after the last step.",
    )  # fmt: skip
    optim: OptimOptions = group(OptimOptions)
    compute: ComputeOptions = group(ComputeOptions)
    degrees: DegreeOptions = group(DegreeOptions)
    check_ties_every: int = flag(
        "--check-ties-every", type=Whole(min=1), written_default=100, metavar="N",
        help="Compare the copies of tied weights every N steps; also before every checkpoint.",
    )  # fmt: skip
    device: Device = flag(
        "--device", type=click.Choice(get_args(Device)), written_default="auto", help="Where the ranks compute."
    )
    checkpoint: CheckpointOptions | None = group(CheckpointOptions, unless_none="checkpoint")
    resume: ResumeOptions = group(ResumeOptions)
    save: Path | None = flag(
        "--save", type=click.Path(path_type=Path), help="Write the trained weights to this folder at the end."
    )
    force: bool = flag("--force", is_flag=True, help="Let --save replace a checkpoint that exists.")
    traced: range = flag(
        "--trace", metavar="N|A-B", read=_parse_trace,
        help="Write a trace of these steps of every rank to DIR/trace; runner report draws it.",
    )  # fmt: skip
    log_dir: Path = flag(
        "--log-dir", type=click.Path(path_type=Path), written_default=Path("runner-log"), metavar="DIR",
        show_default="runner-log/DATE-NAME, one for each run", help="Folder of metrics.jsonl and the run's other logs.",
    )  # fmt: skip
    log_every: int = flag(
        "--log-every", type=Whole(min=1), written_default=1, metavar="N",
        help="Print every Nth step; metrics.jsonl has them all, and a terminal shows a bar.",
    )  # fmt: skip
    quiet: bool = flag("--quiet", is_flag=True, help="Print errors alone; LOG_DIR has the steps and the notes.")
    tensorboard: bool = flag(
        "--tensorboard", is_flag=True, help="Write the metrics as TensorBoard event files, too, in LOG_DIR/tensorboard."
    )
    wandb: bool = flag(
        "--wandb", is_flag=True, help="Log the metrics to Weights & Biases, too; WANDB_MODE=offline: to LOG_DIR."
    )
    stage_to_local: Path | None = flag(
        "--stage-to-local", type=click.Path(path_type=Path), metavar="DIR",
        help="Cache the bundles of a node's ranks in this folder of its local disk, and read them there.",
    )  # fmt: skip
    timeout_s: int = flag("--timeout", type=Whole(min=1), written_default=600, help="Seconds to wait for another rank.")
    step_timeout_s: int = flag(
        "--step-timeout", type=Whole(min=1), metavar="SECONDS", show_default="twice --timeout",
        help="Print every thread's stack and exit when a step takes longer.",
    )  # fmt: skip
    values: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    @property
    def eval_data(self) -> DataOptions | None:
        """The evaluation data, read as the training data is, each document once and in order."""
        if not self.eval_sources:
            return None
        return replace(self.data, sources=self.eval_sources, shuffle=False, weights=())

    def checks_ties_after(self, step: int) -> bool:
        """Whether the copies of tied weights are compared after so many steps; always before a checkpoint."""
        return self.saves_after(step) or step % self.check_ties_every == 0

    @property
    def dtype(self) -> Dtype:
        return self.compute.dtype

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps: the last one of a run, or one in between."""
        if self.checkpoint is None:
            return False
        return step == self.steps or (self.checkpoint.every is not None and step % self.checkpoint.every == 0)


def parse_training(args: Sequence[str]) -> TrainOptions:
    """Read the training options.

    Raises:
        UsageError: an unknown flag, a value of the wrong kind, or values that do not go together.
    """
    try:
        with training_command.make_context("runner launch MANIFEST --", list(args)) as context:
            written = (name for name in context.params if context.get_parameter_source(name) is _WRITTEN)
            return replace(_options(context.params), given=frozenset(written))
    except click.exceptions.Exit as done:  # --help was asked for, and shown
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise UsageError(
            "training options", error.format_message(), "runner launch MANIFEST -- --help lists them",
            code="usage.arguments",
        ) from error  # fmt: skip


def recall(options: TrainOptions, remembered: Mapping[str, Any]) -> TrainOptions:
    """Give the same options, with what a checkpoint remembers in place of every flag that was not written.

    Raises:
        UsageError: values that do not go together.
    """
    unwritten = {name: value for name, value in remembered.items() if name not in options.given}
    return replace(_options({**options.values, **unwritten}), given=options.given)


def flag_of(name: str) -> str:
    """Give the flag of a parameter: `--warmup-steps` of `warmup_steps`."""
    return "--" + name.replace("_", "-")


def is_training_flag(flag: str) -> bool:
    """Whether a word such as `--data` is a flag of training, and of nothing before it."""
    return any(flag in (*param.opts, *param.secondary_opts) for param in training_command.params)


def unwritten(flags: Mapping[str, Sequence[str]], args: Sequence[str]) -> tuple[str, ...]:
    """Give the words of those flags that training options do not say themselves."""
    parser = training_command.make_parser(click.Context(training_command))
    try:
        said = parser.parse_args(list(args))[0]
    except click.UsageError:  # `parse_training` says what is wrong
        return ()
    names = {flag: param.name for param in training_command.params for flag in (*param.opts, *param.secondary_opts)}
    if "data" in said:
        said.setdefault("data_weight", ())  # those of other data say nothing of these
    return tuple(word for flag, words in flags.items() if names.get(flag) not in said for word in words)


def _training(**_: Any) -> None:
    """Training options, given after -- on runner launch.

    A run that resumes from a checkpoint takes batch, learning rate, AdamW and dtypes from there where they are not
    written: the defaults below are those of a new run.
    """


training_command = click.Command(
    "training",
    params=[*parameters_of(TrainOptions)],
    callback=_training,
    help=_training.__doc__,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="Example: runner launch DIR/manifest.json -- --steps 100 --seq-len 512 --global-batch 16 --data text/",
)


def _options(values: Mapping[str, Any]) -> TrainOptions:
    _check_together(values)
    return replace(build(TrainOptions, _with_defaults(values)), values=dict(values))


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with those filled in that other flags decide."""
    filled = dict(values)
    filled["master_dtype"] = filled["master_dtype"] or filled["dtype"]
    filled["reduce_dtype"] = filled["reduce_dtype"] or filled["master_dtype"]
    filled["step_timeout"] = filled["step_timeout"] or 2 * filled["timeout"]
    if filled["decay_steps"] is None:
        filled["decay_steps"] = filled["steps"]
    return filled


def _check_together(values: Mapping[str, Any]) -> None:
    checkpoint, resume, local = values["checkpoint"], values["resume"], values["stage_to_local"]
    for name in ("checkpoint_every", "keep"):
        if checkpoint is None and values[name]:
            raise UsageError(flag_of(name), "needs --checkpoint DIR", code="options.needs-checkpoint")
    if checkpoint is None and resume and re.fullmatch(r"step-\d+", resume):
        where = f"--resume {resume}"
        raise UsageError(where, "needs --checkpoint DIR, below which it is looked up", code="options.needs-checkpoint")
    if values["restart_data"] and resume is None:
        problem = "needs --resume: without one, data begins at its first sequence"
        raise UsageError("--restart-data", problem, "leave it out, or --resume auto", code="options.needs-resume")
    if local is not None and not re.match(r"[/$]", str(local)):
        raise UsageError(
            f"--stage-to-local {local}",
            "expected an absolute path: the folder is looked up on every node",
            "it may name a node's variables, such as '$TMPDIR/bundles'",
            code="options.relative-cache",
        )
    if resume == "auto" and values["resume_weights_only"]:
        raise UsageError(
            "--resume-weights-only",
            "needs a checkpoint by name: auto resumes where a run was",
            code="options.auto-weights-only",
        )
