"""What targets share: a folder in memory for the files that they read, and what a refusal must say."""

from __future__ import annotations

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from manifests.errors import UserError

_MEMORY = Path("/dev/shm")


@cache
def scratch(name: str) -> Path:
    """Return a folder of this process's own, removed when it ends."""
    folder = Path(mkdtemp(prefix=f"fuzz-{name}-", dir=_MEMORY if _MEMORY.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_refusal(error: UserError, *places: Path | str) -> None:
    """Raise AssertionError unless an error has a code, and names one of these places."""
    assert error.where.startswith(tuple(map(str, places))), error
    assert error.code, error
