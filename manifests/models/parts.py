"""What each rank has of a model's tensors, with tensor, expert and data parallelism."""

from __future__ import annotations

from manifests.models.shape import ModelShape, is_expert, module_of
from manifests.models.training import Training

# Matrices that every tensor-parallel rank has whole, by the end of their names: routers and projections to latents.
_WHOLE = (".gate.weight", ".router.weight", ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight")


def sizes_of(shape: ModelShape, training: Training) -> dict[str, dict[str, int]]:
    """Return the parameters of each tensor that a tensor-parallel and expert-parallel rank has, by module."""

    def on_rank(fqn: str) -> int:
        if _is_distributed(fqn, training):
            return shape.count_params(fqn) // training.expert  # on average, of experts in a tensor each
        return shape.count_params(fqn) // (training.tensor if is_divided(fqn, shape) else 1)

    sizes = {module: {fqn: on_rank(fqn) for fqn in fqns} for module, fqns in shape.by_module().items()}
    for fqn, count in training.adapters.items():
        module = module_of(fqn, sizes)
        assert module is not None, fqn
        sizes[module][fqn] = count
    return sizes


def is_divided(fqn: str, shape: ModelShape) -> bool:
    """Return whether tensor-parallel ranks share a tensor."""
    return len(shape.tensors[fqn]) > 1 and not fqn.endswith(_WHOLE) and not fqn.endswith(shape.whole_suffixes)


def is_shared(fqn: str, shape: ModelShape, training: Training) -> bool:
    """Return whether a rank has a part of a tensor, or of a layer's experts."""
    return _is_distributed(fqn, training) or (training.tensor > 1 and is_divided(fqn, shape))


def shards_of(fqn: str, training: Training) -> int:
    """Return the number of ranks over which FSDP shards what a rank has of a tensor."""
    return training.expert_shard if _is_distributed(fqn, training) else training.shard


def _is_distributed(fqn: str, training: Training) -> bool:
    return training.expert > 1 and is_expert(fqn) and fqn not in training.adapters
