"""A whole model of transformers with random weights: what the self-check compares stages with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models.adapters import is_adapter


def with_defaults(architecture: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return a config with all fields that transformers reads."""
    config_class: Any = getattr(transformers, architecture).config_class
    fields: dict[str, object] = config_class.from_dict(copy.deepcopy(dict(config))).to_dict()
    return fields


class WholeModel(nn.Module):
    """A model of transformers as it is; see `runner.proof.stages.WholeModel`."""

    def __init__(self, model: PreTrainedModel, in_files: Callable[[str], str]) -> None:
        super().__init__()
        self.model, self._in_files = model, in_files
        with torch.no_grad():
            for parameter in model.parameters():  # no norm at 1, no bias at 0
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
            for buffer in model.buffers():
                if buffer.dtype == torch.int64 and buffer.dim() > 1:  # a table of experts by token: no token as another
                    buffer.copy_(torch.randint_like(buffer, 2))

    @property
    def body(self) -> nn.Module:
        return self

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(input_ids=tokens, labels=tokens if labels is None else labels, use_cache=False)
        return output.logits, output.loss

    def in_files(self) -> Mapping[str, torch.Tensor]:
        adapters = {name: weight.detach() for name, weight in self.model.named_parameters() if is_adapter(name)}
        files = {**self._in_decoder_files(), **adapters}
        return {self._in_files(name): tensor for name, tensor in files.items()}

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the tensors to the dtypes that they have when `from_pretrained` reads the model in this one."""
        config, had_bar = copy.deepcopy(self.model.config), transformers.logging.is_progress_bar_enabled()
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        read = type(self.model).from_pretrained(None, config=config, state_dict=self._in_decoder_files(), dtype=dtype)
        if had_bar:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        dtypes = {name: tensor.dtype for name, tensor in (*read.named_parameters(), *read.named_buffers())}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.grad, tensor.data = None, tensor.data.to(dtypes.get(name, dtype))  # adapters are not in it

    def _in_decoder_files(self) -> dict[str, torch.Tensor]:
        state = {name: tensor.detach() for name, tensor in self.model.state_dict().items() if not is_adapter(name)}
        return dict(revert_weight_conversion(self.model, state))
