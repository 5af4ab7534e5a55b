"""SOURCE to plan to bundles, and back: packing, resharding, exporting, all as plans of byte ranges.

The names in `__all__` are the public API; every other module is private. They are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from reshard.api.check import check
    from reshard.api.commit import commit
    from reshard.api.diff import diff
    from reshard.api.export import export
    from reshard.api.inspect import inspect
    from reshard.api.layout import layout
    from reshard.api.pack import pack
    from reshard.api.packed import PackedModel, PackedStage, TensorInfo, open
    from reshard.api.plan import plan
    from reshard.api.push import push
    from reshard.api.sign import sign
    from reshard.api.verify import verify
    from reshard.checks.check import CheckResult
    from reshard.checks.diff import DiffResult, TensorDifference
    from reshard.checks.verify import VerifyResult
    from reshard.copy.parallelism import Parallelism
    from reshard.copy.progress import Progress
    from reshard.estimate.assumptions import Assumptions
    from reshard.estimate.costs import ModuleTime
    from reshard.estimate.training_estimate import Forecast, StepEstimate
    from reshard.formats.table import ExportResult, ListedTensor, Listing
    from reshard.layouts.model import StageLayout
    from reshard.packing.hub_check import HubReport
    from reshard.packing.push import PushResult
    from reshard.packing.resolve import PlanResult
    from reshard.packing.result import PackResult
    from reshard.plans.pack_plan import StagePlan
    from reshard.tensors.finding import Finding
    from reshard.transforms.conversion import Conversion

    __version__: str

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
        "reshard.api.check": ("check",),
        "reshard.api.commit": ("commit",),
        "reshard.api.diff": ("diff",),
        "reshard.api.export": ("export",),
        "reshard.api.inspect": ("inspect",),
        "reshard.api.layout": ("layout",),
        "reshard.api.pack": ("pack",),
        "reshard.api.packed": ("PackedModel", "PackedStage", "TensorInfo", "open"),
        "reshard.api.plan": ("plan",),
        "reshard.api.push": ("push",),
        "reshard.api.sign": ("sign",),
        "reshard.api.verify": ("verify",),
        "reshard.checks.check": ("CheckResult",),
        "reshard.tensors.finding": ("Finding",),
        "reshard.copy.parallelism": ("Parallelism",),
        "reshard.estimate.assumptions": ("Assumptions",),
        "reshard.estimate.costs": ("ModuleTime",),
        "reshard.estimate.training_estimate": ("Forecast", "StepEstimate"),
        "reshard.layouts.model": ("StageLayout",),
        "reshard.checks.diff": ("DiffResult", "TensorDifference"),
        "reshard.formats.table": ("ExportResult", "ListedTensor", "Listing"),
        "reshard.packing.hub_check": ("HubReport",),
        "reshard.packing.result": ("PackResult",),
        "reshard.copy.progress": ("Progress",),
        "reshard.packing.push": ("PushResult",),
        "reshard.packing.resolve": ("PlanResult",),
        "reshard.checks.verify": ("VerifyResult",),
        "reshard.plans.pack_plan": ("StagePlan",),
        "reshard.transforms.conversion": ("Conversion",),
    },
)
