"""Plot and compare the losses of an uninterrupted run and of one that was killed and resumed on other ranks.

python demo/draw_losses.py UNINTERRUPTED KILLED RESUMED PICTURE      log folders, and an .svg or .png file
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from manifests.command.palette import PLAIN, PURPLE, THEMES
from reshard.draw.theme import describe, drawing, follow_reader

TOLERANCE = 1e-5  # relative


def main(uninterrupted: Path, killed: Path, resumed: Path, picture: Path) -> None:
    whole, before, after = (_losses(folder) for folder in (uninterrupted, killed, resumed))
    picture.parent.mkdir(parents=True, exist_ok=True)
    with drawing(THEMES["light"]):
        figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        axes.plot(whole.keys(), whole.values(), color=PLAIN, linewidth=3.5, alpha=0.45, label="2 ranks, uninterrupted")
        axes.plot(
            before.keys(),
            before.values(),
            "o",
            color=THEMES["light"].ink,
            markersize=4,
            label="2 ranks, until the kill",
        )
        axes.plot(
            after.keys(), after.values(), "o", color=PURPLE, markersize=7, markerfacecolor="none",
            label="4 ranks, from the checkpoint",
        )  # fmt: skip
        axes.axvline(max(before) + 0.5, color=PLAIN, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            "kill -9 of rank 1", (max(before) + 0.5, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
            textcoords="offset points", color=THEMES["light"].quiet,
        )  # fmt: skip
        axes.annotate(
            f"checkpoint after step {min(after) - 1}", (min(after) - 1, whole[min(after) - 1]), xytext=(6, 60),
            textcoords="offset points", ha="right", color=THEMES["light"].quiet,
            arrowprops={"arrowstyle": "-", "color": PLAIN, "linewidth": 0.8},
        )  # fmt: skip
        axes.set(
            xlabel="optimizer step",
            ylabel="training loss",
            title="A rank is killed; the checkpoint is resharded and resumed",
        )
        axes.legend(loc="upper left", bbox_to_anchor=(0.28, 1))
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None, dpi=150)
    if picture.suffix == ".svg":
        told = "Losses of the killed and resumed run, on top of those of an uninterrupted run"
        picture.write_text(follow_reader(describe(picture.read_text(), "Training loss by step", told)))
    apart = max(abs(loss - whole[step]) / whole[step] for run in (before, after) for step, loss in run.items())
    print(f"{len(before)} steps until the kill, {len(after)} after the checkpoint: {picture}")
    print(f"losses of the same step differ by at most {apart:.1e} relative to the uninterrupted run")
    if apart > TOLERANCE or max(after) != max(whole):
        sys.exit("the runs differ")


def _losses(folder: Path) -> dict[int, float]:
    """Return the training loss of each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
