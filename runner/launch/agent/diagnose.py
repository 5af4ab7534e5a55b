"""Find the root cause of a failed job: the rank that failed first, not those that failed because of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.command.signals import INTERRUPTED
from runner.rundir.exit_report import ExitReport, place_of, read_report
from runner.rundir.records import ALIVE_S, SKEWED_S, Beat, log_path

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_RANK_FAILED = 5
_OUR_CODES = (1, 2, 3, 4, 5)
_AT_ONCE_S = 2  # torchrun's times are whole seconds
_SILENT_S = 3 * ALIVE_S
_TERMINATED, _ABORTED = -signal.SIGTERM, -signal.SIGABRT


def find_cause(
    failures: Mapping[int, ProcessFailure], beats: Sequence[Beat], place: Callable[[int], str]
) -> ExitReport | None:
    """Return the failure that ended a job; None where the ranks stopped because they were asked to.

    A rank that was killed by a signal comes first, then errors of ranks themselves, then a rank that ended with no
    report; where ranks only timed out, the rank that they waited for, as far as heartbeats show it. Others follow:
    torchrun ends them with SIGTERM, and NCCL's watchdog aborts ranks that wait.
    """
    first_s = min(failure.timestamp for failure in failures.values())
    reports = {rank: read_report(failure.error_file_data) for rank, failure in failures.items()}
    first = {rank: failure for rank, failure in sorted(failures.items()) if failure.timestamp <= first_s + _AT_ONCE_S}
    for rank, failure in first.items():
        if failure.exitcode < 0 and failure.exitcode not in (_TERMINATED, _ABORTED):
            return _killed(failure, place(rank))
    in_turn = [reports[rank] for rank in sorted(failures, key=lambda rank: (failures[rank].timestamp, rank))]
    if (error := _first_error([report for report in in_turn if report is not None])) is not None:
        return error
    for rank, failure in first.items():
        if reports[rank] is None and failure.exitcode > 0 and failure.exitcode not in (*_OUR_CODES, INTERRUPTED):
            return _unreported(failure, place(rank))
    lost = {rank for rank, report in reports.items() if report is not None and report.kind == "lost"}
    # The watchdog aborts every rank that waits; where a library fails, its rank is aborted alone.
    aborted = {rank for rank, failure in failures.items() if failure.exitcode == _ABORTED}
    if len(aborted) > 1 or any(report is not None and report.kind == "stuck" for report in in_turn):
        lost, aborted = lost | aborted, set()
    is_busy = any(beat.rank in aborted and not beat.is_waiting for beat in beats)
    if not is_busy and (blamed := _awaited(beats, lost, first_s)) is not None:
        return blamed

    def order(rank: int) -> tuple[int, bool, bool, int]:
        failure = failures[rank]
        return failure.timestamp, reports[rank] is None, failure.exitcode == _TERMINATED, rank

    rank = min(aborted or failures, key=order)
    if (report := reports[rank]) is not None:
        return report
    if rank in lost:
        return _aborted(place(rank))
    if aborted and not is_busy:  # perhaps because of a rank of another node, whose agent reports that
        return replace(_killed(failures[rank], place(rank)), kind="lost")
    return _unreported(failures[rank], place(rank))


def find_cause_at_stop(reports: Sequence[ExitReport], *, is_unsaved: bool) -> ExitReport | None:
    """Return the first failure of ranks that were asked to stop, of their reports in turn; None: there was none.

    Timeouts count only where the ranks should have saved and did not: without a save to do, they just end.
    """
    return _first_error(reports) or (reports[0] if reports and is_unsaved else None)


def _first_error(reports: Sequence[ExitReport]) -> ExitReport | None:
    """Return the first error of a rank itself, in the words of the rank that failed where its report is here."""
    failed = [report for report in reports if report.kind == "failed"]
    return min(failed, key=lambda report: report.is_elsewhere, default=None)


def _killed(failure: ProcessFailure, where: str) -> ExitReport:
    name = _signal_name(-failure.exitcode)
    hint = {
        "SIGKILL": "out of memory? the kernel's OOM killer sends SIGKILL; check dmesg",
        "SIGABRT": "a library ended it, out of memory perhaps: it has printed why, above",
    }.get(name, "")
    problem = f"killed by {name}; stopping all ranks"
    return ExitReport(
        kind="failed", code=_RANK_FAILED, where=where, problem=problem, hint=hint, error_code="rank.killed"
    )


def _aborted(where: str) -> ExitReport:
    """Return a report on one of several ranks that were aborted, where nothing shows which rank they waited for."""
    problem = "aborted, as NCCL does where a rank lost the connection to another one, or timed out waiting for it"
    hint = "what aborted it has printed why, above"
    return ExitReport(kind="lost", code=_RANK_FAILED, where=where, problem=problem, hint=hint, error_code="rank.lost")


def _awaited(beats: Sequence[Beat], lost: Container[int], ended_s: float) -> ExitReport | None:
    """Return a report on the first rank that did not wait for another one when the job ended, unless none waited."""
    silent_s = _silences(beats, ended_s)
    suspects = [beat for beat in beats if beat.rank not in lost]
    silent = [beat for beat in suspects if beat.rank in silent_s]
    busy = [beat for beat in suspects if beat.phase == "train" and not beat.is_waiting and beat not in silent]
    if not 0 < len(silent) + len(busy) < len(beats):
        return None
    beat = (silent or busy)[0]
    problem = f"other ranks timed out waiting for it after step {beat.step}; it was executing {beat.doing}"
    hint = f"{log_path(Path(), beat.rank)} in the log folder shows what each of its threads was doing"
    if silent:
        problem = f"no heartbeat for {silent_s[beat.rank]:.0f} s; {problem}"
        hint = "its process was suspended, or hangs in a driver; check dmesg on that node"
    where = place_of(beat.rank, beat.stages, beat.host)
    error_code = "rank.silent" if silent else "rank.stuck"
    return ExitReport(kind="stuck", code=_RANK_FAILED, where=where, problem=problem, hint=hint, error_code=error_code)


def _silences(beats: Sequence[Beat], ended_s: float) -> dict[int, float]:
    """Return how long ranks have sent no heartbeat: by their own node's clock or, failing that, by ours."""
    newest_s = {beat.host: beat.time for beat in sorted(beats, key=lambda beat: beat.time)}
    silences = {}
    for beat in beats:
        theirs_s, ours_s = newest_s[beat.host] - beat.time, ended_s - beat.time
        if theirs_s > _SILENT_S or ours_s > SKEWED_S:
            silences[beat.rank] = theirs_s if theirs_s > _SILENT_S else ours_s
    return silences


def _unreported(failure: ProcessFailure, where: str) -> ExitReport | None:
    if failure.exitcode < 0:
        return _killed(failure, where)
    if failure.exitcode == INTERRUPTED:
        return None
    code = failure.exitcode if failure.exitcode in _OUR_CODES else _RANK_FAILED
    problem = f"exited with code {failure.exitcode} without a report; stopping all ranks"
    return ExitReport(kind="failed", code=code, where=where, problem=problem, error_code="rank.ended")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
