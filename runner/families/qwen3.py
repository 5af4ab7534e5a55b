"""Qwen3, dense and with experts, on torchtitan's Qwen3 modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torchtitan.models.common import Linear
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

from runner.families.experts import Experts, SoftmaxRouter, moe_config
from runner.families.titan import ATTENTION, MLP, NO_INIT, NORMS, TitanFamily
from runner.families.windows import windows_of

__all__ = ["Qwen3", "Qwen3Moe"]

_DEFAULT_WINDOW, _DEFAULT_FULL = 4096, 28  # Qwen3Config: tokens, and layers before the first with a window


class Qwen3(TitanFamily):
    """`Qwen3ForCausalLM`."""

    model = Qwen3Model
    names: ClassVar[Mapping[str, str]] = {
        **NORMS,
        **ATTENTION,
        **MLP,
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }
    default_head: ClassVar[int | None] = 128

    def read_layers(self) -> None:
        self._ffn, self._rope = self.read.count("intermediate_size"), self.rope()
        self._windows = self.read_windows()

    def read_windows(self) -> tuple[int | None, ...]:
        """Give each layer's window."""
        window = self._window()
        first = self.read.count("max_window_layers", _DEFAULT_FULL, least=0)
        usual = [window is not None and layer >= first for layer in range(self.num_layers)]
        return windows_of(self.read, window, usual)

    def block(self, layer: int) -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            **self.norms(),
            attention=self.attention(self._rope, window=self._windows[layer], qk_norm=True),
            feed_forward=self.mlp(self._ffn),
        )

    def _window(self) -> int | None:
        if not self.read.flag("use_sliding_window", False):
            return None
        if "sliding_window" in self.read.config and not self.read.has("sliding_window"):
            return None
        return self.read.count("sliding_window", _DEFAULT_WINDOW)


class Qwen3Moe(Qwen3):
    """`Qwen3MoeForCausalLM`.

    Layers named by `mlp_only_layers`, and all but every `decoder_sparse_step`-th, are dense.
    """

    names: ClassVar[Mapping[str, str]] = {**Qwen3.names, "moe.router.gate": "mlp.gate"}
    stacked: ClassVar[Mapping[str, str]] = {
        f"moe.routed_experts.inner_experts.{name}": f"mlp.experts.{{}}.{part}.weight"
        for name, part in (("w1_EFD", "gate_proj"), ("w3_EFD", "up_proj"), ("w2_EDF", "down_proj"))
    }
    default_head = None

    def read_windows(self) -> tuple[int | None, ...]:
        return (self._window(),) * self.num_layers

    def block(self, layer: int) -> Qwen3TransformerBlock.Config:
        config = super().block(layer)
        is_sparse = (layer + 1) % self.read.count("decoder_sparse_step", 1) == 0
        if is_sparse and layer not in self.read.counts("mlp_only_layers"):
            config.feed_forward, config.moe = None, self._moe()
        return config

    def _moe(self) -> MoE.Config:
        count = self.read.count("num_experts" if self.read.has("num_experts") else "num_local_experts")
        gate = Linear.Config(in_features=self.hidden_size, out_features=count, param_init=NO_INIT)
        router = SoftmaxRouter.Config(
            num_experts=count,
            gate=gate,
            top_k=self.read.count("num_experts_per_tok"),
            score_func="softmax",
            route_norm=self.read.flag("norm_topk_prob", False),
        )
        ffn = self.read.count("moe_intermediate_size")
        return moe_config(router, Experts.Config(dim=self.hidden_size, hidden_dim=ffn, num_experts=count))
