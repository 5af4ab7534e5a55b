"""Why a job's ranks ended: of all that failed at once, the one that the others only followed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.rundir.exit_report import ExitReport, read_report
from runner.rundir.heartbeat import ALIVE_S, SKEWED_S, Beat, log_path
from runner.rundir.rank_label import place_of

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["find_cause", "find_cause_at_stop"]

_RANK_FAILED = 5
_OUR_CODES = (1, 2, 3, 4, 5)
_AT_ONCE_S = 2  # torchrun's times are whole seconds
_SILENT_S = 3 * ALIVE_S
_AFTERMATH = (-signal.SIGTERM, -signal.SIGABRT)  # what torchrun, and NCCL's own watchdog, do to ranks that wait


def find_cause(
    failures: Mapping[int, ProcessFailure], beats: Sequence[Beat], place: Callable[[int], str]
) -> ExitReport | None:
    """Give what ended a job, as its user is told; None where the ranks stopped because they were asked to.

    A rank that a signal killed comes first, then what ranks met themselves; where they only waited in vain, the
    one that they waited for, as far as heartbeats tell.
    """
    first_s = min(failure.timestamp for failure in failures.values())
    told = {rank: read_report(failure.error_file_data) for rank, failure in failures.items()}
    for rank, failure in sorted(failures.items()):
        is_first = failure.timestamp <= first_s + _AT_ONCE_S
        if is_first and failure.exitcode < 0 and failure.exitcode not in _AFTERMATH:
            return _killed(failure, place(rank))
    in_turn = [told[rank] for rank in sorted(failures, key=lambda rank: (failures[rank].timestamp, rank))]
    if (met := _first_met([ending for ending in in_turn if ending is not None])) is not None:
        return met
    lost = {rank for rank, ending in told.items() if ending is not None and ending.kind == "lost"}
    if (blamed := _awaited(beats, lost, first_s)) is not None:
        return blamed
    rank = min(failures, key=lambda rank: (failures[rank].timestamp, told[rank] is None, rank))
    return told[rank] or _untold(failures[rank], place(rank))


def find_cause_at_stop(endings: Sequence[ExitReport], *, is_unsaved: bool) -> ExitReport | None:
    """Give what kept ranks from ending well when they were told to, of what they left, in turn; None: nothing did.

    That they waited in vain counts only where they were to save, and have not: who is not to save just ends.
    """
    return _first_met(endings) or (endings[0] if endings and is_unsaved else None)


def _first_met(endings: Sequence[ExitReport]) -> ExitReport | None:
    """Give the first of what ranks met themselves, as the rank says it that met it, where it is one of these."""
    met = [ending for ending in endings if ending.kind == "failed"]
    return min(met, key=lambda ending: ending.is_elsewhere, default=None)


def _killed(failure: ProcessFailure, where: str) -> ExitReport:
    name = _signal_name(-failure.exitcode)
    hint = "out of memory? the kernel kills with SIGKILL; see dmesg" if name == "SIGKILL" else ""
    problem = f"ended by {name}; all ranks were stopped"
    return ExitReport(
        kind="failed", code=_RANK_FAILED, where=where, problem=problem, hint=hint, error_code="rank.killed"
    )


def _awaited(beats: Sequence[Beat], lost: Container[int], ended_s: float) -> ExitReport | None:
    """Give the first rank that did not wait for another one when the job ended, unless all were so."""
    silent_s = _silences(beats, ended_s)
    suspects = [beat for beat in beats if beat.rank not in lost]
    silent = [beat for beat in suspects if beat.rank in silent_s]
    busy = [beat for beat in suspects if beat.phase == "train" and not beat.is_waiting and beat not in silent]
    if not 0 < len(silent) + len(busy) < len(beats):
        return None
    beat = (silent or busy)[0]
    problem = f"the other ranks waited for it in vain after step {beat.step}: it was in {beat.doing}"
    hint = f"{log_path(Path(), beat.rank)} in the log folder shows what each of its threads was doing"
    if silent:
        problem = f"gave no sign of life for {silent_s[beat.rank]:.0f} s, and {problem} then"
        hint = "its process was stopped, or a driver or the node holds it; dmesg there may tell"
    where = place_of(beat.rank, beat.stages, beat.host)
    error_code = "rank.silent" if silent else "rank.stuck"
    return ExitReport(kind="stuck", code=_RANK_FAILED, where=where, problem=problem, hint=hint, error_code=error_code)


def _silences(beats: Sequence[Beat], ended_s: float) -> dict[int, float]:
    """Give for how long silent ranks had been so: by their own node's clock, or, where that tells nothing, by ours."""
    newest_s = {beat.host: beat.time for beat in sorted(beats, key=lambda beat: beat.time)}
    found = {}
    for beat in beats:
        theirs_s, ours_s = newest_s[beat.host] - beat.time, ended_s - beat.time
        if theirs_s > _SILENT_S or ours_s > SKEWED_S:
            found[beat.rank] = theirs_s if theirs_s > _SILENT_S else ours_s
    return found


def _untold(failure: ProcessFailure, where: str) -> ExitReport | None:
    if failure.exitcode < 0:
        return _killed(failure, where)
    if failure.exitcode == 130:
        return None
    code = failure.exitcode if failure.exitcode in _OUR_CODES else _RANK_FAILED
    problem = f"ended with code {failure.exitcode} without a word; all ranks were stopped"
    return ExitReport(kind="failed", code=code, where=where, problem=problem, error_code="rank.ended")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
