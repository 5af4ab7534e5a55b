"""The file in which Megatron-LM says which of the iterations beside it to load."""

from __future__ import annotations

import re

from manifests.errors import SourceError
from reshard.archives.names import METADATA_NAME
from stores.base import Folder, read_range
from stores.open import open_below

TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # in place of a number: weights that were converted


def find_iteration(address: str, folder: Folder) -> Folder:
    """Return the folder of the iteration to load if this is where Megatron-LM keeps them; else the folder itself.

    Raises:
        SourceError: the file that says the iteration says none.
        InputError: it cannot be read.
    """
    names = folder.names()
    if TRACKER_NAME not in names or METADATA_NAME in names:
        return folder
    file = folder.file(TRACKER_NAME)
    text = read_range(file, 0, min(file.nbytes, 100)).decode(errors="replace").strip()
    if text != RELEASE and not re.fullmatch(r"[0-9]{1,12}", text):
        problem = f"expected a number or {RELEASE!r}, found {text!r}"
        raise SourceError(str(file), problem, "name the folder of the iteration", code="source.bad-tracker")
    return open_below(address, folder, RELEASE if text == RELEASE else f"iter_{int(text):07d}")
