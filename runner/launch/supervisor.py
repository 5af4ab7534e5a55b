"""A job's life inside a Slurm allocation: all nodes are started, and started again when a rank is lost. No torch.

# Note [Relaunching the whole world]
torchrun's own restarts do not work over several nodes: ranks of the second attempt meet the addresses of
the first. So torchrun never restarts (`--max-restarts 0`), every attempt has a port of its own, and node
numbers are Slurm's: ranks keep their nodes.

# Note [Stopped without a word]
Slurm sends `--signal`, and a preemption's SIGTERM, to the ranks and not to this process. Ranks and agents that have not
begun yet die of it, and leave no `state.json`. When one node's agent dies without a word, srun stops the others with
SIGTERM, and its code, the highest, is the same. Both are queued again; a second time in a row without a newer
checkpoint ends the job, unless Slurm says that it preempts or ends it. With `--restarts` alone both are a lost rank.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from manifests.errors import RankError, UnreachableError, UserError
from runner.checkpoint.history import find_checkpoints, step_of
from runner.config.flags import TrainOptions, parse_training
from runner.launch.slurm import ask
from runner.rundir.exit_report import code_of
from runner.rundir.state import STATE_NAME, RunState, clear_state, read_state, write_state

__all__ = ["FINAL", "SHUTDOWN_S", "agent_command", "main", "srun_command", "stopping"]

logger = logging.getLogger("runner")
SHUTDOWN_S = 30  # beyond the time that a checkpoint may take, ranks are killed
FINAL = (1, 2, 3, 4)  # a bug, or what the user must mend: another attempt would end alike
_INTERRUPTED = 130
_ASKED = (_INTERRUPTED, 128 + signal.SIGUSR2, 128 + signal.SIGTERM)  # see Note [Stopped without a word]
_LATE_S = 2.0  # for so long a file that another node has written may be unseen here
# Slurm kills what has not ended KillWait, 30 s by default, after it was told to, and saving took a part of that:
# asking for a place in the queue may take no longer than the rest, or nobody says that there is none.
_ASK_S = 20.0
_ANSWER_S = 8.0
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"


def agent_command(
    manifest: str, training: Sequence[str], *, nnodes: int, nproc_per_node: int, shutdown_s: int, python: str
) -> list[str]:
    """Give the command that runs one node's ranks. PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT say where."""
    return [
        python, "-m", "runner.launch.agent",
        "--nnodes", str(nnodes), "--nproc-per-node", str(nproc_per_node), "--max-restarts", "0",
        *stopping(shutdown_s), "-m", "runner.train", manifest, *training,
    ]  # fmt: skip


def stopping(shutdown_s: int) -> tuple[str, ...]:
    """Give torchrun's flags for the signals that ask ranks to stop, and the time that they have to save then."""
    return ("--signals-to-handle", _HANDLED, "--shutdown-timeout", str(shutdown_s))


def srun_command(agent: Sequence[str], nnodes: int, extra: Sequence[str]) -> list[str]:
    """Give the command that runs an agent on every node of the allocation."""
    script = 'export PET_NODE_RANK="$SLURM_NODEID"; exec "$@"'
    return [
        "srun", f"--nodes={nnodes}", f"--ntasks={nnodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=20",
        *extra, "bash", "-c", script, "bash", *agent,
    ]  # fmt: skip


def main() -> None:
    """Run the attempts of one allocation; end with the last one's exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="runner.launch.supervisor")
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--srun-arg", action="append", default=[])
    parser.add_argument("manifest")
    parser.add_argument("training", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    training = asked.training[1:] if asked.training[:1] == ["--"] else asked.training
    try:
        options = parse_training(training)
        agent = agent_command(
            asked.manifest, training, nnodes=asked.nnodes, nproc_per_node=asked.nproc_per_node,
            shutdown_s=options.timeout_s, python=asked.python,
        )  # fmt: skip
        command = srun_command(agent, asked.nnodes, asked.srun_arg)
        code = _Supervisor(command, options, os.environ).run(asked.restarts, requeue=asked.requeue)
    except UserError as error:
        logger.error("error: %s", error)
        code = code_of(error)
    sys.exit(code)


class _Supervisor:
    """Runs one command again and again, for as long as it helps."""

    def __init__(self, command: Sequence[str], options: TrainOptions, environment: Mapping[str, str]) -> None:
        self._command, self._options, self._environment = list(command), options, environment
        self._job = int(environment.get("SLURM_JOB_ID", "0"))
        self._requeues = int(environment.get("SLURM_RESTART_COUNT", "0"))
        self._stopping: int | None = None
        # The ranks get these signals too, and decide; this process lives on to see what they did.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note)

    def run(self, restarts: int, *, requeue: bool) -> int:
        """Give the exit code of the last attempt.

        Raises:
            UserError: Slurm does not start one, or the checkpoints cannot be listed. `state.json` has it, too.
        """
        try:
            return self._run(restarts, requeue=requeue)
        except UserError as error:
            self._leave(RunState(step=0, ended="failed", code=code_of(error), error=str(error), error_code=error.code))
            raise

    def _run(self, restarts: int, *, requeue: bool) -> int:
        former = read_state(self._options.log_dir)
        for attempt in range(restarts + 1):
            before = self._newest_step()
            code, state = self._attempt(attempt)
            was_stopped = state is not None and state.ended == "stopped"
            is_done = state is not None and state.ended == "done"
            if (code == 0 and not was_stopped) or (is_done and code in _ASKED):  # told to stop when all was done
                return 0
            if state is not None and state.ended == "failed" and code in FINAL:  # when it was told to stop, too
                return code
            if was_stopped or self._stopping is not None:
                return self._queue_again() if requeue else _INTERRUPTED
            if state is None and code in _ASKED and (requeue or not restarts or self._is_ending()):
                return self._end_unsaid(former) if requeue else _INTERRUPTED
            if code in FINAL:
                return code
            step = self._newest_step()
            if attempt and before is not None and step is not None and step <= before:
                why = f"no checkpoint since the last restart, from step {step}: another one would end alike"
                return self._give_up(code, why, state)
            if attempt == restarts:
                last = "cannot be listed" if step is None else f"is of step {step}"
                why = f"all {restarts} restarts are used up; the last checkpoint {last}"
                return self._give_up(code, why, state) if restarts else code
            start = "the newest checkpoint" if step is None else f"step {step}"
            logger.info("attempt %d of %d ended with code %d; all ranks are started again, from %s",
                        attempt + 1, restarts + 1, code, start)  # fmt: skip
        return code

    def _give_up(self, code: int, why: str, last: RunState | None) -> int:
        """Say why no attempt follows, there and in `runner status`, beside why the last one ended."""
        error = f"{why}\n{last.error}" if last and last.error else why
        logger.error("error: %s", why)
        self._leave(
            RunState(
                step=last.step if last else 0,
                ended="failed",
                code=code,
                error=error,
                error_code=last.error_code if last else "",
            )
        )
        return code

    def _leave(self, state: RunState) -> None:
        try:
            write_state(self._options.log_dir, state)
        except OSError as error:  # the log has it
            logger.error("note: %s cannot be written: %s", self._options.log_dir / STATE_NAME, error.strerror)

    def _attempt(self, attempt: int) -> tuple[int, RunState | None]:
        """Give the code that all ranks ended with, and what they have left."""
        stale = None
        try:
            clear_state(self._options.log_dir)  # or a run that was stopped once would look stopped for ever
        except OSError as error:
            logger.error("note: %s cannot be removed: %s", self._options.log_dir / STATE_NAME, error.strerror)
            stale = read_state(self._options.log_dir)
        # A port that the attempt before has not used, on a node that other jobs may share.
        port = 20000 + (self._job * 7 + self._requeues * 101 + attempt) % 20000
        environment = {**self._environment, "PET_MASTER_ADDR": self._first_node(), "PET_MASTER_PORT": str(port)}
        if "SLURM_CPUS_PER_TASK" in environment:  # which srun does not read, from Slurm 22.05 on
            environment.setdefault("SRUN_CPUS_PER_TASK", environment["SLURM_CPUS_PER_TASK"])
        try:
            with subprocess.Popen(self._command, env=environment) as running:
                code = running.wait()
        except OSError as error:
            raise RankError("srun", f"cannot be started: {error.strerror}", code="system.missing-program") from error
        state = self._left(code, stale)
        # srun gives the highest code of all nodes: that of one that it stopped itself, too.
        return (state.code if state is not None and state.ended == "failed" else code), state

    def _left(self, code: int, stale: RunState | None) -> RunState | None:
        """Give what the ranks have left in `state.json`, which may be late where they failed."""
        deadline_s = time.monotonic() + (_LATE_S if code else 0)
        while True:
            with contextlib.suppress(OSError):
                os.listdir(self._options.log_dir)  # NFS remembers that a file was not there, until its folder is opened
            state = read_state(self._options.log_dir)
            if state == stale:
                state = None
            if state is not None or time.monotonic() >= deadline_s:
                return state
            time.sleep(0.1)

    def _first_node(self) -> str:
        try:
            names = ask(["scontrol", "show", "hostnames", self._environment["SLURM_JOB_NODELIST"]]).split()
        except UserError as error:
            raise RankError(error.where, error.problem, error.hint, code=error.code) from error
        if not names:
            raise RankError("scontrol", "names no node of this job", code="launch.scheduler-failed")
        return names[0]

    def _newest_step(self) -> int | None:
        """Give the step of the newest checkpoint, 0 before there is one; None: no answer now."""
        history = self._options.checkpoint.history if self._options.checkpoint else None
        try:
            past = find_checkpoints(history) if history else ()
        except UnreachableError as error:
            logger.error("note: %s", error)
            return None
        return (step_of(past[0]) or 0) if past else 0

    def _end_unsaid(self, former: RunState | None) -> int:
        """Queue a job again that was stopped before its ranks could say so, see Note [Stopped without a word]."""
        step = self._newest_step()
        unsaid = RunState(step=step or 0, ended="stopped", code=_INTERRUPTED)
        is_second = self._requeues > 0 and step is not None and former == unsaid
        shown = self._shown() if is_second else ""
        if "JobState=RUNNING" in shown and not _is_preempted(shown):
            why = f"stopped twice in a row without a word or a checkpoint since step {step}: it would end alike again"
            return self._give_up(_INTERRUPTED, why, None)
        self._leave(unsaid)
        return self._queue_again()

    def _shown(self) -> str:
        """Give what Slurm says of this job; nothing where it does not answer."""
        try:
            return ask(["scontrol", "show", "job", "-o", str(self._job)], limit_s=_ANSWER_S)
        except UserError:
            return ""

    def _is_ending(self) -> bool:
        """Whether Slurm says that it ends this job: it was cancelled, or its time is over."""
        shown = self._shown()
        return bool(shown) and "JobState=RUNNING" not in shown

    def _queue_again(self) -> int:
        deadline_s = time.monotonic() + _ASK_S
        # Slurm ends a job that it queues again, and would end scontrol before that has said so.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shown = self._shown()
        # One that was cancelled is CANCELLED, or COMPLETING while it ends, and Slurm would queue it again all the same.
        if shown and not any(word in shown for word in ("JobState=RUNNING", "Reason=TimeLimit")):
            return _INTERRUPTED
        command = ["scontrol", "requeue", str(self._job)]
        for pause_s in (*_PAUSES_S, 0.0):
            problem = _refusal(command, min(_ANSWER_S, max(1.0, deadline_s - time.monotonic())))
            if not problem:
                logger.info("stopped; the job is queued again")
                return _INTERRUPTED
            if time.monotonic() + pause_s > deadline_s:
                break
            time.sleep(pause_s)
        why = f"stopped, and Slurm does not queue the job again: {problem}\nhint: {' '.join(command)}"
        return self._give_up(_INTERRUPTED, why, read_state(self._options.log_dir))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._stopping = number


def _refusal(command: Sequence[str], limit_s: float) -> str:
    """Have a job queued again, and give why it is not."""
    try:
        ask(command, limit_s=limit_s)
    except UserError as error:
        # Slurm has heard an earlier time that it did not answer.
        return "" if "pending execution" in error.problem else error.problem
    return ""


def _is_preempted(shown: str) -> bool:
    return any(word.startswith("PreemptTime=") and word != "PreemptTime=None" for word in shown.split())


if __name__ == "__main__":
    main()
