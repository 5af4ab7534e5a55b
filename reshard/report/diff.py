"""The output of `reshard diff`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from reshard.operations.diff import DiffResult, TensorDifference


def diff_json(found: DiffResult) -> dict[str, Any]:
    return {
        "version": 1,
        "equal": found.equal,
        "layouts": list(found.layouts),
        "num_equal": found.num_equal,
        "num_moved": found.num_moved,
        "num_resliced": found.num_resliced,
        "differences": [{**asdict(one), "relative": one.relative} for one in found.differences],
    }


def diff_text(found: DiffResult) -> str:
    a, b = found.layouts
    lines = [f"layout: {a}"] if a == b else [f"layout of A: {a}", f"layout of B: {b}"]
    moved = f" ({found.num_moved} on another stage)" if found.num_moved else ""
    sliced = f", {found.num_resliced} are equal but sliced differently" if found.num_resliced else ""
    lines.append(f"{found.num_equal} tensors are equal{moved}{sliced}, {len(found.differences)} differ")
    return "\n".join([*lines, *map(_line, found.differences)])


def _line(difference: TensorDifference) -> str:
    line = f"  {difference.holds} {difference.fqn}: {difference.problem}"
    if difference.norm is None or difference.norm_a is None:
        return line
    share = f", {difference.relative:.2g} of A's {difference.norm_a:.3g}" if difference.relative is not None else ""
    return f"{line}; B - A has norm {difference.norm:.3g}{share}"
