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


def test_forced_pack_keeps_what_it_did_not_write(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(source, out, "pp=4").code == 0
    out.chmod(0o2750)
    sentinels = plant_in(out, beside_ours="stage-003")
    packed = pack(source, out, "pp=2", "--force")
    assert packed.code == 0, packed.err
    sentinels.check()
    assert reshard("verify", out).code == 0
    assert sorted(path.name for path in out.glob("stage-*")) == ["stage-001", "stage-003"]
    assert len(list(out.glob("model-*"))) == 2
    assert [path.name for path in (out / "stage-003").iterdir()] == ["notes.txt"]
    assert out.stat().st_mode & 0o7777 == 0o2750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_others_file_where_a_new_one_would_be_stops_a_pack_before_it_begins(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(source, out, "pp=1").code == 0
    for name in ("model-00002-of-00004.safetensors", "stage-003"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        before = files_in(out)
        assert refusal(pack(source, out, "pp=4", "--force", "--json")) == (3, "output.foreign-file", str(out / name))
        assert files_in(out) == before
        (out / name).unlink()


def test_others_folder_behind_a_link_is_not_emptied(source: Path, tmp_path: Path) -> None:
    """A manifest whose shards are behind a link: they are in a folder that is not the checkpoint's."""
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    assert pack(source, out, "pp=2").code == 0
    shutil.move(out / "stage-001", theirs)
    (out / "stage-001").symlink_to(theirs)
    before = files_in(theirs)
    assert refusal(pack(source, out, "pp=4", "--force", "--json"))[:2] == (3, "output.not-ours")
    assert files_in(theirs) == before


def test_forced_commit_of_parts_keeps_what_it_did_not_write(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(source, out, "pp=4").code == 0
    sentinels = plant_in(out, beside_ours="stage-003")
    for part in ("1/2", "2/2"):
        assert pack(source, out, "pp=2", "--part", part, "--force").code == 0
        sentinels.check()
    assert reshard("commit", out, "--force").code == 0
    sentinels.check()
    assert reshard("verify", out).code == 0
    assert [path.name for path in (out / "stage-003").iterdir()] == ["notes.txt"]


def test_forced_export_keeps_what_it_did_not_write(source: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert pack(source, packed, "pp=2").code == 0
    assert export(packed, out).code == 0
    assert files_in(out) == files_in(source)
    sentinels = plant_in(out)
    for _ in range(2):
        (out / "config.json").write_text("{}")
        exported = export(packed, out, "--force")
        assert exported.code == 0, exported.err
        sentinels.check()
        assert files_in(source).items() <= files_in(out).items()


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


def test_bundles_are_not_replaced_by_an_export(source: Path, tmp_path: Path) -> None:
    packed, other = tmp_path / "packed", tmp_path / "other"
    assert (pack(source, packed, "pp=2").code, pack(source, other, "pp=4").code) == (0, 0)
    assert refusal(export(packed, other, "--force", "--json"))[:2] == (3, "output.not-ours")
    assert reshard("verify", other).code == 0
