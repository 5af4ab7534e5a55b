"""SOURCE to plan to bundles, and back: packing, resharding, exporting, all as plans of byte ranges.

The names in `__all__` are the public API; every other module is private. They are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from manifests.lazy import lazy_attributes

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
    from manifests.memory import Memory, MemoryEstimate
    from manifests.placement import Placement
    from manifests.schema import Layout, Manifest, Stage, TieGroup, TieMember
    from reshard.api.check import check
    from reshard.api.diff import diff
    from reshard.api.export import export
    from reshard.api.pack import pack
    from reshard.api.packed import PackedModel, PackedStage, TensorInfo, open
    from reshard.api.plan import plan
    from reshard.api.push import push
    from reshard.api.sign import sign
    from reshard.api.verify import verify
    from reshard.checks.check import CheckResult
    from reshard.checks.finding import Finding
    from reshard.copy.parallelism import Parallelism
    from reshard.estimate.assumptions import Assumptions
    from reshard.estimate.costs import ModuleTime
    from reshard.estimate.training_estimate import Forecast, StepEstimate
    from reshard.layout.model import StageLayout
    from reshard.operations.compare import Difference
    from reshard.operations.diff import DiffResult, TensorDifference
    from reshard.operations.export import ExportResult
    from reshard.operations.hub_check import HubReport
    from reshard.operations.pack_result import PackResult
    from reshard.operations.progress import Progress
    from reshard.operations.push import PushResult
    from reshard.operations.resolve import PlanResult
    from reshard.operations.verify import VerifyResult
    from reshard.plans.pack_plan import StagePlan
    from reshard.transforms.conversion import Conversion

    __version__: str

__all__ = [
    "Assumptions",
    "CheckResult",
    "Conversion",
    "DiffResult",
    "Difference",
    "ExportResult",
    "Finding",
    "Forecast",
    "HubReport",
    "InputError",
    "Layout",
    "LayoutError",
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
    "diff",
    "export",
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
        "manifests.memory": ("Memory", "MemoryEstimate"),
        "manifests.placement": ("Placement",),
        "manifests.schema": ("Layout", "Manifest", "Stage", "TieGroup", "TieMember"),
        "reshard.api.check": ("check",),
        "reshard.api.diff": ("diff",),
        "reshard.api.export": ("export",),
        "reshard.api.pack": ("pack",),
        "reshard.api.packed": ("PackedModel", "PackedStage", "TensorInfo", "open"),
        "reshard.api.plan": ("plan",),
        "reshard.api.push": ("push",),
        "reshard.api.sign": ("sign",),
        "reshard.api.verify": ("verify",),
        "reshard.checks.check": ("CheckResult",),
        "reshard.checks.finding": ("Finding",),
        "reshard.copy.parallelism": ("Parallelism",),
        "reshard.estimate.assumptions": ("Assumptions",),
        "reshard.estimate.costs": ("ModuleTime",),
        "reshard.estimate.training_estimate": ("Forecast", "StepEstimate"),
        "reshard.layout.model": ("StageLayout",),
        "reshard.operations.compare": ("Difference",),
        "reshard.operations.diff": ("DiffResult", "TensorDifference"),
        "reshard.operations.export": ("ExportResult",),
        "reshard.operations.hub_check": ("HubReport",),
        "reshard.operations.pack_result": ("PackResult",),
        "reshard.operations.progress": ("Progress",),
        "reshard.operations.push": ("PushResult",),
        "reshard.operations.resolve": ("PlanResult",),
        "reshard.operations.verify": ("VerifyResult",),
        "reshard.plans.pack_plan": ("StagePlan",),
        "reshard.transforms.conversion": ("Conversion",),
    },
)
