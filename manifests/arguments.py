"""Check the values of a function's arguments, which a command's parser has checked already."""

from __future__ import annotations

from collections.abc import Collection

from manifests.errors import Parameter, UsageError


def check_choice(parameter: Parameter, value: object, allowed: Collection[str]) -> None:
    """Raise UsageError unless the value is one of those that are allowed."""
    if value not in allowed:
        problem = f"expected one of {', '.join(allowed)}, found {str(value)[:80]!r}"
        raise UsageError(parameter, problem, code="options.invalid-value")


def check_count(parameter: Parameter, value: object) -> None:
    """Raise UsageError unless the value is a positive integer."""
    if type(value) is not int or value < 1:
        problem = f"expected a number from 1 up, found {str(value)[:80]}"
        raise UsageError(parameter, problem, code="options.invalid-value")
