"""Short `repr`s of objects with large fields, for interactive use and for logs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

_MOST_LENGTH = 60  # of a field's value that is shown whole
_MOST_OF_RECORD = 200


def brief(record: Any) -> str:
    """Return a dataclass's `repr` in which long collections are counted, and large objects named by their class."""
    shown = (f"{field.name}={_brief(getattr(record, field.name))}" for field in fields(record) if field.repr)
    return f"{type(record).__name__}({', '.join(shown)})"


def _brief(value: object) -> str:
    text = repr(value)
    if len(text) <= (_MOST_OF_RECORD if is_dataclass(value) else _MOST_LENGTH):
        return text
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"<{len(value)} items>"
    return f"{text[:_MOST_LENGTH]}…" if isinstance(value, str) else f"{type(value).__name__}(…)"
