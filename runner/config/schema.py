"""What a training run is asked to do, and what can be refused before torch is imported."""

from __future__ import annotations

import math
import operator
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import click

from manifests.command import defaults
from manifests.errors import UsageError
from manifests.models.training import Recompute, parse_recompute
from manifests.optimizer_groups import LEAST_EPS
from manifests.schema import Decay, LearningRate, OptimizerState
from manifests.training_state import LARGEST_RATE
from runner.config.declared import DtypeName, LocalPath, Number, WholeNumber, flag, group, nearest_multiples
from stores.address import is_url

Dtype = Literal["fp32", "bf16"]
SYNTHETIC = "synthetic"  # as a data source: random tokens
DATASETS = "runner.data"  # the entry points of datasets
_DTYPES = DtypeName(get_args(Dtype))
_POSITIVE = Number(min=0)
_BETA = Number(0, 1, max_open=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """Batch sizes, in sequences, and the sequence length, in tokens."""

    seq_len: int = flag(
        "--seq-len", type=WholeNumber(min=1), written_default=defaults.SEQ_LEN, help="Sequence length, in tokens."
    )
    global_batch: int = flag(
        "--global-batch",
        type=WholeNumber(min=1),
        written_default=defaults.GLOBAL_BATCH,
        help="Global batch size: sequences in an optimizer step.",
    )
    microbatch: int = flag(
        "--microbatch", type=WholeNumber(min=1), written_default=defaults.MICROBATCH,
        help="Microbatch size, in sequences; gradients are accumulated over the microbatches of a step.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.global_batch % self.microbatch:
            raise UsageError(
                "--global-batch",
                f"expected a multiple of --microbatch {self.microbatch}, found {self.global_batch}",
                f"use {nearest_multiples(self.global_batch, self.microbatch)}",
                code="options.batch-size",
            )

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """AdamW, gradient clipping, and the learning-rate schedule: linear warmup, stable at `lr`, decay to `min_lr`."""

    lr: float = flag("--lr", type=_POSITIVE, default=1e-4, help="Learning rate, after warmup.")
    beta1: float = flag("--beta1", type=_BETA, default=0.9, help="beta1 of adamw and adam.")
    beta2: float = flag("--beta2", type=_BETA, default=0.95, help="beta2 of adamw and adam.")
    eps: float = flag("--eps", type=_POSITIVE, default=1e-8, help="Epsilon of adamw and adam.")
    weight_decay: float = flag("--weight-decay", type=_POSITIVE, default=0.1, help="Weight decay.")
    weight_decay_1d: bool = flag(
        "--weight-decay-1d/--no-weight-decay-1d", default=True, help="Decay 1-D parameters (norms, biases) too."
    )
    max_norm: float = flag(
        "--max-norm", type=_POSITIVE, default=1.0, help="Gradient clipping: the largest gradient norm; 0 turns it off."
    )
    warmup_steps: int = flag("--warmup-steps", type=WholeNumber(min=0), default=0, help="Steps of linear warmup.")
    stable_steps: int = flag(
        "--stable-steps", type=WholeNumber(min=0), default=0, help="Steps at --lr between warmup and decay (WSD)."
    )
    decay: Decay = flag(
        "--decay", type=click.Choice(get_args(Decay)), default="constant", help="Shape of the learning-rate decay."
    )
    decay_steps: int = flag(
        "--decay-steps", type=WholeNumber(min=1), metavar="N", default=0, written_default=None, show_default="--steps",
        help="Step at which the learning rate reaches --min-lr.",
    )  # fmt: skip
    min_lr: float = flag("--min-lr", type=_POSITIVE, default=0.0, help="Learning rate at the end of the decay.")
    optimizer: str | None = flag(
        "--optimizer", metavar="NAME|FILE.toml|CLASS", default=None, show_default="the checkpoint's, or adamw",
        help="adamw, adam, sgd, adafactor; muon: Muon for matrices of layers and AdamW for the rest; a TOML file of "
        "parameter groups; or a torch.optim.Optimizer of an installed package by its dotted name.",
    )  # fmt: skip
    momentum: float | None = flag(
        "--momentum",
        type=_BETA,
        default=None,
        show_default="0.95 of muon, 0.9 of sgd",
        help="Momentum of muon and sgd.",
    )
    ema: float = flag(
        "--ema", type=_BETA, default=0.0, metavar="DECAY", show_default="none",
        help="Also keep an exponential moving average of the weights with this decay, such as 0.999.",
    )  # fmt: skip
    plan: OptimizerState | None = None  # the groups that these options lead to, for a model; None: plain AdamW

    def __post_init__(self) -> None:
        for name, rate in (("--lr", self.lr), ("--min-lr", self.min_lr)):
            if rate > LARGEST_RATE:
                raise UsageError(name, f"expected at most {LARGEST_RATE}, found {rate}", code="options.rate-too-large")
        for name, value, least in (("--max-norm", self.max_norm, 0), ("--eps", self.eps, LEAST_EPS)):
            if not least <= value < math.inf:  # the self-check takes both from gradients, which may be NaN
                raise UsageError(name, f"expected a number >= {least}, found {value}", code="options.invalid-value")
        if self.decay == "constant":
            return
        if self.decay_steps <= self.warmup_steps + self.stable_steps:
            stable = f" and --stable-steps {self.stable_steps} together" if self.stable_steps else ""
            raise UsageError(
                "--decay-steps",
                f"expected more than --warmup-steps {self.warmup_steps}{stable}, found {self.decay_steps}",
                "by default, the decay ends at --steps",
                code="options.decay-too-short",
            )

    @property
    def schedule(self) -> LearningRate:
        return LearningRate(
            peak=self.lr,
            warmup_steps=self.warmup_steps,
            stable_steps=self.stable_steps,
            decay=self.decay,
            decay_steps=self.decay_steps,
            minimum=self.min_lr,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOptions:
    """Dtypes, activation checkpointing, chunked loss, compilation, and whose modules are used."""

    dtype: Dtype = flag(
        "--dtype",
        type=_DTYPES,
        default=defaults.DTYPE,
        help="Dtype of activations and of the weights in forward and backward.",
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
        "--ac", metavar="none|full|selective|N", default=defaults.RECOMPUTE, read=parse_recompute,
        help="Activation checkpointing: none, every layer (full), all but matrix products and attention "
        "(selective), or every Nth layer.",
    )  # fmt: skip
    loss_chunk: int | None = flag(
        "--loss-chunk", type=WholeNumber(min=1), metavar="N", default=None, show_default="a whole microbatch",
        help="Compute logits and loss in chunks of this many tokens.",
    )  # fmt: skip
    is_compiled: bool = flag(
        "--compile", "is_compiled", is_flag=True, default=False, help="Compile each layer with torch.compile."
    )

    def __post_init__(self) -> None:
        if self.dtype == "fp32" and self.master_dtype == "bf16":
            raise UsageError(
                "--master-dtype",
                "bf16 has less precision than --dtype fp32: updates would be lost",
                code="options.master-dtype",
            )

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer has master weights besides the weights that stages compute with."""
        return self.dtype != self.master_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class FramingOptions:
    """Whether BOS and EOS are added to a text; None: as the tokenizer does, but every document ends with EOS."""

    bos: bool | None = flag(
        "--add-bos-token/--no-add-bos-token", default=None, show_default="as the tokenizer does",
        help="Begin every document with the BOS token.",
    )  # fmt: skip
    eos: bool | None = flag(
        "--add-eos-token/--no-add-eos-token", default=None, show_default="add",
        help="End every document with the EOS token.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How texts, or rows of token ids, are read and become sequences: for training and evaluation alike."""

    text_field: str = flag("--text-field", default="text", help="JSON field or Parquet column of the text.")
    completion_field: str | None = flag(
        "--completion-field", default=None, metavar="NAME", show_default="the whole text counts",
        help="Field or column of a completion, whose tokens alone count in the loss; --text-field is its prompt.",
    )  # fmt: skip
    is_tokenized: bool = flag(
        "--tokenized", "is_tokenized", is_flag=True, default=False,
        help="The data is rows of token ids, one per sequence: input_ids, and labels or a loss_mask; position_ids or "
        "document_ids with --document-mask.",
    )  # fmt: skip
    pack: bool = flag(
        "--packing/--no-packing", "pack", default=True,
        help="Pack documents end to end into sequences, or truncate and pad one document per sequence.",
    )  # fmt: skip
    document_mask: bool = flag(
        "--document-mask/--no-document-mask", default=False,
        help="Keep packed documents apart: tokens attend within their document, whose positions begin at 0.",
    )  # fmt: skip
    framing: FramingOptions = group(FramingOptions, default=FramingOptions())
    skip_bad_documents: bool = flag(
        "--skip-bad-documents", is_flag=True, default=False,
        help="Skip and count documents that are not text (invalid UTF-8 or JSON, no text field) instead of failing.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions(TextOptions):
    """The training data. A source is a file, a folder or a glob; `synthetic` can only be used alone."""

    sources: tuple[str, ...] = flag(
        "--data", type=click.Path(), multiple=True, required=True, metavar="PATH",
        help="Training data: .txt, .jsonl or .parquet files, folders or globs of them; or synthetic. May be repeated.",
    )  # fmt: skip
    dataset: str | None = flag(
        "--data-class", "dataset", default=None, metavar="NAME",
        help=f"Dataset of an installed package (entry points of {DATASETS}), which gets the values of --data.",
    )  # fmt: skip
    shuffle: bool = flag(
        "--shuffle/--no-shuffle", default=False, help="Shuffle the documents, in a new order every epoch."
    )
    weights: tuple[float, ...] = flag(
        "--data-weight", type=float, multiple=True, metavar="W", default=(), show_default="one source after the other",
        help="Sampling weight of a source, one for each --data in order: documents are drawn in these proportions.",
    )  # fmt: skip
    seed: int = flag(
        "--seed", type=WholeNumber(min=0), default=0, help="Seed of synthetic data, shuffling, sampling and dropout."
    )

    def __post_init__(self) -> None:
        if not self.sources or (SYNTHETIC in self.sources and len(self.sources) > 1):
            raise UsageError(
                "--data",
                f"expected files, folders or globs, or only {SYNTHETIC!r}",
                code="options.invalid-value",
            )
        for name, is_set in (
            ("--shuffle", self.shuffle),
            ("--data-weight", bool(self.weights)),
            ("--document-mask", self.document_mask),
            ("--completion-field", self.completion_field is not None),
            ("--tokenized", self.is_tokenized),
        ):
            if SYNTHETIC in self.sources and is_set:
                problem = f"not supported with --data {SYNTHETIC}, which has no documents"
                raise UsageError(name, problem, code="options.needs-documents")
        for name, is_set in (
            ("--shuffle", self.shuffle),
            ("--data-weight", bool(self.weights)),
            ("--skip-bad-documents", self.skip_bad_documents),
        ):
            if self.dataset is not None and is_set:
                problem = "conflicts with --data-class, which yields rows of token ids in an order of its own"
                raise UsageError(name, problem, "remove one of them", code="options.tokenized")
        for name, is_set in (
            ("--completion-field", self.completion_field is not None),
            ("--add-bos-token", bool(self.framing.bos)),
            ("--add-eos-token", bool(self.framing.eos)),
        ):
            if self.has_rows and is_set:
                reader = "--tokenized" if self.is_tokenized else "--data-class"
                problem = f"conflicts with {reader}, whose rows of token ids are taken as they are"
                raise UsageError(name, problem, "remove one of them", code="options.tokenized")
        if self.document_mask and not (self.pack or self.has_rows):
            raise UsageError(
                "--document-mask",
                "conflicts with --no-packing, which has one document in each sequence",
                "remove one of them",
                code="options.document-mask",
            )
        if self.weights and len(self.weights) != len(self.sources):
            problem = f"expected one for each of the {len(self.sources)} --data, found {len(self.weights)}"
            raise UsageError("--data-weight", problem, code="options.data-weights")
        for weight in self.weights:
            if not 0 <= weight < math.inf:
                raise UsageError(
                    "--data-weight", f"expected a number >= 0, found {weight}", code="options.data-weights"
                )
        if self.weights and not sys.float_info.min < sum(self.weights) < math.inf:
            raise UsageError(
                "--data-weight", f"expected a finite sum > 0, found {sum(self.weights)}", code="options.data-weights"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """The sources that are files, folders and globs of files."""
        return () if self.dataset is not None or self.sources == (SYNTHETIC,) else self.sources

    @property
    def has_rows(self) -> bool:
        """Whether its sequences are rows of token ids, which no tokenizer makes."""
        return self.is_tokenized or self.dataset is not None

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The sources to draw from: each by itself if they have weights, otherwise all as one."""
        return tuple((source,) for source in self.sources) if self.weights else (self.sources,)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Where and how often checkpoints are saved, and how many are kept; None: all."""

    history: Path = flag(
        "--checkpoint", type=LocalPath(), metavar="DIR",
        help="Save checkpoints to this folder: after the last step, and every --checkpoint-every steps.",
    )  # fmt: skip
    every: int | None = flag(
        "--checkpoint-every", type=WholeNumber(min=1), metavar="N", help="Also save a checkpoint every N steps."
    )
    keep: int | None = flag(
        "--keep", type=WholeNumber(min=1), metavar="K", show_default="all", help="Number of checkpoints to keep."
    )
    is_async: bool = flag(
        "--checkpoint-sync",
        is_flag=True,
        read=operator.not_,
        help="Save synchronously: pause training until the checkpoint is on disk.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """Where, how often and in which dtype weights are published; `every` None: after the last step alone."""

    chain: str = flag(
        "--publish", type=click.Path(), metavar="DIR|URL",
        help="Publish the weights as versions of this chain, a folder or s3://BUCKET/PREFIX (gs://, az://), for "
        "inference engines: after the last step, and every --publish-every steps; reshard delta reads it.",
    )  # fmt: skip
    every: int | None = flag(
        "--publish-every", type=WholeNumber(min=1), metavar="N", help="Also publish the weights every N steps."
    )
    dtype: Dtype = flag(
        "--publish-dtype", type=DtypeName(["fp32", "bf16"]), written_default="bf16", help="Dtype of published weights."
    )

    @property
    def folder(self) -> Path | None:
        """The folder of the chain; None: it is in a bucket."""
        return None if is_url(self.chain) else Path(self.chain)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    """What to resume from: `auto`, `step-N` or the path of a checkpoint; None: start from the manifest's weights."""

    source: str | None = flag(
        "--resume", type=click.Path(), metavar="auto|DIR|step-N",
        help="Resume from the newest readable checkpoint (auto; without one, start from MANIFEST) or from this one.",
    )  # fmt: skip
    weights_only: bool = flag(
        "--resume-weights-only", is_flag=True, help="Load only the checkpoint's weights, and start at step 0."
    )
    restart_data: bool = flag(
        "--restart-data", is_flag=True, help="Resume with data other than the checkpoint's, from its first sequence."
    )

    def __post_init__(self) -> None:
        if self.source is not None and is_url(self.source):
            hint = f"copy it to a folder: reshard pack {shlex.quote(self.source)} --out DIR; then --resume DIR"
            raise UsageError(f"--resume {self.source}", "is not on this machine", hint, code="options.remote-manifest")
