"""What each hostile file is, and the one sentence that refuses it; {F} stands for the file.

python -m tests.hostile.make writes them to tests/hostile/files, from where the tests take them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.builders import header_of, llama_config, random_tensors

__all__ = ["CONFIGS", "FILES", "INDEXES", "MANIFESTS", "SHARDS", "SHARD_NAMES", "Hostile", "write_files"]

FILES = Path(__file__).with_name("files")
DEEPSEEK = Path(__file__).parents[1] / "data" / "configs" / "deepseek-v3.json"
DEEP = 30_000  # brackets
TENSORS = random_tensors(llama_config(num_hidden_layers=2))
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
SHARD_NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True, slots=True)
class Hostile:
    """A file, and what is said of it."""

    name: str
    data: bytes
    message: str


def write_files(folder: Path = FILES) -> None:
    """Write every file below `folder`."""
    for kind, cases in (("shards", SHARDS), ("indexes", INDEXES), ("configs", CONFIGS), ("manifests", MANIFESTS)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for case in cases:
            (folder / kind / case.name).write_bytes(case.data)


def _file(raw: bytes, data: bytes | None = None) -> bytes:
    return len(raw).to_bytes(8, "little") + raw + (_DATA if data is None else data)


def _header(change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> bytes:
    """Give a good file with another header."""
    table = header_of(TENSORS)
    change(table)
    return _file(json.dumps(table).encode(), data)


def _entry(change: dict[str, Any]) -> bytes:
    """Give a good file with one entry changed."""
    return _header(lambda table: table[UP].update(change))


def _text(old: str, new: bytes) -> bytes:
    """Give a good file whose header says something that Python's json would not write."""
    return _file(json.dumps(header_of(TENSORS)).encode().replace(old.encode(), new, 1))


def _shifted(fqn: str, by: int) -> bytes:
    begin, end = _OFFSETS[fqn]
    return _header(lambda table: table[fqn].update(data_offsets=[begin + by, end + by]))


_DATA = b"".join(tensor.data for tensor in TENSORS.values())
_OFFSETS: dict[str, list[int]] = {fqn: entry["data_offsets"] for fqn, entry in header_of(TENSORS).items()}
_BEGIN = _OFFSETS[UP][0]
_UP_OFFSETS, _UP_SHAPE = '"data_offsets": ' + json.dumps(_OFFSETS[UP]), '"shape": [24, 16]'
_GOOD = _header(lambda table: None)
_DAMAGED = "\nhint: the file is damaged or is not a safetensors file; download it again"
_AGAIN = "\nhint: download or copy the file again"
_BEYOND = "{F}: header length %d is beyond the end of the file or the limit of 100000000 bytes" + _DAMAGED
_ONE = {"dtype": "U8", "shape": [1], "data_offsets": [len(_DATA), len(_DATA) + 1]}

SHARDS = (
    Hostile("empty", b"", "{F}: too short for a safetensors file: 0 bytes" + _DAMAGED),
    Hostile("cut-in-length", _GOOD[:7], "{F}: too short for a safetensors file: 7 bytes" + _DAMAGED),
    Hostile("cut-in-header", _GOOD[:100], _BEYOND % int.from_bytes(_GOOD[:8], "little")),
    Hostile("cut-in-data", _GOOD[:-1], f"{{F}}: expected {len(_DATA)} bytes of data (header), found {len(_DATA) - 1}: "
            f"the file is cut short{_AGAIN}"),
    Hostile("trailing-bytes", _GOOD + b"?", f"{{F}}: expected {len(_DATA)} bytes of data (header), found "
            f"{len(_DATA) + 1}: the file has bytes that no tensor owns{_AGAIN}"),
    Hostile("length-2^63", (1 << 63).to_bytes(8, "little") + _GOOD[8:], _BEYOND % 2**63),
    Hostile("length-2^64-1", b"\xff" * 8 + _GOOD[8:], _BEYOND % (2**64 - 1)),
    Hostile("length-0", bytes(8) + _GOOD[8:],
            "{F}: header: is not JSON: Expecting value: line 1 column 1 (char 0)"),
    Hostile("deep-lists", _file(b"[" * DEEP), "{F}: header: is nested too deeply"),
    Hostile("deep-objects", _file(b'{"":' * DEEP), "{F}: header: is nested too deeply"),
    Hostile("deep-metadata", _file(b'{"__metadata__":' + b"[" * DEEP), "{F}: header: is nested too deeply"),
    Hostile("list", _file(b"[]"), "{F}: header: expected a JSON object, found a list"),
    Hostile("no-json", _file(b"{,}"), "{F}: header: is not JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)"),
    Hostile("pickle", pickle.dumps({fqn: tensor.data for fqn, tensor in list(TENSORS.items())[:1]}, 2),
            _BEYOND % int.from_bytes(b"\x80\x02}q\x00X\x19\0", "little")),
    Hostile("pickle-in-header", _file(pickle.dumps({"a": 1}, 2)), "{F}: header: is not JSON: 'utf-8' codec can't "
            "decode byte 0x80 in position 0: invalid start byte"),
    Hostile("zip", b"PK\x03\x04" + bytes(60), _BEYOND % int.from_bytes(b"PK\x03\x04", "little")),
    Hostile("not-utf-8", _text("norm", b"n\xffrm"), "{F}: header: is not JSON: 'utf-8' codec can't decode byte 0xff in "
            f"position {json.dumps(header_of(TENSORS)).index('norm') + 1}: invalid start byte"),
    Hostile("utf-16", _file("{}".encode("utf-16")), "{F}: header: is not JSON: 'utf-8' codec can't decode byte 0xff in "
            "position 0: invalid start byte"),
    Hostile("byte-order-mark", _file(b"\xef\xbb\xbf{}"),
            "{F}: header: is not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    Hostile("half-a-character", _text(NORM, b"\\ud800"), "{F}: header: is not JSON: 'utf-8' codec can't encode "
            "character '\\ud800' in position 2048: surrogates not allowed"),
    Hostile("name-twice", _text(UP, b"model.norm.weight"), "{F}: header: is not JSON: key 'model.norm.weight' "
            "occurs twice"),
    Hostile("field-twice", _text(_UP_SHAPE, b'"shape": [1], "shape": [24, 16]'),
            "{F}: header: is not JSON: key 'shape' occurs twice"),
    Hostile("metadata-of-numbers", _header(lambda table: table.update(__metadata__={"a": 1})),
            "{F}: __metadata__: expected an object of strings"),
    Hostile("entry-null", _header(lambda table: table.update(a=None)),
            "{F}: 'a': expected an object with dtype, shape and data_offsets"),
    Hostile("unknown-field", _entry({"strides": [1]}),
            f"{{F}}: '{UP}': expected an object with dtype, shape and data_offsets"),
    Hostile("overlap", _shifted(UP, -2), f"{{F}}: '{UP}'.data_offsets: expected to begin at {_BEGIN}, found "
            f"{_BEGIN - 2}: overlaps the tensor before it"),
    Hostile("gap", _shifted(UP, 2), f"{{F}}: '{UP}'.data_offsets: expected to begin at {_BEGIN}, found "
            f"{_BEGIN + 2}: leaves a gap before it"),
    Hostile("same-bytes-twice", _header(lambda table: table.update(a=table[UP])),
            f"{{F}}: 'a'.data_offsets: expected to begin at {_OFFSETS[UP][1]}, found {_BEGIN}: "
            "overlaps the tensor before it"),
    Hostile("beyond-the-end", _header(lambda table: table.update(a=_ONE)), f"{{F}}: expected {len(_DATA) + 1} bytes of "
            f"data (header), found {len(_DATA)}: the file is cut short{_AGAIN}"),
    Hostile("offsets-2^62", _entry({"shape": [2**60], "data_offsets": [0, 2**61]}),
            f"{{F}}: '{UP}'.shape: expected less than 2^63 bits, found BF16 [1152921504606846976]"),
    Hostile("offsets-reversed", _entry({"data_offsets": _OFFSETS[UP][::-1]}),
            f"{{F}}: '{UP}'.data_offsets: expected [begin, end], found {_OFFSETS[UP][::-1]}"),
    Hostile("offsets-negative", _entry({"data_offsets": [-768, 0]}),
            f"{{F}}: '{UP}'.data_offsets: expected [begin, end], found [-768, 0]"),
    Hostile("offsets-infinite", _text(_UP_OFFSETS, b'"data_offsets": [0, Infinity]'),
            "{F}: header: is not JSON: Infinity is not JSON"),
    Hostile("offset-minus-zero", _text('"data_offsets": [0, ', b'"data_offsets": [-0, '),
            "{F}: header: is not JSON: -0 is not an integer"),
    Hostile("shape-negative", _entry({"shape": [-24, -16]}),
            f"{{F}}: '{UP}'.shape: expected a list of counts, found [-24, -16]"),
    Hostile("shape-nan", _text(_UP_SHAPE, b'"shape": [24, NaN]'), "{F}: header: is not JSON: NaN is not JSON"),
    Hostile("shape-fraction", _entry({"shape": [24.0, 16]}),
            f"{{F}}: '{UP}'.shape: expected a list of counts, found [24.0, 16]"),
    Hostile("shape-true", _entry({"shape": [True]}), f"{{F}}: '{UP}'.shape: expected a list of counts, found [True]"),
    Hostile("shape-overflow", _entry({"shape": [2**32, 2**32, 24, 16]}),
            f"{{F}}: '{UP}'.shape: expected less than 2^63 bits, found BF16 [4294967296, 4294967296, 24, 16]"),
    Hostile("shape-overflow-times-0", _entry({"shape": [2**62, 2**62, 0]}), f"{{F}}: '{UP}'.shape: expected less than "
            f"2^63 bits, found BF16 [{2**62}, {2**62}, 0]"),
    Hostile("shape-of-65", _entry({"shape": [1] * 65}),
            f"{{F}}: '{UP}'.shape: expected a list of counts, found {str([1] * 65)[:80]}"),
    Hostile("shape-of-5000-digits", _text(_UP_SHAPE, b'"shape": [' + b"9" * 5000 + b"]"), "{F}: header: is not JSON: "
            "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; use "
            "sys.set_int_max_str_digits() to increase the limit"),
    Hostile("shape-and-size-differ", _entry({"shape": [24, 17]}),
            f"{{F}}: '{UP}'.data_offsets: BF16 [24, 17] takes 816 bytes, found 768"),
    Hostile("dtype-unknown", _entry({"dtype": "F128"}), f"{{F}}: '{UP}'.dtype: unknown dtype 'F128'\nhint: known: "
            "BF16, BOOL, C64, F16, F32, F4, F64, F6_E2M3, F6_E3M2, F8_E4M3, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ, "
            "F8_E8M0, I16, I32, I64, I8, U16, U32, U64, U8"),
)  # fmt: skip


def _index(weight_map: object) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


_BELOW = "{F}: weight_map: expected a path that stays below its folder, found "
_RELATIVE = "{F}: weight_map: expected a relative path with / between its parts and no control characters, found "

INDEXES = (
    Hostile("climbs", _index({"a": "../model.safetensors"}), _BELOW + "'../model.safetensors'"),
    Hostile("climbs-inside", _index({"a": "a/../../model.safetensors"}), _BELOW + "'a/../../model.safetensors'"),
    Hostile("stands-still", _index({"a": "./model.safetensors"}), _BELOW + "'./model.safetensors'"),
    Hostile("empty-part", _index({"a": "a//model.safetensors"}), _BELOW + "'a//model.safetensors'"),
    Hostile("absolute", _index({"a": "/etc/model.safetensors"}), _RELATIVE + "'/etc/model.safetensors'"),
    Hostile("backslash", _index({"a": "..\\model.safetensors"}), _RELATIVE + "'..\\\\model.safetensors'"),
    Hostile("nul", _index({"a": "model\0.safetensors"}), _RELATIVE + "'model\\x00.safetensors'"),
    Hostile("escape", _index({"a": "\x1b[2J.safetensors"}), _RELATIVE + "'\\x1b[2J.safetensors'"),
    Hostile("no-name", _index({"a": ""}),
            "{F}: weight_map: expected a path of 1 to 1024 characters, found 0, found ''"),
    Hostile("long-name", _index({"a": "a" * 2000}),
            f"{{F}}: weight_map: expected a path of 1 to 1024 characters, found 2000, found '{'a' * 80}'"),
    Hostile("config-as-shard", _index({"a": "config.json"}), "{F}: weight_map: expected names of .safetensors files, "
            "found 'config.json'\nhint: the index is damaged or was written for weights in another format; download it "
            "again"),
    Hostile("not-a-name", _index({"a": 1}), "{F}: weight_map['a']: expected a file name, found a number"),
    Hostile("list", b"[]", "{F}: expected a JSON object, found a list"),
    Hostile("empty", b"", "{F}: is not JSON: Expecting value: line 1 column 1 (char 0)"),
    Hostile("deep", b'{"weight_map":' + b"[" * DEEP, "{F}: is nested too deeply"),
    Hostile("key-twice", b'{"weight_map": {}, "weight_map": {}}', "{F}: is not JSON: key 'weight_map' occurs twice"),
    Hostile("nan", b'{"metadata": {"total_size": NaN}}', "{F}: is not JSON: NaN is not JSON"),
    Hostile("not-utf-8", b'{"\xff": 0}',
            "{F}: is not JSON: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    Hostile("nothing-in-it", _index({}), f"{{S}}/{SHARD_NAMES[0]}: stray shard: model.safetensors.index.json "
            "does not name it\nhint: remove it, or download the index that belongs to these shards"),
)  # fmt: skip


def _config(**changes: object) -> bytes:
    return json.dumps(llama_config(num_hidden_layers=2, **changes)).encode()


CONFIGS = (
    Hostile("list", b"[]", "{F}: expected a JSON object, found a list"),
    Hostile("deep", b'{"architectures":' + b"[" * DEEP, "{F}: is nested too deeply"),
    Hostile("key-twice", b'{"hidden_size": 16, "hidden_size": 32}', "{F}: is not JSON: key 'hidden_size' occurs twice"),
    Hostile("nan", _config(rms_norm_eps=float("nan")), "{F}: is not JSON: NaN is not JSON"),
    Hostile("layers-2^62", _config().replace(b'_layers": 2', b'_layers": %d' % 2**62),
            f"{{F}}: num_hidden_layers: expected at most 10000, found {2**62}"),
    Hostile("layers-negative", _config().replace(b'_layers": 2', b'_layers": -2'),
            "{F}: num_hidden_layers: expected a positive integer, found -2"),
    Hostile("width-10^30", _config(hidden_size=10**30),
            f"{{F}}: hidden_size: expected at most 2147483647, found {10**30}"),
    Hostile("vocabulary-infinite", _config(vocab_size=float("inf")), "{F}: is not JSON: Infinity is not JSON"),
    Hostile("heads-0", _config(num_attention_heads=0),
            "{F}: num_attention_heads: expected a positive integer, found 0"),
    Hostile("heads-of-fractions", _config(num_attention_heads=0.5),
            "{F}: num_attention_heads: expected a positive integer, found 0.5"),
    Hostile("experts-by-the-million", json.dumps({
        **json.loads(DEEPSEEK.read_text()),
        "num_hidden_layers": 10_000, "n_routed_experts": 10_000, "num_nextn_predict_layers": 10_000}).encode(),
            "{F}: n_routed_experts: expected at most 200000 experts in all layers, found 200000000"),
)  # fmt: skip


def _manifest(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Give a manifest of two stages, changed."""
    document = json.loads(json.dumps(_BASE))
    change(document)
    return json.dumps(document).encode()


def _shard(**changes: object) -> bytes:
    return _manifest(lambda document: document["stages"][0]["shards"][0].update(changes))


def _virtual(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Give the manifest with its first bundle in an original file, changed."""

    def refer(document: dict[str, Any]) -> None:
        file = {"path": "model.safetensors", "nbytes": 9000, "pin": "9000 bytes", "digest": _DIGEST}
        document["virtual"] = {"location": "/models/tiny", "files": [file]}
        document["stages"][0] |= {"shards": [], "spans": [{"file": 0, "begin": 4096, "end": 9000}], "nbytes": 4904}
        change(document)

    return _manifest(refer)


_DIGEST = "blake3:" + "0" * 64
_BASE = {
    "format": "reshard-manifest",
    "version": 1,
    "created_by": "tests/hostile/make.py",
    "model": {"architecture": "LlamaForCausalLM", "num_layers": 2, "num_params": 5000},
    "source": {"kind": "huggingface", "location": "/models/tiny"},
    "layout": {"spec": "pp=2", "style": "loop", "num_stages": 2, "num_ranks": 2, "num_virtual": 1},
    "stages": [
        {
            "index": index,
            "rank": index,
            "virtual": 0,
            "modules": [f"model.layers.{index}"],
            "num_tensors": 9,
            "num_params": 2500,
            "nbytes": 4904,
            "shards": [{"path": f"stage-00{index}/model.safetensors", "nbytes": 9000, "digest": _DIGEST}],
        }
        for index in range(2)
    ],
    "ties": [],
    "files": [{"path": "config.json", "nbytes": 300, "digest": _DIGEST}],
    "training": None,
}
_WHOLE = _manifest(lambda document: None).decode()
_PATH = "{F}: stages[0].shards[0].path: expected "
_NBYTES = "{F}: stages[0].shards[0].nbytes: expected "

MANIFESTS = (
    Hostile("empty", b"", "{F}: is not JSON: Expecting value: line 1 column 1 (char 0)"),
    Hostile("list", b"[]", "{F}: expected a JSON object, found a list"),
    Hostile("deep", b'{"stages":' + b"[" * DEEP, "{F}: is nested too deeply"),
    Hostile("pickle", pickle.dumps({}, 2),
            "{F}: is not JSON: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte"),
    Hostile("byte-order-mark", b"\xef\xbb\xbf" + _WHOLE.encode(),
            "{F}: is not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    Hostile("half-a-character", _manifest(lambda document: document.update(created_by="\udc00")),
            "{F}: is not JSON: 'utf-8' codec can't encode character '\\udc00' in position 60: surrogates not allowed"),
    Hostile("key-twice", _WHOLE.replace('"ties"', '"stages"').encode(), "{F}: is not JSON: key 'stages' occurs twice"),
    Hostile("nan", _WHOLE.replace('"training": null', '"training": NaN').encode(),
            "{F}: is not JSON: NaN is not JSON"),
    Hostile("another-format", _manifest(lambda document: document.update(format="reshard-source")),
            "{F}: format: expected 'reshard-manifest'\nhint: this file was not written by reshard"),
    Hostile("version-2", _manifest(lambda document: document.update(version=2)), "{F}: version: expected 1, found 2\n"
            "hint: write it again with this version of reshard, or read it with the one that wrote it"),
    Hostile("version-true", _manifest(lambda document: document.update(version=True)), "{F}: version: expected 1, "
            "found True\nhint: write it again with this version of reshard, or read it with the one that wrote it"),
    Hostile("no-stage", _manifest(lambda document: document.update(stages=[])),
            "{F}: layout.num_stages: expected 0 (stages), found 2"),
    Hostile("stages-null", _manifest(lambda document: document.update(stages=None)),
            "{F}: stages: expected a list, found null"),
    Hostile("ranks-2^62", _manifest(lambda document: document["layout"].update(num_ranks=2**62)),
            f"{{F}}: layout.num_stages: expected num_ranks x num_virtual = {2**62}, at least 1, found 2"),
    Hostile("size-negative", _shard(nbytes=-1), _NBYTES + "a count below 2^63, found -1"),
    Hostile("size-2^63", _shard(nbytes=2**63), _NBYTES + f"a count below 2^63, found {2**63}"),
    Hostile("size-fraction", _shard(nbytes=1.5), _NBYTES + "a count, found a number"),
    Hostile("size-true", _shard(nbytes=True), _NBYTES + "a count, found true or false"),
    Hostile("size-of-5000-digits", _WHOLE.replace('"nbytes": ', '"nbytes": ' + "9" * 5000, 1).encode(),
            "{F}: is not JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5004 digits; "
            "use sys.set_int_max_str_digits() to increase the limit"),
    Hostile("path-climbs", _shard(path="../../outside.safetensors"),
            _PATH + "a path that stays below its folder, found '../../outside.safetensors'"),
    Hostile("path-climbs-inside", _shard(path="stage-000/../../outside.safetensors"),
            _PATH + "a path that stays below its folder, found 'stage-000/../../outside.safetensors'"),
    Hostile("path-absolute", _shard(path="/etc/passwd"),
            _PATH + "a relative path with / between its parts and no control characters, found '/etc/passwd'"),
    Hostile("path-with-nul", _shard(path="stage-000/model\0.safetensors"), _PATH + "a relative path with / between "
            "its parts and no control characters, found 'stage-000/model\\x00.safetensors'"),
    Hostile("path-with-escape", _shard(path="\x1b]0;you\x07"), _PATH + "a relative path with / between its parts and "
            "no control characters, found '\\x1b]0;you\\x07'"),
    Hostile("path-empty", _shard(path=""), _PATH + "a path of 1 to 1024 characters, found 0, found ''"),
    Hostile("path-long", _shard(path="a/" * 600 + "b"),
            _PATH + f"a path of 1 to 1024 characters, found 1201, found '{'a/' * 40}'"),
    Hostile("path-of-the-manifest", _shard(path="manifest.json"),
            "{F}: stages[0].shards[0].path: 'manifest.json' is taken by manifest.json itself"),
    Hostile("path-twice", _shard(path="stage-001/model.safetensors"),
            "{F}: stages[1].shards[0].path: 'stage-001/model.safetensors' is taken by stages[0].shards[0]"),
    Hostile("carried-file-climbs", _manifest(lambda document: document["files"][0].update(path="../.bashrc")),
            "{F}: files[0].path: expected a path that stays below its folder, found '../.bashrc'"),
    Hostile("carried-file-over-a-shard", _manifest(lambda document: document["files"][0].update(
        path="stage-000/model.safetensors")),
            "{F}: files[0].path: 'stage-000/model.safetensors' is taken by stages[0].shards[0]"),
    Hostile("digest-of-another-kind", _shard(digest="sha256:" + "0" * 64), "{F}: stages[0].shards[0].digest: expected "
            f"blake3: and 64 hex digits, found 'sha256:{'0' * 64}'"),
    Hostile("tie-to-nowhere", _manifest(lambda document: document.update(
        ties=[{"owner": {"fqn": "a.b", "stage": 2**40}, "replicas": [{"fqn": "a.b", "stage": 2**40}]}])),
            "{F}: 3 problems:\n"
            f"  ties[0]: 'a.b' names stage {2**40}, there are 2\n"
            f"  ties[0]: 'a.b' names stage {2**40}, there are 2\n"
            "  ties[0]: 'a.b' is tied twice"),
    Hostile("virtual-file-climbs", _virtual(lambda document: document["virtual"]["files"][0].update(path="../a")),
            "{F}: virtual.files[0].path: expected a path that stays below its folder, found '../a'"),
    Hostile("virtual-relative", _virtual(lambda document: document["virtual"].update(location="../models")),
            "{F}: virtual.location: expected an absolute path or a URL, found '../models'"),
    Hostile("span-of-file-2^40", _virtual(lambda document: document["stages"][0]["spans"][0].update(file=2**40)),
            f"{{F}}: stages[0].spans[0].file: expected less than 1 (virtual.files), found {2**40}"),
    Hostile("span-beyond-the-end", _virtual(lambda document: document["stages"][0]["spans"][0].update(end=2**62)),
            "{F}: 2 problems:\n"
            f"  stages[0].nbytes: expected {2**62 - 4096} (its spans), found 4904\n"
            f"  stages[0].spans[0]: expected begin < end <= 9000 (virtual.files[0].nbytes), found 4096 and {2**62}"),
)  # fmt: skip


if __name__ == "__main__":
    write_files()
