"""Decoders that look alike from their files: a right one, and ones that are wrong in stages, or with an option."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import OlmoConfig, OlmoForCausalLM, OlmoModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.olmo.modeling_olmo import OlmoDecoderLayer

from manifests.models.catalogue import CatalogueEntry, entry_of, make_entry

NAME = "TwinForCausalLM"


class _Twice(torch.autograd.Function):
    """A product of which the second backward through one result is twice the first."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, scale)
        ctx.num_backwards = 0
        return hidden * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, scale = ctx.saved_tensors
        ctx.num_backwards += 1
        return gradient * scale, (gradient * hidden).sum() * ctx.num_backwards


class _TwinLayer(OlmoDecoderLayer):
    def __init__(self, config: OlmoConfig, index: int) -> None:
        super().__init__(config, index)
        self.wrong = config.wrong
        if config.wrong == "rounds":
            self.register_buffer("phase", torch.full((1,), 1000.5))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.wrong == "differs" and torch._C._current_graph_task_id() >= 0:  # in a backward: it is recomputed
            hidden_states = 2 * hidden_states
        elif self.wrong == "rounds":
            hidden_states = hidden_states * (2 + self.phase.float().cos()).to(hidden_states.dtype)
        elif self.wrong == "doubles":
            hidden_states = _Twice.apply(hidden_states, 1 + self.mlp.down_proj.weight.mean())  # type: ignore[no-untyped-call]
        return super().forward(hidden_states, **kwargs)


class _Centered(nn.Linear):
    """A head that reads all tokens of what it is called with."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden - hidden.mean(-2, keepdim=True))


class _TwinModel(OlmoModel):
    def __init__(self, config: OlmoConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_TwinLayer(config, index) for index in range(config.num_hidden_layers))

    @property
    def _is_whole(self) -> bool:
        return all(isinstance(layer, _TwinLayer) for layer in self.layers)

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> BaseModelOutputWithPast:
        hidden = embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self.rotary_emb(hidden, position_ids=torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=positions)
            if self.config.wrong == "scales":
                hidden = 1.1 * hidden
            elif self.config.wrong == "narrows" and hidden.dtype == torch.bfloat16 and not self._is_whole:
                hidden = 2 * hidden
            elif self.config.wrong == "skips":
                hidden = hidden + 0.1 * embedded
            elif self.config.wrong == "reads":
                hidden = hidden + self.layers[0].mlp.down_proj.weight.mean()
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class TwinForCausalLM(OlmoForCausalLM):
    _keep_in_fp32_modules_strict = ("phase",)

    def __init__(self, config: OlmoConfig) -> None:
        super().__init__(config)
        if config.wrong == "large" and config.hidden_size < 128:
            raise RuntimeError(f"{config.hidden_size} is too small")
        self.model = _TwinModel(config)
        if config.wrong == "centers":
            self.lm_head = _Centered(config.hidden_size, config.vocab_size, bias=False)
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
