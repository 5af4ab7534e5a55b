"""Compare the solver's splits with DeepSpeed's and torchtitan's on true model shapes, and print the table.

python bench/layouts.py [--write docs/layouts.md]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from manifests.models import model_shape
from manifests.placement import Placement
from reshard.estimate.costs import costs_of
from reshard.layouts import parse_layout
from reshard.layouts.model import inventory_of_modules

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data" / "configs"
SEQ_LEN = 4096
# Config name: model name.
MODELS: Mapping[str, str] = {
    "llama-3.1-8b": "Llama-3.1 8B",
    "llama-3.1-70b": "Llama-3.1 70B",
    "llama-3.1-405b": "Llama-3.1 405B",
    "qwen3-32b": "Qwen3-32B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "deepseek-v3": "DeepSeek-V3",
    "gpt-oss-120b": "GPT-OSS-120B",
}
DEGREES = ((8, 1), (16, 1), (16, 2))  # PP, VPP
BEGIN, END = "<!-- python bench/layouts.py --write docs/layouts.md -->", "<!-- end -->"
SECTION = "## Comparison with DeepSpeed's and torchtitan's splits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """The slowest over the mean: 1 is balanced."""

    stage: float
    rank: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model on one number of ranks and stages per rank."""

    model: str
    num_ranks: int
    num_virtual: int
    deepspeed: Imbalance
    torchtitan: Imbalance
    reshard: Imbalance


def uniform_bounds(num_items: int, num_stages: int) -> tuple[int, ...]:
    """Return the bounds of `uniform`: equal counts, the remainder on the earliest stages."""
    base, extra = divmod(num_items, num_stages)
    return tuple(accumulate((base + (stage < extra) for stage in range(num_stages)), initial=0))


def balanced_bounds(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of DeepSpeed's `parameters`, which minimize max - min.

    For each prefix and number of stages its recurrence keeps only the split with the least difference (the
    last one, of equals), so it misses even its own optimum.
    Source: microsoft/DeepSpeed edaa7221, `runtime/utils.py`, `partition_balanced`.
    """
    num_items = len(weights)
    if num_items <= num_stages:
        return uniform_bounds(num_items, num_stages)
    sums = list(accumulate(weights, initial=0))
    # By number of items, for the stages so far: most, least, start of the last stage.
    best: list[tuple[float, float, int] | None] = [(0, float("inf"), 0)] + [None] * num_items
    starts: list[list[int]] = []
    for stage in range(1, num_stages + 1):
        row: list[tuple[float, float, int] | None] = [None] * (num_items + 1)
        for stop in range(stage, num_items + 1):
            for start in range(stage - 1, stop):
                if (before := best[start]) is None:
                    continue
                most, least = max(before[0], sums[stop] - sums[start]), min(before[1], sums[stop] - sums[start])
                found = row[stop]
                if found is None or most - least <= found[0] - found[1]:
                    row[stop] = (most, least, start)
        best = row
        starts.append([found[2] if found else 0 for found in row])
    bounds = [num_items]
    for row_starts in reversed(starts):
        bounds.append(row_starts[bounds[-1]])
    return tuple(reversed(bounds))


def compare(name: str) -> Iterator[Row]:
    """Yield the rows of one model, without its MTP layers, which are rarely trained in a pipeline."""
    shape = model_shape(json.loads((CONFIGS / f"{name}.json").read_text()))
    shape = shape.without(shape.optional)
    costs = costs_of(shape, seq_len=SEQ_LEN, nbytes={})
    params = [costs["params"][module] for module in shape.modules]
    for num_ranks, num_virtual in DEGREES:
        placement = Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks)
        bounds = balanced_bounds(params, placement.num_stages)
        spec = f"pp={num_ranks},vpp={num_virtual}"
        inventory = inventory_of_modules(shape.modules, shape.num_layers)
        splits = {
            "deepspeed": tuple(shape.modules[start:stop] for start, stop in pairwise(bounds)),
            "torchtitan": parse_layout(spec, inventory).stages,
            "reshard": parse_layout(f"balance:time,{spec}", inventory, costs=costs).stages,
        }
        yield Row(
            model=name,
            num_ranks=num_ranks,
            num_virtual=num_virtual,
            **{who: _imbalance(stages, costs["time"], placement) for who, stages in splits.items()},
        )


def show(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, with the best values in bold."""
    head = "| model | PP x VPP | DeepSpeed | torchtitan | reshard | by rank: DeepSpeed | torchtitan | reshard |"
    lines = [head, "|---|---|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        three = (row.deepspeed, row.torchtitan, row.reshard)
        cells = _bold([one.stage for one in three]) + _bold([one.rank for one in three])
        degrees = f"{row.num_ranks} x {row.num_virtual}"
        lines.append(f"| {' | '.join([MODELS[row.model], degrees, *cells])} |")
    return "\n".join(lines)


def write(table: str, path: Path) -> None:
    """Replace the table of a document, or append the section to one that has none."""
    text = path.read_text() if path.exists() else "# Layouts\n"
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{SECTION}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def _imbalance(stages: Sequence[Sequence[str]], times: Mapping[str, float], placement: Placement) -> Imbalance:
    by_stage = [sum(times[module] for module in modules) for modules in stages]
    by_rank = [sum(by_stage[stage] for stage in placement.stages_on(rank)) for rank in range(placement.num_ranks)]
    total = sum(by_stage)
    return Imbalance(stage=max(by_stage) * len(by_stage) / total, rank=max(by_rank) * len(by_rank) / total)


def _bold(values: Sequence[float]) -> list[str]:
    shown = [f"{value:.3f}" for value in values]
    return [f"**{text}**" if text == min(shown) else text for text in shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this document")
    options = parser.parse_args()
    table = show([row for name in MODELS for row in compare(name)])
    if options.write:
        write(table, options.write)
    else:
        print(table)


if __name__ == "__main__":
    main()
