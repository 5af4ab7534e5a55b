"""Supervise a job inside a Slurm allocation: start ranks on all nodes, and restart them when one is lost. No torch.

# Note [Restarting all ranks]
torchrun's own restarts do not work over several nodes: ranks of the second attempt rendezvous at the addresses of the
first. So torchrun never restarts (`--max-restarts 0`), every attempt has its own port, and node ranks are Slurm's:
each node keeps its ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from manifests.command.console import open_streams
from manifests.command.interpreter import leave_out_working_folder, module_command, safe_environment
from manifests.command.schedulers import run_slurm
from manifests.command.signals import INTERRUPTED
from manifests.errors import RankError, UnreachableError, UserError
from manifests.invariants import MANIFEST_NAME
from runner.checkpoint.history import find_checkpoints, step_of
from runner.config.flags import TrainOptions, parse_training
from runner.launch.decide import AttemptEnd, Exit, GiveUp, Requeue, Restart, decide, may_requeue
from runner.launch.schedulers.slurm import use_of
from runner.rundir.exit_report import code_of
from runner.rundir.records import (
    JOB_NAME,
    STATE_NAME,
    JobRecord,
    RunState,
    clear_state,
    read_job_record,
    read_shared_state,
    read_state,
    write_job_record,
    write_state,
)

logger = logging.getLogger("runner")
SHUTDOWN_S = 30  # ranks are killed so long after the time that a checkpoint may take
_LATE_S = 2.0  # a file that another node has written may not be visible here for so long
# Slurm kills what has not ended KillWait (30 s by default) after it was asked to, and saving took a part of that:
# a requeue must be requested within the rest, or nothing reports that it failed.
_ASK_S = 20.0
_ANSWER_S = 8.0
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"


def agent_command(
    manifest: str, training: Sequence[str], *, nnodes: int, nproc_per_node: int, shutdown_s: int, python: str
) -> list[str]:
    """Return the command that runs one node's ranks; it reads PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT."""
    return [
        *module_command("runner.launch.agent.agent", python=python),
        "--nnodes", str(nnodes), "--nproc-per-node", str(nproc_per_node), "--max-restarts", "0",
        *stopping(shutdown_s), "-m", "runner.train", manifest, *training,
    ]  # fmt: skip


def stopping(shutdown_s: int) -> tuple[str, ...]:
    """Return torchrun's flags for the signals that ask ranks to stop, and for the time that they then have to save."""
    return ("--signals-to-handle", _HANDLED, "--shutdown-timeout", str(shutdown_s))


def srun_command(agent: Sequence[str], nnodes: int, extra: Sequence[str]) -> list[str]:
    """Return the command that runs an agent on every node of the allocation."""
    script = 'export PET_NODE_RANK="$SLURM_NODEID"; exec "$@"'
    return [
        "srun", f"--nodes={nnodes}", f"--ntasks={nnodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=20",
        "--export=ALL",  # also where sbatch has another --export, which sets srun's default
        *extra, "bash", "-c", script, "bash", *agent,
    ]  # fmt: skip


def main() -> None:
    """Run the attempts of one allocation, and exit with the code of the last one."""
    open_streams()
    leave_out_working_folder()
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
    arguments = parser.parse_args()
    training = arguments.training[1:] if arguments.training[:1] == ["--"] else arguments.training
    try:
        options = parse_training(training)
        agent = agent_command(
            arguments.manifest, training, nnodes=arguments.nnodes, nproc_per_node=arguments.nproc_per_node,
            shutdown_s=options.timeout_s, python=arguments.python,
        )  # fmt: skip
        command = srun_command(agent, arguments.nnodes, arguments.srun_arg)
        code = _Supervisor(command, options, os.environ).run(arguments.restarts, requeue=arguments.requeue)
    except UserError as error:
        logger.error("error: %s", error)
        code = code_of(error)
    sys.exit(code)


class _Supervisor:
    """Runs one command until it succeeds or a restart would not help."""

    def __init__(self, command: Sequence[str], options: TrainOptions, environment: Mapping[str, str]) -> None:
        self._command, self._options, self._environment = list(command), options, environment
        self._job = int(environment.get("SLURM_JOB_ID", "0"))
        self._num_requeues = int(environment.get("SLURM_RESTART_COUNT", "0"))
        self._is_signalled = False
        self._srun: subprocess.Popen[bytes] | None = None
        # The ranks get these signals, too, and decide; this process stays alive to see what they did.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note_signal)

    def run(self, restarts: int, *, requeue: bool) -> int:
        """Return the exit code of the last attempt."""
        try:
            return self._run(restarts, requeue=requeue)
        except UserError as error:
            self._write(RunState(step=0, ended="failed", code=code_of(error), error=str(error), error_code=error.code))
            raise

    def _run(self, restarts: int, *, requeue: bool) -> int:
        self._put_on_record()
        former, attempt = read_state(self._options.log_dir), 0
        while True:
            before = self._checkpoints()
            code, state = self._attempt(attempt)
            action = decide(
                AttemptEnd(
                    code=code,
                    state=state,
                    attempt=attempt,
                    restarts=restarts,
                    requeue=requeue,
                    is_signalled=self._is_signalled,
                    newest_step=self._newest_step,
                    has_saved=partial(self._has_saved, before),
                    shown=self._shown,
                    former=former,
                    num_requeues=self._num_requeues,
                )
            )
            match action:
                case Exit():
                    return action.code
                case GiveUp():
                    return self._give_up(action.code, action.why, state)
                case Requeue():
                    if action.state is not None:
                        self._write(action.state)
                    return self._requeue()
                case Restart():
                    attempt += 1
                    newest = f"the newest checkpoint is at step {action.step}" if action.step else "no checkpoint yet"
                    logger.info("attempt %d of %d exited with code %d; restarting all ranks%s", attempt, restarts + 1,
                                code, "" if action.step is None else f"; {newest}")  # fmt: skip

    def _put_on_record(self) -> None:
        """Record this job in its log folder if its launcher has not: sbatch may have given it no answer.

        Another one on record there that has not ended stays.
        """
        log_dir, number = self._options.log_dir, str(self._job)
        name, output = self._environment.get("SLURM_JOB_NAME", ""), f"{log_dir.resolve()}/slurm-{number}.out"
        try:
            if (log_dir / JOB_NAME).exists():
                record = read_job_record(log_dir)
                if record.scheduler == "slurm" and (record.id == number or use_of(record, log_dir)):
                    return
            write_job_record(log_dir, JobRecord(scheduler="slurm", id=number, name=name, output=output))
        except (UserError, OSError) as error:
            logger.error("note: %s", error)

    def _give_up(self, code: int, why: str, last: RunState | None) -> int:
        """Report why no attempt follows, in the log and in `runner status`, with the error that ended the last one."""
        error = f"{why}\n{last.error}" if last and last.error else why
        logger.error("error: %s", why)
        self._write(
            RunState(
                step=last.step if last else 0,
                ended="failed",
                code=code,
                error=error,
                error_code=last.error_code if last else "",
            )
        )
        return code

    def _write(self, state: RunState) -> None:
        try:
            write_state(self._options.log_dir, state)
        except OSError as error:  # the log has it
            logger.error("note: %s cannot be written: %s", self._options.log_dir / STATE_NAME, error.strerror)

    def _attempt(self, attempt: int) -> tuple[int, RunState | None]:
        """Run all ranks; return their exit code, and what they wrote to `state.json`."""
        stale = None
        try:
            clear_state(self._options.log_dir)  # or a run that was stopped once would always look stopped
        except OSError as error:
            logger.error("note: %s cannot be removed: %s", self._options.log_dir / STATE_NAME, error.strerror)
            stale = read_state(self._options.log_dir)
        # A port that the attempt before has not used, on a node that other jobs may share; connections that nodes make
        # have ports from 32768 up.
        port = 20000 + (self._job * 7 + self._num_requeues * 101 + attempt) % 12000
        environment = {
            **safe_environment(self._environment),
            "PET_MASTER_ADDR": self._first_node(),
            "PET_MASTER_PORT": str(port),
            # What srun exits with where no rank has failed but Slurm, as at a node that does not answer: 1 is a bug.
            "SLURM_EXIT_ERROR": str(RankError.exit_code),
        }
        if "SLURM_CPUS_PER_TASK" in environment:  # which srun does not read, from Slurm 22.05 on
            environment.setdefault("SRUN_CPUS_PER_TASK", environment["SLURM_CPUS_PER_TASK"])
        try:
            with subprocess.Popen(self._command, env=environment) as self._srun:
                if self._is_signalled:  # before srun was there
                    self._stop()
                code = self._srun.wait()
        except OSError as error:
            raise RankError("srun", f"cannot be started: {error.strerror}", code="system.missing-program") from error
        state = self._read_new_state(code, stale)
        # srun returns the highest code of all nodes, which may be that of a node that it stopped itself.
        return (state.code if state is not None and state.ended == "failed" else code), state

    def _read_new_state(self, code: int, stale: RunState | None) -> RunState | None:
        """Read what the ranks wrote to `state.json`, which may be visible late where they failed."""
        deadline_s = time.monotonic() + (_LATE_S if code else 0)
        while True:
            state = read_shared_state(self._options.log_dir)
            if state == stale:
                state = None
            if state is not None or time.monotonic() >= deadline_s:
                return state
            time.sleep(0.1)

    def _first_node(self) -> str:
        try:
            names = run_slurm(["scontrol", "show", "hostnames", self._environment["SLURM_JOB_NODELIST"]]).split()
        except UserError as error:
            raise RankError(error.where, error.problem, error.hint, code=error.code) from error
        if not names:
            raise RankError("scontrol", "names no node of this job", code="launch.scheduler-failed")
        return names[0]

    def _checkpoints(self) -> Mapping[Path, int] | None:
        """Return when each checkpoint was written, the one with the most steps first; None: cannot be listed now."""
        history = self._options.history
        try:
            past = find_checkpoints(history) if history else ()
            return {path: (path / MANIFEST_NAME).stat().st_mtime_ns for path in past}
        except (UnreachableError, OSError) as error:
            logger.error("note: %s", error)
            return None

    def _newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, 0 before there is one; None where they cannot be listed now."""
        checkpoints = self._checkpoints()
        return None if checkpoints is None else next((step_of(path) or 0 for path in checkpoints), 0)

    def _has_saved(self, before: Mapping[Path, int] | None) -> bool:
        """Whether a checkpoint was written since they were listed as `before`, or they cannot be listed."""
        checkpoints = self._checkpoints()
        return before is None or checkpoints is None or not checkpoints.items() <= before.items()

    def _shown(self) -> str:
        """Return what Slurm shows of this job; nothing where it does not answer."""
        try:
            return run_slurm(["scontrol", "show", "job", "-o", str(self._job)], limit_s=_ANSWER_S)
        except UserError:
            return ""

    def _requeue(self) -> int:
        deadline_s = time.monotonic() + _ASK_S
        # Slurm ends a job that it requeues, and would end scontrol before that has reported it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not may_requeue(self._shown()):
            return INTERRUPTED
        command = ["scontrol", "requeue", str(self._job)]
        for pause_s in (*_PAUSES_S, 0.0):
            problem = _refusal(command, min(_ANSWER_S, max(1.0, deadline_s - time.monotonic())))
            if not problem:
                logger.info("stopped; the job was requeued")
                return INTERRUPTED
            if time.monotonic() + pause_s > deadline_s:
                break
            time.sleep(pause_s)
        why = f"stopped, and Slurm did not requeue the job: {problem}\nhint: {' '.join(command)}"
        return self._give_up(INTERRUPTED, why, read_state(self._options.log_dir))

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
        self._stop()

    def _stop(self) -> None:
        """Ask the ranks to stop: srun sends them SIGUSR2, where it would kill them for a SIGTERM."""
        if self._srun is not None:
            self._srun.send_signal(signal.SIGUSR2)


def _refusal(command: Sequence[str], limit_s: float) -> str:
    """Ask Slurm to requeue a job; return why it does not, or nothing where it does."""
    try:
        run_slurm(command, limit_s=limit_s)
    except UserError as error:
        # An earlier request, to which Slurm did not answer, was heard.
        return "" if "pending execution" in error.problem else error.problem
    return ""


if __name__ == "__main__":
    main()
