"""Addresses as users write them: parsing those of the hub, and normalizing all of them for comparison."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from manifests.errors import Parameter, StoreError, UsageError

SCHEME = "hf://"
OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")  # of buckets, and of folders
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REPO = re.compile(rf"(?:{_PART}/)?{_PART}")  # a few old repositories, such as gpt2, have no organization
_QUERY = re.compile(r"\?\S*?(?='?(?:\s|$))")
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAddress:
    """A repository at a branch, tag or commit (None: the main branch)."""

    repo: str
    revision: str | None = None
    is_bare: bool = False  # written without hf://, so it may be a mistyped local path

    def __str__(self) -> str:
        return SCHEME + self.repo + (f"@{self.revision}" if self.revision else "")


def is_url(address: str | Path) -> TypeGuard[str]:
    """Return whether this is a URL, `scheme://…`, and not a local path."""
    return isinstance(address, str) and "://" in address


def output_address(out: object) -> str | Path:
    """Return an output as a URL or a local path."""
    path = os.fspath(out) if isinstance(out, str | os.PathLike) else None
    if not isinstance(path, str):
        problem = f"expected a path or an address, found {str(out)[:80]}"
        raise UsageError(Parameter("out"), problem, code="options.invalid-value")
    return path if is_url(path) else Path(path)


def check_local(where: str | Parameter, path: str | Path) -> None:
    """Refuse an address where a folder of this machine is written, which would get its name."""
    if is_url(path):
        hint = "name a folder; reshard pack FOLDER --out ADDRESS copies a checkpoint from there"
        raise UsageError(where, f"expected a folder of this machine, found {path}", hint, code="options.invalid-value")


def split_url(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and prefix, the prefix without leading or trailing slashes."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    return scheme.lower(), bucket, prefix.strip("/")


def without_queries(message: str) -> str:
    """Remove the query strings of URLs, which may contain a signature."""
    return _QUERY.sub("", message)


def place_of(address: str | Path) -> str:
    """Return a normalized address of a folder, for comparison only.

    Local paths, `file://` included, have links and `..` resolved. Optional parts that distinguish places (a revision,
    an account, a user) are dropped: such places compare as equal.
    """
    if not is_url(address):
        return _real(str(address))
    if address.startswith(SCHEME):
        return address.partition("@")[0]
    scheme, _, rest = address.partition("://")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if scheme == "file":
        return _real(os.path.expanduser(rest))
    _, bucket, prefix = split_url(f"{scheme}://{rest.lstrip('/')}")
    bucket = bucket.partition("@")[0] if scheme == "az" else bucket.rpartition("@")[2]
    return f"{scheme}://{bucket}{posixpath.normpath(f'/{prefix}')}".rstrip("/")


def hub_output(out: str | Path) -> HubAddress | None:
    """Return the repository that an output is written to, if it is `hf://org/name[@branch]`."""
    return parse_hub_address(out) if isinstance(out, str) and out.startswith(SCHEME) else None


def _real(path: str) -> str:
    # Path.resolve raises for circular links.
    return path if "\0" in path else os.path.realpath(path)


def is_inside(place: str, folder: str) -> bool:
    """Return whether a place is below another one, both as returned by `place_of`."""
    return place != folder and place.startswith(f"{folder.rstrip('/')}/")


def parse_hub_address(text: str) -> HubAddress | None:
    """Parse `hf://org/name` or `org/name`, optionally with `@revision`; None for anything else.

    A relative path of two parts parses as a bare address too: call this only if no such path exists.
    """
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    is_bare = not text.startswith(SCHEME)
    fits = _REPO.fullmatch(repo) is not None and bool(at) == bool(revision) and revision.isprintable()
    if is_bare and not (fits and "/" in repo):
        return None
    if not fits:
        problem, hint = "expected hf://org/name or hf://org/name@revision", "only model repositories are supported"
        raise StoreError(text, problem, hint, code="store.malformed-address")
    return HubAddress(repo=repo, revision=revision or None, is_bare=is_bare)
