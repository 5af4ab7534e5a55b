"""docs/models.md says what can be packed and what each trains on: its table is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from manifests.models import ARCHITECTURES
from manifests.models.catalogue import catalogued
from manifests.models.trainable import TORCHTITAN, is_generic

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "models.md"


def test_table_says_what_each_architecture_trains_on() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| ([a-z ]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    found = {name: road for names, road in rows for name in re.findall(r"`(\w+)`", names)}
    assert found == {
        name: "torchtitan or transformers"
        if name in TORCHTITAN
        else "transformers"
        if is_generic(name)
        else "packs only"
        for name in ARCHITECTURES
    }


def test_readme_counts_the_architectures_of_the_catalogue() -> None:
    found = re.search(
        r"(\d+) more architectures can be\s.*?and (\d+) of them train", (ROOT / "README.md").read_text(), re.S
    )
    assert found is not None
    others = [name for name in catalogued() if name not in ARCHITECTURES]
    assert tuple(map(int, found.groups())) == (len(others), sum(map(is_generic, others)))
