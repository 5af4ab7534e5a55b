"""Kills, signals and failing disks at any change that a training job's save makes: the checkpoints before it stay."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.checkpoint.history import checkpoint_path, find_checkpoints
from tests.builders import files_in, llama_config, pack, write_model
from tests.process.events import NUM_SAVE_EVENTS, Worker, acts_of, chunks_of, emptied, is_planted, start_worker
from tests.sentinels import plant_in

pytestmark = pytest.mark.timeout(1200)

KINDS = ("history", "history", "save", "forced save")
NUM_EVENTS = 4  # of `make test`


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Bundles to train; what a save of each kind and step writes, and how many changes of the disk it makes."""

    folder: Path
    expected: Mapping[tuple[str, int], dict[str, bytes]]
    num_changes: Mapping[str, int]

    @property
    def packed(self) -> Path:
        return self.folder / "packed"

    @property
    def history(self) -> Path:
        """A history of steps 1 and 2: the next save prunes the first."""
        return self.folder / "history"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with start_worker(tmp_path_factory.mktemp("said") / "said", {}, "saves") as started:
        yield started


@pytest.fixture(scope="module")
def place(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("saves")
    write_model(folder / "source", llama_config(num_hidden_layers=2))
    pack(folder / "source", folder / "packed", "pp=1")
    expected, num_changes, packed = dict[tuple[str, int], dict[str, bytes]](), dict[str, int](), folder / "packed"

    def save(kind: str, out: Path, step: int) -> None:
        code, num_changes[kind] = worker.run(kind, packed, out, step)
        assert code == 0, worker.said.read_text()
        expected[kind, step] = files_in(checkpoint_path(out, step) if kind == "history" else out)

    for step in (1, 2):
        save("history", folder / "history", step)
    shutil.copytree(folder / "history", folder / "longer")
    for step in (3, 4):
        save("history", folder / "longer", step)
    save("save", folder / "saved", 1)
    save("forced save", folder / "saved", 3)
    expected["save", 3] = expected["forced save", 3]
    return Place(folder=folder, expected=expected, num_changes=num_changes)


def check_history(place: Place, history: Path, context: str) -> list[int]:
    """Assert that every checkpoint is whole, and return their steps, the newest first."""
    found = find_checkpoints(history)
    steps = [int(path.name.removeprefix("step-")) for path in found]
    for step, path in zip(steps, found, strict=True):
        assert files_in(path) == place.expected["history", step], (context, path)
    return steps


def strike_history(place: Place, worker: Worker, seed: int, folder: Path) -> None:
    chance, context = random.Random(seed), f"seed {seed}"
    history, newest = folder / "history", 2
    shutil.copytree(place.history, history)
    sentinels = [plant_in(folder), plant_in(history)]
    for act in acts_of(seed, KINDS, chance):
        at = chance.randrange(place.num_changes["history"])
        code, _ = worker.run("history", place.packed, history, newest + 1, act=act, at=at)
        context += f", {act} at change {at}, code {code}: {worker.said.read_text()}"
        assert code in (0, 3, 130, -9, -15), context
        steps = check_history(place, history, context)
        assert newest in steps, context
        assert code != 0 or newest + 1 in steps, context
        for each in sentinels:
            each.check()
        if newest + 1 in steps:
            newest += 1
            break
    code, _ = worker.run("history", place.packed, history, newest + 1)
    assert code == 0, (context, worker.said.read_text())
    assert check_history(place, history, context) == [newest + 1, newest]
    names = [path.name for path in history.glob("*step-*")]
    assert sorted(names) == [f"step-{step:06d}" for step in (newest, newest + 1)], context
    for each in sentinels:
        each.check()


def strike_save(place: Place, worker: Worker, seed: int, folder: Path, kind: str) -> None:
    chance, context = random.Random(seed), f"seed {seed}: {kind}"
    out, old, new = folder / "out", None, place.expected[kind, 3]
    sentinels = [plant_in(folder)]
    if kind == "forced save":
        old = place.expected["save", 1]
        for name, data in old.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)

    def ours() -> dict[str, bytes] | None:
        return files_in(out) if out.exists() else None

    for act in acts_of(seed, KINDS, chance):
        at = chance.randrange(place.num_changes[kind] + 20 * (kind == "forced save"))
        code, _ = worker.run(kind, place.packed, out, 3, act=act, at=at)
        context += f", {act} at change {at}, code {code}: {worker.said.read_text()}"
        assert code in (0, 3, 130, -9, -15), context
        assert ours() in (old, new), context
        assert code != 0 or ours() == new, context
        for each in sentinels:
            each.check()
        if ours() == new:
            break
    if ours() != new or kind == "forced save":
        code, _ = worker.run(kind, place.packed, out, 3)
        assert code == 0, (context, worker.said.read_text())
    assert ours() == new, context
    beside = [path.name for path in folder.iterdir() if not is_planted(path.name)]
    assert [name for name in beside if name != ".out.lock"] == ["out"], context
    for each in sentinels:
        each.check()


def strike(place: Place, worker: Worker, seed: int, folder: Path) -> None:
    """Strike a save once or twice, and save again as the next run does."""
    kind = KINDS[seed % len(KINDS)]
    if kind == "history":
        strike_history(place, worker, seed, folder)
    else:
        strike_save(place, worker, seed, folder, kind)


@pytest.mark.parametrize("seeds", chunks_of(NUM_SAVE_EVENTS, NUM_EVENTS, 56))
def test_struck_save_leaves_every_checkpoint_whole_and_the_next_one_is_saved(
    seeds: range, place: Place, worker: Worker, tmp_path: Path
) -> None:
    failed = []
    for seed in seeds:
        with emptied(tmp_path / str(seed)) as folder:
            try:
                strike(place, worker, seed, folder)
            except AssertionError as error:
                failed.append(f"{seed}: {error}")
    assert failed == []
