"""Fuzz a decoder, guided by coverage; stops at the first input that breaks a promise, and keeps it.

python tests/fuzz/run.py TARGET [--seconds 600] [--work build/fuzz] [--keep | --survey]

Needs atheris (pip install atheris). The inputs found go to WORK/TARGET. --keep fuzzes nothing: it adds to
tests/fuzz/corpus/TARGET, which the tests replay, the shortest of them that take steps which no other takes.
--survey does not stop: it leaves the first input of each kind of failure, and its traceback, in WORK/TARGET-failures.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
with atheris.instrument_imports(include=["manifests", "reshard", "runner"]):
    from tests.fuzz.targets import TARGETS

from tests.fuzz.mutations import mutate_json

CORPUS = Path(__file__).with_name("corpus")
OURS = tuple(str(Path(__file__).resolve().parents[2] / package) for package in ("manifests", "reshard", "runner"))
MAX_NBYTES = 20_000
LIMITS = ("-timeout=20", "-rss_limit_mb=4096", f"-max_len={MAX_NBYTES}")  # torch alone takes half a GiB

Step = tuple[str, int, int]


def main() -> None:
    options = _options()
    target, work = TARGETS[options.target], options.work / options.target
    for folder in (work, CORPUS / options.target):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (work / f"seed-{number}").write_bytes(seed)
    flags = [*LIMITS, f"-artifact_prefix={options.work}/{options.target}-"]
    if options.keep:
        keep(target.check, work, CORPUS / options.target)
        return
    flags += [f"-max_total_time={options.seconds}", str(work), str(CORPUS / options.target)]
    check = Survey(target.check, options.work / f"{options.target}-failures") if options.survey else target.check
    mutate = {"header": _mutate_file, "json": _mutate_text, "lines": _mutate_lines}.get(target.kind)
    atheris.Setup([sys.argv[0], *flags], check, **({"custom_mutator": mutate} if mutate else {}))
    atheris.Fuzz()


class Survey:
    """A check that goes on, and keeps the first input of each kind of failure: by its type and where it was raised."""

    def __init__(self, check: Callable[[bytes], None], folder: Path) -> None:
        self._check, self._folder, self._seen = check, folder, set[str]()
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, data: bytes) -> None:
        try:
            self._check(data)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if frame.filename.startswith(OURS)] or frames
            name = f"{type(error).__name__}-{Path(ours[-1].filename).stem}-{ours[-1].lineno}-{frames[-1].lineno}"
            if name not in self._seen:
                self._seen.add(name)
                (self._folder / name).write_bytes(data)
                (self._folder / f"{name}.txt").write_text("".join(traceback.format_exception(error)))


def keep(check: Callable[[bytes], None], found: Path, corpus: Path) -> None:
    """Add the inputs to a corpus that go from one line to another as none before them did, the shortest first."""
    seen: set[Step] = set()
    for path in sorted(corpus.iterdir()):
        seen |= steps_of(check, path.read_bytes())
    for data in sorted({path.read_bytes() for path in found.iterdir()}, key=lambda data: (len(data), data)):
        steps = steps_of(check, data)
        if not steps <= seen:
            seen |= steps
            (corpus / sha256(data).hexdigest()[:16]).write_bytes(data)


def steps_of(check: Callable[[bytes], None], data: bytes) -> set[Step]:
    """Give the steps, from line to line of our own code, of one check."""
    steps: set[Step] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        last = 0

        def step(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            steps.add((frame.f_code.co_filename, last, frame.f_lineno))
            last = frame.f_lineno
            return step

        return step

    sys.settrace(trace)
    try:
        check(data)
    finally:
        sys.settrace(None)
    return steps


def _mutate_text(data: bytes, max_nbytes: int, seed: int) -> bytes:
    chance = Random(seed)
    mutated = mutate_json(data, chance) if chance.random() < 0.8 else None
    return atheris.Mutate(data, max_nbytes) if mutated is None else mutated[:max_nbytes]


def _mutate_lines(data: bytes, max_nbytes: int, seed: int) -> bytes:
    """Mutate one line of JSON, or the bytes of all."""
    chance = Random(seed)
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    mutated = mutate_json(lines[at], chance) if chance.random() < 0.7 else None
    if mutated is None:
        return atheris.Mutate(data, max_nbytes)
    return b"\n".join((*lines[:at], mutated, *lines[at + 1 :]))[:max_nbytes]


def _mutate_file(data: bytes, max_nbytes: int, seed: int) -> bytes:
    """Mutate a safetensors file's header and, mostly, make length and data fit again."""
    chance = Random(seed)
    begin = 8 + int.from_bytes(data[:8], "little")
    text = mutate_json(data[8:begin], chance) if chance.random() < 0.8 else None
    if text is None:
        return atheris.Mutate(data, max_nbytes)
    text += b" " * chance.choice((0, 0, 0, 1, 7))
    ends = [int(found) for found in re.findall(rb'"data_offsets":\[\d+,(\d{1,4})\]', text)]
    data = (data[begin:] + bytes(MAX_NBYTES))[: max(ends, default=0)]
    length, spare = chance.choice((*[0] * 14, 1, -1)), chance.choice((*[b""] * 15, b"?"))
    return (max(0, len(text) + length).to_bytes(8, "little") + text + data + spare)[:max_nbytes]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--survey", action="store_true", help="go on after a failure, and keep one input of each kind")
    parser.add_argument("--keep", action="store_true", help="add to the corpus what covers more than it does")
    return parser.parse_args()


if __name__ == "__main__":
    main()
