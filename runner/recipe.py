"""What a training run is asked to do, and what can be refused before torch is imported."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manifests.errors import InputError, UsageError

__all__ = [
    "SYNTHETIC",
    "TENSOR_PARALLEL",
    "TRAINED",
    "BatchOptions",
    "CheckpointOptions",
    "ComputeOptions",
    "DataOptions",
    "Decay",
    "Dtype",
    "OptimOptions",
    "Recompute",
    "ResumeOptions",
    "check_trainable",
    "parse_recompute",
]

# The architectures that have a family, known here so that launch can refuse the others without torch.
TRAINED = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    # On transformers' own model classes:
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
)
# Those of them whose matrices can be cut over tensor-parallel ranks.
TENSOR_PARALLEL = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
Decay = Literal["constant", "linear", "cosine", "sqrt"]
Dtype = Literal["fp32", "bf16"]
Recompute = Literal["none", "full", "selective"] | int  # a number N: every Nth layer
SYNTHETIC = "synthetic"  # as a data source: random tokens
_LEAST_EPS = 1e-30  # of AdamW: far from where float32 takes it for zero


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """How the sequences of one optimizer step are cut. All counts but `seq_len` are in sequences.

    Raises:
        UsageError: a count below 1, or a global batch that the microbatch does not divide.
    """

    global_batch: int
    microbatch: int
    seq_len: int  # in tokens

    def __post_init__(self) -> None:
        for flag, count in (
            ("--global-batch", self.global_batch),
            ("--microbatch", self.microbatch),
            ("--seq-len", self.seq_len),
        ):
            if count < 1:
                raise UsageError(flag, f"expected at least 1, found {count}")
        if self.global_batch % self.microbatch:
            lower = self.global_batch // self.microbatch * self.microbatch
            upper = lower + self.microbatch
            raise UsageError(
                "--global-batch",
                f"expected a multiple of --microbatch {self.microbatch}, found {self.global_batch}",
                f"the next ones are {lower} and {upper}" if lower else f"the next one is {upper}",
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

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0  # gradients are scaled down to this norm; 0 leaves them alone
    warmup_steps: int = 0
    stable_steps: int = 0  # at `lr`, between warm-up and decay
    decay: Decay = "constant"
    decay_steps: int = 0  # the step at which the decay has reached `min_lr`
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--lr", self.lr),
            ("--weight-decay", self.weight_decay),
            ("--max-norm", self.max_norm),
            ("--warmup-steps", self.warmup_steps),
            ("--stable-steps", self.stable_steps),
            ("--min-lr", self.min_lr),
        ):
            if not 0 <= value < math.inf:
                raise UsageError(flag, f"expected a number from 0 up, found {value}")
        if not _LEAST_EPS <= self.eps < math.inf:  # else zero over zero, where a weight has had no gradient yet
            raise UsageError("--eps", f"expected a number from {_LEAST_EPS} up, found {self.eps}")
        if not (0 <= self.betas[0] < 1 and 0 <= self.betas[1] < 1):
            raise UsageError("--betas", f"expected two numbers from 0 up to below 1, found {self.betas}")
        if self.decay == "constant":
            return
        if self.decay_steps <= self.warmup_steps + self.stable_steps:
            stable = f" and --stable-steps {self.stable_steps} together" if self.stable_steps else ""
            raise UsageError(
                "--decay-steps",
                f"expected more than --warmup-steps {self.warmup_steps}{stable}, found {self.decay_steps}",
                "where it is not written, the decay ends at --steps",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOptions:
    """In which dtypes a step is computed, and what of it is computed again, compiled or cut up.

    Raises:
        UsageError: masters that are coarser than what is computed with, or a count below 1.
    """

    dtype: Dtype = "fp32"  # of the weights that stages compute with, and of activations
    master_dtype: Dtype = "fp32"  # of the weights and moments that the optimizer keeps
    reduce_dtype: Dtype = "fp32"  # of gradients on their way between data-parallel ranks
    recompute: Recompute = "none"  # activations of which layers, in the backward
    is_compiled: bool = False  # every layer by itself
    loss_chunk: int | None = None  # tokens whose logits exist at a time; None: a microbatch's

    def __post_init__(self) -> None:
        if self.dtype == "fp32" and self.master_dtype == "bf16":
            raise UsageError("--master-dtype", "bf16 is coarser than --dtype fp32: what is computed could not be kept")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise UsageError("--loss-chunk", f"expected at least 1, found {self.loss_chunk}")

    @property
    def has_masters(self) -> bool:
        """Whether the weights that the optimizer keeps are others than those that stages compute with."""
        return self.dtype != self.master_dtype

    @property
    def param_nbytes(self) -> int:
        """What one parameter takes in training, in bytes: weight, gradient and two moments, and its master."""
        return 4 * _NBYTES[self.master_dtype] + (_NBYTES[self.dtype] if self.has_masters else 0)


_NBYTES: Mapping[Dtype, int] = {"fp32": 4, "bf16": 2}


def parse_recompute(text: str) -> Recompute:
    """Read the value of --ac.

    Raises:
        UsageError: it is no word that is known, and no number from 1 up.
    """
    match text:
        case "none" | "full" | "selective":
            return text
        case _ if text.isascii() and text.isdigit() and int(text):
            return int(text)
    raise UsageError("--ac", f"expected none, full, selective or a number of layers, found {text!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Where the text comes from. A source is a file, a folder or a glob; or the only one is `synthetic`.

    Raises:
        UsageError: no source, `synthetic` beside another or with what needs documents, or weights that do
            not say how often each source is drawn.
    """

    sources: tuple[str, ...]
    text_field: str = "text"  # of a JSON line; column of a Parquet file
    pack: bool = True  # documents end to end; otherwise one document a sequence, cut and padded
    seed: int = 0  # of `synthetic`, of the shuffled orders and of the draws
    shuffle: bool = False  # documents come in a new order in every pass
    weights: tuple[float, ...] = ()  # of the sources, from which documents are then drawn; none: all in a row

    def __post_init__(self) -> None:
        if not self.sources or (SYNTHETIC in self.sources and len(self.sources) > 1):
            raise UsageError("--data", f"expected files, folders or globs, or the one word {SYNTHETIC!r}")
        if SYNTHETIC in self.sources and (self.shuffle or self.weights):
            flag = "--shuffle" if self.shuffle else "--data-weight"
            raise UsageError(flag, f"needs documents, and --data {SYNTHETIC} has none")
        if self.weights and len(self.weights) != len(self.sources):
            problem = f"expected one for each of {len(self.sources)} --data, found {len(self.weights)}"
            raise UsageError("--data-weight", problem)
        for weight in self.weights:
            if not 0 <= weight < math.inf:
                raise UsageError("--data-weight", f"expected a number from 0 up, found {weight}")
        if self.weights and not sys.float_info.min < sum(self.weights) < math.inf:
            raise UsageError("--data-weight", f"expected a sum above 0, found {sum(self.weights)}")

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The sources as they are read: each by itself if they have weights, otherwise all as one."""
        return tuple((source,) for source in self.sources) if self.weights else (self.sources,)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Where a run saves its checkpoints, after how many steps, and how many of them stay; None: all."""

    history: Path
    every: int | None  # besides the one after the last step
    keep: int | None
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    """What a run goes on from: `auto`, `step-N` or a checkpoint's path; None: the manifest that is launched."""

    source: str | None
    weights_only: bool
    restart_data: bool


def check_trainable(architecture: str, where: str = "config.json") -> None:
    """Raise unless the runner has a family for this architecture.

    Raises:
        InputError: naming those it has.
    """
    if architecture not in TRAINED:
        raise InputError(
            f"{where}: architectures",
            f"{architecture!r} can be packed, but the runner has no family for it",
            "known to the runner: " + ", ".join(TRAINED),
        )
