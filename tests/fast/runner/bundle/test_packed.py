"""A disk that fails is not taken for one on which a file is missing, in any version of Python."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from manifests.errors import OutputError, UnreachableError
from manifests.store import open_shard
from manifests.versions import folder_of
from runner.bundle.packed import open_packed, opened
from runner.data.tokenizer import special_id
from stores.folders.owned import check_ours, write_record
from stores.local import LocalFolder
from stores.open import open_manifest
from stores.versions import numbers_in
from tests.builders import llama_config, pack, random_tensors, refusal, weights_path, write_model


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_model(folder / "model", llama_config())
    return pack(folder / "model", folder / "out", "pp=1")


@pytest.fixture
def python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make paths answer as from Python 3.14 on, where these methods are the functions of os.path."""
    functions = {
        "exists": os.path.exists,
        "is_file": os.path.isfile,
        "is_dir": os.path.isdir,
        "is_symlink": os.path.islink,
    }
    for name, function in functions.items():
        monkeypatch.setattr(Path, name, lambda path, function=function: function(path))


def fail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk fail where it is asked for a file or folder, though not for those below."""

    def failing(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def status(name: str | Path, **options: object) -> os.stat_result:
            if str(name) == str(path):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(name))
            return ask(name, **options)

        return status

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


@pytest.mark.usefixtures("python_3_14")
@pytest.mark.parametrize("name", ["", "manifest.json", "config.json", weights_path(0, 1)])
def test_file_that_a_failing_disk_does_not_show_is_not_missing(
    name: str, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(packed / name, monkeypatch)
    with pytest.raises(UnreachableError) as error:
        read_all(packed)
    assert (error.value.code, error.value.where) == ("store.unreadable", str(packed / name))


def read_all(packed: Path) -> None:
    read = open_manifest(packed)
    for shard in read.manifest.shards:
        open_shard(packed, shard)
    open_packed(read)


def test_tied_copies_that_differ_are_two_weights(tmp_path: Path) -> None:
    """Modules are built of the config, which must not tie them."""
    config = llama_config(tie_word_embeddings=True)
    write_model(tmp_path / "model", config, random_tensors(llama_config()))
    found = open_packed(open_manifest(pack(tmp_path / "model", tmp_path / "out")))
    assert (found.shape.ties, found.config) == ((), {**config, "tie_word_embeddings": False})


@pytest.mark.usefixtures("python_3_14")
def test_record_of_whose_a_folder_is_that_a_failing_disk_does_not_show_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path, ["shard"])
    (tmp_path / "shard").touch()
    fail(tmp_path / ".journal", monkeypatch)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        check_ours(tmp_path, lambda _: None)


@pytest.mark.usefixtures("python_3_14")
def test_version_of_a_chain_that_a_failing_disk_does_not_show_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receivers would get an older one."""
    indexes = [tmp_path / folder_of(number) / "model.safetensors.index.json" for number in (1, 2)]
    for index in indexes:
        index.parent.mkdir()
        index.touch()
    assert numbers_in(LocalFolder(tmp_path)) == (1, 2)
    fail(indexes[1], monkeypatch)
    with pytest.raises(UnreachableError) as error:
        numbers_in(LocalFolder(tmp_path))
    assert (error.value.code, error.value.where) == ("store.unreadable", str(indexes[1]))


@pytest.mark.usefixtures("python_3_14")
@pytest.mark.parametrize("name", ["org/name/manifest.json", "org/name", "org"])
def test_folder_that_a_failing_disk_does_not_show_is_no_repository_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See Note [Kind of an address]."""
    monkeypatch.chdir(tmp_path)
    fail(Path(name), monkeypatch)
    found = refusal("pack", "org/name", "--layout", "pp=1", "--out", "out").found
    assert found == (3, "store.unreadable", name)


@pytest.mark.usefixtures("python_3_14")
def test_special_token_in_a_file_that_a_failing_disk_does_not_show_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tokenizer = tmp_path / "config.json", Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    config.write_text('{"eos_token_id": 2}')
    assert special_id(tmp_path, tokenizer, "eos") == 2
    fail(config, monkeypatch)
    with pytest.raises(UnreachableError) as error:
        special_id(tmp_path, tokenizer, "eos")
    assert (error.value.code, error.value.where) == ("store.unreadable", str(config))


def test_manifest_in_a_store_is_refused_where_no_temporary_folder_can_be_made(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(OutputError) as error, opened(f"file://{packed}", is_staged=True):
        pass
    assert (error.value.code, error.value.where) == ("output.unwritable", "TMPDIR")
