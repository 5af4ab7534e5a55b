"""Which tensors are put apart and which shards are linked, one checkpoint after the other."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manifests.errors import InputError
from manifests.schema import WEIGHTS, Shard
from runner.checkpoint import save as shared_folder
from runner.checkpoint.save import check_folder, check_sizes
from runner.checkpoint.shard_file import Before, Digests, hash_pieces, header_of, shard_of
from runner.distributed.rounds import run_beside_training
from runner.tensors.local_shard import Piece, whole_pieces
from tests.builders import files_in
from tests.fast.runner.tiny import write_shard
from tests.fast.trained import write_trained

KEY = (0, WEIGHTS)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return write_trained(tmp_path, "pp=1", num_hidden_layers=1)


def hashed(pieces: tuple[Piece, ...]) -> Digests:
    return run_beside_training(hash_pieces({0: {WEIGHTS: pieces}}, lambda: False), lambda: True)


def next_checkpoint(before: Before, folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[Before, list[bool]]:
    """Write the shards of a checkpoint, and return what the next one knows, and which of them were linked."""
    pieces, known, paths, linked = whole_pieces(tensors), [], {}, []
    digests = hashed(pieces)
    for number, part in enumerate(before.divide(*KEY, pieces, digests, None)):
        shard = shard_of(f"{number}.safetensors", WEIGHTS, header_of(part, digests[KEY]), part)
        linked.append(before.link(shard, folder))
        if not linked[-1]:
            folder.mkdir(exist_ok=True)
            assert write_shard(part, folder, shard.path, digests=digests[KEY]) == shard
            assert write_shard(part, folder, "hashed").digest == shard.digest
        known.append(tuple((piece.fqn, digests[KEY][piece.fqn]) for piece in part))
        paths[shard.digest] = folder / shard.path
    return Before(tensors={KEY: known}, paths=paths), linked


def test_disk_that_fails_once_a_shard_is_linked_takes_nothing_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.arange(4.0)}
    known, _ = next_checkpoint(Before(), tmp_path / "1", tensors)
    before = files_in(tmp_path / "1")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError):
        next_checkpoint(known, tmp_path / "2", tensors)
    assert files_in(tmp_path / "1") == before


def test_tensors_that_stay_are_apart_from_the_second_time_on_and_linked_from_the_third(tmp_path: Path) -> None:
    tensors = {name: torch.full((4,), float(number)) for number, name in enumerate(("a", "b", "c"))}
    known, links = Before(), []
    for step in range(4):  # of experts, say, `b` gets no token
        tensors |= {name: tensors[name] + 1 for name in ("a", "c")}
        known, linked = next_checkpoint(known, tmp_path / str(step), tensors)
        links.append(linked)
    assert links == [[False], [False, False], [True, False], [True, False]]
    assert [names for ((names, _),) in known.tensors[KEY][:1]] == ["b"]
    assert os.stat(tmp_path / "3/0.safetensors").st_nlink == 3


def test_checkpoint_before_whose_disk_fails_shares_nothing(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Before.read(trained, (0,)).tensors
    stat = os.stat

    def failing(path: Path, **options: object) -> os.stat_result:
        if str(path).endswith(".safetensors"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", failing)
    assert Before.read(trained, (0,)) == Before()


def test_what_is_not_trained_is_apart_from_the_first_time_on() -> None:
    pieces = whole_pieces({name: torch.zeros(2) for name in ("a", "b", "c")})
    parts = Before().divide(*KEY, pieces, {}, ("b",))
    assert [[piece.fqn for piece in part] for part in parts] == [["a", "c"], ["b"]]
    assert Before().divide(*KEY, pieces, {}, None) == [list(pieces)]


@pytest.mark.parametrize("fault", ["gone", "cut", "no links"])
def test_shard_that_cannot_be_linked_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    tensors = {"a": torch.arange(4.0)}
    known, _ = next_checkpoint(Before(), tmp_path / "1", tensors)
    (path,) = known.paths.values()
    if fault == "gone":
        path.unlink()
    elif fault == "cut":
        os.truncate(path, 10)
    else:
        monkeypatch.setattr(os, "link", lambda *_: os.stat("/nowhere"))
    _, linked = next_checkpoint(known, tmp_path / "2", tensors)
    assert linked == [False]


# A saved shard whose header Hugging Face readers refuse is named.


PIECES = whole_pieces({"model.norm.weight": torch.ones(2)})


def test_long_header_of_weights_is_named_and_of_optimizer_state_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runner.checkpoint.shard_file.MOST_READ_HEADER_NBYTES", 10)
    path = "model-00001-of-00001.safetensors"
    write_shard(PIECES, tmp_path, "stage-000/exp_avg/model.safetensors", "exp_avg")
    assert not caplog.messages
    shard = write_shard(PIECES, tmp_path, path)
    (record,) = caplog.records
    assert (record.levelno, record.args) == (logging.WARNING, (tmp_path / path, shard.nbytes - 8))
    monkeypatch.undo()
    caplog.clear()
    write_shard(PIECES, tmp_path, path)
    assert not caplog.messages


# What one node writes and another must find: a late file is waited for, a missing one is an error.


SHARD = Shard(path="stage-001/exp_avg/model.safetensors", nbytes=3, digest="blake3:" + 64 * "0")
FIRST = replace(SHARD, path="stage-000/model.safetensors")


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "PAUSES_S", (0.0, 0.0))


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
