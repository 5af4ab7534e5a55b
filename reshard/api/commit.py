"""commit: the parts of a pack, merged."""

from __future__ import annotations

from pathlib import Path

from reshard.packing.parts import commit as commit_parts
from reshard.packing.result import PackResult
from stores.address import is_url


def commit(out: str | Path, *, force: bool = False, wait: bool = False) -> PackResult:
    """Merge the parts that `pack` has written with `part` into one checkpoint; no tensors are copied.

    `out` is the folder or the object-store URL that the parts were packed to. `force` replaces an existing folder in
    one step; it is not supported in a bucket. With `wait`, return once all parts are there. It can be interrupted at
    any point and called again; what is committed already is returned as it is.

    Raises:
        OutputError: parts are missing (`output.missing-parts`, `output.no-parts`) or damaged, or of another plan, or
            `out` exists or cannot be written.
        InputError: files were changed since their parts wrote them.
        UsageError: `force` and a bucket.

    Example:
        >>> for number in (1, 2):
        ...     part = reshard.pack("model", "model-parts", "pp=2", part=f"{number}/2")
        >>> reshard.commit("model-parts").num_stages
        2
    """
    address = str(out) if is_url(out) else Path(out)
    return PackResult(committed=commit_parts(address, force=force, wait=wait), out=address)
