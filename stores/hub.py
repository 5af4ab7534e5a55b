"""Model repositories on the Hugging Face hub, read by ranges or from the local cache."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from manifests.errors import InputError
from manifests.paths import problem_with_path
from stores.address import SCHEME, HubAddress
from stores.base import InputFile, Range, Reader
from stores.hub_errors import asking, offline_error
from stores.hub_file import AGENT, HubFile
from stores.local import LocalFile, LocalFolder
from stores.retries import Retries, keep_trying

__all__ = ["HubFolder", "open_hub"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUM_LISTING_ATTEMPTS = 3  # nothing was done yet, and whoever mistyped an address is waiting


def open_hub(address: HubAddress, retries: Retries | None = None) -> HubFolder:
    """Pin the commit that `address` means now, and list its files: one request.

    HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and the timeouts of huggingface_hub are respected. With
    HF_HUB_OFFLINE, the folder is what the local cache has of the repository.

    Raises:
        InputError: no such repository or revision, no access, offline and not in the cache, or the hub
            cannot be reached.
    """
    if constants.HF_HUB_OFFLINE:
        return _open_cached(address)
    retries = retries or Retries()
    few = replace(retries, num_attempts=min(retries.num_attempts, _NUM_LISTING_ATTEMPTS))
    info = keep_trying(lambda: asking(address, lambda: _list(address)), str(address), few, threading.Event())
    if info.sha is None or not _COMMIT.fullmatch(info.sha):
        raise InputError(str(address), f"expected a commit hash from {constants.ENDPOINT}, found {info.sha!r}")
    files = [_listed(address, info.sha, sibling, retries) for sibling in info.siblings or ()]
    return HubFolder(address=address, revision=info.sha, files={file.name: file for file in files})


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFolder:
    """A repository at one commit (`revision`). What its local cache holds is read from there."""

    address: HubAddress  # as the user wrote it
    revision: str
    files: Mapping[str, HubFile | LocalFile] = field(hash=False, repr=False)
    is_offline: bool = False
    kind: str = "huggingface"

    def __str__(self) -> str:
        return f"{self.address} (local cache)" if self.is_offline else str(self.address)

    @property
    def location(self) -> str:
        return SCHEME + self.address.repo

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.files))

    def file(self, name: str) -> InputFile:
        file = self.files.get(name)
        if file is None:
            return _AbsentFile(self, name)
        if isinstance(file, HubFile):
            cached = try_to_load_from_cache(self.address.repo, name, revision=self.revision)
            if isinstance(cached, str) and (local := LocalFile(Path(cached))).nbytes == file.nbytes:
                return local
        return file
