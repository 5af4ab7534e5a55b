"""A whole model of transformers: with random weights for the self-check, or a checkpoint's for a dump of a step."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from manifests.errors import ModelError
from manifests.models.adapters import is_adapter
from manifests.store import read_config
from runner.models.regions import keeping_views
from runner.models.routers import Router, recorded_routers, routers_among

# Note [Evaluation as in training]
# In evaluation mode RWKV halves the hidden state after every `rescale_every`-th block, against overflow in float16, and
# divides the weights of the blocks after it, in place. That changes nothing but what the epsilon of a norm is added to.
# But a stage would halve again what earlier stages have halved, and gradients would be those of other weights.
# xLSTM runs all blocks over one part of a row after the other, if it is longer than `max_inference_chunksize`, without
# gradients. What arrives at a stage is the whole row.
_AS_IN_TRAINING: Mapping[str, object] = {"rescale_every": 0, "max_inference_chunksize": sys.maxsize}


def evaluate_as_in_training(config: Any) -> None:
    """Let the model of a config compute the same in evaluation mode; see Note [Evaluation as in training]."""
    for name, value in _AS_IN_TRAINING.items():
        if hasattr(config, name):
            setattr(config, name, value)


def router_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the auxiliary loss of a router. Shapes: logits (N, E)."""
    loss = load_balancing_loss_func((logits,), logits.shape[-1], top_k)
    assert isinstance(loss, torch.Tensor)
    return loss


class WholeModel(nn.Module):
    """A model of transformers as it is; see `runner.proof.stages.WholeModel`.

    With `mtp`, transformers' MTP layers, logits are those of all depths (B + K B, L, V), and the loss has their mean
    loss, times `mtp_weight`, in training: sums over the labels that are there, divided by the model's own number.
    """

    def __init__(
        self, model: PreTrainedModel, in_files: Callable[[str], str], mtp: Any = None, mtp_weight: float = 0.0
    ) -> None:
        super().__init__()
        self.model, self._in_files = model, in_files
        self._mtp, self._mtp_weight = (mtp,), mtp_weight  # in a tuple: its parameters are the model's
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
        labels = tokens if labels is None else labels
        if self._mtp[0] is not None:
            return self._predict_further(tokens, labels)
        output = self.model(input_ids=tokens, labels=labels, use_cache=False)
        return output.logits, output.loss

    def _predict_further(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (mtp,), model = self._mtp, cast(Any, self.model)
        mtp.train(self.training)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = [model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state]
        for number in range(mtp.num_mtp_layers):
            following = nn.functional.pad(tokens[:, number + 1 :], (0, number + 1))
            hidden.append(mtp.forward_layer(number, hidden[-1], positions, None, input_ids=following))
        logits: torch.Tensor = model.get_output_embeddings()(torch.cat(hidden))
        sums = []
        for further, of_depth in enumerate(torch.split(logits, len(tokens)), 1):
            predicted = of_depth[:, :-further].flatten(0, 1)
            predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
            sums.append(nn.functional.cross_entropy(predicted, labels[:, further:].flatten(), reduction="sum"))
        loss, *of_mtp = sums
        if torch.is_grad_enabled():
            loss = loss + self._mtp_weight * torch.stack(of_mtp).mean()
        return logits, loss / (labels[:, 1:] != -100).sum()

    def routers(self) -> Iterator[Router]:
        return routers_among(recorded_routers(type(self.model), self), self)

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParameterGradient:
    """A parameter's gradient, and the same as tensors by their names: in files, which may have several of it, in the
    model, and those of other members of its tie group.
    """

    gradient: torch.Tensor
    names: tuple[Mapping[str, torch.Tensor], ...]


def read_whole(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Read the model of a Hugging Face folder, with the plain implementation of experts, in evaluation mode."""
    read_config(folder / "config.json")
    verbosity, had_bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)  # what it warns of is refused below
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    reader: Any = AutoModelForCausalLM
    try:
        model, report = reader.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager", trust_remote_code=False, use_safetensors=True,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # whatever it raises of files that are not as it expects
        raise no_reference(
            str(folder),
            error,
            "it must have all weights as safetensors: pack it without --virtual, merge slices with --merge-slices",
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        if had_bar:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    wrong = [f"{name} ({kind.partition('_')[0]})" for kind in report for name in sorted(map(str, report[kind]))]
    if wrong:
        problem = f"its weights are not those of its config: {', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}"
        raise ModelError(
            str(folder), problem, "download weights and config from one revision", code="model.no-reference"
        )
    evaluate_as_in_training(model.config)
    whole: PreTrainedModel = model.to(device).eval()
    return whole


def no_reference(where: str, error: Exception, hint: str) -> ModelError:
    """Return the error of a model that transformers cannot read or run."""
    problem = (
        f"transformers {transformers.__version__} fails with {type(error).__name__}: {' '.join(str(error).split())}"
    )
    return ModelError(where, problem[:400], hint, code="model.no-reference")


def name_gradients(
    model: PreTrainedModel, gradients: Mapping[nn.Parameter, torch.Tensor]
) -> Iterator[ParameterGradient]:
    """Yield each parameter's gradient, zeros where it has none, from the loss back to the embedding."""
    members: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        members.setdefault(parameter, []).append(name)
    for parameter, names in reversed(members.items()):
        gradient = gradients.get(parameter)
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=torch.float32)
        yield ParameterGradient(gradient=gradient, names=tuple(_tensors(model, names, gradient)))


def _tensors(
    model: PreTrainedModel, names: Sequence[str], gradient: torch.Tensor
) -> Iterator[Mapping[str, torch.Tensor]]:
    for name in names:
        with keeping_views():
            in_files = dict(revert_weight_conversion(model, {name: gradient}))
        yield in_files
        if name not in in_files:
            yield {name: gradient}
