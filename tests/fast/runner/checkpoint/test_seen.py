"""What one node writes and another must find: a late file is waited for, a missing one is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from manifests.errors import InputError
from manifests.schema import Shard
from runner.checkpoint import save as shared_folder
from runner.checkpoint.save import check_folder, check_sizes

SHARD = Shard(path="stage-001/exp_avg/model.safetensors", nbytes=3, digest="blake3:" + 64 * "0")
FIRST = replace(SHARD, path="stage-000/model.safetensors")


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_PAUSES_S", (0.0, 0.0))


def write(folder: Path, shard: Shard, data: bytes = b"abc") -> None:
    (folder / shard.path).parent.mkdir(parents=True, exist_ok=True)
    (folder / shard.path).write_bytes(data)


def test_what_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    late = threading.Timer(0.3, write, (tmp_path, SHARD))
    late.start()
    check_sizes(tmp_path, {shard.path: shard.nbytes for shard in (FIRST, SHARD)})
    check_folder(tmp_path / "stage-001")
    late.join()


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize(("data", "code"), [(None, "checkpoint.not-shared"), (b"ab", "checkpoint.not-shared")])
def test_shard_that_never_comes_is_refused(
    data: bytes | None, code: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    write(tmp_path, FIRST)
    if data is not None:
        write(tmp_path, SHARD, data)
    with pytest.raises(InputError) as error:
        check_sizes(tmp_path, {shard.path: shard.nbytes for shard in (FIRST, SHARD)})
    assert (error.value.where, error.value.code) == (f"{tmp_path}/{SHARD.path}", code)
    wording(str(error.value))


@pytest.mark.usefixtures("without_pauses")
def test_folder_that_never_comes_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    with pytest.raises(InputError) as error:
        check_folder(tmp_path / "gone")
    assert (error.value.where, error.value.code) == (f"{tmp_path}/gone", "checkpoint.not-shared")
    wording(str(error.value))
