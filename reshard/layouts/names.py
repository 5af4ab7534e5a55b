"""Module names as users write them: full, short, torchtitan's, as a range or with a wildcard."""

from __future__ import annotations

import re

from reshard.formatting import nearest_word
from reshard.layouts.errors import shorten
from reshard.layouts.inventory import Inventory, positions_by_name
from reshard.layouts.model import compress_modules

_RANGE = re.compile(r"(.*\.)([0-9]{1,6})-([0-9]{1,6})")
# A module without weights, which NeMo AutoModel lists on every stage.
WEIGHTLESS = "rotary_emb"


class NameProblem(ValueError):
    """A name that matches no module; `hint` is the nearest valid one."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


class Names:
    """Finds modules by any of their names."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.positions = positions_by_name(inventory)

    def one(self, name: str) -> int:
        """Return the position of one module.

        Raises:
            NameProblem: no module, or a range or wildcard.
        """
        found = self.positions.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def some(self, entry: str) -> list[int]:
        """Return the positions of a name, a range (`layers.0-7`) or a wildcard (`layers.*`).

        Empty for a module without weights.

        Raises:
            NameProblem: no module, a range that ends before it starts or past the last layer.
        """
        if entry in self.positions:
            return [self.positions[entry]]
        if entry.rpartition(".")[2] == WEIGHTLESS:
            return []
        if "*" in entry:
            return self._matching(entry)
        if found := _RANGE.fullmatch(entry):
            return self._between(entry, found[1], int(found[2]), int(found[3]))
        raise self._unknown(entry)

    def _matching(self, entry: str) -> list[int]:
        head, _, tail = entry.partition("*")
        if "*" in tail:
            raise NameProblem(f"expected one *, found {shorten(entry)!r}", "list several names instead")
        found = {
            position
            for name, position in self.positions.items()
            if name.startswith(head) and name.endswith(tail) and len(name) >= len(entry) - 1
        }
        if not found:
            raise NameProblem(f"{shorten(entry)!r} matches no module", self._known())
        return sorted(found)

    def _between(self, entry: str, prefix: str, first: int, last: int) -> list[int]:
        if first > last:
            raise NameProblem(f"{shorten(entry)!r} ends before it starts", f"write {prefix}{last}-{first}")
        for number in (first, last):
            if f"{prefix}{number}" not in self.positions:
                raise self._unknown(f"{prefix}{number}")
        return [self.positions[f"{prefix}{number}"] for number in range(first, last + 1)]

    def _unknown(self, name: str) -> NameProblem:
        prefix, _, number = name.rpartition(".")
        if number.isdecimal() and f"{prefix}.0" in self.positions:
            hint = f"the last layer is {self.inventory.modules[self.inventory.layers_stop - 1]}"
        else:
            nearest = nearest_word(name, self.positions)
            hint = f"did you mean {nearest}?" if nearest else self._known()
        return NameProblem(f"{shorten(name)!r} is not a module of this model", hint)

    def _known(self) -> str:
        return f"the modules are {compress_modules(self.inventory.modules)}"
