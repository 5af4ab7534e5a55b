"""The stages of the model: bytes by kind of module, ranks, and ties as arcs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from manifests.models import module_of
from manifests.schema import WEIGHTS
from reshard.draw.scale import Scale, byte_scale, height_of, ticks, width_of
from reshard.draw.theme import ACCENT, KIND_COLORS, Theme
from reshard.operations.resolve import PlanResult
from reshard.report.text import modules_shown

__all__ = ["draw_stages", "stage_bytes"]

_MOST_NAMED = 16  # stages; with more, module names do not fit above the bars
_MOST_SIZED = 40  # stages; with more, bytes do not fit either
_CHAR_PT = 4.4  # width of a character of 7.5 points
_CUBIC = (Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4)


def draw_stages(axes: Axes, planned: PlanResult, theme: Theme) -> None:
    """Draw one bar per stage, in the order in which they run."""
    by_kind = stage_bytes(planned)
    num_stages = planned.layout.placement.num_stages
    totals = [stage.nbytes for stage in planned.plan.stages]
    scale = byte_scale(max(totals))
    _draw_bands(axes, planned, theme)
    bottoms = [0.0] * num_stages
    few = num_stages <= _MOST_SIZED
    for kind, sizes in by_kind.items():
        parts = [(stage, size / scale.unit) for stage, size in enumerate(sizes) if size]
        axes.bar(
            [stage for stage, _ in parts],
            [height for _, height in parts],
            width=0.78 if few else 1.0,
            bottom=[bottoms[stage] for stage, _ in parts],
            color=KIND_COLORS[kind],
            label=kind,
            edgecolor=theme.paper,
            linewidth=0.5 if few else 0,
        )
        for stage, height in parts:
            bottoms[stage] += height
    top = max(bottoms) * _headroom(planned)
    axes.set(xlim=(-0.6, num_stages - 0.4), ylim=(0, top or 1), ylabel=scale.name)
    feet = _write_names(axes, planned, bottoms, scale)
    _mark_stages(axes, planned, theme)
    _draw_ties(axes, planned, feet, theme)
    axes.set_title("Stages: bytes as stored")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(by_kind), borderaxespad=0.2)


def stage_bytes(planned: PlanResult) -> dict[str, list[int]]:
    """Return the bytes of every stage's weights, by kind of module."""
    kind_of = _kinds(planned)
    found = {kind: [0] * len(planned.plan.stages) for kind in KIND_COLORS if kind in kind_of.values()}
    for stage in planned.plan.stages:
        for entry in (entry for shard in stage.shards if shard.holds == WEIGHTS for entry in shard.entries):
            module = module_of(entry.name, kind_of)
            assert module is not None, entry.name
            found[kind_of[module]][stage.index] += entry.nbytes
    return found


def _kinds(planned: PlanResult) -> Mapping[str, str]:
    inventory, fqns_of = planned.inventory, planned.shape.by_module()
    kinds = {}
    for position, module in enumerate(inventory.modules):
        if position < inventory.num_inputs:
            kinds[module] = "embedding"
        elif position >= inventory.layers_stop:
            kinds[module] = "norm and head"
        elif position >= inventory.mtp_start:
            kinds[module] = "MTP layers"
        else:
            kinds[module] = "expert layers" if any(".experts." in fqn for fqn in fqns_of[module]) else "dense layers"
    return kinds


def _headroom(planned: PlanResult) -> float:
    """Return the height of the axes over that of the tallest bar: room for names, virtual stages and ties."""
    placement = planned.layout.placement
    named = 1.3 if placement.num_stages <= _MOST_NAMED else 1.1
    return named + (0.12 if placement.num_virtual > 1 else 0) + (0.36 if planned.plan.ties else 0)


def _draw_bands(axes: Axes, planned: PlanResult, theme: Theme) -> None:
    """Shade every other virtual stage."""
    placement = planned.layout.placement
    if placement.num_virtual == 1:
        return
    for virtual in range(placement.num_virtual):
        first = virtual * placement.num_ranks
        if virtual % 2:
            axes.axvspan(first - 0.5, first + placement.num_ranks - 0.5, color=theme.faint, linewidth=0, zorder=0)
        if placement.num_virtual <= 8:
            axes.text(
                first - 0.4, 0.985, f"virtual {virtual}", transform=axes.get_xaxis_transform(),
                color=theme.quiet, fontsize=7.5, va="top",
            )  # fmt: skip


def _write_names(axes: Axes, planned: PlanResult, tops: Sequence[float], scale: Scale) -> list[float]:
    """Write bytes and modules above the bars, as far as they fit; return where the text ends."""
    num_stages = len(tops)
    if num_stages > _MOST_SIZED:
        return list(tops)
    named = num_stages <= _MOST_NAMED
    size_pt, ends = 7.5 if named else 6.5, []
    per_point = axes.get_ylim()[1] / height_of(axes)
    for stage, top in zip(planned.plan.stages, tops, strict=True):
        lines = [scale.show(stage.nbytes)]
        if named:
            lines = [f"{lines[0]} {scale.name}", *_wrap(modules_shown(stage.modules), width_of(axes) / num_stages)]
        axes.annotate(
            "\n".join(lines), (stage.index, top), (0, 2), textcoords="offset points", ha="center", va="bottom",
            fontsize=size_pt,
        )  # fmt: skip
        ends.append(top + (1.3 * size_pt * len(lines) + 3) * per_point)
    return ends


def _wrap(text: str, width_pt: float) -> list[str]:
    width = max(1, int(width_pt / _CHAR_PT))
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _mark_stages(axes: Axes, planned: PlanResult, theme: Theme) -> None:
    """Number stages and ranks below the bars, and highlight the bottleneck."""
    placement = planned.layout.placement
    marked = [stage for rank in planned.forecast.bottleneck[:4] for stage in placement.stages_on(rank)]
    shown = ticks(placement.num_stages, _MOST_SIZED, marked if len(marked) <= _MOST_NAMED else ())
    axes.set_xticks(shown, [f"{stage}\n{placement.rank_of(stage)}" for stage in shown], fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    for stage, label in zip(shown, axes.get_xticklabels(), strict=True):
        if placement.rank_of(stage) in planned.forecast.bottleneck:
            label.set(color=ACCENT, fontweight="bold")
    axes.annotate(
        "stage\nrank", (0, 0), (-8, -3.5), xycoords="axes fraction", textcoords="offset points", ha="right", va="top",
        fontsize=7.5, color=theme.quiet,
    )  # fmt: skip


def _draw_ties(axes: Axes, planned: PlanResult, feet: Sequence[float], theme: Theme) -> None:
    """Draw an arc from the stage of each tie group's owner to that of each replica."""
    placement, ceiling = planned.layout.placement, axes.get_ylim()[1]
    height = ceiling * (0.82 if placement.num_virtual > 1 else 0.9)
    for tie in planned.plan.ties:
        owner, owner_rank = tie.owner.stage, placement.rank_of(tie.owner.stage)
        for replica in tie.replicas:
            rank = placement.rank_of(replica.stage)
            copies = f"one copy, rank {rank}" if rank == owner_rank else f"a copy each on ranks {owner_rank} and {rank}"
            if replica.stage != owner:
                start, end = (owner, feet[owner]), (replica.stage, feet[replica.stage])
                pull = (
                    height - (start[1] + end[1]) / 8
                ) / 0.75  # a cubic curve reaches three quarters of its control points' height
                arc = Path([start, (owner, pull), (replica.stage, pull), end], _CUBIC)
                axes.add_patch(PathPatch(arc, fill=False, edgecolor=theme.ink, linewidth=1.1))
                for foot in (start, end):
                    axes.plot(*foot, marker="v", markersize=4, color=theme.ink)
            axes.text(
                (owner + replica.stage) / 2, 1.015 * height, f"tied: {tie.owner.fqn} = {replica.fqn} ({copies})",
                ha="center", va="bottom", fontsize=7.5,
            )  # fmt: skip
            height -= 0.1 * ceiling
