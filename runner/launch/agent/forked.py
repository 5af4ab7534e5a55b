"""Ranks forked from the agent, which has imported what they run: once a node, not once a rank.

# Note [Forked ranks]
Importing torch, transformers and the schedules takes most of the time until the first step of a small model. So the
agent imports what its ranks run before it has a second thread, and forks each rank where torchrun would start Python.
A forked rank gets what a started one has: a session, default signals, new streams, torchrun's environment, its own
arguments, no other open file; a sitecustomize runs again; and it ends without what the agent would do at its exit.
Python is started all the same where a fork is not safe: after CUDA was initialized here (a package that does that when
it is imported), below numactl, where the worker cannot be imported (ranks report that), and on other systems.
"""

from __future__ import annotations

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
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

_BRIEFLY = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # no thread pool, no CUDA in the agent
_POLL_S = 0.01
WARNING, FATAL = 1, 3  # of torch's C++ messages; WARNING is its default


class ForkedRank:
    """A forked rank, with what torchrun uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
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


def fork_ranks(module: ModuleType) -> None:
    """Make torchrun fork its ranks, which run the `main` of this module; see Note [Forked ranks]."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    handler: Any = SubprocessHandler
    start = handler._popen

    def fork(self: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        if command[0] != sys.executable or "-m" not in command:
            return start(self, command, environment)
        return _fork(module, command, environment, (self._stdout, self._stderr))

    handler._popen = fork


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
    # A signal before the rank has its own handlers would run the agent's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if not (pid := os.fork()):
        _run(module, command, environment, files, before)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # runs the handler of one that has arrived
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # torchrun will not learn of this rank
        os.waitpid(pid, 0)
        raise
    return ForkedRank(pid)


def _run(
    module: ModuleType,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[IO[str] | None],
    unblocked: Any,
) -> NoReturn:
    """Run the module as Python does that was started; see Note [Forked ranks]."""
    import torch

    code: object = 1
    try:
        os.setsid()
        for number, file in enumerate(files, 1):
            if file is not None:
                os.dup2(file.fileno(), number)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        _close_files()
        if torch.cuda._is_in_bad_fork():
            os.execve(command[0], list(command), environment)
        os.environ.clear()
        os.environ.update(environment)
        set_log_level(WARNING)
        sys.argv = [str(module.__file__), *command[command.index("-m") + 2 :]]
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]  # as when Python starts
        for name in ("sitecustomize", "usercustomize"):  # code of the site may depend on the rank
            if (path := getattr(sys.modules.get(name), "__file__", None)) is not None:
                runpy.run_path(path)
        module.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
