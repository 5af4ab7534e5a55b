"""Model repositories on the Hugging Face hub, read by ranges or from the local cache."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import constants, get_session, hf_raise_for_status, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from manifests.errors import InputError, StoreError
from manifests.paths import problem_with_path
from stores.address import SCHEME, HubAddress
from stores.base import InputFile, Range, Reader, is_hidden
from stores.hub.calls import asking, check_endpoint, check_token, headers_of_requests, offline_error
from stores.hub.file import HubFile
from stores.local import LocalFolder
from stores.net.connections import Connections
from stores.net.retries import Retries, Streams, keep_trying

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_LISTING_ATTEMPTS = 3  # fail fast, since the address may be mistyped


def open_hub(address: HubAddress, retries: Retries | None = None) -> HubFolder:
    """Resolve `address` to a commit and list its files, in one request.

    HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and the timeouts of huggingface_hub are respected. With HF_HUB_OFFLINE, the
    folder consists of the repository's files in the local cache.
    """
    if constants.HF_HUB_OFFLINE:
        return _open_cached(address)
    check_endpoint()
    check_token()
    retries = retries or Retries()
    few = replace(retries, num_attempts=min(retries.num_attempts, _NUM_LISTING_ATTEMPTS))
    info = keep_trying(
        lambda: asking(address, lambda: _list(address), retries.answer_s), str(address), few, threading.Event()
    )
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        problem = f"expected a commit hash from {constants.ENDPOINT}, found {repr(info.sha)[:80]}"
        raise StoreError(str(address), problem, code="store.not-a-hub")
    streams, connections = Streams(), Connections()
    files = [
        _listed(address, info.sha, sibling, retries, streams, connections)
        for sibling in info.siblings or ()
        if not is_hidden(sibling.rfilename)
    ]
    by_name = {file.name: file for file in files}
    return HubFolder(address=address, revision=info.sha, files=by_name, is_private=bool(info.private))


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFolder:
    """A repository at one commit (`revision`). Cached files are read from the local cache."""

    address: HubAddress  # as the user wrote it
    revision: str
    files: Mapping[str, HubFile] = field(hash=False, repr=False)
    is_offline: bool = False
    is_private: bool = False
    kind: str = "huggingface"

    def __str__(self) -> str:
        return f"{self.address} (local cache)" if self.is_offline else str(self.address)

    @property
    def location(self) -> str:
        return SCHEME + self.address.repo

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.files))

    def file(self, name: str) -> InputFile:
        return self.files.get(name) or _AbsentFile(self, name)


@dataclass(frozen=True, slots=True)
class _AbsentFile:
    """A file that the folder does not have: any use raises."""

    folder: HubFolder
    name: str

    def __str__(self) -> str:
        return f"{self.folder.address}/{self.name}"

    @property
    def nbytes(self) -> int:
        raise self._error()

    @property
    def fingerprint(self) -> str:
        raise self._error()

    def open(self, ranges: Sequence[Range]) -> Reader:
        raise self._error()

    def _error(self) -> InputError:
        if self.folder.is_offline:
            return offline_error(replace(self.folder.address, revision=self.folder.revision), str(self), self.name)
        return StoreError(str(self), "no such file", f"at commit {self.folder.revision}", code="store.no-such-file")


def _list(address: HubAddress) -> ModelInfo:
    validate_repo_id(address.repo)
    revision = f"/revision/{quote(address.revision, safe='')}" if address.revision else ""
    url = f"{constants.ENDPOINT}/api/models/{address.repo}{revision}?blobs=true"
    response = get_session().get(url, headers=headers_of_requests(url), timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    hf_raise_for_status(response)
    info = ModelInfo(**response.json())  # type: ignore[no-untyped-call]
    for sibling in info.siblings or ():  # whose types huggingface_hub does not check
        named: tuple[object, object] = sibling.rfilename, _etag(sibling) or ""
        if not all(isinstance(value, str) for value in named):
            raise TypeError(f"expected a name and a digest, found {named}")
    return info


def _listed(
    address: HubAddress, commit: str, sibling: RepoSibling, retries: Retries, streams: Streams, connections: Connections
) -> HubFile:
    """Check the hub's listing of a file, which is untrusted input."""
    name, nbytes = sibling.rfilename, sibling.size
    if problem := problem_with_path(name):
        problem = f"{problem}, found {name[:80]!r} in the listing of {constants.ENDPOINT}"
        raise StoreError(str(address), problem, code="store.invalid-name")
    if not isinstance(nbytes, int) or nbytes < 0:
        problem = f"expected a size from {constants.ENDPOINT}, found {nbytes!r}"
        raise StoreError(f"{address}/{name}", problem, code="store.not-a-hub")
    etag = _etag(sibling)
    return HubFile(
        address=address,
        commit=commit,
        name=name,
        nbytes=nbytes,
        etag=etag or commit,
        listed=etag or "",
        retries=retries,
        streams=streams,
        connections=connections,
    )


def _etag(sibling: RepoSibling) -> str | None:
    return sibling.lfs.sha256 if sibling.lfs else sibling.blob_id


def _open_cached(address: HubAddress) -> HubFolder:
    try:
        path = asking(
            address, lambda: snapshot_download(address.repo, revision=address.revision, local_files_only=True)
        )
    except LocalEntryNotFoundError as error:
        # Newer versions of huggingface_hub raise for an incomplete snapshot, but report its path.
        path = getattr(error, "snapshot_path", "")
        if not path:
            raise offline_error(address, str(address)) from error
    snapshot = LocalFolder(Path(path))
    files = [_cached(address, snapshot, name) for name in snapshot.names()]
    return HubFolder(
        address=address, revision=snapshot.path.name, files={file.name: file for file in files}, is_offline=True
    )


def _cached(address: HubAddress, snapshot: LocalFolder, name: str) -> HubFile:
    """Return a cached file as the hub would list it: a snapshot has links to blobs named by their ETag."""
    file, commit = snapshot.file(name), snapshot.path.name
    etag = file.path.resolve().name if file.path.is_symlink() else ""
    return HubFile(address=address, commit=commit, name=name, nbytes=file.nbytes, etag=etag or commit, listed=etag)
