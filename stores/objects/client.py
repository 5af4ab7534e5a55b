"""obstore, the client of S3, Google Cloud Storage, Azure and folders (`file://`), opened from the usual environment.

obstore reads credentials and endpoints from AWS_*, GOOGLE_* and AZURE_* variables, then from the cloud's metadata
server; AWS profiles are read with boto3 if it is installed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from manifests.errors import InputError, OutputError, Parameter, StoreError, system_errors
from manifests.invariants import MANIFEST_NAME
from manifests.paths import problem_with_path
from stores.address import OBJECT_SCHEMES, SCHEME, place_of, split_url
from stores.base import LOCK_NAME, PROGRESS_NAME
from stores.net.retries import Retries
from stores.objects.errors import changed, cloud_of, explained
from stores.objects.uplink import LONGEST_PART_S, NUM_PARTS, Sent, Uplink, part_nbytes

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, WritableFile
    from obstore.store import BackoffConfig, ClientConfig, ObjectStore, RetryConfig

logger = logging.getLogger(__name__)

_CHUNK_NBYTES = 1 << 18  # of a streamed response, to keep obstore's buffers small
_LIST_COUNT = 1000  # names per page
# With any of these, obstore finds credentials without a profile.
_OWN_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectEntry:
    """The state of an object when it was listed. `name` is its path below the folder."""

    name: str
    nbytes: int
    etag: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ObstoreClient:
    """A prefix of a bucket. Opening fails fast, in case the address is mistyped; writing retries for long.

    Reading leaves most retries to the caller, which can resume a response.
    """

    url: str
    quick: ObjectStore = field(repr=False)
    reading: ObjectStore = field(repr=False)
    patient: ObjectStore = field(repr=False)
    uplink: Uplink = field(repr=False, compare=False)

    def settled(self) -> ObstoreClient:
        """Return the client with long retries for all requests, for use once the address is known to be right."""
        return replace(self, quick=self.patient, reading=self.patient)

    def entries(self) -> Iterator[ObjectEntry]:
        """Yield every object below the prefix."""
        pages = iter(self.quick.list(chunk_size=_LIST_COUNT))
        while True:
            with explained(self.url):
                page = next(pages, ())
            if not page:
                return
            yield from (_entry(meta["path"], meta["size"], meta["e_tag"]) for meta in page)

    def look_up(self, name: str) -> ObjectEntry:
        with explained(f"{self.url}/{name}"):
            meta = self.quick.head(name)
        return _entry(name, meta["size"], meta["e_tag"])

    def read(self, entry: ObjectEntry, begin: int, end: int) -> Iterator[memoryview]:
        """Stream the bytes of a range, after an empty piece when the response begins."""
        if begin == end:  # obstore refuses to ask for nothing
            return
        where = f"{self.url}/{entry.name}"
        answer = self._get(entry, begin, end)
        with explained(where):
            chunks = iter(answer.stream(min_chunk_size=_CHUNK_NBYTES))
        yield memoryview(b"")
        while True:
            with explained(where):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield memoryview(chunk)

    def read_at_once(self, entry: ObjectEntry, begin: int, end: int) -> memoryview:
        """Return the bytes of a range in obstore's own memory; raises as `read`."""
        answer = self._get(entry, begin, end)
        with explained(f"{self.url}/{entry.name}"):
            return memoryview(answer.bytes())

    def _get(self, entry: ObjectEntry, begin: int, end: int) -> GetResult:
        where = f"{self.url}/{entry.name}"
        options: GetOptions = {"range": (begin, end)}
        if entry.etag:
            options["if_match"] = f'"{entry.etag}"'
        with explained(where):
            answer = self.reading.get(entry.name, options=options)
        current = _entry(entry.name, answer.meta["size"], answer.meta["e_tag"])
        if current != entry:  # a server may ignore the condition
            raise changed(where)
        return answer

    def load(self, name: str) -> bytes:
        with explained(f"{self.url}/{name}"):
            return bytes(self.quick.get(name).bytes())

    def put(self, name: str, data: bytes) -> ObjectEntry:
        with explained(f"{self.url}/{name}"):
            return _entry(name, len(data), self.quick.put(name, data)["e_tag"])

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object; return False if another one exists."""
        from obstore.exceptions import AlreadyExistsError

        with explained(f"{self.url}/{name}"):
            try:
                self.quick.put(name, data, mode="create")
            except AlreadyExistsError:
                # It is ours if the response to the first request was lost and obstore retried.
                return self.load(name) == data
            except NotImplementedError:  # AWS_CONDITIONAL_PUT=disabled: the listing did not have it
                self.quick.put(name, data)
        return True

    def writer(
        self,
        name: str,
        nbytes: int,
        check: Callable[[], None] = lambda: None,
        done: Callable[[], None] = lambda: None,
        num_parts: int = NUM_PARTS,
    ) -> ObjectWriter:
        """Begin to upload an object of `nbytes`, which takes at most `num_parts` + 1 parts of memory.

        `check` is called before the object appears, and may raise; `done` is called once it exists.
        """
        import obstore

        where, size = f"{self.url}/{name}", part_nbytes(nbytes)
        count = self.uplink.num_parts(size, num_parts)
        with explained(where):
            file = obstore.open_writer(self.patient, name, buffer_size=size, max_concurrency=count)
        return ObjectWriter(where, file, self.uplink.begin(), nbytes, (check, done))

    def remove(self, names: Collection[str]) -> None:
        """Remove objects, of which some may be gone."""
        with explained(self.url):
            try:
                self.patient.delete(list(names))
            except FileNotFoundError:  # of all but S3: one is gone, also where a request was sent twice
                for name in names:
                    with suppress(FileNotFoundError):
                        self.patient.delete(name)


class ObjectWriter:
    """One object, written sequentially in parts; it exists once it is finished."""

    def __init__(
        self, where: str, file: WritableFile, sent: Sent, nbytes: int, calls: tuple[Callable[[], None], ...]
    ) -> None:
        self._where, self._file, self._sent, self._nbytes = where, file, sent, nbytes
        self._check, self._done = calls
        self._position = 0
        self.is_open = True

    @property
    def is_aligned(self) -> bool:
        return False

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`, the end of the previous piece.

        Memory may be used for other bytes afterwards, unless it is read-only: then it is sent without a copy.
        """
        assert position == self._position, f"{self._where}: {position} after {self._position}"
        piece = buffer[begin:end]
        with explained(self._where), self._sent.sending(len(piece)):
            self._file.write(piece if piece.readonly else bytes(piece))
        self._position += len(piece)

    def write_all(self, blocks: Iterable[memoryview | bytes]) -> None:
        """Write the whole object from these blocks, and complete it; if that fails, the upload is abandoned."""
        try:
            for block in blocks:
                self.write(memoryview(block), 0, len(block), self._position)
            self.finish()
        finally:
            self.close()

    def finish(self) -> None:
        """Complete the upload, so that the object exists; if this fails, obstore abandons it."""
        assert self._position == self._nbytes, f"{self._where}: {self._position} of {self._nbytes} bytes"
        self._check()
        self.is_open = False
        with explained(self._where), self._sent.finishing():
            self._file.close()
        self._done()

    def close(self) -> None:
        """Abandon the upload, and remove its parts, unless it is finished; may be called twice."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            with explained(self._where):
                self._file.__exit__(KeyboardInterrupt, None, None)  # leaving its block with an error aborts the upload
        except InputError as error:
            problem = "an unfinished upload, which takes space and is not listed, may be left"
            logger.warning("%s: %s: %s", self._where, problem, error.problem)


def open_client(url: str, retries: Retries | None = None) -> ObstoreClient:
    """Open a prefix of a bucket, without sending a request.

    A request that reads a range is ended after `retries.request_s`: the caller resumes it, or gives up.
    """
    scheme, bucket, prefix = split_url(url)
    if scheme not in OBJECT_SCHEMES:
        # Of http, obstore follows every redirect, to addresses of this network too, and lists only WebDAV.
        problem = f"expected one of {', '.join(OBJECT_SCHEMES)}, found {scheme}"
        hint = "copy the files to a folder or a bucket first; the hub is hf://org/name"
        raise StoreError(f"{scheme}://…", problem, hint, code="store.unsupported-scheme")
    try:
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        hint = "pip install 'reshard[objects]'"
        raise StoreError(url, "object stores are read with obstore", hint, code="store.missing-package") from error
    if scheme == "file":
        if not Path(place_of(url)).is_dir():
            raise StoreError(url, "there is no such folder", code="store.no-such-file")
        with explained(url):
            folder = LocalStore(place_of(url), automatic_cleanup=True)
        return ObstoreClient(url=url.rstrip("/"), quick=folder, reading=folder, patient=folder, uplink=Uplink())
    if "@" in bucket and not scheme.startswith("abfs"):
        problem, hint = "credentials do not belong in an address", "set them in the environment"
        raise StoreError(f"{scheme}://…", problem, hint, code="store.credentials-in-address")
    wrong = problem_with_path(prefix) if prefix else None
    if wrong or not bucket:
        hint = f"expected {scheme}://BUCKET/PREFIX"
        raise StoreError(url, wrong or "names no bucket", hint, code="store.malformed-address")
    address = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    options: dict[str, Any] = _profile_credentials(url) if scheme.startswith("s3") else {}
    # obstore percent-decodes addresses; ours are literal, as in the clouds' own commands.
    quoted = f"{scheme}://{bucket}/{quote(prefix)}"
    with explained(address):
        quick, reading, patient = (
            from_url(quoted, retry_config=config, client_options=_limits(scheme, limits), **options)
            for config, limits in (
                (_QUICK, None),
                (_READING, _reading_limits(retries or Retries())),
                (_PATIENT, _PATIENT_LIMITS),
            )
        )
    return ObstoreClient(url=address, quick=quick, reading=reading, patient=patient, uplink=Uplink())


# Exponential backoff with jitter, for minutes: a store may ask to slow down.
_BACKOFF: BackoffConfig = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=30), "base": 2}
_QUICK: RetryConfig = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_READING: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}
_PATIENT: RetryConfig = {
    "max_retries": 1000,
    "retry_timeout": timedelta(seconds=LONGEST_PART_S + 300),  # it counts from the start of a request
    "backoff": _BACKOFF,
}
# The progress of an upload is not known: a whole part is timed.
_PATIENT_LIMITS: ClientConfig = {"timeout": timedelta(seconds=LONGEST_PART_S)}
# Environment settings that obstore ignores once it is passed options.
_CLIENT_SETTINGS = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "randomize_addresses",
    "read_timeout", "timeout", "user_agent",
)  # fmt: skip


def _reading_limits(retries: Retries) -> ClientConfig:
    """Return the timeouts of reading.

    `stores.net.retries` sees a response only once a chunk of it is complete, and every byte resets `read_timeout`: at a
    byte per second, neither would ever end it.
    """
    return {"timeout": timedelta(seconds=retries.request_s), "read_timeout": timedelta(seconds=30)}


def _limits(scheme: str, limits: ClientConfig | None) -> Any:
    """Return a client's timeouts, overridden by the environment."""
    settings = {key: os.environ.get(cloud_of(scheme).prefix + key.upper()) for key in _CLIENT_SETTINGS}
    if scheme == "gs" and os.environ.get("GOOGLE_BASE_URL", "").startswith("http://"):
        settings["allow_http"] = "true"  # as obstore does
    return {**(limits or {}), **{key: value for key, value in settings.items() if value is not None}}


def _entry(name: str, nbytes: int, etag: str | None) -> ObjectEntry:
    """Return an entry; some listings have ETags without quotes."""
    return ObjectEntry(name=name, nbytes=nbytes, etag=etag.strip('"') if etag else None)


def _profile_credentials(url: str) -> dict[str, object]:
    """Return the credentials of an AWS profile, if any, which obstore cannot read."""
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    has_profile = "AWS_PROFILE" in os.environ or any(Path(path).expanduser().is_file() for path in (shared, config))
    if not has_profile or not _OWN_CREDENTIALS.isdisjoint(os.environ):
        return {}
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # the files contain no credentials
        return {}
    except BotoCoreError as error:
        raise StoreError(url, f"AWS profile: {error}", code="store.invalid-profile") from error


def open_writable(url: str) -> ObstoreClient:
    """Open a prefix for writing; no request is sent yet, and the folder of `file://` is made."""
    if url.startswith(SCHEME):
        hint = f"give a folder as {Parameter('out')}, then hf upload REPO FOLDER"
        raise OutputError(url, "writing to the hub is not supported", hint, code="output.unwritable")
    if split_url(url)[0] == "file":
        with system_errors(url, "cannot be written", code="output.unwritable"):
            Path(place_of(url)).mkdir(parents=True, exist_ok=True)
    return open_client(url)


def remove_objects(client: ObstoreClient, names: Collection[str]) -> None:
    """Remove objects, those first that make an output one; the lock and the record beside it last, in one request."""
    order = dict.fromkeys((MANIFEST_NAME, "config.json", ".metadata"), 0) | {PROGRESS_NAME: 2, LOCK_NAME: 2}
    for turn in range(3):
        if batch := [name for name in names if order.get(name, 1) == turn]:
            client.remove(batch)
