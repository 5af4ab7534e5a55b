"""The loss of a microbatch as a sum and a count: what is built in beside cross-entropy, or a package's own.

# Note [Counts of a loss]
A schedule runs the first backwards before the last forwards, so the count of the whole batch is not known then. Sums
are divided by the number of the batch's labels, which every rank knows from the data. The counts that the loss returns
are summed over all microbatches and ranks together with the loss, and gradients are multiplied by labels / counts
before they are clipped: by exactly 1 where each label counts once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_type_hints

import torch
from torch import nn

from manifests.errors import UsageError
from runner.config.entry_points import load_entry_point
from runner.config.flags import TrainOptions
from runner.config.loss import LOSSES, LossOptions
from runner.data.rows import IGNORED, RowForm
from runner.data.sequences import Batch
from runner.pipeline.microbatches import token_loss, total
from runner.tensors.row_parts import RowParts, shift_left

# Fields of rows that a loss takes as keyword-only arguments: (B, L), shifted as labels are, and (B,); float32.
PerToken: TypeAlias = Annotated[torch.Tensor, "per token"]
PerRow: TypeAlias = Annotated[torch.Tensor, "per row"]
# Of logits (B, L, V), labels (B, L) and fields: the sum of the loss, and what it is divided by.
LossFunction: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor | float]]


class Loss:
    """A loss other than plain cross-entropy, and the counts of the microbatches that it was called for.

    Evaluations use it if `is_own`, and otherwise cross-entropy. `needs_rows`: it cannot be computed for parts of rows.
    `num_together`: how many consecutive rows it is of.
    """

    def __init__(self, function: LossFunction, form: RowForm, *, is_own: bool = False) -> None:
        self.form, self.is_own = form, is_own
        self.needs_rows = bool(form.per_row) or getattr(function, "needs_rows", False)
        self.num_together: int = getattr(function, "num_together", 1)
        self._function, self._counts = function, list[torch.Tensor]()

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, *, num_tokens: int, **fields: torch.Tensor
    ) -> torch.Tensor:
        """Return a microbatch's contribution to the loss; see Note [Counts of a loss]."""
        if isinstance(self._function, nn.Module):
            self._function.to(logits.device)  # its package makes it on the CPU; the run may be on a GPU
        summed, count = self._function(logits, labels, **fields)
        self._counts.append(torch.as_tensor(count, dtype=torch.float64, device=summed.device).detach())
        if torch.is_grad_enabled() and logits.requires_grad and not summed.requires_grad:
            if self._counts[-1] != 0 and (labels != IGNORED).any():
                problem = "its sum does not depend on the weights, as if its logits had been detached"
                raise UsageError("--loss", problem, "compute the sum from logits, with gradients", code="options.loss")
            summed = summed + logits[..., :0].sum()  # 0: all ranks run the backward, with gradients of zero
        return summed / num_tokens

    def take_count(self) -> float | torch.Tensor:
        """Return the sum of the counts since the last call, on the device."""
        count = torch.stack(self._counts).sum() if self._counts else 0.0
        self._counts.clear()
        return count


class MtpLoss:
    """The loss of a model and of its MTP layers, and the sums of the latter since `take`.

    # Note [Loss of MTP layers]
    It is the cross-entropy of the model and `weight` times the mean of those of the MTP layers, all divided by the
    number of the model's labels, as in equations 24 and 25 of the DeepSeek-V3 Technical Report. The k-th layer
    predicts the k-th label after each token's own: none where that is beyond the row, does not count for the model, or
    is of another document than the token.
    """

    def __init__(
        self,
        weight: float,
        device: torch.device,
        of_model: Callable[..., torch.Tensor] = token_loss,
        parts: RowParts | None = None,
    ) -> None:
        self._weight, self._device, self._sums = weight, device, list[torch.Tensor]()
        self._of_model, self._parts = of_model, parts

    def __call__(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return a microbatch's contribution to the loss. Shapes: output (B + K B, L, V), see `MtpStage`."""
        logits, *further = torch.split(output, len(batch.labels))
        losses = [
            self._of_model(of_layer, _further_labels(batch, number, self._parts), num_tokens=batch.num_tokens)
            for number, of_layer in enumerate(further, 1)
        ]
        mean = torch.stack(losses).mean()
        self._sums.append(mean.detach().double())
        return self._of_model(logits, batch.labels, num_tokens=batch.num_tokens) + self._weight * mean

    def take(self) -> torch.Tensor:
        """Return the mean loss of the layers over the batch: (1), 0 on ranks without the last stage."""
        mean = total(self._sums) if self._sums else torch.zeros((), dtype=torch.float64, device=self._device)
        self._sums.clear()
        return mean[None]

    def without(self, loss: float, mean: float) -> float:
        """Return the loss of the model alone."""
        return loss - self._weight * mean


def _further_labels(batch: Batch, number: int, parts: RowParts | None) -> torch.Tensor:
    """Return the label that is `number` after each token's own, see Note [Loss of MTP layers]."""
    labels = shift_left(batch.labels, number, parts, IGNORED)
    if batch.positions is not None:
        for between in range(1, number + 1):
            begins = nn.functional.pad(batch.positions[:, between:] == 0, (0, between))
            begins = begins if parts is None else begins[:, parts.places(begins.shape[1])]
            labels = labels.masked_fill(begins, IGNORED)
    return labels


def loss_of_run(run: TrainOptions, *, is_split: bool) -> Loss | None:
    """Return the loss of a run; None: cross-entropy. `is_split`: rows are split."""
    options, data = run.loss, run.data
    loss = _load(options.entry_point) if options.entry_point is not None else _built_in(options)
    where = f"--loss {options.entry_point}" if options.entry_point is not None else "--token-weights"
    if loss is None:
        return None
    if (names := (*loss.form.per_token, *loss.form.per_row)) and not data.has_rows:
        problem = f"reads {', '.join(names)} of each row, and the data is text"
        raise UsageError(where, problem, "use --tokenized or --data-class", code="options.loss")
    if loss.needs_rows and is_split:
        problem = "needs whole rows, which --cp splits"
        raise UsageError(where, problem, "remove --cp", code="options.loss")
    is_mixed = data.shuffle or data.weights or data.skip_bad_documents
    if loss.num_together > 1 and (is_mixed or run.batch.microbatch % loss.num_together):
        hint = "use a multiple as --microbatch, without --shuffle, --data-weight and --skip-bad-documents"
        problem = f"is of {loss.num_together} consecutive rows, which the run does not keep together"
        raise UsageError(where, problem, hint, code="options.loss")
    return loss


def _load(name: str) -> Loss:
    function = load_entry_point(LOSSES, name, "--loss")
    kind = type(function)
    method = kind.forward if isinstance(function, nn.Module) else kind.__call__ if callable(function) else None
    code = function if inspect.isfunction(function) else method
    if not inspect.isfunction(code):
        problem = f"expected a function, or an object with __call__, found {kind.__name__}"
        raise UsageError(f"--loss {name}", problem, "docs/own-data.md shows one", code="options.loss")
    if isinstance(function, nn.Module) and any(weight.requires_grad for weight in function.parameters()):
        problem = "has parameters that require gradients, which no optimizer would step and no checkpoint would have"
        advice = "make them buffers, or call requires_grad_(False)"
        raise UsageError(f"--loss {name}", problem, advice, code="options.loss")
    parameters = inspect.signature(code).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    try:
        hints = get_type_hints(code, include_extras=True) if names else {}
    except Exception as error:  # whatever evaluating annotations of the package raises
        problem = f"its annotations cannot be resolved: {error}"
        advice = "import what they name outside of TYPE_CHECKING"
        raise UsageError(f"--loss {name}", problem, advice, code="options.loss") from error
    fields: dict[Any, list[str]] = {PerToken: [], PerRow: []}
    for parameter in names:
        if (hint := hints.get(parameter)) not in fields:
            problem = f"expected {parameter} to be a runner.PerToken or runner.PerRow, found {hint}"
            raise UsageError(f"--loss {name}", problem, "docs/own-data.md shows one", code="options.loss")
        fields[hint].append(parameter)
    return Loss(function, RowForm(per_token=tuple(fields[PerToken]), per_row=tuple(fields[PerRow])), is_own=True)


def _built_in(options: LossOptions) -> Loss | None:
    """Return cross-entropy with smoothed labels, a z-loss and weights of tokens; None: with none of them."""
    smoothing, z_loss, field = options.label_smoothing, options.z_loss, options.token_weights
    if not smoothing and not z_loss and field is None:
        return None

    def tokens(
        logits: torch.Tensor, labels: torch.Tensor, **fields: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        logits, labels = logits.flatten(0, 1), labels.flatten()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = nn.functional.cross_entropy(
            logits, labels, reduction="none", ignore_index=IGNORED, label_smoothing=smoothing
        )
        counts = (labels != IGNORED).to(losses.dtype)
        if field is not None:
            counts = counts * fields[field].flatten()
        if z_loss:
            losses = losses + z_loss * logits.logsumexp(-1).square()
        return (losses * counts).sum(), counts.sum(dtype=torch.float64)

    return Loss(tokens, RowForm(per_token=() if field is None else (field,)))
