"""Addresses of stores: what is local, what is on the hub, what is neither."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from stores.address import HubAddress, is_inside, parse_hub_address, place_of
from stores.hub.store import HubFolder
from stores.local import LocalFolder
from stores.open import open_manifest, open_store
from tests.builders import files_in, llama_config, pack, refusal, reshard, write_model
from tests.builders import reshard as command
from tests.refusals import refused
from tests.servers.hub import MEMBER, Hub


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf://org/name", HubAddress(repo="org/name")),
        ("hf://org/name@main", HubAddress(repo="org/name", revision="main")),
        ("hf://gpt2", HubAddress(repo="gpt2")),
        ("org/name", HubAddress(repo="org/name", is_bare=True)),
        ("org/na-me_1.5B@refs/pr/1", HubAddress(repo="org/na-me_1.5B", revision="refs/pr/1", is_bare=True)),
        ("name", None),
        ("./org/name", None),
        ("../name", None),
        ("/org/name", None),
        ("~/name", None),
        ("a/b/c", None),
        ("org/name@", None),
        ("", None),
    ],
)
def test_address_is_read_as_its_user_means_it(text: str, address: HubAddress | None) -> None:
    assert parse_hub_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf:///name", "hf://a/b/c", "hf://org/name@", "hf://org/name@a\nb", "hf://../x", "hf://datasets/a/b"],
)
def test_hub_scheme_with_something_else_behind_it_is_refused(text: str) -> None:
    assert refused(lambda: parse_hub_address(text)) == ("store.malformed-address", text)


@pytest.mark.parametrize(
    "same",
    [
        ("s3://b/m", "S3://b/m/", "s3://b//m", "s3a://b/m", "s3:///b/m"),
        ("s3://b", "s3://b/", "s3a://b//"),
        ("gs://b/m", "gcs://b/m/"),
        ("az://c/m", "abfs://c/m", "abfss://c@account.dfs.core.windows.net/m"),
        ("hf://org/name", "hf://org/name@refs/pr/1"),
        ("/a/m", "/a/./b/../m/", "file:///a/m", "FILE:///a//m/"),
    ],
)
def test_all_addresses_of_a_place_have_one_form(same: tuple[str, ...]) -> None:
    assert {place_of(address) for address in same} == {same[0]}


def test_links_and_relative_paths_have_the_form_of_what_they_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path / "model")
    for address in (Path("."), tmp_path / "link", f"file://{tmp_path}/link", "file://../link", "../link/gone/.."):
        assert place_of(address) == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("place", "folder", "inside"),
    [
        ("s3://b/m/a", "s3://b/m", True),
        ("s3://b/m", "s3://b", True),
        ("s3://b/m2", "s3://b/m", False),
        ("s3://b/m", "s3://b/m", False),
        ("gs://b/m/a", "s3://b/m", False),
        ("/a/b", "/", True),
        ("/", "/", False),
    ],
)
def test_place_is_inside_a_folder_by_whole_parts(place: str, folder: str, inside: bool) -> None:
    assert is_inside(place, folder) is inside


@pytest.mark.parametrize(("target", "is_listed"), [("runs/one", True), (".cache", False), ("..", False)])
def test_link_to_a_folder_is_passed_over_if_what_it_points_to_is_listed(
    tmp_path: Path, target: str, is_listed: bool
) -> None:
    for name in ("model/runs/one", "model/.cache"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model" / "runs" / "one" / "run.json").touch()
    (tmp_path / "model" / "latest").symlink_to(target)
    folder = LocalFolder(tmp_path / "model")
    if is_listed:
        assert folder.names() == ("runs/one/run.json",)
    else:
        assert refused(folder.names)[0] == "source.linked-folder"


def test_folder_of_the_file_system_that_this_user_may_not_list_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the root of an ext4 volume that a container mounts; root may list all."""
    closed, scandir = tmp_path / "lost+found", os.scandir
    closed.mkdir()
    (tmp_path / "config.json").touch()

    def list_folder(path: str) -> Any:
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", list_folder)
    assert LocalFolder(tmp_path).names() == ("config.json",)


def test_linked_manifest_is_in_the_folder_of_its_target(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    packed = pack(tmp_path / "source", tmp_path / "packed")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "manifest.json").symlink_to(packed / "manifest.json")
    for address in (tmp_path / "linked", tmp_path / "linked" / "manifest.json"):
        assert open_manifest(address).root == packed


MISSING = "source.not-a-folder"


@pytest.fixture
def here(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a step and a Megatron root without iterations; the hub has repositories of those names."""
    source = tmp_path / "source"
    write_model(source)
    for name in ("ckpt/step-000009", "ml/iter_0000004", "ml/release", "free/name"):
        hub.push(name, files_in(source))
    work = tmp_path / "work"
    pack(source, work / "ckpt" / "step-000001", "pp=1")
    (work / "ml").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    return work


@pytest.mark.parametrize("iteration", ["4", "release"])
@pytest.mark.parametrize("address", ["ml", "./ml", "ml/"])
def test_iteration_that_a_tracker_names_is_local(here: Path, hub: Hub, address: str, iteration: str) -> None:
    (here / "ml" / "latest_checkpointed_iteration.txt").write_text(iteration)
    for verb in (("pack", address, "--layout", "pp=1", "--out", "out"), ("check", address), ("inspect", address)):
        code, error, where = refusal(*verb).found
        assert (code, error) == (3, MISSING), verb
        assert where == ("ml/release" if iteration == "release" else "ml/iter_0000004")
    assert (hub.take_requests(), (here / "out").exists()) == ([], False)


@pytest.mark.parametrize("step", ["ckpt/step-000009", "ckpt/step-000009@main", "dangling/name"])
@pytest.mark.parametrize(
    "verb",
    [
        ("pack", "STEP", "--layout", "pp=1", "--out", "out"),
        ("plan", "STEP", "--layout", "pp=1"),
        ("diff", "ckpt/step-000001", "STEP"),
        ("diff", "STEP", "ckpt/step-000001"),
        ("check", "STEP"),
        ("inspect", "STEP"),
        ("verify", "ckpt/step-000001", "--against", "STEP"),
    ],
)
def test_missing_path_in_a_folder_of_this_machine_is_local(
    here: Path, hub: Hub, verb: tuple[str, ...], step: str
) -> None:
    (here / "dangling").symlink_to("nowhere")
    assert refusal(*(step if word == "STEP" else word for word in verb)).found == (3, MISSING, step)
    assert (hub.take_requests(), (here / "out").exists()) == ([], False)


def test_repository_is_meant_by_its_scheme_or_a_name_that_is_free_here(here: Path, hub: Hub) -> None:
    assert isinstance(open_store("hf://ckpt/step-000009"), HubFolder)
    assert isinstance(open_store("free/name"), HubFolder)
    (here / "free").write_text("a file")
    assert refused(lambda: open_store("free/name")) == (MISSING, "free/name")


def test_check_reads_a_packed_repository_from_the_cache_it_opened(
    here: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("org/packed", files_in(here / "ckpt" / "step-000001"))
    snapshot_download("org/packed")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ended = reshard("check", "org/packed", "--against", "ckpt/step-000001")
    assert ended.code == 0, ended.err


# The door to a manifest: links to its folder are followed once, whoever asks.


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("door")
    write_model(folder / "model", llama_config())
    assert command("pack", folder / "model", "--layout", "pp=2", "--out", folder / "packed").code == 0
    return folder / "packed"


def test_link_that_moves_after_a_manifest_was_read_mixes_no_two_checkpoints(packed: Path, tmp_path: Path) -> None:
    other, latest = shutil.copytree(packed, tmp_path / "other"), tmp_path / "latest"
    latest.symlink_to(packed)
    read = open_manifest(latest)
    os.replace(_link(tmp_path / "new", other), latest)
    assert (read.root, read.parent.location) == (packed, str(packed))
    assert str(read) == str(packed / "manifest.json")


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path
