"""What a verb does grows with the checkpoint and no faster: operations are counted, not seconds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from manifests.invariants import check_manifest, check_model
from manifests.models import model_shape
from manifests.schema import TieGroup, TieMember
from stores.open import open_manifest
from tests.builders import llama_config, pack, reshard, write_model

NUM_LAYERS = 40
CONFIG = llama_config(num_hidden_layers=NUM_LAYERS)
_opened: list[str] | None = None


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and args[1] is None:  # by os.open, which every reader goes through
        _opened.append(str(args[0]))


sys.addaudithook(_note)


@contextmanager
def opened_files() -> Iterator[Counter[str]]:
    """Count how often each file is opened."""
    global _opened
    found: Counter[str] = Counter()
    _opened = []
    try:
        yield found
    finally:
        found.update(_opened)
        _opened = None


class Name(str):
    """A name that counts how often it is compared or hashed."""

    __slots__ = ()
    looked_at = 0

    def __eq__(self, other: object) -> bool:
        Name.looked_at += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Name.looked_at += 1
        return str.__hash__(self)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counted") / "source"
    write_model(folder, CONFIG, num_shards=8 * NUM_LAYERS)
    return folder


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    return pack(source, source.with_name("packed"), "pp=4")


def test_modules_are_looked_up_a_few_times_each(packed: Path) -> None:
    manifest, shape = open_manifest(packed).manifest, model_shape(CONFIG)
    stages = tuple(replace(stage, modules=tuple(map(Name, stage.modules))) for stage in manifest.stages)
    last = Name(f"{stages[3].modules[-3]}.weight")
    ties = tuple(TieGroup(owner=TieMember(fqn=last, stage=3), replicas=()) for _ in range(NUM_LAYERS))
    Name.looked_at = 0
    check_model(replace(manifest, stages=stages), shape)
    with pytest.raises(Exception, match="ties"):
        check_manifest(replace(manifest, stages=stages, ties=ties))
    assert Name.looked_at < 30 * NUM_LAYERS


@pytest.mark.parametrize("quick", [True, False])
def test_verify_opens_each_header_once(packed: Path, quick: bool) -> None:
    shards = [str(packed / shard.path) for stage in open_manifest(packed).manifest.stages for shard in stage.shards]
    with opened_files() as found:
        assert reshard("verify", packed, *(["--quick"] if quick else [])).code == 0
    # Without --quick the data is read too: by one reader for each run of it.
    assert [found[shard] for shard in shards] == [1 if quick else 2] * len(shards)


def test_a_pack_lays_each_shard_out_a_few_times(source: Path) -> None:
    """The entries of a planned shard are made when they are asked for: not once for each tensor."""
    frames: dict[str, set[FrameType]] = {"layout_tensors": set(), "header_template": set()}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name in frames:
            frames[frame.f_code.co_name].add(frame)

    sys.setprofile(note)
    try:
        ended = reshard("pack", source, "--layout", "pp=4", "--out", source.with_name("counted"))
    finally:
        sys.setprofile(None)
    assert ended.code == 0
    assert all(4 <= len(found) <= 4 * 8 for found in frames.values()), frames
