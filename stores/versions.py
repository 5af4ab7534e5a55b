"""The versions that a chain of weights has: folders or prefixes with an index."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from manifests.errors import InputError, OutputError, SourceError, system_errors
from manifests.index import INDEX_NAME
from manifests.jsontext import parse_json_object
from manifests.models.config import CONFIG_NAME
from manifests.paths import is_file, status_of
from manifests.store import read_small_file
from manifests.versions import VERSION_INDEX
from stores.base import Folder
from stores.local import LocalFolder


def numbers_in(folder: Folder) -> tuple[int, ...]:
    """Return the numbers of the complete versions below a folder, in ascending order; one that is missing has none."""
    if isinstance(folder, LocalFolder):  # no walk: a publisher may be writing and renaming there
        try:
            entries = os.listdir(folder.path)
        except FileNotFoundError:
            entries = []
        except OSError as error:
            raise SourceError(str(folder), f"cannot be listed: {error.strerror}", code="source.not-a-folder") from error
        names = [name for entry in entries if VERSION_INDEX.fullmatch(name := f"{entry}/{INDEX_NAME}")]
        with system_errors(folder, code="store.unreadable", names_file=True):
            names = [name for name in names if is_file(folder.path / name)]
    else:
        names = list(folder.names())
    return tuple(sorted(int(match[1]) for match in map(VERSION_INDEX.fullmatch, names) if match))


def check_chain(folder: Folder, where: str) -> None:
    """Check that a folder can become a chain: commands would read the chain in the place of a model."""
    if isinstance(folder, LocalFolder):
        with system_errors(folder, code="store.unreadable"):
            has_config = status_of(folder.path / CONFIG_NAME) is not None
    else:
        has_config = CONFIG_NAME in folder.names()
    if has_config and not numbers_in(folder):
        problem = "is the folder of a model, and commands would read the chain in its place"
        raise OutputError(where, problem, "publish to another folder", code="output.not-ours")


def files_of_version(folder: Path) -> Collection[str] | None:
    """Return the files of a version, which after a kill may lack only its name; None: the folder is of others."""
    try:
        index = parse_json_object(read_small_file(folder / INDEX_NAME), str(folder))
        files = parse_json_object(str(index["metadata"]["files"]).encode(), str(folder))
        return {INDEX_NAME, *index["weight_map"].values(), *files}
    except (InputError, KeyError, TypeError, AttributeError):
        return None
