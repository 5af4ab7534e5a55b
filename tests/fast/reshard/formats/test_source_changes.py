"""A source on this machine that is written to while it is read makes no output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manifests.errors import InputError
from reshard.copy.engine import WriteOptions
from reshard.estimate.assumptions import Assumptions
from reshard.formats.huggingface.write import export
from reshard.formats.manifest.read import open_packed
from reshard.formats.open import open_source
from reshard.formats.table import ExportOptions
from reshard.packing.bundles import write_bundles
from reshard.packing.options import PackOptions, parse_part
from reshard.packing.parts import write_part
from reshard.packing.plan import LayoutRequest, lay_out
from reshard.plans.pack_plan import PackPlan
from reshard.tensors.checkpoint import Checkpoint
from reshard.transforms.conversion import cast_checkpoint
from stores.bundles import Bundles
from stores.open import open_manifest
from tests.builders import leftovers, llama_config, reshard, write_model

Change = Callable[[Path], None]


def rewrite(path: Path) -> None:
    """Write other bytes of the same length over a file's last ones."""
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x12\x34\x56\x78")


def rewrite_in_secret(path: Path) -> None:
    """Do so and set its time back, as rsync --inplace -t does."""
    found = path.stat()
    rewrite(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def put_another_there(path: Path) -> None:
    """Rename another file over it, of the same size and time."""
    found, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    rewrite(other)
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    os.replace(other, path)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


CHANGES = (rewrite, rewrite_in_secret, put_another_there, cut_short)
by_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a model of 12 MB in two shards: many blocks to read of each."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096}
    write_model(tmp_path / "source", llama_config(**sizes), num_shards=2)
    return tmp_path / "source"


def after_a_block(act: Callable[[], object]) -> WriteOptions:
    """Return options of a copy that does something else as soon as one block of it is read."""
    done: list[int] = []

    def progress(nbytes: int) -> None:
        done.append(nbytes)
        if len(done) == 1:
            act()

    return WriteOptions(io="buffered", sync=False, progress=progress)


def assert_refused(run: Callable[[], object], changed: Path, out: Path) -> None:
    with pytest.raises(InputError) as error:
        run()
    assert (error.value.code, error.value.where) == ("source.changed", str(changed))
    assert [name for name in leftovers(out) if not name.endswith((".partial", ".parts"))] == []


def laid_out(checkpoint: Checkpoint) -> PackPlan:
    return lay_out("model", checkpoint, LayoutRequest(spec="pp=2"), Assumptions()).plan


@by_change
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("part", [None, "1/1"])
def test_pack_of_a_source_that_changes_is_refused(
    part: str | None, name: str, change: Change, source: Path, tmp_path: Path
) -> None:
    changed, out, checkpoint = source / name, tmp_path / "out", open_source(str(source))
    options = PackOptions(out=out, write=after_a_block(lambda: change(changed)))
    if part is None:
        assert_refused(lambda: write_bundles(checkpoint, laid_out(checkpoint), options), changed, out)
    else:
        assert_refused(lambda: write_part(checkpoint, laid_out(checkpoint), parse_part(part), options), changed, out)
        assert reshard("commit", out).code == 3


@by_change
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
@pytest.mark.parametrize("is_virtual", [False, True])
def test_pack_of_a_source_that_changed_since_its_headers_were_read_is_refused(
    is_virtual: bool, name: str, change: Change, source: Path, tmp_path: Path
) -> None:
    changed, out, checkpoint = source / name, tmp_path / "out", open_source(str(source))
    change(changed)
    options = PackOptions(out=out, virtual=is_virtual)
    assert_refused(lambda: write_bundles(checkpoint, laid_out(checkpoint), options), changed, out)


@by_change
@pytest.mark.parametrize("is_virtual", [False, True])
def test_export_and_reshard_of_bundles_that_change_are_refused(
    is_virtual: bool, change: Change, source: Path, tmp_path: Path
) -> None:
    flags = ("--virtual",) if is_virtual else ()
    assert reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed", *flags).code == 0
    original = source / "model-00002-of-00002.safetensors"
    changed = original if is_virtual else tmp_path / "packed/model-00002-of-00002.safetensors"
    out, before = tmp_path / "out", changed.read_bytes()
    for convert in (False, True):
        checkpoint = open_packed(open_manifest(tmp_path / "packed"))
        exported = ExportOptions(to="hf", write=after_a_block(lambda: change(changed)))
        if convert:  # which reads tensors as files that are made of others
            checkpoint = cast_checkpoint(checkpoint, "fp32")
        assert_refused(lambda: export(checkpoint, out, exported), changed, out)  # noqa: B023
        restore(changed, before, tmp_path / "packed", source)
    checkpoint, options = open_packed(open_manifest(tmp_path / "packed")), after_a_block(lambda: change(changed))
    assert_refused(
        lambda: write_bundles(checkpoint, laid_out(checkpoint), PackOptions(out=out, write=options)), changed, out
    )


def test_verify_and_load_of_originals_that_change_are_refused(source: Path, tmp_path: Path) -> None:
    packed, changed = tmp_path / "packed", source / "model-00002-of-00002.safetensors"
    assert reshard("pack", source, "--layout", "pp=2", "--virtual", "--out", packed).code == 0
    bundles = Bundles(open_manifest(packed).manifest, packed)
    tensors = [tensor for stage in bundles.manifest.stages for tensor in bundles.tensors_on(stage)]
    tensor = next(tensor for tensor in tensors if str(tensor.file) == str(changed))
    reader = tensor.file.open(((tensor.begin, tensor.end),))
    buffer = memoryview(bytearray(tensor.nbytes))
    reader.read_into(buffer, tensor.begin)
    rewrite_in_secret(changed)
    for read in (lambda: reader.read_into(buffer, tensor.begin), lambda: tensor.file.open(())):
        with pytest.raises(InputError) as error:
            read()
        assert (error.value.code, error.value.where) == ("source.changed", str(changed))
    reader.close()


def test_source_may_be_read_by_others_meanwhile(source: Path, tmp_path: Path) -> None:
    checkpoint = open_source(str(source))
    done = after_a_block(lambda: [path.read_bytes() for path in source.iterdir()])
    write_bundles(checkpoint, laid_out(checkpoint), PackOptions(out=tmp_path / "out", write=done))
    assert reshard("verify", tmp_path / "out", "--against", source).code == 0


@pytest.mark.parametrize("is_linked", [False, True])
def test_links_that_a_run_makes_and_prunes_meanwhile_do_not_change_a_shard(
    is_linked: bool, source: Path, tmp_path: Path
) -> None:
    shard, link = source / "model-00002-of-00002.safetensors", tmp_path / "link"
    if is_linked:
        link.hardlink_to(shard)
    act = after_a_block(link.unlink if is_linked else lambda: link.hardlink_to(shard))
    checkpoint = open_source(str(source))
    write_bundles(checkpoint, laid_out(checkpoint), PackOptions(out=tmp_path / "out", write=act))
    assert reshard("verify", tmp_path / "out", "--against", source).code == 0


def restore(changed: Path, before: bytes, packed: Path, source: Path) -> None:
    """Put a file's bytes back, and pack it again where it is pinned."""
    changed.write_bytes(before)
    if changed.is_relative_to(source):
        assert reshard("pack", source, "--layout", "pp=2", "--virtual", "--out", packed, "--force").code == 0
