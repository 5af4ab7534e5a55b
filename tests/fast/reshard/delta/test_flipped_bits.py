"""A bit that is flipped anywhere in a base, a chain or a copy is named before it is served, or changes no weight."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import reshard
from manifests.errors import UserError
from tests.builders import files_in, flip
from tests.fast.reshard.delta.states import weights_in, write_states

NUM_FLIPS = 300


def shown(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_in(folder).items() if not name.startswith(".cache")}


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, NUM_FLIPS), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_flipped_bit_is_never_served(tmp_path: Path, seeds: range) -> None:
    states = write_states(tmp_path, 3)
    for number in (1, 2, 3):
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
    reshard.apply_delta(tmp_path / "chain", tmp_path / "served", version=1)
    num_refused = 0
    for seed in seeds:
        chance, place = random.Random(seed), tmp_path / str(seed)
        for name in ("chain", "served"):
            shutil.copytree(tmp_path / name, place / name)
        paths = [place / name for name in files_in(place) if not name.startswith("served/.cache")]
        path = chance.choices(paths, [path.stat().st_size for path in paths])[0]
        flip(path, chance.randrange(path.stat().st_size), 1 << chance.randrange(8))
        before = shown(place / "served")
        try:
            reshard.apply_delta(place / "chain", place / "served")
        except UserError:
            num_refused += 1
            assert shown(place / "served") == before, seed
        else:
            assert weights_in(place / "served") == states[2], (seed, path)
        shutil.rmtree(place)
    assert num_refused > len(seeds) // 4
