"""Kills, signals and failing disks at any change that a command makes: what is not ours stays, a rerun ends well."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.builders import files_in, flip, leftovers, llama_config, pack, refusal, reshard, write_model
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained
from tests.process.events import ACTS, NUM_LOCAL_EVENTS, Worker, acts_of, chunks_of, emptied, start_worker
from tests.sentinels import Sentinels, plant_in

pytestmark = pytest.mark.timeout(1200)

OPERATIONS = (
    "pack", "forced pack", "bin", "forced bin", "reshard", "forced reshard", "export", "forced export", "parts",
    "forced parts", "trained", "merged", "trained export", "cast export",
)  # fmt: skip
NUM_EVENTS = 14  # of `make test`; the others come in slow chunks


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with start_worker(tmp_path_factory.mktemp("said") / "said", {}) as started:
        yield started


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A source, bundles of it, and what each operation makes of them; `old` is what forced ones replace."""

    folder: Path

    def commands(self, operation: str, out: Path) -> list[tuple[object, ...]]:
        force = ("--force",) if operation.startswith("forced") else ()
        source, packed = self.folder / "source", self.folder / "packed"
        trained, sliced = self.folder / "training/trained", self.folder / "training/sliced"
        if operation == "trained":
            return [("pack", trained, "--layout", "pp=4", "--out", out, "--quiet")]
        if operation == "merged":
            return [("pack", sliced, "--layout", "pp=1", "--merge-slices", "--out", out, "--quiet")]
        if operation == "trained export":
            return [("export", trained, "--to", "hf", "--out", out, "--quiet")]
        if operation == "cast export":
            return [("export", sliced, "--to", "hf", "--dtype", "bf16", "--out", out, "--quiet")]
        pack = ("pack", source, "--layout", "pp=2", "--out", out, "--quiet", *force)
        if operation.endswith("bin"):
            return [("pack", self.folder / "torch", "--layout", "pp=2", "--out", out, "--quiet", *force)]
        if operation.endswith("parts"):
            return [(*pack, "--part", "1/2"), (*pack, "--part", "2/2"), ("commit", out, *force)]
        if operation.endswith("reshard"):
            return [("pack", packed, "--layout", "pp=3", "--out", out, "--quiet", *force)]
        if operation.endswith("export"):
            return [("export", packed, "--to", "hf", "--out", out, "--quiet", *force)]
        return [pack]

    def expected(self, operation: str) -> dict[str, bytes]:
        return files_in(self.made(operation))

    def made(self, operation: str) -> Path:
        """Return what an operation makes, undisturbed."""
        return self.folder / operation.removeprefix("forced ").replace(" ", "-")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(folder=tmp_path_factory.mktemp("events"))
    config = llama_config(num_hidden_layers=3)
    write_model(place.folder / "source", config, num_shards=2)
    write_torch_model(place.folder / "torch", config)
    made = reshard("pack", place.folder / "source", "--layout", "pp=4", "--out", place.folder / "packed")
    assert made.code == 0, made.err
    shutil.copytree(
        write_trained(place.folder / "training", "pp=2", tie_word_embeddings=True), place.folder / "training/sliced"
    )
    cut_up(place.folder / "training/sliced", CUTS["both"])
    for operation in (name for name in OPERATIONS if not name.startswith("forced")):
        for command in place.commands(operation, place.made(operation)):
            ended = reshard(*map(str, command))
            assert ended.code == 0, ended.err
    return place


def write_torch_model(folder: Path, config: dict[str, Any]) -> None:
    """Write the same model as torch.save does, with a checksum of each tensor."""
    import torch
    from safetensors.torch import load_file

    write_model(folder, config)
    shard = folder / "model.safetensors"
    torch.save(load_file(shard), folder / "pytorch_model.bin")
    shard.unlink()


def begin(place: Place, operation: str, folder: Path) -> tuple[Path, list[Sentinels]]:
    """Return the output's place and the files of others around it; some operations replace an output."""
    out = folder / "out"
    sentinels = [plant_in(folder)]
    if operation == "forced export":
        assert reshard("export", place.folder / "packed", "--to", "hf", "--out", out).code == 0
    elif operation.startswith("forced"):
        shutil.copytree(place.folder / "packed", out)
    return out, sentinels


def journaled(folder: Path, *, has_failed: bool = False) -> set[tuple[str, int]]:
    """Return the runs of tensors that journals say are on disk: the file's path, and the run's first byte.

    Where a disk `has_failed`, nothing is of a file that could not be flushed: it is empty since then.
    """
    found = set()
    for path in (folder / ".out.partial/.journal", *folder.glob(".out.parts/*/*/.journal")):
        lines = path.read_text().splitlines() if path.is_file() else []
        for line in lines[1:] if lines and lines[0].startswith('{"plan"') else ():
            with suppress(ValueError):  # cut short
                run = json.loads(line)
                output = path.parent / run["output"]
                if output.stat().st_size or not has_failed:
                    found.add((str(output), run["position"]))
    return found


def check_kept(worker: Worker, kept: set[tuple[str, int]], context: str) -> None:
    """Assert that the last command wrote nothing again that a journal said was on disk."""
    again = {run for run in kept for name, begin, end in worker.written if name == run[0] and begin <= run[1] < end}
    assert not again, (context, again)


def strike(place: Place, worker: Worker, seed: int, folder: Path) -> int:
    """Strike one command of an operation, once or twice, and run it again; return how much of it was kept."""
    chance = random.Random(seed)
    operation = OPERATIONS[seed % len(OPERATIONS)]
    out, sentinels = begin(place, operation, folder)
    commands, expected = place.commands(operation, out), place.expected(operation)
    old = files_in(out) if out.exists() else None
    struck, kept, has_failed = chance.randrange(len(commands)), set[tuple[str, int]](), False
    for command in commands[:struck]:
        assert worker.run(*command)[0] == 0, worker.said.read_text()
    for act in acts_of(seed, OPERATIONS, chance):
        at = int(chance.paretovariate(0.6)) - 1 if chance.random() < 0.5 else chance.randrange(120)
        at = chance.randrange(400) if act == "later" else at  # up to 100 ms, as long as most commands change a disk
        code, _ = worker.run(*commands[struck], act=act, at=at)
        context = f"seed {seed}: {operation}, {act} at change {at}, code {code}: {worker.said.read_text()}"
        assert code in (0, 3, 5, 130, -9, -15), context
        check_kept(worker, kept, context)
        has_failed = has_failed or act in ("full", "broken", "refused")
        kept = journaled(folder, has_failed=has_failed)
        for each in sentinels:
            each.check()
        now = files_in(out) if out.exists() else None
        assert now in (old, expected), context
        assert code != 0 or now == expected or struck < len(commands) - 1, context
        if now == expected and old != expected:
            break
    for command in commands[struck:]:
        code, _ = worker.run(*command)
        check_kept(worker, kept, context)
        said = worker.said.read_text()
        assert code == 0 or (out.exists() and files_in(out) == expected and "already exists" in said), (context, said)
    assert files_in(out) == expected, context
    if "export" not in operation:
        assert worker.run("verify", out)[0] == 0, (context, worker.said.read_text())
        assert worker.run("diff", place.made(operation), out)[0] == 0, (context, worker.said.read_text())
    for each in sentinels:
        each.check()
    # Of a disk that broke for good as an export's record was written, or what was replaced was removed, nothing goes.
    records = (".out.exported.json", "..out.exported.json.partial", *([".out.partial"] if act == "broken" else []))
    beside = [name for name in leftovers(out) if name not in records]
    assert beside == ["out"], context
    return len(kept)


def test_each_operation_has_each_act_first() -> None:
    firsts = {
        (seed % len(OPERATIONS), acts_of(seed, OPERATIONS, random.Random(seed))[0]) for seed in range(NUM_LOCAL_EVENTS)
    }
    assert len(firsts) == len(OPERATIONS) * len(set(ACTS))


@pytest.mark.parametrize("operation", ["pack", "export"])
def test_a_kill_after_the_last_shard_loses_nothing_until_the_rename(
    operation: str, place: Place, worker: Worker, tmp_path: Path
) -> None:
    """The journal is the last to go: a rerun starts over after a kill between that and the rename, and no other.

    Those are two: its removal is synced before the rename, so that a power failure does not bring it back.
    """
    found: list[str] = []
    with emptied(tmp_path / "whole") as folder:
        out, _ = begin(place, operation, folder)
        _, num_changes = worker.run(*place.commands(operation, out)[0])
    for at in reversed(range(num_changes)):
        with emptied(tmp_path / str(at)) as folder:
            out, _ = begin(place, operation, folder)
            (command,) = place.commands(operation, out)
            worker.run(*command, act="SIGKILL", at=at)
            is_done, kept = files_in(out) == place.expected(operation) if out.exists() else False, journaled(folder)
            found.append("done" if is_done else "kept" if kept else "lost")
            if found[-5:] == ["kept"] * 5:
                break
            if not is_done:
                assert worker.run(*command)[0] == 0, worker.said.read_text()
                check_kept(worker, kept, f"{operation}, change {at}")
                assert files_in(out) == place.expected(operation)
    assert found.count("lost") == 2, found


@pytest.mark.parametrize("seeds", chunks_of(NUM_LOCAL_EVENTS, NUM_EVENTS, 116))
def test_struck_command_touches_nothing_of_others_and_ends_well_when_it_is_run_again(
    seeds: range, place: Place, worker: Worker, tmp_path: Path
) -> None:
    failed, num_kept, before = [], 0, files_in(place.folder)
    for seed in seeds:
        with emptied(tmp_path / str(seed)) as folder:
            try:
                num_kept += strike(place, worker, seed, folder)
            except AssertionError as error:
                failed.append(f"{seed}: {error}")
    assert failed == []
    assert files_in(place.folder) == before, "a source has changed"
    assert num_kept > 0 or len(seeds) < 20, "no rerun had anything to resume from"


@pytest.mark.parametrize("what", ["output", "source"])
def test_what_was_damaged_or_changed_after_a_kill_is_packed_again(
    what: str, place: Place, worker: Worker, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(place.folder / "source", source)
    command = ("pack", source, "--layout", "pp=2", "--out", out, "--quiet")
    runs, at = set[tuple[str, int]](), 0
    while not runs:
        assert worker.run(*command, act="SIGKILL", at=at)[0] == -9, worker.said.read_text()
        runs, at = journaled(tmp_path), at + 6
    if what == "output":
        path, position = min(runs)
        flip(Path(path), position + 1)
    else:
        for shard in source.glob("*.safetensors"):  # the first tensors of each, of which some are in the journal
            flip(shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little"))
    assert worker.run(*command)[0] == 0, worker.said.read_text()
    assert files_in(out) == files_in(pack(source, tmp_path / "again"))


@pytest.mark.parametrize("operation", ["pack", "merged", "export", "cast export"])
def test_place_that_takes_no_files_is_named(operation: str, place: Place) -> None:
    (command,) = place.commands(operation, Path("/proc/out"))
    assert refusal(*map(str, command)).found == (3, "output.unwritable", "/proc/out")
