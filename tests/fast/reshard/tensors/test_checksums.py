"""The CRC-32 of each record of torch.save is compared: zipfile says where the records are, zlib what their CRC is."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import SourceError
from reshard.tensors.checksums import combined_crc, verify_records, with_records
from stores.base import read_range
from stores.bundles import TensorAt
from stores.local import LocalFile
from tests.builders import files_in, flip, llama_config, pack, refusal, reshard
from tests.fast.reshard.archives.test_tensors import NAME, state_of, write_folder
from tests.fast.reshard.formats.dcp.test_dcp_source import huggingface_state, save
from tests.fast.reshard.formats.deepspeed.test_deepspeed_source import GOLDEN
from tests.fast.reshard.formats.megatron.test_megatron import GOLDEN as MEGATRON
from tests.servers.hub import serve_hub, set_up

MISMATCH = "source.checksum-mismatch"
ALIGNMENT = 64


def write_bin(place: Path) -> Path:
    return write_folder(place, state_of(llama_config()))


def write_dcp(place: Path) -> Path:
    return save(place, "llama", huggingface_state("llama", place.with_name("model")))


def copied(source: Path) -> Callable[[Path], Path]:
    return lambda place: copytree(source, place)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "bin": write_bin,
    "dcp": write_dcp,
    "torch_dist": copied(MEGATRON / "qwen3"),
    "layers": copied(GOLDEN / "llama"),
    "universal": copied(GOLDEN / "gpt2-universal"),
}
READ = {
    "layers": "layer_*.pt",
    "universal": "*/exp_avg.pt",
}  # files of nothing but weights


def records_of(source: Path, kind: str) -> Iterator[tuple[Path, int, int]]:
    """Yield a file, and the begin and the end of a record in it."""
    if kind in ("dcp", "torch_dist"):
        metadata = pickle.loads((source / ".metadata").read_bytes())
        tensors = {name for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        for index, info in metadata.storage_data.items():
            if index.fqn in tensors and "optimizer" not in index.fqn:
                yield from in_archive(source / info.relative_path, info.offset, info.length)
    else:
        for path in sorted(source.rglob(READ.get(kind, NAME))):
            yield from in_archive(path, 0, path.stat().st_size)


def in_archive(path: Path, begin: int, nbytes: int) -> Iterator[tuple[Path, int, int]]:
    data = path.read_bytes()[begin : begin + nbytes]
    for info in zipfile.ZipFile(io.BytesIO(data)).infolist():
        if "/data/" in info.filename and info.file_size:
            local = data[info.header_offset :]
            first = info.header_offset + 30 + int.from_bytes(local[26:28], "little")
            first += int.from_bytes(local[28:30], "little")
            assert first % ALIGNMENT == 0
            yield path, begin + first, begin + first + info.file_size


@pytest.mark.parametrize("kind", WRITERS)
def test_a_flipped_bit_of_a_weight_is_refused_and_nothing_is_published(kind: str, tmp_path: Path) -> None:
    source, out, choose = WRITERS[kind](tmp_path / "source"), tmp_path / "out", random.Random(kind)
    records = list(records_of(source, kind))
    for path, begin, end in choose.sample(records, min(3, len(records))):
        position, bit = choose.randrange(begin, end), 1 << choose.randrange(8)
        flip(damaged := path, position, bit)
        exit_code, code, where = reshard("pack", source, "--layout", "pp=2", "--out", out, "--json").refusal
        if (
            code == "source.partitions-differ"
        ):  # of a vector of ZeRO that is not read to its end: where the model has it
            path = next(source.rglob("mp_rank_00_model_states.pt"))
            code = MISMATCH
        assert (exit_code, code) == (3, MISMATCH)
        assert str(path) in where
        assert not out.exists()
        flip(damaged, position, bit)
    pack(source, out)


@pytest.mark.parametrize("entry", ["data.pkl", "byteorder"])
def test_a_flipped_bit_beside_the_weights_is_refused(entry: str, tmp_path: Path) -> None:
    source = write_bin(tmp_path / "source")
    data = (source / NAME).read_bytes()
    position = data.index(b"little") if entry == "byteorder" else data.index(b"model.norm.weight")
    flip(source / NAME, position)
    found = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "out").found
    assert found[:2] == (3, MISMATCH)
    assert entry in found[2]


def test_archives_without_checksums_are_packed(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        sources = [write_bin(tmp_path / "bin"), write_dcp(tmp_path / "dcp")]
    finally:
        torch.serialization.set_crc32_options(True)
    for source in sources:
        assert all(info.CRC == 0 for info in zipfile.ZipFile(sources[0] / NAME).infolist())
        pack(source, tmp_path / f"{source.name}-out")


def test_the_rest_of_a_record_is_compared_where_a_tensor_is_a_part_of_it(tmp_path: Path) -> None:
    """The weight is the first half of its storage, and the flipped bit is in the other."""
    state = state_of(llama_config())
    state["lm_head.weight"] = torch.cat([state["lm_head.weight"]] * 2)[: len(state["lm_head.weight"])]
    source, out = write_folder(tmp_path / "source", state), tmp_path / "out"
    path, _, end = max(records_of(source, "bin"), key=lambda record: record[2] - record[1])
    flip(path, end - 1)
    args = ("pack", source, "--layout", "pp=2", "--out")
    assert refusal(*args, out).found[:2] == (3, MISMATCH)
    found = [reshard(*args, tmp_path / "parts", "--part", part, "--json") for part in ("1/2", "2/2")]
    assert {ended.refusal[:2] for ended in found if ended.code} == {(3, MISMATCH)}


@pytest.mark.parametrize("verb", ["check", "diff"])
def test_other_verbs_that_read_values_compare_checksums(verb: str, tmp_path: Path) -> None:
    source, same = write_bin(tmp_path / "source"), write_bin(tmp_path / "same")
    path, begin, _ = next(records_of(source, "bin"))
    flip(path, begin)
    args = {"check": ("check", source, "--values"), "diff": ("diff", source, same, "--bytes")}[verb]
    ended = reshard(*args, "--json")
    assert ended.code != 0
    assert MISMATCH in ended.out


def test_checksums_are_compared_in_requests_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files, and a listing without SHA-256, which would refuse the file as well."""
    source = write_bin(tmp_path / "source")
    path, begin, _ = next(records_of(source, "bin"))
    flip(path, begin)
    with serve_hub() as served:
        set_up(monkeypatch, served, tmp_path / "cache")
        served.push("org/tiny", files_in(source))
        found = refusal("pack", "hf://org/tiny", "--layout", "pp=2", "--out", tmp_path / "out").found
    assert found[:2] == (3, MISMATCH)


@given(st.binary(), st.binary(), st.integers(0, 5000))
def test_checksums_of_pieces_combine_as_those_of_all_bytes_do(first: bytes, second: bytes, times: int) -> None:
    second *= times
    assert combined_crc(crc32(first), crc32(second), len(second)) == crc32(first + second)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_records_are_read_in_pieces_of_any_order_by_many_threads(is_damaged: bool, tmp_path: Path) -> None:
    choose, path = random.Random(1), tmp_path / "file"
    data = choose.randbytes(40_000)
    path.write_bytes(data)
    file = with_records(LocalFile(path))
    edges = [100, *sorted(choose.sample(range(101, 39_900), 30)), 39_900]
    for number, (begin, end) in enumerate(pairwise(edges)):
        file.add(f"data/{number}", begin, end, crc32(data[begin:end]) ^ (is_damaged and number == 20))
    cuts = [0, *sorted(choose.sample(range(1, 40_000), 300)), 40_000]
    pieces = list(pairwise(cuts))
    again = [(max(0, begin - 500), end) for begin, end in pieces[::7]]  # those overlap
    some = choose.sample([*pieces, *again], 200)
    errors = []
    with ThreadPoolExecutor(8) as pool:
        for read in [pool.submit(read_range, file, *piece) for piece in some]:
            errors.append(read.exception())
    try:
        verify_records([TensorAt("t", "U8", (2,), file, begin, 2) for begin in range(100, 39_899)])
    except SourceError as error:
        errors.append(error)
    found = {error.code for error in errors if isinstance(error, SourceError)}
    assert [error for error in errors if error is not None and not isinstance(error, SourceError)] == []
    assert found == ({MISMATCH} if is_damaged else set())
