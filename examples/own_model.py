"""A decoder of your own, one stage at a time: `runner launch` finds it through an entry point and trains it.

In the pyproject.toml of the package that has this module, for a model packed with `reshard pack --model model.toml`:

    [project.entry-points."runner.families"]
    TinyDecoder = "own_model:family"

with config.json {"architectures": ["TinyDecoder"], "depth": 4, "dim": 32, "heads": 4, "vocab_size": 64} and model.toml:

    inputs = ["embed"]
    layers = "layers"
    outputs = ["norm", "head"]
    count = "depth"
    width = "dim"

For a class in transformers' style, `family` is one line: return runner.generic_family(MyForCausalLM, request).
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import runner

# What --tp does with each module, in the styles of transformers; what has no style is whole on every rank.
TP_PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.qkv": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # By heads, of which --tp gives each rank some: their number is not written.
        qkv = self.qkv(self.attn_norm(hidden)).unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        hidden = hidden + self.out(scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return hidden + self.down(self.up(self.mlp_norm(hidden)).relu().square())


class Decoder(nn.Module):
    """Some modules of the model; layers are numbered as in the whole. Tokens (B, L) or hidden (B, L, D) in."""

    def __init__(self, depth: int, dim: int, heads: int, vocab_size: int, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim) if "embed" in modules else None
        own = [number for number in range(depth) if f"layers.{number}" in modules]
        self.layers = nn.ModuleDict({str(number): Layer(dim, heads) for number in own})
        self.norm = nn.LayerNorm(dim) if "norm" in modules else None
        self.head = nn.Linear(dim, vocab_size, bias=False) if "head" in modules else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for module in (self.embed, *self.layers.values(), self.norm, self.head):
            hidden = hidden if module is None else module(hidden)
        return hidden


def family(request: runner.FamilyRequest) -> runner.Family:
    sizes = {name: request.config[name] for name in ("depth", "dim", "heads", "vocab_size")}
    return runner.NamedFamily(request, lambda modules: Decoder(**sizes, modules=modules), tp_plan=TP_PLAN)
