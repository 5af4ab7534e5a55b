"""docs/models.md says what can be packed and what each trains on: its table is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from manifests.models import ARCHITECTURES
from runner.models import FAMILIES
from runner.models.decoders import DECODERS

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
ALIAS = "MPTForCausalLM"  # MosaicML's own name for MptForCausalLM


def test_table_says_what_each_architecture_trains_on() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| ([a-z ]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    found = {name: road for names, road in rows for name in re.findall(r"`(\w+)`", names)}
    assert found == {
        name: "transformers"
        if name in DECODERS or name == ALIAS
        else "torchtitan or transformers"
        if name in FAMILIES
        else "packs only"
        for name in ARCHITECTURES
    }
