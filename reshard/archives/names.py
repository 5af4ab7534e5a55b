"""The files of a DCP folder, by name: whether a folder is one is known without what reads it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["DATA_SUFFIX", "METADATA_NAME", "is_dcp"]

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"


def is_dcp(names: Sequence[str]) -> bool:
    """Return whether a folder with these files is a DCP folder whose tensors are in `.distcp` files."""
    return METADATA_NAME in names and any(name.endswith(DATA_SUFFIX) for name in names)
