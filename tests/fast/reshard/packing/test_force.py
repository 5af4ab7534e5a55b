"""`--force` removes what reshard wrote, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.builders import Ended, files_in, llama_config, reshard, write_model
from tests.sentinels import plant_in


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "source", llama_config(num_hidden_layers=4, tie_word_embeddings=True), num_shards=2)
    return tmp_path / "source"


def pack(source: Path, out: Path, layout: str, *flags: object) -> Ended:
    return reshard("pack", source, "--layout", layout, "--out", out, *flags)


def export(packed: Path, out: Path, *flags: str) -> Ended:
    return reshard("export", packed, "--to", "hf", "--out", out, *flags)


def refusal(ended: Ended) -> tuple[int, str, str]:
    error = json.loads(ended.out)["error"]
    return ended.code, error["code"], error["where"]


def test_folder_with_a_manifest_of_another_program_is_not_replaced(source: Path, tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "src").mkdir(parents=True)
    (app / "manifest.json").write_text('{"name":"web app"}')
    (app / "src/app.js").touch()
    (app / "index.html").touch()
    before = files_in(app)
    assert refusal(pack(source, app, "pp=4", "--force", "--json")) == (3, "output.not-ours", str(app))
    assert files_in(app) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app", "source"]


@pytest.mark.parametrize(
    "name", ["notes.txt", "stage-003", "model-00002-of-00004.safetensors", ".journal", ".git/HEAD"]
)
def test_folder_with_a_file_of_others_is_not_replaced(name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(source, out, "pp=1").code == 0
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    before = files_in(tmp_path)
    for flags in ((), ("--part", "1/2")):
        assert refusal(pack(source, out, "pp=4", "--force", "--json", *flags)) == (3, "output.foreign-file", str(out))
        assert files_in(tmp_path) == before


def test_the_refusal_lists_files_links_and_folders_and_changes_none(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(source, out, "pp=2").code == 0
    (out / "a").symlink_to("nothing")
    (out / "b").mkdir()
    sentinels = plant_in(out, beside_ours="stage-001")
    error = json.loads(pack(source, out, "pp=4", "--force", "--json").out)["error"]
    assert error["problem"].endswith(": .git, a, b, dangling, link and 9 more"), error
    sentinels.check()
    assert reshard("verify", out).code == 0


def test_others_folder_behind_a_link_is_not_emptied(source: Path, tmp_path: Path) -> None:
    """A manifest whose shards are behind a link: they are in a folder that is not the checkpoint's."""
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    assert pack(source, out, "pp=2").code == 0
    shutil.move(out / "stage-001", theirs)
    (out / "stage-001").symlink_to(theirs)
    before = files_in(theirs)
    assert refusal(pack(source, out, "pp=4", "--force", "--json"))[:2] == (3, "output.not-ours")
    assert files_in(theirs) == before


def test_forced_commit_of_parts_does_not_replace_a_folder_with_files_of_others(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(source, out, "pp=4").code == 0
    for part in ("1/2", "2/2"):
        assert pack(source, out, "pp=2", "--part", part, "--force").code == 0
    (out / "notes.txt").write_text("mine")
    before = files_in(tmp_path)
    assert refusal(reshard("commit", out, "--force", "--json")) == (3, "output.foreign-file", str(out))
    assert files_in(tmp_path) == before
    (out / "notes.txt").unlink()
    assert reshard("commit", out, "--force").code == 0
    assert len(list(out.glob("model-*"))) == 2


def test_forced_export_does_not_replace_a_folder_with_files_of_others(source: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert pack(source, packed, "pp=2").code == 0
    assert export(packed, out).code == 0
    (out / "config.json").write_text("{}")
    sentinels = plant_in(out)
    before = files_in(out)
    assert refusal(export(packed, out, "--force", "--json")) == (3, "output.foreign-file", str(out))
    sentinels.check()
    assert files_in(out) == before
    shutil.rmtree(out)
    assert export(packed, out).code == 0
    (out / "config.json").write_text("{}")
    for _ in range(2):
        assert export(packed, out, "--force").code == 0
        assert files_in(out) == files_in(source)


@pytest.mark.parametrize("change", ["model of others", "trained since", "made again", "record of others"])
def test_export_replaces_no_model_that_it_did_not_write(change: str, source: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert pack(source, packed, "pp=2").code == 0
    if change == "model of others":
        write_model(out, num_shards=2)
    else:
        assert export(packed, out).code == 0
    shard = next(out.glob("*.safetensors"))
    if change == "trained since":
        shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
        os.utime(shard, (0, 0))
    elif change == "made again":  # the record is of a folder that is gone
        shutil.rmtree(out)
        write_model(out, num_shards=2)
    elif change == "record of others":
        (tmp_path / ".out.exported.json").write_text('{"format": "reshard-export", "version": 1, "exports": [3, {}]}')
    before = files_in(out)
    assert refusal(export(packed, out, "--force", "--json")) == (3, "output.not-ours", str(out))
    assert files_in(out) == before


def test_a_signature_and_digests_of_ours_are_replaced_with_their_manifest(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out, "pp=2")
    before = files_in(out)
    for name in ("manifest.sig", "digests.json"):
        (out / name).write_text("{}")
    pack(source, out, "pp=2", "--force")
    assert files_in(out) == before
