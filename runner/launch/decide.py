"""What the supervisor does when all ranks of an attempt have ended: a pure decision, without torch.

# Note [Stopped without state.json]
Slurm sends `--signal`, and the SIGTERM of a preemption, to the ranks and not to the supervisor. Ranks and agents that
have not started yet are killed by it and leave no `state.json`. When the agent of one node is killed, srun stops the
others with SIGTERM, and its exit code, the highest, is the same. Both are requeued; the second time in a row without a
new checkpoint ends the job, unless Slurm preempts or ends it. With `--restarts` alone both count as a lost rank.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from manifests.command.signals import INTERRUPTED
from runner.rundir.records import RunState

FINAL = (1, 2, 3, 4)  # a bug, or an error that the user must fix: a restart would fail the same way
_ASKED = (INTERRUPTED, 128 + signal.SIGUSR2, 128 + signal.SIGTERM)  # exit codes of ranks that a signal asked to stop


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """What is known at the end of an attempt.

    `newest_step`, `has_saved` and `shown` are called only where the decision depends on them: a disk or Slurm may be
    slow to answer.
    """

    code: int  # the highest exit code
    state: RunState | None  # what the ranks wrote to state.json
    attempt: int  # the first is 0
    restarts: int  # --restarts
    requeue: bool  # --requeue
    is_signalled: bool  # the supervisor itself was asked to stop
    newest_step: Callable[[], int | None]  # of the newest checkpoint; 0: there is none; None: unknown
    # Whether the attempt wrote a checkpoint, of whatever step: the newest may be damaged. True if that is unknown.
    has_saved: Callable[[], bool]
    shown: Callable[[], str]  # what `scontrol show job` prints; nothing where Slurm does not answer
    former: RunState | None = None  # what state.json contained before the job's first attempt
    num_requeues: int = 0  # how often Slurm has requeued the job


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """End the job with this exit code."""

    code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """End the job with this exit code, and say why it is not restarted."""

    code: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Requeue:
    """Hand the job back to Slurm's queue; `state` is written first where the ranks wrote none."""

    state: RunState | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Start all ranks again. The newest checkpoint is of `step`, and may be damaged; 0: none; None: unknown."""

    step: int | None


Decision = Exit | GiveUp | Requeue | Restart


def decide(end: AttemptEnd) -> Decision:
    """Return what follows an attempt."""
    ended = end.state.ended if end.state is not None else None
    if (end.code == 0 and ended != "stopped") or (ended == "done" and end.code in _ASKED):
        return Exit(code=0)  # also when it was asked to stop after the last step
    if ended == "failed" and end.code in FINAL:
        return Exit(code=end.code)  # also when it was asked to stop
    if ended == "stopped" or end.is_signalled:
        return Requeue() if end.requeue else Exit(code=INTERRUPTED)
    if end.state is None and end.code in _ASKED and (end.requeue or not end.restarts or _is_ending(end.shown())):
        return _decide_without_state(end) if end.requeue else Exit(code=INTERRUPTED)
    if end.code in FINAL:
        return Exit(code=end.code)
    return _decide_after_loss(end)


def may_requeue(shown: str) -> bool:
    """Whether a stopped job may go back to the queue: Slurm would also requeue one that was cancelled.

    A cancelled job is CANCELLED, or COMPLETING while it ends.
    """
    return not shown or "JobState=RUNNING" in shown or "Reason=TimeLimit" in shown


def _decide_after_loss(end: AttemptEnd) -> Decision:
    """Restart after a lost rank, while restarts are left and checkpoints advance."""
    step = end.newest_step()
    if end.attempt and not end.has_saved():
        newest = {0: "there is none", None: "the newest is unknown"}.get(step, f"the newest: step {step}")
        why = f"no checkpoint since the last restart ({newest}): a restart would fail the same way"
        return GiveUp(code=end.code, why=why)
    if end.attempt < end.restarts:
        return Restart(step=step)
    if not end.restarts:
        return Exit(code=end.code)
    last = "the checkpoints cannot be listed" if step is None else f"the last checkpoint is at step {step}"
    return GiveUp(code=end.code, why=f"all {end.restarts} restarts are used up; {last}")


def _decide_without_state(end: AttemptEnd) -> Decision:
    """Requeue a job that was stopped before its ranks could write why, see Note [Stopped without state.json]."""
    step = end.newest_step()
    state = RunState(step=step or 0, ended="stopped", code=INTERRUPTED)
    if end.num_requeues > 0 and end.former == state and not end.has_saved():
        shown = end.shown()
        if "JobState=RUNNING" in shown and not _is_preempted(shown):
            why = f"stopped twice in a row without a state.json, and without a checkpoint after step {step}"
            return GiveUp(code=INTERRUPTED, why=f"{why}: a restart would fail the same way")
    return Requeue(state=state)


def _is_ending(shown: str) -> bool:
    """Whether Slurm is ending the job: it was cancelled, or its time is over."""
    return bool(shown) and "JobState=RUNNING" not in shown


def _is_preempted(shown: str) -> bool:
    return any(word.startswith("PreemptTime=") and word != "PreemptTime=None" for word in shown.split())
