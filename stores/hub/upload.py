"""Uploads to a model repository on the Hugging Face hub: many files, one commit, by `huggingface_hub`.

It sends no file again that is already there or that an interrupted upload has sent, and makes no commit that changes
nothing. Its `upload_folder` would leave out what the repository's .gitignore names, and takes no model card that is in
no folder; `create_commit` is what that calls. Requests that stall time out, and logs show no signatures.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    _http,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from manifests.errors import OutputError, Parameter, StoreError
from manifests.schema import MODEL_CARD_NAME
from stores.address import HubAddress, without_queries
from stores.base import read_whole
from stores.hub.calls import AGENT, LOG_IN, asking, check_endpoint, configured_token, without_token
from stores.hub.store import HubFolder, open_hub
from stores.net.retries import PassingError, Retries, keep_trying

_MAIN = "main"
_CONNECT_S = 30.0
_LOCK = threading.Lock()  # of the factory of clients

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubUpload:
    """A repository's branch that can be written: `head` is what it has now.

    `is_shared`: the branch has the same commit as the main branch, so nothing of it is lost by replacing files.
    """

    address: HubAddress
    head: HubFolder
    is_shared: bool
    retries: Retries = field(repr=False)

    @property
    def branch(self) -> str:
        return self.address.revision or _MAIN

    def commit(
        self,
        files: Mapping[str, Path | bytes],
        *,
        removed: Collection[str],
        message: str,
        before_commit: Callable[[], object],
    ) -> str:
        """Send files, then add them to the branch and remove others, in one commit, and return the branch's revision.

        `before_commit` is called when all files are sent, and may raise.
        """
        added = [CommitOperationAdd(path, data) for path, data in files.items()]
        deleted = [CommitOperationDelete(path, is_folder=False) for path in removed]
        _retry(self.address, self.retries, lambda api: self._send(api, added))
        before_commit()

        def commit_once(api: HfApi) -> str:
            try:
                return api.create_commit(
                    self.address.repo,
                    [*deleted, *added],
                    commit_message=message,
                    revision=self.branch,
                    parent_commit=self.head.revision,
                ).oid
            except HfHubHTTPError as error:
                if error.response.status_code not in (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED):
                    raise
                head = open_hub(self.address, self.retries)
                if head.revision != self.head.revision and has_last(head, files):
                    return head.revision  # of an attempt whose answer was lost
                problem = "another commit was made to this branch meanwhile"
                hint = "run again: files that were sent are not sent again"
                raise OutputError(str(self.address), problem, hint, code="output.contended") from error
            except ValueError as error:  # of the card's front matter, which the hub reads first
                problem, hint = str(error), "correct README.md, in the repository if it has one, or in the folder"
                where = f"{self.address}/{MODEL_CARD_NAME}"
                raise StoreError(where, problem, hint, code="store.invalid-card") from error

        return _retry(self.address, self.retries, commit_once)

    def _send(self, api: HfApi, files: list[CommitOperationAdd]) -> None:
        repo, branch = self.address.repo, self.branch
        try:  # the repository's .gitignore would leave files out of the commit, without an error
            api.preupload_lfs_files(repo, files, revision=branch, free_memory=False, gitignore_content="\n")
        except (RuntimeError, ConnectionError, TimeoutError) as error:  # names the file; those of hf_xet have no cause
            if error.__cause__ is not None:
                raise error.__cause__ from error
            problem = f"sending to {constants.ENDPOINT} failed: {without_token(str(error))}"
            hint = "check the network and HF_ENDPOINT; HF_HUB_DISABLE_XET=1 uploads without hf_xet"
            raise PassingError(problem, hint) from error


def open_upload(address: HubAddress, *, is_public: bool, retries: Retries | None = None) -> HubUpload:
    """Open a branch to write to; a repository or branch that does not exist is created, private unless `is_public`."""
    check_endpoint()
    retries = retries or Retries()
    if constants.HF_HUB_OFFLINE:
        problem = "HF_HUB_OFFLINE is set, and nothing can be uploaded"
        raise StoreError(str(address), problem, "unset it", code="store.offline")
    if configured_token() is None:
        raise StoreError(str(address), "writing needs a token, and none is set", LOG_IN, code="store.no-token")
    main = HubAddress(repo=address.repo)
    first = _open(main, lambda api: api.create_repo(main.repo, private=not is_public, exist_ok=True), retries)
    if not first.is_private and not is_public:
        problem, hint = (
            "is a public repository",
            f"add {Parameter('public', True)} to publish there, or name another repository",
        )
        raise StoreError(str(address), problem, hint, code="store.public-repository")
    if address.revision in (None, _MAIN):
        return HubUpload(address=main, head=first, is_shared=False, retries=retries)
    branch = str(address.revision)
    head = _open(address, lambda api: api.create_branch(main.repo, branch=branch, exist_ok=True), retries)
    return HubUpload(address=address, head=head, is_shared=head.revision == first.revision, retries=retries)


def staging_folder(address: HubAddress) -> Path:
    """Return the folder in which to prepare an upload: below HF_HOME, the same one for each run."""
    branch = f"@{quote(address.revision, safe='')}" if address.revision else ""
    return Path(constants.HF_HOME) / "reshard" / f"{address.repo.replace('/', '--')}{branch}"


@contextmanager
def showing_bars(is_wanted: bool) -> Iterator[None]:
    """Show huggingface_hub's progress bars until the block ends, on a terminal and if wanted."""
    if (is_wanted and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _open(address: HubAddress, create: Callable[[HfApi], object], retries: Retries) -> HubFolder:
    try:
        return open_hub(address, retries)
    except StoreError as error:
        if error.code not in ("store.no-such-repository", "store.no-such-revision"):
            raise
    _retry(address, retries, create)
    return open_hub(address, retries)


def has_last(folder: HubFolder, files: Mapping[str, Path | bytes]) -> bool:
    """Return whether a branch has the last of these files, which vouches for the others, as a manifest does."""
    path, content = list(files.items())[-1]
    data = content if isinstance(content, bytes) else content.read_bytes()
    return path in folder.files and folder.files[path].nbytes == len(data) and read_whole(folder.file(path)) == data


def _retry(address: HubAddress, retries: Retries, call: Callable[[HfApi], Answer]) -> Answer:
    api = HfApi(library_name=AGENT)

    def attempt() -> Answer:
        with uploading(retries.idle_s):
            return asking(address, lambda: call(api))

    return keep_trying(attempt, str(address), retries, threading.Event())


@contextmanager
def uploading(idle_s: float) -> Iterator[None]:
    """Let requests time out that send and receive no byte for `idle_s`, and strip logged URLs.

    huggingface_hub uploads without timeouts. Those that a client of the user's has are kept. Of clients that are made
    after the last of overlapping blocks has ended, nothing is changed; the present one keeps its timeouts.
    """
    _limit(get_session(), idle_s)
    strip, loggers = _StripQueries(), [logging.getLogger(name) for name in (_http.__name__, "httpx")]
    for logger in loggers:
        logger.addFilter(strip)
    _limit_new_clients(idle_s)
    try:
        yield
    finally:
        _leave_new_clients()
        for logger in loggers:
            logger.removeFilter(strip)


def _limit_new_clients(idle_s: float) -> None:
    """Limit those that huggingface_hub makes after a failure to connect."""
    with _LOCK:
        chosen = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
        if isinstance(chosen, _Limiting):
            chosen.num_users += 1
        elif chosen is not None:
            _http._GLOBAL_CLIENT_FACTORY = _Limiting(chosen, idle_s)


def _leave_new_clients() -> None:
    with _LOCK:
        limiting = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
        if isinstance(limiting, _Limiting):
            limiting.num_users -= 1
            if limiting.num_users == 0:
                _http._GLOBAL_CLIENT_FACTORY = limiting.factory


@dataclass(slots=True)
class _Limiting:
    """A factory of clients that time out, and how many uploads use it."""

    factory: Callable[[], Any]
    idle_s: float
    num_users: int = 1

    def __call__(self) -> Any:
        client = self.factory()
        _limit(client, self.idle_s)
        return client


class _StripQueries(logging.Filter):
    """Strip URLs of their queries: whoever has the signature in them may write there."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_queries(record.getMessage()), None
        return True


def _limit(client: Any, idle_s: float) -> None:
    timeout, connect_s = client.timeout, min(idle_s, _CONNECT_S)
    limits = ((timeout.connect, connect_s), (timeout.read, idle_s), (timeout.write, idle_s))
    client.timeout = (*(limit_s if set_s is None else set_s for set_s, limit_s in limits), timeout.pool)
