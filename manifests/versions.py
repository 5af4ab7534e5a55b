"""Versions of a chain of weights, as `reshard delta publish` and a run with `--publish` write them.

See Note [A version of a chain] in `reshard.formats.delta.chain`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from manifests.digest import PREFIX, Hasher
from manifests.jsontext import parse_json_object

VERSION_INDEX = re.compile(r"weight_v([0-9]{6,12})/model\.safetensors\.index\.json")
VERSION_FILE = re.compile(r"weight_v([0-9]{6,12})/.*")
LOCK_NAME = ".publish.lock"  # of the process that publishes to a chain in a folder
XOR, BLAKE3, ZSTD = "xor", "blake3", "zstd"  # what is written
_OF_VERSION = {
    "version", "base_version", "delta_encoding", "compression_format", "checksum_format", "state", "base_state", "files"
}  # fmt: skip
LEVEL = 1  # of zstd: higher ones take longer than the disk


def folder_of(number: int) -> str:
    return f"weight_v{number:06d}"


def digest_of_state(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return the digest of a state: of the name, dtype, shape and digest in hex of each tensor."""
    hasher = Hasher()
    for name, dtype, shape, digest in sorted(tensors):
        hasher.update(f"{json.dumps([name, dtype, list(shape), digest], ensure_ascii=False)}\n".encode())
    return PREFIX + hasher.hexdigest()


def metadata_of(number: int, state: str | None, base_state: str | None = None, *, is_full: bool) -> dict[str, str]:
    """Return the metadata of a version's index: a full one, or a delta of the version before."""
    fields = {"version": f"{number:06d}", "state": state}
    if not is_full:
        fields |= {
            "base_version": f"{number - 1:06d}", "delta_encoding": XOR, "compression_format": ZSTD,
            "checksum_format": BLAKE3, "base_state": base_state,
        }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


def encode_version(metadata: Mapping[str, object], files: Mapping[str, str], weight_map: Mapping[str, str]) -> bytes:
    """Return the index of a version, with the digests of its auxiliary files."""
    index = {"metadata": {**metadata, "files": encode_files(files)}, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()


def without_version(index: bytes, where: str) -> bytes:
    """Return an index without what makes its folder a version of a chain."""
    document = parse_json_object(index, where)
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not {"version", "state"} <= metadata.keys():
        return index
    document["metadata"] = {key: value for key, value in metadata.items() if key not in _OF_VERSION}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def encode_files(files: Mapping[str, str]) -> str:
    return json.dumps(files, sort_keys=True)
