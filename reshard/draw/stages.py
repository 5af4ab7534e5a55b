"""The stages of the model: bytes by kind of module, ranks, and ties as arcs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from manifests.command.palette import KIND_COLORS, Theme
from manifests.models import module_of
from manifests.schema import WEIGHTS, TieMember
from reshard.draw.theme import SMALLEST_PT, Scale, byte_scale, draw_bars, height_of, label_numbers
from reshard.formatting import show_numbers
from reshard.packing.plan import PlanResult

_MOST_LABELLED = 20  # stages; with more, only some are numbered
_MOST_SIZED = 30  # stages; with more, bytes do not fit above the bars
_MOST_TIES = 3  # drawn
_CUBIC = (Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4)


def draw_stages(axes: Axes, planned: PlanResult, theme: Theme) -> None:
    """Draw one bar per stage, in the order in which they run."""
    by_kind = stage_bytes(planned)
    num_stages = planned.layout.placement.num_stages
    totals = [stage.nbytes for stage in planned.plan.stages]
    scale = byte_scale(max(totals))
    bottoms = [0.0] * num_stages
    few = num_stages <= _MOST_SIZED
    for kind, sizes in by_kind.items():
        parts = [(stage, size / scale.unit) for stage, size in enumerate(sizes) if size]
        half = 0.39 if few else 0.5
        bars = ((stage - half, stage + half, bottoms[stage], bottoms[stage] + height) for stage, height in parts)
        draw_bars(axes, bars, KIND_COLORS[kind], label=kind, edgecolor=theme.paper, linewidth=0.5 if few else 0)
        for stage, height in parts:
            bottoms[stage] += height
    lines = (num_stages <= _MOST_SIZED) + (planned.layout.placement.num_virtual > 1) + 1.5 * len(_ties(planned))
    share = 1 - 1.35 * SMALLEST_PT * lines / height_of(axes)  # for text and arcs above the tallest bar
    axes.set(xlim=(-0.6, num_stages - 0.4), ylim=(0, (max(bottoms) or 1) / share))
    _draw_bands(axes, planned, theme)
    feet = _write_sizes(axes, planned, bottoms, scale)
    _mark_stages(axes, planned, theme)
    _draw_ties(axes, planned, feet, theme)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title(f"Stages: {scale.name} as stored")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(by_kind), borderaxespad=0.2)


def stage_bytes(planned: PlanResult) -> dict[str, list[int]]:
    """Return the bytes of every stage's weights, by kind of module."""
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
    """Write the bytes above the bars, as far as they fit; return where the text ends."""
    if len(tops) > _MOST_SIZED:
        return list(tops)
    per_point = axes.get_ylim()[1] / height_of(axes)
    for stage, top in zip(planned.plan.stages, tops, strict=True):
        axes.annotate(
            scale.show(stage.nbytes), (stage.index, top), (0, 2), textcoords="offset points", ha="center", va="bottom",
            fontsize=SMALLEST_PT,
        )  # fmt: skip
    return [top + 1.35 * SMALLEST_PT * per_point for top in tops]


def _mark_stages(axes: Axes, planned: PlanResult, theme: Theme) -> None:
    """Write the number, the rank and the layers of stages below the bars, and highlight the bottleneck."""
    placement = planned.layout.placement
    marked = [stage for rank in planned.forecast.bottleneck[:4] for stage in placement.stages_on(rank)]
    shown = label_numbers(placement.num_stages, _MOST_LABELLED, marked if len(marked) <= _MOST_LABELLED // 2 else ())
    texts = [f"{stage}\n{placement.rank_of(stage)}\n{_layers(planned, stage)}" for stage in shown]
    axes.set_xticks(shown, texts, fontsize=SMALLEST_PT)
    axes.tick_params(axis="x", length=0)
    for stage, label in zip(shown, axes.get_xticklabels(), strict=True):
        if placement.rank_of(stage) in planned.forecast.bottleneck:
            label.set(color=theme.ink, fontweight="bold")
    axes.annotate(
        "stage\nrank\nlayers", (0, 0), (-8, -3.5), xycoords="axes fraction", textcoords="offset points", ha="right",
        va="top", fontsize=SMALLEST_PT, color=theme.quiet,
    )  # fmt: skip


def _layers(planned: PlanResult, stage: int) -> str:
    """Return the numbers of a stage's layers, those of multi-token prediction after the others."""
    inventory = planned.inventory
    first, modules = inventory.num_inputs, set(planned.plan.stages[stage].modules)
    layers = inventory.modules[first : inventory.layers_stop]
    return show_numbers(number for number, module in enumerate(layers) if module in modules) or "-"


def _ties(planned: PlanResult) -> list[tuple[TieMember, TieMember]]:
    """Return the owner and the replica of each tie that is drawn."""
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
        axes.text(
            (owner.stage + replica.stage) / 2, height + 0.1 * line,
            f"tied: {owner.fqn} = {replica.fqn} ({copies})", ha="center", va="bottom", fontsize=SMALLEST_PT,
        )  # fmt: skip
        height -= 1.5 * line
