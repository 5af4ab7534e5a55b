"""What the parity ranks are held against, written with torch alone, and how two runs are compared.

The references share the model code with the runner, where the comparison is bitwise, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.data.sequences import Batch
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, hf_constants, hf_pieces
from tests.fast.runner.models.decoders import fill_pieces, tied_name
from tests.fast.runner.tiny import HEAD, read_config
from tests.process.runner.pipeline.parity_cases import BATCH, COMPARED, OPTIM, SEQ_LEN, batch_of

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Run:
    """What came of a training run: per step, and by Hugging Face FQN, each expert by itself."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of the first steps
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def train_same_code(folder: Path, tied: bool, dtype: torch.dtype, order: Sequence[int], steps: int) -> Run:
    """Accumulate the microbatches in order through the runner's whole model; two copies of a tied weight."""
    chunk = whole_model(folder, dtype)
    family, model = chunk.family, chunk.body
    named = {family.to_hf(name): parameter for name, parameter in model.named_parameters()}
    embedding, head = named[f"{family.modules[0]}.weight"], named[HEAD]
    optimizer = torch.optim.AdamW(
        named.values(), lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, weight_decay=OPTIM.weight_decay
    )
    run = Run()
    for step in range(steps):
        optimizer.zero_grad()
        losses = accumulate(model, batch_of(step, family.vocab_size), order)
        if tied:
            total = grad_of(embedding) + grad_of(head)
            embedding.grad, head.grad = total, total.clone()
        norm = norm_of([p for p in named.values() if not (tied and p is head)])
        for parameter in named.values():
            grad_of(parameter).mul_(min(1.0, OPTIM.max_norm / (norm + 1e-6)))
        run.losses.append(math.fsum(losses))
        run.norms.append(norm)
        if step < COMPARED:
            run.gradients.append(gradients_in(chunk))
        optimizer.step()
    run.parameters = {piece.fqn: piece.memory.clone() for piece in (*hf_pieces(chunk), *hf_constants(chunk))}
    return run


def gradients_of(folder: Path, batch: Batch) -> dict[str, torch.Tensor]:
    """Give the gradients of one untied batch, as they are before they are clipped."""
    chunk = whole_model(folder, torch.float32)
    accumulate(chunk.body, batch, range(BATCH.num_microbatches))
    return gradients_in(chunk)


def whole_model(folder: Path, dtype: torch.dtype) -> StageChunk:
    family = family_for(read_config(folder), max_seq_len=SEQ_LEN)
    (chunk,) = build_chunks(family, (family.modules,), (0,))
    fill_pieces([chunk], folder, dtype)
    return chunk


def gradients_in(chunk: StageChunk) -> dict[str, torch.Tensor]:
    return {piece.fqn: piece.memory.clone() for piece in hf_pieces(chunk, grad_of)}


def accumulate(model: nn.Module, batch: Batch, order: Sequence[int]) -> list[float]:
    """Add the gradients of a batch's microbatches in this order, and give their parts of the loss."""
    parts = list(microbatches(batch))
    losses = []
    for tokens, labels in (parts[microbatch] for microbatch in order):
        logits = model(tokens).float()
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.num_tokens
        torch.autograd.backward(loss)
        losses.append(loss.item())
    return losses


def train_transformers(folder: Path, steps: int) -> Run:
    """Train the `transformers` model on whole batches, by its book."""
    from tests.fast.runner.models.titans import in_files, load  # slow to import, and ranks do without

    model = load(folder)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
        weight_decay=OPTIM.weight_decay,
    )
    vocab_size = model.config.vocab_size
    run = Run()
    for step in range(steps):
        batch = batch_of(step, vocab_size)
        optimizer.zero_grad()
        loss = cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_norm)
        run.losses.append(loss.item())
        run.norms.append(norm.item())
        if step == 0:
            run.gradients.append(in_files(model, folder, gradients=True))
        optimizer.step()
    run.parameters = in_files(model, folder, gradients=False)
    return run


def differences(found: Run, expected: Run) -> list[str]:
    """Say where a run's bits first leave the reference's: nothing, if they never do."""
    said = []
    for what, ours, theirs in (("loss", found.losses, expected.losses), ("norm", found.norms, expected.norms)):
        step = next((step for step, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if step is not None:
            said.append(f"{what} of step {step}: {ours[step]} instead of {theirs[step]}")
    assert len(found.gradients) == COMPARED
    for step, pair in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        if worse := _difference(*pair):
            said.append(f"gradients of step {step}: {worse}")
            break
    if worse := _difference(found.parameters, expected.parameters):
        said.append(f"parameters at the end: {worse}")
    return said


def worst(found: Tensors, expected: Tensors) -> float:
    """Give the largest relative difference; a tied head is compared with the embedding.

    What is nothing but rounding, beside a ten-thousandth of the largest tensor, counts as this would.
    """
    assert found.keys() - {HEAD} == expected.keys() - {HEAD}
    least = 1e-4 * max(float(tensor.norm()) for tensor in expected.values())
    others = {name: expected[name if name in expected else tied_name(expected)] for name in found}
    return max(float((found[name] - other).norm()) / max(float(other.norm()), least) for name, other in others.items())


def norm_of(parameters: Iterable[torch.Tensor]) -> float:
    norms = (torch.linalg.vector_norm(grad_of(p), dtype=torch.float64) for p in parameters)
    return math.sqrt(math.fsum(norm.square().item() for norm in norms))


def microbatches(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = BATCH.microbatch
    return zip(torch.split(batch.tokens, size), torch.split(batch.labels, size), strict=True)


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _difference(found: Tensors, expected: Tensors) -> str:
    """A tied head may be left out where the embedding leads it."""
    missing = expected.keys() - found.keys() - {HEAD}
    if missing:
        return f"none of {', '.join(sorted(missing))}"
    differing = {
        name: _relative(found[name], expected[name]) for name in found if not torch.equal(found[name], expected[name])
    }
    if not differing:
        return ""
    most = max(differing, key=lambda name: differing[name])
    return f"{len(differing)} of {len(found)} differ, most of all {most} by {differing[most]:.1e} of its size"


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
