"""The learning-rate schedule: a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from manifests.schema import Decay, LearningRate

# The factor of the learning rate after a fraction of the decay; as in torchtitan's and transformers' WSD schedules.
_LEFT: Mapping[Decay, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
}


def rate_at(step: int, rate: LearningRate) -> float:
    """Return the learning rate of a step, the first being 0."""
    if step < rate.warmup_steps:
        return rate.peak * (step + 1) / rate.warmup_steps
    begin = rate.warmup_steps + rate.stable_steps
    if rate.decay == "constant" or step < begin:
        return rate.peak
    done = min(1.0, (step - begin) / (rate.decay_steps - begin))
    return rate.minimum + (rate.peak - rate.minimum) * _LEFT[rate.decay](done)
