"""transformers' whole model with a checkpoint's weights, in one process: what a dump of a training step must equal."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.errors import ModelError
from manifests.store import read_config
from runner.models.regions import keeping_views


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
