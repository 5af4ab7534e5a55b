"""What attention keeps for its backward where it gets a mask: with context parallelism, or documents kept apart.

# Note [Masks]
With --cp or --document-mask, attention gets a mask of a byte for each query and key, which every layer keeps in the
compute dtype until its backward. transformers then repeats keys and values for all heads of queries. With --cp, they
are those of whole rows, of all heads, or of a part of the heads, whose output is kept twice, by heads and by parts of
rows (ulysses). Recomputed layers need the mask of their stage. Counted is one kind of mask: models with windows have
two. Source: `sdpa_attention_forward` of transformers 5.23; `convert_boolean_attn_mask` of torch 2.13.
"""

from __future__ import annotations

from manifests.models.shape import Work
from manifests.models.training import Training


def masked_elements(work: Work, training: Training) -> int:
    """Return the elements for each token that attention keeps besides with a mask; see Note [Masks]."""
    if not training.has_masks or not work.flops_per_key:
        return 0
    repeated = work.flops_per_key // 2  # the keys and values of a token, for all heads
    repeated = repeated * 3 // 2 if training.exchanges_heads else repeated * training.context
    return (repeated - work.keys) // training.tensor + training.keys_per_query
