"""Llama 2, 3, 3.1, 3.2 and Mistral on torchtitan's Llama 3 modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from runner.models.titan_fields import LlamaFields, MistralFields
from runner.models.titan_modules import Llama3Model, Llama3TransformerBlock
from runner.models.torchtitan import ATTENTION, MLP, NORMS, TitanFamily


class Llama(LlamaFields, TitanFamily):
    """`LlamaForCausalLM`."""

    model = Llama3Model
    names: ClassVar[Mapping[str, str]] = {**NORMS, **ATTENTION, **MLP}

    def block(self, layer: int) -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            **self.norms(),
            attention=self.attention(window=self.window),
            feed_forward=self.mlp(self.ffn),
        )


class Mistral(MistralFields, Llama):
    """`MistralForCausalLM`: a Llama whose queries may see a window of the last keys alone."""
