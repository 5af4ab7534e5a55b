"""What transformers and our stages compute under one config: logits, and in training mode gradients and buffers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import nn

from manifests.errors import InputError
from manifests.models import model_shape
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, hf_constants, hf_pieces
from runner.pipeline.microbatches import token_loss
from tests.fast.manifests.models.built import perturb, saved_tensors
from tests.fast.runner.models.decoders import SEQ_LEN, fill_pieces, tied_name
from tests.fast.runner.models.titans import forward
from tests.fast.runner.tiny import split_evenly

TOKENS = torch.randint(0, 96, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
TOKENS[0, :4] = torch.tensor([0, 1, 5, 95])  # defaults of pad_token_id, one that tests set, and the last, which is -1
_LABELS = TOKENS[:, 1:]
_SEED = 11  # of what dropout draws
_REFUSALS = (StrictDataclassError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# A bias of keys without rotation moves all scores of a query alike: its gradient is rounding. So is that of an
# expert that all tokens leave; both are nothing beside the norm of all gradients.
_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """Logits without and with training mode; the rest after a backward in it, by names in files or in modules."""

    logits: torch.Tensor
    trained_logits: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def by_transformers(folder: Path, config: dict[str, Any]) -> Computed | None:
    """Save a random model under this config, and return what it computes; None: transformers refuses it, or fails."""
    model_class = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    try:
        model = perturb(model_class(model_class.config_class.from_dict(json.loads(json.dumps(config)))))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        with torch.no_grad():
            logits = model.eval()(TOKENS).logits
        model.save_pretrained(folder)
        torch.manual_seed(_SEED)
        out = model.train()(TOKENS, labels=TOKENS)
        torch.autograd.backward(out.loss)
    except _REFUSALS:
        return None
    (folder / "config.json").write_text(json.dumps(config))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} | dict(_rotary_tables(model))
    for parameter in model.parameters():  # saved as weights are, gradients have the names of files
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")
    gradients = load_file(folder / "gradients" / "model.safetensors")
    persistent = gradients.keys() & {name for name, _ in model.named_buffers()}
    return Computed(
        logits=logits,
        trained_logits=out.logits.detach(),
        gradients={fqn: tensor for fqn, tensor in gradients.items() if fqn not in persistent},
        buffers=buffers,
    )


def by_stages(folder: Path) -> Computed:
    """Return what the model in a folder computes in three stages.

    Raises:
        UserError: its config is refused.
    """
    config = json.loads((folder / "config.json").read_text())
    if not saved_tensors(folder).items() <= model_shape(config).tensors.items():
        raise InputError("", "`reshard pack` refuses it", code="config.unsupported-value")
    family = family_for(config, max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, split_evenly(family.modules, 3), range(3))
    fill_pieces(chunks, folder)
    with torch.no_grad():
        logits = forward([chunk.eval() for chunk in chunks], TOKENS)
    torch.manual_seed(_SEED)
    trained_logits = forward([chunk.train() for chunk in chunks], TOKENS)
    torch.autograd.backward(token_loss(trained_logits[:, :-1], _LABELS, num_tokens=_LABELS.numel()))
    return Computed(
        logits=logits,
        trained_logits=trained_logits.detach(),
        gradients=_gradients(chunks, saved_tensors(folder)),
        buffers=dict(_buffers(chunks)),
    )


def differences(found: Computed, expected: Computed) -> list[str]:
    """Name what differs by more than rounding."""
    wrong = [
        name for name in ("logits", "trained_logits") if not _is_near(getattr(found, name), getattr(expected, name))
    ]
    if found.gradients.keys() != expected.gradients.keys():
        return [*wrong, *sorted(found.gradients.keys() ^ expected.gradients.keys())]
    floor = _FLOOR * float(torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm())
    for fqn, gradient in expected.gradients.items():
        if not (found.gradients[fqn] - gradient).norm() <= 2e-5 * gradient.norm() + floor:
            wrong.append(f"gradient of {fqn}")
    wrong += [
        f"buffer {name}" for name, buffer in found.buffers.items() if not _is_near(buffer, expected.buffers[name])
    ]
    return wrong


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 2e-5)


def _gradients(chunks: Iterable[StageChunk], stored: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return gradients by names in files, that of a tied head added to the embedding's."""

    def gradient(weight: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(weight) if weight.grad is None else weight.grad

    found = {piece.fqn: piece.memory for chunk in chunks for piece in hf_pieces(chunk, gradient)}
    for fqn in found.keys() - set(stored):
        embedding = tied_name(stored)
        found[embedding] = found[embedding] + found.pop(fqn)
    return found


def _buffers(chunks: Iterable[StageChunk]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what stages hold besides parameters, under transformers' names where they have one."""
    for chunk in chunks:
        yield from ((piece.fqn, piece.memory) for piece in hf_constants(chunk))
        for name, buffer in chunk.body.named_buffers():
            if hasattr(chunk.body, "model"):  # a part of transformers' own
                yield name.removeprefix("model."), buffer
            elif name.endswith("rope.cache"):
                cos, sin = buffer[:SEQ_LEN].chunk(2, dim=-1)
                half = cos.shape[-1] // 2
                yield _ROTARY, torch.cat([cos[:, :half], sin[:, :half]], dim=-1)


_ROTARY = "cosines and sines"


def _rotary_tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the cosines and sines of every position, where all layers have the same."""
    for name, part in model.named_modules():
        if name.endswith("rotary_emb") and isinstance(getattr(part, "rope_type", None), str):
            cos, sin = part(torch.zeros(()), torch.arange(SEQ_LEN)[None])
            half = part.inv_freq.shape[0]
            yield _ROTARY, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
