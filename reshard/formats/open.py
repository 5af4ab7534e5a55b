"""Opens SOURCE, as given on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from manifests.command.interpreter import collector_paused
from manifests.errors import Parameter, UsageError
from manifests.invariants import MANIFEST_NAME
from manifests.models import ModelShape
from manifests.schema import ModelDescription
from manifests.store import links_out_of, no_manifest
from reshard.formats import table
from reshard.formats.megatron.names import find_iteration
from reshard.formats.model_file import read_model_file
from reshard.formats.table import Format, OpenOptions
from reshard.tensors.checkpoint import Checkpoint
from stores.address import is_url
from stores.base import Folder
from stores.local import LocalFile, LocalFolder
from stores.open import open_store


def find_format(source: str) -> tuple[Format, Folder]:
    """Return the format of a source, given as on the command line, and its folder.

    Raises:
        InputError: nothing there, or it cannot be read.
    """
    if _is_named(source):
        return table.MANIFEST, _folder_of_manifest(source)
    folder = find_iteration(source, open_store(source))
    names = folder.names()
    return next((kind for kind in table.FORMATS if kind.is_in(names)), table.HUGGINGFACE), folder


@collector_paused()
def open_source(
    source: str,
    drop: frozenset[str] = frozenset(),
    description: ModelDescription | None = None,
    like: ModelShape | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format of the table.

    A manifest has its own description, and `description` is not for it. Manifests and Hugging Face folders of a model
    of the shape `like` share it.

    Raises:
        InputError: nothing there, or an invalid checkpoint; see `open_checkpoint` of its format.
    """
    kind, folder = find_format(source)
    return kind.open_checkpoint(folder, OpenOptions(drop=drop, description=description, like=like))


def open_described(source: str, drop: frozenset[str] = frozenset(), model: Path | None = None) -> Checkpoint:
    """Open a source as `open_source` does; `model` is a file that describes a model, if it describes the source.

    Raises:
        UsageError: a manifest is described.
        ModelError: the file is not valid; see `read_model_file`.
    """
    if model is None:
        return open_source(source, drop)
    description = read_model_file(model)
    if names_manifest(source):
        problem = "is for Hugging Face folders; a manifest records its own description"
        raise UsageError(Parameter("model"), problem, "leave it out", code="options.model-of-manifest")
    return open_source(source, drop, description)


def open_both(a: str, b: str, model: Path | None = None) -> tuple[Checkpoint, Checkpoint]:
    """Open two sources of the same model; what `model` or the manifest of one describes is true of the other."""
    description = None if model is None else read_model_file(model)
    if _is_named(b) and not _is_named(a):
        right = open_source(b, description=description)
        return open_source(a, description=description or right.description, like=right.shape), right
    left = open_source(a, description=description)
    return left, open_source(b, description=description or left.description, like=left.shape)


def links_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the files of a local Hugging Face folder that are links out of it, and their targets.

    Such files are packed, since folders of links to another model's files are common. But they are reported, since a
    folder from elsewhere may link to files that nobody wants to publish. Names in an index and paths in a manifest
    never lead out of their folder.
    """
    originals = checkpoint.originals
    if checkpoint.manifest is not None or originals is None or is_url(originals.location):
        return
    files = {**originals.files, **{item.path: item.file for item in checkpoint.auxiliary}}
    local = [name for name, file in files.items() if isinstance(file, LocalFile)]
    yield from links_out_of(Path(originals.location), local)


def names_manifest(source: str) -> bool:
    """Return whether a source is a manifest (its file or folder); asks the server if it is remote."""
    if _is_named(source):
        return True
    folder = open_store(source)
    return not isinstance(folder, LocalFolder) and MANIFEST_NAME in folder.names()


def _is_named(source: str) -> bool:
    """Return whether a source is a manifest, as far as that is known without a server."""
    path = Path(source)
    return path.name == MANIFEST_NAME or (not is_url(source) and (path / MANIFEST_NAME).is_file())


def _folder_of_manifest(source: str) -> Folder:
    if not is_url(source):
        path = Path(source)
        if not (path if path.name == MANIFEST_NAME else path / MANIFEST_NAME).exists():
            raise no_manifest(source, path)
        return LocalFolder(path.parent if path.name == MANIFEST_NAME else path)
    folder = open_store(source.removesuffix(f"/{MANIFEST_NAME}"))
    if MANIFEST_NAME not in folder.names():
        raise no_manifest(source)
    return folder
