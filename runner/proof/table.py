"""What was tried of a combination, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from runner.config.parallel_dims import ParallelDims
from runner.proof.alone import Request, Tried
from runner.proof.combination import Combination
from runner.proof.subsets import describe_degrees

_COLUMNS = ("loss", "norm", "gradient", "weight", "evaluation loss")


def as_json(request: Request, tried: Sequence[Tried]) -> dict[str, Any]:
    return {
        "architecture": request.launched.shape.architecture,
        "degrees": asdict(request.degrees),
        "tried": [
            {
                "degrees": asdict(part.run.degrees),
                "stages": part.run.stages.placement.num_stages,
                "schedule": part.run.timetable.name,
                "options": _options(part.run),
                "problem": part.problem,
                "seconds": part.seconds,
                **({} if (distances := part.distances) is None else {
                    "dtype": distances.dtype,
                    "differences": distances.largest,
                    "limits": distances.limits,
                    "worst_gradient": distances.worst,
                }),
            }
            for part in tried
        ],
    }  # fmt: skip


def table_of(request: Request, tried: Sequence[Tried]) -> str:
    """Write a row for each part of the combination, and what differs."""
    rows = [("tried", "ranks", "stages", *_COLUMNS, "seconds"), *(_row(request, part) for part in tried)]
    limits = next((part.distances.limits for part in tried if part.distances is not None), None)
    if limits is not None:
        rows.append(("at most", "", "", *(f"{limits[name]:.0e}" for name in _COLUMNS), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if number else cell.ljust(width)
                  for number, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
    run = tried[0].run
    flags = f" {options}" if (options := _options(run)) else ""
    first = f"a tiny {run.family.architecture}, {run.timetable.name}{flags}: differences from one process"
    problems = [
        f"{describe_degrees(part.run.degrees, request.degrees)}: {part.problem}" for part in tried if part.problem
    ]
    return "\n".join((first, *lines, *problems))


def _row(request: Request, part: Tried) -> tuple[str, ...]:
    degrees, num_stages = part.run.degrees, part.run.stages.placement.num_stages
    differences = [f"{part.distances.largest[name]:.0e}" if part.distances else "-" for name in _COLUMNS]
    shown = describe_degrees(degrees, request.degrees)
    return shown, str(degrees.world_size), str(num_stages), *differences, f"{part.seconds:.1f}"


def _options(run: Combination) -> str:
    """Write the features beside degrees on the command line."""
    compute = run.options.compute
    dtypes = f"--dtype {compute.dtype}" + (f" --master-dtype {compute.master_dtype}" if compute.has_masters else "")
    others = str(replace(run, degrees=ParallelDims(pipeline=run.degrees.pipeline)))
    return f"{dtypes} {others}".strip()
