"""Combinations of features that runs are compared in: a covering array of what is not refused before ranks start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

from manifests.errors import UserError
from manifests.models.combinations import REFUSED, Combination
from manifests.models.trainable import (
    hands_on_trees,
    is_generic,
    why_not_expert_parallel,
    why_not_tensor_parallel,
)
from manifests.placement import Placement
from runner.config.parallel_dims import DegreeOptions
from runner.config.schema import BatchOptions
from runner.pipeline.timetable import find_timetable
from runner.preflight.combinations import part_of

VOCAB_SIZE, SEQ_LEN, MOST_RANKS = 96, 16, 8
GLOBAL_BATCHES = (8, 16)
BF16_BATCH = 64  # of few tokens, one that is near a tie and goes to another expert is most of the rounding
NUM_CASES = 300
# By name: an architecture of the catalogue, and what is changed of its tiny config.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 4}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "glm4-moe": ("Glm4MoeForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", {}),
    "dots1": ("Dots1ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 6}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen3-next": ("Qwen3NextForCausalLM", {}),
    # Routers send all tokens to the first expert: most ranks get none.
    "one-expert": ("GptOssForCausalLM", {"num_experts_per_tok": 1}),
}  # fmt: skip
SKEWED = "one-expert"
# What ranks refuse before the first step, by what they build: tokens that meet in linear attention, and capped logits.
_BY_RANKS: Mapping[tuple[str, str], str] = {
    ("qwen3-next", "context"): "model.no-context-parallelism",
    ("qwen3-next", "documents"): "model.no-document-mask",
    ("gemma2", "loss_chunk"): "options.loss-chunk",
}
_STYLES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2,
           "ZBVZeroBubble": -2, "DualPipeV": -2}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run, or one of the second step alone, from what another run saved after its first."""

    model: str = "llama"
    pipeline: int = 1
    schedule: str = "1F1B"
    replicate: int = 1
    shard: int = 1
    context: str = ""  # how two ranks with parts of rows exchange them, or as many as it ends with; else there is one
    tensor: int = 1
    expert: int = 1
    recompute: str = "none"
    loss_chunk: int = 0
    dtype: str = "fp32"
    documents: bool = False
    tied: bool = False
    rows: str = "uneven"
    microbatch: int = 1
    load: str = "rows"
    origin: Case | None = None

    @property
    def name(self) -> str:
        values = (getattr(self, field.name) for field in fields(self) if field.name != "origin")
        return "_".join(map(str, values)) + (f"_from_{self.origin.name}" if self.origin else "")

    @property
    def num_virtual(self) -> int:
        return abs(_STYLES[self.schedule])

    @property
    def layout(self) -> str:
        style = ",style=v" if _STYLES[self.schedule] < 0 else ""
        return f"pp={self.pipeline}" + (f",vpp={self.num_virtual}{style}" if self.num_virtual > 1 else "")

    @property
    def folder(self) -> str:
        """The name of its model's folder."""
        return f"{self.model}-{'tied' if self.tied else 'untied'}"

    @property
    def packed(self) -> str:
        return f"{self.folder}-{self.layout}"

    @property
    def num_context(self) -> int:
        return int(self.context.partition("-")[2] or 2) if self.context else 1

    @property
    def num_data(self) -> int:
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        return self.pipeline * self.num_data * self.num_context * self.tensor

    @property
    def global_batch(self) -> int:
        """The smaller batch if it fills the pipeline: it takes half the time."""
        least, most = GLOBAL_BATCHES
        is_full = least // (self.microbatch * self.num_data) >= 2 * self.pipeline
        return BF16_BATCH if self.dtype == "bf16" else least if is_full else most

    @property
    def args(self) -> list[str]:
        flags: dict[str, Any] = {
            "--schedule": self.schedule, "--dp-replicate": self.replicate, "--dp-shard": self.shard,
            "--cp": self.num_context,
            "--cp-method": self.context.partition("-")[0] or "gather",
            "--tp": self.tensor, "--ep": self.expert, "--ac": self.recompute, "--microbatch": self.microbatch,
            "--seq-len": SEQ_LEN, "--global-batch": self.global_batch, "--loading": self.load,
        }  # fmt: skip
        if self.loss_chunk:
            flags["--loss-chunk"] = self.loss_chunk
        if self.dtype != "fp32":
            flags |= {"--dtype": self.dtype, "--master-dtype": "fp32"}
        documents = ("--document-mask", "--data", "none.txt") if self.documents else ()
        return ["--no-self-check", *documents, *(str(part) for flag in flags.items() for part in flag)]


AXES: Mapping[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "pipeline": (1, 2, 4),
    "schedule": tuple(_STYLES),
    "replicate": (1, 2),
    "shard": (1, 2),
    "context": ("", "gather", "ulysses"),
    "tensor": (1, 2),
    "expert": (1, 2),
    "recompute": ("none", "full", "selective"),
    "loss_chunk": (0, 5),
    "dtype": ("fp32", "bf16"),
    "documents": (False, True),
    "tied": (False, True),
    "rows": ("uneven", "empty"),
    "microbatch": (1, 2),
}
# Degrees that the axes do not have, and tensors that one rank reads for others.
MORE = (
    Case(model="one-expert", shard=4, expert=4),
    Case(model="mixtral", shard=2, tensor=2, expert=4),
    Case(model="mixtral", tensor=4, expert=2),
    Case(model="llama", context="gather-4"),  # more ranks than heads of keys
    Case(model="gpt-oss", context="ulysses-4", documents=True),
    Case(model="qwen3-moe", context="ulysses-4", expert=4),
    Case(model="glm4-moe", pipeline=3, documents=True, microbatch=2),
    Case(model="deepseek-v3", shard=4, expert=2, load="broadcast"),
)
_SMALL = tuple(axis for axis in AXES if axis not in ("model", "dtype"))
_MOST_DRAWN, _NUM_CANDIDATES = 400, 20
Value = tuple[str, Any]  # of an axis


@cache
def _facts(model: str) -> Mapping[str, Any]:
    architecture = MODELS[model][0]
    return {
        "architecture": architecture,
        "whole_because": why_not_tensor_parallel(architecture),
        "experts_because": why_not_expert_parallel(architecture),
        "is_generic": is_generic(architecture),
        "is_unverified": hands_on_trees(architecture),
    }


def why_refused(case: Case) -> str:
    """Return the code with which a case is refused before its first step; none if it is not."""
    try:
        degrees = DegreeOptions(
            replicate=case.replicate, shard=case.shard, context=case.num_context, tensor=case.tensor, expert=case.expert
        ).resolve(case.pipeline, case.world_size)
        style = "v" if _STYLES[case.schedule] < 0 else "loop"
        placement = Placement(num_stages=case.pipeline * case.num_virtual, num_ranks=case.pipeline, style=style)
        batch = BatchOptions(global_batch=case.global_batch, microbatch=case.microbatch, seq_len=SEQ_LEN)
        timetable = find_timetable(case.schedule, placement, part_of(batch, degrees).num_microbatches)
    except UserError as error:
        return error.code
    combination = Combination(
        schedule=timetable.name,
        splits_backward=timetable.splits_backward,
        num_tensor=case.tensor,
        num_expert=case.expert,
        num_context=case.num_context,
        num_shards=case.shard,
        has_loss_chunks=case.loss_chunk > 0,
        keeps_documents=case.documents,
        **_facts(case.model),
    )
    codes = [rule.code for rule in REFUSED if rule.applies(combination)]
    codes += [code for (model, axis), code in _BY_RANKS.items() if model == case.model and getattr(case, axis)]
    return next(iter(codes), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Cases, and the combinations of values that none of them has, as each that does is refused."""

    cases: tuple[Case, ...]
    refused: Mapping[frozenset[Value], frozenset[str]]  # the codes


@cache
def matrix(strength: int = 3) -> Matrix:
    """Cover all pairs of values, of float32 alone or with bf16; with strength 3, triples of all but models, too."""
    goals = list(_tuples(AXES, 2))
    if strength > 2:
        goals += _tuples({axis: AXES[axis] for axis in _SMALL}, strength)
    drawn, cases, refused = Random(0), list[Case](), dict[frozenset[Value], frozenset[str]]()
    missing = set(goals)
    for goal in goals:
        if goal not in missing:
            continue
        candidates, codes = _candidates(goal, drawn, most_ranks=MOST_RANKS)
        if not candidates:
            refused[goal] = codes
            missing.discard(goal)
            continue
        # Each rank takes time.
        cases.append(max(candidates, key=lambda case: len(covered_by(case) & missing) / (2 + case.world_size)))
        missing -= covered_by(cases[-1])
    return Matrix(cases=tuple(cases), refused=refused)


@cache
def every_case() -> tuple[Case, ...]:
    """Return the matrix, MORE, and cases with triples of values, those of models as well, that no other has."""
    drawn, cases = Random(1), [*matrix().cases, *MORE]
    covered = set().union(*map(_triples_of, cases))
    while len(cases) < NUM_CASES:
        candidates, _ = _candidates(frozenset({("dtype", "fp32")}), drawn, most_ranks=MOST_RANKS)
        cases.append(max(candidates, key=lambda case: len(_triples_of(case) - covered) / (2 + case.world_size)))
        covered |= _triples_of(cases[-1])
    return tuple(cases)


@cache
def ten() -> tuple[Case, ...]:
    """Choose ten cases of four ranks that cover most pairs."""
    drawn, cases, covered = Random(1), list[Case](), set[frozenset[Value]]()
    for _ in range(10):
        candidates, _ = _candidates(frozenset({("dtype", "fp32")}), drawn, most_ranks=4)
        candidates = [case for case in candidates if case.world_size == 4]
        cases.append(max(candidates, key=lambda case: len(covered_by(case) - covered)))
        covered |= covered_by(cases[-1])
    return tuple(cases)


def covered_by(case: Case) -> set[frozenset[Value]]:
    """Return the pairs and triples that a case covers; what is computed in bf16 is not compared exactly."""
    values = [(axis, getattr(case, axis)) for axis in AXES]
    if case.dtype != "fp32":
        return {frozenset((value, ("dtype", case.dtype))) for value in values if value[0] != "dtype"}
    small = [value for value in values if value[0] in _SMALL]
    return {frozenset(goal) for goal in (*combinations(values, 2), *combinations(small, 3))}


def _triples_of(case: Case) -> set[frozenset[Value]]:
    return {frozenset(triple) for triple in combinations(((axis, getattr(case, axis)) for axis in AXES), 3)}


def _tuples(axes: Mapping[str, tuple[Any, ...]], strength: int) -> Iterator[frozenset[Value]]:
    for chosen in combinations(axes, strength):
        yield from (frozenset(zip(chosen, values, strict=True)) for values in product(*(axes[axis] for axis in chosen)))


def _candidates(goal: frozenset[Value], drawn: Random, *, most_ranks: int) -> tuple[list[Case], frozenset[str]]:
    """Draw cases with these values that are not refused; if there are none, return the codes of those that are."""
    candidates, codes = list[Case](), set[str]()
    exact = {"dtype": ("fp32",)}
    for _ in range(_MOST_DRAWN):
        case = Case(**{axis: drawn.choice(values) for axis, values in (AXES | exact).items()} | dict(goal))
        if case.world_size > most_ranks:
            continue
        if code := why_refused(case):
            codes.add(code)
        else:
            candidates.append(case)
        if len(candidates) == _NUM_CANDIDATES:
            break
    return candidates, frozenset(codes)
