"""Hugging Face folders and layouts of every sort, drawn by hypothesis."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.builders import DTYPE_BITS, EMBEDDING, HEAD, INDEX, Tensor, header_of, llama_config, random_tensors

PARTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\."), min_size=1, max_size=6)
SMALL_FILES = st.dictionaries(
    st.lists(PARTS, min_size=1, max_size=3).map("/".join).map("extra/{}.txt".format), st.binary(max_size=40), max_size=3
)
METADATA = st.none() | st.dictionaries(st.text('abcé"\\', max_size=4), st.text("x\n 𝄞", max_size=4), max_size=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A Hugging Face folder: its config and its files, whole."""

    config: Mapping[str, Any]
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


@st.composite
def folders(draw: st.DrawFn) -> Folder:
    """Draw a whole Llama: sizes, a dtype for each tensor, orders, metadata, shards, index, small files."""
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    config = llama_config(
        hidden_size=8 * draw(st.integers(1, 3)),
        intermediate_size=8 * draw(st.integers(1, 3)),
        num_hidden_layers=draw(st.integers(1, 4)),
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=draw(st.integers(1, 20)),
        tie_word_embeddings=draw(st.booleans()),
    )
    generator = random.Random(draw(st.integers(0, 2**32)))
    dtypes = draw(st.lists(st.sampled_from(sorted(DTYPE_BITS)), min_size=1, max_size=5, unique=True))
    tensors = random_tensors(config, dtypes=dtypes, seed=generator.getrandbits(32))
    if config["tie_word_embeddings"]:
        _store_tie(draw(st.sampled_from([(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])), tensors)
    names = generator.sample(list(tensors), len(tensors))
    num_shards = draw(st.integers(1, 4))
    shards = {f"model-{index + 1}.safetensors": names[index::num_shards] for index in range(num_shards)}
    if draw(st.booleans()) and num_shards == 1:
        shards = {"model.safetensors": names}
    files = {
        shard: _file(draw, {fqn: tensors[fqn] for fqn in held}, generator.sample(held, len(held)))
        for shard, held in shards.items()
    }
    if list(shards) != ["model.safetensors"]:
        weight_map = {fqn: shard for shard, held in shards.items() for fqn in held}
        index = {"metadata": draw(st.sampled_from([{}, {"total_size": 1}, None])), "weight_map": weight_map}
        files[INDEX] = json.dumps(index, indent=draw(st.none() | st.integers(0, 3))).encode()
    files["config.json"] = json.dumps(config, indent=draw(st.none() | st.just(2))).encode()
    return Folder(config=config, files=files | draw(SMALL_FILES))


@st.composite
def specs(draw: st.DrawFn, num_layers: int, folder: Path) -> str:
    """Draw a layout of a model of so many layers; one that is a file is written to `folder`."""
    even = [f"pp={ranks}" for ranks in range(1, num_layers + 3)]
    if num_layers >= 2:
        even += ["pp=2,vpp=2", "pp=1,vpp=4", "pp=2,style=v"]
    megatron = [f"E{'t' * num_layers}L", f"E|{'t|' * num_layers}L", f"E||{'t' * num_layers}|L|"]
    spec = draw(st.sampled_from([*even, *megatron, "file"]))
    if spec != "file":
        return spec
    modules = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(num_layers)), "model.norm", "lm_head"]
    cuts = sorted(draw(st.lists(st.integers(0, len(modules)), max_size=4)))
    stages = [modules[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(modules)], strict=True)]
    file = folder / f"{draw(st.integers(0, 10**9))}.toml"
    file.write_text(f"stages = {json.dumps(stages)}\nnum_ranks = {draw(st.sampled_from([1, len(stages)]))}\n")
    return str(file)


def _store_tie(stored: Sequence[str], tensors: dict[str, Tensor]) -> None:
    tensors |= dict.fromkeys(stored, tensors[EMBEDDING])
    if EMBEDDING not in stored:
        del tensors[EMBEDDING]


def _file(draw: st.DrawFn, tensors: dict[str, Tensor], data_order: list[str]) -> bytes:
    header = header_of(tensors, data_order=data_order, metadata=draw(METADATA))
    if draw(st.booleans()):  # metadata need not stand first
        header = dict(reversed(header.items()))
    raw = json.dumps(header, ensure_ascii=draw(st.booleans())).encode() + b" " * draw(st.integers(0, 9))
    return len(raw).to_bytes(8, "little") + raw + b"".join(tensors[fqn].data for fqn in data_order)
