"""The training options, after `--` on `runner launch`; parsed by the launcher and by every rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import click
from click.core import ParameterSource

from manifests.command.console import GroupedHelp
from manifests.command.neighbors import usage_error
from manifests.errors import UsageError
from manifests.models.adapters import ALL_LINEAR
from manifests.models.training import HostMemory
from manifests.schedules.rules import SCHEDULES
from runner.config.declared import LocalPath, WholeNumber, build, flag, group, parameters_of
from runner.config.lora import WITH_RANK, LoraOptions, check_adapters, check_dropout, read_lora
from runner.config.loss import BalanceOptions, LossOptions
from runner.config.parallel_dims import DegreeOptions
from runner.config.schema import (
    BatchOptions,
    CheckpointOptions,
    ComputeOptions,
    DataOptions,
    OptimOptions,
    PublishOptions,
    ResumeOptions,
)

Device = Literal["auto", "cpu", "cuda"]
Digests = Literal["foreground", "background"]
_ON_COMMAND_LINE = ParameterSource.COMMANDLINE


def _parse_steps(name: str, text: str | None) -> range:
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(
            name,
            f"expected a step, such as 3, or a range, such as 3-5, found {text!r}",
            code="options.invalid-value",
        )
    return range(first, last + 1)


def _parse_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            problem = f"expected a regular expression: {error}"
            raise UsageError(f"--train-only {pattern}", problem, code="options.invalid-value") from error
    return patterns


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """The options of a run. `timeout_s` limits every wait for another rank, `step_timeout_s` every step, in seconds.

    `values` are the values of the flags by parameter name; `given` are the parameters on the command line.
    """

    steps: int = flag("--steps", type=WholeNumber(min=0), written_default=10, help="Optimizer steps of the whole run.")
    batch: BatchOptions = group(BatchOptions)
    schedule: str | None = flag(
        "--schedule", type=click.Path(), metavar="NAME|FILE.csv",
        show_default="the manifest's; else 1F1B, or Interleaved1F1B or ZBVZeroBubble for several stages a rank",
        help=f"Pipeline schedule: {', '.join(SCHEDULES)}; or a CSV file of its actions.",
    )  # fmt: skip
    microbatch_group: int | None = flag(
        "--microbatch-group", type=WholeNumber(min=1), metavar="N", default=None, show_default="groups of equal size",
        help="With Interleaved1F1B: microbatches that pass through a stage before the rank switches to its next one "
        "(Megatron's microbatch_group_size_per_vp_stage); the last group may be smaller.",
    )  # fmt: skip
    data: DataOptions = group(DataOptions)
    eval_sources: tuple[str, ...] = flag(
        "--eval-data", type=click.Path(), multiple=True, metavar="PATH",
        help="Evaluation data: its loss is reported after the last step.",
    )  # fmt: skip
    eval_every: int | None = flag(
        "--eval-every", type=WholeNumber(min=1), metavar="N", default=None, help="Also evaluate every N steps."
    )
    optim: OptimOptions = group(OptimOptions)
    loss: LossOptions = group(LossOptions, default=LossOptions())
    balance: BalanceOptions = group(BalanceOptions, default=BalanceOptions())
    compute: ComputeOptions = group(ComputeOptions)
    degrees: DegreeOptions = group(DegreeOptions)
    lora: LoraOptions | None = group(LoraOptions, unless_none="lora_rank")
    adapter: Path | None = flag(
        "--lora-from", "adapter", type=click.Path(path_type=Path), metavar="DIR",
        help="Start with the adapters of this PEFT folder, whose rank, scale and modules are those of the run.",
    )  # fmt: skip
    train_only: tuple[str, ...] = flag(
        "--train-only", multiple=True, metavar="REGEX", read=_parse_patterns,
        help="Train only parameters whose names match this regular expression in any place, such as lm_head or "
        r"'layers\.3\.'; freeze the others. May be repeated.",
    )  # fmt: skip
    digests: Digests = flag(
        "--digests", type=click.Choice(get_args(Digests)), default="foreground",
        help="Verify digests of what is loaded before the first step, or in the background during the first steps, and "
        "before anything is saved.",
    )  # fmt: skip
    check_ties_every: int = flag(
        "--check-ties-every", type=WholeNumber(min=1), written_default=100, metavar="N",
        help="Check every N steps, and before every checkpoint, that replicas of tied weights are equal.",
    )  # fmt: skip
    host_memory: HostMemory | Literal["auto"] = flag(
        "--allocator", "host_memory", type=click.Choice(["auto", *get_args(HostMemory)]), default="auto",
        help="On CPUs, reuse freed memory (fast), or return it to the system after every action (compact); auto: fast "
        "if its plan and a tenth fit into what is free.",
    )  # fmt: skip
    self_check: bool = flag(
        "--self-check/--no-self-check", default=True,
        help="Before the first step, compare a step of a tiny model of the config on these ranks, with these options, "
        "with that of one process, if the model is built of transformers' modules.",
    )  # fmt: skip
    device: Device = flag(
        "--device", type=click.Choice(get_args(Device)), written_default="auto", help="Where the ranks compute."
    )
    checkpoint: CheckpointOptions | None = group(CheckpointOptions, unless_none="checkpoint")
    publish: PublishOptions | None = group(PublishOptions, default=None, unless_none="publish")
    resume: ResumeOptions = group(ResumeOptions)
    save: Path | None = flag("--save", type=LocalPath(), help="Write the trained weights to this folder at the end.")
    force: bool = flag("--force", is_flag=True, help="Let --save replace an existing checkpoint.")
    traced: range = flag(
        "--trace", metavar="N|A-B", read=partial(_parse_steps, "--trace"),
        help="Write each rank's Chrome trace of these steps to LOG_DIR/trace; runner report draws it.",
    )  # fmt: skip
    profiled: range = flag(
        "--profile", metavar="N|A-B", read=partial(_parse_steps, "--profile"),
        help="Write the operators and kernels that torch.profiler sees in these steps to LOG_DIR/profile.",
    )  # fmt: skip
    memory_snapshot: bool = flag(
        "--memory-snapshot",
        is_flag=True,
        help="Write CUDA's allocations to LOG_DIR/profile, for pytorch.org/memory_viz.",
    )
    log_dir: Path = flag(
        "--log-dir", type=LocalPath(), written_default=Path("runner-log"), metavar="DIR",
        show_default="runner-log/DATE-NAME, one for each run", help="Folder of metrics.jsonl and the run's other logs.",
    )  # fmt: skip
    log_every: int = flag(
        "--log-every", type=WholeNumber(min=1), written_default=1, metavar="N",
        help="Print every Nth step; metrics.jsonl has every step, and a terminal shows a progress bar below.",
    )  # fmt: skip
    quiet: bool = flag("--quiet", is_flag=True, help="Print only errors; steps and notes are in LOG_DIR.")
    tensorboard: bool = flag(
        "--tensorboard", is_flag=True, help="Also write the metrics as TensorBoard event files to LOG_DIR/tensorboard."
    )
    wandb: bool = flag(
        "--wandb", is_flag=True, help="Also log the metrics to Weights & Biases; with WANDB_MODE=offline, to LOG_DIR."
    )
    stage_to_local: Path | None = flag(
        "--stage-to-local", type=click.Path(path_type=Path), metavar="DIR",
        help="Cache the bundles of a node's ranks in this folder on its local disk, and read them from there.",
    )  # fmt: skip
    timeout_s: int = flag(
        "--timeout", type=WholeNumber(min=1), written_default=600, help="Seconds to wait for another rank."
    )
    step_timeout_s: int = flag(
        "--step-timeout", type=WholeNumber(min=1), metavar="SECONDS", show_default="twice --timeout",
        help="Print every thread's stack and exit when a step takes longer.",
    )  # fmt: skip
    values: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    @property
    def eval_data(self) -> DataOptions | None:
        """The evaluation data: read like the training data, or its rows, but each document once and in order."""
        if not self.eval_sources:
            return None
        is_tokenized = self.data.is_tokenized or self.data.dataset is not None
        return replace(
            self.data, sources=self.eval_sources, shuffle=False, weights=(), dataset=None, is_tokenized=is_tokenized
        )

    @property
    def history(self) -> Path | None:
        """The folder of checkpoints; None: none are saved."""
        return self.checkpoint.history if self.checkpoint else None

    @property
    def folders(self) -> dict[str, Path]:
        """The folders of this machine that the run writes, by their flags."""
        chain = self.publish.folder if self.publish else None
        places = {"--log-dir": self.log_dir, "--checkpoint": self.history, "--save": self.save, "--publish": chain}
        return {flag: path for flag, path in places.items() if path is not None}

    def checks_ties_after(self, step: int) -> bool:
        """Whether replicas of tied weights are compared after this step; always before a checkpoint."""
        return self.saves_after(step) or step % self.check_ties_every == 0

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due after this step; after the last one it always is."""
        return self.eval_every is not None and step % self.eval_every == 0 and step < self.steps

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return self._is_due(self.checkpoint, step)

    def publishes_after(self, step: int) -> bool:
        """Whether a version of the weights is due after this step."""
        return self._is_due(self.publish, step)

    def _is_due(self, output: CheckpointOptions | PublishOptions | None, step: int) -> bool:
        return output is not None and (step == self.steps or (output.every is not None and step % output.every == 0))


def parse_training(args: Sequence[str]) -> TrainOptions:
    """Parse the training options."""
    try:
        with training_command.make_context("runner launch MANIFEST --", list(args)) as context:
            params = context.params
            given = frozenset(name for name in params if context.get_parameter_source(name) is _ON_COMMAND_LINE)
            filled = params if params["resume"] is None else _until_recalled(params, given)
            return replace(_options(filled), values=dict(params), given=given)
    except click.exceptions.Exit as done:  # --help was printed
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise usage_error(error, "training options") from error


def recall(options: TrainOptions, remembered: Mapping[str, Any]) -> TrainOptions:
    """Return the options with a checkpoint's values for every flag that is not on the command line."""
    defaults = {name: value for name, value in remembered.items() if name not in options.given}
    if "dtype" in options.given and "master_dtype" not in options.given and remembered.get("dtype") == "fp32":
        defaults["master_dtype"] = "fp32"
    return replace(_options({**options.values, **defaults}), given=options.given)


def _until_recalled(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return values that agree with the given ones: a checkpoint may recall others than the defaults.

    If there is none, `recall` reports a default that does not agree.
    """
    filled = dict(values)
    if "global_batch" not in given:
        filled["global_batch"] = values["microbatch"]
    if "decay_steps" not in given:
        filled["decay_steps"] = max(values["steps"], values["warmup_steps"] + values["stable_steps"] + 1)
    if "dtype" not in given:
        filled["dtype"] = values["master_dtype"] or values["dtype"]
    return filled


def flag_of(name: str) -> str:
    """Return the flag of a parameter: `--warmup-steps` for `warmup_steps`."""
    return "--" + name.replace("_", "-")


def unwritten(flags: Mapping[str, Sequence[str]], args: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of those flags that the training options do not set themselves."""
    parser = training_command.make_parser(click.Context(training_command))
    try:
        written = parser.parse_args(list(args))[0]
    except click.UsageError:  # `parse_training` reports it
        return ()
    names = {flag: param.name for param in training_command.params for flag in (*param.opts, *param.secondary_opts)}
    if "data" in written:
        written.setdefault("data_weight", ())  # weights belong to their --data
    return tuple(word for flag, words in flags.items() if names.get(flag) not in written for word in words)


def _training(**_: Any) -> None:
    """Training options, after -- on runner launch.

    A run that resumes takes batch size, learning rate, AdamW and dtype options from the checkpoint unless they are on
    the command line; the defaults below are for a new run.
    """


class _GroupedCommand(GroupedHelp, click.Command):
    pass


_GROUPS = {
    "Most used": (
        "steps", "data", "seq_len", "global_batch", "microbatch", "lr", "dtype", "checkpoint", "checkpoint_every",
        "resume", "save", "log_dir",
    ),
    "Data": (
        "dataset", "text_field", "completion_field", "is_tokenized", "pack", "document_mask", "add_bos_token",
        "add_eos_token", "skip_bad_documents", "shuffle", "data_weight", "seed", "eval_data", "eval_every",
        "restart_data",
    ),
    "Optimizer": (
        "optimizer", "beta1", "beta2", "eps", "weight_decay", "weight_decay_1d", "momentum", "ema", "max_norm",
        "warmup_steps", "stable_steps", "decay", "decay_steps", "min_lr",
    ),
    "Loss": ("own_loss", "label_smoothing", "z_loss", "token_weights", "mtp_loss_weight"),
    "Experts": ("router_bias_rate", "router_aux_loss"),
    "Precision and memory": (
        "master_dtype", "reduce_dtype", "ac", "loss_chunk", "is_compiled", "device", "host_memory",
    ),
    "Adapters and freezing": (
        "lora_rank", "lora_alpha", "lora_target", "lora_experts", "lora_dropout", "lora_rslora", "adapter",
        "train_only",
    ),
    "Parallelism": (
        "schedule", "microbatch_group", "dp_replicate", "dp_shard", "tp", "cp", "cp_method", "ep", "load",
        "stage_to_local", "timeout", "step_timeout",
    ),
    "Checkpoints": ("keep", "checkpoint_sync", "resume_weights_only", "force"),
    "Published weights": ("publish", "publish_every", "publish_dtype"),
    "Checks": ("digests", "check_ties_every", "self_check"),
    "Logging": ("trace", "profile", "memory_snapshot", "log_every", "quiet", "tensorboard", "wandb"),
}  # fmt: skip


training_command = _GroupedCommand(
    "training",
    groups=_GROUPS,
    params=[*parameters_of(TrainOptions)],
    callback=_training,
    help=_training.__doc__,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="\b\nExample:\n  runner launch ./Llama-3.2-1B-pp2 -- --steps 100 --global-batch 16 --data text/",
)


def _options(values: Mapping[str, Any]) -> TrainOptions:
    _check_together(values)
    options = replace(build(TrainOptions, _with_defaults(values)), values=dict(values))
    options = options if options.adapter is None else replace(options, lora=read_lora(options.adapter))
    if options.degrees.tensor > 1:
        check_dropout(options.lora, options.adapter)
    return options


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the defaults that depend on other flags."""
    filled = dict(values)
    filled["master_dtype"] = filled["master_dtype"] or filled["dtype"]
    filled["reduce_dtype"] = filled["reduce_dtype"] or filled["master_dtype"]
    if filled["lora_alpha"] is None:
        filled["lora_alpha"] = filled["lora_rank"]
    filled["step_timeout"] = filled["step_timeout"] or 2 * filled["timeout"]
    if filled["decay_steps"] is None:
        filled["decay_steps"] = filled["steps"]
    return filled


# Flags that would do nothing without another one.
_NEEDS = {
    "eval_every": "--eval-data PATH",
    "publish_every": "--publish DIR",
    "checkpoint_every": "--checkpoint DIR",
    "keep": "--checkpoint DIR",
    **dict.fromkeys(WITH_RANK, "--lora-rank R"),
}


def _check_together(values: Mapping[str, Any]) -> None:
    check_adapters(values)
    for name, needed in _NEEDS.items():
        if values[name] not in (None, False, 0, ALL_LINEAR) and not values[needed[2:].split(" ")[0].replace("-", "_")]:
            code = "options.needs-checkpoint" if needed == "--checkpoint DIR" else "options.missing-value"
            raise UsageError(flag_of(name), f"needs {needed}", f"add {needed}, or remove {flag_of(name)}", code=code)
    if values["loss_chunk"] is not None and any(values[name] for name in _GROUPS["Loss"] if name != "mtp_loss_weight"):
        problem = "computes plain cross-entropy, and no other loss"
        raise UsageError("--loss-chunk", problem, "remove it", code="options.loss-chunk")
    counted = "--loss" if values["own_loss"] else "--token-weights" if values["token_weights"] else None
    if values["router_aux_loss"] and counted:
        problem = f"conflicts with {counted}: gradients are divided by what that loss counts"
        raise UsageError("--router-aux-loss", problem, "remove one of them", code="options.router")
    checkpoint, resume, local = values["checkpoint"], values["resume"], values["stage_to_local"]
    if checkpoint is None and resume and re.fullmatch(r"step-\d+", resume):
        where, hint = f"--resume {resume}", f"add --checkpoint DIR, or write the whole path: --resume DIR/{resume}"
        problem = "needs --checkpoint DIR, the folder to find it in"
        raise UsageError(where, problem, hint, code="options.needs-checkpoint")
    if values["restart_data"] and resume is None:
        problem = "needs --resume: a new run begins at the first sequence anyway"
        raise UsageError("--restart-data", problem, "remove it, or add --resume auto", code="options.needs-resume")
    if local is not None and not re.match(r"[/$]", str(local)):
        raise UsageError(
            f"--stage-to-local {local}",
            "expected an absolute path: every node resolves it",
            "environment variables of the node are expanded, such as '$TMPDIR/bundles'",
            code="options.relative-cache",
        )
    if resume == "auto" and values["resume_weights_only"]:
        raise UsageError(
            "--resume-weights-only",
            "conflicts with --resume auto, which resumes the whole training state",
            "name the checkpoint: --resume DIR or --resume step-N",
            code="options.auto-weights-only",
        )
