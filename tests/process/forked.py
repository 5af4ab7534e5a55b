"""`runner` commands whose process and ranks are forked, where starting Python and importing torch takes 20 s of a test.

A command is the process that its ranks are children of, with their signals, sessions and exit codes, as if each had
been started; `torchrun.py` has the process that all of them are forked from. `runner` of `local_jobs.py` starts Python,
and it alone sees flags of the interpreter, files that are open, and what `runner` does when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.process.torchrun import ROOT, fork_context


class Forked:
    """A forked command, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        module: str = "runner.cli",
    ) -> None:
        target = (("-m", module, *arguments), dict(environment), output, errors or output)
        self._process: ForkServerProcess = fork_context().Process(target=_begin, args=target)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("runner", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its code is not here yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Rank:
    """A child of this process, as torchrun sees it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return code


def _begin(command: Sequence[str], environment: dict[str, str], output: Path, errors: Path) -> NoReturn:
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    gc.freeze()
    handler: Any = subprocess_handler.subprocess_handler.SubprocessHandler
    handler._popen = lambda self, command, own: _fork(command, own)
    os.execve = lambda path, command, own: _run(command, own)  # type: ignore[assignment]
    os.chdir(ROOT)
    _run(command, environment)


def _fork(command: Sequence[str], environment: Mapping[str, str]) -> _Rank:
    if not (pid := os.fork()):
        os.setsid()
        _run(command, environment)
    return _Rank(pid)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a module as Python would that was started here: with no file but the streams, and signals as they begin."""
    code: object = 1
    try:
        atexit._clear()  # of the process that this was forked from
        if (writer := signal.set_wakeup_fd(-1)) >= 0:
            os.close(writer)  # ends the thread that reads from it
        for thread in threading.enumerate():
            if thread.name == "signals":
                thread.join()
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(environment)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where tests run below nohup
        is_rank = os.environ.get("RUNNER_AGENT") == str(os.getppid())
        signal.signal(signal.SIGINT, signal.SIG_DFL if is_rank else signal.default_int_handler)
        logging.root.handlers.clear()
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
        for folder in folders:
            if (custom := Path(folder, "sitecustomize.py")).is_file():
                site = sys.modules["sitecustomize"] = ModuleType("sitecustomize")
                site.__file__ = str(custom)
                runpy.run_path(site.__file__)
        at = command.index("-m") + 1
        spec = importlib.util.find_spec(command[at])
        assert spec is not None
        assert spec.origin is not None
        sys.argv = [spec.origin, *command[at + 1 :]]
        runpy.run_path(spec.origin, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
