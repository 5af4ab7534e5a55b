"""Remote manifests: manifest, config and tokenizer are downloaded, the bundles are not. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from manifests.errors import UsageError, refused_by_system
from manifests.invariants import MANIFEST_NAME
from manifests.schema import Manifest
from manifests.store import locate_manifest, read_manifest, write_file
from runner.bundle.packed import Packed, open_packed
from runner.config.architectures import check_trainable
from stores.address import is_url
from stores.base import Blocks, read_whole
from stores.manifest_file import ManifestFile, find_manifest_file


def fetch(file: ManifestFile, folder: Path, read: tuple[Manifest, str] | None = None) -> Packed:
    """Download a manifest and its auxiliary files to a folder, verify them, and open the manifest there.

    `read` is the manifest and its digest, if the file has been read already. Several processes may do so at once:
    each file gets its name when it is whole, the manifest last.

    Raises:
        InputError: a file is missing or damaged, or cannot be written; and as `open_packed`.
    """
    manifest, digest = read or file.read()
    check_trainable(manifest.model.architecture, is_described=manifest.model.description is not None)
    try:
        for auxiliary in manifest.files:
            path = folder / auxiliary.path
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, Blocks(file.folder.file(auxiliary.path), auxiliary.compared_digest), is_durable=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / MANIFEST_NAME, read_whole(file.folder.file(file.name), digest), is_durable=False)
    except OSError as error:
        raise refused_by_system(
            str(error.filename or folder), error, "cannot be written", code="output.unwritable"
        ) from error
    return replace(open_packed(folder, manifest), store=file.folder)


@contextmanager
def opened(manifest: str, *, is_staged: bool) -> Iterator[tuple[str, Packed]]:
    """Yield the address for ranks to open, and the opened manifest, until the block ends.

    Raises:
        UsageError: it is remote, and no local cache is configured.
        InputError: there is no manifest, or its model cannot be trained; and as `fetch`.
    """
    if not is_url(manifest):
        path = locate_manifest(Path(manifest))
        found = read_manifest(path)
        check_trainable(found.model.architecture, is_described=found.model.description is not None)
        yield str(path), open_packed(path.parent, found)
        return
    if not is_staged:
        raise UsageError(
            manifest,
            "is not on this machine, and ranks read bundles from a local file system",
            "add --stage-to-local DIR, which copies the bundles of a node's ranks to its own disk",
            code="options.remote-manifest",
        )
    file = find_manifest_file(manifest)
    with TemporaryDirectory(prefix="runner-") as folder:
        revision = f"@{file.folder.revision}" if file.folder.revision else ""  # a branch of the hub may change
        yield file.folder.location + revision, fetch(file, Path(folder))


def name_of(location: str) -> str:
    """Return the last part of a path or address."""
    return location.rstrip("/").rpartition("/")[2]
