"""A loss of your own: direct preference optimization (DPO) over pairs of rows, the chosen answer and the rejected one.

In the pyproject.toml of the package that has this module:

    [project.entry-points."runner.losses"]
    preference = "preference_loss:preference"

Each row of the data has the prompt and an answer as `input_ids`, a `loss_mask` of 1 for the answer, and `reference`,
the sum of the answer's log-probabilities under the model before training:

    runner launch ./packed -- --data pairs.jsonl --tokenized --loss preference --microbatch 2

A loss returns a sum and a count: the run divides the sums of all microbatches and ranks by all counts.
"""

import torch
from torch.nn.functional import cross_entropy, logsigmoid

import runner

BETA = 0.1


def preference(
    logits: torch.Tensor, labels: torch.Tensor, *, reference: runner.PerRow
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the loss over pairs, and how many pairs there are.

    Shapes: logits (B, L, V); labels (B, L), the next tokens, or -100 where they do not count; reference (B,).
    """
    losses = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=-100)
    gains = -losses.view(labels.shape).sum(1) - reference
    is_pair = (labels != -100).any(1)[0::2]  # a batch of an evaluation may be filled up with empty rows
    return -(logsigmoid(BETA * (gains[0::2] - gains[1::2])) * is_pair).sum(), is_pair.sum()


preference.needs_rows = True  # the sum over a row goes through a function, so --cp may not split it
preference.num_together = 2  # rows of a microbatch: pairs are not shuffled, and --microbatch is even
