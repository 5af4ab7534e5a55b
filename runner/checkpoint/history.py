"""The checkpoints of one training run: a folder of them, `step-000100` the one after 100 steps. No torch.

# Note [Misnamed checkpoints]
A checkpoint is of the step in its manifest. One under the name of another step, such as a copy, is never resumed,
counted or pruned: by its name it would be the newest, and a restart would lose steps.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from manifests.errors import InputError, UnreachableError, refused_by_system, system_errors
from manifests.invariants import MANIFEST_NAME
from manifests.paths import is_file
from manifests.store import open_shard, sync_folder
from stores.folders.lock import locking
from stores.folders.owned import files_of_manifest, foreign_files, record_owned, remove_leftover, remove_tree
from stores.folders.publish import aside_of, is_free
from stores.open import open_manifest

logger = logging.getLogger("runner")

_CLAIM = ".lock"
_NAME = re.compile(r"step-(\d{6,18})")
_REMOVED = re.compile(r"\.step-\d{6,18}\.removed")
_LEFT = re.compile(r"\.step-\d{6,18}\.(partial|removed)")


def checkpoint_path(history: Path, step: int) -> Path:
    return history / f"step-{step:06d}"


def checkpoint_named(source: str, history: Path | None) -> Path:
    """Return the path of a checkpoint as `--resume` names it: `step-N` is in `history`, `step-N/` unless it is here."""
    match = re.fullmatch(r"step-(\d+)(/?)", source)
    if history is None or match is None or (match[2] and Path(source).is_dir()):
        return Path(source)
    return checkpoint_path(history, int(match[1]))


def step_of(checkpoint: Path) -> int | None:
    """Return the step that a folder is named after; None for a name that `checkpoint_path` does not make."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match and checkpoint_path(checkpoint.parent, int(match[1])) == checkpoint else None


def find_checkpoints(history: Path) -> tuple[Path, ...]:
    """Return the checkpoints of a folder, the one with the most steps first; timestamps are not used.

    Those whose manifest cannot be read are included, misnamed ones are not: see Note [Misnamed checkpoints].
    """
    return tuple(path for path, step in _stored_steps(history) if step in (None, step_of(path)))


def find_newest(history: Path, most_steps: int) -> Path | None:
    """Return the checkpoint with the most steps, up to so many; no manifests of earlier ones are read."""
    stored = ((path, step) for path, step in _stored_steps(history) if step is not None and step <= most_steps)
    return next((path for path, step in stored if step == step_of(path)), None)


def find_misnamed(history: Path) -> tuple[tuple[Path, int], ...]:
    """Return the folders whose name has another step than their manifest, with the manifest's; 0: not trained."""
    return tuple((path, step) for path, step in _stored_steps(history) if step not in (None, step_of(path)))


def newest_step(history: Path) -> int:
    """Return the latest step that a folder with a manifest is named after; -1: there is none. No manifest is read."""
    return next((step_of(path) or 0 for path in _named_paths(history)), -1)


def _stored_steps(history: Path) -> Iterator[tuple[Path, int | None]]:
    """Yield each folder with the name of a step and the step in its manifest, by name, the latest first."""
    yield from ((path, _stored_step(path)) for path in _named_paths(history))


def _named_paths(history: Path) -> Iterator[Path]:
    """Yield the folders with the name of a step and a manifest, the latest first."""
    try:
        paths = [history / name for name in os.listdir(history)]
        for path in sorted(paths, key=lambda path: step_of(path) or 0, reverse=True):
            if step_of(path) is not None and is_file(path / MANIFEST_NAME):
                yield path
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise refused_by_system(str(error.filename or history), error, code="checkpoint.unreadable") from error


def _stored_step(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's manifest, 0 for a model without training; None if it cannot be read."""
    try:
        training = open_manifest(checkpoint).manifest.training
    except UnreachableError:
        raise
    except InputError:
        return None
    return 0 if training is None else training.step


@contextmanager
def claim_history(history: Path, beat: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Keep other runs from saving here while the block runs, and remove what killed runs have left.

    It beats at its progress. Yields a check that no other run has taken the folder over, as after this machine was
    suspended.
    """
    where = f"--checkpoint {history}"
    _make(history, where)
    with locking(history / _CLAIM, where, "saves checkpoints there", may_be_removed=True) as check:
        _remove_left(history, _LEFT, beat)
        yield check


@contextmanager
def claim_output(out: Path) -> Iterator[Callable[[], None]]:
    """Keep other runs from writing this folder at their end while the block runs; yields a check as `claim_history`."""
    where, out = f"--save {out}", Path(os.path.abspath(out))
    _make(out.parent, where)
    lock = out.with_name(f".{out.name}{_CLAIM}")
    with locking(lock, where, "trains, and will save there", may_be_removed=True) as check:
        yield check


def _make(folder: Path, where: str) -> None:
    with system_errors(where, "cannot be created", code="output.unwritable"):
        folder.mkdir(parents=True, exist_ok=True)


def prune(
    history: Path,
    newest: Path,
    keep: int,
    spared: Collection[Path | None] = (),
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Remove all but the last `keep` checkpoints up to `newest`, after reading that one back.

    What an earlier removal has left is removed, too.

    Kept in any case, and not counted: those that are `spared`, by whatever path, and later ones, which are not this
    run's. Those to which somebody has added files, or that cannot be looked through, are kept with a warning. One whose
    manifest cannot be read, and which no run resumes, is not counted either.

    Raises:
        InputError: `newest` cannot be read back, and nothing was removed; or one cannot be removed.
    """
    for shard in open_manifest(newest).manifest.shards:
        beat()
        open_shard(newest, shard)
    last = step_of(newest)
    assert last is not None
    spared_paths = {path.resolve() for path in spared if path is not None}
    past = [
        path
        for path in find_checkpoints(history)
        if (step_of(path) or 0) <= last and path.resolve() not in spared_paths
    ]
    last_ones = [path for path in past if files_of_manifest(path) is not None][:keep]
    for path in (path for path in past if path not in last_ones):
        if (reason := _why_kept(path)) is not None:
            logger.warning("%s: kept beyond --keep: %s", path, reason)
            continue
        beat()
        # Renamed first: a checkpoint disappears as a whole.
        removed = path.with_name(f".{path.name}.removed")
        with system_errors(path, "cannot be removed", code="checkpoint.not-pruned"):
            if removed.is_symlink():
                removed.unlink()
            elif removed.exists() and not remove_leftover(removed, _owned, beat):
                logger.warning("%s: kept beyond --keep: another process writes to %s", path, removed)
                continue
            os.rename(path, removed)
            sync_folder(history)
            if not removed.is_symlink():  # what it leads to stays
                record_owned(removed, files_of_manifest)
        _remove(removed, beat)
    _remove_left(history, _REMOVED, beat)  # others may write in partial folders here


def _remove_left(history: Path, names: re.Pattern[str], beat: Callable[[], None]) -> None:
    """Remove what killed runs, and removals that failed, have left in folders of these names.

    What cannot be removed is logged and left: on NFS, a file that another process still reads. So is a folder that one
    writes in, such as a checkpoint that somebody packs to this history.
    """
    with system_errors(history, code="checkpoint.unreadable"):
        folders = [path for path in history.iterdir() if path.is_dir() and not path.is_symlink()]
    for path in folders:
        if names.fullmatch(path.name):
            beat()
            try:
                if not remove_leftover(path, _owned, beat):
                    logger.warning("%s: stays: another process writes there", path)
            except OSError as error:
                logger.warning("%s: left by an earlier save, cannot be removed: %s", path, error.strerror)


def _owned(folder: Path) -> tuple[str, ...]:
    """Return the files of a checkpoint in a folder, and those that NFS keeps there for processes that read them."""
    leftovers = (str(path.relative_to(folder)) for path in folder.rglob(".nfs*"))
    return (*(files_of_manifest(folder) or ()), *leftovers)


def _why_kept(path: Path) -> str | None:
    """Return why a checkpoint must not be removed; None: it has nothing but what the run wrote."""
    files = files_of_manifest(path)
    if files is None:
        return "its manifest cannot be read"
    try:
        others = foreign_files(path, files)
    except InputError as error:
        return f"{error.where}: {error.problem}"
    except OSError as error:  # somebody is removing it
        return f"cannot be looked through: {error.strerror}"
    return f"{others[0]} in it was not written by the run" if others else None


def set_aside(path: Path) -> None:
    """Make room for a checkpoint at `path`: rename what is there, which the run did not resume, as a whole.

    It is not replaced: not every file system can exchange two folders, and what is damaged may be of use to somebody,
    as may a folder without a manifest, such as a copy of which a part is there.
    """
    with system_errors(path, "cannot be renamed", code="checkpoint.not-set-aside"):
        if is_free(path):
            return
        step = _stored_step(path)
        aside = aside_of(path)
        os.rename(path, aside)
        sync_folder(path.parent)
    problems = {None: f"no {MANIFEST_NAME} in it can be read", step_of(path): "was not resumed"}
    problem = problems.get(step, f"is a checkpoint of step {step}")
    logger.warning("%s: %s; renamed to %s", path, problem, aside)


def _remove(folder: Path, beat: Callable[[], None]) -> None:
    with system_errors(folder, "cannot be removed", code="checkpoint.not-pruned"):
        remove_tree(folder, beat)
