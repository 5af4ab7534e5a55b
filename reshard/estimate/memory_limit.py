"""The memory of modules, from which stages within a memory limit are solved for."""

from __future__ import annotations

from collections.abc import Mapping

from manifests.errors import UsageError
from manifests.memory import estimate_memory, memory_of
from manifests.models import ModelShape
from manifests.placement import Placement
from manifests.schedules import in_flight, schedule_table
from reshard.estimate.assumptions import MOST_PASSES, Assumptions, num_passes
from reshard.estimate.training_estimate import training_of
from reshard.layout.model import InFlight, StageLayout


def memory_costs(shape: ModelShape, placed: StageLayout, assumed: Assumptions) -> tuple[Mapping[str, float], InFlight]:
    """Return the most bytes of each module, and how many microbatches each stage has in flight.

    The schedule decides the latter by the number and the placement of the stages alone, so it is known before the
    modules of the stages are.

    Raises:
        UsageError: the step is too long to simulate, or the schedule does not support these stages.
    """
    placement, training = placed.placement, training_of(assumed)
    num_microbatches = assumed.microbatches_for(placement)
    _check_length(placement, num_microbatches)
    table = schedule_table(assumed.schedule_for(placed), placement, num_microbatches)
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
            "--microbatches",
            f"a step of {num_microbatches} microbatches on {placement.num_stages} stages is too long to simulate, "
            "which balancing by memory requires",
            f"use at most {most} microbatches, or a layout that does not depend on memory",
            code="options.too-many-microbatches",
        )
