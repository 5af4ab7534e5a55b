"""What push prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manifests.sizes import show_bytes
from reshard.operations.push import PushResult


def push_json(done: PushResult) -> dict[str, Any]:
    return {
        "version": 1,
        "repository": done.repository,
        "branch": done.branch,
        "revision": done.revision,
        "is_new": done.is_new,
        "is_private": done.is_private,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "removed": list(done.removed),
        "large_headers": list(done.large_headers),
    }


def push_text(done: PushResult, folder: Path) -> str:
    place = done.repository + (f"@{done.branch}" if done.branch != "main" else "")
    kind = "private" if done.is_private else "public"
    size = f"{done.num_files} files, {show_bytes(done.nbytes)}"
    if not done.is_new:
        return f"{place} ({kind}) has all of {shlex.quote(str(folder))} already: {size}, commit {done.revision[:12]}"
    removed = [f"removed, of another model: {', '.join(done.removed)}"] if done.removed else []
    lines = [f"pushed {shlex.quote(str(folder))} to {place} ({kind}): {size}, commit {done.revision[:12]}", *removed]
    return "\n".join((*lines, f"verify: reshard verify {place}"))


def warning_lines(done: PushResult) -> Iterator[str]:
    for path in done.large_headers:
        what = f"warning: the header of {json.dumps(path)} is above 25 MB"
        yield f"{what}, which huggingface_hub and others do not read: pack with a smaller --max-shard-size"
