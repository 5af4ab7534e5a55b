"""Law 9: bad input is refused with one sentence and exit code 3, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from tests.builders import INDEX, files_in, leftovers, llama_config, random_tensors, reshard, write_model
from tests.fast.reshard.forged import change_manifest, digest

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SINGLE = "model.safetensors"
AGAIN = "\nhint: download or copy the file again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """A source spoiled in one way, and what is said of it; {S} stands for the source."""

    name: str
    spoil: Callable[[Path], object]
    message: str
    num_shards: int = 1
    layout: str = "pp=2"
    exit_code: int = 3


def config(**changes: object) -> Callable[[Path], object]:
    return lambda source: (source / "config.json").write_text(json.dumps(llama_config(**changes)))


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda source: (source / name).write_text(content)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Rewrite the header of the single shard, and leave its data."""

    def spoil(source: Path) -> None:
        file = (source / SINGLE).read_bytes()
        begin = 8 + int.from_bytes(file[:8], "little")
        table = json.loads(file[8:begin])
        change(table)
        raw = json.dumps(table).encode()
        (source / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw + file[begin:])

    return spoil


def raw_header(raw: bytes) -> Callable[[Path], object]:
    return lambda source: (source / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw)


def offsets(fqn: str, shift: int) -> Callable[[Path], object]:
    def change(table: dict[str, Any]) -> None:
        table[fqn]["data_offsets"] = [offset + shift for offset in table[fqn]["data_offsets"]]

    return header(change)


def truncated(name: str, by_nbytes: int) -> Callable[[Path], object]:
    return lambda source: (source / name).write_bytes((source / name).read_bytes()[:-by_nbytes])


def longer(name: str) -> Callable[[Path], object]:
    return lambda source: (source / name).write_bytes((source / name).read_bytes() + b"?")


def index(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def spoil(source: Path) -> None:
        document = json.loads((source / INDEX).read_text())
        change(document)
        (source / INDEX).write_text(json.dumps(document))

    return spoil


UP = "model.layers.1.mlp.up_proj.weight"
BEYOND = {"dtype": "U8", "shape": [4], "data_offsets": [18208, 18212]}
TENSORS = random_tensors(llama_config())
BEGIN = sum(len(TENSORS[fqn].data) for fqn in list(TENSORS)[: list(TENSORS).index(UP)])
CASES = (
    Bad(name="no config", spoil=lambda source: (source / "config.json").unlink(),
        message="{S}/config.json: no such file\nhint: SOURCE must be a Hugging Face model folder"),
    Bad(name="config is no JSON", spoil=text("config.json", "{'a': 1}"),
        message="{S}/config.json: is not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)"),
    Bad(name="unknown architecture", spoil=config(architectures=["OtherForCausalLM"]),
        message="{S}/config.json: architectures: 'OtherForCausalLM' is not supported\n"
        "hint: docs/models.md lists what is"),
    Bad(name="config without a size", spoil=config(hidden_size=None),
        message="{S}/config.json: hidden_size: expected a positive integer, found nothing"),
    Bad(name="config of endless layers", spoil=config(num_hidden_layers=2**40),
        message="{S}/config.json: num_hidden_layers: expected at most 10000, found 1099511627776"),
    Bad(name="no weights", spoil=lambda source: (source / SINGLE).unlink(),
        message="{S}: no safetensors shard here\nhint: SOURCE must hold safetensors weights"),
    Bad(name="weights in another format alone", spoil=lambda source: (source / SINGLE).rename(source / "model.bin"),
        message="{S}: no safetensors shard here\nhint: model.bin is in a format that reshard does not read: "
        "transformers writes safetensors, from_pretrained(SOURCE).save_pretrained(DIR)"),
    Bad(name="shards without an index", spoil=lambda source: (source / INDEX).unlink(), num_shards=2,
        message=f"{{S}}: expected {SINGLE} alone or an {INDEX}, found {SHARDS[0]}, {SHARDS[1]} and no index"),
    Bad(name="index names a missing shard", spoil=lambda source: (source / SHARDS[1]).unlink(), num_shards=2,
        message=f"{{S}}/{INDEX}: weight_map: names '{SHARDS[1]}', which is not in the folder\n"
        "hint: download the missing shard"),
    Bad(name="stray shard", spoil=lambda source: (source / "adapter.safetensors").write_bytes(b""), num_shards=2,
        message=f"{{S}}/adapter.safetensors: stray shard: {INDEX} does not name it\n"
        "hint: remove it, or download the index that belongs to these shards"),
    Bad(name="stray shard beside a single file", spoil=lambda source: (source / "a.safetensors").write_bytes(b""),
        message=f"{{S}}: expected {SINGLE} alone or an {INDEX}, found a.safetensors, {SINGLE} and no index"),
    Bad(name="index without a map", spoil=index(lambda document: document.pop("weight_map")), num_shards=2,
        message=f"{{S}}/{INDEX}: weight_map: expected an object of file names, found null"),
    Bad(name="index that climbs", spoil=index(lambda document: document.update(weight_map={"a": "../a.safetensors"})),
        num_shards=2,
        message=f"{{S}}/{INDEX}: weight_map: expected a path that stays below its folder, found '../a.safetensors'"),
    Bad(name="index with a key twice", spoil=text(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'), num_shards=2,
        message=f"{{S}}/{INDEX}: is not JSON: key 'a' occurs twice"),
    Bad(name="truncated shard", spoil=truncated(SHARDS[0], 1), num_shards=2,
        message=f"{{S}}/{SHARDS[0]}: expected 10368 bytes of data (header), found 10367: the file is cut short{AGAIN}"),
    Bad(name="shard cut in its header", spoil=lambda source: (source / SINGLE).write_bytes(b"\x10\0\0\0\0\0\0\0{"),
        message="{S}/model.safetensors: header length 16 is beyond the end of the file or the limit of 100000000 "
        "bytes\nhint: the file is damaged or is not a safetensors file; download it again"),
    Bad(name="huge header", spoil=lambda source: (source / SINGLE).write_bytes(b"\xff" * 16),
        message="{S}/model.safetensors: header length 18446744073709551615 is beyond the end of the file or the limit "
        "of 100000000 bytes\nhint: the file is damaged or is not a safetensors file; download it again"),
    Bad(name="pickle", spoil=raw_header(b"\x80\x02}q\x00."),
        message="{S}/model.safetensors: header: is not JSON: 'utf-8' codec can't decode byte 0x80 in position 0: "
        "invalid start byte"),
    Bad(name="header is no JSON", spoil=raw_header(b"{,}"),
        message="{S}/model.safetensors: header: is not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)"),
    Bad(name="header with a key twice", spoil=raw_header(b'{"a":0,"a":0}'),
        message="{S}/model.safetensors: header: is not JSON: key 'a' occurs twice"),
    Bad(name="header overlaps", spoil=offsets(UP, -1),
        message=f"{{S}}/{SINGLE}: '{UP}'.data_offsets: expected to begin at {BEGIN}, found {BEGIN - 1}: "
        "overlaps the tensor before it"),
    Bad(name="header leaves a gap", spoil=offsets(UP, 1),
        message=f"{{S}}/{SINGLE}: '{UP}'.data_offsets: expected to begin at {BEGIN}, found {BEGIN + 1}: "
        "leaves a gap before it"),
    Bad(name="header beyond the end", spoil=header(lambda table: table.update(a=BEYOND)),
        message=f"{{S}}/{SINGLE}: expected 18212 bytes of data (header), found 18208: the file is cut short{AGAIN}"),
    Bad(name="trailing bytes", spoil=longer(SINGLE),
        message=f"{{S}}/{SINGLE}: expected 18208 bytes of data (header), found 18209: "
        f"the file has bytes that no tensor owns{AGAIN}"),
    Bad(name="too many stages", spoil=lambda source: None, layout="pp=7", exit_code=2,
        message="layout: expected at most 6 stages (4 layers, first=1 and last=1), found 7\n"
        "  pp=7\n"
        "  ^\n"
        "hint: at most pp=6"),
    Bad(name="dangling link", spoil=lambda source: (source / "notes.md").symlink_to("gone"),
        message="{S}/notes.md: is not a regular file\nhint: a dangling link? remove it or fix it"),
    Bad(name="linked folder", spoil=lambda source: (source / "original").symlink_to(source.parent),
        message="{S}/original: is a link to a folder\nhint: put the folder itself there, or remove the link"),
    Bad(name="name of ours", spoil=lambda source: (source / "source.json").touch(),
        message="{S}/source.json: this name belongs to the manifest's own files\nhint: rename the file"),
    *(
        Bad(name=f"name {name}", spoil=text(name, "notes"),
            message=f"{{S}}/{name}: this name belongs to files that are being written\nhint: rename the file")
        for name in (".journal", ".reshard-unfinished", ".config.json.partial")
    ),
    Bad(name="name that cannot travel", spoil=lambda source: (source / "a\nb").touch(),
        message="{S}/a\\x0ab: expected a relative path with / between its parts and no control characters\n"
        "hint: rename the file"),
)  # fmt: skip


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_bad_source_is_refused_with_one_sentence_and_leaves_nothing(bad: Bad, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_model(source, num_shards=bad.num_shards)
    bad.spoil(source)
    ended = reshard("pack", source, "--layout", bad.layout, "--out", out)
    assert ended.err == f"error: {bad.message.replace('{S}', str(source))}\n"
    assert (ended.code, ended.out) == (bad.exit_code, "")
    assert leftovers(out) == []


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_refusal_is_one_json_object_where_json_is_asked_for(bad: Bad, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_model(source, num_shards=bad.num_shards)
    bad.spoil(source)
    ended = reshard("plan", source, "--layout", bad.layout, "--json")
    assert (ended.code, ended.err) == (bad.exit_code, "")
    assert ended.json.keys() == {"version", "error"}
    error = ended.json["error"]
    shown = str(InputError(error["where"], error["problem"], error["hint"], code=error["code"]))
    assert shown == bad.message.replace("{S}", str(source))


def test_source_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    ended = reshard("pack", tmp_path / "none", "--layout", "pp=2", "--out", tmp_path / "out")
    assert ended.err == (
        f"error: {tmp_path}/none: no such folder\nhint: name the folder that contains config.json and the weights\n"
    )
    assert ended.code == 3
    assert leftovers(tmp_path / "out") == []


def test_file_in_the_place_of_a_folder_is_said_to_be_one(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    file = tmp_path / "source" / SINGLE
    ended = reshard("pack", file, "--layout", "pp=2", "--out", tmp_path / "out")
    assert ended.code == 3
    assert ended.err.startswith(f"error: {file}: is a file, not a folder\n")


def test_output_that_exists_is_refused_and_kept(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for flags, problem in (
        ((), "exists already\nhint: choose another folder, or remove this yourself"),
        (("--force",), "exists, and is not a folder that this command writes; --force does not replace it\n"
         "hint: choose another folder, or remove it yourself"),
    ):  # fmt: skip
        ended = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", *flags)
        assert (ended.code, ended.err) == (3, f"error: {tmp_path}/out: {problem}\n")
        assert files_in(tmp_path / "out") == {"thesis.tex": b"years of work"}
        assert leftovers(tmp_path / "out") == ["out"]


@pytest.mark.parametrize("name", [".journal", ".tokenizer.json.partial"])
def test_manifest_with_a_file_that_a_pack_would_lose_is_refused(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "old").code == 0
    (tmp_path / "old" / name).write_bytes(b"notes")
    file = {"path": name, "nbytes": 5, "digest": digest(b"notes")}
    change_manifest(tmp_path / "old", lambda document: document["files"].insert(0, file))
    assert reshard("verify", tmp_path / "old").code == 0
    for command in (("pack", tmp_path / "old"), ("export", tmp_path / "old", "--to", "hf")):
        ended = reshard(*command, "--out", tmp_path / "new")
        assert (ended.code, ended.err) == (
            3,
            f"error: {tmp_path}/old/{name}: this name belongs to files that are being written\n"
            "hint: leave the file out\n",
        )
    assert leftovers(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [["model.embed_tokens", "model.layers.0-2"], ["model.norm", "lm_head"]],
            "stages: missing model.layers.3\nhint: add model.layers.3 to stage 0, or to the start of the next",
        ),
        (
            [["model.embed_tokens", "model.layers.0-3"], ["model.norm", "lm_head", "model.vision"]],
            "stages[1]: 'model.vision' is not a module of this model\nhint: did you mean model.norm?",
        ),
    ],
    ids=["uncovered", "unknown"],
)
def test_layout_that_does_not_fit_the_model_is_refused(stages: list[list[str]], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    layout = tmp_path / "cut.toml"
    layout.write_text(f"stages = {json.dumps(stages)}\n")
    ended = reshard("pack", tmp_path / "source", "--layout", layout, "--out", tmp_path / "out")
    assert (ended.code, ended.err) == (3, f"error: {layout}: {message}\n")
    assert leftovers(tmp_path / "out") == []
