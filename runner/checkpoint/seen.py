"""Whether all ranks see the same checkpoints: a mount may answer from its node's cache, and a copy may lag behind.

What one rank does not see, and another does, is not damaged: resuming an older checkpoint would lose steps, and set
this one aside. What no rank sees is gone. Every rank calls these.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from manifests.errors import UnreachableError, system_errors
from manifests.index import DIGESTS_NAME, SIGNATURE_NAME
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
        _refresh(checkpoint_path(history, max(steps)))
        time.sleep(pause_s)
    with raise_on_all_ranks("resume"):
        if step < max(steps):
            raise _unseen(checkpoint_path(history, max(steps)))


def see_all(checkpoint: Path) -> bool:
    """Return whether all ranks see all files of a checkpoint; refuse one of which some see more than others."""
    for pause_s in (*PAUSES_S, 0.0):
        with raise_on_all_ranks("load"), system_errors(checkpoint, code="store.unreadable"):
            names = {MANIFEST_NAME, *(files_of_manifest(checkpoint) or ())} - {SIGNATURE_NAME, DIGESTS_NAME}
            unseen = {name for name in names if not is_file(checkpoint / name)}
        of_ranks = from_all_ranks(unseen)
        if all(of_rank == unseen for of_rank in of_ranks):
            return not unseen
        for name in unseen:
            _refresh((checkpoint / name).parent)
        time.sleep(pause_s)
    of_others = [of_rank for of_rank in of_ranks if MANIFEST_NAME not in of_rank]
    with raise_on_all_ranks("load"):
        for name in sorted(unseen):
            if not all(name in of_rank for of_rank in of_others):
                raise _unseen(checkpoint / name)
    raise AssertionError("sets that differ have a name that is not in all of them")


def _refresh(folder: Path) -> None:
    with suppress(OSError):
        os.listdir(folder)  # opening a folder makes NFS ask its server


def _unseen(path: Path) -> UnreachableError:
    problem = "another rank sees this part of a checkpoint, and this node does not"
    hint = "--checkpoint must be in a folder that all nodes share; start again if a copy or a cache may lag behind"
    return UnreachableError(str(path), problem, hint, code="checkpoint.not-shared")
