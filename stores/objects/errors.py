"""Errors of object stores, as errors of ours with hints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manifests.errors import InputError, SourceError, StoreError, UnreachableError
from stores.address import without_queries
from stores.base import SOURCE_CHANGED

# The text of obstore's errors: operation, status line of the server, response body, then a debug dump.
_DUMP = "\n\nDebug source"
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"(?:<Code>\s*|\(code: )([\w.]+)")
_MESSAGE = re.compile(r"<Message>\s*([^<]+?)\s*</Message>")
_ENDPOINT = re.compile(r"Error performing \S+ (\w+://[^/\s?]+)")
# Paths of credentials on the clouds' metadata servers, which are asked last, after the environment.
_METADATA_PATHS = ("/latest/api/token", "/latest/meta-data", "/computeMetadata/", "/metadata/identity")
_ANSWERS_FOR_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_ANSWERS_FOR_ANOTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect")
_ANSWERS_FOR_BUSY = ("SlowDown", "ServerBusy", "RequestLimitExceeded", "TooManyRequests")
_EXPECTED_REGION = re.compile(r"expecting '([\w-]+)'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cloud:
    """The environment variables by which obstore reaches a cloud, most of which have its `prefix`."""

    prefix: str
    credentials: str
    endpoint: str
    region: str = ""


_S3 = Cloud(
    prefix="AWS_",
    credentials="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with boto3 installed",
    endpoint="AWS_ENDPOINT_URL",
    region="AWS_REGION",
)
_GOOGLE = Cloud(prefix="GOOGLE_", credentials="GOOGLE_APPLICATION_CREDENTIALS", endpoint="GOOGLE_BASE_URL")
_AZURE = Cloud(
    prefix="AZURE_",
    credentials="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    endpoint="AZURE_STORAGE_ENDPOINT",
)
_CLOUDS = {"gs": _GOOGLE, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}


def cloud_of(scheme: str) -> Cloud:
    return _CLOUDS.get(scheme, _S3)


def changed(where: str) -> SourceError:
    problem, hint = "was changed after it was listed", "start again, so that all is read as it is now"
    return SourceError(where, problem, hint, code=SOURCE_CHANGED)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Convert errors of obstore in this block to errors about `where`, an address."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise explanation(where, error) from error


def explanation(where: str, error: Exception) -> InputError:
    """Convert an error of obstore. Query strings, which may contain a signature, are removed."""
    from obstore.exceptions import InvalidPathError, PermissionDeniedError, PreconditionError, UnauthenticatedError

    text = str(error).partition(_DUMP)[0].strip()
    status, code = _first(_STATUS, text), _first(_CODE, text)
    cloud = cloud_of(where.partition("://")[0])
    if any(path in text for path in _METADATA_PATHS):
        hint = f"set {cloud.credentials}; for a public bucket, {cloud.prefix}SKIP_SIGNATURE=true"
        return StoreError(where, "no credentials were found", hint, code="store.no-credentials")
    if code in _ANSWERS_FOR_NO_BUCKET:
        hint = f"check its name, and {cloud.endpoint}"
        return StoreError(where, "there is no such bucket", hint, code="store.no-such-bucket")
    if isinstance(error, FileNotFoundError):
        return StoreError(where, "there is no such object", code="store.no-such-file")
    if isinstance(error, PreconditionError):
        return changed(where)
    if isinstance(error, InvalidPathError):
        problem = "contains an object whose name cannot be a file's path"
        return StoreError(where, problem, text.partition(": ")[2], code="store.invalid-name")
    is_denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in ("401", "403")
    if is_denied or code == "AccessDenied":
        return StoreError(
            where,
            f"access is denied ({code or status})",
            "check the credentials and what they allow",
            code="store.denied",
        )
    endpoint = _first(_ENDPOINT, text)
    if "builder error" in text:
        hint = f"set {cloud.prefix}ALLOW_HTTP=true to send everything unencrypted"
        return StoreError(where, f"{endpoint} is not an https address", hint, code="store.not-https")
    if cloud.region and ("redirect" in text or code in _ANSWERS_FOR_ANOTHER_REGION):
        region = _first(_EXPECTED_REGION, text)
        hint = f"set {cloud.region}={region}" if region else f"set {cloud.region} to the bucket's"
        return StoreError(where, "the bucket is in another region", hint, code="store.other-region")
    if "non-partial response" in text:
        problem = "the store sends the whole object where a range is asked for"
        return StoreError(where, problem, code="store.wrong-answer")
    if status is None and "HTTP error: " in text:
        problem = f"no answer from {endpoint}" if endpoint else "the connection broke"
        why = without_queries(text.partition("HTTP error: ")[2])
        hint = f"check the network, and {cloud.endpoint}"
        if "TimedOut" in str(error):
            hint += f"; over a slow line, set {cloud.prefix}TIMEOUT=5min"
        return UnreachableError(where, f"{problem}: {why}", hint, code="store.unreachable")
    if status is not None:
        is_busy = status in ("429", "503") or code in _ANSWERS_FOR_BUSY
        kind = UnreachableError if is_busy or (status.startswith("5") and status != "501") else InputError
        answer = ": ".join(part for part in (code, _first(_MESSAGE, text)) if part)
        hint = "AWS_CONDITIONAL_PUT=disabled does without conditional writes" if status == "501" else ""
        if is_busy:
            hint = "the store asks for fewer requests: try again later, or with less at the same time"
        kind_of = "store.busy" if is_busy else "store.refused" if kind is InputError else "store.unreachable"
        return kind(where, f"the store answers {status}" + (f" ({answer})" if answer else ""), hint, code=kind_of)
    return StoreError(where, without_queries(text.partition("\n")[0]), code="store.refused")


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
