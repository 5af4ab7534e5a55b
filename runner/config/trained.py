"""Which parameters a run trains: all, those of --train-only, or adapters. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from manifests.errors import UsageError
from manifests.models import ModelShape
from manifests.models.adapters import ALL_LINEAR, Target, adapter_sizes, is_adapter, names_of
from manifests.models.mtp import MtpLayers
from manifests.models.trainable import generic_entry
from runner.config.flags import TrainOptions

Trains = Callable[[str], bool]  # of a parameter, by its FQN


def trained_by(options: TrainOptions, ties: Iterable[Collection[str]]) -> Trains | None:
    """Return whether a run trains a parameter; None: it trains all. Tied parameters are trained if any of them is."""
    if options.lora is not None:
        return is_adapter
    if not options.train_only:
        return None
    patterns = [re.compile(pattern) for pattern in options.train_only]
    tied = {fqn: group for group in ties for fqn in group}
    return lambda fqn: any(pattern.search(name) for pattern in patterns for name in tied.get(fqn, (fqn,)))


def ties_in_training(shape: ModelShape) -> tuple[tuple[str, ...], ...]:
    """Return the FQNs of what is tied in a run: what files tie, and the model with the copies in its MTP layers."""
    entry = generic_entry(shape.architecture)
    mtp = None if entry is None else MtpLayers.find(entry, shape)
    if entry is None or mtp is None:
        return shape.ties
    copies = mtp.ties(entry, (shape.modules,))
    return (*shape.ties, *(tuple(member.fqn for member in group.members) for group in copies))


def trained_params(options: TrainOptions, shape: ModelShape) -> Mapping[str, int]:
    """Return the numbers of parameters that a run trains, by FQN."""
    if options.lora is not None:
        lora = options.lora
        return dict(adapter_sizes(shape, lora.target, lora.rank, has_experts=lora.experts))
    trains = trained_by(options, ties_in_training(shape)) or (lambda fqn: True)
    return {fqn: shape.count_params(fqn) for fqn in shape.tensors if trains(fqn)}


def check_trained(options: TrainOptions, shape: ModelShape) -> None:
    """Check that a run of a model of this shape trains something."""
    if not (options.lora or options.train_only) or any(trained_params(options, shape).values()):
        return
    if options.lora is not None:
        raise no_adapters(options.lora.target, shape.architecture)
    raise UsageError(
        f"--train-only {options.train_only[0]}",
        f"matches no parameter of this {shape.architecture}",
        "it is a regular expression that is searched in names such as model.layers.0.mlp.up_proj.weight",
        code="options.trains-nothing",
    )


def no_adapters(target: Target, architecture: str) -> UsageError:
    names = names_of(target)
    return UsageError(
        f"--lora-target {names if isinstance(names, str) else ','.join(names)}",
        f"matches no linear module of this {architecture}",
        f"name the ends of modules, such as q_proj,v_proj, or use {ALL_LINEAR}; experts in one tensor need "
        "--lora-experts, and neither the head nor Mamba's out_proj, x_proj and dt_proj can have an adapter",
        code="options.trains-nothing",
    )
