"""The error that a call raises: its code and place for assertions, its text for snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from manifests.errors import UserError


def refusal(act: Callable[[], object]) -> UserError:
    """Return the error that a call raises."""
    with pytest.raises(UserError) as error:
        act()
    return error.value


def refused(act: Callable[[], object]) -> tuple[str, str]:
    """Return the code and the place of the error that a call raises."""
    error = refusal(act)
    return error.code, error.where
