"""Search for the fastest layouts of a model on a number of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from manifests.command.interpreter import collector_paused
from manifests.errors import Parameter, UsageError, check_count
from manifests.models import ConfigReader, ModelShape
from manifests.models.config import CONFIG_NAME
from manifests.models.trainable import check_fields, check_positions, check_trainable, find_family, generic_entry
from manifests.schedules.rules import V_SCHEDULES
from reshard.estimate.assumptions import Assumptions, Policy
from reshard.estimate.costs import times_of
from reshard.formats.open import config_of
from reshard.layouts.model import inventory_of_modules
from reshard.packing.plan import model_name, open_model
from reshard.search.candidates import LOOP, MARGIN, RECOMPUTE, Candidate, SearchRequest, Space
from reshard.search.cost_model import CandidateForecast, CostModel

NUM_SHOWN = 5
_DEGREES = {
    "pipeline": "--pp", "tensor": "--tp", "expert": "--ep", "replicate": "--dp-replicate", "shard": "--dp-shard",
    "context": "--cp",
}  # fmt: skip
_LEAST_SIMULATED, _MOST_TENSORS = 11, 1_000_000  # of all simulated candidates together
_MOST_TRIED = 3  # candidates with the same degrees
_NEAR = 1.02  # times as slow, by the closed form, as one with the same degrees: not simulated
_POLICIES: tuple[Policy, ...] = ("mixed", "bf16")  # bf16 optimizer state only where mixed precision does not fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A candidate and its forecast."""

    candidate: Candidate
    forecast: CandidateForecast

    @property
    def order(self) -> tuple[float, int, int]:
        """Order by time; of equals, those that recompute less, then those with less memory."""
        recompute = self.candidate.recompute
        rank = RECOMPUTE.index(recompute) if recompute in RECOMPUTE else 1
        return float(f"{self.forecast.step_s:.3g}"), rank, self.forecast.memory


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The fastest layouts, simulated, each with other degrees than those before it, and what excludes the others.

    `choices` has all candidates, with forecasts in closed form; `drop` the modules that the pack leaves out.
    """

    source: str
    name: str
    shape: ModelShape
    request: SearchRequest
    policy: Policy
    best: tuple[Choice, ...]
    choices: tuple[Choice, ...]
    state_nbytes: int  # weights, gradients and optimizer state of the model, each once
    refusals: tuple[str, ...]
    drop: tuple[str, ...]
    is_quantized: bool
    has_optimizer_state: bool
    model: Path | None
    untied: tuple[tuple[str, ...], ...]  # what config.json ties, of different values

    @property
    def limit(self) -> int:
        """The memory that a plan may use, in bytes."""
        return int(MARGIN * self.request.memory_limit)


@collector_paused()
def find_layouts(
    source: str | Path, request: SearchRequest, *, drop: Collection[str] = (), model: str | Path | None = None
) -> SearchResult:
    """Find the layouts, schedules and degrees with which GPUs train a model fastest, within their memory.

    `source`, `drop` and `model` are those of `reshard.plan`.
    """
    _check(request)
    checkpoint = open_model(str(source), frozenset(drop), None if model is None else Path(model))
    config = config_of(checkpoint)
    shape, is_described = checkpoint.shape, checkpoint.description is not None
    check_trainable(shape.architecture, is_described=is_described)
    if not is_described and (entry := generic_entry(shape.architecture)) is not None:
        check_fields(entry, ConfigReader(config, CONFIG_NAME))
    check_positions(shape.architecture, ConfigReader(config, CONFIG_NAME), request.seq_len)
    # Such as MTP layers. Of a manifest nothing can be dropped.
    extra = () if checkpoint.manifest else tuple(module for module in shape.modules if module in shape.optional)
    shape = shape.without(extra)
    costs = CostModel(shape, config, request)
    space = Space(
        shape=shape, kinds=costs.kinds, config=config, request=request, is_described=is_described,
        is_own=is_described or find_family(shape.architecture) is not None,
        inventory=inventory_of_modules(shape.modules, shape.num_layers),
        # A pack solves for a layout with the sequences that plans assume by default.
        costs={"time": {module: time.total for module, time in times_of(shape, Assumptions().seq_len).items()}},
    )  # fmt: skip
    policies: Sequence[Policy] = (request.fixed["policy"],) if "policy" in request.fixed else _POLICIES
    choices, best = list[Choice](), tuple[Choice, ...]()
    # Ranks that gather keys over nodes wait long: they are tried where nothing else fits.
    for policy, crosses_nodes in product(policies, (False,) if "context" in request.fixed else (False, True)):
        candidates = space.candidates(policy, crosses_nodes=crosses_nodes)
        tried = [Choice(candidate=candidate, forecast=costs.estimate(candidate)) for candidate in candidates]
        choices += tried
        if best := _best(tried, costs, MARGIN * request.memory_limit):
            break
    return SearchResult(
        source=str(source), name=model_name(str(source)), shape=shape, request=request, policy=policy, best=best,
        choices=tuple(choices), state_nbytes=costs.state_nbytes(policy), refusals=tuple(space.refusals),
        drop=(*drop, *extra), is_quantized=bool(config.get("quantization_config")),
        has_optimizer_state=checkpoint.trained is not None and checkpoint.trained.optimizer is not None,
        model=None if model is None else Path(model), untied=checkpoint.misread,
    )  # fmt: skip


def _check(request: SearchRequest) -> None:
    for name in ("gpus", "global_batch", "gpus_per_node"):
        check_count(Parameter(name), getattr(request, name))
    if not 0 < request.efficiency <= 1:  # nan, too
        problem = f"expected a fraction above 0, up to 1, found {request.efficiency}"
        raise UsageError("--efficiency", problem, code="options.invalid-value")
    for name, flag in _DEGREES.items():
        if request.gpus % (degree := request.fixed.get(name, 1)):
            problem = f"expected a divisor of {request.gpus}, the number of GPUs, found {degree}"
            raise UsageError(flag, problem, code="launch.degrees")
    if request.fixed.get("schedule", "1F1B") not in ("1F1B", *LOOP, *V_SCHEDULES):
        flag, problem = "--schedule", "is not searched, as it needs more memory than 1F1B and waits as long"
    elif request.fixed.get("policy") == "fp32" and request.measured is None:
        flag, problem = "--dtype", "is not searched for fp32, as the rates of GPUs are those of bfloat16"
    else:
        return
    raise UsageError(flag, problem, "pass --layout instead of --gpus", code="options.conflict")


def _best(choices: Sequence[Choice], costs: CostModel, limit: float) -> tuple[Choice, ...]:
    """Simulate the best few of those that may fit, and return the fastest one of each combination of degrees."""
    best, tried = dict[tuple[int, ...], Choice](), Counter[tuple[int, ...]]()
    most = max(_LEAST_SIMULATED, min(4 * _LEAST_SIMULATED, _MOST_TENSORS // len(costs.shape.tensors)))
    hopeful = [choice for choice in choices if choice.forecast.memory <= limit]
    for choice in sorted(hopeful, key=lambda choice: choice.order):
        degrees = choice.candidate.degrees
        if tried.total() == most or len(best) > NUM_SHOWN + 1:
            break
        former = best.get(degrees)
        if tried[degrees] == _MOST_TRIED or (former and choice.forecast.step_s > _NEAR * former.forecast.step_s):
            continue
        tried[degrees] += 1
        simulated = Choice(candidate=choice.candidate, forecast=costs.simulate(choice.candidate))
        if simulated.forecast.memory <= limit and (former is None or simulated.order < former.order):
            best[degrees] = simulated
    return tuple(sorted(best.values(), key=lambda choice: choice.order)[:NUM_SHOWN])
