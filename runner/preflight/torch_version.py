"""The releases of torch that are supported, and whether the installed one was tested. Does not import torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from manifests.errors import InputError

LEAST = (2, 13)
TESTED = ("2.13.0", "2.14.1", "2.15.0")  # see docs/compatibility.md
_INSTALL = "pip install 'reshard[runner]'"


def check_torch(found: str | None = None) -> str:
    """Check the release of torch, the installed one if None, and return a note if it is newer than those tested.

    Raises:
        InputError: torch is not installed, or older than 2.13.
    """
    try:
        found = found or version("torch")
    except PackageNotFoundError as error:
        raise InputError("runner", "torch is not installed here", _INSTALL, code="system.missing-package") from error
    release = _release(found)
    if release < LEAST:
        raise InputError(
            f"torch {found}",
            f"expected {LEAST[0]}.{LEAST[1]} or newer, with the pipeline runtime that the runner uses",
            "pip install 'torch>=2.13,<2.16'",
            code="system.wrong-version",
        )
    if release > max(map(_release, TESTED)):
        return f"torch {found} is newer than the releases that were tested: {', '.join(TESTED)}"
    return ""


def _release(text: str) -> tuple[int, int]:
    """Return major and minor of a version such as 2.15.0a0+git1234."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
