"""The features that a run combines, what balances its experts, its metrics, and its share of a batch. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from manifests.errors import UsageError
from manifests.models.combinations import Combination, combination_of
from manifests.models.mtp import is_beside
from manifests.models.trainable import NARROW, find_family, generic_entry
from manifests.schedules.rules import default_schedule
from manifests.schema import Manifest
from runner.bundle.packed import Packed
from runner.config.declared import nearest_multiples
from runner.config.flags import TrainOptions, flag_of
from runner.config.loss import BalanceOptions
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions
from runner.pipeline.timetable import Timetable, find_timetable

_LAYER = re.compile(r"\.(\d+)$")  # numbered from the model's number of layers, they are for multi-token prediction


def check_sinks(options: TrainOptions) -> None:
    """Check that the packages of the requested metrics, and of deltas, are installed here."""
    for name, package, extra in (
        ("tensorboard", "tensorboard", "tensorboard"), ("wandb", "wandb", "wandb"), ("publish", "zstandard", "delta"),
    ):  # fmt: skip
        if getattr(options, name) and find_spec(package) is None:
            raise UsageError(
                f"--{name}",
                f"{package} is not installed here",
                f"pip install 'reshard[{extra}]'",
                code="system.missing-package",
            )


def combine(manifest: Manifest, options: TrainOptions, timetable: Timetable, degrees: ParallelDims) -> Combination:
    """Return the combination of these options."""
    sharing = sharing_ranks(manifest, options)
    modules = [module for stage in manifest.stages for module in stage.modules]
    numbers = [int(match[1]) for match in map(_LAYER.search, modules) if match]
    return replace(
        sharing,
        schedule=timetable.name,
        splits_backward=timetable.splits_backward,
        num_tensor=degrees.tensor,
        num_expert=degrees.expert,
        num_context=degrees.context,
        num_shards=degrees.shard,
        num_mtp_layers=sum(number >= manifest.model.num_layers for number in numbers)
        + sum(is_beside(manifest.model.architecture, module) for module in modules),
    )


def schedule_of(manifest: Manifest, options: TrainOptions) -> str:
    """Return the name or file of --schedule, else the manifest's, else the default one for its stages."""
    return options.schedule or manifest.layout.schedule or default_schedule(manifest.placement)


def timetable_of(manifest: Manifest, options: TrainOptions, degrees: ParallelDims) -> Timetable:
    """Return the timetable of a run's schedule, for the microbatches of its batch."""
    number = part_of(options.batch, degrees).num_microbatches
    return find_timetable(schedule_of(manifest, options), manifest.placement, number, options.microbatch_group)


def sharing_ranks(manifest: Manifest, options: TrainOptions) -> Combination:
    """Return what no number of ranks and no checkpoint changes: the architecture, its modules, and flags."""
    architecture = manifest.model.architecture
    return combination_of(
        architecture,
        is_own=manifest.model.description is not None or find_family(architecture) is not None,
        num_tensor=options.degrees.tensor,
        num_expert=options.degrees.expert,
        keeps_documents=options.data.document_mask,
        num_context=options.degrees.context,
        is_compiled=options.compute.is_compiled,
        has_loss_chunks=options.compute.loss_chunk is not None,
        has_own_loss=options.loss.is_own,
        has_adapters=options.lora is not None,
        moves_biases=bool(options.balance.bias_rate),
        is_narrow=any(NARROW in stage.modules for stage in manifest.stages),
    )


def part_of(batch: BatchOptions, degrees: ParallelDims) -> BatchOptions:
    """Return what one rank has of a batch: `share_of`, of which context-parallel ranks have parts of rows."""
    chunks = 2 * degrees.context
    if degrees.context > 1 and batch.seq_len % chunks:
        raise UsageError(
            "--seq-len",
            f"expected a multiple of {chunks} (2 x --cp {degrees.context}), found {batch.seq_len}",
            f"use {nearest_multiples(batch.seq_len, chunks)}",
            code="options.cp-divisor",
        )
    return replace(share_of(batch, degrees.data), seq_len=batch.seq_len // degrees.context)


def share_of(batch: BatchOptions, num_replicas: int) -> BatchOptions:
    """Return the part of one data-parallel replica of a batch."""
    unit = batch.microbatch * num_replicas
    if batch.global_batch % unit:
        raise UsageError(
            "--global-batch",
            f"expected a multiple of {unit} (--microbatch {batch.microbatch} x {num_replicas} data-parallel replicas), "
            f"found {batch.global_batch}",
            f"use {nearest_multiples(batch.global_batch, unit)}",
            code="options.batch-size",
        )
    return BatchOptions(
        global_batch=batch.global_batch // num_replicas, microbatch=batch.microbatch, seq_len=batch.seq_len
    )


_RATE = 0.001  # DeepSeek-V3's report, section 4.2
_BIAS, _LOSS = flag_of("router_bias_rate"), flag_of("router_aux_loss")


def check_balance(launched: Packed, options: TrainOptions, *, is_dtype_final: bool = True) -> None:
    """Check that what is to balance the experts of a model can.

    Families of other packages are left to `runner.training.expert_balance`, which sees their routers.
    """
    architecture, balance = launched.shape.architecture, options.balance
    entry = generic_entry(architecture)
    if entry is None or launched.manifest.model.description is not None:
        return
    has_routers = has_experts(launched.shape.tensors)
    biases = {entry.router_bias} - {""} if has_routers else set[str]()
    if not is_dtype_final or options.compute.dtype != "bf16":
        biases = {bias.replace("bfloat16", "float32") for bias in biases}
    balance.check_routers(architecture, biases, takes_loss=entry.aux_loss and has_routers)


def balance_flags(launched: Packed, options: TrainOptions) -> tuple[str, ...]:
    """Return the flag that moves router biases by DeepSeek-V3's rate, for a run that trains all of new weights."""
    manifest, entry = launched.manifest, generic_entry(launched.shape.architecture)
    is_new = manifest.source.kind == "init" and manifest.training is None and not options.resume.weights_only
    has_biases = entry is not None and entry.router_bias == "float32" and has_experts(launched.shape.tensors)
    trains_part, is_given = options.lora or options.train_only, options.given & {"router_bias_rate", "router_aux_loss"}
    if not is_new or not has_biases or manifest.model.description is not None or trains_part or is_given:
        return ()
    return _BIAS, str(_RATE)


def has_experts(tensors: Iterable[str]) -> bool:
    return any("expert" in name or "moe" in name for name in tensors)


def expert_notes(
    tensors: Iterable[str], balance: BalanceOptions, run: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return notes that nothing balances experts, for a model of these tensors that has some.

    `run` is the record of the run that is resumed, if there is one.
    """
    ended = [
        f"{flag} {launched[name]} of the launch before is not given again: it no longer balances experts"
        for flag, name, value in (
            (_BIAS, "router_bias_rate", balance.bias_rate),
            (_LOSS, "router_aux_loss", balance.aux_loss),
        )
        for launched in _launched_options(run)
        if not value and launched.get(name)
    ]
    if ended or balance.is_on or not has_experts(tensors := tuple(tensors)):
        return tuple(ended)
    note = "experts are not balanced: --router-aux-loss is 0, whatever router_aux_loss_coef of config.json is"
    if any(name.endswith("e_score_correction_bias") for name in tensors):
        note = (
            "experts are not balanced: --router-bias-rate is 0, so e_score_correction_bias of routers does not change"
        )
    return (note,)


def mtp_notes(options: TrainOptions, run: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a note that a run has another weight of MTP layers than the launch before, which no flag says."""
    name, weight = "mtp_loss_weight", options.loss.mtp_weight
    return tuple(
        f"{flag_of(name)} {launched[name]} of the launch before is not given again: it is {weight} now"
        for launched in _launched_options(run)
        if name not in options.given and launched.get(name, weight) != weight
    )


def _launched_options(run: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the options of this launch and of that before it, as far as the record of the run has them."""
    launches = (run or {}).get("launches")
    launches = launches[-2:] if isinstance(launches, list) else ()
    return [
        launch["options"] for launch in launches if isinstance(launch, dict) and isinstance(launch.get("options"), dict)
    ]
