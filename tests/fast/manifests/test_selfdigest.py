"""The digest that manifest.json has of itself: every changed byte is found, and files without one are read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError
from manifests.schema import Manifest
from tests.builders import edit_manifest, without_digest
from tests.fast.manifests.drawn_manifests import full_manifest, virtual_manifest
from tests.fast.manifests.drawn_training import training_manifest

EDITS: list[tuple[str, Any]] = [
    ("training.step", 7),
    ("training.dtype", "BF16"),
    ("training.learning_rate.peak", 0.25),
    ("training.learning_rate.decay", "linear"),
    ("training.data.digest", "blake3:" + 64 * "5"),
    ("parents", []),
    ("model.num_params", 1),
    ("source.location", "elsewhere"),
]
SPOILED: list[tuple[str, Any]] = [
    ("training.dtype", "LOL"),
    ("training.compute_dtype", "I64"),
    ("training.learning_rate.peak", 1e300),
    ("training.learning_rate.minimum", 1e300),
    ("training.learning_rate.decay", "sideways"),
    ("training.learning_rate.decay_steps", 520),
    ("training.batch.microbatch", 0),
    ("training.batch.seq_len", 0),
    ("training.batch.global_batch", 33),
    ("training.optimizer.name", "no class"),
    ("training.random[1].state", "no base64"),
    ("training.data.digest", "lost"),
    ("parents[0].digest", "lost"),
]


def edited(text: bytes, path: str, value: Any) -> bytes:
    document = json.loads(text)
    *parents, name = path.replace("[", ".").replace("]", "").split(".")
    at: Any = document
    for key in parents:
        at = at[int(key) if key.isdigit() else key]
    at[name] = value
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


@pytest.mark.parametrize("manifest", [full_manifest(), virtual_manifest(), training_manifest()])
def test_a_flipped_bit_of_a_manifest_is_found(manifest: Manifest) -> None:
    text, generator = encode_manifest(manifest), random.Random(23)
    marked = range(text.index(b'"created_by"'), text.index(b'"model"'))
    for position in (*marked, *generator.sample(range(len(text)), 100)):
        spoiled = bytearray(text)
        spoiled[position] ^= 1 << generator.randrange(8)
        with pytest.raises(InputError):
            decode_manifest(bytes(spoiled))


@pytest.mark.parametrize(("path", "value"), EDITS)
def test_an_edited_field_is_refused_by_the_digest(path: str, value: Any) -> None:
    text = edited(encode_manifest(training_manifest()), path, value)
    with pytest.raises(InputError) as error:
        decode_manifest(text, "m")
    assert (error.value.code, error.value.where) == ("manifest.digest-mismatch", "m")
    decode_manifest(without_digest(text))


@pytest.mark.parametrize(("path", "value"), SPOILED)
def test_a_value_without_a_meaning_is_refused_with_or_without_a_digest(path: str, value: Any) -> None:
    text = edited(encode_manifest(training_manifest()), path, value)
    for spoiled in (text, without_digest(text)):
        with pytest.raises(InputError) as error:
            decode_manifest(spoiled, "m")
        assert error.value.where == f"m: {path}"


@pytest.mark.parametrize("change", [("manifest blake3:", "manifest flake3:"), (", manifest", "; manifest")])
def test_a_digest_whose_mark_is_damaged_is_refused(change: tuple[str, str]) -> None:
    text = encode_manifest(full_manifest()).decode().replace(*change).encode()
    with pytest.raises(InputError) as error:
        decode_manifest(text, "m")
    assert (error.value.code, error.value.where) == ("manifest.digest-mismatch", "m: created_by")


def test_an_edit_is_kept_by_taking_the_digest_out(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(encode_manifest(training_manifest()))
    edit_manifest(tmp_path, lambda document: document["training"].update(step=8))
    training = decode_manifest((tmp_path / "manifest.json").read_bytes()).training
    assert training is not None
    assert training.step == 8
