"""One rank's process: what it does, how it says what went wrong, and its exit code."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Literal

import torch.distributed as dist

from manifests.console import open_streams
from manifests.errors import RankError, UserError
from runner.distributed.fail_together import AloneError
from runner.distributed.system_errors import causes, exhausted, unreachable
from runner.distributed.watchdog import StoppedError
from runner.distributed.world import World
from runner.rundir.exit_report import AGENT, ExitReport, code_of, report_exit
from runner.rundir.rank_label import rank_label, set_rank_label

__all__ = ["run_rank"]

logger = logging.getLogger("runner")
_PR_SET_PDEATHSIG = 1  # of prctl, in Linux's sys/prctl.h
_INTERRUPTED = 130


def run_rank(act: Callable[[World], None], *, is_json: bool = False, is_quiet: bool = False) -> None:
    """Act as one rank, and end with its exit code. What all ranks know is said once; `is_quiet`: errors alone."""
    open_streams()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for terminal in logging.getLogger().handlers if is_quiet else ():
        terminal.setLevel(logging.WARNING)
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # its whole schedule, at any failure
    _end_with_agent()
    world, code = World.from_environment(os.environ), 0
    set_rank_label(world.rank)
    try:
        act(world)
    except StoppedError as stopped:
        code = stopped.exit_code
        if world.rank == 0:
            logger.info("%s", stopped)
    except UserError as error:
        is_mine = world.rank == 0 or isinstance(error, AloneError)
        code = _told(error, echo="json" if is_json and is_mine else is_mine)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        code = _report(error, world)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a peer may be gone: waiting for it in destroy_process_group could hang
    dist.destroy_process_group()


def _end_with_agent() -> None:
    """Be sent SIGTERM when the agent is gone, however it ended: nobody else would stop this rank then."""
    agent = os.environ.get(AGENT)
    if agent is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the agent says that it was interrupted
    with contextlib.suppress(AttributeError):  # another kernel than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    try:
        os.kill(int(agent), 0)
    except ProcessLookupError:  # it was gone before
        os._exit(RankError.exit_code)


def _told(error: UserError, *, echo: bool | Literal["json"] = True) -> int:
    """Tell what the job ends by, with its code; give this process's own: it failed, or another rank did."""
    code = code_of(error)
    told = ExitReport(
        kind="failed", code=code, where=error.where, problem=error.problem, hint=error.hint,
        is_elsewhere=error.is_elsewhere, error_code=error.code,
    )  # fmt: skip
    report_exit(told, echo=echo)
    return RankError.exit_code if error.is_elsewhere else code


def _report(error: Exception, world: World) -> int:
    """Say what ended this rank: too little memory or a lost peer in a line, our own bug with its traceback."""
    place = rank_label(world.rank)
    if (said := exhausted(error) or unreachable(error)) is not None:
        return _told(said.on_rank(place))
    lost = [cause for cause in causes(error) if isinstance(cause, dist.DistError) or "gloo" in str(cause).lower()]
    if lost:
        reason = str(lost[0]).splitlines()[0].partition(". ")[0][:200]
        problem = f"another rank is gone or too slow: {reason}"
        report_exit(
            ExitReport(kind="lost", code=RankError.exit_code, where=place, problem=problem, error_code="rank.lost")
        )
        return RankError.exit_code
    problem = traceback.format_exc().rstrip()
    report_exit(ExitReport(kind="failed", code=1, where=place, problem=problem, error_code="rank.bug"))
    return 1
