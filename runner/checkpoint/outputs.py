"""Check every place that a run will write to before its first step, when a failure costs nothing. No torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from manifests.errors import InputError, UsageError, system_errors
from runner.checkpoint.adapter_record import files_of_peft
from runner.checkpoint.history import find_checkpoints, step_of
from runner.config.flags import TrainOptions
from runner.rundir.records import has_saved
from stores.folders.owned import files_of_manifest
from stores.folders.probe import check_room, check_writable, folder_of
from stores.folders.publish import (
    Swap,
    check_not_a_step,
    check_partial,
    check_target,
    exchange,
    exchange_or_rename,
    partial_of,
)
from stores.local import LocalFolder
from stores.open import open_manifest
from stores.versions import check_chain

_HINT = "choose a folder that this user can write to on every node"


def check_outputs(options: TrainOptions) -> None:
    """Check that every folder a run writes to is writable; the ranks that write and the launcher call this."""
    if options.publish is not None and options.publish.folder is not None:
        check_chain(LocalFolder(options.publish.folder), f"--publish {options.publish.chain}")
    for where, folder in _folders(options):
        check_writable(folder, where, _HINT)
    if options.save is not None:
        swap = swap_of(options)
        if swap is not None:
            check_not_a_step(options.save)
        find_owned = files_of_manifest if options.lora is None else files_of_peft
        check_target(options.save, swap is not None, find_owned)
        check_partial(options.save, find_owned)
        is_replaced = options.save.is_dir() and any(options.save.iterdir())
        where = f"--save {options.save}"
        check_writable(folder_of(options.save), where, _HINT, exchange=swap if is_replaced else None)
    metrics = options.log_dir / "metrics.jsonl"
    if metrics.exists():
        with system_errors(metrics, "cannot be written", code="output.unwritable"):
            open(metrics, "ab").close()


def swap_of(options: TrainOptions) -> Swap | None:
    """Return how `--save` replaces a folder, if it may: with `--force`, or what the run wrote before it was restarted.

    What it wrote itself is replaced on every file system: see `exchange_or_rename`.
    """
    if options.save is not None and has_saved(options.log_dir, options.save):
        return exchange_or_rename
    return exchange if options.force else None


def replaced_note(save: Path) -> str | None:
    """Return what is lost when `--save` replaces a checkpoint that was trained; None if there is none."""
    try:
        training = open_manifest(save).manifest.training
    except InputError:
        return None
    if training is None:
        return None
    state = ", and its optimizer state" if training.optimizer is not None else ""
    return f"--save {save} will replace the weights of step {training.step}{state}"


def check_space(options: TrainOptions, *, checkpoint_nbytes: int, weights_nbytes: int) -> None:
    """Check that the disks have room for one more checkpoint, and for what `--save` writes."""
    needs = []
    if options.history is not None:
        needs.append((f"--checkpoint {options.history}", options.history, checkpoint_nbytes))
    if options.save is not None:
        partial_nbytes = _nbytes_of(partial_of(options.save))  # by a killed run: removed before this one is written
        needs.append((f"--save {options.save}", folder_of(options.save), max(0, weights_nbytes - partial_nbytes)))
    check_room(needs)


def _folders(options: TrainOptions) -> Iterator[tuple[str, Path]]:
    """Yield each folder that files are added to, after the flag that asks for them."""
    yield from _lasting_folders(options)
    if options.traced:
        yield "--trace", options.log_dir / "trace"
    if options.profiled or options.memory_snapshot:
        yield "--profile", options.log_dir / "profile"
    if options.tensorboard:
        yield "--tensorboard", options.log_dir / "tensorboard"
    if options.wandb:
        yield "--wandb", Path(os.environ.get("WANDB_DIR", options.log_dir)) / "wandb"


def _lasting_folders(options: TrainOptions) -> Iterator[tuple[str, Path]]:
    """Yield the folders that a run shares with earlier and later ones."""
    return ((f"{flag} {path}", path) for flag, path in options.folders.items() if flag != "--save")


def _nbytes_of(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:
        return 0


def check_apart(options: TrainOptions, launched: Path) -> None:
    """Check that `--save`, which replaces a whole folder, replaces nothing that the run uses.

    Nothing may be saved inside the launched bundles either, as packing them again replaces that whole folder; a run
    whose checkpoints are already there may continue.
    """
    for flag in ("--save", "--checkpoint", "--publish"):
        if (path := options.folders.get(flag)) is None:
            continue
        folder = path.parent if flag == "--save" else path
        if launched.resolve() not in (folder.resolve(), *folder.resolve().parents):
            continue
        if flag == "--save" or not find_checkpoints(folder):
            problem = f"is inside the launched {launched}, and would be lost when that is replaced"
            raise UsageError(f"{flag} {path}", problem, "choose a folder beside it", code="output.inside-input")
    if options.save is None:
        return
    where, out = f"--save {options.save}", _names_of(options.save)
    for shown, path in _used(options, launched):
        if any(not out.isdisjoint((name, *name.parents)) for name in _names_of(path)):
            raise UsageError(
                where,
                f"would replace {shown}",
                "choose a folder with nothing else of this run",
                code="output.inside-input",
            )
    if options.history is None or step_of(Path(os.path.abspath(options.save))) is None:
        return
    if not _names_of(options.history).isdisjoint(_names_of(options.save.parent)):
        raise UsageError(
            where,
            f"has the name of a checkpoint of --checkpoint {options.history}",
            "choose another name",
            code="output.inside-input",
        )


def _used(options: TrainOptions, launched: Path) -> Iterator[tuple[str, Path]]:
    yield f"the launched {launched}", launched
    yield from _lasting_folders(options)
    if options.resume.source not in (None, "auto"):
        yield f"--resume {options.resume.source}", Path(options.resume.source)
    for flag, data in (("--data", options.data), ("--eval-data", options.eval_data)):
        for source in data.files if data is not None else ():
            for path in (source, *glob.iglob(source, recursive=True)):
                yield f"{flag} {source}", Path(path)


def _names_of(path: Path) -> frozenset[Path]:
    """Return a path as given and with links resolved: either of them can be replaced."""
    return frozenset((Path(os.path.abspath(path)), path.resolve()))
