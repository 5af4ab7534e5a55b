"""Actions of a rank in one training step: computation, transfers and upkeep, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from manifests.placement import Placement

ComputeKind = Literal["F", "B", "I", "W"]
TracedKind = Literal[ComputeKind, "L"]
TransferKind = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
UpkeepKind = Literal["UNSHARD", "RESHARD", "REDUCE_GRAD"]


class Action(NamedTuple):
    """One stage computes one microbatch. A step has up to half a million.

    F is the forward and B the backward. Zero-bubble schedules split B into I, the gradient of the stage's input,
    for which the previous stage waits, and W, the gradients of its weights, which can be delayed. L is the loss: traces
    have it apart from the last stage's forward, schedules do not.
    """

    stage: int
    kind: TracedKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """A forward and a backward of two stages of one rank that may run as one.

    Without a fused kernel, torch runs the forward first. Both results are sent when both actions have finished.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A stage sends its result for a microbatch, or starts to receive its input."""

    stage: int
    kind: TransferKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkeep:
    """A stage unshards or reshards its parameters, or reduces its gradients, over data-parallel ranks, if any."""

    stage: int
    kind: UpkeepKind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


Step = Action | Overlap
LoweredStep = Action | Overlap | Transfer | Upkeep


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What every rank computes in one training step, in time order."""

    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredTable:
    """A table with the transfers and upkeep that are needed to run it."""

    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[LoweredStep, ...], ...]


def actions_of(step: LoweredStep) -> tuple[Action, ...]:
    """Return the compute actions of a step, in the order in which they run."""
    if isinstance(step, Action):
        return (step,)
    if isinstance(step, Overlap):
        return (step.forward, step.backward)
    return ()
