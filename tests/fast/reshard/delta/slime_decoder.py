"""Chains as slime writes and reads them: a publisher and a receiver written from its format, with nothing of ours.

Source: slime, `update_weight_from_disk_delta.py`, and the receiver in SGLang's patch, `pull_weights`: the newest full
version is copied, each delta is applied in place, tensor by tensor, and every new state is compared with its checksum.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"


def checksum(name: str, data: bytes) -> str:
    if name == "adler32":
        return f"{zlib.adler32(data):08x}"
    return blake3.blake3(data).hexdigest() if name == "blake3" else xxhash.xxh3_128(data).hexdigest()


def read_file(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def pull(served: Path, base: Path, chain: Path, target: int) -> None:
    """Bring a folder that has nothing to a version, from the newest full version, or else from the base."""
    start = target
    while start > 0 and is_delta(chain / f"weight_v{start:06d}"):
        start -= 1
    shutil.copytree(chain / f"weight_v{start:06d}" if start else base, served)
    for number in range(start + 1, target + 1):
        apply(served, chain / f"weight_v{number:06d}", number)


def is_delta(version: Path) -> bool:
    return "delta_encoding" in json.loads((version / INDEX).read_text())["metadata"]


def apply(served: Path, version: Path, number: int) -> None:
    metadata = json.loads((version / INDEX).read_text())["metadata"]
    assert (int(metadata["version"]), int(metadata["base_version"])) == (number, number - 1)
    assert metadata["compression_format"] == "zstd"
    for delta in sorted(version.glob("*.safetensors")):
        header, data = read_file(delta)
        wanted = header.pop("__metadata__", {})
        for name, info in header.items():
            begin, end = info["data_offsets"]
            raw = zstandard.ZstdDecompressor().stream_reader(data[begin:end]).read()
            path, first, last = locate(served, name)
            whole = bytearray(path.read_bytes())
            state = np.frombuffer(whole, np.uint8)[first:last]
            if metadata["delta_encoding"] == "xor":
                state ^= np.frombuffer(raw, np.uint8)
            else:
                count = int.from_bytes(raw[:4], "little")
                state[np.frombuffer(raw[4 : 4 + 4 * count], "<u4")] = np.frombuffer(raw[4 + 4 * count :], np.uint8)
            assert checksum(metadata["checksum_format"], state.tobytes()) == wanted[name], name
            path.write_bytes(whole)


def locate(folder: Path, name: str) -> tuple[Path, int, int]:
    for path in folder.glob("*.safetensors"):
        header, data = read_file(path)
        if name in header:
            first = path.stat().st_size - len(data)
            begin, end = header[name]["data_offsets"]
            return path, first + begin, first + end
    raise KeyError(name)


def publish(
    chain: Path, number: int, old: Mapping[str, bytes], new: Mapping[str, bytes], encoding: str, algorithm: str
) -> None:
    """Write a delta as slime's trainer does: the tensors that changed, in one file, and the index last."""
    deltas, sums = {}, {}
    for name, state in new.items():
        before, after = (np.frombuffer(data, np.uint8) for data in (old[name], state))
        if (before == after).all():
            continue
        diff = before ^ after
        if encoding == "overwrite":
            positions = np.flatnonzero(diff).astype("<u4")
            parts = (np.array([len(positions)], "<u4"), positions, after[positions])
            diff = np.concatenate([part.view(np.uint8) for part in parts])
        deltas[name] = zstandard.ZstdCompressor(level=1).compress(diff.tobytes())
        sums[name] = checksum(algorithm, state)
    header, begin = {"__metadata__": sums}, 0
    for name, data in deltas.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [begin, begin + len(data)]}  # type: ignore[dict-item]
        begin += len(data)
    text = json.dumps(header).encode()
    version = chain / f"weight_v{number:06d}"
    version.mkdir(parents=True)
    file = "model-00000-of-00001.safetensors"
    (version / file).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(deltas.values()))
    metadata = {
        "version": f"{number:06d}", "base_version": f"{number - 1:06d}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": algorithm,
    }  # fmt: skip
    (version / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(deltas, file)}))
