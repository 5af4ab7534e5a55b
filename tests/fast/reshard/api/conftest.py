"""Errors as Python callers read them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def flags_in_errors() -> None:
    """Leave the names of parameters in errors."""
