"""What `common.pt` has of Megatron's distributed optimizer: its options, count of steps and schedule.

Source: megatron-core 0.16.1, optimizer/distrib_optimizer.py, optimizer/optimizer.py and optimizer_param_scheduler.py;
Megatron-LM, megatron/training/checkpointing.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from manifests.errors import CheckpointError
from manifests.schema import MOMENTS, OptimizerState, TrainingState
from reshard.operations.exported_optimizer import WEIGHTS_ALONE, adamw_options
from reshard.sources.megatron_training import OPTIMIZER, RESHARDABLE
from reshard.tensors.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# Note [Groups of Megatron]: a loader finds each of its trainer's groups by the factors of its weight decay and learning
# rate, and by whether its parameters are of experts. Its own rule says which parameters are in which; it fails if a
# group is not there, and does not look at others.
_FACTORS = (1.0, 0.0)
_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "sqrt": "WSD"}


def optimizer_of(checkpoint: Checkpoint, trained: TrainingState, optimizer: OptimizerState) -> dict[str, object]:
    """Return the entries of `common.pt`, for one optimizer of all parameters. See Note [Groups of Megatron].

    With expert parallelism, Megatron has an optimizer of the experts' parameters alone, and its loader expects two.

    Raises:
        CheckpointError: there is no learning rate, or another optimizer than AdamW with one weight decay, of all
            parameters or of those that are not 1-D.
    """
    options = adamw_options(checkpoint, trained, replace(optimizer, groups=_decayed(checkpoint, optimizer)))
    rate, decay = trained.learning_rate, options["weight_decay"]
    assert rate is not None, "adamw_options checked it"
    common = {
        **options, "step": trained.step, "bias_correction": True, "lr_mult": 1.0, "is_decoupled_lr": False,
        "is_expert_parallel": False, "default_config": True, "max_lr": rate.peak, "min_lr": rate.minimum,
    }  # fmt: skip
    groups = [{**common, "weight_decay": decay if factor else 0.0, "wd_mult": factor} for factor in _FACTORS]
    state = {OPTIMIZER: {"param_groups": groups}, "param_state_sharding_type": RESHARDABLE}
    each = trained.batch.global_batch if trained.batch else 1
    schedule: dict[str, Any] = {
        "max_lr": rate.peak, "min_lr": rate.minimum, "lr_decay_style": _STYLES[rate.decay],
        "lr_warmup_steps": rate.warmup_steps * each, "num_steps": samples_of(trained),
        "lr_decay_steps": max(rate.decay_steps, rate.warmup_steps + 1) * each,
        "start_wd": decay, "end_wd": decay, "wd_incr_steps": 0, "wd_incr_style": "constant",
    }  # fmt: skip
    return {OPTIMIZER: state, "opt_param_scheduler": schedule}


def optimizer_metadata() -> dict[str, object]:
    """Return what the metadata of a checkpoint's content says of the optimizer."""
    return {
        "distrib_optim_sharding_type": RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip


def samples_of(trained: TrainingState) -> int:
    """Return the sequences that were trained on, which Megatron counts where the runner counts steps."""
    return trained.step * (trained.batch.global_batch if trained.batch else 1)


def _decayed(checkpoint: Checkpoint, optimizer: OptimizerState) -> tuple[Any, ...]:
    """Return the groups without the one of 1-D parameters that have no weight decay."""
    lines = tuple(sorted(fqn for fqn, at in checkpoint.moments[MOMENTS[0]].items() if len(at.shape) == 1))
    rest = tuple(group for group in optimizer.groups if group.fqns != lines)
    for group in optimizer.groups:
        if group.fqns == lines and (len(rest) != 1 or group != replace(rest[0], weight_decay=0.0, fqns=lines)):
            problem = "expected 1-D parameters without weight decay, and otherwise one set of options"
            where = f"{checkpoint.location}: training"
            raise CheckpointError(where, problem, WEIGHTS_ALONE, code="checkpoint.other-optimizer")
    if lines and len(rest) == len(optimizer.groups) and rest[0].weight_decay:
        logger.warning(
            "%s: 1-D parameters had a weight decay of %g; in Megatron they have none by default",
            checkpoint.location,
            rest[0].weight_decay,
        )
    return rest
