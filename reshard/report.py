"""What the verbs print: tables for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manifests.schema import Manifest, TieGroup
from reshard.export import ExportReport
from reshard.layout.model import compress_modules
from reshard.plan import PackPlan
from reshard.verify import VerifyReport

__all__ = [
    "export_json",
    "export_text",
    "pack_json",
    "pack_text",
    "plan_json",
    "plan_table",
    "show_bytes",
    "table",
    "tie_lines",
    "verify_json",
    "verify_text",
]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[str] = frozenset()) -> str:
    """Align columns; those named in `left` flush left, the others right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = (
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def show_bytes(nbytes: int) -> str:
    """Give a size in the unit that leaves one to three digits before the point."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"


def plan_table(plan: PackPlan) -> str:
    rows = [
        (
            str(stage.index),
            str(stage.rank),
            str(stage.virtual),
            compress_modules(stage.modules) or "(empty)",
            f"{stage.num_params:,}",
            show_bytes(stage.nbytes),
        )
        for stage in plan.stages
    ]
    placement = plan.layout.placement
    return "\n".join(
        [
            f"{placement.num_stages} stages on {placement.num_ranks} pipeline ranks, style {placement.style}",
            table(("stage", "rank", "virtual", "modules", "params", "bytes"), rows, left=frozenset({"modules"})),
            *tie_lines(plan.ties),
            f"to read {show_bytes(plan.read_nbytes)}, to write {show_bytes(plan.write_nbytes)}",
        ]
    )


def tie_lines(ties: Sequence[TieGroup]) -> list[str]:
    return [
        f"tied: {tie.owner.fqn} (stage {tie.owner.stage}) = "
        + ", ".join(f"{replica.fqn} (stage {replica.stage})" for replica in tie.replicas)
        for tie in ties
    ]


def plan_json(plan: PackPlan) -> dict[str, Any]:
    placement = plan.layout.placement
    return {
        "version": 1,
        "num_stages": placement.num_stages,
        "num_ranks": placement.num_ranks,
        "num_virtual": placement.num_virtual,
        "style": placement.style,
        "stages": [
            {
                "index": stage.index,
                "rank": stage.rank,
                "virtual": stage.virtual,
                "modules": list(stage.modules),
                "params": stage.num_params,
                "nbytes": stage.nbytes,
            }
            for stage in plan.stages
        ],
        "ties": [_tie_json(tie) for tie in plan.ties],
        "read_nbytes": plan.read_nbytes,
        "write_nbytes": plan.write_nbytes,
    }


def pack_json(manifest: Manifest, out: Path) -> dict[str, Any]:
    return {
        "version": 1,
        "manifest": str(out / "manifest.json"),
        "num_stages": manifest.layout.num_stages,
        "num_ranks": manifest.layout.num_ranks,
        "num_tensors": sum(stage.num_tensors for stage in manifest.stages),
        "nbytes": sum(shard.nbytes for shard in manifest.shards),
    }


def pack_text(manifest: Manifest, out: Path) -> str:
    done = pack_json(manifest, out)
    return (
        f"packed {done['num_tensors']} tensors, {show_bytes(done['nbytes'])}, in {done['num_stages']} stages: "
        f"{done['manifest']}\n"
        f"next: runner launch {done['manifest']} --nproc-per-node {done['num_ranks']} -- --help"
    )


def export_json(done: ExportReport, form: str, out: Path) -> dict[str, Any]:
    return {
        "version": 1,
        "out": str(out),
        "format": form,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "same_headers": done.identical,
    }


def export_text(done: ExportReport, out: Path) -> str:
    how = "headers as in the source" if done.identical else "new headers: dtypes or tensors differ from the source"
    return f"exported {done.num_files} files, {show_bytes(done.nbytes)} of weights ({how}): {out}"


def verify_json(done: VerifyReport) -> dict[str, Any]:
    return {
        "version": 1,
        "equal": not done.differences,
        "num_tensors": done.num_tensors,
        "nbytes": done.nbytes,
        "differences": [{"where": where, "problem": problem} for where, problem in done.differences],
    }


def verify_text(done: VerifyReport, manifest: Path) -> str:
    read = f"{done.num_tensors} tensors, {show_bytes(done.nbytes)}"
    if not done.differences:
        return f"verified {read}: every digest is as the manifest says"
    lines = [f"{manifest}: {len(done.differences)} differ, of {read} read"]
    return "\n".join(lines + [f"  {where}: {problem}" for where, problem in done.differences])


def _tie_json(tie: TieGroup) -> dict[str, Any]:
    owner, *replicas = ({"fqn": member.fqn, "stage": member.stage} for member in tie.members)
    return {"owner": owner, "replicas": replicas}
