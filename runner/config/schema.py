"""What a training run is asked to do, and what can be refused before torch is imported."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import click

from manifests.errors import UsageError
from manifests.schema import Decay
from manifests.training_state import LARGEST_RATE
from runner.config.declared import Whole, flag, group

__all__ = [
    "SYNTHETIC",
    "BatchOptions",
    "CheckpointOptions",
    "ComputeOptions",
    "DataOptions",
    "Decay",
    "Dtype",
    "FramingOptions",
    "OptimOptions",
    "Recompute",
    "ResumeOptions",
    "parse_recompute",
]

Dtype = Literal["fp32", "bf16"]
Recompute = Literal["none", "full", "selective"] | int  # a number N: every Nth layer
SYNTHETIC = "synthetic"  # as a data source: random tokens
_LEAST_EPS = 1e-30  # of AdamW: far from where float32 takes it for zero
_NBYTES: Mapping[Dtype, int] = {"fp32": 4, "bf16": 2}
_DTYPES = click.Choice(get_args(Dtype))
_POSITIVE = click.FloatRange(min=0)
_BETA = click.FloatRange(0, 1, max_open=True)


def parse_recompute(text: str) -> Recompute:
    """Read the value of --ac.

    Raises:
        UsageError: the word is unknown, or the number below 1.
    """
    match text:
        case "none" | "full" | "selective":
            return text
        case _ if text.isascii() and text.isdigit() and int(text):
            return int(text)
    raise UsageError(
        "--ac", f"expected none, full, selective or a number of layers, found {text!r}", code="options.invalid-value"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """How the sequences of one optimizer step are cut. All counts but `seq_len` are in sequences.

    Raises:
        UsageError: a count below 1, or a global batch that the microbatch does not divide.
    """

    seq_len: int = flag("--seq-len", type=Whole(min=1), written_default=512, help="Sequence length, in tokens.")
    global_batch: int = flag(
        "--global-batch",
        type=Whole(min=1),
        written_default=8,
        help="Global batch size: sequences in an optimizer step.",
    )
    microbatch: int = flag(
        "--microbatch", type=Whole(min=1), written_default=1,
        help="Microbatch size, in sequences; gradients are accumulated over the microbatches of a step.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, count in (
            ("--global-batch", self.global_batch),
            ("--microbatch", self.microbatch),
            ("--seq-len", self.seq_len),
        ):
            if count < 1:
                raise UsageError(name, f"expected at least 1, found {count}", code="options.invalid-value")
        if self.global_batch % self.microbatch:
            lower = self.global_batch // self.microbatch * self.microbatch
            upper = lower + self.microbatch
            raise UsageError(
                "--global-batch",
                f"expected a multiple of --microbatch {self.microbatch}, found {self.global_batch}",
                f"the next ones are {lower} and {upper}" if lower else f"the next one is {upper}",
                code="options.batch-size",
            )

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """AdamW and its learning rate: a linear warm-up, steps at `lr`, then a decay down to `min_lr`.

    Raises:
        UsageError: a value out of its range, or a decay that ends before it begins.
    """

    lr: float = flag("--lr", type=_POSITIVE, default=1e-4, help="Learning rate of AdamW, after warmup.")
    beta1: float = flag("--beta1", type=_BETA, default=0.9, help="AdamW's beta1.")
    beta2: float = flag("--beta2", type=_BETA, default=0.95, help="AdamW's beta2.")
    eps: float = flag("--eps", type=_POSITIVE, default=1e-8, help="AdamW's epsilon.")
    weight_decay: float = flag("--weight-decay", type=_POSITIVE, default=0.1, help="AdamW's weight decay.")
    max_norm: float = flag(
        "--max-norm", type=_POSITIVE, default=1.0, help="Gradient clipping: the largest gradient norm; 0 turns it off."
    )
    warmup_steps: int = flag("--warmup-steps", type=Whole(min=0), default=0, help="Steps of linear warmup.")
    stable_steps: int = flag(
        "--stable-steps", type=Whole(min=0), default=0, help="Steps at --lr between warmup and decay (WSD)."
    )
    decay: Decay = flag(
        "--decay", type=click.Choice(get_args(Decay)), default="constant", help="Shape of the learning-rate decay."
    )
    decay_steps: int = flag(
        "--decay-steps", type=Whole(min=1), metavar="N", default=0, written_default=None, show_default="--steps",
        help="Step at which the learning rate reaches --min-lr.",
    )  # fmt: skip
    min_lr: float = flag("--min-lr", type=_POSITIVE, default=0.0, help="Learning rate at the end of the decay.")

    def __post_init__(self) -> None:
        for name, value in (
            ("--lr", self.lr),
            ("--weight-decay", self.weight_decay),
            ("--max-norm", self.max_norm),
            ("--warmup-steps", self.warmup_steps),
            ("--stable-steps", self.stable_steps),
            ("--min-lr", self.min_lr),
        ):
            if not 0 <= value < math.inf:
                raise UsageError(name, f"expected a number from 0 up, found {value}", code="options.invalid-value")
        for name, rate in (("--lr", self.lr), ("--min-lr", self.min_lr)):
            if rate > LARGEST_RATE:
                raise UsageError(name, f"expected at most {LARGEST_RATE}, found {rate}", code="options.rate-too-large")
        if not _LEAST_EPS <= self.eps < math.inf:  # else zero over zero, where a weight has had no gradient yet
            raise UsageError(
                "--eps", f"expected a number from {_LEAST_EPS} up, found {self.eps}", code="options.invalid-value"
            )
        for name, beta in (("--beta1", self.beta1), ("--beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise UsageError(
                    name, f"expected a number from 0 up to below 1, found {beta}", code="options.invalid-value"
                )
        if self.decay == "constant":
            return
        if self.decay_steps <= self.warmup_steps + self.stable_steps:
            stable = f" and --stable-steps {self.stable_steps} together" if self.stable_steps else ""
            raise UsageError(
                "--decay-steps",
                f"expected more than --warmup-steps {self.warmup_steps}{stable}, found {self.decay_steps}",
                "where it is not written, the decay ends at --steps",
                code="options.decay-too-short",
            )

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOptions:
    """In which dtypes a step is computed, and what of it is computed again, compiled or cut up.

    Raises:
        UsageError: masters that are coarser than what is computed with, or a count below 1.
    """

    dtype: Dtype = flag(
        "--dtype", type=_DTYPES, default="fp32", help="Dtype of activations and of the weights in forward and backward."
    )
    master_dtype: Dtype = flag(
        "--master-dtype", type=_DTYPES, default="fp32", written_default=None, show_default="--dtype",
        help="Dtype of master weights and optimizer state: fp32 with --dtype bf16 is mixed precision.",
    )  # fmt: skip
    reduce_dtype: Dtype = flag(
        "--reduce-dtype", type=_DTYPES, default="fp32", written_default=None, show_default="--master-dtype",
        help="Dtype in which gradients are reduced over data-parallel ranks.",
    )  # fmt: skip
    recompute: Recompute = flag(
        "--ac", metavar="none|full|selective|N", default="none", read=parse_recompute,
        help="Activation checkpointing: of no layer, of all layers (full), of all but matrix products (selective), "
        "or of every Nth layer.",
    )  # fmt: skip
    loss_chunk: int | None = flag(
        "--loss-chunk", type=Whole(min=1), metavar="N", default=None, show_default="a microbatch's",
        help="Compute logits and loss in chunks of this many tokens.",
    )  # fmt: skip
    is_compiled: bool = flag(
        "--compile", "is_compiled", is_flag=True, default=False, help="Compile each layer with torch.compile."
    )

    def __post_init__(self) -> None:
        if self.dtype == "fp32" and self.master_dtype == "bf16":
            raise UsageError(
                "--master-dtype",
                "bf16 is coarser than --dtype fp32: what is computed could not be kept",
                code="options.master-dtype",
            )
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise UsageError(
                "--loss-chunk", f"expected at least 1, found {self.loss_chunk}", code="options.invalid-value"
            )

    @property
    def has_masters(self) -> bool:
        """Whether the weights that the optimizer keeps are others than those that stages compute with."""
        return self.dtype != self.master_dtype

    @property
    def param_nbytes(self) -> int:
        """What one parameter takes in training, in bytes: weight, gradient and two moments, and its master."""
        return 4 * _NBYTES[self.master_dtype] + (_NBYTES[self.dtype] if self.has_masters else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FramingOptions:
    """Whether bos begins a text and eos ends it; None: as the tokenizer does, and documents end with eos."""

    bos: bool | None = flag(
        "--add-bos-token/--no-add-bos-token", default=None, show_default="as the tokenizer does",
        help="Begin every document with the BOS token.",
    )  # fmt: skip
    eos: bool | None = flag(
        "--add-eos-token/--no-add-eos-token", default=None, show_default="add",
        help="End every document with the EOS token.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Where the text comes from. A source is a file, a folder or a glob; or the only one is `synthetic`.

    Raises:
        UsageError: no source, `synthetic` beside another or with what needs documents, or weights that do
            not say how often each source is drawn.
    """

    sources: tuple[str, ...] = flag(
        "--data", type=click.Path(), multiple=True, required=True, metavar="PATH",
        help="Training data: .txt, .jsonl or .parquet files, folders or globs of them, or the word synthetic. "
        "May be repeated.",
    )  # fmt: skip
    text_field: str = flag(
        "--text-field", default="text", help="Field of a JSON line, or column of a Parquet file, with the text."
    )
    pack: bool = flag(
        "--pack/--no-pack", default=True,
        help="Pack documents end to end into sequences, or truncate and pad one document per sequence.",
    )  # fmt: skip
    framing: FramingOptions = group(FramingOptions, default=FramingOptions())
    skip_bad_documents: bool = flag(
        "--skip-bad-documents", is_flag=True, default=False,
        help="Skip and count documents that are not text (invalid UTF-8 or JSON, no text field), rather than fail.",
    )  # fmt: skip
    shuffle: bool = flag(
        "--shuffle/--no-shuffle", default=False, help="Shuffle the documents, in a new order each epoch."
    )
    weights: tuple[float, ...] = flag(
        "--data-weight", type=float, multiple=True, metavar="W", default=(), show_default="sources in sequence",
        help="Sampling weight of a source, once for each --data in order: documents are drawn in these proportions.",
    )  # fmt: skip
    seed: int = flag(
        "--seed", type=Whole(min=0), default=0, help="Seed of synthetic data, shuffling, sampling and dropout."
    )

    def __post_init__(self) -> None:
        if not self.sources or (SYNTHETIC in self.sources and len(self.sources) > 1):
            raise UsageError(
                "--data",
                f"expected files, folders or globs, or the one word {SYNTHETIC!r}",
                code="options.invalid-value",
            )
        if SYNTHETIC in self.sources and (self.shuffle or self.weights):
            name = "--shuffle" if self.shuffle else "--data-weight"
            raise UsageError(name, f"needs documents, and --data {SYNTHETIC} has none", code="options.needs-documents")
        if self.weights and len(self.weights) != len(self.sources):
            problem = f"expected one for each of {len(self.sources)} --data, found {len(self.weights)}"
            raise UsageError("--data-weight", problem, code="options.data-weights")
        for weight in self.weights:
            if not 0 <= weight < math.inf:
                raise UsageError(
                    "--data-weight", f"expected a number from 0 up, found {weight}", code="options.data-weights"
                )
        if self.weights and not sys.float_info.min < sum(self.weights) < math.inf:
            raise UsageError(
                "--data-weight", f"expected a sum above 0, found {sum(self.weights)}", code="options.data-weights"
            )

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The sources as they are read: each by itself if they have weights, otherwise all as one."""
        return tuple((source,) for source in self.sources) if self.weights else (self.sources,)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Where a run saves its checkpoints, after how many steps, and how many of them stay; None: all."""

    history: Path = flag(
        "--checkpoint", type=click.Path(path_type=Path), metavar="DIR",
        help="Save checkpoints in this folder: after the last step, and see --checkpoint-every.",
    )  # fmt: skip
    every: int | None = flag(
        "--checkpoint-every", type=Whole(min=1), metavar="N", help="Save a checkpoint every N steps, too."
    )
    keep: int | None = flag(
        "--keep", type=Whole(min=1), metavar="K", show_default="all", help="Number of checkpoints to keep."
    )
    is_async: bool = flag(
        "--checkpoint-sync", is_flag=True, read=operator.not_, help="Pause training until a checkpoint is on disk."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    """What a run resumes from: `auto`, `step-N` or a checkpoint's path; None: the manifest that is launched."""

    source: str | None = flag(
        "--resume", type=click.Path(), metavar="auto|DIR|step-N",
        help="Resume from the newest readable checkpoint (auto; from MANIFEST if there is none), or from this one.",
    )  # fmt: skip
    weights_only: bool = flag(
        "--resume-weights-only", is_flag=True, help="Load only the weights of the checkpoint, and start at step 0."
    )
    restart_data: bool = flag(
        "--restart-data", is_flag=True, help="Resume with other data than the checkpoint's, from its first sequence."
    )
