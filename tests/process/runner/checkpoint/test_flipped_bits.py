"""One flipped bit anywhere in a checkpoint is found before a step or a loss is computed from it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import INDEX, pack
from tests.fast.runner.data.words import WORDS, write_tokenizer
from tests.fast.runner.tiny import HEAD, save_model
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(1500)

SEED = 20
TRAINING = ("--seq-len", 16, "--global-batch", 8, "--microbatch", 2, "--lr", 1e-3, "--no-self-check")
READING = {"eval": ("--seq-len", 16, "--no-self-check")}
AT_A_TIME = 40  # jobs of a process: each leaves the threads of its gloo groups behind


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to read a checkpoint; `origin` is one that training resumes from, otherwise `packed` is read."""

    name: str
    num_ranks: int
    packed: str = "pp1"
    flags: tuple[str | int, ...] = ()
    kind: str = "train"
    origin: str | None = None
    num_steps: int | None = None  # None: one more than the checkpoint has, or two


SHARDED, CUT = ("--dp-shard", 2), ("--tp", 2)
TWO = (
    Mode(name="stages", num_ranks=2, packed="pp2"),
    Mode(name="sharded", num_ranks=2, flags=SHARDED),
    Mode(name="cut", num_ranks=2, flags=CUT),
    Mode(name="broadcast", num_ranks=2, flags=(*SHARDED, "--loading", "broadcast")),
    Mode(name="virtual", num_ranks=2, packed="virtual2"),
    Mode(name="virtual-sharded", num_ranks=2, packed="virtual1", flags=SHARDED),
    Mode(name="resumed-stages", num_ranks=2, packed="pp2", origin="stages"),
    Mode(name="resumed-sharded", num_ranks=2, flags=SHARDED, origin="sharded"),
    Mode(name="resumed-cut", num_ranks=2, flags=CUT, origin="sharded"),
    Mode(name="eval", num_ranks=2, packed="pp2", kind="eval"),
)
FOUR = (
    Mode(name="hybrid", num_ranks=4, flags=("--dp-replicate", 2, *SHARDED)),
    Mode(name="stages-sharded", num_ranks=4, packed="pp2", flags=SHARDED),
    Mode(name="sharded-cut", num_ranks=4, flags=(*SHARDED, *CUT)),
    Mode(name="resumed-on-four", num_ranks=4, flags=("--dp-shard", 4), origin="sharded"),
    Mode(name="resumed-hybrid", num_ranks=4, flags=("--dp-replicate", 2, *SHARDED), origin="stages"),
)
LEAN = ("sharded", "cut", "broadcast", "virtual", "resumed-cut", "eval")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, packed in every way, and checkpoints of two ways to train it."""
    place = tmp_path_factory.mktemp("flips")
    source = place / "source"
    save_model(source, num_hidden_layers=2, tie_word_embeddings=True)
    write_tokenizer(source, **json.loads((source / "config.json").read_text()))
    for layout in (1, 2):
        for name, flags in ((f"pp{layout}", ()), (f"virtual{layout}", ("--virtual",))):
            pack(source, place / name, f"pp={layout}", *flags)
    chosen = random.Random(SEED)
    lines = (" ".join(chosen.choice(WORDS) for _ in range(30)) for _ in range(40))
    (place / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    begun = [mode for mode in TWO if mode.name in ("stages", "sharded")]
    ended = go(place, [job_of(place, mode, "begun") for mode in begun], 2)
    assert [end["exit_code"] for end in ended.values()] == [0, 0], ended
    return place


def job_of(place: Path, mode: Mode, name: str, flip: Sequence[Any] | None = None) -> dict[str, Any]:
    log = place / "logs" / f"{mode.name}-{name}"
    data = ("--data", place / "text.jsonl")
    if mode.kind == "train":
        args = (*data, *TRAINING, "--log-dir", log, *mode.flags, "--steps", mode.num_steps or (3 if mode.origin else 2))
        if mode.origin:
            args += ("--resume", checkpoint(place, mode.origin))
        if name.startswith("begun"):
            args += ("--checkpoint", log, *(("--checkpoint-every", 2) if name == "begun" else ()))
    else:
        args = (*data, *READING[mode.kind])
    return {
        "name": log.name,
        "kind": mode.kind,
        "root": str(place / mode.packed),
        "args": [str(arg) for arg in args],
        "flip": flip,
    }


def checkpoint(place: Path, origin: str) -> Path:
    return place / "logs" / f"{origin}-begun" / "step-000002"


def go(place: Path, jobs: list[dict[str, Any]], num_ranks: int) -> dict[str, dict[str, Any]]:
    (place / "ended").mkdir(exist_ok=True)
    for some in (jobs[at : at + AT_A_TIME] for at in range(0, len(jobs), AT_A_TIME)):
        (place / "jobs.json").write_text(json.dumps(some))
        launch(num_ranks, "runner/checkpoint/flips_worker.py", place / "jobs.json", place / "ended", timeout_s=600)
    return {job["name"]: json.loads((place / "ended" / f"{job['name']}.json").read_text()) for job in jobs}


def draw_flip(place: Path, mode: Mode, number: int, chosen: random.Random) -> tuple[str, int, int]:
    """Choose a bit of one of the files that a job reads: in turn the data or the header of a shard, or a small file."""
    read = checkpoint(place, mode.origin) if mode.origin else place / mode.packed
    files = [path for path in sorted(read.rglob("*")) if path.is_file()]
    shards = [path for path in files if path.suffix == ".safetensors"] or [place / "source" / "model.safetensors"]
    small = [path for path in files if path.suffix != ".safetensors"]
    if number % 3 == 2:
        file = chosen.choice(small)
        return str(file), chosen.randrange(file.stat().st_size), chosen.randrange(8)
    file = chosen.choice(shards)
    data = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    position = chosen.randrange(data) if number % 3 else chosen.randrange(data, file.stat().st_size)
    return str(file), position, chosen.randrange(8)


def check_flips(place: Path, modes: Sequence[Mode], count: int) -> None:
    """Flip `count` bits in each mode, and run each mode once with none flipped."""
    num_ranks = modes[0].num_ranks
    jobs, flips, unread = [], dict[str, Any](), set[str]()
    for turn, mode in enumerate(modes):
        chosen = random.Random(f"{SEED} {mode.name}")
        for number in range(count):
            job = job_of(place, mode, str(number), draw_flip(place, mode, turn + number, chosen))
            flips[job["name"]] = job["flip"]
            if is_unread(mode, *job["flip"][:2]):
                unread.add(job["name"])
            jobs.append(job)
        jobs.append(job_of(place, mode, "whole"))
    ended = go(place, jobs, num_ranks)
    for name, end in ended.items():
        told, mode = (name, flips.get(name), end), name.rpartition("-")[0]
        if name.endswith("-whole"):
            assert end["exit_code"] == 0, told
            assert (losses(place / "logs" / name) == []) == (mode in READING), told
            continue
        if name in unread:
            assert end["exit_code"] == 0, told
            assert losses(place / "logs" / name) == losses(place / "logs" / f"{mode}-whole"), told
            continue
        assert end["exit_code"] == 3, told
        assert losses(place / "logs" / name) == [], told


def losses(log: Path) -> list[float]:
    """Return the loss of each step that was taken."""
    metrics = log / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
    return [line["loss"] for line in lines if "loss" in line]


def is_unread(mode: Mode, file: str, position: int) -> bool:
    """Whether nothing reads a bit.

    Such bits are in the index, which is for other readers, and in the optimizer state of the tied head's copy where
    one rank has both ends: it steps one parameter, the embedding, and reads the state of that one.
    """
    path = Path(file)
    if path.name == INDEX:
        return True
    if mode.packed != "pp1" or path.parent.name not in ("exp_avg", "exp_avg_sq"):
        return False
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = json.loads(data[8:begin]).get(HEAD)
    return found is not None and found["data_offsets"][0] <= position - begin < found["data_offsets"][1]


def test_a_flipped_bit_is_found_before_a_step_is_taken(place: Path) -> None:
    check_flips(place, [mode for mode in TWO if mode.name in LEAN], 1)


@pytest.mark.parametrize(
    "names",
    [
        ("sharded",),
        pytest.param(("broadcast", "cut", "resumed-sharded", "resumed-stages", "stages"), marks=pytest.mark.slow),
    ],
)
def test_background_digests_end_a_job_as_foreground_does_and_nothing_is_saved(
    place: Path, names: tuple[str, ...]
) -> None:
    jobs, saved = [], []
    for mode in (mode for mode in TWO if mode.name in names):
        read = checkpoint(place, mode.origin) if mode.origin else place / mode.packed
        shard = max(read.rglob("*.safetensors"), key=lambda path: (path.stat().st_size, path))
        flip = str(shard), shard.stat().st_size - 2, 0
        background = replace(mode, flags=(*mode.flags, "--digests", "background"))
        out = place / f"saved-{mode.name}"
        saved.append(out)
        jobs += [
            job_of(place, mode, "foreground", flip),
            job_of(place, background, "whole-background"),
            job_of(place, replace(background, flags=(*background.flags, "--checkpoint-every", 1)), "begun-every", flip),
            job_of(place, replace(background, flags=(*background.flags, "--save", out)), "saved", flip),
            job_of(place, replace(background, num_steps=3000), "step", flip),
        ]
    ended = go(place, jobs, 2)
    for name in names:
        how = {each.removeprefix(f"{name}-"): end for each, end in ended.items() if each.startswith(f"{name}-")}
        assert how.pop("whole-background")["exit_code"] == 0
        assert {(end["code"], end["exit_code"]) for end in how.values()} == {("shard.digest-mismatch", 3)}, how
        # In the background one rank of a stage verifies a tensor, which may be another than the first to read it.
        foreground = how.pop("foreground")["where"]
        [background] = {end["where"] for end in how.values()}
        assert background.partition(": ")[2] == foreground.partition(": ")[2]
        assert len(losses(place / "logs" / f"{name}-step")) < 2999
        assert not [*(place / "logs" / f"{name}-begun-every").rglob("manifest.json")]
    assert not any(out.exists() for out in saved)


@pytest.mark.slow
def test_flipped_bits_are_found_however_two_ranks_read(place: Path) -> None:
    check_flips(place, TWO, 13)


@pytest.mark.slow
def test_flipped_bits_are_found_however_four_ranks_read(place: Path) -> None:
    check_flips(place, FOUR, 12)
