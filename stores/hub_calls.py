"""Calls of huggingface_hub, and what their failures mean to whoever waits for them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token
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

from manifests.errors import InputError, StoreError
from stores.address import HubAddress
from stores.pace import answered_within
from stores.retries import PassingError

__all__ = [
    "ClientError",
    "asked_wait_s",
    "asking",
    "busy",
    "check_endpoint",
    "configured_token",
    "is_passing",
    "offline_error",
    "unreachable",
]

# huggingface_hub 1.x speaks through httpx and 2.x through httpx2; both derive this from their client's base error.
ClientError: type[BaseException] = HfHubHTTPError.__bases__[0]

_WINDOW_IS_USED_UP = re.compile(r";\s*r=0\s*;\s*t=(\d+)")  # RateLimit: "resolvers";r=0;t=172
_LOG_IN = "hf auth login, or set HF_TOKEN"

Answer = TypeVar("Answer")


def asking(address: HubAddress, call: Callable[[], Answer], within_s: float | None = None) -> Answer:
    """Return what a call of huggingface_hub returns, `within_s` seconds where that is said.

    Raises:
        PassingError: the hub is busy or cannot be reached just now.
        InputError: it refuses, for a reason that the user can fix.
    """
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
        problem = "the hub has no repository of such a name"
        raise StoreError(str(address), problem, str(error), code="store.malformed-address") from error
    except (AttributeError, FileMetadataError, KeyError, TypeError, ValueError) as error:
        problem = f"{constants.ENDPOINT} does not answer as a hub does: {type(error).__name__}"
        hint = "is HF_ENDPOINT right? a login page may be answering"
        raise StoreError(str(address), problem, hint, code="store.not-a-hub") from error


def check_endpoint() -> None:
    """Refuse an endpoint that is not an address, such as that of `HF_ENDPOINT=""`.

    Raises:
        InputError: naming HF_ENDPOINT.
    """
    parts = urlsplit(constants.ENDPOINT)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        problem = f"expected https://HOST, found {constants.ENDPOINT!r}"
        raise InputError("HF_ENDPOINT", problem, "unset it to read from huggingface.co", code="options.hf-endpoint")


def configured_token() -> str | None:
    """Return the token that huggingface_hub would send: HF_TOKEN, or that of `hf auth login`."""
    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def is_passing(status: int) -> bool:
    return status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500


def busy(server: str, status: int, headers: Mapping[str, str]) -> PassingError:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        hint = "try again later" + ("" if configured_token() else f"; with a token the limits are higher: {_LOG_IN}")
        problem = f"{server} limits the number of requests (429)"
        return PassingError(problem, hint, asked_wait_s(headers), code="store.busy")
    code = "store.busy" if status == HTTPStatus.SERVICE_UNAVAILABLE else "store.unreachable"
    return PassingError(f"{server} answers {status}", "try again later", asked_wait_s(headers), code=code)


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait, in `Retry-After` or the hub's `RateLimit`."""
    asked = headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return float(asked)
    if asked:
        try:
            return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    used_up = _WINDOW_IS_USED_UP.search(headers.get("ratelimit", ""))
    return float(used_up[1]) if used_up else None


def unreachable(server: str, error: BaseException) -> PassingError:
    """Return an error about a connection that failed or broke."""
    why = str(error) or type(error).__name__
    return PassingError(f"{server} cannot be read: {why}", "check the network, HTTPS_PROXY and HF_ENDPOINT")


def offline_error(address: HubAddress, where: str, name: str = "") -> InputError:
    """Return an error about something that is missing while only the cache may be read."""
    meant = "neither a folder here nor in the hub's local cache" if address.is_bare else "not in the hub's local cache"
    revision = f" --revision {address.revision}" if address.revision else ""
    fetch = f"hf download {address.repo}{' ' * bool(name)}{name}{revision}"
    problem = f"{meant}, and HF_HUB_OFFLINE is set"
    return StoreError(where, problem, f"unset it, or fetch what is missing: {fetch}", code="store.offline")


def _refusal(address: HubAddress, error: HfHubHTTPError) -> InputError:
    where, page = str(address), f"{constants.ENDPOINT}/{address.repo}"
    has_token = configured_token() is not None
    if isinstance(error, GatedRepoError):
        problem = "access is gated, and " + ("this token has not been granted it" if has_token else "no token was sent")
        hint = f"ask for access at {page}" + ("" if has_token else f", then {_LOG_IN}")
        return StoreError(where, problem, hint, code="store.gated")
    if isinstance(error, RepositoryNotFoundError):
        meant = "neither a folder here nor a repository on the hub" if address.is_bare else "no repository on the hub"
        unless = "this token may not read it" if has_token else "it is private: no token was sent"
        hint = "check the name" + ("" if has_token else f"; {_LOG_IN}")
        return StoreError(where, f"{meant}, or {unless}", hint, code="store.no-such-repository")
    if isinstance(error, RevisionNotFoundError):
        problem, hint = f"has no revision {address.revision!r}", "name a branch, a tag or a whole commit hash"
        return StoreError(where, problem, hint, code="store.no-such-revision")
    if isinstance(error, EntryNotFoundError):
        return StoreError(where, "a file that it lists is not there", f"look at {page}", code="store.no-such-file")
    if isinstance(error, DisabledRepoError):
        return StoreError(where, "was disabled by the hub", f"look at {page}", code="store.disabled-repository")
    status = error.response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        problem, hint = "the hub does not know this token (401)", f"{_LOG_IN} to one that is valid"
        return StoreError(where, problem, hint, code="store.invalid-token")
    problem = f"the hub answers {status}: {error.server_message or 'no reason given'}"
    return StoreError(where, problem, code="store.refused")
