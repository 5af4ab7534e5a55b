"""Hostile checkpoints of torch.save: in each container that is read, nothing runs, is written or fills the memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from manifests.errors import SourceError
from reshard.archives.dcp import DcpValue, read_values
from reshard.archives.pickled import BadPickleError, Record, read_pickle
from reshard.archives.tensors import VALUES, ArchiveDtype, read_object, read_value
from stores.local import LocalFile, LocalFolder
from tests.builders import llama_config, llama_shapes, reshard
from tests.fast.reshard.formats.dcp.test_dcp_source import huggingface_state, save, torchtitan_state
from tests.fast.reshard.formats.megatron.test_megatron import move_common

DATA = Path(__file__).resolve().parents[3] / "data"
NORM = "model.norm.weight"
MOST_NBYTES = 64 << 20  # of memory, whatever a file claims to have; some of it is imports
BOMB_NBYTES = 128 << 20


class Payload:
    """Would create a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def bin_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config()))
    torch.save(weights(), folder / "pytorch_model.bin")
    return folder


def dcp_folder(folder: Path) -> Path:
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without process groups
        dcp.save(weights(), checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(llama_config()))
    return folder


def weights() -> dict[str, Any]:
    return {name: torch.ones(shape) for name, shape in llama_shapes(llama_config()).items()}


def golden(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copytree(DATA / name, folder))


def without_common_pt(folder: Path) -> Path:
    move_common(golden("megatron/qwen3")(folder))
    return folder


@dataclass(frozen=True)
class Container:
    """A folder, and the file in it that is replaced: an archive, or of DCP the archive of one chunk."""

    make: Callable[[Path], Path]
    path: str | None
    chunk: str = ""

    def replace_archive(self, folder: Path, change: Callable[[bytes], bytes]) -> None:
        if self.path is not None:
            file = folder / self.path
            file.write_bytes(change(file.read_bytes()))
            return

        def move(metadata: Metadata) -> None:
            """Write the chunk anew, after all others."""
            (index,) = [index for index in metadata.storage_data if index.fqn == self.chunk][:1]
            info = metadata.storage_data[index]
            file = folder / info.relative_path
            whole = file.read_bytes()
            new = change(whole[info.offset : info.offset + info.length])
            file.write_bytes(whole + new)
            metadata.storage_data[index] = replace(info, offset=len(whole), length=len(new))

        change_metadata(folder, move)


CONTAINERS = {
    "bin": Container(bin_folder, "pytorch_model.bin"),
    "dcp": Container(dcp_folder, None, NORM),
    "torch_dist": Container(golden("megatron/qwen3"), None, "decoder.final_layernorm.weight"),
    "common.pt": Container(golden("megatron/qwen3"), "common.pt"),
    "common_state": Container(without_common_pt, None, "common_state/shard_0_1"),
    "layers": Container(golden("golden/deepspeed/llama/"), "global_step2/layer_01-model_00-model_states.pt"),
    "universal": Container(
        golden("golden/deepspeed/gpt2-universal"),
        "global_step2_universal/zero/tied_modules.embed.wte.weight/fp32.pt",
    ),
    "universal's options": Container(
        golden("golden/deepspeed/gpt2-universal"), "global_step2_universal/mp_rank_00_model_states.pt"
    ),
}


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def with_pickle(whole: bytes, data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive with another pickle, compressed if asked."""
    new = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(new, "w") as archive:
        for name in old.namelist():
            is_pickle = name.endswith("/data.pkl")
            archive.writestr(name, data if is_pickle else old.read(name), method if is_pickle else zipfile.ZIP_STORED)
    return new.getvalue()


def with_directory(whole: bytes, name: bytes, at: int, value: bytes) -> bytes:
    """Return an archive whose directory says something else of an entry; `at` is the field's place in the record."""
    begin = whole.index(name, whole.index(b"PK\x01\x02"))
    record = whole.rindex(b"PK\x01\x02", 0, begin)
    return whole[: record + at] + value + whole[record + at + len(value) :]


def offset_of(whole: bytes, name: bytes) -> bytes:
    record = whole.rindex(b"PK\x01\x02", 0, whole.index(name, whole.index(b"PK\x01\x02")))
    return whole[record + 42 : record + 46]


HUGE = b"\xf0\xff\xff\xff"
PICKLES: dict[str, bytes] = {
    "a memo of 2^31 places": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a terabyte from bytearray": b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    "a string that is longer than the file": b"\x80\x02X\xff\xff\xff\x7f",
    "tuples in tuples": b"\x80\x02})" + b"\x85" * 3_000_000 + b"Ns.",
    "tuples that repeat each other": b"\x80\x04)\x94"
    + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(40))
    + b"}h(Ns.",
}
ARCHIVES: dict[str, Callable[[bytes], bytes]] = {
    "declared bomb": lambda whole: with_directory(whole, b"/data.pkl", 20, HUGE * 2),
    "deflated bomb": lambda whole: with_pickle(whole, bytes(BOMB_NBYTES), zipfile.ZIP_DEFLATED),
    "offset beyond the file": lambda whole: with_directory(whole, b"/data.pkl", 42, HUGE),
    "entries on top of each other": lambda whole: with_directory(
        whole, b"/version", 42, offset_of(whole, b"/data.pkl")
    ),
}  # fmt: skip


def of_each(kinds: dict[str, Any], most: int) -> list[tuple[str, str]]:
    """Return all kinds for one container, and the first `most` for the others, which have the same reader."""
    return [(name, kind) for name in CONTAINERS for kind in list(kinds)[: None if name == "dcp" else most]]


def code_of(folder: Path, *flags: str) -> str:
    """Pack, check and inspect the folder; return the code with which the first refuses it, in bounded memory."""
    place = folder.parent
    before = sorted(place.iterdir())
    tracemalloc.start()
    try:
        exit_code, code, _ = reshard(
            "pack", folder, "--layout", "pp=1", "--out", place / "out", "--json", *flags
        ).refusal
        checked, inspected = reshard("check", folder, "--json"), reshard("inspect", folder, "--json")
        assert tracemalloc.get_traced_memory()[1] < MOST_NBYTES
    finally:
        tracemalloc.stop()
    assert exit_code == 3
    assert checked.code in (0, 3, 4)
    assert inspected.code in (0, 3)
    assert sorted(place.iterdir()) == before, "something was created"
    return str(code)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with each container as it was saved."""
    place = tmp_path_factory.mktemp("containers")
    for name, container in CONTAINERS.items():
        container.make(place / name)
    return place


def copied(good: Path, name: str, place: Path) -> Path:
    return Path(shutil.copytree(good / name, place / "source"))


# What the file is says more than that its pickle is not plain.
OF_CONTAINER = {
    "common.pt": "source.no-megatron-arguments",
    "common_state": "source.no-megatron-arguments",
    "universal": "source.bad-universal",
    "universal's options": "source.bad-optimizer-state",
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_payload_does_not_run(name: str, good: Path, tmp_path: Path) -> None:
    source = copied(good, name, tmp_path)
    data = pickle.dumps(Payload(tmp_path / "ran"), 2)
    CONTAINERS[name].replace_archive(source, lambda whole: with_pickle(whole, data))
    assert code_of(source) == OF_CONTAINER.get(name, "source.bad-pickle")
    pickle.loads(data)
    assert (tmp_path / "ran").exists(), "the payload would have run"


@pytest.mark.parametrize(("name", "kind"), of_each(PICKLES, 1))
def test_pickles_that_allocate_are_refused(name: str, kind: str, good: Path, tmp_path: Path) -> None:
    source = copied(good, name, tmp_path)
    CONTAINERS[name].replace_archive(source, lambda whole: with_pickle(whole, PICKLES[kind]))
    assert code_of(source) == "source.bad-pickle"


@pytest.mark.parametrize(("name", "kind"), of_each(ARCHIVES, 1))
def test_archives_that_lie_are_refused(name: str, kind: str, good: Path, tmp_path: Path) -> None:
    source = copied(good, name, tmp_path)
    CONTAINERS[name].replace_archive(source, ARCHIVES[kind])
    assert code_of(source) == "source.bad-archive"


@pytest.mark.parametrize("kind", [*PICKLES, "payload"])
@pytest.mark.parametrize("name", ["dcp", "torch_dist"])
def test_hostile_metadata_is_refused(name: str, kind: str, good: Path, tmp_path: Path) -> None:
    source = copied(good, name, tmp_path)
    data = PICKLES.get(kind) or pickle.dumps(Payload(tmp_path / "ran"), 4)
    (source / ".metadata").write_bytes(data)
    assert code_of(source) == "source.bad-dcp-metadata"


def entry_of(metadata: Metadata, fqn: str) -> Any:
    return metadata.state_dict_metadata[fqn]


def change_place(**fields: Any) -> Callable[[Metadata, str], object]:
    def change(metadata: Metadata, fqn: str) -> None:
        (index,) = [index for index in metadata.storage_data if index.fqn == fqn][:1]
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return change


def overlap(metadata: Metadata, fqn: str) -> None:
    """Let a tensor have its only chunk, and one more that is part of it, of the same bytes."""
    (chunk,) = entry_of(metadata, fqn).chunks
    (index,) = [index for index in metadata.storage_data if index.fqn == fqn]
    second = torch.Size([1])
    entry_of(metadata, fqn).chunks.append(ChunkStorageMetadata(second, chunk.sizes))
    metadata.storage_data[replace(index, offset=second, index=1)] = metadata.storage_data[index]


def share_chunks(metadata: Metadata, fqn: str) -> None:
    """Let another tensor have the same list of chunks: a thousand tensors with a list of a thousand are a million."""
    other = next(
        name for name, entry in metadata.state_dict_metadata.items() if name != fqn and hasattr(entry, "chunks")
    )
    entry_of(metadata, other).chunks = entry_of(metadata, fqn).chunks


def place_in_lists(metadata: Metadata, fqn: str) -> None:
    metadata.planner_data = {fqn: ([[]],)}  # type: ignore[attr-defined]


def enlarge(metadata: Metadata, fqn: str) -> None:
    """Claim a tensor of terabytes, of which there is one chunk."""
    entry_of(metadata, fqn).size = torch.Size([1 << 42])


def enlarge_chunk(metadata: Metadata, fqn: str) -> None:
    enlarge(metadata, fqn)
    entry_of(metadata, fqn).chunks[0] = ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 42]))


def move_chunk(metadata: Metadata, fqn: str) -> None:
    """Let the only chunk begin at row 1: it has as many elements as the tensor, and ends beyond it."""
    (chunk,) = entry_of(metadata, fqn).chunks
    (index,) = [index for index in metadata.storage_data if index.fqn == fqn]
    entry_of(metadata, fqn).chunks[0] = ChunkStorageMetadata(torch.Size([1]), chunk.sizes)
    metadata.storage_data[replace(index, offset=torch.Size([1]))] = metadata.storage_data.pop(index)


def append_beyond(metadata: Metadata, fqn: str) -> None:
    """Let a tensor of twice the rows have its only chunk once more, beyond the end: as many elements as it has."""
    (chunk,) = entry_of(metadata, fqn).chunks
    (index,) = [index for index in metadata.storage_data if index.fqn == fqn]
    (num_rows,) = chunk.sizes
    second = torch.Size([2 * num_rows])
    entry_of(metadata, fqn).size = second
    entry_of(metadata, fqn).chunks.append(ChunkStorageMetadata(second, chunk.sizes))
    metadata.storage_data[replace(index, offset=second, index=1)] = metadata.storage_data[index]


LIES: dict[str, tuple[Callable[[Metadata, str], object], str]] = {
    "path out of the folder": (change_place(relative_path="../x.distcp"), "source.bad-dcp-metadata"),
    "absolute path": (change_place(relative_path="/etc/passwd"), "source.bad-dcp-metadata"),
    "hidden path": (change_place(relative_path=".git/x.distcp"), "source.bad-dcp-metadata"),
    "negative offset": (change_place(offset=-1), "source.bad-dcp-metadata"),
    "offset beyond the file": (change_place(offset=1 << 40), "source.bad-archive"),
    "length beyond the file": (change_place(length=1 << 40), "source.bad-archive"),
    "no length": (change_place(length=0), "source.bad-archive"),
    "chunks of two tensors": (share_chunks, "source.bad-dcp-metadata"),
    "keys that are lists": (place_in_lists, "source.bad-dcp-metadata"),
    "overlapping chunks": (overlap, "shard.inconsistent-slices"),
    "larger than its chunks": (enlarge, "shard.inconsistent-slices"),
    "chunk beyond the tensor": (move_chunk, "shard.inconsistent-slices"),
    "second chunk beyond the tensor": (append_beyond, "shard.inconsistent-slices"),
    "larger than its bytes": (enlarge_chunk, "source.bad-archive"),
}


@pytest.mark.parametrize("kind", LIES)
@pytest.mark.parametrize("name", ["dcp", "torch_dist"])
def test_metadata_that_lies_is_refused(name: str, kind: str, good: Path, tmp_path: Path) -> None:
    source, (change, code) = copied(good, name, tmp_path), LIES[kind]
    change_metadata(source, lambda metadata: change(metadata, CONTAINERS[name].chunk))
    assert code_of(source) == code


def test_value_of_any_length_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "0.distcp"
    file.touch()
    os.truncate(file, (256 << 20) + 1)
    value = DcpValue("extra", ("extra",), file.name, 0, (256 << 20) + 1)
    with pytest.raises(SourceError) as raised:
        read_values(LocalFolder(tmp_path), [value])
    assert (raised.value.code, raised.value.where) == ("source.bad-archive", f"{file}: 'extra'")


@pytest.mark.parametrize("name", CONTAINERS)
def test_links_to_folders_are_refused_and_virtual_bundles_are_not_made(name: str, good: Path, tmp_path: Path) -> None:
    source = copied(good, name, tmp_path)
    assert code_of(source, "--virtual") == "options.cannot-be-virtual"
    (tmp_path / "elsewhere").mkdir()
    (source / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert code_of(source) == "source.linked-folder"


def test_overlapping_rows_of_torchtitans_heads_are_refused(tmp_path: Path) -> None:
    native = torchtitan_state("llama", huggingface_state("llama", tmp_path / "model"))
    source = save(tmp_path / "step-7", "llama", native)
    change_metadata(source, lambda metadata: repeat(metadata, "layers.0.attention.qkv_linear.wq.weight"))
    assert code_of(source) == "shard.inconsistent-slices"


def repeat(metadata: Metadata, fqn: str) -> None:
    """Let a tensor have its only chunk twice, the second from row 1 on."""
    (chunk,) = entry_of(metadata, fqn).chunks
    (index,) = [index for index in metadata.storage_data if index.fqn == fqn]
    second = torch.Size([1, 0])
    entry_of(metadata, fqn).chunks.append(ChunkStorageMetadata(second, chunk.sizes))
    metadata.storage_data[replace(index, offset=second, index=1)] = metadata.storage_data[index]


NUMBERS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False)
PLAIN = st.recursive(
    NUMBERS | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)
SIZE, FLOAT = b"\x8c\x05torch\x8c\x04Size\x93\x94", b"\x8c\x05torch\x8c\x07float32\x93"
MOST_PICKLE_NBYTES = 16 << 20


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.integers(4, 5))
def test_what_cpython_pickles_is_read(value: object, protocol: int) -> None:
    assert repr(read_pickle(pickle.dumps(value, protocol), VALUES)) == repr(value)


def doubled(first: bytes, again: bytes, times: int) -> bytes:
    """Return the opcodes of a value that has another twice, which has another twice, and so on."""
    return first + b"\x94" + b"".join(again % (number, number) for number in map(bytes, zip(range(times))))


@pytest.mark.parametrize("times", [28, 200])
@pytest.mark.parametrize("used", [b"}h%cNs.", b"\x8f(h%c\x90.", b"(h%c\x91.", b"}h%c\x85Ns."])
def test_tuples_that_repeat_each_other_are_not_hashed(times: int, used: bytes) -> None:
    data = b"\x80\x04" + doubled(b"K\x01\x85", b"h%bh%b\x86\x94", times) + used % times
    with pytest.raises(BadPickleError):
        read_pickle(data, VALUES)


def test_tuples_in_tuples_that_are_few_are_read() -> None:
    value = (1,)
    for _ in range(30):
        value = (value, 2)  # type: ignore[assignment]
    assert read_pickle(pickle.dumps({value: 1}, 4), VALUES) == {value: 1}
    with pytest.raises(BadPickleError):
        read_pickle(b"\x80\x04}" + b")" + b"\x85" * 5000 + b"Ns.", VALUES)
    with pytest.raises(BadPickleError):
        read_pickle(b"\x80\x04)\x94" + b"h\x00\x85\x94" * 200 + b"}" + b")" + b"\x85" * 5000 + b"Ns.", VALUES)


def alike(count: int) -> list[int]:
    return [number * sys.hash_info.modulus for number in range(count)]


@pytest.mark.parametrize(
    "keys_of",
    [
        lambda count: dict.fromkeys(alike(count)),
        lambda count: set(alike(count)),
        lambda count: frozenset(alike(count)),
        lambda count: dict.fromkeys((number, 0) for number in range(count)),
        lambda count: [{(number, 0): 0} for number in range(count)],
    ],
)
def test_keys_that_may_collide_are_few(keys_of: Callable[[int], object]) -> None:
    assert set(map(hash, alike(9))) == {0}
    assert read_pickle(pickle.dumps(keys_of(500), 4), VALUES) == keys_of(500)
    with pytest.raises(BadPickleError):
        read_pickle(pickle.dumps(keys_of(6_000), 4), VALUES)


LONG = b"](" + b"K\x01" * 20_000 + b"e\x94"
FIELDS = b"}(" + b"".join(b"M%bN" % number.to_bytes(2, "little") for number in range(20_000)) + b"u"


@pytest.mark.parametrize(
    "data",
    [
        SIZE + LONG + b"\x85\x94" + b"h\x00h\x02R" * 1000,
        SIZE + LONG + b"\x85\x94" + b"h\x00h\x02\x81" * 1000,
        b"ccollections\nOrderedDict\n\x94" + LONG + b"\x85\x94" + b"h\x00h\x02R" * 1000,
        b"ca\nb\n\x94N" + FIELDS + b"\x86\x94" + b"h\x00)\x81h\x01b" * 200,  # the state of `__slots__`
    ],
)
def test_a_list_that_is_used_many_times_is_not_copied(data: bytes) -> None:
    tracemalloc.start()
    try:
        assert isinstance(read_pickle(b"\x80\x04" + data + b".", VALUES, Record), Record)
    except BadPickleError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_PICKLE_NBYTES


@pytest.mark.parametrize("state", [b"\x8c\x03F64\x85", b"N}\x8c\x04name\x8c\x03F64s\x86", b"}\x8c\x04name\x8c\x03F64s"])
@pytest.mark.parametrize("name", [FLOAT, b"\x94h\x00".join((FLOAT, b""))])
def test_what_is_named_is_not_changed(state: bytes, name: bytes) -> None:
    with pytest.raises(BadPickleError):
        read_pickle(b"\x80\x04" + name + state + b"b.", VALUES)
    assert VALUES["torch.float32"] == ArchiveDtype("F32")


@pytest.mark.parametrize("data", [doubled(b"]", b"](h%bh%be\x94", 40), b"]" * 5000 + b"a" * 4999, b"]\x94h\x00a"])
def test_values_whose_comparison_would_take_long_are_refused(data: bytes, tmp_path: Path) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x04" + data + b".")
    (tmp_path / "value.pt").write_bytes(written.getvalue())
    file = LocalFile(tmp_path / "value.pt")
    for read in (lambda: read_value(file, (0, file.nbytes)), lambda: read_object(file, "value")):
        with pytest.raises(SourceError) as raised:
            read()
        assert raised.value.code == "source.bad-pickle"
