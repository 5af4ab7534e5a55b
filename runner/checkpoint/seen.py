"""Whether all ranks see the same checkpoints: a mount may answer from its node's cache, and a copy may lag behind.

What one rank does not see, and another does, is not damaged: resuming an older checkpoint would lose steps, and set
this one aside. What no rank sees is gone. Every rank calls these.
"""

from __future__ import annotations

import time
from pathlib import Path

from manifests.errors import UnreachableError, system_errors
from manifests.invariants import MANIFEST_NAME
from manifests.paths import is_file
from runner.checkpoint.history import checkpoint_path, newest_step
from runner.checkpoint.save import PAUSES_S
from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks
from stores.folders.owned import files_of_manifest

ABSENT = ("manifest.missing", "manifest.missing-file", "manifest.no-such-folder", "shard.missing")


def check_newest(history: Path) -> None:
    """Check that all ranks see the same newest checkpoint of a folder."""
    for pause_s in (*PAUSES_S, 0.0):
        with raise_on_all_ranks("resume"):
            step = newest_step(history)
        steps = from_all_ranks(step)
        if len({*steps}) == 1:
            return
        time.sleep(pause_s)
    with raise_on_all_ranks("resume"):
        if step < max(steps):
            raise _unseen(checkpoint_path(history, max(steps)))


def check_files(checkpoint: Path) -> None:
    """Check that all ranks see the same files of a checkpoint of which one does not see all."""
    with raise_on_all_ranks("load"), system_errors(checkpoint, code="store.unreadable"):
        names = {MANIFEST_NAME, *(files_of_manifest(checkpoint) or ())}
        unseen = {name for name in names if not is_file(checkpoint / name)}
    of_others = [of_rank for of_rank in from_all_ranks(unseen) if MANIFEST_NAME not in of_rank]
    with raise_on_all_ranks("load"):
        for name in sorted(unseen):
            if not all(name in of_rank for of_rank in of_others):
                raise _unseen(checkpoint / name)


def _unseen(path: Path) -> UnreachableError:
    problem = "another rank sees this part of a checkpoint, and this node does not"
    hint = "--checkpoint must be in a folder that all nodes share; start again if a copy or a cache may lag behind"
    return UnreachableError(str(path), problem, hint, code="checkpoint.not-shared")
