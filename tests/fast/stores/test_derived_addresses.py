"""An address keeps its kind: what is derived from a local one is never asked for on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from stores.hub.store import HubFolder
from stores.open import open_store
from tests.builders import files_in, pack, refusal, reshard, write_model
from tests.refusals import refused
from tests.servers.hub import MEMBER, Hub

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
