"""Calls of huggingface_hub, and their failures as errors of ours."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token, hf_raise_for_status
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http

from manifests.errors import InputError, StoreError
from stores.address import HubAddress
from stores.net.retries import PassingError, answered_within

# huggingface_hub 1.x uses httpx and 2.x httpx2; in both, this is the client's base error.
ClientError: type[BaseException] = HfHubHTTPError.__bases__[0]
_InvalidURL: type[BaseException] = getattr(sys.modules[ClientError.__module__], "InvalidURL", ValueError)  # not one

_REFUSAL_NBYTES = 64 << 10  # read of the body of a refusal
_REFUSAL_CHARS = 1000  # shown of what the hub says
_WINDOW_IS_USED_UP = re.compile(r";\s*r=0\s*;\s*t=(\d+)")  # RateLimit: "resolvers";r=0;t=172
AGENT = "reshard"
LOG_IN = "hf auth login, or set HF_TOKEN"

Answer = TypeVar("Answer")


def asking(address: HubAddress, call: Callable[[], Answer], within_s: float | None = None) -> Answer:
    """Call huggingface_hub and return the result, with a timeout of `within_s` if set."""
    try:
        return call() if within_s is None else answered_within(within_s, constants.ENDPOINT, call)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if is_passing(status):
            raise busy(constants.ENDPOINT, status, error.response.headers) from error
        raise _refusal(address, error) from error
    except ClientError as error:
        raise unreachable(constants.ENDPOINT, error) from error
    except HFValidationError as error:
        problem = "invalid repository name"
        raise StoreError(str(address), problem, str(error), code="store.malformed-address") from error
    except (AttributeError, FileMetadataError, KeyError, TypeError, ValueError, _InvalidURL, RecursionError) as error:
        problem = f"unexpected response from {constants.ENDPOINT}: {type(error).__name__}"
        hint = "check HF_ENDPOINT; a login page may be answering"
        raise StoreError(str(address), problem, hint, code="store.not-a-hub") from error


def check_refusal(address: HubAddress, response: Any, limit_s: float) -> None:
    """Raise the error of a response whose body is unread, and of which only the beginning is read, in `limit_s`."""
    pieces: list[bytes] = []

    def read() -> None:
        nbytes = 0
        for piece in response.iter_raw():
            pieces.append(piece)
            nbytes += len(piece)
            if nbytes >= _REFUSAL_NBYTES:
                return

    with suppress(PassingError, ClientError):  # the head says enough
        answered_within(limit_s, constants.ENDPOINT, read)
    headers = response.headers.copy()
    headers.pop("content-encoding", None)  # not asked for, and a few bytes may become many
    body = b"".join(pieces)[:_REFUSAL_NBYTES]
    begun = type(response)(response.status_code, headers=headers, content=body, request=response.request)
    asking(address, lambda: hf_raise_for_status(begun))


def check_endpoint() -> None:
    """Refuse an endpoint that is not a URL, such as that of `HF_ENDPOINT=""`."""
    try:
        parts = urlsplit(constants.ENDPOINT)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        is_url = False
    if not is_url:
        problem = f"expected https://HOST, found {constants.ENDPOINT!r}"
        raise InputError("HF_ENDPOINT", problem, "unset it to use huggingface.co", code="options.hf-endpoint")


def configured_token() -> str | None:
    """Return the token that huggingface_hub sends: HF_TOKEN, or that of `hf auth login`."""
    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def headers_of_requests(url: str) -> dict[str, str]:
    """Return what is sent with each request to `url`: the token only if it is the hub's endpoint.

    huggingface_hub would first ask the hub for a list of agents, to name one in the User-Agent.
    """
    headers = {"User-Agent": AGENT}
    if is_endpoint(url) and (token := configured_token()):
        headers["Authorization"] = f"Bearer {token}"
    return headers


def has_default_client() -> bool:
    """Return whether huggingface_hub has no client of the user's, who may have set proxies or certificates in it."""
    chosen = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
    return chosen is not None and chosen is getattr(_http, "default_client_factory", None)


def is_endpoint(url: str) -> bool:
    return urlsplit(url)[:2] == urlsplit(constants.ENDPOINT)[:2]


def check_token() -> None:
    """Refuse a token that cannot be sent in a header, which the client's error would print."""
    token = configured_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        problem = "the token has characters that no token has"
        raise StoreError("HF_TOKEN", problem, f"{LOG_IN} to a valid one", code="store.invalid-token")


def is_passing(status: int) -> bool:
    return status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500


def busy(server: str, status: int, headers: Mapping[str, str]) -> PassingError:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        hint = "try again later" + ("" if configured_token() else f"; limits are higher with a token: {LOG_IN}")
        problem = f"{server} limits the rate of requests (429)"
        return PassingError(problem, hint, asked_wait_s(headers), code="store.busy")
    code = "store.busy" if status == HTTPStatus.SERVICE_UNAVAILABLE else "store.unreachable"
    return PassingError(f"{server} answers {status}", "try again later", asked_wait_s(headers), code=code)


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the wait in seconds that a server requests, by `Retry-After` or the hub's `RateLimit`."""
    retry_after = headers.get("retry-after", "").strip()
    if retry_after.isdecimal():
        return float(retry_after)
    if retry_after:
        try:
            return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    used_up = _WINDOW_IS_USED_UP.search(headers.get("ratelimit", ""))
    return float(used_up[1]) if used_up else None


def unreachable(server: str, error: BaseException) -> PassingError:
    why = without_token(str(error)) or type(error).__name__
    hint = "check the network, HTTPS_PROXY and HF_ENDPOINT"
    if "CERTIFICATE_VERIFY_FAILED" in why:
        hint = "if an authority of your own signed its certificate, set SSL_CERT_FILE to that authority's PEM file"
    return PassingError(f"{server} cannot be read: {why}", hint)


def offline_error(address: HubAddress, where: str, name: str = "") -> InputError:
    """Return an error about something that is not in the cache while offline."""
    meant = "neither a local folder nor in the hub's local cache" if address.is_bare else "not in the hub's local cache"
    revision = f" --revision {address.revision}" if address.revision else ""
    fetch = f"hf download {address.repo}{' ' * bool(name)}{name}{revision}"
    problem = f"{meant}, and HF_HUB_OFFLINE is set"
    return StoreError(where, problem, f"unset it, or download the missing files: {fetch}", code="store.offline")


def _refusal(address: HubAddress, error: HfHubHTTPError) -> InputError:
    where, page = str(address), f"{constants.ENDPOINT}/{address.repo}"
    has_token = configured_token() is not None
    if isinstance(error, GatedRepoError):
        problem = "gated repository, and " + ("the token has no access" if has_token else "no token was sent")
        hint = f"request access at {page}" + ("" if has_token else f", then {LOG_IN}")
        return StoreError(where, problem, hint, code="store.gated")
    if isinstance(error, RepositoryNotFoundError):
        meant = "neither a local folder nor a repository on the hub" if address.is_bare else "no repository on the hub"
        unless = "the token has no access to it" if has_token else "it is private and no token was sent"
        hint = "check the name for typos" + ("" if has_token else f"; {LOG_IN}")
        return StoreError(where, f"{meant}, or {unless}", hint, code="store.no-such-repository")
    if isinstance(error, RevisionNotFoundError):
        problem, hint = f"revision {address.revision!r} not found", "use a branch, a tag or a full commit hash"
        return StoreError(where, problem, hint, code="store.no-such-revision")
    if isinstance(error, EntryNotFoundError):
        return StoreError(where, "a listed file does not exist", f"see {page}", code="store.no-such-file")
    if isinstance(error, DisabledRepoError):
        return StoreError(where, "the hub disabled this repository", f"see {page}", code="store.disabled-repository")
    status = error.response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        problem, hint = "invalid token (401)", f"{LOG_IN} to a valid one"
        return StoreError(where, problem, hint, code="store.invalid-token")
    message = without_token(error.server_message or "no reason given")[:_REFUSAL_CHARS]
    problem = f"the hub responded with {status}: {message}"
    if status == HTTPStatus.FORBIDDEN:
        hint = f"use a token that may write there, see {constants.ENDPOINT}/settings/tokens"
        return StoreError(where, problem, hint if has_token else LOG_IN, code="store.denied")
    return StoreError(where, problem, code="store.refused")


def without_token(text: str) -> str:
    """Return what a server or client said, without the token that was sent."""
    token = configured_token()
    return text.replace(token, "TOKEN") if token else text
