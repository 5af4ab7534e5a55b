"""Remote manifests: manifest, config and tokenizer are downloaded, the bundles are not. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from manifests.errors import UsageError, refused_by_system
from manifests.invariants import MANIFEST_NAME
from manifests.store import write_file
from runner.bundle.packed import Packed, open_packed
from runner.config.architectures import check_trainable
from stores.address import is_url
from stores.base import Blocks
from stores.open import ReadManifest, open_manifest


def fetch(read: ReadManifest, folder: Path) -> Packed:
    """Download a manifest's auxiliary files to a folder, verify them, write the manifest, and open it there.

    Several processes may do so at once: each file gets its name when it is whole, the manifest last.

    Raises:
        InputError: a file is missing or damaged, or cannot be written; and as `open_packed`.
    """
    _check_trainable(read)
    try:
        for auxiliary in read.manifest.files:
            path = folder / auxiliary.path
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, Blocks(read.folder.file(auxiliary.path), auxiliary.compared_digest), is_durable=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / MANIFEST_NAME, read.data, is_durable=False)
    except OSError as error:
        raise refused_by_system(
            str(error.filename or folder), error, "cannot be written", code="output.unwritable"
        ) from error
    return open_packed(read, copied_to=folder)


@contextmanager
def opened(manifest: str, *, is_staged: bool) -> Iterator[tuple[str, Packed]]:
    """Yield the address for ranks to open, and the opened manifest, until the block ends.

    Raises:
        UsageError: it is remote, and no local cache is configured.
        InputError: there is no manifest, or its model cannot be trained; and as `fetch`.
    """
    if not is_url(manifest):
        read = open_manifest(manifest)
        _check_trainable(read)
        yield str(read.root / read.name), open_packed(read)
        return
    if not is_staged:
        raise UsageError(
            manifest,
            "is not on this machine, and ranks read bundles from a local file system",
            "add --stage-to-local DIR, which copies the bundles of a node's ranks to its own disk",
            code="options.remote-manifest",
        )
    read = open_manifest(manifest)
    with TemporaryDirectory(prefix="runner-") as folder:
        revision = f"@{read.folder.revision}" if read.folder.revision else ""  # a branch of the hub may change
        yield read.folder.location + revision, fetch(read, Path(folder))


def _check_trainable(read: ReadManifest) -> None:
    model = read.manifest.model
    check_trainable(model.architecture, is_described=model.description is not None)


def name_of(location: str) -> str:
    """Return the last part of a path or address."""
    return location.rstrip("/").rpartition("/")[2]
