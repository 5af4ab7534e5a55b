"""Hostile files, each with the code and place of its refusal; {F} stands for the file, {S} for its folder.

python -m tests.hostile.make writes them to tests/hostile/files, from where the tests take them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.builders import header_of, llama_config, random_tensors, with_digest

FILES = Path(__file__).with_name("files")
DEEPSEEK = Path(__file__).parents[1] / "data" / "configs" / "deepseek-v3.json"
DEEP = 30_000  # brackets
TENSORS = random_tensors(llama_config(num_hidden_layers=2))
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
SHARD_NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True, slots=True)
class Hostile:
    """A file, and the code and place of the error about it."""

    name: str
    data: bytes
    code: str
    where: str


def write_files(folder: Path = FILES) -> None:
    """Write every file below `folder`."""
    for kind, cases in (("shards", SHARDS), ("indexes", INDEXES), ("configs", CONFIGS), ("manifests", MANIFESTS)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for case in cases:
            (folder / kind / case.name).write_bytes(case.data)


def _file(raw: bytes, data: bytes | None = None) -> bytes:
    return len(raw).to_bytes(8, "little") + raw + (_DATA if data is None else data)


def _header(change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> bytes:
    """Return a good file with another header."""
    table = header_of(TENSORS)
    change(table)
    return _file(json.dumps(table).encode(), data)


def _entry(change: dict[str, Any]) -> bytes:
    """Return a good file with one entry changed."""
    return _header(lambda table: table[UP].update(change))


def _text(old: str, new: bytes) -> bytes:
    """Return a good file whose header has text that Python's json would not write."""
    return _file(json.dumps(header_of(TENSORS)).encode().replace(old.encode(), new, 1))


def _shifted(fqn: str, by: int) -> bytes:
    begin, end = _OFFSETS[fqn]
    return _header(lambda table: table[fqn].update(data_offsets=[begin + by, end + by]))


_DATA = b"".join(tensor.data for tensor in TENSORS.values())
_OFFSETS: dict[str, list[int]] = {fqn: entry["data_offsets"] for fqn, entry in header_of(TENSORS).items()}
_BEGIN = _OFFSETS[UP][0]
_UP_OFFSETS, _UP_SHAPE = '"data_offsets": ' + json.dumps(_OFFSETS[UP]), '"shape": [24, 16]'
_GOOD = _header(lambda table: None)
_AT_UP = f"{{F}}: '{UP}'"
_ONE = {"dtype": "U8", "shape": [1], "data_offsets": [len(_DATA), len(_DATA) + 1]}

SHARDS = (
    Hostile("empty", b"", "header.not-safetensors", "{F}"),
    Hostile("cut-in-length", _GOOD[:7], "header.not-safetensors", "{F}"),
    Hostile("cut-in-header", _GOOD[:100], "header.not-safetensors", "{F}"),
    Hostile("cut-in-data", _GOOD[:-1], "header.wrong-data-length", "{F}"),
    Hostile("trailing-bytes", _GOOD + b"?", "header.wrong-data-length", "{F}"),
    Hostile("length-2^63", (1 << 63).to_bytes(8, "little") + _GOOD[8:], "header.not-safetensors", "{F}"),
    Hostile("length-2^64-1", b"\xff" * 8 + _GOOD[8:], "header.not-safetensors", "{F}"),
    Hostile("length-0", bytes(8) + _GOOD[8:], "source.not-json", "{F}: header"),
    Hostile("deep-lists", _file(b"[" * DEEP), "source.json-too-deep", "{F}: header"),
    Hostile("deep-objects", _file(b'{"":' * DEEP), "source.json-too-deep", "{F}: header"),
    Hostile("deep-metadata", _file(b'{"__metadata__":' + b"[" * DEEP), "source.json-too-deep", "{F}: header"),
    Hostile("list", _file(b"[]"), "source.not-an-object", "{F}: header"),
    Hostile("no-json", _file(b"{,}"), "source.not-json", "{F}: header"),
    Hostile(
        "pickle",
        pickle.dumps({fqn: tensor.data for fqn, tensor in list(TENSORS.items())[:1]}, 2),
        "header.not-safetensors",
        "{F}",
    ),
    Hostile("pickle-in-header", _file(pickle.dumps({"a": 1}, 2)), "source.not-json", "{F}: header"),
    Hostile("zip", b"PK\x03\x04" + bytes(60), "header.not-safetensors", "{F}"),
    Hostile("not-utf-8", _text("norm", b"n\xffrm"), "source.not-json", "{F}: header"),
    Hostile("utf-16", _file("{}".encode("utf-16")), "source.not-json", "{F}: header"),
    Hostile("byte-order-mark", _file(b"\xef\xbb\xbf{}"), "source.not-json", "{F}: header"),
    Hostile("half-a-character", _text(NORM, b"\\ud800"), "source.not-json", "{F}: header"),
    Hostile("name-twice", _text(UP, b"model.norm.weight"), "source.not-json", "{F}: header"),
    Hostile("field-twice", _text(_UP_SHAPE, b'"shape": [1], "shape": [24, 16]'), "source.not-json", "{F}: header"),
    Hostile(
        "metadata-of-numbers",
        _header(lambda table: table.update(__metadata__={"a": 1})),
        "header.invalid-field",
        "{F}: __metadata__",
    ),
    Hostile("entry-null", _header(lambda table: table.update(a=None)), "header.invalid-field", "{F}: 'a'"),
    Hostile("unknown-field", _entry({"strides": [1]}), "header.invalid-field", _AT_UP),
    Hostile("overlap", _shifted(UP, -2), "header.wrong-offsets", _AT_UP + ".data_offsets"),
    Hostile("gap", _shifted(UP, 2), "header.wrong-offsets", _AT_UP + ".data_offsets"),
    Hostile(
        "same-bytes-twice",
        _header(lambda table: table.update(a=table[UP])),
        "header.wrong-offsets",
        "{F}: 'a'.data_offsets",
    ),
    Hostile("beyond-the-end", _header(lambda table: table.update(a=_ONE)), "header.wrong-data-length", "{F}"),
    Hostile(
        "offsets-2^62",
        _entry({"shape": [2**60], "data_offsets": [0, 2**61]}),
        "header.invalid-field",
        _AT_UP + ".shape",
    ),
    Hostile(
        "offsets-reversed",
        _entry({"data_offsets": _OFFSETS[UP][::-1]}),
        "header.invalid-field",
        _AT_UP + ".data_offsets",
    ),
    Hostile("offsets-negative", _entry({"data_offsets": [-768, 0]}), "header.invalid-field", _AT_UP + ".data_offsets"),
    Hostile("offsets-infinite", _text(_UP_OFFSETS, b'"data_offsets": [0, Infinity]'), "source.not-json", "{F}: header"),
    Hostile(
        "offset-minus-zero", _text('"data_offsets": [0, ', b'"data_offsets": [-0, '), "source.not-json", "{F}: header"
    ),
    Hostile("shape-negative", _entry({"shape": [-24, -16]}), "header.invalid-field", _AT_UP + ".shape"),
    Hostile("shape-nan", _text(_UP_SHAPE, b'"shape": [24, NaN]'), "source.not-json", "{F}: header"),
    Hostile("shape-fraction", _entry({"shape": [24.0, 16]}), "header.invalid-field", _AT_UP + ".shape"),
    Hostile("shape-true", _entry({"shape": [True]}), "header.invalid-field", _AT_UP + ".shape"),
    Hostile("shape-overflow", _entry({"shape": [2**32, 2**32, 24, 16]}), "header.invalid-field", _AT_UP + ".shape"),
    Hostile("shape-overflow-times-0", _entry({"shape": [2**62, 2**62, 0]}), "header.invalid-field", _AT_UP + ".shape"),
    Hostile("shape-of-65", _entry({"shape": [1] * 65}), "header.invalid-field", _AT_UP + ".shape"),
    Hostile(
        "shape-of-5000-digits", _text(_UP_SHAPE, b'"shape": [' + b"9" * 5000 + b"]"), "source.not-json", "{F}: header"
    ),
    Hostile("shape-and-size-differ", _entry({"shape": [24, 17]}), "header.wrong-offsets", _AT_UP + ".data_offsets"),
    Hostile("dtype-unknown", _entry({"dtype": "F128"}), "header.unknown-dtype", _AT_UP + ".dtype"),
)


def _index(weight_map: object) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


INDEXES = (
    Hostile("climbs", _index({"a": "../model.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("climbs-inside", _index({"a": "a/../../model.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("stands-still", _index({"a": "./model.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("empty-part", _index({"a": "a//model.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("absolute", _index({"a": "/etc/model.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("backslash", _index({"a": "..\\model.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("nul", _index({"a": "model\0.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("escape", _index({"a": "\x1b[2J.safetensors"}), "source.bad-index", "{F}: weight_map"),
    Hostile("no-name", _index({"a": ""}), "source.bad-index", "{F}: weight_map"),
    Hostile("long-name", _index({"a": "a" * 2000}), "source.bad-index", "{F}: weight_map"),
    Hostile("config-as-shard", _index({"a": "config.json"}), "source.bad-index", "{F}: weight_map"),
    Hostile("not-a-name", _index({"a": 1}), "source.bad-index", "{F}: weight_map['a']"),
    Hostile("list", b"[]", "source.not-an-object", "{F}"),
    Hostile("empty", b"", "source.not-json", "{F}"),
    Hostile("deep", b'{"weight_map":' + b"[" * DEEP, "source.json-too-deep", "{F}"),
    Hostile("key-twice", b'{"weight_map": {}, "weight_map": {}}', "source.not-json", "{F}"),
    Hostile("nan", b'{"metadata": {"total_size": NaN}}', "source.not-json", "{F}"),
    Hostile("not-utf-8", b'{"\xff": 0}', "source.not-json", "{F}"),
    Hostile("nothing-in-it", _index({}), "source.stray-shard", "{S}/model-00001-of-00002.safetensors"),
)


def _config(**changes: object) -> bytes:
    return json.dumps(llama_config(num_hidden_layers=2, **changes)).encode()


CONFIGS = (
    Hostile("list", b"[]", "source.not-an-object", "{F}"),
    Hostile("deep", b'{"architectures":' + b"[" * DEEP, "source.json-too-deep", "{F}"),
    Hostile("key-twice", b'{"hidden_size": 16, "hidden_size": 32}', "source.not-json", "{F}"),
    Hostile("nan", _config(vocab_size=float("nan")), "config.invalid-field", "{F}: vocab_size"),
    Hostile(
        "layers-2^62",
        _config().replace(b'_layers": 2', b'_layers": %d' % 2**62),
        "config.too-large",
        "{F}: num_hidden_layers",
    ),
    Hostile(
        "layers-negative",
        _config().replace(b'_layers": 2', b'_layers": -2'),
        "config.invalid-field",
        "{F}: num_hidden_layers",
    ),
    Hostile("width-10^30", _config(hidden_size=10**30), "config.too-large", "{F}: hidden_size"),
    Hostile("vocabulary-infinite", _config(vocab_size=float("inf")), "config.invalid-field", "{F}: vocab_size"),
    Hostile("heads-0", _config(num_attention_heads=0), "config.invalid-field", "{F}: num_attention_heads"),
    Hostile("heads-of-fractions", _config(num_attention_heads=0.5), "config.invalid-field", "{F}: num_attention_heads"),
    Hostile(
        "experts-by-the-million",
        json.dumps(
            {
                **json.loads(DEEPSEEK.read_text()),
                "num_hidden_layers": 10_000,
                "n_routed_experts": 10_000,
                "num_nextn_predict_layers": 10_000,
            }
        ).encode(),
        "config.too-large",
        "{F}: n_routed_experts",
    ),
)


def _manifest(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Give a manifest of two stages, changed."""
    document = json.loads(json.dumps(_BASE))
    change(document)
    return with_digest(json.dumps(document).encode())


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
    "digest": _DIGEST,
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
    Hostile("empty", b"", "source.not-json", "{F}"),
    Hostile("list", b"[]", "source.not-an-object", "{F}"),
    Hostile("deep", b'{"stages":' + b"[" * DEEP, "source.json-too-deep", "{F}"),
    Hostile("pickle", pickle.dumps({}, 2), "source.not-json", "{F}"),
    Hostile("byte-order-mark", b"\xef\xbb\xbf" + _WHOLE.encode(), "source.not-json", "{F}"),
    Hostile(
        "half-a-character", _manifest(lambda document: document.update(created_by="\udc00")), "source.not-json", "{F}"
    ),
    Hostile("key-twice", _WHOLE.replace('"ties"', '"stages"').encode(), "source.not-json", "{F}"),
    Hostile("nan", _WHOLE.replace('"training": null', '"training": NaN').encode(), "source.not-json", "{F}"),
    Hostile(
        "another-format",
        _manifest(lambda document: document.update(format="reshard-source")),
        "manifest.not-a-manifest",
        "{F}: format",
    ),
    Hostile(
        "version-3",
        _manifest(lambda document: document.update(version=3)),
        "manifest.unsupported-version",
        "{F}: version",
    ),
    Hostile(
        "version-true",
        _manifest(lambda document: document.update(version=True)),
        "manifest.unsupported-version",
        "{F}: version",
    ),
    Hostile("no-digest", _manifest(lambda document: document.pop("digest")), "manifest.no-digest", "{F}: digest"),
    Hostile(
        "digest-in-created-by",
        _manifest(lambda document: document.update(created_by=f"reshard 0.1.0, manifest {document.pop('digest')}")),
        "manifest.no-digest",
        "{F}: digest",
    ),
    Hostile(
        "digest-empty", _manifest(lambda document: document.update(digest="")), "manifest.invalid-field", "{F}: digest"
    ),
    Hostile(
        "digest-in-capitals",
        _manifest(lambda document: document.update(digest="blake3:" + 64 * "A")),
        "manifest.invalid-field",
        "{F}: digest",
    ),
    Hostile(
        "digest-null", _manifest(lambda document: document.update(digest=None)), "manifest.invalid-field", "{F}: digest"
    ),
    Hostile("digest-of-something-else", _WHOLE.replace("/tiny", "/tidy").encode(), "manifest.digest-mismatch", "{F}"),
    Hostile(
        "digest-escaped",
        _WHOLE.replace('"digest": "blake3', '"digest": "\\u0062lake3', 1).encode(),
        "manifest.digest-mismatch",
        "{F}",
    ),
    Hostile(
        "no-stage",
        _manifest(lambda document: document.update(stages=[])),
        "manifest.inconsistent",
        "{F}: layout.num_stages",
    ),
    Hostile(
        "stages-null", _manifest(lambda document: document.update(stages=None)), "manifest.invalid-field", "{F}: stages"
    ),
    Hostile(
        "ranks-2^62",
        _manifest(lambda document: document["layout"].update(num_ranks=2**62)),
        "manifest.inconsistent",
        "{F}: layout.num_stages",
    ),
    Hostile("size-negative", _shard(nbytes=-1), "manifest.invalid-field", "{F}: stages[0].shards[0].nbytes"),
    Hostile("size-2^63", _shard(nbytes=2**63), "manifest.invalid-field", "{F}: stages[0].shards[0].nbytes"),
    Hostile("size-fraction", _shard(nbytes=1.5), "manifest.invalid-field", "{F}: stages[0].shards[0].nbytes"),
    Hostile("size-true", _shard(nbytes=True), "manifest.invalid-field", "{F}: stages[0].shards[0].nbytes"),
    Hostile(
        "size-of-5000-digits",
        _WHOLE.replace('"nbytes": ', '"nbytes": ' + "9" * 5000, 1).encode(),
        "source.not-json",
        "{F}",
    ),
    Hostile(
        "path-climbs",
        _shard(path="../../outside.safetensors"),
        "manifest.inconsistent",
        "{F}: stages[0].shards[0].path",
    ),
    Hostile(
        "path-climbs-inside",
        _shard(path="stage-000/../../outside.safetensors"),
        "manifest.inconsistent",
        "{F}: stages[0].shards[0].path",
    ),
    Hostile("path-absolute", _shard(path="/etc/passwd"), "manifest.inconsistent", "{F}: stages[0].shards[0].path"),
    Hostile(
        "path-with-nul",
        _shard(path="stage-000/model\0.safetensors"),
        "manifest.inconsistent",
        "{F}: stages[0].shards[0].path",
    ),
    Hostile(
        "path-with-escape", _shard(path="\x1b]0;you\x07"), "manifest.inconsistent", "{F}: stages[0].shards[0].path"
    ),
    Hostile("path-empty", _shard(path=""), "manifest.inconsistent", "{F}: stages[0].shards[0].path"),
    Hostile("path-long", _shard(path="a/" * 600 + "b"), "manifest.inconsistent", "{F}: stages[0].shards[0].path"),
    Hostile(
        "path-of-the-manifest", _shard(path="manifest.json"), "manifest.inconsistent", "{F}: stages[0].shards[0].path"
    ),
    Hostile(
        "path-twice",
        _shard(path="stage-001/model.safetensors"),
        "manifest.inconsistent",
        "{F}: stages[1].shards[0].path",
    ),
    Hostile(
        "carried-file-climbs",
        _manifest(lambda document: document["files"][0].update(path="../.bashrc")),
        "manifest.inconsistent",
        "{F}: files[0].path",
    ),
    Hostile(
        "carried-file-over-a-shard",
        _manifest(lambda document: document["files"][0].update(path="stage-000/model.safetensors")),
        "manifest.inconsistent",
        "{F}: files[0].path",
    ),
    Hostile(
        "digest-of-another-kind",
        _shard(digest="sha256:" + "0" * 64),
        "manifest.inconsistent",
        "{F}: stages[0].shards[0].digest",
    ),
    Hostile(
        "tie-to-nowhere",
        _manifest(
            lambda document: document.update(
                ties=[{"owner": {"fqn": "a.b", "stage": 2**40}, "replicas": [{"fqn": "a.b", "stage": 2**40}]}]
            )
        ),
        "manifest.inconsistent",
        "{F}",
    ),
    Hostile(
        "virtual-file-climbs",
        _virtual(lambda document: document["virtual"]["files"][0].update(path="../a")),
        "manifest.inconsistent",
        "{F}: virtual.files[0].path",
    ),
    Hostile(
        "virtual-relative",
        _virtual(lambda document: document["virtual"].update(location="../models")),
        "manifest.inconsistent",
        "{F}: virtual.location",
    ),
    Hostile(
        "span-of-file-2^40",
        _virtual(lambda document: document["stages"][0]["spans"][0].update(file=2**40)),
        "manifest.inconsistent",
        "{F}: stages[0].spans[0].file",
    ),
    Hostile(
        "span-beyond-the-end",
        _virtual(lambda document: document["stages"][0]["spans"][0].update(end=2**62)),
        "manifest.inconsistent",
        "{F}",
    ),
)


if __name__ == "__main__":
    write_files()
