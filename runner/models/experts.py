"""Experts and routers: torchtitan's modules with the arithmetic of transformers'.

torchtitan computes experts in bfloat16 whatever the weights are, which is off by 5e-2 in float32, and knows other ways
to choose experts and to weigh them than the models here have been trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from runner.models.titan_modules import (
    FeedForward,
    GptOssGroupedExperts,
    GroupedExperts,
    Linear,
    LocalTokenDispatcher,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
    swiglu,
)

Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # weights and numbers of experts, (B, L, K), scores, (B, L, E)

_GROUPED_ALIGNMENT = 16  # bytes that `torch._grouped_mm` wants strides to be a multiple of


class Experts(GroupedExperts):  # type: ignore[misc]
    """Gated MLPs, each on its own tokens, in the dtype of their weights.

    Shapes: tokens (R, D) in the order of their experts, of which `num_tokens_per_expert_E` says how many each has.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        counts = num_tokens_per_expert_E
        hidden = silu(grouped_product(x_RD, self.w1_EFD, counts)) * grouped_product(x_RD, self.w3_EFD, counts)
        return grouped_product(hidden, self.w2_EDF, counts)


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Apply a separate linear map to each group of rows.

    Shapes: rows (R, n) of which the first `counts[0]` go through weights[0]; weights (E, m, n); counts (E).
    """
    # torch's one call takes no other dtype, compiled or on a GPU, and no other widths.
    widths = (width * rows.element_size() for width in weights.shape[1:])
    if rows.dtype == torch.bfloat16 and all(width % _GROUPED_ALIGNMENT == 0 for width in widths):
        ends = counts.cumsum(0, dtype=torch.int32)
        product: torch.Tensor = torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    else:
        product = _one_by_one(rows, weights, counts)
    return product


@torch.compiler.disable  # type: ignore[untyped-decorator] # how many rows each gets is not known beforehand
def _one_by_one(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    parts = zip(torch.split(rows, counts.tolist()), weights, strict=True)
    return torch.cat([linear(part, weight) for part, weight in parts])


class SoftmaxRouter(TokenChoiceTopKRouter):  # type: ignore[misc]
    """Qwen3's choice: the largest probabilities, in float32, which may be made to add up to one.

    Source: transformers 5.23, `Qwen3MoeTopKRouter`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        pass

    def forward(self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None) -> Chosen:
        logits = self.gate(x_BLD)
        scores = logits.softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        if self.route_norm:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(logits.dtype), chosen, scores


class LargestLogitsRouter(TokenChoiceTopKRouter):  # type: ignore[misc]
    """GPT-OSS's choice: the largest logits, and the softmax of these alone.

    Source: transformers 5.23, `GptOssTopKRouter`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        pass

    def forward(self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None) -> Chosen:
        logits = self.gate(x_BLD)
        largest, chosen = logits.topk(self.top_k, dim=-1)
        return largest.softmax(-1), chosen, logits


class ClampedExperts(GptOssGroupedExperts):  # type: ignore[misc]
    """GPT-OSS's experts, with biases, in the dtype of their weights. Shapes: as `Experts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):  # type: ignore[misc]
        alpha: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.alpha = config.alpha

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        counts = num_tokens_per_expert_E

        def of_each_token(bias: torch.Tensor) -> torch.Tensor:
            return bias.repeat_interleave(counts, dim=0, output_size=x_RD.shape[0])

        hidden = grouped_product(x_RD, self.mlp1_weight_EGD, counts) + of_each_token(self.mlp1_bias_EG)
        hidden = swiglu(hidden, alpha=self.alpha, limit=self.swiglu_limit)
        return grouped_product(hidden, self.mlp2_weight_EDF, counts) + of_each_token(self.mlp2_bias_ED)


class FloatLinear(Linear):  # type: ignore[misc]
    """A linear map in float32, whatever it is given."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return linear(tokens.float(), self.weight.float())


class SigmoidRouter(TokenChoiceTopKRouter):  # type: ignore[misc]
    """DeepSeek-V3's choice: groups by their two best experts, then the best experts of these groups.

    A bias steers the choice and has no part in the weights. All of it in float32.
    Source: transformers 5.23, `DeepseekV3TopkRouter`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        pass

    def forward(self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor) -> Chosen:
        scores = self.gate(x_BLD).sigmoid()
        steered = (scores + expert_bias_E).unflatten(-1, (self.num_expert_groups, -1))
        best = steered.topk(2, dim=-1).values.sum(-1)
        groups = best.topk(self.num_limited_groups, dim=-1, sorted=False).indices
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
        steered = steered.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(-2)
        chosen = steered.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, chosen, scores


class SteeredMoE(MoE):  # type: ignore[misc]
    """Experts whose routing is adjusted by a bias that is in files and is not trained.

    It is float32 whatever the weights are. torchtitan's `load_balance_coeff`, which would train it, stays off.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):  # type: ignore[misc]
        pass

    expert_bias_E: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.expert_bias_E  # a plain attribute
        self.register_buffer("expert_bias_E", torch.zeros(config.num_experts, dtype=torch.float32))

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        self.expert_bias_E = torch.zeros(len(self.expert_bias_E), dtype=torch.float32, device=buffer_device)


def moe_config(
    router: TokenChoiceTopKRouter.Config,
    experts: GroupedExperts.Config,
    *,
    kind: type[MoE.Config] = MoE.Config,
    shared: FeedForward.Config | None = None,
) -> MoE.Config:
    """Return the config of a router, its experts, and the shared experts of all tokens."""
    routed = RoutedExperts.Config(
        inner_experts=experts,
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=experts.num_experts, top_k=router.top_k),
    )
    return kind(
        num_experts=experts.num_experts,
        routed_experts=routed,
        router=router,
        load_balance_coeff=None,
        shared_experts=shared,
    )
