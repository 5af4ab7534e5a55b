"""Pipeline schedules as tables of actions: generated, checked, written as CSV, and simulated."""

from manifests.schedules.actions import Action, LoweredTable, Overlap, Step, Table, Transfer, Upkeep, actions_of
from manifests.schedules.csvtext import read_csv, read_lowered_csv, write_csv
from manifests.schedules.lower import compute_part, lower
from manifests.schedules.rules import SCHEDULES, ScheduleName, check_schedule, default_schedule, schedule_named
from manifests.schedules.simulate import StageCosts, TimedAction, Timeline, peak_held, simulate
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
    "lower",
    "peak_held",
    "read_csv",
    "read_lowered_csv",
    "schedule_named",
    "schedule_table",
    "simulate",
    "write_csv",
]
