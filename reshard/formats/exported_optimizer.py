"""The options of AdamW that an export writes for another trainer."""

from __future__ import annotations

from manifests.errors import CheckpointError, Parameter
from manifests.schedules.learning_rate import rate_at
from manifests.schema import OptimizerState, ParameterGroup, TrainingState
from reshard.tensors.checkpoint import Checkpoint


def refuse_state(where: str, problem: str, *, code: str) -> CheckpointError:
    """Return the refusal of optimizer state that another trainer cannot have."""
    hint = f"{Parameter('weights_only', True)} exports the weights without it"
    return CheckpointError(where, problem, hint, code=code)


def adamw_options(checkpoint: Checkpoint, trained: TrainingState, optimizer: OptimizerState) -> dict[str, object]:
    """Return the options of the parameter group, at the learning rate of the next step.

    Raises:
        CheckpointError: there is no learning rate, or another optimizer than AdamW with one group.
    """
    rate, where = trained.learning_rate, f"{checkpoint.location}: training"
    if rate is None:
        problem = "has no learning rate, which an optimizer of torch must have"
        raise refuse_state(where, problem, code="checkpoint.no-learning-rate")
    if len(optimizer.groups) > 1 or optimizer.name != "AdamW":
        problem = f"expected AdamW with one parameter group, found {optimizer.name} with {len(optimizer.groups)}"
        raise refuse_state(where, problem, code="checkpoint.other-optimizer")
    group: ParameterGroup = optimizer.groups[0]
    return {
        "lr": rate_at(trained.step, rate), "betas": (group.beta1, group.beta2), "eps": group.eps,
        "weight_decay": group.weight_decay, "initial_lr": rate.peak,
    }  # fmt: skip
