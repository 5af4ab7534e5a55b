"""obstore, the client of S3, Google Cloud Storage and Azure, opened from the usual environment.

Credentials and endpoints are obstore's own business: AWS_*, GOOGLE_* and AZURE_* variables, then the cloud's
metadata server; AWS profiles through boto3, where it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from manifests.errors import InputError
from manifests.paths import problem_with_path
from stores.address import split_url
from stores.object_errors import explained

if TYPE_CHECKING:
    from obstore import GetOptions, WritableFile
    from obstore.store import ObjectStore, RetryConfig

__all__ = [
    "MAX_PARTS",
    "NUM_PARTS",
    "SCHEMES",
    "ObjectEntry",
    "ObstoreClient",
    "Upload",
    "open_client",
    "part_nbytes",
]

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")

NUM_PARTS = 4  # of one upload, under way at a time
MAX_PARTS = 10_000  # of one object, in S3 and Google Cloud Storage
_PART_NBYTES = 8 << 20
_MIB = 1 << 20
_CHUNK_NBYTES = 1 << 20  # what leaves obstore at a time: its own buffers stay small
_LIST_COUNT = 1000  # names in one answer
# Any of these tells obstore where its credentials are.
_OWN_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectEntry:
    """An object as it stood when it was looked at. `name` is its path below the folder."""

    name: str
    nbytes: int
    etag: str | None


class Upload(Protocol):
    """An object under construction, given from its first byte to its last."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """Complete it: the object is there, or this raises and has abandoned the upload."""
        ...

    def abandon(self) -> None:
        """Leave nothing of it, as far as the store still lets us."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ObstoreClient:
    """A prefix of a bucket. Opening is impatient, for a mistyped address; reading and writing are patient."""

    url: str
    quick: ObjectStore = field(repr=False)
    patient: ObjectStore = field(repr=False)

    def entries(self) -> Iterator[ObjectEntry]:
        """Give every object below the prefix.

        Raises:
            InputError: the bucket does not exist, cannot be reached or may not be listed.
        """
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
        """Give the bytes of a range as they come in.

        Raises:
            InputError: the object is not what it was when its entry was made, or cannot be read.
        """
        where = f"{self.url}/{entry.name}"
        options: GetOptions = {"range": (begin, end)}
        if entry.etag:
            options["if_match"] = f'"{entry.etag}"'
        with explained(where):
            answer = self.patient.get(entry.name, options=options)
            chunks = iter(answer.stream(min_chunk_size=_CHUNK_NBYTES))
        found = _entry(entry.name, answer.meta["size"], answer.meta["e_tag"])
        if found != entry:  # a server may ignore the condition
            raise InputError(where, "was changed after it was listed", "start again, so that all is read as it is now")
        while True:
            with explained(where):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield memoryview(chunk)

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, in place of one that is there."""
        with explained(f"{self.url}/{name}"):
            self.patient.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object; give whether it is there now, and ours: not, when another one was before."""
        from obstore.exceptions import AlreadyExistsError

        with explained(f"{self.url}/{name}"):
            try:
                self.patient.put(name, data, mode="create")
            except AlreadyExistsError:
                # Ours after all, when it was written, the answer was lost and obstore asked again.
                return bytes(self.patient.get(name).bytes()) == data
            except NotImplementedError:  # AWS_CONDITIONAL_PUT=disabled: it was not there when it was looked for
                self.patient.put(name, data)
        return True

    def upload(self, name: str, nbytes: int) -> Upload:
        """Begin an object of `nbytes`, which takes `NUM_PARTS` + 1 parts of memory."""
        import obstore

        where = f"{self.url}/{name}"
        with explained(where):
            file = obstore.open_writer(self.patient, name, buffer_size=part_nbytes(nbytes), max_concurrency=NUM_PARTS)
        return _MultipartUpload(where, file)

    def remove(self, names: Collection[str]) -> None:
        with explained(self.url):
            self.patient.delete(list(names))


@dataclass(frozen=True, slots=True)
class _MultipartUpload:
    where: str
    file: WritableFile

    def write(self, data: bytes) -> None:
        with explained(self.where):
            self.file.write(data)

    def finish(self) -> None:
        with explained(self.where):
            self.file.close()  # when it fails, obstore has aborted the upload

    def abandon(self) -> None:
        with explained(self.where):
            self.file.__exit__(KeyboardInterrupt, None, None)  # leaving its block by an error aborts


def part_nbytes(nbytes: int) -> int:
    """Give the size of the parts in which an object of `nbytes` is sent."""
    return max(_PART_NBYTES, -(-nbytes // MAX_PARTS // _MIB) * _MIB)


def open_client(url: str) -> ObstoreClient:
    """Open a prefix of a bucket. Nothing is sent yet.

    Raises:
        InputError: obstore is not installed, or the address or a variable of the environment is malformed.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise InputError(url, "object stores are read with obstore", "pip install 'reshard[objects]'") from error
    scheme, bucket, prefix = split_url(url)
    if "@" in bucket and not scheme.startswith("abfs"):
        raise InputError(f"{scheme}://…", "credentials do not belong in an address", "set them in the environment")
    problem = problem_with_path(prefix) if prefix else None
    if problem or not bucket:
        raise InputError(url, problem or "names no bucket", f"expected {scheme}://BUCKET/PREFIX")
    address = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    options: dict[str, Any] = _profile_credentials(url) if scheme.startswith("s3") else {}
    # obstore decodes its addresses; ours are taken as they are written, as by the clouds' own commands.
    quoted = f"{scheme}://{bucket}/{quote(prefix)}"
    with explained(address):
        quick, patient = (from_url(quoted, retry_config=retries, **options) for retries in (_QUICK, _PATIENT))
    return ObstoreClient(url=address, quick=quick, patient=patient)


_QUICK: RetryConfig = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_PATIENT: RetryConfig = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}


def _entry(name: str, nbytes: int, etag: str | None) -> ObjectEntry:
    """Make an entry; some listings give etags without the quotes that answers have."""
    return ObjectEntry(name=name, nbytes=nbytes, etag=etag.strip('"') if etag else None)


def _profile_credentials(url: str) -> dict[str, object]:
    """Give the credentials of an AWS profile, which obstore cannot read by itself, where there is one."""
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
    except ValueError:  # the files hold no credentials
        return {}
    except BotoCoreError as error:
        raise InputError(url, f"AWS profile: {error}") from error
