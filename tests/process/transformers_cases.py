"""Training jobs of decoders on transformers' model classes: what ranks run, and what a test compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.batches import Batch
from tests.fast.runner.decoders import SEQ_LEN, VARIANTS, Variant
from tests.fast.runner.tiny import padded_batch

__all__ = [
    "LR",
    "MICROBATCH",
    "NUM_RANKS",
    "SLOW",
    "SPANNING",
    "STEPS",
    "Case",
    "batch_of",
    "evaluated_batch",
    "every_degree",
]

NUM_RANKS, STEPS, MICROBATCH, LR = 2, 3, 2, 1e-3
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
    num_ranks: int = NUM_RANKS
    num_shards: int = 1  # ranks that share every parameter of a stage

    @property
    def name(self) -> str:
        changes = [f"{key}={value}" for key, value in self.changes.items()]
        shards = [f"{self.num_shards} shards"] if self.num_shards > 1 else []
        return " ".join([self.model, self.layout, self.schedule, *shards, *changes])[:100]

    @property
    def is_tied(self) -> bool:
        return bool(self.changes.get("tie_word_embeddings"))

    @property
    def is_bitwise(self) -> bool:
        """Whether gradients are added up in the order of one process."""
        return not self.is_tied and self.num_shards == 1 and self.schedule != "LoopedBFS"  # it goes back in reverse

    def folder(self, place: Path, what: str) -> Path:
        return place / f"{self.number:03d}" / what

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            "--data", "synthetic", "--steps", str(STEPS), "--seq-len", str(SEQ_LEN), "--global-batch", "8",
            "--microbatch", str(MICROBATCH), "--lr", str(LR), "--max-norm", "0", "--schedule", self.schedule,
            "--dp-shard", str(self.num_shards),
        )  # fmt: skip


def batch_of(step: int) -> Batch:
    return padded_batch(step, seq_len=SEQ_LEN, vocab_size=96)


def evaluated_batch() -> Batch:
    return batch_of(1000)


SPANNING = (
    Case(number=0, model="tiny-gpt2", changes=_TIED, is_openai=True),
    Case(number=1, model="tiny-mixtral"),
    Case(number=2, model="tiny-gemma2", changes=_TIED),
    Case(number=3, model="tiny-opt", changes={**_TIED, "word_embed_proj_dim": 16}, layout="cut=project_in"),
    Case(number=4, model="tiny-falcon", layout="pp=2,vpp=2", schedule="Interleaved1F1B"),
    Case(number=5, model="tiny-mixtral", layout="pp=1", num_shards=2),
)
_SCHEDULES = (("pp=2", "1F1B"), ("pp=2,vpp=2", "Interleaved1F1B"), ("pp=2,style=v", "ZBVZeroBubble"))
_OTHERS = (
    ("pp=2,vpp=2", "LoopedBFS"),
    ("pp=2,vpp=2", "InterleavedZeroBubble"),
    ("pp=2,style=v", "DualPipeV"),
    ("pp=2", "GPipe"),
)


def every_degree(variants: Sequence[Variant]) -> tuple[Case, ...]:
    """Give each variant on 1, 2 and 4 ranks, and all variants together every schedule on 2."""
    cuts = [
        (variant, num_ranks, layout, schedule)
        for number, variant in enumerate(variants)
        for num_ranks, layout, schedule in (
            (1, "pp=1", "1F1B"),
            *((2, *cut) for cut in (*_SCHEDULES, _OTHERS[number % 4])),
            (4, "pp=4", ("GPipe", "1F1B")[number % 2]),
        )
    ]
    return tuple(
        Case(number=100 + number, model=name, changes=changes, layout=layout, schedule=schedule, num_ranks=num_ranks)
        for number, ((name, changes), num_ranks, layout, schedule) in enumerate(cuts)
    )


SLOW = every_degree(VARIANTS)
