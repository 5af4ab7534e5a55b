"""From a manifest to a training pipeline: each rank builds, loads and trains its own stages.

The names in `__all__` are the public API; every other module is private. All but errors are imported when first used.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from manifests import __version__
from manifests.command.interpreter import lazy_attributes
from manifests.errors import (
    CheckpointError,
    DataError,
    InputError,
    LaunchError,
    LayoutError,
    LogError,
    ManifestError,
    ModelError,
    OutputError,
    RankError,
    ScheduleError,
    ShardError,
    SourceError,
    StoreError,
    UnreachableError,
    UsageError,
    UserError,
)

if TYPE_CHECKING:
    from runner.checkpoint.own_module import save_stages
    from runner.data.own import DataRequest, Dataset
    from runner.evaluation.command import Evaluation, evaluate
    from runner.load.own_module import LoadResult, StateDictAdapter, load_stages
    from runner.models.family import Family
    from runner.models.own import FamilyRequest, NamedFamily, generic_family
    from runner.pipeline.losses import LossFunction, PerRow, PerToken
    from runner.tensors.local_shard import Piece


__all__ = [
    "CheckpointError",
    "DataError",
    "DataRequest",
    "Dataset",
    "Evaluation",
    "Family",
    "FamilyRequest",
    "InputError",
    "LaunchError",
    "LayoutError",
    "LoadResult",
    "LogError",
    "LossFunction",
    "ManifestError",
    "ModelError",
    "NamedFamily",
    "OutputError",
    "PerRow",
    "PerToken",
    "Piece",
    "RankError",
    "ScheduleError",
    "ShardError",
    "SourceError",
    "StateDictAdapter",
    "StoreError",
    "UnreachableError",
    "UsageError",
    "UserError",
    "__version__",
    "evaluate",
    "generic_family",
    "load_stages",
    "save_stages",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "runner.checkpoint.own_module": ("save_stages",),
        "runner.load.own_module": ("LoadResult", "StateDictAdapter", "load_stages"),
        "runner.data.own": ("DataRequest", "Dataset"),
        "runner.evaluation.command": ("Evaluation", "evaluate"),
        "runner.models.family": ("Family",),
        "runner.models.own": ("FamilyRequest", "NamedFamily", "generic_family"),
        "runner.pipeline.losses": ("LossFunction", "PerRow", "PerToken"),
        "runner.tensors.local_shard": ("Piece",),
    },
)

# Importing torch takes seconds, in which Ctrl-C would print a traceback for each rank. Processes that `runner launch`
# started exit silently instead; once there is something to say, `runner.distributed` handles it.
if os.environ.get("RUNNER_AGENT") in (str(os.getpid()), str(os.getppid())):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
