"""The head of the last stage, which may compute the loss in chunks of tokens (`--loss-chunk`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.func import functional_call

from manifests.errors import UsageError
from runner.data.sequences import Batch
from runner.models.family import Family, OnTransformers, row_inputs_of
from runner.pipeline.chunk import ChunkedHead, StageChunk, build_chunks, part_of, width_of
from runner.pipeline.losses import Loss, MtpLoss
from runner.pipeline.microbatches import token_loss
from runner.pipeline.stage_io import Form, form_of
from runner.pipeline.stage_metadata import TracedMetadata


def chunk_head(chunks: Sequence[StageChunk], num_stages: int, num_tokens: int) -> None:
    """Replace the head, if one of these loaded chunks has it, by one that computes the loss in chunks."""
    for chunk in chunks:
        head = chunk.family.modules[-1]
        if head not in chunk.module_names:
            continue
        if chunk.stage != num_stages - 1:
            raise UsageError(
                "--loss-chunk",
                f"not supported when {head} (stage {chunk.stage}) is not on the last stage ({num_stages - 1})",
                "remove it, or repack with a layout that has it there",
                code="options.loss-chunk",
            )
        module = part_of(chunk, head)
        if not _ends_with_head(chunk.family, chunk.device):
            raise UsageError(
                "--loss-chunk",
                f"not supported for {chunk.family.architecture}, which changes the logits after {head}",
                "remove it",
                code="options.loss-chunk",
            )
        chunk.head = ChunkedHead(module, num_tokens)


def loss_of(
    chunks: Sequence[StageChunk], loss: Loss | MtpLoss | None = None
) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
    """Return the function from the last stage's output to a microbatch's contribution to the loss."""
    if isinstance(loss, MtpLoss):
        return loss
    of_model: Callable[..., torch.Tensor] = _plain_loss(chunks) if loss is None else loss

    def compute(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        fields = {} if loss is None else batch.fields
        return of_model(output, batch.labels, num_tokens=batch.num_tokens, **fields)

    return compute


def loss_with_mtp(chunks: Sequence[StageChunk]) -> MtpLoss | None:
    """Return the loss that trains a model with MTP layers; None: it has none."""
    family = chunks[0].family
    if not isinstance(family, OnTransformers) or family.mtp is None:
        return None
    return MtpLoss(family.mtp_weight, chunks[0].device, _plain_loss(chunks), family.parts)


def _plain_loss(chunks: Sequence[StageChunk]) -> Callable[..., torch.Tensor]:
    return next((chunk.head.loss for chunk in chunks if chunk.head is not None), token_loss)


def of_evaluation(loss: Loss | MtpLoss | None) -> Loss | None:
    """Return the loss that evaluates what is trained with another."""
    return loss if isinstance(loss, Loss) and loss.is_own else None


def output_form(chunk: StageChunk, form: Form) -> Form:
    """Return the form of a chunk's output in training: what enters its head, if it computes the loss in chunks."""
    if chunk.head is None:
        return form
    (logits,) = form.examples()
    return form_of(logits[..., :1].expand(-1, -1, chunk.head.width))


@torch.no_grad()
def _ends_with_head(family: Family, device: torch.device) -> bool:
    """Whether the head's output is the model's logits, tested with zeros; where stages exchange trees, on meta."""
    modules = family.modules if family.hands_on_trees else family.modules[-1:]
    (alone,) = build_chunks(family, (modules,), (0,))
    head = part_of(alone, family.modules[-1])
    outputs: list[torch.Tensor] = []
    head.register_forward_hook(lambda _, args, out: outputs.append(out))
    if family.hands_on_trees:
        family.init_buffers(alone.body, alone.device)
        alone.register_forward_hook(lambda _, args, out: outputs.append(out))
        traced = TracedMetadata(family=family, stage_modules=(modules,), dtype=torch.float32, chunks=(alone,))
        traced.run(torch.empty(1, 2, dtype=torch.int64, device="meta"))
        return outputs[0] is outputs[1]
    family.init_buffers(alone.body, device)
    zero = torch.zeros((), device=device)
    weights = {name: zero.expand(parameter.shape) for name, parameter in alone.body.named_parameters()}
    inputs = row_inputs_of(family, torch.zeros(1, 2, dtype=torch.int64, device=device))
    logits = functional_call(alone.body, weights, (zero.expand(1, 2, width_of(head)),), inputs)
    return logits is outputs[0]
