"""SOURCE to plan to bundles, and back: packing, resharding, exporting, all as plans of byte ranges.

The names in `__all__` are the public API; every other module is private. They are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from manifests import __version__
from manifests.command.interpreter import lazy_attributes

if TYPE_CHECKING:
    from manifests.errors import (
        InputError,
        LayoutError,
        ManifestError,
        ModelError,
        OutputError,
        ScheduleError,
        ShardError,
        SignatureError,
        SourceError,
        StoreError,
        UnreachableError,
        UsageError,
        UserError,
    )
    from manifests.models.memory import Memory, MemoryEstimate
    from manifests.placement import Placement
    from manifests.schema import Layout, Manifest, Stage, TieGroup, TieMember
    from reshard.checks.check import CheckResult, check
    from reshard.checks.diff import DiffResult, TensorDifference, diff
    from reshard.checks.signature import sign
    from reshard.checks.verify import VerifyResult, verify
    from reshard.copy.parallelism import Parallelism
    from reshard.copy.runs import Progress
    from reshard.estimate.assumptions import Assumptions
    from reshard.estimate.costs import ModuleTime
    from reshard.estimate.training_estimate import Forecast, StepEstimate
    from reshard.formats.export import export
    from reshard.formats.inspect import PackedModel, PackedStage, TensorInfo, inspect, open
    from reshard.formats.table import ExportResult, ListedTensor, Listing
    from reshard.layouts.model import StageLayout
    from reshard.packing.hub_sha256 import HubReport
    from reshard.packing.options import PackResult
    from reshard.packing.pack import pack
    from reshard.packing.parts import commit
    from reshard.packing.plan import PlanResult, layout, plan
    from reshard.packing.push import PushResult, push
    from reshard.plans.pack_plan import StagePlan
    from reshard.plans.partition import Part
    from reshard.tensors.comparison import Finding
    from reshard.transforms.conversion import Conversion


__all__ = [
    "Assumptions",
    "CheckResult",
    "Conversion",
    "DiffResult",
    "ExportResult",
    "Finding",
    "Forecast",
    "HubReport",
    "InputError",
    "Layout",
    "LayoutError",
    "ListedTensor",
    "Listing",
    "Manifest",
    "ManifestError",
    "Memory",
    "MemoryEstimate",
    "ModelError",
    "ModuleTime",
    "OutputError",
    "PackResult",
    "PackedModel",
    "PackedStage",
    "Parallelism",
    "Part",
    "Placement",
    "PlanResult",
    "Progress",
    "PushResult",
    "ScheduleError",
    "ShardError",
    "SignatureError",
    "SourceError",
    "Stage",
    "StageLayout",
    "StagePlan",
    "StepEstimate",
    "StoreError",
    "TensorDifference",
    "TensorInfo",
    "TieGroup",
    "TieMember",
    "UnreachableError",
    "UsageError",
    "UserError",
    "VerifyResult",
    "__version__",
    "check",
    "commit",
    "diff",
    "export",
    "inspect",
    "layout",
    "open",
    "pack",
    "plan",
    "push",
    "sign",
    "verify",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
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
        "reshard.estimate.assumptions": ("Assumptions",),
        "reshard.estimate.costs": ("ModuleTime",),
        "reshard.estimate.training_estimate": ("Forecast", "StepEstimate"),
        "reshard.formats.export": ("export",),
        "reshard.formats.inspect": ("PackedModel", "PackedStage", "TensorInfo", "inspect", "open"),
        "reshard.formats.table": ("ExportResult", "ListedTensor", "Listing"),
        "reshard.layouts.model": ("StageLayout",),
        "reshard.packing.hub_sha256": ("HubReport",),
        "reshard.packing.parts": ("commit",),
        "reshard.packing.pack": ("pack",),
        "reshard.packing.push": ("PushResult", "push"),
        "reshard.packing.plan": ("PlanResult", "layout", "plan"),
        "reshard.packing.options": ("PackResult",),
        "reshard.plans.pack_plan": ("StagePlan",),
        "reshard.plans.partition": ("Part",),
        "reshard.tensors.comparison": ("Finding",),
        "reshard.transforms.conversion": ("Conversion",),
    },
)
