"""Llama 2, 3, 3.1, 3.2 and Mistral on torchtitan's Llama 3 modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from runner.families.titan import ATTENTION, MLP, NORMS, TitanFamily

__all__ = ["Llama", "Mistral"]


class Llama(TitanFamily):
    """`LlamaForCausalLM`."""

    model = Llama3Model
    names: ClassVar[Mapping[str, str]] = {**NORMS, **ATTENTION, **MLP}
    window: int | None = None

    def read_layers(self) -> None:
        self._ffn, self._rope = self.read.count("intermediate_size"), self.rope()

    def block(self, layer: int) -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            **self.norms(),
            attention=self.attention(self._rope, window=self.window),
            feed_forward=self.mlp(self._ffn),
        )


class Mistral(Llama):
    """`MistralForCausalLM`: a Llama whose queries may see a window of the last keys alone."""

    _default_window = 4096  # MistralConfig, where the field is absent; null means no window

    def read_layers(self) -> None:
        super().read_layers()
        if "sliding_window" not in self.read.config:
            self.window = self._default_window
        elif self.read.has("sliding_window"):
            self.window = self.read.count("sliding_window")
