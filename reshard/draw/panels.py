"""The pictures of a sheet: the stages of the model, and the ranks, one row each, with schedule, work and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from manifests.command.palette import KIND_COLORS, MEMORY_COLORS, Theme, ink_on
from manifests.command.sizes import show_bytes
from manifests.models import module_of
from manifests.placement import Placement
from manifests.schedules.picture import Box, View, action_color, legend_of, ticks, view_of
from manifests.schema import WEIGHTS, TieMember
from reshard.draw.theme import (
    SMALLEST_PT,
    Scale,
    byte_scale,
    draw_bars,
    height_of,
    label_numbers,
    width_of,
)
from reshard.estimate.training_estimate import Forecast
from reshard.formatting import number_runs, show_numbers
from reshard.packing.plan import PlanResult

_LABEL_PT = 42  # of a stage, at least; with less, only some are numbered
_SIZE_PT = 28  # of a stage, at least; with less, bytes do not fit above the bars
_MOST_TIES = 3  # drawn
_CUBIC = (Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4)


def draw_stages(axes: Axes, planned: PlanResult, theme: Theme) -> None:
    """Draw one bar per stage, in the order in which they run."""
    by_kind = stage_bytes(planned)
    num_stages = planned.layout.placement.num_stages
    totals = [stage.nbytes for stage in planned.plan.stages]
    scale = byte_scale(max(totals))
    bottoms = [0.0] * num_stages
    few = num_stages <= width_of(axes) / _SIZE_PT
    for kind, sizes in by_kind.items():
        parts = [(stage, size / scale.unit) for stage, size in enumerate(sizes) if size]
        half = 0.39 if few else 0.5
        bars = ((stage - half, stage + half, bottoms[stage], bottoms[stage] + height) for stage, height in parts)
        draw_bars(axes, bars, KIND_COLORS[kind], edgecolor=theme.paper, linewidth=0.5 if few else 0)
        for stage, height in parts:
            bottoms[stage] += height
    lines = few + (planned.layout.placement.num_virtual > 1) + 1.5 * len(_ties(planned))
    share = 1 - 1.35 * SMALLEST_PT * lines / height_of(axes)  # for text and arcs above the tallest bar
    axes.set(xlim=(-0.6, num_stages - 0.4), ylim=(0, (max(bottoms) or 1) / share))
    _draw_bands(axes, planned, theme)
    feet = _write_sizes(axes, planned, bottoms, scale) if few else bottoms
    _mark_stages(axes, planned, theme)
    _draw_ties(axes, planned, feet, theme)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title(f"Stages: {scale.name} as stored")
    put_legend(axes, [Patch(color=KIND_COLORS[kind], label=kind) for kind in by_kind], len(by_kind))


def stage_bytes(planned: PlanResult) -> dict[str, list[int]]:
    kind_of = _kinds(planned)
    by_kind = {kind: [0] * len(planned.plan.stages) for kind in KIND_COLORS if kind in kind_of.values()}
    for stage in planned.plan.stages:
        for entry in (entry for shard in stage.shards if shard.holds == WEIGHTS for entry in shard.entries):
            module = module_of(entry.name, kind_of)
            assert module is not None, entry.name
            by_kind[kind_of[module]][stage.index] += entry.nbytes
    return by_kind


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
                color=theme.quiet, fontsize=SMALLEST_PT, va="top",
            )  # fmt: skip


def _write_sizes(axes: Axes, planned: PlanResult, tops: Sequence[float], scale: Scale) -> list[float]:
    """Write the bytes above the bars, once for stages of equal size; return where the text ends."""
    per_point = axes.get_ylim()[1] / height_of(axes)
    for size, group in groupby(planned.plan.stages, key=lambda stage: scale.show(stage.nbytes)):
        stages = [stage.index for stage in group]
        text = f"{len(stages)} x {size}" if len(stages) > 2 else size
        for at in [sum(stages) / len(stages)] if len(stages) > 2 else stages:
            axes.annotate(
                text, (at, tops[stages[0]]), (0, 2), textcoords="offset points", ha="center", va="bottom",
                fontsize=SMALLEST_PT,
            )  # fmt: skip
    return [top + 1.35 * SMALLEST_PT * per_point for top in tops]


def _mark_stages(axes: Axes, planned: PlanResult, theme: Theme) -> None:
    """Write the number, the rank and the layers of stages below the bars, and highlight the bottleneck."""
    placement = planned.layout.placement
    marked = [stage for rank in planned.forecast.bottleneck[:4] for stage in placement.stages_on(rank)]
    most = int(width_of(axes) / _LABEL_PT)
    shown = label_numbers(placement.num_stages, most, marked if len(marked) <= most // 2 else ())
    ranks = {stage: f"{placement.rank_of(stage)}\n" if placement.num_virtual > 1 else "" for stage in shown}
    texts = [f"{stage}\n{ranks[stage]}{_layers(planned, stage)}" for stage in shown]
    axes.set_xticks(shown, texts, fontsize=SMALLEST_PT)
    axes.tick_params(axis="x", length=0)
    for stage, label in zip(shown, axes.get_xticklabels(), strict=True):
        if placement.rank_of(stage) in planned.forecast.bottleneck:
            label.set(color=theme.ink, fontweight="bold")
    heads = "stage\nrank\nlayers" if placement.num_virtual > 1 else "stage\nlayers"
    axes.annotate(
        heads, (0, 0), (-8, -3.5), xycoords="axes fraction", textcoords="offset points", ha="right",
        va="top", fontsize=SMALLEST_PT, color=theme.quiet,
    )  # fmt: skip


def _layers(planned: PlanResult, stage: int) -> str:
    """Return the numbers of a stage's layers, those of multi-token prediction after the others."""
    inventory = planned.inventory
    first, modules = inventory.num_inputs, set(planned.plan.stages[stage].modules)
    layers = inventory.modules[first : inventory.layers_stop]
    return show_numbers(number for number, module in enumerate(layers) if module in modules) or "-"


def _ties(planned: PlanResult) -> list[tuple[TieMember, TieMember]]:
    pairs = [(tie.owner, replica) for tie in planned.plan.ties for replica in tie.replicas]
    return pairs[:_MOST_TIES]


def _draw_ties(axes: Axes, planned: PlanResult, feet: Sequence[float], theme: Theme) -> None:
    """Draw an arc from the stage of each tie group's owner to that of each replica."""
    placement, ceiling = planned.layout.placement, axes.get_ylim()[1]
    line = 1.35 * SMALLEST_PT * ceiling / height_of(axes)
    height = ceiling - line * (1 + (placement.num_virtual > 1))
    for owner, replica in _ties(planned):
        ranks = placement.rank_of(owner.stage), placement.rank_of(replica.stage)
        copies = f"one copy, rank {ranks[0]}" if len({*ranks}) == 1 else "a copy each on ranks {} and {}".format(*ranks)
        if replica.stage != owner.stage:
            start, end = (owner.stage, feet[owner.stage]), (replica.stage, feet[replica.stage])
            # A cubic curve reaches three quarters of its control points' height.
            pull = (height - (start[1] + end[1]) / 8) / 0.75
            arc = Path([start, (start[0], pull), (end[0], pull), end], _CUBIC)
            axes.add_patch(PathPatch(arc, fill=False, edgecolor=theme.ink, linewidth=1.1))
            for foot in (start, end):
                axes.plot(*foot, marker="v", markersize=4, color=theme.ink)
        text = f"tied: {owner.fqn} = {replica.fqn} ({copies})"
        axes.text(
            (owner.stage + replica.stage) / 2, height + 0.1 * line, text, ha="center", va="bottom",
            fontsize=SMALLEST_PT,
        )  # fmt: skip
        height -= 1.5 * line


MOST_LABELLED = 40  # ranks; with more, rows have no room for a number
_ROW = 0.82  # filled share of a row
_MOST_BOXES = 6000  # of a schedule; more are drawn as pixels
_DIGIT_PT = 0.64 * SMALLEST_PT
_TICK_PT = 45  # between two numbers of the axis of time, at least
_LEGEND_PT = 40  # below the axis
_DASHED = (0, (4, 2))


def draw_schedule(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw every action, or of a long step its beginning and its end; blanks are waiting."""
    num_ranks, placement = forecast.placement.num_ranks, forecast.placement
    view = view_of(forecast.timeline, forecast.num_microbatches, _readable_s(forecast, width_of(axes)))
    boxes, width_s = list(view.boxes(forecast.timeline)), view.width_s or 1.0
    axes.set_xlim(0, width_s)
    rows = ((0.0, width_s, *row_edges(rank, num_ranks)) for rank in range(num_ranks))
    draw_bars(axes, rows, theme.faint, linewidth=0)
    is_raster = len(boxes) > _MOST_BOXES
    _draw_boxes(axes, boxes, placement, edgecolor=theme.paper, rasterized=is_raster)
    if not is_raster and height_of(axes) / num_ranks >= 1.3 * SMALLEST_PT:
        _number_microbatches(axes, boxes, placement)
    number_rows(axes, forecast, theme)
    _number_times(axes, view, forecast)
    title = f"Schedule: {forecast.schedule}, {forecast.num_microbatches} microbatches"
    axes.set_title(title, pad=20 if view.num_cut else 6)
    if view.num_cut:
        _mark_cut(axes, view, theme)
    entries = legend_of({box.action.kind for box in boxes}, placement)
    entries.append((f"waiting, {forecast.timeline.bubble:.1%} of the time", theme.faint))
    if is_raster:
        entries.append(("mixed: too short to tell apart", "none"))
    put_legend(axes, [Patch(color=color, label=text) for text, color in entries], 4 if len(entries) == 4 else 3)


def _readable_s(forecast: Forecast, width_pt: float) -> float:
    """Return how many seconds fit, with forwards half as wide as the number of a microbatch."""
    digits = len(str(forecast.num_microbatches - 1))
    return 2 * _mean_forward_s(forecast) * width_pt / (_DIGIT_PT * digits + 2)


def _mean_forward_s(forecast: Forecast) -> float:
    return sum(time.forward for time in forecast.times) / len(forecast.times)


def _draw_boxes(axes: Axes, boxes: Sequence[Box], placement: Placement, *, rasterized: bool, edgecolor: str) -> None:
    """Draw the boxes, one path for all of a color, to keep the file small. Pixels mix what is shorter than one."""
    colors = {
        action: action_color(action, placement) for action in {box.action._replace(microbatch=0) for box in boxes}
    }
    groups: dict[str, list[Box]] = {}
    for box in boxes:
        groups.setdefault(colors[box.action._replace(microbatch=0)], []).append(box)
    point = axes.get_xlim()[1] / width_of(axes)
    for color, members in groups.items():
        shortest_pt = min(box.right - box.left for box in members) / point
        bars = ((box.left, box.right, *row_edges(box.rank, placement.num_ranks)) for box in members)
        linewidth = 0 if rasterized else min(0.4, shortest_pt / 12)
        draw_bars(axes, bars, color, edgecolor=edgecolor, linewidth=linewidth, rasterized=rasterized)


def _number_microbatches(axes: Axes, boxes: Sequence[Box], placement: Placement) -> None:
    """Write the microbatch into each box that is wide enough."""
    point = axes.get_xlim()[1] / width_of(axes)
    for box in boxes:
        label = str(box.action.microbatch)
        if (box.right - box.left) / point >= _DIGIT_PT * len(label) + 2:
            axes.text(
                (box.left + box.right) / 2, box.rank, label, ha="center", va="center_baseline", fontsize=SMALLEST_PT,
                color=ink_on(action_color(box.action, placement)),
            )  # fmt: skip


def _number_times(axes: Axes, view: View, forecast: Forecast) -> None:
    """Number the axis on both sides of a cut: in ms if times were measured, else in mean forward passes of a stage."""
    name, unit = "time, ms", 1e-3
    if not forecast.assumed.measured:
        name, unit = "time, in mean forward passes of a stage", _mean_forward_s(forecast) or 1.0
    most = max(2, int(width_of(axes) / _TICK_PT))
    # The interval is that of the visible time, as if it were one piece.
    first, second = ticks(0, (view.width_s or unit) / unit, most)[:2]
    spare_s = _TICK_PT / 2 * view.width_s / width_of(axes) if view.num_cut else 0.0
    times = [number * (second - first) for number in range(int(view.end_s / unit / (second - first)) + 1)]
    shown = [t for t in times if t * unit <= view.head_s - spare_s or t * unit >= view.tail_s + spare_s]
    axes.set_xticks([view.place(t * unit) for t in shown], [f"{t:g}" for t in shown])
    axes.set_xlabel(name)


def _mark_cut(axes: Axes, view: View, theme: Theme) -> None:
    """Blank the gap, and name the phases above the rows."""
    left, right = view.head_s, view.head_s + view.gap_s
    axes.axvspan(left, right, color=theme.paper, linewidth=0, zorder=4)
    for edge in (left, right):
        axes.axvline(edge, color=theme.quiet, linewidth=0.8, linestyle=(0, (2, 2)), zorder=5)
    middle = f"{view.num_cut} microbatches cut"
    names = ((left + right) / 2, middle, "center"), (0.0, "warm-up", "left"), (view.width_s, "drain", "right")
    for place, text, side in names:
        axes.annotate(
            text, (place, 1), (0, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha=side,
            va="bottom", fontsize=SMALLEST_PT, color=theme.quiet,
        )  # fmt: skip


def draw_work(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw a dot at each rank's compute time for a microbatch, relative to the slowest rank."""
    times, marked = forecast.rank_times, forecast.bottleneck
    most = max(times) or 1.0
    shares = [100 * time / most for time in times]
    low, mean = 10 * int((min(shares) - 2) / 10), sum(shares) / len(shares)
    if len(times) <= MOST_LABELLED:
        axes.hlines(range(len(times)), low, 100, color=theme.faint, linewidth=1, zorder=0)
    others = [rank for rank in range(len(times)) if rank not in marked]
    for color, ranks in ((theme.quiet, others), (theme.ink, marked)):
        axes.plot([shares[rank] for rank in ranks], ranks, "o", color=color, markersize=5, clip_on=False)
    if marked and len(times) <= MOST_LABELLED:  # else the dots are one below the other
        for rank in {marked[0], shares.index(min(shares))}:
            _write_right(axes, rank, f"{shares[rank]:.0f} %", bold=rank in marked, color=theme.ink)
    axes.axvline(mean, color=theme.ink, linewidth=0.9, linestyle=_DASHED, zorder=1)
    axes.set(xlim=(low, 100 + 0.6 * (100 - low)), xticks=(low, 100), xlabel="% of the slowest rank's time")
    axes.set_title("Work" if marked else "Work: even")
    number_rows(axes, forecast, theme)
    put_legend(axes, [Line2D([], [], color=theme.ink, linewidth=0.9, linestyle=_DASHED, label=f"mean, {mean:.0f} %")])


def draw_memory(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    ranks, limit = forecast.memory.ranks, forecast.assumed.memory_limit
    most = max(memory.total for memory in ranks)
    scale = byte_scale(max(most, limit or 0))
    starts = [0.0] * len(ranks)
    for part, color in MEMORY_COLORS.items():
        ends = [start + getattr(memory, part) / scale.unit for start, memory in zip(starts, ranks, strict=True)]
        edges = [row_edges(rank, len(ranks)) for rank in range(len(ranks))]
        bars = ((start, end, *edge) for start, end, edge in zip(starts, ends, edges, strict=True) if end > start)
        draw_bars(axes, bars, color, linewidth=0)
        starts = ends
    if len(ranks) <= MOST_LABELLED:
        for rank, memory in enumerate(ranks):
            is_over = rank in forecast.ranks_over_limit
            text = ("over: " if is_over else "") + scale.show(memory.total)
            _write_right(axes, rank, text, bold=is_over, color=theme.alarm if is_over else theme.ink)
    title, num_over = "Memory", len(forecast.ranks_over_limit)
    limit_color = theme.alarm if num_over else theme.ink
    if limit:
        axes.axvline(limit / scale.unit, color=limit_color, linewidth=1.4)
        title += f": {num_over} of {len(ranks)} over the limit" if num_over else ": within the limit"
    right = max(most, limit or 0) / scale.unit * 1.35 or 1
    axes.set(
        xlim=(0, right),
        xticks=ticks(0, right, 5),
        xlabel=f"{scale.name}, estimated for {forecast.assumed.dtypes}",
    )
    axes.set_title(title, color=limit_color)
    number_rows(axes, forecast, theme)
    handles: list[Artist] = [
        Patch(color=color, label=part.removeprefix("receive_")) for part, color in MEMORY_COLORS.items()
    ]
    if limit:
        handles.append(Line2D([], [], color=limit_color, linewidth=1.4, label=f"limit, {show_bytes(limit)}"))
    put_legend(axes, handles)


def row_height(num_ranks: int) -> float:
    return _ROW if num_ranks <= MOST_LABELLED else 1.0


def row_edges(rank: int, num_ranks: int) -> tuple[float, float]:
    """Return the edges of a rank's row, as far as it is filled."""
    half = row_height(num_ranks) / 2
    return rank - half, rank + half


def number_rows(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Number the rows, rank 0 on top, unless panels to the left do, and mark the bottleneck's."""
    num_ranks, marked = forecast.placement.num_ranks, forecast.bottleneck
    axes.set_ylim(num_ranks - 0.45, -0.55)
    axes.tick_params(axis="y", length=0, pad=6)
    for first, last in number_runs(marked):
        axes.axhspan(first - 0.5, last + 0.5, facecolor=theme.faint, linewidth=0, zorder=0)
    if axes.get_position().x0 > 0.3:
        axes.set_yticks([])
        return
    shown = label_numbers(num_ranks, MOST_LABELLED, marked[:8])
    axes.set_yticks(shown, [str(rank) for rank in shown])
    axes.set_ylabel("rank")
    for rank, label in zip(shown, axes.get_yticklabels(), strict=True):
        if rank in marked:
            label.set(color=theme.ink, fontweight="bold")
    for first, last in number_runs(marked):
        axes.plot(
            (-0.004, -0.004), (first - 0.45, last + 0.45), transform=axes.get_yaxis_transform(), color=theme.ink,
            linewidth=3, clip_on=False, solid_capstyle="butt",
        )  # fmt: skip


def _write_right(axes: Axes, rank: int, text: str, *, bold: bool, color: str) -> None:
    axes.annotate(
        text, (1, rank), (-3, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right",
        va="center_baseline", fontsize=SMALLEST_PT, fontweight="bold" if bold else "normal", color=color,
    )  # fmt: skip


def put_legend(axes: Axes, handles: Sequence[Artist], ncols: int = 3) -> None:
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -_LEGEND_PT / height_of(axes)), ncols=ncols,
        borderaxespad=0, borderpad=0, handlelength=1, handleheight=0.9, columnspacing=1.1,
    )  # fmt: skip
