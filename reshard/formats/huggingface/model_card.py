"""The section of a model card (README.md) that `reshard push` writes: added, replaced, and taken out again exactly.

# Note [A card's own text]
README.md is the source's, and people edit it on the hub. So the section is between markers, and taking it out gives the
own text back, byte for byte; readers of a packed folder do so, and compare no digest of this one file.
"""

from __future__ import annotations

import re

_BEGIN, _END = "<!-- reshard: begin -->", "<!-- reshard: end -->"
_BEGIN_FIELDS, _END_FIELDS = "# reshard: begin", "# reshard: end"  # comments of YAML
_BEGIN_ALL = "# reshard: begin, the lines around included"
_SECTION = re.compile(rf"\n{_BEGIN}\n.*?\n{_END}\n".encode(), re.DOTALL)
_FIELDS = re.compile(rf"{_BEGIN_FIELDS}\n.*?\n{_END_FIELDS}\n".encode(), re.DOTALL)
_FRONT_MATTER = re.compile(rf"\A---\n{_BEGIN_ALL}\n.*?\n{_END_FIELDS}\n---\n".encode(), re.DOTALL)
_OWN_FRONT_MATTER = re.compile(rb"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)


def has_section(card: bytes) -> bool:
    return _SECTION.search(card) is not None


def without_section(card: bytes) -> bytes:
    """Return a card's own text."""
    return _SECTION.sub(b"", _FIELDS.sub(b"", _FRONT_MATTER.sub(b"", card, count=1), count=1))


def with_section(own: bytes, section: str, base_model: str | None) -> bytes:
    """Add a section to a card's own text, and `base_model` to its front matter unless it has one."""
    text = own + f"\n{_BEGIN}\n{section}\n{_END}\n".encode()
    if base_model is None:
        return text
    found = _OWN_FRONT_MATTER.match(own)
    fields = f"---\n{_BEGIN_FIELDS if found else _BEGIN_ALL}\nbase_model: {base_model}\n{_END_FIELDS}\n".encode()
    if found is None:
        return fields + b"---\n" + text
    return text if re.search(rb"^base_model:", found[1], re.MULTILINE) else fields + text[len(b"---\n") :]
