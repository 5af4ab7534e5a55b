"""Ranks forked from the agent, which has imported what they run: once a node, not once a rank.

# Note [Forked ranks]
Importing torch, transformers and the schedules takes most of the time until the first step of a small model. So the
agent imports what its ranks run, and forks each rank where torchrun would start Python.
A forked rank gets what a started one has: a session (before torchrun knows the rank, as it signals sessions),
default signals, new streams, torchrun's environment, its own arguments, no other open file, random numbers of its own;
a sitecustomize runs again; at its end threads are waited for and exit handlers run, but none clears up for the agent.
Signals that arrive while ranks are started are handled once torchrun knows all of them. The agent's other threads wait,
touch its heartbeat, or print what is waited for: a rank has new streams before it does anything that could need a lock
of theirs.
Python is started all the same where a fork is not safe: after CUDA was initialized here (a package that does that when
it is imported), below numactl, where the worker cannot be imported (ranks report that), and on other systems.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, Any, NoReturn

_BRIEFLY = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # no thread pool, no CUDA in the agent
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1  # of prctl, in Linux's sys/prctl.h
WARNING, FATAL = 1, 3  # of torch's C++ messages; WARNING is its default


class ForkedRank:
    """A forked rank, with what torchrun uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal; None while it runs."""
        if self.returncode is None:
            try:
                # The code is set first: a signal's handler may raise here, and what was reaped has no code any more.
                if (ended := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                    is_exit = ended.si_code == os.CLD_EXITED
                    self.returncode = ended.si_status if is_exit else -ended.si_status
                    os.waitpid(self.pid, 0)
            except ChildProcessError:  # someone else reaped it; Popen calls that 0, which would hide a failure
                self.returncode = 1 if self.returncode is None else self.returncode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(_POLL_S)
        return code


def import_worker(worker: str, arguments: Sequence[str]) -> ModuleType | None:
    """Import the module that ranks run, and what it imports later for these arguments; None: ranks are not forked."""
    if not sys.platform.startswith("linux"):
        return None
    added = {name: value for name, value in _BRIEFLY.items() if name not in os.environ}
    os.environ.update(added)
    try:
        module = importlib.import_module(worker)
        if prepare := getattr(module, "prepare", None):
            with contextlib.suppress(Exception):  # the ranks meet it again, and report it
                prepare(arguments)
    except Exception:
        return None
    finally:
        for name in added:
            del os.environ[name]
    return module


def fork_ranks(module: ModuleType) -> Sequence[ForkedRank]:
    """Make torchrun fork its ranks, which run the `main` of this module; see Note [Forked ranks].

    Returns them, once they have been forked.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    handler: Any = SubprocessHandler
    context: Any = SubprocessContext
    start, start_all = handler._popen, context._start
    ranks: list[ForkedRank] = []

    def fork(self: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        if command[0] != sys.executable or "-m" not in command:
            return start(self, command, environment)
        ranks.append(_fork(module, command, environment, (self._stdout, self._stderr)))
        return ranks[-1]

    def start_whole(self: Any) -> None:
        ranks.clear()
        with _signals_deferred():
            try:
                start_all(self)
            except BaseException:  # torchrun has none of them
                for rank in ranks:
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        os.killpg(rank.pid, signal.SIGKILL)
                    rank.wait()
                raise

    handler._popen, context._start = fork, start_whole
    return ranks


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle signals after the block. To block them is not enough: handlers run for what other threads receive, too."""
    arrived: list[int] = []
    is_deferring = True
    handlers: dict[int, Any] = {int(number): signal.getsignal(number) for number in signal.valid_signals()}

    def handle(number: int, frame: FrameType | None) -> None:
        if is_deferring:
            arrived.append(number)
        else:
            handlers[number](number, frame)

    try:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handle)  # stays: to put the others back takes time, too
        yield
    finally:
        is_deferring = False
        for arrival in dict.fromkeys(arrived):
            signal.raise_signal(arrival)


def set_log_level(level: int) -> None:
    """Set the level of torch's C++ messages in this process, unless TORCH_CPP_LOG_LEVEL does."""
    import torch

    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):  # a torch that is built otherwise
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = level


def _close_files() -> None:
    """Close what the agent has open, besides the streams and devices, which drivers' libraries keep using."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            if number > 2 and not stat.S_ISCHR(os.fstat(number).st_mode):
                os.close(number)


def _fork(
    module: ModuleType, command: Sequence[str], environment: Mapping[str, str], files: Sequence[IO[str] | None]
) -> ForkedRank:
    gc.freeze()  # no collection of a rank goes through, and so copies, what was imported
    sys.stdout.flush()
    sys.stderr.flush()
    agent, (reader, writer) = os.getpid(), os.pipe()
    # A signal before the rank has its own handlers would run the agent's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        if not (pid := os.fork()):
            os.setsid()
            os.close(writer)
            _run(module, command, environment, files, before, agent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)
        os.read(reader, 1)  # the end of the file: the rank leads its session, or has ended
        os.close(reader)
    return ForkedRank(pid)


def _run(
    module: ModuleType,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[IO[str] | None],
    unblocked: Any,
    agent: int,
) -> NoReturn:
    """Run the module as Python does that was started; see Note [Forked ranks]."""
    code: object = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != agent:  # it ended before that
            os._exit(1)
        for number, file in enumerate(files, 1):
            if file is not None:
                os.dup2(file.fileno(), number)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]  # as when Python starts
        signal.set_wakeup_fd(-1)  # the agent's
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        _close_files()
        import torch

        if torch.cuda._is_in_bad_fork():
            os.execve(command[0], list(command), environment)
        os.environ.clear()
        os.environ.update(environment)
        set_log_level(WARNING)
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # such as the agent's temporary folder; exit handlers of modules stay
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # as when it is imported; Python's random does that itself
        sys.argv = [str(module.__file__), *command[command.index("-m") + 2 :]]
        for name in ("sitecustomize", "usercustomize"):  # code of the site may depend on the rank
            if (path := getattr(sys.modules.get(name), "__file__", None)) is not None:
                runpy.run_path(path)
        module.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for all but daemon threads
            atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
