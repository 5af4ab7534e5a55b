"""Where a run may not save: inside or in place of folders that it reads or writes. No torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from manifests.errors import UsageError
from runner.checkpoint.history import find_checkpoints, step_of
from runner.config.flags import TrainOptions
from runner.config.schema import SYNTHETIC


def check_apart(options: TrainOptions, launched: Path) -> None:
    """Check that `--save`, which replaces a whole folder, replaces nothing that the run uses.

    Nothing may be saved inside the launched bundles either, as packing them again replaces that whole folder; a run
    whose checkpoints are already there may continue.

    Raises:
        InputError: the folder of checkpoints cannot be read.
        UsageError: naming what would be replaced; or it has the name of a checkpoint of the run; or it is inside the
            launched bundles.
    """
    history = options.checkpoint.history if options.checkpoint else None
    for where, saved, folder in (
        ("--save", options.save, options.save and options.save.parent), ("--checkpoint", history, history),
    ):  # fmt: skip
        if folder is None or launched.resolve() not in (folder.resolve(), *folder.resolve().parents):
            continue
        if where == "--save" or not find_checkpoints(folder):
            problem = f"is inside the launched {launched}, and would be lost when that is replaced"
            raise UsageError(f"{where} {saved}", problem, "choose a folder beside it", code="output.inside-input")
    if options.save is None:
        return
    flag, out = f"--save {options.save}", _names_of(options.save)
    for shown, path in _used(options, launched):
        if any(not out.isdisjoint((name, *name.parents)) for name in _names_of(path)):
            raise UsageError(
                flag,
                f"would replace {shown}",
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
    """Return a path as given and with links resolved: either of them can be replaced."""
    return frozenset((Path(os.path.abspath(path)), path.resolve()))
