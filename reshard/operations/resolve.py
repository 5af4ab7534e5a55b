"""SOURCE and SPEC become a plan of bytes and a forecast of the training that it is for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from manifests.errors import UsageError
from manifests.invariants import MANIFEST_NAME
from manifests.memory import estimate_memory, memory_of
from manifests.models import ModelShape
from manifests.placement import Placement
from manifests.schedules import Costs, check_schedule, schedule_table, simulate
from manifests.schema import Manifest, TieGroup
from manifests.sizes import parse_size, write_size
from reshard.estimate.costs import costs_of
from reshard.estimate.training_estimate import MOST_PASSES, Assumptions, Forecast, forecast, num_passes
from reshard.layout import Layout, parse_layout
from reshard.layout.balance import balances_memory, unsolved
from reshard.layout.inventory import Inventory, inventory_of_modules
from reshard.layout.model import InFlight, Request
from reshard.layout.options import read_words
from reshard.plans.pack_plan import PackPlan, StagePlan, plan_pack
from reshard.sources.config import find_config, open_config
from reshard.sources.huggingface import CONFIG_NAME
from reshard.sources.open import open_source
from reshard.tensors.checkpoint import Checkpoint

__all__ = ["LaidOut", "LayoutRequest", "PlanResult", "lay_out", "look_ahead", "model_name", "open_model", "plan_source"]

_SOLVED = re.compile(r"\s*(balance:|parameters\b|type:)")  # the spellings that take limit=
_LIMIT = "--memory-limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRequest:
    """A layout as it was asked for; see `parse_layout`. Without a spec, a manifest keeps the layout that it has."""

    spec: str | None
    num_ranks: int | None = None
    strict_megatron: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidOut:
    """A model's tensors on a layout: all that packing them takes."""

    name: str  # of the model, as its source calls it
    checkpoint: Checkpoint
    inventory: Inventory
    costs: Mapping[str, Mapping[str, float]]
    assumed: Assumptions
    plan: PackPlan

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def shape(self) -> ModelShape:
        return self.checkpoint.shape

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Each stage with its rank, modules, parameters and bytes."""
        return self.plan.stages

    @property
    def ties(self) -> tuple[TieGroup, ...]:
        return self.plan.ties


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult(LaidOut):
    """A layout of a model, and an estimate of a training step on it (`forecast`)."""

    forecast: Forecast


def open_model(source: str, drop: frozenset[str] = frozenset()) -> Checkpoint:
    """Open a source, or the config that stands there alone.

    Raises:
        InputError: see `open_source` and `open_config`.
        UsageError: tensors to drop where there are none.
    """
    config = find_config(source)
    if config is None:
        return open_source(source, drop)
    if drop:
        raise UsageError(
            "--drop", f"{source} has no weights to leave behind", "leave --drop out", code="options.unknown-drop"
        )
    return open_config(config)


def model_name(source: str) -> str:
    """Name a model after its folder, or after its config where that has a name of its own."""
    path = Path(source)
    if path.suffix == ".json":
        path = path.resolve().parent if path.name in (CONFIG_NAME, MANIFEST_NAME) else path.with_suffix("")
    return path.name or path.resolve().name


def plan_source(source: str, asked: LayoutRequest, assumed: Assumptions, drop: Collection[str] = ()) -> PlanResult:
    """Open a source, read or solve for the layout, lay the tensors out on it and simulate a step.

    Raises:
        InputError, UsageError: see `open_model` and `lay_out`.
    """
    return look_ahead(lay_out(model_name(source), open_model(source, frozenset(drop)), asked, assumed))


def look_ahead(laid: LaidOut) -> PlanResult:
    """Simulate a step of training."""
    return PlanResult(
        **{field.name: getattr(laid, field.name) for field in fields(LaidOut)},
        forecast=forecast(laid.shape, laid.layout, laid.assumed),
    )


def lay_out(name: str, checkpoint: Checkpoint, asked: LayoutRequest, assumed: Assumptions) -> LaidOut:
    """Read or solve for the layout and lay the tensors out on it. Nothing is simulated but for a memory limit.

    A memory limit is the solver's too, as if the spec said `limit=`; a limit in the spec is assumed here.

    Raises:
        InputError: a layout that is wrong or that does not fit, or times of another model.
        UsageError: two limits, a schedule that cannot run on the layout, or what a layout needs without one.
    """
    shape = checkpoint.shape
    asked, assumed = _agree_on_limit(asked, assumed)
    inventory = inventory_of_modules(shape.modules, shape.num_layers, shape.architecture)
    sizes = {fqn: tensor.nbytes for fqn, tensor in checkpoint.tensors.items()}
    costs = costs_of(shape, seq_len=assumed.seq_len, nbytes=sizes, measured=assumed.measured)
    if asked.spec is None:
        layout = _kept(checkpoint.manifest, asked)
    elif _SOLVED.match(asked.spec):
        layout = _solve(asked, shape, inventory, costs, assumed)
    else:
        layout = _read(asked, inventory, costs)
    placement = layout.placement
    schedule = check_schedule(assumed.schedule_for(layout), placement, assumed.microbatches_for(placement))
    if assumed.schedule:
        layout = replace(layout, schedule=schedule)
    return LaidOut(
        name=name,
        checkpoint=checkpoint,
        inventory=inventory,
        costs=costs,
        assumed=assumed,
        plan=plan_pack(checkpoint, layout),
    )


def _agree_on_limit(asked: LayoutRequest, assumed: Assumptions) -> tuple[LayoutRequest, Assumptions]:
    if asked.spec is None or not _SOLVED.match(asked.spec):
        return asked, assumed
    said = next((word.value for word in read_words(asked.spec) if word.key == "limit"), None)
    if said is None:
        if assumed.memory_limit is None:
            return asked, assumed
        return replace(asked, spec=f"{asked.spec},limit={write_size(assumed.memory_limit)}"), assumed
    if assumed.memory_limit is not None:
        raise UsageError(
            _LIMIT, f"the layout says limit={said} itself", "leave one of the two out", code="options.conflict"
        )
    return asked, replace(assumed, memory_limit=parse_size(said))  # what is no size, the layout's reader refuses


def _kept(manifest: Manifest | None, asked: LayoutRequest) -> Layout:
    """Give the layout of a manifest, seen that nothing is asked of another."""
    if manifest is None:
        problem = "a source that is no manifest has no layout to keep"
        raise UsageError("--layout", problem, "say one, such as pp=2", code="options.missing-layout")
    problem = "goes with --layout, and without one a manifest keeps the layout that it has"
    if asked.num_ranks is not None:
        raise UsageError(
            "--pp", problem, f"say --layout pp={asked.num_ranks}, or leave --pp out", code="options.needs-layout"
        )
    if asked.strict_megatron:
        raise UsageError(
            "--strict-megatron", problem, "give a --layout, or leave the flag out", code="options.needs-layout"
        )
    return Layout(
        spec=manifest.layout.spec,
        stages=tuple(stage.modules for stage in manifest.stages),
        placement=manifest.placement,
        schedule=manifest.layout.schedule,
    )


def _read(
    asked: LayoutRequest,
    inventory: Inventory,
    costs: Mapping[str, Mapping[str, float]],
    in_flight: InFlight | None = None,
) -> Layout:
    assert asked.spec is not None
    return parse_layout(
        asked.spec,
        inventory,
        num_ranks=asked.num_ranks,
        strict_megatron=asked.strict_megatron,
        costs=costs,
        in_flight=in_flight,
    )


def _solve(
    asked: LayoutRequest,
    shape: ModelShape,
    inventory: Inventory,
    costs: Mapping[str, Mapping[str, float]],
    assumed: Assumptions,
) -> Layout:
    """Solve for a layout whose ranks keep within the memory limit, if there is one.

    The schedule says how many microbatches each stage has in flight, which a limit must know before there
    are stages; it depends on their number and places alone.
    """
    assert asked.spec is not None
    if assumed.memory_limit is None and not balances_memory(asked.spec):
        return _read(asked, inventory, costs)
    placed = unsolved(Request(spec=asked.spec, inventory=inventory, num_ranks=asked.num_ranks))
    placement, training = placed.placement, assumed.training
    _check_length(placement, assumed.microbatches_for(placement))
    table = schedule_table(assumed.schedule_for(placed), placement, assumed.microbatches_for(placement))
    ones = [1.0] * placement.num_stages
    in_flight = simulate(table, Costs.of(ones, ones)).peak_by_stage
    without, with_one = memory_of(shape, training, 0), memory_of(shape, training, 1)
    wires = [rank.wires for rank in estimate_memory(shape, placed.stages, table, training).ranks]
    return _read(
        asked,
        inventory,
        {**costs, "memory": memory_of(shape, training, max(in_flight))},
        InFlight(
            microbatches=in_flight,
            activations={module: with_one[module] - without[module] for module in shape.modules},
            reserved=max(wires),
        ),
    )


def _check_length(placement: Placement, num_microbatches: int) -> None:
    if num_passes(placement, num_microbatches) > MOST_PASSES:
        most = MOST_PASSES // num_passes(placement, 1)
        raise UsageError(
            "--microbatches",
            f"memory depends on the schedule, and a step of {num_microbatches} microbatches on {placement.num_stages} "
            "stages is too long to simulate",
            f"take {most} microbatches or fewer, or another layout than one that memory decides",
            code="options.too-many-microbatches",
        )
