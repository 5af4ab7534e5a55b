"""The digest that manifest.json has of itself: every changed byte is found, and files without one are refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from blake3 import blake3

from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError
from manifests.schema import Manifest
from tests.builders import with_digest, without_digest
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
    head = range(text.index(b'"digest"'), text.index(b'"model"'))
    for position in (*head, *generator.sample(range(len(text)), 100)):
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
    decode_manifest(with_digest(text))


@pytest.mark.parametrize(("path", "value"), SPOILED)
def test_a_value_without_a_meaning_is_refused_with_or_without_the_right_digest(path: str, value: Any) -> None:
    text = edited(encode_manifest(training_manifest()), path, value)
    for spoiled in (text, with_digest(text)):
        with pytest.raises(InputError) as error:
            decode_manifest(spoiled, "m")
        assert error.value.where == f"m: {path}"


@pytest.mark.parametrize("created_by", ["reshard 0.1.0", f"reshard 0.1.0, manifest blake3:{64 * '5'}"])
def test_a_manifest_without_a_digest_in_its_field_is_refused(created_by: str) -> None:
    text = edited(without_digest(encode_manifest(full_manifest())), "created_by", created_by)
    with pytest.raises(InputError) as error:
        decode_manifest(text, "m")
    assert (error.value.code, error.value.where) == ("manifest.no-digest", "m: digest")
    assert "pack or save" in error.value.hint


def test_the_digest_is_that_of_the_file_with_zeros_in_its_place_and_the_third_field() -> None:
    text = encode_manifest(full_manifest())
    document = json.loads(text)
    blank = text.replace(document["digest"].encode(), b"blake3:" + 64 * b"0")
    assert document["digest"] == f"blake3:{blake3(blank).hexdigest()}"
    assert list(document)[:3] == ["format", "version", "digest"]
