"""The output of `reshard layout`."""

from __future__ import annotations

from typing import Any

from reshard.formatting import counted, show_numbers
from reshard.layouts import StageLayout
from reshard.report.text import group_stages, modules_shown, shorten_rows, table


def layout_json(layout: StageLayout) -> dict[str, Any]:
    placement = layout.placement
    return {
        **placement_json(layout),
        "stages": [
            {
                "index": index,
                "rank": placement.rank_of(index),
                "virtual": placement.virtual_of(index),
                "modules": list(modules),
            }
            for index, modules in enumerate(layout.stages)
        ],
    }


def layout_text(layout: StageLayout) -> str:
    placement, stages = layout.placement, layout.stages
    keys = [
        (placement.virtual_of(index), len(modules), all(name.rpartition(".")[2].isdecimal() for name in modules))
        for index, modules in enumerate(stages)
    ]
    rows = []
    for run in group_stages(range(len(stages)), keys):
        modules = modules_shown([module for index in run for module in stages[index]])
        rows.append(
            (
                show_numbers(run),
                show_numbers(map(placement.rank_of, run)),
                str(placement.virtual_of(run[0])),
                modules if len(run) == 1 else f"{modules}: {len(stages[run[0]])} each",
            )
        )
    head = ("stage", "rank", "virtual", "modules")
    return "\n".join([placement_line(layout), table(head, shorten_rows(rows, 3), left=frozenset({"modules"}))])


def placement_json(layout: StageLayout) -> dict[str, Any]:
    placement = layout.placement
    return {
        "version": 1,
        "num_stages": placement.num_stages,
        "num_ranks": placement.num_ranks,
        "num_virtual": placement.num_virtual,
        "style": placement.style,
    }


def placement_line(layout: StageLayout) -> str:
    placement = layout.placement
    stages, ranks = counted(placement.num_stages, "stage"), counted(placement.num_ranks, "pipeline rank")
    return f"{stages} on {ranks}, style {placement.style}"
