"""One rank's process: what it does, how it says what went wrong, and its exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist

from manifests.errors import RankError, UserError, error_json
from runner.life import StoppedError
from runner.together import AloneError
from runner.world import World

__all__ = ["run_rank"]

logger = logging.getLogger("runner")


def run_rank(act: Callable[[World], None], *, is_json: bool = False) -> None:
    """Act as one rank, and end with its exit code. What all ranks know is said by rank 0 alone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # its whole schedule, at any failure
    world, code = World.from_environment(os.environ), 0
    try:
        act(world)
    except StoppedError as stopped:
        code = stopped.exit_code
        if world.rank == 0:
            logger.info("%s", stopped)
    except UserError as error:
        code = error.exit_code
        if world.rank == 0 or isinstance(error, AloneError):
            if is_json:
                print(error_json(error), flush=True)
            else:
                logger.error("error: %s", error)
    except Exception as error:
        code = _report(error, world)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a peer may be gone: waiting for it in destroy_process_group could hang
    dist.destroy_process_group()


def _report(error: Exception, world: World) -> int:
    """Say what ended this rank: a lost peer in a line, our own bug with its traceback."""
    if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
        reason = str(error).splitlines()[0].partition(". ")[0][:200]
        logger.error("[rank %d] another rank is gone or too slow: %s", world.rank, reason)
        return RankError.exit_code
    logger.error("[rank %d] %s", world.rank, traceback.format_exc())
    return 1
