"""What check found, as text and as JSON."""

from __future__ import annotations

from typing import Any

from manifests.errors import printable
from manifests.sizes import show_bytes
from reshard.checks.check import CheckResult


def check_json(done: CheckResult) -> dict[str, Any]:
    return {
        "version": 1,
        "ok": done.ok,
        "location": done.location,
        "kind": done.kind,
        "num_tensors": done.num_tensors,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "read_nbytes": done.read_nbytes,
        "problems": [
            {
                "code": each.code,
                "where": each.where,
                "problem": each.problem,
                "hint": each.hint,
                "names": list(each.names),
            }
            for each in done.findings
        ],
    }


def check_text(done: CheckResult) -> str:
    """Return one line for each problem, and the verdict last, where a log ends."""
    lines = []
    for each in done.findings:
        lines.append(f"{each.where}: {each.problem} [{each.code}]")
        if each.hint:
            lines.append(f"  hint: {each.hint}")
    files = "1 file" if done.num_files == 1 else f"{done.num_files} files"
    what = f"{done.num_tensors} tensors in {files}, {show_bytes(done.nbytes)}"
    read = f"{show_bytes(done.read_nbytes)} of data read" if done.read_nbytes else "headers only, no data read"
    if done.ok:
        wrote = "; wrote digests.json" if done.wrote_digests else ""
        lines.append(f"ok: {done.location}: no problem found ({what}; {read}){wrote}")
    else:
        count = "1 problem" if len(done.findings) == 1 else f"{len(done.findings)} problems"
        lines.append(f"FAILED: {done.location}: {count} found ({what}; {read})")
    return "\n".join(printable(line, lines=False) for line in lines)
