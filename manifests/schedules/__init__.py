"""Pipeline schedules as tables of actions: generated, checked, written as CSV, and simulated."""

from typing import TYPE_CHECKING

from manifests.command.interpreter import lazy_attributes

if TYPE_CHECKING:
    from manifests.schedules.actions import Action, LoweredTable, Overlap, Step, Table, Transfer, Upkeep, actions_of
    from manifests.schedules.csvtext import is_schedule_file, read_csv, read_schedule_file, write_csv
    from manifests.schedules.liveness import (
        in_flight,
        num_remote_neighbors,
        peak_held,
        peak_held_by_stage,
        peak_received,
    )
    from manifests.schedules.lowering import compute_part, lower
    from manifests.schedules.rules import SCHEDULES, ScheduleName, check_schedule, default_schedule, schedule_named
    from manifests.schedules.simulation import StageCosts, TimedAction, Timeline, simulate
    from manifests.schedules.tables import schedule_table

__all__ = [
    "SCHEDULES",
    "Action",
    "LoweredTable",
    "Overlap",
    "ScheduleName",
    "StageCosts",
    "Step",
    "Table",
    "TimedAction",
    "Timeline",
    "Transfer",
    "Upkeep",
    "actions_of",
    "check_schedule",
    "compute_part",
    "default_schedule",
    "in_flight",
    "is_schedule_file",
    "lower",
    "num_remote_neighbors",
    "peak_held",
    "peak_held_by_stage",
    "peak_received",
    "read_csv",
    "read_schedule_file",
    "schedule_named",
    "schedule_table",
    "simulate",
    "write_csv",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "manifests.schedules.actions": (
            "Action",
            "LoweredTable",
            "Overlap",
            "Step",
            "Table",
            "Transfer",
            "Upkeep",
            "actions_of",
        ),
        "manifests.schedules.csvtext": ("is_schedule_file", "read_csv", "read_schedule_file", "write_csv"),
        "manifests.schedules.liveness": (
            "in_flight",
            "num_remote_neighbors",
            "peak_held",
            "peak_held_by_stage",
            "peak_received",
        ),
        "manifests.schedules.lowering": ("compute_part", "lower"),
        "manifests.schedules.rules": (
            "SCHEDULES",
            "ScheduleName",
            "check_schedule",
            "default_schedule",
            "schedule_named",
        ),
        "manifests.schedules.simulation": (
            "StageCosts",
            "TimedAction",
            "Timeline",
            "simulate",
        ),
        "manifests.schedules.tables": ("schedule_table",),
    },
)
