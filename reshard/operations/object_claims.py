"""Who is at a part of a pack in a bucket: claims, objects that their owners write again while they work.

Each attempt at a part has a claim with its number, which only one process can create. Machines' clocks differ, so a
process measures on its own for how long it has seen a claim unchanged.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manifests.errors import InputError, UnreachableError
from reshard.operations.part_claims import RENEWED_S, renewing
from reshard.plans.partition import Part
from stores.writable import WritableClient

__all__ = ["ObjectClaims"]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A part's last claim as it is seen since some time, and whether it was another one or renewed before."""

    number: int
    content: bytes
    since_s: float
    has_changed: bool


class ObjectClaims:
    """The claims in a folder of a prefix. A claim that was not renewed for `lost_after_s` is lost."""

    def __init__(self, client: WritableClient, quick: WritableClient, folder: str, lost_after_s: float) -> None:
        self._client, self._quick = client, quick  # a renewal is better tried again than late
        self._folder, self._lost_after_s = folder, lost_after_s
        self.every_s = min(RENEWED_S, lost_after_s / 3)
        self._seen: dict[int, _Seen] = {}  # by the part's number

    def first(self, part: Part, names: Collection[str]) -> int:
        """Return the number of a part's last claim among these names, or create the first one."""
        last = self._last(part, names)
        if not last:
            self._client.create(self._name(part, 1), uuid.uuid4().bytes)
        return last or 1

    def next(self, part: Part, names: Collection[str]) -> int | None:
        """Create the next claim if the last one among these names is lost; None if it is not, or is so no longer."""
        seen = self._look(part, names)
        if time.monotonic() - seen.since_s <= self._lost_after_s:
            return None
        number = seen.number + 1
        return number if self._client.create(self._name(part, number), uuid.uuid4().bytes) else None

    def is_renewed(self, part: Part) -> bool:
        """Whether a part's last claim has changed since this process first looked at it."""
        seen = self._seen.get(part.number)
        return seen is not None and seen.has_changed

    @contextmanager
    def renewed(self, part: Part, number: int) -> Iterator[None]:
        """Renew a claim until the block ends, or another process has removed it."""
        name = self._name(part, number)

        def renew() -> None:
            self._quick.load(name)  # raises if a commit has removed it
            self._quick.put(name, uuid.uuid4().bytes)

        with renewing(renew, self.every_s):
            yield

    def _look(self, part: Part, names: Collection[str]) -> _Seen:
        number, content = self._last(part, names), b""
        if number:
            try:
                content = self._client.load(self._name(part, number))
            except UnreachableError:
                raise
            except InputError:  # it was committed meanwhile
                number = 0
        seen = self._seen.get(part.number)
        if seen is None or (seen.number, seen.content) != (number, content):
            seen = self._seen[part.number] = _Seen(number, content, time.monotonic(), seen is not None)
        return seen

    def _last(self, part: Part, names: Collection[str]) -> int:
        start = self._name(part, "")
        return max((int(name.removeprefix(start)) for name in names if name.startswith(start)), default=0)

    def _name(self, part: Part, number: object) -> str:
        return f"{self._folder}/{part.name}.claim-{number}"
