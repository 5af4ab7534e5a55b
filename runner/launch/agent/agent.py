"""torchrun, with our exit codes, and one message instead of a traceback (docs/adr/0006)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from manifests.command.console import open_streams, print_error
from manifests.command.interpreter import leave_out_working_folder, safe_environment
from manifests.command.signals import INTERRUPTED, end_at_signals, say_interrupted
from manifests.errors import RankError, UserError, refused_by_system
from runner.config.flags import TrainOptions, parse_training
from runner.launch.agent.diagnose import find_cause, find_cause_at_stop
from runner.launch.agent.forked import FATAL, fork_ranks, import_worker, set_log_level
from runner.preflight.preflight import check_torch
from runner.rundir.exit_report import (
    AGENT,
    REPORTS,
    ExitReport,
    code_of,
    note_stopping,
    place_of,
    read_reports,
    stages_of,
)
from runner.rundir.records import (
    ALIVE_S,
    Beat,
    RunState,
    clear_state,
    launcher_heartbeat_path,
    read_beats,
    read_shared_state,
    read_state,
    write_state,
)
from stores.folders.publish import temporary_folder
from stores.open import open_manifest

if TYPE_CHECKING:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_LOCAL = "--standalone"  # of torchrun, for a job of this machine alone
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
_PATIENCE_S = 6.0  # another node's agent may know the cause
_PATIENCE_ELSEWHERE_S = 30.0  # another node's agent knows it, and reports once its own ranks have ended
_WORKER = "runner.train"
_EVERY_S = 10.0
_POLL_S = 1.0


def main() -> None:
    """Run torchrun on this process's arguments."""
    leave_out_working_folder()
    open_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, ranks would end without an exit code
    with contextlib.ExitStack() as stack:
        try:
            reports_dir = stack.enter_context(temporary_folder("runner-"))
        except UserError as error:
            print_error(error, is_json="--json" in sys.argv)
            sys.exit(code_of(error))
        # torchrun handles signals itself once it starts ranks. Until then it may wait for other nodes.
        end_at_signals(lambda number: _stop_early(reports_dir), _HANDLED, in_thread=True)
        os.environ.update({**safe_environment(), AGENT: str(os.getpid()), REPORTS: str(reports_dir)})
        code = _run(reports_dir)
    sys.exit(code)


def _run(reports_dir: Path) -> int:
    """Run the ranks, report what ended them, and return the exit code."""
    options, begun = _training(sys.argv), time.time()
    try:
        note = check_torch()
    except UserError as error:
        print_error(error, is_json="--json" in sys.argv)
        return error.exit_code
    log_dir = options.log_dir if options else None
    earlier = read_state(log_dir) if log_dir else None  # of an attempt before, until node 0 clears it
    if log_dir is not None and _LOCAL in sys.argv:
        threading.Thread(target=_send_heartbeats, args=(log_dir,), name="heartbeat", daemon=True).start()
    shows_waiting = options is not None and not options.quiet and _LOCAL in sys.argv
    num_ranks = _number("--nproc-per-node")

    def waiting() -> contextlib.AbstractContextManager[None]:
        return print_waiting(log_dir, num_ranks, begun) if shows_waiting and log_dir else contextlib.nullcontext()

    with waiting():
        worker = sys.argv.index("-m") + 1
        module = import_worker(sys.argv[worker], sys.argv[worker + 1 :])
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api as processes
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the agent reports instead
    set_log_level(FATAL)
    handle = _at_most_twice(processes._terminate_process_handler, partial(_note_stopping, reports_dir, log_dir))
    processes._terminate_process_handler = handle  # type: ignore[assignment]  # named arguments
    ranks = fork_ranks(module) if module is not None else ()
    if log_dir is not None and _number("--node-rank", "PET_NODE_RANK") == 0:
        with contextlib.suppress(OSError):  # the ranks report a folder that cannot be written
            clear_state(log_dir)
    if note and _number("--node-rank", "PET_NODE_RANK") == 0 and not (options is not None and options.quiet):
        print(f"note: {note}", file=sys.stderr)
    try:
        with waiting():
            torchrun.main(sys.argv[1:])
        _finish()
        return 0
    except ChildFailedError as error:
        _finish()
        return _end(error.failures, log_dir, begun)
    except processes.SignalException as error:
        _finish()
        is_killed = any(rank.returncode == -signal.SIGKILL for rank in ranks)
        return _stop(int(error.sigval), read_reports(reports_dir), options, begun, is_killed=is_killed)
    except (DistError, OSError) as error:
        _finish()
        failed = _rendezvous_failure(error) if isinstance(error, DistError) else _system_failure(error)
        print_error(failed.error, is_json="--json" in sys.argv)
        if log_dir is not None and read_state(log_dir) in (None, earlier):
            _write_failure(failed, log_dir, 0)
        return failed.code


def _send_heartbeats(log_dir: Path) -> None:
    """Let other machines and containers see that this job runs, also while its ranks import or load."""
    path = launcher_heartbeat_path(log_dir)
    while True:
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            path.touch()
        time.sleep(ALIVE_S)


def _at_most_twice(
    stop: Callable[[int, FrameType | None], None], note: Callable[[], None]
) -> Callable[[int, FrameType | None], None]:
    """Pass on two signals: torchrun then waits for its ranks, and would leave them at a third one, while they save.

    `note` runs in a thread, so that a disk that hangs does not delay the signal. A SIGHUP that is ignored so far, as
    below nohup, is not passed on.
    """
    counted, ignores_hangup = itertools.count(1), signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and ignores_hangup:
            return
        if next(counted) == 2:
            _finish()
        with contextlib.suppress(RuntimeError):  # the system refuses a thread
            threading.Thread(target=note, name="note", daemon=True).start()
        stop(number, frame)

    return handle


def _note_stopping(reports_dir: Path, log_dir: Path | None) -> None:
    """Let ranks know that the job was asked to stop; schedulers also stop nodes because one of them has failed."""
    state = read_shared_state(log_dir) if log_dir else None
    if state is None or state.ended != "failed":
        note_stopping(reports_dir)


def _finish() -> None:
    """Ignore further signals: ranks were asked to stop twice, or none is left."""
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN)


def _stop_early(reports_dir: Path) -> None:
    """Note that the job was stopped before a rank was started."""
    shutil.rmtree(reports_dir, ignore_errors=True)
    if (options := _training(sys.argv)) is not None:
        _note_stopped(options.log_dir, 0)


def _note_stopped(log_dir: Path, step: int) -> None:
    """Write `state.json` for a stopped job of this machine; jobs of a scheduler are recognized by its absence."""
    if _LOCAL in sys.argv:
        with contextlib.suppress(OSError):
            write_state(log_dir, RunState(step=step, ended="stopped", code=INTERRUPTED))


def _end(failures: Mapping[int, ProcessFailure], log_dir: Path | None, begun: float) -> int:
    """Report why the ranks ended, unless another node's agent has; return the exit code."""
    beats = read_beats(log_dir, since=begun) if log_dir else ()
    cause = find_cause(failures, beats, partial(_place, beats))
    return INTERRUPTED if cause is None else _report(cause, log_dir, beats)


def _stop(
    number: int, reports: Sequence[ExitReport], options: TrainOptions | None, begun: float, *, is_killed: bool = False
) -> int:
    """Report what went wrong when a signal asked the ranks to stop, if anything did; return the exit code.

    With `is_killed`, torchrun has killed ranks that did not end in time.
    """
    log_dir = options.log_dir if options else None
    beats = read_beats(log_dir, since=begun) if log_dir else ()
    had_to_save = (
        options is not None and options.checkpoint is not None and any(beat.phase != "begin" for beat in beats)
    )
    state = read_state(log_dir) if log_dir else None
    is_unsaved = had_to_save and (state is None or state.ended == "failed")
    cause = find_cause_at_stop(reports, is_unsaved=is_unsaved)
    if cause is None and is_unsaved and is_killed and _LOCAL in sys.argv:  # a scheduler starts such a job again
        assert options is not None, "it had to save"
        problem = f"ranks were killed: they had not saved a checkpoint {options.timeout_s} s after a signal to stop"
        cause = ExitReport(
            kind="failed", code=RankError.exit_code, where=socket.gethostname(), problem=problem,
            hint="raise --timeout, in which the step under way and its checkpoint must end", error_code="rank.killed",
        )  # fmt: skip
    if cause is not None:
        return _report(cause, log_dir, beats)
    if state is not None and state.ended == "done":  # the signal came after the last step
        return 0
    if _find_failure(log_dir) is None:
        say_interrupted(number)
    if log_dir is not None and state is None:
        _note_stopped(log_dir, max((beat.step for beat in beats), default=0))
    return INTERRUPTED


def _report(cause: ExitReport, log_dir: Path | None, beats: Sequence[Beat]) -> int:
    """Report what ended the ranks, unless another node's agent does; return the exit code of that error."""
    if cause.kind != "failed" or cause.is_elsewhere:
        failure = _find_failure(log_dir, _PATIENCE_ELSEWHERE_S if cause.is_elsewhere else _PATIENCE_S)
        if failure is not None:  # the pod that ends first decides whether its JobSet is restarted
            return cause.code if cause.kind == "failed" else failure.code
    print_error(cause.error, is_json="--json" in sys.argv)
    if log_dir is not None:
        _write_failure(cause, log_dir, max((beat.step for beat in beats), default=0))
    return cause.code


def _rendezvous_failure(error: DistError) -> ExitReport:
    """Return a report on a failed rendezvous of nodes, which torch raises before any rank is started."""
    number, num_nodes = _number("--node-rank", "PET_NODE_RANK"), _number("--nnodes")
    address, port = _flag("--master-addr", "PET_MASTER_ADDR"), _flag("--master-port", "PET_MASTER_PORT")
    where = f"node {number}, {socket.gethostname()}"
    missed = f"not all of {num_nodes} nodes reached" if number == 0 else "could not reach node 0 at"
    problem = f"{missed} {address}:{port}: {' '.join(str(error).split())}"
    hint = "check that every node was started, and that no firewall or wrong network interface separates them"
    if "EADDRINUSE" in problem:
        problem, hint = f"port {port} of the rendezvous is used by another process", "stop it, or launch again"
    return ExitReport(
        kind="failed", code=RankError.exit_code, where=where, problem=problem, hint=hint, error_code="rank.unmet"
    )


def _system_failure(error: OSError) -> ExitReport:
    """Return a report on what the system refuses to torchrun, such as a process for one more rank."""
    where = f"node {_number('--node-rank', 'PET_NODE_RANK')}, {socket.gethostname()}"
    refusal = refused_by_system(where, error, "ranks cannot be started", code="system.refused")
    return ExitReport(
        kind="failed", code=code_of(refusal), where=where, problem=refusal.problem, hint=refusal.hint,
        error_code=refusal.code,
    )  # fmt: skip


def _find_failure(log_dir: Path | None, patience_s: float = _PATIENCE_S) -> RunState | None:
    """Return what the agent of another node reports within this time."""
    if log_dir is None or _number("--nnodes") == 1:
        return None
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        state = read_shared_state(log_dir)
        if state is not None and state.ended == "failed":
            return state
        time.sleep(0.1)
    return None


def _write_failure(cause: ExitReport, log_dir: Path, step: int) -> None:
    with contextlib.suppress(OSError):  # the message was printed, even if the disk is full
        log_dir.mkdir(parents=True, exist_ok=True)
        write_state(
            log_dir,
            RunState(step=step, ended="failed", code=cause.code, error=str(cause.error), error_code=cause.error_code),
        )


def _place(beats: Sequence[Beat], rank: int) -> str:
    """Name a rank of this node, with its stages where its heartbeat or the command line shows them."""
    node = socket.gethostname()
    for beat in beats:
        if beat.rank == rank:
            return place_of(rank, beat.stages, node)
    try:
        manifest = open_manifest(sys.argv[sys.argv.index(_WORKER) + 1]).manifest
        world_size = _number("--nnodes") * _number("--nproc-per-node")
        return place_of(rank, stages_of(manifest, rank, world_size), node)
    except (UserError, LookupError, ValueError):
        return place_of(rank, (), node)


def _training(argv: Sequence[str]) -> TrainOptions | None:
    """Return the options of a training run; None: the ranks run something else."""
    try:
        return parse_training(argv[argv.index(_WORKER) + 2 :])
    except (UserError, ValueError):
        return None


def _flag(flag: str, variable: str) -> str:
    """Return the value of a flag of torchrun, which takes those that are not given from the environment."""
    return dict(itertools.pairwise(sys.argv)).get(flag, os.environ.get(variable, ""))


def _number(flag: str, variable: str = "") -> int:
    text = _flag(flag, variable)
    return int(text) if text.isdecimal() else (1 if flag != "--node-rank" else 0)


@contextlib.contextmanager
def print_waiting(log_dir: Path, num_ranks: int, begun: float) -> Iterator[None]:
    """Print what the ranks are waiting for, every ten seconds since `begun` until the first step or the block's end."""
    ended = threading.Event()
    position = _size(log_dir / "metrics.jsonl")

    def watch() -> None:
        printed_s = begun
        while not ended.wait(_POLL_S):
            what = find_awaited(log_dir, num_ranks, since=begun, position=position)
            if what is None:
                return
            now = time.time()
            if now - printed_s >= _EVERY_S:
                printed_s = now
                print(f"{now - begun:.0f} s: waiting for {what}", file=sys.stderr, flush=True)

    watcher = threading.Thread(target=watch, name="waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def find_awaited(log_dir: Path, num_ranks: int, *, since: float, position: int) -> str | None:
    """Return what a run that started at `since` waits for.

    None once metrics have a step after `position`, or if no step follows.
    """
    try:
        with open(log_dir / "metrics.jsonl", "rb") as metrics:
            metrics.seek(position)
            if b'"loss"' in metrics.read():
                return None
    except FileNotFoundError:
        pass
    except OSError:  # unknown
        return None
    num_logging = sum(_is_since(path, since) for path in log_dir.glob("rank-*.log"))
    if num_logging < num_ranks:
        return f"{num_ranks - num_logging} of {num_ranks} ranks to import torch"
    beats = read_beats(log_dir, since=since)
    if any(beat.phase == "end" for beat in beats):  # no step was left to run
        return None
    if (num_ready := len(beats)) < num_ranks:
        return f"{num_ranks - num_ready} of {num_ranks} ranks to meet and load their stages"
    return "the first step to end"


def _is_since(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since - 1  # file systems may cut off what is below a second
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    main()
