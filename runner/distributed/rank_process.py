"""One rank's process: it runs a function, reports errors, and exits with the right code."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.distributed as dist

from manifests.command.console import open_streams
from manifests.errors import RankError, UserError, naming_flags
from runner.distributed.fail_together import OneRankError, causes, exhausted, unforeseen, unreachable
from runner.distributed.watchdog import StoppedError, run_briefly
from runner.distributed.world import World
from runner.rundir.exit_report import AGENT, ExitReport, code_of, rank_label, report_exit, set_rank_label

logger = logging.getLogger("runner")
_PR_SET_PDEATHSIG = 1  # of prctl, in Linux's sys/prctl.h
_INTERRUPTED = 130


def run_rank(act: Callable[[World], None], *, is_json: bool = False, is_quiet: bool = False) -> None:
    """Run `act` as one rank, and exit with its code. Errors of all ranks are printed once; `is_quiet`: only errors."""
    open_streams()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for terminal in logging.getLogger().handlers if is_quiet else ():
        terminal.setLevel(logging.WARNING)
    logging.getLogger("torch.distributed.pipelining").setLevel(
        logging.CRITICAL
    )  # it logs its whole schedule at any failure
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request, with the signature of a signed URL
    _end_with_agent()
    world, code = World.from_environment(os.environ), 0
    set_rank_label(world.rank)
    try:
        with naming_flags():
            act(world)
    except StoppedError as stopped:
        code = stopped.exit_code
        if world.rank == 0:
            logger.info("%s", stopped)
    except UserError as error:
        is_mine = world.rank == 0 or isinstance(error, OneRankError)
        code = _fail(error, echo="json" if is_json and is_mine else is_mine)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        code = _crash(error, world)
    run_briefly(logging.shutdown)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # destroy_process_group could hang waiting for a rank that has exited
    dist.destroy_process_group()


def _end_with_agent() -> None:
    """Receive SIGTERM when the agent exits, for whatever reason: nothing else would stop this rank then."""
    agent = os.environ.get(AGENT)
    if agent is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the agent reports the interrupt
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    try:
        os.kill(int(agent), 0)
    except ProcessLookupError:  # it has exited already
        os._exit(RankError.exit_code)


def _fail(error: UserError, *, echo: bool | Literal["json"] = True) -> int:
    """Report an error with the job's exit code; return this process's own, which says whether another rank failed."""
    code = code_of(error)
    report = ExitReport(
        kind="failed", code=code, where=error.where, problem=error.problem, hint=error.hint,
        is_elsewhere=error.is_elsewhere, error_code=error.code,
    )  # fmt: skip
    run_briefly(partial(report_exit, report, echo=echo))
    return RankError.exit_code if error.is_elsewhere else code


def _crash(error: Exception, world: World) -> int:
    """Report what ended this rank: in a line if it is foreseen or wrapped by torch, otherwise with its traceback."""
    place = rank_label(world.rank)
    wrapped = next((cause for cause in causes(error) if isinstance(cause, UserError)), None)
    if (refusal := wrapped or exhausted(error) or unreachable(error)) is not None:
        return _fail(refusal.on_rank(place))
    lost = [cause for cause in causes(error) if isinstance(cause, dist.DistError) or "gloo" in str(cause).lower()]
    if lost:
        reason = str(lost[0]).splitlines()[0].partition(". ")[0][:200]
        problem = f"lost the connection to another rank, or timed out waiting for it: {reason}"
        report = ExitReport(kind="lost", code=RankError.exit_code, where=place, problem=problem, error_code="rank.lost")
        run_briefly(partial(report_exit, report))
        return report.code
    return _fail(unforeseen(error, place, traceback.format_exc().rstrip()))
