"""Calls of huggingface_hub, and what their failures mean to whoever waits for them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TypeVar

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

from manifests.errors import InputError
from stores.address import HubAddress
from stores.retries import PassingError

__all__ = [
    "ClientError",
    "asked_wait_s",
    "asking",
    "busy",
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


def asking(address: HubAddress, call: Callable[[], Answer]) -> Answer:
    """Give what a call of huggingface_hub gives.

    Raises:
        PassingError: the hub is busy or cannot be reached just now.
        InputError: it refuses, for a reason that the user can mend.
    """
    try:
        return call()
    except HfHubHTTPError as error:
        status = error.response.status_code
        if is_passing(status):
            raise busy(constants.ENDPOINT, status, error.response.headers) from error
        raise _refusal(address, error) from error
    except ClientError as error:
        raise unreachable(constants.ENDPOINT, error) from error
    except HFValidationError as error:
        raise InputError(str(address), "the hub has no repository of such a name", str(error)) from error
    except (AttributeError, FileMetadataError, KeyError, TypeError, ValueError) as error:
        problem = f"{constants.ENDPOINT} does not answer as a hub does: {type(error).__name__}"
        raise InputError(str(address), problem, "is HF_ENDPOINT right? a login page may be answering") from error


def configured_token() -> str | None:
    """Give the token that huggingface_hub would send: of HF_TOKEN, or of whoever logged in."""
    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def is_passing(status: int) -> bool:
    return status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500


def busy(server: str, status: int, headers: Mapping[str, str]) -> PassingError:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        hint = "try again later" + ("" if configured_token() else f"; with a token the limits are higher: {_LOG_IN}")
        return PassingError(f"{server} limits the number of requests (429)", hint, asked_wait_s(headers))
    return PassingError(f"{server} answers {status}", "try again later", asked_wait_s(headers))


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Give the seconds that a server asks to wait, in `Retry-After` or the hub's `RateLimit`."""
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
    """Say that a connection failed or broke."""
    why = str(error) or type(error).__name__
    return PassingError(f"{server} cannot be read: {why}", "check the network, HTTPS_PROXY and HF_ENDPOINT")


def offline_error(address: HubAddress, where: str, name: str = "") -> InputError:
    """Say that something is missing while only the cache may be read."""
    meant = "neither a folder here nor in the hub's local cache" if address.is_bare else "not in the hub's local cache"
    revision = f" --revision {address.revision}" if address.revision else ""
    fetch = f"hf download {address.repo}{' ' * bool(name)}{name}{revision}"
    return InputError(where, f"{meant}, and HF_HUB_OFFLINE is set", f"unset it, or fetch what is missing: {fetch}")


def _refusal(address: HubAddress, error: HfHubHTTPError) -> InputError:
    where, page = str(address), f"{constants.ENDPOINT}/{address.repo}"
    has_token = configured_token() is not None
    if isinstance(error, GatedRepoError):
        problem = "access is gated, and " + ("this token has not been granted it" if has_token else "no token was sent")
        return InputError(where, problem, f"ask for access at {page}" + ("" if has_token else f", then {_LOG_IN}"))
    if isinstance(error, RepositoryNotFoundError):
        meant = "neither a folder here nor a repository on the hub" if address.is_bare else "no repository on the hub"
        unless = "this token may not read it" if has_token else "it is private: no token was sent"
        return InputError(where, f"{meant}, or {unless}", "check the name" + ("" if has_token else f"; {_LOG_IN}"))
    if isinstance(error, RevisionNotFoundError):
        return InputError(where, f"has no revision {address.revision!r}", "name a branch, a tag or a whole commit hash")
    if isinstance(error, EntryNotFoundError):
        return InputError(where, "a file that it lists is not there", f"look at {page}")
    if isinstance(error, DisabledRepoError):
        return InputError(where, "was disabled by the hub", f"look at {page}")
    status = error.response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        return InputError(where, "the hub does not know this token (401)", f"{_LOG_IN} to one that is valid")
    return InputError(where, f"the hub answers {status}: {error.server_message or 'no reason given'}")
