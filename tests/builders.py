"""Tiny Hugging Face folders, written byte by byte, and the `reshard` command run on them."""

from __future__ import annotations

import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import deserialize

from reshard.cli import main

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"

# safetensors v0.8.0, `Dtype::bitsize`.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run of the command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def refusal(self) -> tuple[int, str, str]:
        """Exit code, error code and place of a command that failed with --json."""
        error = self.json["error"]
        return self.code, error["code"], error["where"]


def reshard(*args: str | Path) -> Ended:
    """Run the whole `reshard` command in this process."""
    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["reshard", *map(str, args)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = argv
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())


def run(*args: str | Path) -> Ended:
    """Run the `reshard` command, which must succeed."""
    ended = reshard(*args)
    assert ended.code == 0, ended.err
    return ended


def pack(source: str | Path, out: str | Path, layout: str = "pp=2", *flags: str | Path) -> Path:
    """Pack a source, which must succeed, and return its output."""
    run("pack", source, "--layout", layout, "--out", out, *flags)
    return Path(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """How the command refused something: `found` is its exit code, the error's code and its place."""

    found: tuple[int, str, str]
    text: str  # for `wording`


def refusal(*args: str | Path) -> Refusal:
    """Run the `reshard` command, which must end with an error as one JSON object."""
    ended = reshard(*args, "--json")
    assert (ended.json.keys(), ended.json["version"], ended.err) == ({"version", "error"}, 1, "")
    error = ended.json["error"]
    text = f"{error['where']}: {error['problem']}" + (f"\nhint: {error['hint']}" if error["hint"] else "")
    return Refusal(found=ended.refusal, text=text)


def llama_config(**overrides: Any) -> dict[str, Any]:
    """Return the config of a Llama of a few kilobytes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "tie_word_embeddings": False,
        **overrides,
    }


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a bias-free Llama and its shape; a test holds this against transformers."""
    width, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_width = config["num_key_value_heads"] * (width // heads)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (width, width),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, width),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, width),
            f"{prefix}.self_attn.o_proj.weight": (width, width),
            f"{prefix}.mlp.gate_proj.weight": (ffn, width),
            f"{prefix}.mlp.up_proj.weight": (ffn, width),
            f"{prefix}.mlp.down_proj.weight": (width, ffn),
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.post_attention_layernorm.weight": (width,),
        }
    return shapes | {"model.norm.weight": (width,), HEAD: (vocab, width)}


def random_tensors(config: Mapping[str, Any], *, dtypes: Sequence[str] = ("BF16",), seed: int = 0) -> dict[str, Tensor]:
    """Fill a model's tensors with random bytes, dealing out dtypes; a tied head is not among them.

    Values in F32 are below 2, so that they can be cast.
    """
    generator = random.Random(seed)
    return {
        fqn: Tensor(dtype=dtype, shape=shape, data=random_bytes(generator, prod(shape), dtype))
        for fqn, shape in llama_shapes(config).items()
        if not (fqn == HEAD and config["tie_word_embeddings"])
        for dtype in [generator.choice(dtypes)]
    }


def random_bytes(generator: random.Random, count: int, dtype: str) -> bytes:
    data = bytearray(generator.randbytes(count * DTYPE_BITS[dtype] // 8))
    if dtype == "F32":
        data[3::4] = data[3::4].translate(bytes(byte & 0xBF for byte in range(256)))  # an exponent's highest bit
    return bytes(data)


def header_of(
    tensors: Mapping[str, Tensor],
    *,
    data_order: Iterable[str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a header's JSON object, listed in the order of `tensors`, laid out in `data_order`."""
    begin, offsets = 0, {}
    for fqn in data_order or tensors:
        offsets[fqn] = [begin, begin + len(tensors[fqn].data)]
        begin += len(tensors[fqn].data)
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    return table | {
        fqn: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets[fqn]}
        for fqn, tensor in tensors.items()
    }


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    data_order: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    padding: int = 0,
) -> None:
    """Write a safetensors file with no help from any library."""
    header = json.dumps(header_of(tensors, data_order=data_order, metadata=metadata)).encode() + b" " * padding
    data = b"".join(tensors[fqn].data for fqn in data_order or tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def read_safetensors(file: bytes) -> dict[str, Tensor]:
    """Return what the `safetensors` library finds in a file."""
    found: list[tuple[str, dict[str, Any]]] = deserialize(file)  # type: ignore[no-untyped-call]
    return {
        name: Tensor(dtype=tensor["dtype"], shape=tuple(tensor["shape"]), data=bytes(tensor["data"]))
        for name, tensor in found
    }


def index_of(shards: Mapping[str, Iterable[str]], total_nbytes: int) -> bytes:
    """Return the text of an index as transformers writes it."""
    weight_map = {fqn: shard for shard, names in shards.items() for fqn in names}
    document = {"metadata": {"total_size": total_nbytes}, "weight_map": weight_map}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def write_model(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    num_shards: int = 1,
) -> dict[str, Tensor]:
    """Write a whole Hugging Face folder, in one file or in shards with an index, and give its tensors."""
    config = llama_config() if config is None else config
    tensors = random_tensors(config) if tensors is None else dict(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text('{"bos_token_id": 1}\n')
    (folder / "tokenizer.json").write_bytes('{"é": "\\u0000"}'.encode())
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
        return tensors
    names = list(tensors)
    shards = {f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors": names[i::num_shards] for i in range(num_shards)}
    for shard, held in shards.items():
        write_safetensors(folder / shard, {fqn: tensors[fqn] for fqn in held}, metadata={"format": "pt"})
    total_nbytes = sum(len(tensor.data) for tensor in tensors.values())
    (folder / INDEX).write_bytes(index_of(shards, total_nbytes))
    return tensors


def weights_path(stage: int, of: int) -> str:
    """Return the path of a stage's weights in a pack of `of` stages, each of which has one shard in the root."""
    return f"model-{stage + 1:05d}-of-{of:05d}.safetensors"


def without_digest(manifest: bytes) -> bytes:
    """Return a manifest's text without its digest."""
    return re.sub(rb'"digest": "blake3:[0-9a-f]{64}",\s*', b"", manifest, count=1)


def with_digest(manifest: bytes) -> bytes:
    """Return a manifest's text with the right digest in its first `digest` field, if there is one."""
    if (field := re.search(rb'"digest":\s*"blake3:([0-9a-f]{64})"', manifest)) is None:
        return manifest
    before, after = manifest[: field.start(1)], manifest[field.end(1) :]
    return before + blake3(before + 64 * b"0" + after).hexdigest().encode() + after


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the manifest.json of a folder by hand, its digest included."""
    document = json.loads((folder / "manifest.json").read_bytes())
    change(document)
    (folder / "manifest.json").write_bytes(with_digest(json.dumps(document).encode()))


@contextmanager
def without_file(folder: Path, name: str) -> Iterator[None]:
    """Take a file out of a checkpoint and its manifest, as if it had never been packed, until the block ends."""
    kept = {path: path.read_bytes() for path in (folder / name, folder / "manifest.json")}
    edit_manifest(
        folder,
        lambda document: document.update(files=[file for file in document["files"] if file["path"] != name]),
    )
    (folder / name).unlink()
    try:
        yield
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


def files_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, whole."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, position: int = -1, bits: int = 1) -> None:
    """Flip bits of one byte of a file; positions count from the end when negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files in a folder and below it."""
    found: dict[str, Tensor] = {}
    for shard in sorted(folder.rglob("*.safetensors")):
        found |= read_safetensors(shard.read_bytes())
    return found


def leftovers(out: Path) -> list[str]:
    """Return what a command left of a folder that it was to write: itself, and anything begun beside it."""
    return sorted(path.name for path in out.parent.iterdir() if out.name in path.name)
