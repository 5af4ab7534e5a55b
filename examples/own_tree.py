"""A decoder of your own whose stages exchange a dict: embeddings skip all layers, and documents are kept apart.

Layers have experts. As examples/own_model.py, it is named by an entry point `TreeDecoder = "own_tree:family"`, with
config.json {"architectures": ["TreeDecoder"], "depth": 4, "dim": 32, "heads": 4, "experts": 4, "vocab_size": 64} and
the same model.toml. `family` says three things more: that stages exchange a tree, what else each stage takes, and how
its experts are distributed by --ep.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import runner


class Experts(nn.Module):
    """Experts that take tokens (T, D), and the numbers and weights (T, K) of those of each."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts  # on this rank: --ep changes it
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / dim**0.5)

    def forward(self, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            tokens, places = (numbers == number).nonzero(as_tuple=True)
            result = (hidden[tokens] @ self.up[number]).relu() @ self.down[number]
            total = total.index_add(0, tokens, result * weights[tokens, places, None])
        return total


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, experts: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.router, self.experts = nn.Linear(dim, experts, bias=False), Experts(dim, experts)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attn_norm(hidden)).unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        hidden = hidden + self.out(scaled_dot_product_attention(*qkv, attn_mask=mask).transpose(1, 2).flatten(2))
        tokens = self.mlp_norm(hidden).flatten(0, 1)
        weights, numbers = self.router(tokens).softmax(-1).topk(2)
        return hidden + self.experts(tokens, numbers, weights).view_as(hidden)


class Decoder(nn.Module):
    """Some modules of the model: tokens (B, L) or a dict in, a dict or logits (B, L, V) out."""

    def __init__(
        self, depth: int, dim: int, heads: int, experts: int, vocab_size: int, modules: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim) if "embed" in modules else None
        own = [number for number in range(depth) if f"layers.{number}" in modules]
        self.layers = nn.ModuleDict({str(number): Layer(dim, heads, experts) for number in own})
        self.norm = nn.LayerNorm(dim) if "norm" in modules else None
        self.head = nn.Linear(dim, vocab_size, bias=False) if "head" in modules else None

    def forward(self, given, *, position_ids, attention_mask):  # type: ignore[no-untyped-def]
        if self.embed is not None:
            hidden = self.embed(given)
            given = {"hidden": hidden, "skip": hidden}
        hidden, skip = given["hidden"], given["skip"]
        mask = tokens_seen(position_ids, attention_mask)
        for layer in self.layers.values():
            hidden = layer(hidden, mask)
        hidden = hidden if self.norm is None else self.norm(hidden + skip)
        return {"hidden": hidden, "skip": skip} if self.head is None else self.head(hidden)


def tokens_seen(position_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens each one sees, (B, 1, L, L): itself, and those before it in its document, but no padding."""
    documents, places = (position_ids == 0).cumsum(1), torch.arange(position_ids.shape[1], device=position_ids.device)
    seen = (
        (documents[:, :, None] == documents[:, None, :]) & (places[:, None] >= places) & (attention_mask[:, None] > 0)
    )
    return (seen | (places[:, None] == places))[:, None]


def family(request: runner.FamilyRequest) -> runner.Family:
    sizes = {name: request.config[name] for name in ("depth", "dim", "heads", "experts", "vocab_size")}
    return runner.NamedFamily(
        request,
        lambda modules: Decoder(**sizes, modules=modules),
        hands_on_trees=True,
        row_inputs=("position_ids", "attention_mask"),
        ep_plan={
            "layers.*.experts": "ep_dispatch_experts",
            "layers.*.experts.up": "grouped_gemm",
            "layers.*.experts.down": "grouped_gemm",
        },
    )
