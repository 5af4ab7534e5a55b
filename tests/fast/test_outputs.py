"""Each path that a command takes is an input, or an output that docs/adr/0024 says how to probe before the work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from reshard.cli.command import cli as reshard
from runner.commands import cli as runner
from runner.config.flags import training_command

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ROOT / "docs/adr/0024-outputs-are-probed.md"
VERIFIED = ROOT / "docs/adr/0020-parts-are-verified.md"
INPUTS = {
    "reshard check --against", "reshard check --model", "reshard check checkpoint",
    "reshard delta apply chain", "reshard delta fold chain", "reshard delta log chain", "reshard delta prune chain",
    "reshard delta publish --base", "reshard delta publish source", "reshard delta verify --base",
    "reshard delta verify chain", "reshard diff --model",
    "reshard diff a", "reshard diff b", "reshard export manifest", "reshard inspect manifest", "reshard merge adapters",
    "reshard merge base", "reshard layout --cost",
    "reshard layout spec", "reshard pack --adapter", "reshard pack --layout", "reshard pack --model",
    "reshard pack --mount", "reshard pack source", "reshard plan --cost",
    "reshard plan --from-run", "reshard plan --layout", "reshard plan --model", "reshard plan --optimizer",
    "reshard plan --schedule",
    "reshard plan source", "reshard push folder", "reshard sign --key", "reshard sign manifest",
    "reshard verify --against", "reshard verify --public-key", "reshard verify manifest",
    "runner cancel log_dir", "runner eval --data", "training --optimizer", "runner eval manifest",
    "runner launch --job", "runner launch manifest", "runner list runs", "runner logs log_dir",
    "runner measure manifest", "runner prove --against", "runner prove model",
    "runner report --compare", "runner report log_dir", "runner status log_dir",
    "training --data", "training --eval-data", "training --lora-from", "training --resume", "training --schedule",
}  # fmt: skip
_NAMES_A_PATH = re.compile(r"\b(FILE|DIR|FOLDER|PATH|URL)\b")


def paths_of(name: str, command: click.Command) -> Iterator[str]:
    """Yield each argument and flag of a command, and of those below it, that names a path."""
    if isinstance(command, click.Group):
        for verb in command.list_commands(context := click.Context(command)):
            below = command.get_command(context, verb)
            assert below is not None
            yield from paths_of(f"{name} {verb}", below)
        return
    for param in command.params:
        if isinstance(param.type, click.Path) or _NAMES_A_PATH.search(param.metavar or ""):
            yield f"{name} {max(param.opts, key=len)}"


def rows_of(page: Path) -> list[list[str]]:
    lines = (line for line in page.read_text().splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines][1:]


def test_each_path_of_a_command_is_an_input_or_an_output_that_is_probed() -> None:
    commands = (("reshard", reshard), ("runner", runner), ("training", training_command))
    taken = {path for name, command in commands for path in paths_of(name, command)}
    cells = " ".join(row[0] for row in rows_of(OUTPUTS))
    listed = {path for path in re.findall(r"`([^`]+)`", cells) if path.split()[0] in ("reshard", "runner", "training")}
    verbs = {"reshard push", "reshard sign", "reshard check --digests"}  # whose outputs are not paths
    assert listed - verbs == taken - INPUTS
    assert taken >= INPUTS


@pytest.mark.parametrize("page", [OUTPUTS, VERIFIED], ids=lambda page: page.stem)
def test_each_test_that_a_table_names_exists(page: Path) -> None:
    rows, there = rows_of(page), {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = [re.findall(r"`(test_\w+)`", row[-1]) for row in rows]
    assert all(named), [row[0] for row, tests in zip(rows, named, strict=True) if not tests]
    assert {test for tests in named for test in tests} <= there
