"""What combinations of tests/matrix.py train on, and what one process makes of it with transformers' whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers.core_model_loading import revert_weight_conversion

from runner.data.sequences import IGNORED, Batch
from tests.fast.manifests.models.catalogued import quiet, save_tiny
from tests.fast.runner.tiny import padded_batch, read_config
from tests.matrix import GLOBAL_BATCH, MODELS, SEQ_LEN, SKEWED, VOCAB_SIZE, Case

LR, EPS, MAX_NORM, STEPS = 1e-2, 0.1, 0.5, 3  # eps so large that AdamW does not amplify rounding
RECIPE = ("--lr", LR, "--eps", EPS, "--max-norm", MAX_NORM, "--weight-decay", 0)
_ENDS = ((5, 6, 13), (), (2,), (11,))  # of all documents but the last one of a row
_EMPTY = slice(SEQ_LEN // 4, -SEQ_LEN // 4)  # what the second of two ranks has of a row


def matrix_batch(step: int, case: Mapping[str, Any]) -> Batch:
    """Return rows with few valid tokens or none, of which some ranks get only the latter if they are `empty`."""
    batch = padded_batch(step, size=GLOBAL_BATCH, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    labels, positions = batch.labels, None
    if case["documents"]:
        positions = torch.empty_like(labels)
        for row in range(GLOBAL_BATCH):
            for begin, end in _documents_in(row):
                positions[row, begin:end] = torch.arange(end - begin)
                labels[row, end - 1] = IGNORED
    if case["rows"] == "empty":
        labels[: GLOBAL_BATCH // 2] = IGNORED
        labels[:, _EMPTY] = IGNORED
    return replace(batch, positions=positions, num_tokens=int((labels != IGNORED).sum()))


def _documents_in(row: int) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise((0, *_ENDS[row % len(_ENDS)], SEQ_LEN)))


def save_matrix_model(folder: Path, case: Case) -> None:
    name = case.folder.rpartition("-")[0]
    architecture, changes = next(MODELS[key] for key in (name, f"{name}-titan") if key in MODELS)
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 6, "tie_word_embeddings": case.tied}
    save_tiny(folder, architecture, **sizes, **changes)
    for path in folder.glob("*.safetensors") if name == SKEWED else ():
        tensors = load_file(path)
        for key, tensor in tensors.items():
            if key.endswith("router.bias"):
                tensor[0] += 1e4
        save_file(tensors, path, metadata={"format": "pt"})


@cache
def reference(folder: Path, documents: bool, rows: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Train transformers' model, documents by themselves; return what `parallel_worker.run_case` does.

    Weights are those after the first step. With another dtype, they are kept in float32 beside those of the model.
    """
    (architecture,) = read_config(folder)["architectures"]
    with quiet():
        load = getattr(transformers, architecture).from_pretrained
        masters, model = load(folder, dtype=torch.float32), load(folder, dtype=dtype)
    model.config.use_cache = False
    model.train()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0)
    found: dict[str, Any] = {"reports": []}
    for step in range(STEPS):
        batch = matrix_batch(step, {"documents": documents, "rows": rows})
        loss = 0.0
        for row in range(GLOBAL_BATCH):
            for begin, end in _documents_in(row) if documents else ((0, SEQ_LEN),):
                part = row, slice(begin, end)
                logits = model(batch.tokens[part][None]).logits[0].float()
                lost = cross_entropy(logits, batch.labels[part], reduction="sum", ignore_index=IGNORED)
                torch.autograd.backward(lost / batch.num_tokens)
                loss += lost.item() / batch.num_tokens
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), MAX_NORM).item()
        found["reports"].append((loss, norm, batch.num_tokens))
        if step == 0:
            found["gradients"] = _in_files(masters, lambda weight: weight.grad.clone())
        optimizer.step()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            parameter.data.copy_(master.data)
        if step == 0:
            found["weights"] = _in_files(masters, lambda weight: weight.detach().clone())
    return found


def _in_files(model: Any, of: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(
        model, {name: of(parameter) for name, parameter in model.named_parameters()}
    )
    return tensors
