"""Training jobs of small models of every family: what ranks run, and what a test compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.data.sequences import Batch
from tests.fast.runner.models.decoders import SEQ_LEN, VARIANTS
from tests.fast.runner.models.titans import TITANS
from tests.fast.runner.tiny import padded_batch

STEPS, MICROBATCH, LR = 3, 1, 1e-3
_TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, how it is cut and how it is scheduled."""

    number: int
    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "pp=2"
    schedule: str = "1F1B"
    is_openai: bool = False  # named as OpenAI's own files are
    num_ranks: int = 2
    num_shards: int = 1  # ranks that share every parameter of a stage
    loss_chunk: int = 0  # 0: whole logits
    is_compiled: bool = False  # with --ac selective

    @property
    def name(self) -> str:
        changes = [f"{key}={value}" for key, value in self.changes.items()]
        shards = [f"{self.num_shards} shards"] if self.num_shards > 1 else []
        chunks = ["loss-chunk"] if self.loss_chunk else []
        compiled = ["compiled"] if self.is_compiled else []
        return " ".join([self.model, self.layout, self.schedule, *shards, *chunks, *compiled, *changes])[:100]

    @property
    def experts(self) -> str | None:
        """How transformers is to compute experts: by its own choice, but for widths that grouped products have not."""
        return "eager" if self.changes.get("moe_intermediate_size", 0) % 4 else None

    @property
    def is_tied(self) -> bool:
        return bool(self.changes.get("tie_word_embeddings"))

    @property
    def is_bitwise(self) -> bool:
        """Whether transformers does the same arithmetic in the same order.

        The gradients of a tied weight's copies are added up apart, those of shards and chunks in parts, and those of
        LoopedBFS in reverse.
        """
        is_apart = self.is_tied or self.num_shards > 1 or self.loss_chunk or self.schedule == "LoopedBFS"
        return not is_apart and not self.is_compiled

    @property
    def tolerance(self) -> float:
        """How far gradients may be from those of transformers, relative to their size."""
        return 0.0 if self.is_bitwise else 1e-5 if self.is_compiled else 1e-6

    @property
    def flags(self) -> tuple[str, ...]:
        chunks = ("--loss-chunk", str(self.loss_chunk)) if self.loss_chunk else ()
        compiled = ("--compile", "--ac", "selective") if self.is_compiled else ()
        return (
            "--data", "synthetic", "--steps", str(STEPS), "--seq-len", str(SEQ_LEN), "--global-batch", "8",
            "--microbatch", str(MICROBATCH), "--lr", str(LR), "--max-norm", "0", "--schedule", self.schedule,
            "--dp-shard", str(self.num_shards), *chunks, *compiled,
        )  # fmt: skip

    def folder(self, place: Path, what: str) -> Path:
        return place / f"{self.number:03d}" / what


def batch_of(step: int) -> Batch:
    return padded_batch(step, seq_len=SEQ_LEN, vocab_size=96)


def evaluated_batch() -> Batch:
    return batch_of(1000)


_SHARED: tuple[Mapping[str, Any], ...] = (
    {"model": "tiny-llama"},
    {"model": "tiny-mistral", "changes": {"sliding_window": 16}, "layout": "pp=2,vpp=2",
     "schedule": "InterleavedZeroBubble"},
    {"model": "tiny-qwen3", "changes": _TIED, "schedule": "GPipe"},
    {"model": "tiny-qwen3-moe", "layout": "pp=1", "num_shards": 2},
    {"model": "tiny-deepseek-v3", "layout": "pp=2,style=v", "schedule": "ZBVZeroBubble"},
    {"model": "tiny-gpt-oss", "layout": "pp=2,vpp=2", "schedule": "Interleaved1F1B"},
)  # fmt: skip
_TITANS = tuple(Case(number=12 + n, **case) for n, case in enumerate(_SHARED))
NORMAL = (
    Case(number=0, model="tiny-gpt2", changes=_TIED, is_openai=True),
    Case(
        number=3,
        model="tiny-opt",
        changes={**_TIED, "word_embed_proj_dim": 16},
        layout="balance:params,pp=2,pin=embed_tokens@0,pin=project_in@1",
    ),
    *_TITANS[3:5],
)
# A variant has one of these: `test_parity` pairs each model with every schedule and number of ranks.
_WAYS = (
    ("pp=2", "1F1B"),
    ("pp=2,vpp=2", "Interleaved1F1B"),
    ("pp=4", "GPipe"),
    ("pp=2,vpp=2,style=v", "ZBVZeroBubble"),
    ("pp=2,vpp=2", "LoopedBFS"),
    ("pp=4", "1F1B"),
    ("pp=2,vpp=2", "InterleavedZeroBubble"),
    ("pp=2,vpp=2,style=v", "DualPipeV"),
    ("pp=2", "GPipe"),
)


def _case(number: int, model: str, changes: Mapping[str, Any]) -> Case:
    layout, schedule = _WAYS[number % len(_WAYS)]
    num_ranks = 4 if layout == "pp=4" else 2
    return Case(
        number=100 + number, model=model, changes=changes, layout=layout, schedule=schedule, num_ranks=num_ranks
    )


SLOW = (
    Case(number=1, model="tiny-mixtral"),
    Case(number=9, model="tiny-llama", layout="pp=2,style=v", schedule="ZBVZeroBubble"),
    Case(number=4, model="tiny-falcon", layout="pp=2,vpp=2", schedule="Interleaved1F1B"),
    Case(number=10, model="tiny-gpt-oss"),
    Case(number=11, model="tiny-opt", changes={"word_embed_proj_dim": 16}, loss_chunk=20),
    Case(number=2, model="tiny-gemma2", changes=_TIED),
    Case(number=5, model="tiny-mixtral", layout="pp=1", num_shards=2),
    Case(number=6, model="tiny-mistral", changes={"sliding_window": 16}),
    Case(number=7, model="tiny-qwen3", changes=_TIED),
    Case(number=8, model="tiny-qwen3-moe", layout="pp=2,vpp=2", schedule="Interleaved1F1B"),
    *(case for case in _TITANS if case not in NORMAL),
    *(_case(number, *variant) for number, variant in enumerate((*TITANS, *VARIANTS))),
)
# Models with experts, whose graphs break where tokens go to them: transformers' routers change what `topk` returned.
COMPILED = (
    Case(number=201, model="tiny-mixtral", is_compiled=True),
    Case(number=202, model="tiny-qwen3-moe", is_compiled=True),
    Case(number=203, model="tiny-deepseek-v3", is_compiled=True),
    Case(number=204, model="tiny-gpt-oss", is_compiled=True),
)
