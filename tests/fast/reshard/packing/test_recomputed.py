"""Rotary frequencies, which the files of some models hold and every model computes: they travel as they are."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path

import pytest

from manifests.models import model_shape
from tests.builders import Tensor, files_in, pack, read_safetensors, run, write_model
from tests.fast.manifests.models.built import DECODERS, TINY, read_config

WITHOUT = {"tiny-gpt2", "tiny-mpt", "tiny-opt"}  # their positions are learned, or ALiBi's
ROTARY = sorted({*TINY, *DECODERS} - WITHOUT)
NBYTES = {"BF16": 2, "F32": 4}


def write_with_frequencies(folder: Path, name: str) -> dict[str, Tensor]:
    """Write a model of random bytes, with frequencies in each layer as Moonlight's and Kimi K2's files have them."""
    config, dice = read_config(name), random.Random(0)
    shape = model_shape(config)
    tied = {fqn for group in shape.ties for fqn in group[1:]}
    kinds = {fqn: ("BF16", dims) for fqn, dims in shape.tensors.items() if fqn not in tied}
    attention = "transformer.h.{}.self_attention" if name == "tiny-falcon" else "model.layers.{}.self_attn"
    for layer in range(shape.num_layers):
        kinds[f"{attention.format(layer)}.rotary_emb.inv_freq"] = ("F32", (4,))
    tensors = {
        fqn: Tensor(dtype=dtype, shape=dims, data=dice.randbytes(prod(dims) * NBYTES[dtype]))
        for fqn, (dtype, dims) in kinds.items()
    }
    return write_model(folder, config, tensors, num_shards=2)


@pytest.mark.parametrize("name", ROTARY)
def test_frequencies_of_every_rotary_family_are_packed_and_given_back(name: str, tmp_path: Path) -> None:
    source, out, resharded, exported = (tmp_path / name for name in ("source", "out", "resharded", "exported"))
    tensors = write_with_frequencies(source, name)
    pack(source, out)
    pack(out, resharded, "pp=3")
    for packed in (out, resharded):
        run("verify", packed, "--against", source)
        bundles = [read_safetensors(data) for path, data in files_in(packed).items() if path.endswith(".safetensors")]
        assert tensors.items() <= {fqn: tensor for bundle in bundles for fqn, tensor in bundle.items()}.items()
    run("export", resharded, "--to", "hf", "--out", exported)
    assert files_in(exported) == files_in(source)
