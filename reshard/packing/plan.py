"""From SOURCE and SPEC to a plan of byte ranges and an estimate of a training step."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.brief import brief
from manifests.command.interpreter import collector_paused
from manifests.command.sizes import parse_size, write_size
from manifests.errors import Parameter, UsageError, as_texts, check_count
from manifests.invariants import MANIFEST_NAME
from manifests.models import ModelShape
from manifests.models.config import CONFIG_NAME, MAX_LAYERS
from manifests.module_times import ModuleTime
from manifests.placement import Placement
from manifests.schedules.csvtext import is_schedule_file
from manifests.schedules.liveness import in_flight
from manifests.schema import Manifest, TieGroup
from reshard.estimate.assumptions import MOST_PASSES, Assumptions, check_assumptions, num_passes
from reshard.estimate.costs import costs_of
from reshard.formats.open import config_of, find_config, links_of, open_config, open_with_model_file
from reshard.formatting import shorten
from reshard.layouts import StageLayout, parse_layout
from reshard.layouts.balance import balances, unsolved
from reshard.layouts.degrees import read_words
from reshard.layouts.model import InFlight, Inventory, Request, inventory_of_layers, inventory_of_modules
from reshard.plans.pack_plan import PackPlan, Sharding, StagePlan, plan_pack
from reshard.tensors.checkpoint import Checkpoint

if TYPE_CHECKING:
    from reshard.estimate.training_estimate import Forecast

_SOLVED = re.compile(r"\s*balance\s*:")  # the spelling that takes limit=


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRequest:
    """A requested layout; see `parse_layout`. Without a spec, a manifest keeps its own layout."""

    spec: str | None = None
    num_ranks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, str | None):
            problem = f"expected text, found {shorten(repr(self.spec))}"
            raise UsageError(Parameter("layout"), problem, "pass one such as 'pp=2'", code="options.invalid-value")
        if self.num_ranks is not None:  # JSON has no integers of NumPy
            object.__setattr__(self, "num_ranks", check_count(Parameter("pp"), self.num_ranks))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedModel:
    """A model's tensors on a layout: everything that packing requires."""

    name: str  # of the model's folder or config
    checkpoint: Checkpoint
    inventory: Inventory
    assumed: Assumptions
    plan: PackPlan

    @property
    def layout(self) -> StageLayout:
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

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """The source's files that are symbolic links out of its folder, with their targets."""
        return tuple(links_of(self.checkpoint))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanResult(StagedModel):
    """A layout of a model, and an estimate of a training step on it (`forecast`)."""

    forecast: Forecast

    __repr__ = brief


def open_model(source: str, drop: frozenset[str], model: Path | None) -> Checkpoint:
    """Open a source, which the file `model` may describe, or a config without weights."""
    config = find_config(source)
    if config is None:
        return open_with_model_file(source, drop, model)
    if model is not None:
        problem = f"{source} is a config without weights, whose sizes no description says"
        raise UsageError(Parameter("model"), problem, "give the folder with its safetensors", code="options.conflict")
    if drop:
        problem = f"{source} is a config without weights"
        raise UsageError(Parameter("drop"), problem, "leave it out", code="options.unknown-drop")
    return open_config(config)


def model_name(source: str) -> str:
    """Return a model's name: that of its folder, or of its config file if that is not called config.json."""
    path = Path(source)
    if path.suffix == ".json":
        path = path.resolve().parent if path.name in (CONFIG_NAME, MANIFEST_NAME) else path.with_suffix("")
    return path.name or path.resolve().name


def plan(
    source: str | Path,
    layout: str | None = None,
    *,
    pp: int | None = None,
    drop: Collection[str] = (),
    model: str | Path | None = None,
    assumed: Assumptions | None = None,
) -> PlanResult:
    """Plan the stages of a model and estimate a training step on them, from headers.

    Of a tied weight that files store twice, at most 3 MiB of each copy are read as well: they are two weights if these
    differ.

    `source` is a Hugging Face folder, a manifest, `org/name@revision` on the hub, an object-store URL, or a
    config.json alone. `layout` is a SPEC as in docs/layouts.md (`pp=4`, a Megatron string, a file); without one, a
    manifest keeps its own. `pp` is the number of pipeline ranks, if `layout` does not say it. `drop` lists tensors to
    leave out; `model` is a TOML file that describes a model of an unknown architecture (docs/own-models.md).

    Units: sizes in bytes, FLOPs per token; times in seconds if `assumed.measured` has them, otherwise in FLOPs.
    Raises:
        SourceError, ModelError, ShardError, ManifestError: the source is incomplete, damaged or unsupported.
        StoreError: the source does not exist, or cannot be reached.
        LayoutError: the layout is invalid, or does not cover the model.
        ScheduleError: the schedule does not support the layout.
        UsageError: arguments conflict, or a layout is required (`options.missing-layout`).

    Example:
        >>> planned = reshard.plan("model", "pp=2", assumed=reshard.Assumptions(seq_len=128))
        >>> [stage.modules[0] for stage in planned.stages]
        ['model.embed_tokens', 'model.layers.2']
        >>> planned.forecast.schedule
        '1F1B'
    """
    assumed = assumed or Assumptions()
    check_assumptions(assumed)
    checkpoint = open_model(str(source), frozenset(as_texts(drop)), None if model is None else Path(model))
    request = LayoutRequest(spec=layout, num_ranks=pp)
    if assumed.run is not None:
        from reshard.estimate.module_seconds import with_times_of_run  # most plans are of none

        if assumed.measured is not None:
            problem = "conflicts with the times of a run, which are used"
            raise UsageError(Parameter("assumed.measured"), problem, "remove one of them", code="options.conflict")
        assumed = with_times_of_run(checkpoint.shape, config_of(checkpoint), assumed)
    planned = estimate_step(lay_out(model_name(str(source)), checkpoint, request, assumed))
    from reshard.packing.launchable import check_launch  # nor does it train

    check_launch(checkpoint, planned.layout, planned.forecast)
    return planned


def estimate_step(staged: StagedModel) -> PlanResult:
    """Estimate the time and memory of a training step by simulating its schedule."""
    from reshard.estimate.training_estimate import forecast  # a pack estimates nothing

    return PlanResult(
        **{field.name: getattr(staged, field.name) for field in fields(StagedModel)},
        forecast=forecast(staged.shape, staged.layout, staged.assumed),
    )


@collector_paused()
def lay_out(
    name: str,
    checkpoint: Checkpoint,
    request: LayoutRequest,
    assumed: Assumptions,
    sharding: Sharding | None = None,
) -> StagedModel:
    """Read or solve for the layout and lay the tensors out on it. A step is only simulated for a memory limit.

    `assumed.memory_limit` also limits the solver, as `limit=` in the spec does; a limit in the spec is assumed too.
    """
    shape = checkpoint.shape
    request, assumed = _agree_on_limit(request, assumed)
    inventory = inventory_of_modules(shape.modules, shape.num_layers)
    sizes = {fqn: tensor.nbytes for fqn, tensor in checkpoint.tensors.items()}
    costs = costs_of(shape, seq_len=assumed.seq_len, nbytes=sizes, measured=assumed.measured)
    if request.spec is None:
        layout = _layout_of_manifest(checkpoint.manifest, request)
    elif is_solved(request.spec):
        layout = _solve(request, shape, inventory, costs, assumed)
    else:
        layout = _read(request, inventory, costs)
    schedule = assumed.check_schedule(layout)
    if assumed.schedule and not is_schedule_file(schedule):
        layout = replace(layout, schedule=schedule)
    return StagedModel(
        name=name,
        checkpoint=checkpoint,
        inventory=inventory,
        assumed=assumed,
        plan=plan_pack(checkpoint, layout, sharding or Sharding()),
    )


def is_solved(spec: str | None) -> bool:
    return spec is not None and _SOLVED.match(spec) is not None


def layout(
    spec: str,
    *,
    layers: int,
    mtp: int = 0,
    pp: int | None = None,
    measured: Mapping[str, ModuleTime] | None = None,
) -> StageLayout:
    """Lay out the modules of a model of so many decoder layers, which a layout names, without the model.

    `spec` and `pp` are those of `plan`; `mtp` is the number of multi-token prediction layers,
    which follow the decoders. `measured` has the time of each module, for `balance:time`.

    Units: `measured` in seconds.
    Raises:
        LayoutError: the layout is invalid, or does not cover the modules.
        UsageError: arguments conflict.

    Example:
        >>> plan = reshard.layout("pp=2", layers=4)
        >>> plan.stages[1][-1], plan.placement.num_ranks
        ('lm_head', 2)
    """
    layers = check_count(Parameter("layers"), layers, most=MAX_LAYERS)
    mtp = check_count(Parameter("mtp"), mtp, least=0, most=MAX_LAYERS)
    costs = {"time": {module: time.total for module, time in measured.items()}} if measured else {}
    lone = _read(LayoutRequest(spec=spec, num_ranks=pp), inventory_of_layers(layers, mtp), costs)
    if measured and not balances(spec, "time"):
        problem, hint = f"{shorten(spec)} does not balance by time", "leave it out, or use balance:time"
        raise UsageError(Parameter("measured"), problem, hint, code="options.conflict")
    return lone


def _agree_on_limit(request: LayoutRequest, assumed: Assumptions) -> tuple[LayoutRequest, Assumptions]:
    if request.spec is None or not is_solved(request.spec):
        return request, assumed
    limit = next((word.value for word in read_words(request.spec) if word.key == "limit"), None)
    if limit is None:
        if assumed.memory_limit is None:
            return request, assumed
        return replace(request, spec=f"{request.spec},limit={write_size(assumed.memory_limit)}"), assumed
    if assumed.memory_limit is not None:
        raise UsageError(
            Parameter("assumed.memory_limit"),
            f"conflicts with limit={limit} of the layout",
            "leave one of the two out",
            code="options.conflict",
        )
    return request, replace(assumed, memory_limit=parse_size(limit))  # the layout's reader refuses what is not a size


def _layout_of_manifest(manifest: Manifest | None, request: LayoutRequest) -> StageLayout:
    """Return the layout of a manifest, which no option may change."""
    if manifest is None:
        problem = "is required: the source is not a manifest, which would have one"
        raise UsageError(Parameter("layout"), problem, "pass one, such as pp=2", code="options.missing-layout")
    problem = f"requires {Parameter('layout')}; without one, a manifest keeps its own layout"
    if request.num_ranks is not None:
        hint = f"use {Parameter('layout', f'pp={request.num_ranks}')}, or leave {Parameter('pp')} out"
        raise UsageError(Parameter("pp"), problem, hint, code="options.needs-layout")
    return StageLayout(
        spec=manifest.layout.spec,
        stages=tuple(stage.modules for stage in manifest.stages),
        placement=manifest.placement,
        schedule=manifest.layout.schedule,
    )


def _read(
    request: LayoutRequest,
    inventory: Inventory,
    costs: Mapping[str, Mapping[str, float]],
    in_flight: InFlight | None = None,
) -> StageLayout:
    assert request.spec is not None
    return parse_layout(
        request.spec,
        inventory,
        num_ranks=request.num_ranks,
        costs=costs,
        in_flight=in_flight,
    )


def _solve(
    request: LayoutRequest,
    shape: ModelShape,
    inventory: Inventory,
    costs: Mapping[str, Mapping[str, float]],
    assumed: Assumptions,
) -> StageLayout:
    """Solve for a layout whose ranks stay within the memory limit, if there is one."""
    assert request.spec is not None
    if assumed.memory_limit is None and not balances(request.spec, "memory"):
        return _read(request, inventory, costs)

    placed = unsolved(Request(spec=request.spec, inventory=inventory, num_ranks=request.num_ranks))
    memory, in_flight = memory_costs(shape, placed, assumed)
    return _read(request, inventory, {**costs, "memory": memory}, in_flight)


def memory_costs(shape: ModelShape, placed: StageLayout, assumed: Assumptions) -> tuple[Mapping[str, float], InFlight]:
    """Return the most bytes of each module, and how many microbatches each stage has in flight.

    The schedule decides the latter by the number and the placement of the stages alone, so it is known before the
    modules of the stages are.
    """
    from manifests.models.memory import estimate_memory, memory_of  # which a pack without a memory limit does without
    from reshard.estimate.training_estimate import training_of

    placement, training = placed.placement, training_of(assumed, shape)
    num_microbatches = assumed.microbatches_for(placement)
    _check_length(placement, num_microbatches)
    table = assumed.table_for(placed)
    microbatches = in_flight(table)
    without, with_one = memory_of(shape, training, 0), memory_of(shape, training, 1)
    ranks = estimate_memory(shape, placed.stages, table, training).ranks
    return memory_of(shape, training, max(microbatches)), InFlight(
        microbatches=microbatches,
        activations={module: with_one[module] - without[module] for module in shape.modules},
        reserved=max(rank.receive_buffers + rank.temporary for rank in ranks),
    )


def _check_length(placement: Placement, num_microbatches: int) -> None:
    if num_passes(placement, num_microbatches) > MOST_PASSES:
        most = MOST_PASSES // num_passes(placement, 1)
        raise UsageError(
            Parameter("assumed.num_microbatches"),
            f"a step of {num_microbatches} microbatches on {placement.num_stages} stages is too long to simulate, "
            "which balancing by memory requires",
            f"use at most {most} microbatches, or a layout that does not depend on memory",
            code="options.too-many-microbatches",
        )
