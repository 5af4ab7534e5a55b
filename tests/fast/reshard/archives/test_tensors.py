"""`pytorch_model.bin` files are read as byte ranges, without torch; torch's own writer and reader are the oracle."""

from __future__ import annotations

import itertools
import json
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from manifests.errors import SourceError
from reshard.archives.dcp import TensorReader
from reshard.archives.tensors import read_archive
from reshard.tensors.lazy import read_blocks
from stores.base import Range
from stores.local import LocalFile, LocalReader
from tests.builders import llama_config, llama_shapes, refusal, reshard, run

NAME, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
TYPED = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def state_of(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return random weights of a Llama, in the order of the model."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32).bfloat16()
        for name, shape in llama_shapes(config).items()
    }


def write_folder(folder: Path, state: Mapping[str, torch.Tensor], num_shards: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config()))
    if num_shards == 1:
        torch.save(OrderedDict(state), folder / NAME)
        return folder
    names = list(state)
    shards = {SHARDS[0]: names[::2], SHARDS[1]: names[1::2]}
    for file, listed in shards.items():
        torch.save({name: state[name] for name in listed}, folder / file)
    weight_map = {name: file for file, listed in shards.items() for name in listed}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def packed_and_exported(source: Path, layout: str = "pp=2") -> Path:
    packed, exported = source.parent / "packed", source.parent / "exported"
    for args in (
        ("pack", source, "--layout", layout, "--out", packed),
        ("export", packed, "--to", "hf", "--out", exported),
    ):
        run(*args)
    return exported


def refused(source: Path, *args: str) -> tuple[str, str]:
    ended = refusal("pack", source, "--layout", "pp=2", "--out", source.parent / "out", *args)
    exit_code, code, where = ended.found
    assert exit_code == 3
    return code, where.replace(str(source), "SOURCE")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_export_has_the_tensors_that_torch_reads(num_shards: int, tmp_path: Path) -> None:
    state = state_of(llama_config())
    source = write_folder(tmp_path / "source", state, num_shards)
    exported = packed_and_exported(source)
    files = sorted(path.name for path in exported.glob("*.safetensors"))
    assert files == (["model.safetensors"] if num_shards == 1 else [name[8:-3] + "safetensors" for name in SHARDS])
    found = {name: tensor for file in files for name, tensor in load_file(exported / file).items()}
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    if num_shards == 2:
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
        assert index["weight_map"] == {name: SHARDS[at % 2][8:-3] + "safetensors" for at, name in enumerate(state)}


def test_logits_of_the_export_are_those_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**llama_config(), "tie_word_embeddings": True})).eval()
    (tmp_path / "source").mkdir()
    model.config.save_pretrained(tmp_path / "source")
    torch.save(model.state_dict(), tmp_path / "source" / NAME)  # both tied names, which share a storage
    assert reshard("check", tmp_path / "source", "--json").json["read_nbytes"] == 0
    loaded = AutoModelForCausalLM.from_pretrained(packed_and_exported(tmp_path / "source", "pp=3"))
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_views_and_dtypes_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.arange(2 * 3 * 5 * 7, dtype=torch.int16).view(2, 3, 5, 7)
    state = {
        **{
            name: torch.arange(6).to(getattr(torch, name)).view(2, 3)
            if not name.startswith("float8")
            else torch.arange(1, 7, dtype=torch.uint8).view(getattr(torch, name)).view(2, 3)
            for name in TYPED
        },
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "rows": base[1],
        "transposed": base.permute(3, 1, 0, 2),
        "every other": base[:, 1:, ::2, 1::3],
        "expanded": base[0, 0, :, :1].expand(5, 9),
        "one element": base[1:, 2:, 4:, 6:],
        "scalar": base[0, 1, 2, 3],
        "empty": base[:, :0],
    }
    torch.save(state, tmp_path / "views.bin")
    expected = torch.load(tmp_path / "views.bin")
    found = {tensor.name: tensor for tensor in read_archive(LocalFile(tmp_path / "views.bin"))}
    assert list(found) == list(state)
    for name, tensor in found.items():
        data = b"".join(bytes(block) for block in read_blocks(tensor))
        assert tensor.shape == tuple(expected[name].shape), name
        whole = expected[name].detach().contiguous().reshape(-1).view(torch.uint8)
        assert data == bytes(whole.tolist()), name
    assert {name: found[name].dtype for name in TYPED} == TYPED


def rewrite(path: Path, **entries: bytes) -> None:
    """Write a zip as torch.save does, with these entries in place of its own."""
    with zipfile.ZipFile(path) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**found, **{name.replace("_", "."): data for name, data in entries.items()}}.items():
            archive.writestr(f"archive/{name}", data)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(4), "v": torch.zeros(3)}, tmp_path / "x.bin")
    return tmp_path / "x.bin"


def code_of(path: Path) -> str:
    with pytest.raises(SourceError) as refused:
        read_archive(LocalFile(path))
    return refused.value.code


def test_a_file_of_one_tensor_is_opened_once(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(torch.arange(1 << 16), archive)
    nbytes, opened = archive.stat().st_size, list[Sequence[Range]]()
    file, real = LocalFile(archive), LocalFile.open

    def counted(self: LocalFile, ranges: Sequence[Range]) -> LocalReader:
        opened.append(ranges)
        return real(self, ranges)

    monkeypatch.setattr(LocalFile, "open", counted)
    ((_, found),) = TensorReader().read(file, {(0, nbytes): "w"})
    assert (found.shape, found.dtype, len(opened)) == ((1 << 16,), "I64", 1)
    assert sum(end - begin for begin, end in opened[0]) < 10_000


@pytest.mark.parametrize("count", [6, 60_000])
def test_archives_of_one_length_are_told_apart(archive: Path, count: int) -> None:
    values = torch.arange(count, dtype=torch.float32)
    shapes = [(2, -1), (-1, 2), (2, -1), (3, -1)]
    tensors = [values.view(shape) + number for number, shape in enumerate(shapes)] + [values.view(2, -1).int()]
    saved = []
    for tensor in tensors:
        torch.save(tensor, archive)
        saved.append(archive.read_bytes())
    assert len(set(map(len, saved[:4]))) == 1
    other = saved[0].replace(b"FloatStorage", b"HalfXStorage")  # which the reader must see, alike as it is
    ends = list(itertools.accumulate(map(len, [*saved, other])))
    archive.write_bytes(b"".join([*saved, other]))
    parts = list(zip([0, *ends], ends, strict=False))
    found = dict(TensorReader().read(LocalFile(archive), dict.fromkeys(parts[:-1], "w")))
    for part, tensor in zip(parts, tensors, strict=False):
        at = found[part]
        raw = archive.read_bytes()[at.begin : at.end]
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).view(at.shape), tensor)
    with pytest.raises(SourceError):
        list(TensorReader().read(LocalFile(archive), dict.fromkeys(parts, "w")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02}",
        b"\x80\x02}.}.",
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of 2^31 places
        b"\x80\x02]" + b"2" * 100 + b".",  # DUP
        b"\x80\x02})" + b"\x85" * 3_000_000 + b"Ns.",  # a key of tuples in tuples
        b"\x80\x02})" + b"\x85q\x00h\x00\x86" * 1_000_000 + b"Ns.",  # the same by the memo
        b"\x80\x02\x85.",
        b"\x80\x02h\x05.",
        b"\x80\x02X\xff\xff\xff\xff",  # a string longer than the pickle
        b"\x80\x02ccollections\nOrderedDict\n)R(X\x01\x00\x00\x00wK\x01u.",  # a tensor that is a number
        b"\x80\x02ctorch\nfloat32\n)R.",  # a constant that is called
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02}}sK\x01.",
        b"\x80\x02ctorch\nSize\n]K\x01a\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_parameter\n)\x85R.",
        b"\x80\x02c" + b"a" * 100_000,
    ],
)
def test_malformed_pickles_are_refused(data: bytes, archive: Path) -> None:
    rewrite(archive, data_pkl=data)
    assert code_of(archive) == "source.bad-pickle"


def test_views_outside_of_their_storage_are_refused(archive: Path) -> None:
    with zipfile.ZipFile(archive) as found:
        data = found.read("x/data.pkl")
    assert data.count(b"K\x04") == 2  # the storage's size, and the shape
    for change in (b"K\x05", b"J\xff\xff\xff\xff", b"M\xff\xff"):
        rewrite(archive, data_pkl=data.replace(b"K\x04", change))
        assert code_of(archive) == "source.bad-pickle"


def test_storages_that_are_missing_compressed_cut_or_on_top_of_others_are_refused(archive: Path) -> None:
    whole = archive.read_bytes()
    with zipfile.ZipFile(archive) as found:
        contents = {name: found.read(name) for name in found.namelist()}
    with zipfile.ZipFile(archive, "w") as cut:
        for name, data in contents.items():
            if name != "x/data/1":
                cut.writestr(name, data)
    assert code_of(archive) == "source.bad-pickle"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as small:
        for name, data in contents.items():
            small.writestr(name, data)
    assert code_of(archive) == "source.bad-archive"
    directory = whole.index(b"PK\x01\x02")
    first = whole.index(b"x/data/0", directory) - 46
    second = whole.index(b"x/data/1", directory) - 46
    moved = bytearray(whole)
    moved[second + 42 : second + 46] = whole[first + 42 : first + 46]
    archive.write_bytes(moved)
    assert code_of(archive) == "source.bad-archive"
    for length in (0, 3, 100, directory, len(whole) - 1):
        archive.write_bytes(whole[:length])
        assert code_of(archive) == "source.bad-archive"


def test_other_formats_of_torch_are_named(archive: Path) -> None:
    torch.save({"w": torch.ones(4)}, archive, _use_new_zipfile_serialization=False)
    assert code_of(archive) == "source.old-archive"
    rewritten = archive.parent / "y.bin"
    torch.save({"w": torch.ones(4)}, rewritten)
    rewrite(rewritten, byteorder=b"big")
    assert code_of(rewritten) == "source.bad-archive"
    torch.save({"w": torch.ones(4).to_sparse()}, archive)
    assert code_of(archive) == "source.bad-pickle"
    torch.save([torch.ones(4)], archive)
    assert code_of(archive) == "source.bad-pickle"


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor, whose storage has the opposite values and the negative bit."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def test_weights_with_the_negative_bit_are_refused(tmp_path: Path) -> None:
    state = {name: tensor.float() for name, tensor in state_of(llama_config()).items()}
    changed = {**state, "lm_head.weight": negated(state["lm_head.weight"])}
    source = write_folder(tmp_path / "source", changed)
    assert torch.equal(torch.load(source / NAME)["lm_head.weight"], state["lm_head.weight"])
    assert refused(source) == ("source.unresolved-tensor", f"SOURCE/{NAME}: 'lm_head.weight'")
    packed = write_folder(tmp_path / "resolved", {name: tensor.resolve_neg() for name, tensor in changed.items()})
    assert torch.equal(
        load_file(packed_and_exported(packed) / "model.safetensors")["lm_head.weight"], state["lm_head.weight"]
    )


@pytest.mark.parametrize("parameter", [False, True])
def test_tensors_with_bits_that_change_them_are_refused(parameter: bool, archive: Path) -> None:
    values = torch.complex(torch.ones(3), torch.ones(3))
    for tensor in (values.conj(), negated(torch.ones(3)), values.conj().imag):
        torch.save({"w": torch.nn.Parameter(tensor) if parameter else tensor}, archive)
        assert code_of(archive) == "source.unresolved-tensor"
    torch.save({"w": values.conj().conj()}, archive)
    assert [tensor.dtype for tensor in read_archive(LocalFile(archive))] == ["C64"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\x85q\t\x89", b"\x85q\tK\x00"),  # requires_grad of 0
        (b")Rq\x0btq\x0c", b")Rq\x0bK\x01K\x01stq\x0c"),  # a hook
        (b")Rq\x0btq\x0c", b")Rq\x0bK\x01tq\x0c"),  # metadata of 1
        (b"K\x04tq\x07", b"K\x05tq\x07"),  # a storage longer than its record
        (b"K\x04tq\x07", b"K\x04Ntq\x07"),  # a view of another storage, as the old format has
    ],
)
def test_what_torch_save_never_writes_of_a_tensor_is_refused(before: bytes, after: bytes, archive: Path) -> None:
    torch.save({"w": torch.ones(4)}, archive)
    with zipfile.ZipFile(archive) as found:
        data = found.read("x/data.pkl")
    assert data.count(before) == 1
    rewrite(archive, data_pkl=data.replace(before, after))
    assert code_of(archive) == "source.bad-pickle"


def test_attributes_of_a_state_dict_are_its_metadata_alone(archive: Path) -> None:
    state = OrderedDict(torch.nn.Linear(2, 3).state_dict())
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    torch.save(state, archive)
    assert [tensor.name for tensor in read_archive(LocalFile(archive))] == ["weight", "bias"]
    state.scales = {"weight": 0.5}  # type: ignore[attr-defined]
    torch.save(state, archive)
    assert code_of(archive) == "source.bad-pickle"
