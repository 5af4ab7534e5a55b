"""Headers of many files: read sixteen at a time where that pays, refused as if they were read one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manifests.safetensors import TensorEntry, encode_header
from stores.base import Range
from stores.workers import NUM_AT_ONCE, each_file_header
from tests.builders import files_in, llama_config, reshard, write_model
from tests.refusals import refused
from tests.servers.hub import Hub

HEADER = encode_header([TensorEntry(name="a", dtype="U8", shape=(0,), begin=0, end=0)], {})


@dataclass
class Desk:
    """Counts who is served, and may keep everybody until enough are there."""

    wanted: int = 1
    most: int = 0
    served: list[str] = field(default_factory=list)
    _now: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def serve(self, name: str) -> None:
        with self._changed:
            self._now += 1
            self.served.append(name)
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self.wanted, timeout=10)
        time.sleep(0.05)  # a hundred take 0.3 s, in which the failure of one is noticed
        with self._changed:
            self._now -= 1


@dataclass(frozen=True, eq=False)
class FarFile:
    name: str
    desk: Desk
    data: bytes = HEADER
    fingerprint: str = "none"

    def __str__(self) -> str:
        return self.name

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def open(self, ranges: Sequence[Range]) -> FarFile:
        self.desk.serve(self.name)
        return self

    def read_into(self, part: memoryview, position: int) -> None:
        part[:] = self.data[position : position + len(part)]

    def close(self) -> None:
        pass


def test_headers_are_read_sixteen_at_a_time_and_returned_in_order() -> None:
    desk = Desk(wanted=NUM_AT_ONCE)
    files = [FarFile(str(number), desk) for number in range(30)]
    assert list(dict(each_file_header(files))) == files
    assert desk.most == NUM_AT_ONCE == 16


def test_the_first_file_that_is_refused_is_named_and_no_other_is_begun() -> None:
    desk = Desk()
    files = [FarFile(f"{number}", desk, b"cut" if number in (2, 3) else HEADER) for number in range(200)]
    assert refused(lambda: dict(each_file_header(files))) == ("header.not-safetensors", "2")
    assert len(desk.served) < 100


def test_damaged_header_on_the_hub_is_refused_as_it_is_here(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, llama_config(), num_shards=12)
    (folder / "model-00005-of-00012.safetensors").write_bytes(b"damaged and more")
    (folder / "model-00009-of-00012.safetensors").write_bytes(b"damaged and more")
    hub.push("org/model", files_in(folder))
    flags = ("--layout", "pp=2", "--out", tmp_path / "out")
    here, there = reshard("pack", folder, *flags), reshard("pack", "hf://org/model", *flags)
    assert "model-00005-of-00012.safetensors: " in here.err
    assert there.err == here.err.replace(str(folder), "hf://org/model")
