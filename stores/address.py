"""Addresses of repositories on the hub, as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from manifests.errors import InputError

__all__ = ["SCHEME", "HubAddress", "is_url", "parse_hub_address"]

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REPO = re.compile(rf"(?:{_PART}/)?{_PART}")  # a few old repositories, such as gpt2, have no organisation


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAddress:
    """A repository, at a branch, tag or commit (None: its main branch)."""

    repo: str
    revision: str | None = None
    is_bare: bool = False  # written without hf://, so that a folder may have been meant

    def __str__(self) -> str:
        return SCHEME + self.repo + (f"@{self.revision}" if self.revision else "")


def is_url(address: str | Path) -> TypeGuard[str]:
    """Tell what leads off this machine, `scheme://…`, from a path."""
    return isinstance(address, str) and "://" in address


def parse_hub_address(text: str) -> HubAddress | None:
    """Read `hf://org/name`, `org/name`, either with `@revision`; None when it is neither.

    A relative path of two parts reads as a bare address too: ask only when no such path exists.

    Raises:
        InputError: `hf://` with something else behind it.
    """
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    is_bare = not text.startswith(SCHEME)
    fits = _REPO.fullmatch(repo) is not None and bool(at) == bool(revision) and revision.isprintable()
    if is_bare and not (fits and "/" in repo):
        return None
    if not fits:
        raise InputError(text, "expected hf://org/name or hf://org/name@revision", "only model repositories are read")
    return HubAddress(repo=repo, revision=revision or None, is_bare=is_bare)
