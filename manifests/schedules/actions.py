"""What a rank does in one step: compute actions in time order, and the transfers and upkeep among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manifests.placement import Placement

__all__ = [
    "Action",
    "LoweredStep",
    "LoweredTable",
    "Overlap",
    "Step",
    "Table",
    "Transfer",
    "Upkeep",
    "actions_of",
]

ComputeKind = Literal["F", "B", "I", "W"]
TransferKind = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
UpkeepKind = Literal["UNSHARD", "RESHARD", "REDUCE_GRAD"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One stage computes one microbatch.

    F is the forward and B the backward; zero-bubble schedules cut B into I, the gradients of the
    stage's input, which the stage before waits for, and W, those of its weights, which can wait.
    """

    stage: int
    kind: ComputeKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """A forward and a backward of two stages of one rank that may run as one.

    Without a kernel for both, torch runs the forward first. What they give leaves when both have ended.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A stage sends what it computed for a microbatch, or starts to receive what it will compute on."""

    stage: int
    kind: TransferKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkeep:
    """A stage gathers, frees or reduces what data-parallel ranks share. Without them it does nothing."""

    stage: int
    kind: UpkeepKind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


Step = Action | Overlap
LoweredStep = Action | Overlap | Transfer | Upkeep


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What every rank computes in one step, each rank's part in time order."""

    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredTable:
    """A table with the transfers and the upkeep that it takes to run."""

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
