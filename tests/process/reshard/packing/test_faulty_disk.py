"""On a disk that reads short, writes short and fails, an output is right or is refused; never committed wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import files_in, run
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained
from tests.process.events import Worker, emptied, start_worker

pytestmark = pytest.mark.timeout(600)

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 2048}
# A source, and what is made of it; a copy of the model, of its moments, a merge of slices and a cast.
COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "packed": ("pack", "source", ("--layout", "pp=4")),
    "exported": ("export", "packed", ("--to", "hf")),
    "repacked": ("pack", "trained", ("--layout", "pp=4")),
    "merged": ("pack", "sliced", ("--layout", "pp=1", "--merge-slices")),
    "cast": ("export", "sliced", ("--to", "hf", "--dtype", "bf16")),
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with start_worker(tmp_path_factory.mktemp("said") / "said", {}) as started:
        yield started


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a tied training checkpoint of it, the same in slices, and what each command makes of them."""
    folder = tmp_path_factory.mktemp("faulty")
    shutil.copytree(write_trained(folder, "pp=2", tie_word_embeddings=True, **SIZES), folder / "sliced")
    cut_up(folder / "sliced", CUTS["both"])
    for name in COMMANDS:
        run(*command_of(name, folder, folder / name))
    return folder


def command_of(name: str, place: Path, out: Path) -> list[str | Path]:
    verb, source, flags = COMMANDS[name]
    return [verb, place / source, *flags, "--out", out, "--quiet"]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 24), marks=pytest.mark.slow)], ids=str)
def test_command_on_a_failing_disk_is_right_or_refused(
    seeds: range, place: Path, worker: Worker, tmp_path: Path
) -> None:
    codes = set()
    for name in COMMANDS:
        for seed in seeds:
            with emptied(tmp_path / f"{name}-{seed}") as folder:
                command, expected = command_of(name, place, folder / "out"), files_in(place / name)
                code, _ = worker.run(*command, act="faulty", at=seed)
                codes.add(code)
                said = worker.said.read_text()
                assert "Traceback" not in said
                if code:
                    assert said.startswith("error: "), said
                    assert {path.name for path in folder.iterdir()} <= {".out.partial"}  # for the same command
                    assert worker.run(*command)[0] == 0, worker.said.read_text()
                assert files_in(folder / "out") == expected, (name, seed)
    assert codes == {0, 3}
