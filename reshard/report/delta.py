"""What the commands of reshard delta print when they are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from manifests.command.console import table
from manifests.command.sizes import show_bytes
from reshard.delta.apply import ApplyResult
from reshard.delta.chains import ChainEntry, PruneResult, VerifyChainResult
from reshard.delta.publish import PublishResult
from reshard.formatting import counted

_SHOWN_DIGITS = len("blake3:") + 12


def as_json(done: PublishResult | ApplyResult | PruneResult | VerifyChainResult) -> dict[str, Any]:
    return {"version": 1, **asdict(done)}


def log_json(entries: Sequence[ChainEntry]) -> dict[str, Any]:
    return {"version": 1, "versions": [asdict(entry) for entry in entries]}


def publish_text(done: PublishResult) -> str:
    if not done.is_new:
        return f"nothing has changed since version {done.number}: {done.location}"
    if done.is_full:
        return f"published version {done.number}, full, {show_bytes(done.nbytes)}: {done.location}"
    changed = f"{done.num_changed} of {counted(done.num_tensors, 'tensor')} changed"
    how = f"{show_bytes(done.changed_nbytes)} of their bytes differ, stored as a delta of {show_bytes(done.nbytes)}"
    return f"published version {done.number}, {changed}: {how}, its headers included: {done.location}"


def apply_text(done: ApplyResult) -> str:
    unknown = "" if done.is_recorded else "; the chain has checksums of changed tensors, and no digest of the rest"
    if done.before == done.number and not done.num_changed:
        how = "whose interrupted switch is finished now" if done.is_resumed else "as before"
        return f"version {done.number}, {how}: {done.location}"
    since = "" if done.before is None else f", from version {done.before}"
    since += ", whose interrupted switch was finished first" if done.is_resumed else ""
    changed = f"{done.num_changed} of {counted(done.num_tensors, 'tensor')} changed"
    written = f"{show_bytes(done.write_nbytes)} written, {show_bytes(done.read_nbytes)} read"
    return f"version {done.number}{since}: {changed}, {written}{unknown}: {done.location}"


def log_text(entries: Sequence[ChainEntry]) -> str:
    if not entries:
        return "no versions"
    rows = [
        (
            str(entry.number),
            "full" if entry.base is None else f"since {entry.base}",
            str(entry.num_tensors),
            show_bytes(entry.nbytes),
            (entry.state or "not recorded")[:_SHOWN_DIGITS],
        )
        for entry in entries
    ]
    return table(("version", "kind", "tensors", "size", "state"), rows)


def prune_text(done: PruneResult) -> str:
    removed = counted(len(done.removed), "version")
    return f"removed {removed}; the oldest is {done.oldest}"


def verify_text(done: VerifyChainResult) -> str:
    versions, tensors = counted(done.num_versions, "version"), counted(done.num_tensors, "tensor")
    read = f"{versions}, {tensors}, {show_bytes(done.nbytes)} read"
    lines = [f"{finding.where}: {finding.problem}" for finding in done.findings]
    return "\n".join([*lines, f"{counted(len(lines), 'difference')}; {read}" if lines else f"verified: {read}"])
