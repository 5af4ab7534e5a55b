"""What programs find in a folder at any moment of a switch: the old version, the new one, or nothing that opens."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import reshard
from manifests.errors import UserError
from tests.builders import INDEX
from tests.fast.reshard.delta import slime_decoder
from tests.fast.reshard.delta.states import weights_in, write_states

TORCH, TEMPLATE, CONFIG = "pytorch_model.bin", "chat_template.jinja", "generation_config.json"


def bytes_in(path: Path) -> dict[str, bytes]:
    header, data = slime_decoder.read_file(path)
    tensors = {name: info["data_offsets"] for name, info in header.items() if name != "__metadata__"}
    return {name: data[begin:end] for name, (begin, end) in tensors.items()}


def opened_by_transformers(folder: Path) -> dict[str, bytes] | None:
    if (folder / "model.safetensors").exists():
        return bytes_in(folder / "model.safetensors")
    if not (folder / INDEX).exists():
        assert not (folder / TORCH).exists(), "transformers opens it"
        return None
    shards = {folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()}
    return None if not all(map(Path.exists, shards)) else merged(shards)


def opened_by_engines(folder: Path) -> dict[str, bytes] | None:
    """Return what vLLM and SGLang load: all safetensors files, unless the index does not have them."""
    shards = set(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        shards &= {folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()}
    return merged(shards) if shards else None


def merged(shards: set[Path]) -> dict[str, bytes]:
    tensors = [tensor for shard in shards for tensor in bytes_in(shard).items()]
    assert len(dict(tensors)) == len(tensors), "of which version a tensor is taken is not known"
    return dict(tensors)


def auxiliary_in(folder: Path) -> Mapping[str, str]:
    return {name: (folder / name).read_text() for name in (TEMPLATE, CONFIG) if (folder / name).exists()}


@pytest.mark.parametrize("has_other_files", [False, True])
@pytest.mark.parametrize("versions", [("v1", 2), (None, 2), (3, 1), (2, 3)])
def test_readers_find_a_whole_version_at_any_moment(
    versions: tuple[str | int | None, int], has_other_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = write_states(tmp_path, 3, num_shards=1 if versions[0] == "v1" else 3)
    for number in (1, 2, 3):
        if has_other_files:
            (tmp_path / f"v{number}" / CONFIG).write_text(f'{{"version": {number}}}')
        if has_other_files and number != 2:
            (tmp_path / f"v{number}" / TEMPLATE).write_text(str(number))
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
    files = {number: auxiliary_in(tmp_path / f"v{number}") for number in (1, 2, 3)}
    chain, folder, (before, after) = tmp_path / "chain", tmp_path / "served", versions
    if before == "v1":
        shutil.copytree(tmp_path / "v1", folder)
    elif before is not None:
        reshard.apply_delta(chain, folder, version=2)  # so that shards have suffixes of several versions
        reshard.apply_delta(chain, folder, version=int(before))
    folder.mkdir(exist_ok=True)
    start = 1 if before == "v1" else before
    allowed = [(states[int(number) - 1], files[int(number)]) for number in (start, after) if number is not None]
    if before is not None:
        (folder / TORCH).write_bytes(b"of the base")
    moments = 0

    def look() -> None:
        nonlocal moments
        moments += 1
        for opened in (opened_by_transformers(folder), opened_by_engines(folder)):
            assert opened is None or (opened, auxiliary_in(folder)) in allowed

    for name in ("replace", "unlink"):
        change = getattr(os, name)

        def looking(*args: Any, change: Any = change, **kwargs: Any) -> Any:
            look()
            change(*args, **kwargs)
            look()

        monkeypatch.setattr(os, name, looking)
    reshard.apply_delta(chain, folder, version=after)
    monkeypatch.undo()
    assert moments > 8
    assert (opened_by_transformers(folder), auxiliary_in(folder)) == allowed[-1]
    assert weights_in(folder) == states[after - 1]


def is_killed(
    at: int,
    chain: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: type[BaseException] = KeyboardInterrupt,
) -> bool:
    """Apply version 2, and be killed before a rename or removal; return whether there were so many."""
    left = at
    for name in ("replace", "unlink"):
        change = getattr(os, name)

        def struck(*args: Any, change: Any = change, **kwargs: Any) -> Any:
            nonlocal left
            if Path(args[0]).name == "lock":  # of this process, which does not end
                return change(*args, **kwargs)
            left -= 1
            if left == -1:
                raise failure(errno.ENOSPC, "full")
            return change(*args, **kwargs)

        monkeypatch.setattr(os, name, struck)
    try:
        reshard.apply_delta(chain, folder, version=2)
    except (KeyboardInterrupt, UserError):
        return True
    finally:
        monkeypatch.undo()
    return False


@pytest.mark.parametrize("then", [2, 3])
def test_switch_that_is_killed_anywhere_is_finished(then: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = write_states(tmp_path, 3)
    for number in (1, 2, 3):
        (tmp_path / f"v{number}" / TEMPLATE).write_text(str(number))
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
    reshard.apply_delta(tmp_path / "chain", tmp_path / "before", version=1)
    at, is_done = 0, False
    while not is_done:
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / f"served{at}"))
        is_done = not is_killed(at, tmp_path / "chain", folder, monkeypatch)
        at += not is_done
        assert reshard.apply_delta(tmp_path / "chain", folder, version=then).number == then
        assert weights_in(folder) == states[then - 1]
        assert (folder / TEMPLATE).read_text() == str(then)
        assert {path.name for path in folder.iterdir()} - {".cache"} == {
            path.name for path in folder.iterdir() if not path.name.startswith(".")
        }
    assert at > 8


def test_switch_that_a_disk_interrupts_anywhere_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = write_states(tmp_path, 2)
    for number in (1, 2):
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
    reshard.apply_delta(tmp_path / "chain", tmp_path / "before", version=1)
    at, is_done = 0, False
    while not is_done:
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / f"served{at}"))
        is_done = not is_killed(at, tmp_path / "chain", folder, monkeypatch, OSError)
        at += not is_done
        reshard.apply_delta(tmp_path / "chain", folder, version=2)
        assert weights_in(folder) == states[1]
        assert not (folder / ".cache/reshard/new").exists()
    assert at > 4


@pytest.mark.parametrize("lost", ["new", f"new/{INDEX}"])
def test_switch_whose_new_files_are_lost_removes_no_weights(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = write_states(tmp_path, 2)
    for number in (1, 2):
        (tmp_path / f"v{number}" / TEMPLATE).write_text(str(number))
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
    reshard.apply_delta(tmp_path / "chain", tmp_path / "before", version=1)
    at, outcomes, is_done = 0, set[str](), False
    while not is_done:
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / f"served{at}"))
        is_done = not is_killed(at, tmp_path / "chain", folder, monkeypatch)
        at += not is_done
        path = folder / ".cache/reshard" / lost
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        left = {path.name for path in folder.iterdir()}
        try:
            reshard.apply_delta(tmp_path / "chain", folder, version=2)
            outcomes.add("applied")
            assert weights_in(folder) == states[1]
        except UserError as error:
            outcomes.add(error.code)
            assert {path.name for path in folder.iterdir()} == left
    assert outcomes == {"applied", "output.bad-switch"}


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_files_that_links_lead_to_stay_as_they_are(num_shards: int, link: Any, tmp_path: Path) -> None:
    """As in the cache of the hub, whose snapshots are links to files that others read."""
    states = write_states(tmp_path, 3, num_shards=num_shards)
    snapshot = tmp_path / "models--a--b/snapshots/main"
    blobs = Path(shutil.copytree(tmp_path / "v1", tmp_path / "models--a--b/blobs"))
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        blob.chmod(0o444)
        link(blob, snapshot / blob.name)
    (tmp_path / "v3" / CONFIG).write_text("{}")
    for number in (1, 2, 3):
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
    before = {blob.name: (blob.read_bytes(), blob.stat().st_mtime_ns) for blob in blobs.iterdir()}
    for number in (2, 3, 1):
        reshard.apply_delta(tmp_path / "chain", snapshot, version=number)
        assert weights_in(snapshot) == states[number - 1]
        assert auxiliary_in(snapshot) == auxiliary_in(tmp_path / f"v{number}")
        assert {blob.name: (blob.read_bytes(), blob.stat().st_mtime_ns) for blob in blobs.iterdir()} == before
