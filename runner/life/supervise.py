"""A job's life inside a Slurm allocation: all nodes are started, and started again when a rank is lost. No torch.

# Note [Relaunching the whole world]
torchrun's own restarts do not work over several nodes: ranks of the second attempt meet the addresses of
the first. So torchrun never restarts (`--max-restarts 0`), every attempt has a port of its own, and node
numbers are Slurm's: ranks keep their nodes.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from manifests.errors import UserError
from runner.checkpoints.history import find_checkpoints, step_of
from runner.launch.state import RunState, clear_state, read_state, write_state
from runner.options import TrainOptions, parse_training

__all__ = ["FINAL", "SHUTDOWN_S", "agent_command", "main", "srun_command", "stopping"]

logger = logging.getLogger("runner")
SHUTDOWN_S = 30  # beyond the time that a checkpoint may take, ranks are killed
FINAL = (1, 2, 3, 4)  # a bug, or what the user must mend: another attempt would end alike
_INTERRUPTED = 130
_HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"


def agent_command(
    manifest: str, training: Sequence[str], *, nnodes: int, nproc_per_node: int, shutdown_s: int, python: str
) -> list[str]:
    """Give the command that runs one node's ranks. PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT say where."""
    return [
        python, "-m", "runner.life.agent",
        "--nnodes", str(nnodes), "--nproc-per-node", str(nproc_per_node), "--max-restarts", "0",
        *stopping(shutdown_s), "-m", "runner.worker", manifest, *training,
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
    parser = argparse.ArgumentParser(prog="runner.life.supervise")
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
        code = error.exit_code
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
        """Give the exit code of the last attempt."""
        for attempt in range(restarts + 1):
            before = self._newest_step()
            code = self._attempt(attempt)
            if code == 0 and not self._was_stopped():
                return 0
            if self._was_stopped() or self._stopping is not None:
                return self._requeue() if requeue else _INTERRUPTED
            if code in FINAL:
                return code
            step = self._newest_step()
            if step <= before and attempt:
                why = f"no checkpoint since the last restart, from step {step}: another one would end alike"
                return self._give_up(code, why)
            if attempt == restarts:
                why = f"all {restarts} restarts are used up; the last checkpoint is of step {step}"
                return self._give_up(code, why) if restarts else code
            logger.info("attempt %d of %d ended with code %d; all ranks are started again, from step %d",
                        attempt + 1, restarts + 1, code, step)  # fmt: skip
        return code

    def _give_up(self, code: int, why: str) -> int:
        """Say why no attempt follows, there and in `runner status`, beside why the last one ended."""
        last = read_state(self._options.log_dir)
        error = f"{why}\n{last.error}" if last and last.error else why
        logger.error("error: %s", why)
        write_state(
            self._options.log_dir, RunState(step=last.step if last else 0, ended="failed", code=code, error=error)
        )
        return code

    def _attempt(self, attempt: int) -> int:
        clear_state(self._options.log_dir)  # or a run that was stopped once would look stopped for ever
        # A port that the attempt before has not used, on a node that other jobs may share.
        port = 20000 + (self._job * 7 + self._requeues * 101 + attempt) % 20000
        environment = {**self._environment, "PET_MASTER_ADDR": self._first_node(), "PET_MASTER_PORT": str(port)}
        with subprocess.Popen(self._command, env=environment) as running:
            code = running.wait()
        # srun gives the highest code of all nodes: that of one that it stopped itself, too.
        state = read_state(self._options.log_dir)
        return state.code if state is not None and state.ended == "failed" else code

    def _first_node(self) -> str:
        names = subprocess.run(
            ["scontrol", "show", "hostnames", self._environment["SLURM_JOB_NODELIST"]],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return names.stdout.split()[0]

    def _newest_step(self) -> int:
        history = self._options.checkpoint.history if self._options.checkpoint else None
        past = find_checkpoints(history) if history else ()
        return (step_of(past[0]) or 0) if past else 0

    def _was_stopped(self) -> bool:
        state = read_state(self._options.log_dir)
        return state is not None and state.ended == "stopped"

    def _requeue(self) -> int:
        shown = subprocess.run(
            ["scontrol", "show", "job", "-o", str(self._job)], capture_output=True, text=True, check=False, timeout=60
        )
        # One that was cancelled is CANCELLED, or COMPLETING while it ends, and Slurm would queue it again all the same.
        if shown.returncode == 0 and not any(word in shown.stdout for word in ("JobState=RUNNING", "Reason=TimeLimit")):
            return _INTERRUPTED
        logger.info("stopped; the job is queued again")
        subprocess.run(["scontrol", "requeue", str(self._job)], check=False, timeout=60)
        return _INTERRUPTED

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._stopping = number


if __name__ == "__main__":
    main()
