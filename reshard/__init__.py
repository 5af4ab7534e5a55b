"""SOURCE to plan to bundles, and back: packing, resharding, exporting, all as plans of byte ranges.

The names in `__all__` are the public API; every other module is private. They are imported when they are first used.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from manifests import __version__
from manifests.command.interpreter import lazy_attributes

if TYPE_CHECKING:
    from manifests.errors import InputError as InputError
    from manifests.errors import LayoutError as LayoutError
    from manifests.errors import ManifestError as ManifestError
    from manifests.errors import ModelError as ModelError
    from manifests.errors import OutputError as OutputError
    from manifests.errors import ScheduleError as ScheduleError
    from manifests.errors import ShardError as ShardError
    from manifests.errors import SignatureError as SignatureError
    from manifests.errors import SourceError as SourceError
    from manifests.errors import StoreError as StoreError
    from manifests.errors import UnreachableError as UnreachableError
    from manifests.errors import UsageError as UsageError
    from manifests.errors import UserError as UserError
    from manifests.models.memory import Memory as Memory
    from manifests.models.memory import MemoryEstimate as MemoryEstimate
    from manifests.module_times import Link as Link
    from manifests.module_times import MeasuredTimes as MeasuredTimes
    from manifests.module_times import ModuleTime as ModuleTime
    from manifests.module_times import StepTime as StepTime
    from manifests.placement import Placement as Placement
    from manifests.schema import Layout as Layout
    from manifests.schema import Manifest as Manifest
    from manifests.schema import Stage as Stage
    from manifests.schema import TieGroup as TieGroup
    from manifests.schema import TieMember as TieMember
    from reshard.checks.check import CheckResult as CheckResult
    from reshard.checks.check import check as check
    from reshard.checks.diff import DiffResult as DiffResult
    from reshard.checks.diff import TensorDifference as TensorDifference
    from reshard.checks.diff import diff as diff
    from reshard.checks.signature import sign as sign
    from reshard.checks.verify import VerifyResult as VerifyResult
    from reshard.checks.verify import verify as verify
    from reshard.copy.parallelism import Parallelism as Parallelism
    from reshard.copy.runs import Progress as Progress
    from reshard.delta.apply import ApplyResult as ApplyResult
    from reshard.delta.apply import apply_delta as apply_delta
    from reshard.delta.chains import ChainEntry as ChainEntry
    from reshard.delta.chains import PruneResult as PruneResult
    from reshard.delta.chains import VerifyChainResult as VerifyChainResult
    from reshard.delta.chains import delta_log as delta_log
    from reshard.delta.chains import prune_delta as prune_delta
    from reshard.delta.chains import verify_delta as verify_delta
    from reshard.delta.publish import PublishResult as PublishResult
    from reshard.delta.publish import fold_delta as fold_delta
    from reshard.delta.publish import publish_delta as publish_delta
    from reshard.estimate.assumptions import Assumptions as Assumptions
    from reshard.estimate.training_estimate import Forecast as Forecast
    from reshard.estimate.training_estimate import StepEstimate as StepEstimate
    from reshard.formats.export import export as export
    from reshard.formats.inspect import PackedModel as PackedModel
    from reshard.formats.inspect import PackedStage as PackedStage
    from reshard.formats.inspect import TensorInfo as TensorInfo
    from reshard.formats.inspect import inspect as inspect
    from reshard.formats.inspect import open as open
    from reshard.formats.table import ExportResult as ExportResult
    from reshard.formats.table import ListedTensor as ListedTensor
    from reshard.formats.table import Listing as Listing
    from reshard.layouts.model import StageLayout as StageLayout
    from reshard.packing.hub_sha256 import HubReport as HubReport
    from reshard.packing.merge import MergeResult as MergeResult
    from reshard.packing.merge import merge as merge
    from reshard.packing.options import PackResult as PackResult
    from reshard.packing.options import Part as Part
    from reshard.packing.pack import pack as pack
    from reshard.packing.parts import commit as commit
    from reshard.packing.plan import PlanResult as PlanResult
    from reshard.packing.plan import layout as layout
    from reshard.packing.plan import plan as plan
    from reshard.packing.push import PushResult as PushResult
    from reshard.packing.push import push as push
    from reshard.plans.pack_plan import StagePlan as StagePlan
    from reshard.tensors.comparison import Finding as Finding
    from reshard.transforms.conversion import Conversion as Conversion


_NAMES_BY_MODULE = {
    "manifests.errors": (
        "InputError",
        "LayoutError",
        "ManifestError",
        "ModelError",
        "OutputError",
        "ScheduleError",
        "ShardError",
        "SignatureError",
        "SourceError",
        "StoreError",
        "UnreachableError",
        "UsageError",
        "UserError",
    ),
    "manifests.models.memory": ("Memory", "MemoryEstimate"),
    "manifests.placement": ("Placement",),
    "manifests.schema": ("Layout", "Manifest", "Stage", "TieGroup", "TieMember"),
    "reshard.checks.check": ("CheckResult", "check"),
    "reshard.checks.diff": ("DiffResult", "TensorDifference", "diff"),
    "reshard.checks.signature": ("sign",),
    "reshard.checks.verify": ("VerifyResult", "verify"),
    "reshard.copy.parallelism": ("Parallelism",),
    "reshard.copy.runs": ("Progress",),
    "reshard.delta.apply": ("ApplyResult", "apply_delta"),
    "reshard.delta.chains": (
        "ChainEntry",
        "PruneResult",
        "VerifyChainResult",
        "delta_log",
        "prune_delta",
        "verify_delta",
    ),
    "reshard.delta.publish": ("PublishResult", "fold_delta", "publish_delta"),
    "reshard.estimate.assumptions": ("Assumptions",),
    "manifests.module_times": ("Link", "MeasuredTimes", "ModuleTime", "StepTime"),
    "reshard.estimate.training_estimate": ("Forecast", "StepEstimate"),
    "reshard.formats.export": ("export",),
    "reshard.formats.inspect": ("PackedModel", "PackedStage", "TensorInfo", "inspect", "open"),
    "reshard.formats.table": ("ExportResult", "ListedTensor", "Listing"),
    "reshard.layouts.model": ("StageLayout",),
    "reshard.packing.hub_sha256": ("HubReport",),
    "reshard.packing.parts": ("commit",),
    "reshard.packing.merge": ("MergeResult", "merge"),
    "reshard.packing.pack": ("pack",),
    "reshard.packing.push": ("PushResult", "push"),
    "reshard.packing.plan": ("PlanResult", "layout", "plan"),
    "reshard.packing.options": ("PackResult", "Part"),
    "reshard.plans.pack_plan": ("StagePlan",),
    "reshard.tensors.comparison": ("Finding",),
    "reshard.transforms.conversion": ("Conversion",),
}
__all__ = ["__version__", *chain.from_iterable(_NAMES_BY_MODULE.values())]
__getattr__, __dir__ = lazy_attributes(__name__, _NAMES_BY_MODULE)
