"""Models with experts, and the ranks that share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE

_SIZES = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 4}
# By name: an architecture of the catalogue, and what is changed of its tiny config.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeForCausalLM", _SIZES),
    "mixtral": ("MixtralForCausalLM", {**_SIZES, "num_key_value_heads": 4}),
    "gpt-oss": ("GptOssForCausalLM", _SIZES),
    "deepseek-v3": ("DeepseekV3ForCausalLM", _SIZES),
    "glm4-moe": ("Glm4MoeForCausalLM", _SIZES),
    "qwen3-next": ("Qwen3NextForCausalLM", _SIZES),
    # Routers send all tokens to the first expert: most ranks get none.
    "one-expert": ("GptOssForCausalLM", {**_SIZES, "num_experts_per_tok": 1}),
}
SKEWED = "one-expert"
LAYOUTS = ("pp=1", "pp=2", "pp=2,vpp=2", "pp=2,vpp=2,style=v")
# What transformers computes in float32 whatever the weights are, such as linear attention, is summed in another order.
TOLERANCES = {"qwen3-next": 5e-6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run of two steps, or of the second alone, from what another run saved after its first."""

    model: str
    layout: str = "pp=2"
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 2
    flags: tuple[str, ...] = ()
    origin: Case | None = None

    @property
    def name(self) -> str:
        shape = f"{self.replicate}x{self.shard}x{self.tensor}-ep{self.expert}"
        parts = (self.model, self.layout, shape, *(flag.strip("-") for flag in self.flags))
        return "-".join((*parts, *(("from", self.origin.name) if self.origin else ())))

    @property
    def packed(self) -> str:
        return f"{self.model}-{self.layout}"

    @property
    def args(self) -> list[str]:
        degrees = ("--dp-replicate", self.replicate, "--dp-shard", self.shard, "--tp", self.tensor, "--ep", self.expert)
        return [str(flag) for flag in ("--no-self-check", "--implementation", "transformers", *degrees, *self.flags)]


def _pipelined(model: str, *flags: str) -> tuple[Case, ...]:
    split = ((_LOOP, "InterleavedZeroBubble"), (_V, "ZBVZeroBubble"), (_V, "DualPipeV"))
    schedules = (("pp=2", "1F1B"), *split)
    return tuple(
        Case(model=model, layout=layout, shard=2, flags=("--schedule", name, *flags)) for layout, name in schedules
    )


_LOOP, _V = LAYOUTS[2:]
_SAVED = Case(model="qwen3-moe", layout="pp=1", shard=4, expert=2)
NORMAL = (
    _SAVED,
    Case(model="qwen3-moe", layout="pp=1", shard=4, expert=4, origin=_SAVED),
    Case(model="qwen3-moe", layout="pp=1", replicate=4, expert=1, origin=_SAVED),
    Case(model=SKEWED, layout=_V, shard=2, flags=("--schedule", "ZBVZeroBubble", "--ac", "full")),
    Case(model="deepseek-v3", layout="pp=1", shard=2, tensor=2, expert=2),
)
_MODELS = tuple(model for model in MODELS if model != SKEWED)
_FOUR = Case(model="gpt-oss", layout="pp=1", shard=4, expert=4)
_PIPELINED = Case(model="glm4-moe", layout="pp=2", shard=2)
_MATRIX = dict.fromkeys(
    (
        *(Case(model=model, layout="pp=1", replicate=2, shard=2) for model in _MODELS),
        *(Case(model=model, layout="pp=2", shard=2) for model in _MODELS),
        *(Case(model=model, layout="pp=2", tensor=2) for model in _MODELS if model != "gpt-oss"),
        *(Case(model=model, layout="pp=1", tensor=4, expert=2) for model in ("mixtral",)),
        *(Case(model=model, layout="pp=1", tensor=2, shard=2, expert=4) for model in ("mixtral", "qwen3-next")),
        *chain.from_iterable(_pipelined(model) for model in _MODELS),
        *chain.from_iterable(_pipelined(model, "--ac", "full") for model in ("qwen3-moe", "deepseek-v3", SKEWED)),
        *_pipelined("qwen3-moe", "--ac", "selective"),
        *(Case(model=SKEWED, layout="pp=1", shard=4, expert=expert) for expert in (2, 4)),
        Case(model="deepseek-v3", layout="pp=1", shard=4, flags=("--load", "broadcast")),
        Case(model="glm4-moe", layout="pp=1", shard=4, flags=("--loss-chunk", "16")),
        _FOUR,
        Case(model="gpt-oss", layout="pp=1", shard=4, expert=1, origin=_FOUR),
        Case(model="gpt-oss", layout="pp=2", shard=2, expert=2, origin=_FOUR),
        _PIPELINED,
        Case(model="glm4-moe", layout="pp=1", shard=4, expert=4, origin=_PIPELINED),
        Case(model="glm4-moe", layout="pp=1", tensor=2, shard=2, expert=4, origin=_PIPELINED),
        Case(model="glm4-moe", layout="pp=1", replicate=4, expert=1, origin=_PIPELINED),
    )
)
SLOW = tuple(case for case in _MATRIX if case not in NORMAL)
