"""Models with MTP modules, written from DeepSeek-V3's report on transformers' own decoder layers, and what trains them.

Qwen3-Next's and Qwen3.5's are the same with one module, in which the decoder layer has full attention: as vLLM computes
it (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`), and as Megatron-Bridge names it (`qwen3_next_bridge.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from manifests.models import ModelShape, StoredTensors, model_shape
from manifests.placement import Placement
from runner.config.schema import BatchOptions
from runner.data.packing import Sample
from runner.data.sequences import Batch, build_batch
from tests.fast.manifests.models.built import read_config
from tests.fast.manifests.models.catalogued import config_of as tiny_config
from tests.fast.runner.tiny import padded_batch

SEQ_LEN, WEIGHT = 12, 0.3
CUT = BatchOptions(global_batch=4, microbatch=1, seq_len=SEQ_LEN)
FLAGS = (
    "--data", "synthetic", "--lr", "0.1", "--eps", "0.5", "--weight-decay", "0.1", "--max-norm", "0",
    "--mtp-loss-weight", str(WEIGHT), "--global-batch", "4", "--seq-len", str(SEQ_LEN),
)  # fmt: skip
NUM_STEPS = 2  # a gradient that is not reset shows in the second
_LENGTHS = ((5, 1, 4, 3), (13,), (2, 11), (9, 4))  # of documents: a row has a label more than tokens

NEXT, DENSE, EXPERTS = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
CLASSES: Mapping[str, tuple[Any, Any, Any]] = {
    NEXT: (Qwen3NextForCausalLM, Qwen3NextDecoderLayer, Qwen3NextRMSNorm),
    DENSE: (Qwen3_5ForCausalLM, Qwen3_5DecoderLayer, Qwen3_5RMSNorm),
    EXPERTS: (Qwen3_5MoeForCausalLM, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule over two ranks, a layout in Megatron's letters, and how many MTP layers there are."""

    schedule: str
    layout: str
    depth: int = 1
    has_documents: bool = False
    recompute: str = "none"
    is_chosen: bool = False  # every parameter is trained because of its name
    flags: tuple[str, ...] = ()  # of a run on four ranks
    beside: str = ""  # an architecture whose layer has names of its own
    is_slow: bool = False

    @property
    def num_ranks(self) -> int:
        return 4 if self.flags else 2

    @property
    def placement(self) -> Placement:
        style: Any = "v" if self.schedule in ("ZBVZeroBubble", "DualPipeV") else "loop"
        return Placement(num_stages=self.layout.count("|") + 1, num_ranks=2, style=style)

    @property
    def stage_modules(self) -> tuple[tuple[str, ...], ...]:
        names = {"E": iter(["model.embed_tokens"]), "L": iter(["model.norm"])}
        names |= {"m": iter(["mtp"])} if self.beside else {}
        layers = (f"model.layers.{number}" for number in range(99))
        stages = [[next(names.get(letter, layers)) for letter in stage] for stage in self.layout.split("|")]
        return (*map(tuple, stages[:-1]), (*stages[-1], "lm_head"))

    def batch(self, step: int) -> Batch:
        if not self.has_documents:
            return padded_batch(step, size=CUT.global_batch, seq_len=SEQ_LEN, vocab_size=96)
        samples = []
        for row in documents(step):
            ends = torch.tensor([len(document) for document in row]).cumsum(0).tolist()
            ids = array("i", torch.cat(row).tolist())
            samples.append(Sample(ids=ids, begins=tuple(ends[:-1]), is_masked=True))
        return build_batch(samples, SEQ_LEN, filler=0)


CASES: Mapping[str, Case] = {
    "1F1B": Case(schedule="1F1B", layout="Ettt|tmL"),
    "GPipe, two layers apart": Case(schedule="GPipe", layout="Ettttm|mL", depth=2, is_chosen=True, is_slow=True),
    "Interleaved1F1B, alone": Case(schedule="Interleaved1F1B", layout="Et|ttt|m|L", recompute="full"),
    "lent on its rank": Case(schedule="Interleaved1F1B", layout="Etttt|m|m|L", depth=2, is_chosen=True),
    "InterleavedZeroBubble": Case(schedule="InterleavedZeroBubble", layout="Ett|t|tm|mL", depth=2, is_slow=True),
    "ZBV": Case(schedule="ZBVZeroBubble", layout="Et|tt|tm|L"),
    "DualPipeV": Case(schedule="DualPipeV", layout="Ett|t|t|mmL", depth=2, is_slow=True),
    "documents": Case(schedule="Interleaved1F1B", layout="Ett|tt|m|mL", depth=2, has_documents=True),
    "--dp-shard": Case(
        schedule="Interleaved1F1B",
        layout="Etttt|m|m|L",
        depth=2,
        flags=("--dp-shard", "2"),
        recompute="full",
        is_slow=True,
    ),
    "--tp": Case(schedule="InterleavedZeroBubble", layout="Ett|t|tm|mL", depth=2, flags=("--tp", "2")),
    "--ep": Case(schedule="1F1B", layout="Etttt|mmL", depth=2, flags=("--dp-shard", "2", "--ep", "2"), is_slow=True),
    "--cp": Case(schedule="ZBVZeroBubble", layout="Et|tt|tm|mL", depth=2, flags=("--cp", "2")),
    "--cp, documents": Case(
        schedule="Interleaved1F1B",
        layout="Ett|tt|m|mL",
        depth=2,
        has_documents=True,
        flags=("--cp", "2", "--cp-method", "ulysses"),
        is_slow=True,
    ),
    "--tp --ep": Case(schedule="GPipe", layout="Ettt|tmL", flags=("--tp", "2", "--ep", "2"), is_slow=True),
    "--loss-chunk": Case(
        schedule="1F1B",
        layout="Ettt|tmmL",
        depth=2,
        flags=("--dp-replicate", "2", "--loss-chunk", "5"),
        is_slow=True,
    ),
    "Qwen3-Next": Case(schedule="1F1B", layout="Ettt|tmL", beside=NEXT, recompute="full", is_slow=True),
    "Qwen3-Next, apart": Case(schedule="InterleavedZeroBubble", layout="Ett|tt|m|L", beside=NEXT),
    "Qwen3.5": Case(schedule="1F1B", layout="Ettt|tmL", beside=DENSE, is_slow=True),
    "Qwen3.5, with experts": Case(schedule="1F1B", layout="Ettt|tmL", beside=EXPERTS, is_slow=True),
    "Qwen3-Next, --tp": Case(
        schedule="Interleaved1F1B",
        layout="Ett|tt|m|L",
        beside=NEXT,
        flags=("--tp", "2", "--ep", "2"),
        is_slow=True,
    ),
    "Qwen3-Next, --dp-shard": Case(
        schedule="1F1B", layout="Ettt|tmL", beside=NEXT, flags=("--dp-shard", "2"), is_slow=True
    ),
}


def documents(step: int) -> list[list[torch.Tensor]]:
    drawn = torch.Generator().manual_seed(step)
    return [[torch.randint(1, 96, (length,), generator=drawn) for length in row] for row in _LENGTHS]


def config_of(depth: int, *, beside: str = "") -> dict[str, Any]:
    if not beside:
        return read_config("tiny-deepseek-v3", num_nextn_predict_layers=depth)
    kinds = ["linear_attention", "full_attention"] * 2
    config = tiny_config(beside, vocab_size=96, num_hidden_layers=4, layer_types=kinds)
    return {**config.to_dict(), "architectures": [beside]}


def shape_of(depth: int, *, beside: str = "") -> ModelShape:
    stored = {name: tuple(tensor.shape) for name, tensor in Oracle(depth, beside=beside).names()}
    return model_shape(config_of(depth, beside=beside), stored=StoredTensors(tensors=stored, where="the oracle"))


class Oracle(nn.Module):
    """Equations 21 to 25: a module for each depth, which shares the embedding and the head."""

    def __init__(self, depth: int, *, beside: str = "") -> None:
        super().__init__()
        classes: Any = (DeepseekV3ForCausalLM, DeepseekV3DecoderLayer, DeepseekV3RMSNorm)
        if beside:
            classes = CLASSES[beside]
        whole, layer, norm = classes
        config = whole.config_class(**config_of(depth, beside=beside))
        config._attn_implementation, config._experts_implementation = "sdpa", "eager"
        self.main, width, self.beside = whole(config), config.hidden_size, beside
        beyond = range(config.num_hidden_layers, config.num_hidden_layers + depth)
        self.blocks = nn.ModuleList(layer(config, 3 if beside else number) for number in beyond)
        self.norms = nn.ModuleList(
            nn.ModuleDict(
                {name: norm(width, eps=config.rms_norm_eps) for name in ("enorm", "hnorm", "shared_head/norm")}
            )
            for _ in beyond
        )
        self.projections = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in beyond)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of each depth, of the tokens that have so many after them."""
        model = self.main.model
        hidden = model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = [self.main.lm_head(hidden)]
        for depth, (block, norms, project) in enumerate(zip(self.blocks, self.norms, self.projections, strict=True), 1):
            if tokens.shape[1] <= depth:
                break
            further = model.embed_tokens(tokens[:, depth:])
            hidden = project(torch.cat([norms["enorm"](further), norms["hnorm"](hidden[:, : further.shape[1]])], -1))
            positions = torch.arange(further.shape[1])[None]
            hidden = block(hidden, position_embeddings=model.rotary_emb(hidden, positions), attention_mask=None)
            hidden = norms["shared_head/norm"](hidden)
            logits.append(self.main.lm_head(hidden))
        return logits

    def losses(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sums of each depth."""
        sums = [
            cross_entropy(of_depth.flatten(0, 1), labels[:, depth:].flatten(), reduction="sum")
            for depth, of_depth in enumerate(self(tokens))
        ]
        return torch.stack([*sums, *[torch.zeros(())] * (1 + len(self.blocks) - len(sums))])

    def names(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that files have, as views; the copies of the embedding and the head last."""
        num_layers = len(self.main.model.layers)
        for name, tensor in self.main.state_dict(keep_vars=True).items():
            yield from _split(name, tensor)
        for depth, (block, norms, project) in enumerate(zip(self.blocks, self.norms, self.projections, strict=True)):
            prefix = "mtp.layers.0." if self.beside else f"model.layers.{num_layers + depth}."
            for name, tensor in block.state_dict(keep_vars=True).items():
                yield from _split(prefix + name, tensor)
            if self.beside:
                yield "mtp.pre_fc_norm_embedding.weight", norms["enorm"].weight
                yield "mtp.pre_fc_norm_hidden.weight", norms["hnorm"].weight
                yield "mtp.norm.weight", norms["shared_head/norm"].weight
                yield "mtp.fc.weight", project.weight
                continue
            for name, norm in norms.items():
                yield f"{prefix}{name.replace('/', '.')}.weight", norm.weight
            yield f"{prefix}eh_proj.weight", project.weight
            yield f"{prefix}embed_tokens.weight", self.main.model.embed_tokens.weight
            yield f"{prefix}shared_head.head.weight", self.main.lm_head.weight

    def gradients(self) -> dict[str, torch.Tensor]:
        weights = {parameter: parameter.data for parameter in self.parameters()}
        try:
            for parameter in weights:
                assert parameter.grad is not None
                parameter.data = parameter.grad
            return {name: tensor.detach().clone() for name, tensor in self.names() if "correction_bias" not in name}
        finally:
            for parameter, weight in weights.items():
                parameter.data = weight


def _split(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts of a tensor one by one, as files have them."""
    if ".experts." not in name:
        yield name, tensor
        return
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    for number, of_expert in enumerate(tensor):
        for part, matrix in zip(parts, of_expert.chunk(len(parts)), strict=True):
            yield f"{name.rpartition('.')[0]}.{number}.{part}.weight", matrix


def random_weights(depth: int, *, beside: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of files; the copies are equal to what they are copies of."""
    drawn = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(dims, generator=drawn) * 0.1 + (1.0 if len(dims) == 1 and "bias" not in name else 0.0)
        for name, dims in shape_of(depth, beside=beside).tensors.items()
    }
    for name in tensors:
        for copy, owner in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            if name.startswith("model.layers.") and name.endswith(f".{copy}.weight"):
                tensors[name] = tensors[f"{owner}.weight"].clone()
    return tensors


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The losses of each step, without and of MTP layers, and what files have of the last gradients and of weights."""

    losses: Sequence[tuple[float, float]]
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]


def train_alone(case: Case, optim: Any) -> Trained:
    """Train the oracle in float64, with torch's own AdamW."""
    oracle = Oracle(case.depth, beside=case.beside)
    weights = random_weights(case.depth, beside=case.beside)
    names = [name for name, _ in oracle.names()]
    assert set(names) == set(weights)
    with torch.no_grad():
        for name, tensor in oracle.names():
            tensor.copy_(weights[name])
    options = {"lr": optim.lr, "eps": optim.eps, "weight_decay": optim.weight_decay}
    adamw = torch.optim.AdamW(oracle.parameters(), betas=(optim.beta1, optim.beta2), **options)
    losses = []
    for step in range(NUM_STEPS):
        adamw.zero_grad()
        batch = case.batch(step)
        sums = torch.stack([oracle.losses(*text) for text in _texts(case, step, batch)]).sum(0) / batch.num_tokens
        (sums[0] + WEIGHT * sums[1:].mean()).backward()
        losses.append((sums[0].item(), sums[1:].mean().item()))
        adamw.step()
    return Trained(
        losses=losses, gradients=oracle.gradients(), weights={n: t.detach().clone() for n, t in oracle.names()}
    )


def _texts(case: Case, step: int, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not case.has_documents:
        yield from zip(batch.tokens.split(1), batch.labels.split(1), strict=True)
        return
    for document in (document for row in documents(step) for document in row if len(document) > 1):
        yield document[None, :-1], document[None, 1:]
