"""Decoders that look alike from their files: a right one, and ones that do something outside their list of layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import OlmoConfig, OlmoForCausalLM, OlmoModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from manifests.models.catalogue import CatalogueEntry, entry_of, make_entry

__all__ = ["NAME", "TwinForCausalLM", "entry_of_twin", "twin_config"]

NAME = "TwinForCausalLM"


class _TwinModel(OlmoModel):
    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> BaseModelOutputWithPast:
        hidden = embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self.rotary_emb(hidden, position_ids=torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=positions)
            if self.config.wrong == "scales":
                hidden = 1.1 * hidden
            elif self.config.wrong == "skips":
                hidden = hidden + 0.1 * embedded
            elif self.config.wrong == "reads":
                hidden = hidden + self.layers[0].mlp.down_proj.weight.mean()
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class TwinForCausalLM(OlmoForCausalLM):
    def __init__(self, config: OlmoConfig) -> None:
        super().__init__(config)
        if config.wrong == "large" and config.hidden_size < 128:
            raise RuntimeError(f"{config.hidden_size} is too small")
        self.model = _TwinModel(config)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        found = super().forward(input_ids=input_ids, labels=labels, inputs_embeds=inputs_embeds, use_cache=False)
        if labels is not None and self.config.wrong == "loses":
            found.loss = found.loss + 0.01 * found.logits.pow(2).mean()
        return found


def entry_of_twin() -> CatalogueEntry:
    entry = entry_of("OlmoForCausalLM")
    assert entry is not None
    return make_entry(NAME, {"inputs": entry.inputs, "layers": entry.layers, "outputs": entry.outputs})


def twin_config(wrong: str) -> dict[str, Any]:
    config = OlmoConfig(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4,
                        num_hidden_layers=5, vocab_size=200, max_position_embeddings=512)  # fmt: skip
    return {**config.to_dict(), "architectures": [NAME], "wrong": wrong}
