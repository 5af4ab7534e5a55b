"""What follows `--` on `runner launch`: the training options, read by the launcher and by every rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import click
from click.core import ParameterSource

from manifests.errors import UsageError
from manifests.schedules import SCHEDULES
from runner.dimensions.degrees import DegreeOptions, Load
from runner.recipe import (
    BatchOptions,
    CheckpointOptions,
    ComputeOptions,
    DataOptions,
    Decay,
    Dtype,
    OptimOptions,
    ResumeOptions,
    parse_recompute,
)

__all__ = ["TrainOptions", "flag_of", "is_training_flag", "parse_training", "recall", "training_command", "unwritten"]

Device = Literal["auto", "cpu", "cuda"]
_WRITTEN = ParameterSource.COMMANDLINE


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """One training run. `timeout_s` bounds every wait for another rank, `step_timeout_s` every step, in seconds.

    `values` are those of the flags by the names of their parameters, and `given` the ones that were written.
    """

    steps: int
    batch: BatchOptions
    optim: OptimOptions
    compute: ComputeOptions
    degrees: DegreeOptions
    data: DataOptions
    eval_data: DataOptions | None
    schedule: str | None
    device: Device
    save: Path | None
    force: bool
    log_dir: Path
    stage_to_local: Path | None  # a folder of each node's own disk
    timeout_s: int
    step_timeout_s: int
    traced: range  # steps, the first being 1
    log_every: int  # steps, where no bar is shown
    tensorboard: bool
    wandb: bool
    check_ties_every: int
    checkpoint: CheckpointOptions | None
    resume: ResumeOptions
    values: Mapping[str, Any]
    given: frozenset[str]

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
            return replace(_options(**context.params), given=frozenset(written))
    except click.exceptions.Exit as done:  # --help was asked for, and shown
        sys.exit(done.exit_code)
    except click.UsageError as error:
        raise UsageError(
            "training options", error.format_message(), "runner launch MANIFEST -- --help lists them"
        ) from error


def recall(options: TrainOptions, remembered: Mapping[str, Any]) -> TrainOptions:
    """Give the same options, with what a checkpoint remembers in place of every flag that was not written.

    Raises:
        UsageError: values that do not go together.
    """
    unwritten = {name: value for name, value in remembered.items() if name not in options.given}
    return replace(_options(**{**options.values, **unwritten}), given=options.given)


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


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="Example: runner launch DIR/manifest.json -- --steps 100 --seq-len 512 --global-batch 16 --data text/",
)
@click.option("--steps", type=click.IntRange(min=0), default=10, help="Optimizer steps of the whole run.")
@click.option("--seq-len", type=int, default=512, help="Tokens in a sequence.")
@click.option("--global-batch", type=int, default=8, help="Sequences in an optimizer step.")
@click.option("--microbatch", type=int, default=1, help="Sequences in a stage at a time; their gradients add up.")
@click.option(
    "--schedule",
    metavar="NAME|FILE.csv",
    show_default="the manifest's; else 1F1B, or Interleaved1F1B or ZBVZeroBubble for several stages a rank",
    help=f"Pipeline schedule: {', '.join(SCHEDULES)}; or a table of actions.",
)
@click.option(
    "--data", multiple=True, required=True, metavar="PATH",
    help="Text: .txt, .jsonl or .parquet files, folders or globs of them, or the word synthetic. May be repeated.",
)  # fmt: skip
@click.option("--text-field", default="text", help="Field or column that holds the text.")
@click.option("--pack/--no-pack", default=True, help="Documents end to end, or one padded document a sequence.")
@click.option("--shuffle/--no-shuffle", default=False, help="Documents in a new order in every pass over the data.")
@click.option(
    "--data-weight", type=float, multiple=True, metavar="W", show_default="sources one after the other",
    help="Draw documents from the sources, from each as often as its weight says: once for each --data, in order.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, help="Seed of synthetic data, of orders and draws, and of dropout.")
@click.option("--eval-data", multiple=True, metavar="PATH", help="Text whose loss is reported after the last step.")
@click.option("--lr", type=click.FloatRange(min=0), default=1e-4, help="Learning rate of AdamW, after warm-up.")
@click.option("--beta1", type=click.FloatRange(0, 1, max_open=True), default=0.9)
@click.option("--beta2", type=click.FloatRange(0, 1, max_open=True), default=0.95)
@click.option("--eps", type=click.FloatRange(min=0), default=1e-8)
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.1)
@click.option("--max-norm", type=click.FloatRange(min=0), default=1.0, help="Clip gradients to this norm; 0: never.")
@click.option("--warmup-steps", type=click.IntRange(min=0), default=0, help="Steps of linear warm-up.")
@click.option("--stable-steps", type=click.IntRange(min=0), default=0, help="Steps at --lr before the decay (WSD).")
@click.option("--decay", type=click.Choice(get_args(Decay)), default="constant", help="How the rate goes down then.")
@click.option(
    "--decay-steps", type=click.IntRange(min=1), metavar="N", show_default="--steps", help="Step at which decay ends."
)
@click.option("--min-lr", type=click.FloatRange(min=0), default=0.0, help="Where the decay ends.")
@click.option(
    "--dtype", type=click.Choice(get_args(Dtype)), default="fp32", help="Of activations and the weights in use."
)
@click.option(
    "--master-dtype", type=click.Choice(get_args(Dtype)), show_default="--dtype",
    help="Of what AdamW keeps and checkpoints hold: fp32 beside --dtype bf16 is mixed precision.",
)  # fmt: skip
@click.option(
    "--reduce-dtype", type=click.Choice(get_args(Dtype)), show_default="--master-dtype",
    help="Of gradients while data-parallel ranks add them up.",
)  # fmt: skip
@click.option(
    "--ac", metavar="none|full|selective|N", default="none",
    help="Compute activations again in the backward: of no layer, of all, all but matrix products, of every Nth layer.",
)  # fmt: skip
@click.option(
    "--loss-chunk", type=click.IntRange(min=1), metavar="N", show_default="a microbatch's",
    help="Tokens whose logits are in memory at a time.",
)  # fmt: skip
@click.option("--compile", "is_compiled", is_flag=True, help="Compile every layer by itself with torch.compile.")
@click.option(
    "--check-ties-every", type=click.IntRange(min=1), default=100, metavar="N",
    help="Steps after which copies of tied weights are compared; also before every checkpoint.",
)  # fmt: skip
@click.option(
    "--dp-replicate", type=click.IntRange(min=1), metavar="N", show_default="what the number of ranks leaves",
    help="Copies of each stage; every one takes its own rows of a batch.",
)  # fmt: skip
@click.option(
    "--dp-shard", metavar="N|auto", default="1",
    help="Ranks that share the memory of one copy (FSDP); auto: all that the number of ranks leaves.",
)  # fmt: skip
@click.option("--tp", type=click.IntRange(min=1), metavar="N", default=1, help="Ranks that share every matrix product.")
@click.option(
    "--load", type=click.Choice(get_args(Load)), default="rows",
    help="Each rank reads its own rows; or one rank of a stage reads a tensor, checks it and sends it to the others.",
)  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), metavar="DIR",
    help="Save checkpoints below this folder: after the last step, and in between.",
)  # fmt: skip
@click.option("--checkpoint-every", type=click.IntRange(min=1), metavar="N", help="Save after every N steps.")
@click.option("--keep", type=click.IntRange(min=1), metavar="K", show_default="all", help="Checkpoints that stay.")
@click.option("--checkpoint-sync", is_flag=True, help="Stop training until a checkpoint is on disk.")
@click.option(
    "--resume", metavar="auto|DIR|step-N",
    help="Go on from the newest checkpoint that can be read (auto; without any, from MANIFEST), or from this one.",
)  # fmt: skip
@click.option(
    "--resume-weights-only", is_flag=True, help="Take only the weights of what is resumed, and begin at step 0."
)
@click.option(
    "--restart-data", is_flag=True, help="Go on with other data than the checkpoint's, from its first sequence."
)
@click.option("--save", type=click.Path(path_type=Path), help="Write the trained weights to this folder at the end.")
@click.option("--force", is_flag=True, help="Let --save replace a checkpoint that exists.")
@click.option(
    "--trace", metavar="N|A-B", help="Write what each rank runs in these steps to DIR/trace; runner report draws it."
)
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path("runner-log"), help="Folder of metrics.jsonl.")
@click.option(
    "--log-every", type=click.IntRange(min=1), default=1, metavar="N",
    help="Print every Nth step; metrics.jsonl has them all, and a terminal shows a bar.",
)  # fmt: skip
@click.option("--tensorboard", is_flag=True, help="Write the metrics as event files, too, in LOG_DIR/tensorboard.")
@click.option("--wandb", is_flag=True, help="Log the metrics to Weights & Biases, too; WANDB_MODE=offline: to LOG_DIR.")
@click.option(
    "--stage-to-local", type=click.Path(path_type=Path), metavar="DIR",
    help="Copy the bundles of a node's ranks to this folder of its own disk first, and read them there.",
)  # fmt: skip
@click.option("--timeout", type=click.IntRange(min=1), default=600, help="Seconds to wait for another rank.")
@click.option(
    "--step-timeout", type=click.IntRange(min=1), metavar="SECONDS", show_default="twice --timeout",
    help="Show what each thread does, and end, when a step takes longer.",
)  # fmt: skip
def training_command(**_: Any) -> None:
    """Training options, given after -- on runner launch.

    A run that goes on from a checkpoint takes batch, learning rate, AdamW and dtypes from there where they are not
    written: the defaults below are those of a new run.
    """


def _options(
    *, steps: int, seq_len: int, global_batch: int, microbatch: int, schedule: str | None, data: tuple[str, ...],
    text_field: str, pack: bool, shuffle: bool, data_weight: tuple[float, ...], seed: int,
    eval_data: tuple[str, ...], lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, max_norm: float, warmup_steps: int, stable_steps: int, decay: Decay,
    decay_steps: int | None, min_lr: float, dtype: Dtype, master_dtype: Dtype | None, reduce_dtype: Dtype | None,
    ac: str, loss_chunk: int | None, is_compiled: bool, dp_replicate: int | None, dp_shard: str, tp: int,
    load: Load, check_ties_every: int, device: Device, checkpoint: Path | None,
    checkpoint_every: int | None, keep: int | None, checkpoint_sync: bool, resume: str | None,
    resume_weights_only: bool, restart_data: bool, save: Path | None, force: bool, log_dir: Path,
    stage_to_local: Path | None, timeout: int, step_timeout: int | None, trace: str | None,
    log_every: int, tensorboard: bool, wandb: bool,
) -> TrainOptions:  # fmt: skip
    values = dict(locals())
    if checkpoint is None and (checkpoint_every or keep):
        raise UsageError("--checkpoint-every" if checkpoint_every else "--keep", "needs --checkpoint DIR")
    if checkpoint is None and resume and re.fullmatch(r"step-\d+", resume):
        raise UsageError(f"--resume {resume}", "needs --checkpoint DIR, below which it is looked up")
    if stage_to_local is not None and not re.match(r"[/$]", str(stage_to_local)):
        raise UsageError(
            f"--stage-to-local {stage_to_local}",
            "expected a path from / on: the folder is looked up on every node",
            "it may name a node's variables, such as '$TMPDIR/bundles'",
        )
    if resume == "auto" and resume_weights_only:
        raise UsageError("--resume-weights-only", "needs a checkpoint by name: auto goes on where a run was")
    return TrainOptions(
        steps=steps,
        batch=BatchOptions(global_batch=global_batch, microbatch=microbatch, seq_len=seq_len),
        optim=OptimOptions(
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            max_norm=max_norm,
            warmup_steps=warmup_steps,
            stable_steps=stable_steps,
            decay=decay,
            decay_steps=steps if decay_steps is None else decay_steps,
            min_lr=min_lr,
        ),
        compute=ComputeOptions(
            dtype=dtype,
            master_dtype=master_dtype or dtype,
            reduce_dtype=reduce_dtype or master_dtype or dtype,
            recompute=parse_recompute(ac),
            is_compiled=is_compiled,
            loss_chunk=loss_chunk,
        ),
        degrees=DegreeOptions(replicate=dp_replicate, shard=_parse_shards(dp_shard), tensor=tp, load=load),
        data=DataOptions(
            sources=data, text_field=text_field, pack=pack, seed=seed, shuffle=shuffle, weights=data_weight
        ),
        eval_data=DataOptions(sources=eval_data, text_field=text_field, pack=pack, seed=seed) if eval_data else None,
        schedule=schedule,
        device=device,
        save=save,
        force=force,
        log_dir=log_dir,
        stage_to_local=stage_to_local,
        timeout_s=timeout,
        step_timeout_s=step_timeout or 2 * timeout,
        traced=_parse_trace(trace),
        log_every=log_every,
        tensorboard=tensorboard,
        wandb=wandb,
        check_ties_every=check_ties_every,
        checkpoint=CheckpointOptions(
            history=checkpoint, every=checkpoint_every, keep=keep, is_async=not checkpoint_sync
        )
        if checkpoint
        else None,
        resume=ResumeOptions(source=resume, weights_only=resume_weights_only, restart_data=restart_data),
        values=values,
        given=frozenset(),
    )


def _parse_shards(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise UsageError("--dp-shard", f"expected auto or a number from 1 up, found {text!r}")


def _parse_trace(text: str | None) -> range:
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError("--trace", f"expected a step, or two with - between them, found {text!r}")
    return range(first, last + 1)
