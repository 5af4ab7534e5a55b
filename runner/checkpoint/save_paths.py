"""Where a run may not save: in folders that it reads and writes itself, nor in their place. No torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from manifests.errors import UsageError
from runner.checkpoint.history import find_checkpoints, step_of
from runner.config.flags import TrainOptions
from runner.config.schema import SYNTHETIC

__all__ = ["check_apart"]


def check_apart(options: TrainOptions, launched: Path) -> None:
    """Make sure that `--save`, which replaces a whole folder, takes nothing of the run away with it.

    Nothing is saved inside the launched bundles either, as packing them anew replaces that whole folder; a run whose
    checkpoints are there already goes on.

    Raises:
        InputError: the folder of checkpoints cannot be read.
        UsageError: naming what it is, or is above; or its name is that of a checkpoint of the run; or what is saved
            would lie inside the bundles.
    """
    history = options.checkpoint.history if options.checkpoint else None
    for where, saved, folder in (
        ("--save", options.save, options.save and options.save.parent), ("--checkpoint", history, history),
    ):  # fmt: skip
        if folder is None or launched.resolve() not in (folder.resolve(), *folder.resolve().parents):
            continue
        if where == "--save" or not find_checkpoints(folder):
            problem = f"would save inside the launched {launched}, and be gone when that is replaced"
            raise UsageError(f"{where} {saved}", problem, "choose a folder beside it", code="output.inside-input")
    if options.save is None:
        return
    flag, out = f"--save {options.save}", _names_of(options.save)
    for shown, path in _used(options, launched):
        if any(not out.isdisjoint((name, *name.parents)) for name in _names_of(path)):
            raise UsageError(
                flag,
                f"would take the place of {shown}",
                "choose a folder with nothing else of this run",
                code="output.inside-input",
            )
    if history is None or step_of(Path(os.path.abspath(options.save))) is None:
        return
    if not _names_of(history).isdisjoint(_names_of(options.save.parent)):
        raise UsageError(
            flag,
            f"has the name of a checkpoint of --checkpoint {history}",
            "choose another name",
            code="output.inside-input",
        )


def _used(options: TrainOptions, launched: Path) -> Iterator[tuple[str, Path]]:
    yield f"the launched {launched}", launched
    yield f"--log-dir {options.log_dir}", options.log_dir
    if options.checkpoint is not None:
        yield f"--checkpoint {options.checkpoint.history}", options.checkpoint.history
    if options.resume.source not in (None, "auto"):
        yield f"--resume {options.resume.source}", Path(options.resume.source)
    for flag, data in (("--data", options.data), ("--eval-data", options.eval_data)):
        for source in data.sources if data is not None else ():
            if source != SYNTHETIC:
                for path in (source, *glob.iglob(source, recursive=True)):
                    yield f"{flag} {source}", Path(path)


def _names_of(path: Path) -> frozenset[Path]:
    """Give a path as it is called and as it is without links: each of them can be taken away."""
    return frozenset((Path(os.path.abspath(path)), path.resolve()))
