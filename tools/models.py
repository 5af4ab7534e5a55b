"""Write the table of the catalogue's architectures into docs/models.md.

`python tools/models.py` writes it; `--check` exits with 1 where it is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from manifests.models import ARCHITECTURES
from manifests.models.catalogue import CatalogueEntry, catalogued, entry_of, left_out
from manifests.models.trainable import (
    hands_on_trees,
    is_generic,
    refuses_cp,
    why_not_expert_parallel,
    why_not_tensor_parallel,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- written by `make models` -->\n"
END = "<!-- end -->\n"


def main() -> int:
    """Write or check the page; return the exit code."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    page = before + BEGIN + render() + END + rest.partition(END)[2]
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
        return 0
    if page != text:
        print(f"{PAGE.relative_to(ROOT)} is out of date: make models", file=sys.stderr)
    return int(page != text)


def render() -> str:
    """Return the two tables: what the catalogue has, and what it leaves out."""
    lines = [
        "| architecture | plan | pack, export | trains | ties | `--tp` | `--ep` | `--cp` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = sorted({*catalogued(), *ARCHITECTURES} - {"MPTForCausalLM"})  # another name of MptForCausalLM
    for name in names:
        entry = entry_of(name)
        road = "by shape" if name in ARCHITECTURES else "by name"
        tensor, expert = _tensor(name), "" if why_not_expert_parallel(name) else "yes"
        context = "" if not is_generic(name) or refuses_cp(name) or hands_on_trees(name) else "yes"
        plan = "config.json" if name in ARCHITECTURES else "with transformers"
        cells = f"`{name}`", plan, road, _trains(name), _ties(entry), tensor, expert, context
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"{len(names)} architectures. Classes of transformers for causal language models that are left out:",
        "",
    ]
    lines += ["| class | reason |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in sorted(left_out().items()) if name not in ARCHITECTURES]
    return "\n".join(lines) + "\n"


def _trains(name: str) -> str:
    if is_generic(name):
        entry = entry_of(name)
        return "its text model, by the catalogue" if entry is not None and entry.towers else "by the catalogue"
    entry = entry_of(name)
    return f"no: {entry.refused}" if entry is not None else "no"


def _tensor(name: str) -> str:
    why = why_not_tensor_parallel(name)
    return f"no: {why}" if why and is_generic(name) else "no" if why else "yes"


def _ties(entry: CatalogueEntry | None) -> str:
    if entry is None or entry.ties:
        return "unless the config says otherwise" if entry is None or entry.tied else "if the config says so"
    return "never"


if __name__ == "__main__":
    sys.exit(main())
