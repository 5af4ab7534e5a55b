"""What combinations of tests/matrix.py train on, and what one process makes of it with transformers' whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
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
from tests.matrix import MODELS, SEQ_LEN, SKEWED, VOCAB_SIZE, Case

LR, EPS, MAX_NORM = 1e-2, 0.1, 0.5  # eps so large that AdamW does not amplify rounding
RECIPE = ("--lr", LR, "--eps", EPS, "--max-norm", MAX_NORM, "--weight-decay", 0)
_ENDS = ((5, 6, 13), (), (2,), (11,))  # of all documents but the last one of a row
_EMPTY = slice(SEQ_LEN // 4, -SEQ_LEN // 4)  # what the second of two ranks has of a row


def matrix_batch(step: int, case: Mapping[str, Any]) -> Batch:
    """Return rows with few valid tokens or none, of which some ranks get only the latter if they are `empty`."""
    size = case["global_batch"]
    batch = padded_batch(step, size=size, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    labels, positions = batch.labels, None
    if case["documents"]:
        positions = torch.empty_like(labels)
        for row in range(size):
            for begin, end in _documents_in(row):
                positions[row, begin:end] = torch.arange(end - begin)
                labels[row, end - 1] = IGNORED
    if case["rows"] == "empty":
        labels[: size // 2] = IGNORED
        labels[:, _EMPTY] = IGNORED
    return replace(batch, positions=positions, num_tokens=int((labels != IGNORED).sum()))


def _documents_in(row: int) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise((0, *_ENDS[row % len(_ENDS)], SEQ_LEN)))


def save_matrix_model(folder: Path, case: Case) -> None:
    name = case.folder.rpartition("-")[0]
    architecture, changes = MODELS[name]
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 6, "tie_word_embeddings": case.tied}
    save_tiny(folder, architecture, **sizes, **changes)
    for path in folder.glob("*.safetensors") if name == SKEWED else ():
        tensors = load_file(path)
        for key, tensor in tensors.items():
            if key.endswith("router.bias"):
                tensor[0] += 1e4
        save_file(tensors, path, metadata={"format": "pt"})


def reference(place: Path, case: Case, dtype: torch.dtype = torch.float32, steps: int = 1) -> dict[str, Any]:
    return _reference(place / case.folder, case.documents, case.rows, case.global_batch, dtype, steps)


@cache
def _reference(folder: Path, documents: bool, rows: str, size: int, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """Train transformers' model, documents by themselves; return what `parallel_worker.run_case` does.

    Weights are those after the first step. With another dtype, they are kept in float32 beside those of the model; in
    bfloat16, it gets one row at a time, as sums of gradients round.
    """
    (architecture,) = read_config(folder)["architectures"]
    with quiet():
        load = getattr(transformers, architecture).from_pretrained
        masters = load(folder, dtype=torch.float32)
        experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped_mm has no float64
        model = masters if dtype == torch.float32 else load(folder, dtype=dtype, **experts)
    model.config.use_cache = False
    model.train()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0)
    found: dict[str, Any] = {"reports": []}
    for step in range(steps):
        batch = matrix_batch(step, {"documents": documents, "rows": rows, "global_batch": size})
        loss = 0.0
        for part in _parts(size, documents, at_once=dtype != torch.bfloat16):
            logits = model(batch.tokens[part]).logits
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            lost = cross_entropy(logits.mT, batch.labels[part], reduction="sum", ignore_index=IGNORED)
            torch.autograd.backward(lost / batch.num_tokens)
            loss += lost.item() / batch.num_tokens
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            gradient, parameter.grad = parameter.grad, None
            master.grad = torch.zeros_like(master) if gradient is None else gradient.float()
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), MAX_NORM).item()
        found["reports"].append((loss, norm, batch.num_tokens))
        if step == 0:
            found["gradients"] = _in_files(masters, lambda weight: weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            parameter.data.copy_(master.data)
        if step == 0:
            found["weights"] = _in_files(masters, lambda weight: weight.detach().clone())
    return found


def _parts(size: int, documents: bool, *, at_once: bool) -> Iterator[tuple[list[int], slice]]:
    """Yield the rows of each place of a document, together or one after the other; without documents, whole rows."""
    places: Mapping[tuple[int, int], list[int]] = defaultdict(list)
    for row in range(size):
        for place in _documents_in(row) if documents else ((0, SEQ_LEN),):
            places[place].append(row)
    for place, in_rows in places.items():
        for some in [in_rows] if at_once else [[row] for row in in_rows]:
            yield some, slice(*place)


def _in_files(model: Any, of: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(
        model, {name: of(parameter) for name, parameter in model.named_parameters()}
    )
    return tensors
