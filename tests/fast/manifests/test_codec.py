"""manifest.json: what is written is read back, and what is not a manifest is refused by its path."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import manifests
from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError
from manifests.schema import Manifest
from tests.builders import without_digest
from tests.fast.manifests.drawn_manifests import full_manifest, virtual_manifest
from tests.fast.manifests.drawn_manifests import manifests as packed_manifests
from tests.fast.manifests.drawn_training import trained_manifests, training_manifest

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "manifest-v1.json"
GOLDEN_VIRTUAL = GOLDEN.with_name("manifest-v1-virtual.json")
GOLDEN_TRAINING = GOLDEN.with_name("manifest-v1-training.json")
GOLDEN_DIGEST = GOLDEN.with_name("manifest-v1-digest.json")  # the one before, with a digest of itself
SCHEMA = Draft202012Validator(json.loads(Path(manifests.__file__).with_name("schema.json").read_text()))
STRINGS = {"layout.schedule", "source.revision", "virtual.revision"}
DTYPES = {f"training.{name}" for name in ("dtype", "compute_dtype", "reduce_dtype")}
TRAINING = ("optimizer", "learning_rate", "batch", "data", "data.cursor")
OBJECTS = {"training", "virtual", *(f"training.{name}" for name in TRAINING)}
NULLABLE = STRINGS | DTYPES | OBJECTS
OPTIONAL = NULLABLE | {"source.left_out", "stages.shards.holds", "stages.spans", "ties", "files", "parents"}
OPTIONAL |= {"training.optimizer.groups.fqns", "training.learning_rate.stable_steps", "training.random"}
CHOICES = {"layout.style": ("loop", "v"), "stages.shards.holds": ("weights", "exp_avg", "exp_avg_sq")}
CHOICES["training.learning_rate.decay"] = ("constant", "linear", "cosine", "sqrt")
CHOICES |= dict.fromkeys(DTYPES, ("F64", "F32", "F16", "BF16"))
KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a count", float: "a number"}
FOUND = {**KINDS, int: "a number", type(None): "null"}
OTHERS: tuple[Any, ...] = (None, True, 7, -1.5, "seven", [], {})


@dataclass(frozen=True, slots=True)
class Corruption:
    """What to put at one place of a document, and how the refusal must begin."""

    keys: list[Any]
    value: object
    message: str

    def of(self, document: dict[str, Any]) -> dict[str, Any]:
        return _with(document, self.keys, self.value)


def corruptions(document: dict[str, Any]) -> Iterator[Corruption]:
    """Spoil every field of a document in every way that its kind allows."""
    for keys in _paths(document):
        path, value = _shown(keys), _at(document, keys)
        if path in ("", "format", "version"):
            continue
        for other in OTHERS:
            if type(other) not in _kinds_allowed(keys, value):
                yield Corruption(keys, other, f"{path}: {_expected(keys, value, other)}")
        if type(value) is float:
            yield Corruption(keys, -1.5, f"{path}: expected a number of 0 or more, found -1.5")
        if type(value) is int:
            yield Corruption(keys, -1, f"{path}: expected a count below 2^63, found -1")
            yield Corruption(keys, 2**63, f"{path}: expected a count below 2^63, found {2**63}")
    for keys in _paths(document):
        value = _at(document, keys)
        for key in list(value) if isinstance(value, dict) else ():
            if _field([*keys, key]) not in OPTIONAL | {"format", "version"}:
                yield Corruption([*keys, key], _REMOVED, f"{_shown([*keys, key])}: is missing")
        if isinstance(value, dict):
            stray = [*keys, "stray"]
            yield Corruption(stray, 1, f"{_shown(stray)}: is not a field of version 1")


drawn_manifests = packed_manifests() | trained_manifests()


@given(drawn_manifests)
def test_decoding_what_was_encoded_gives_the_same_manifest(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


@given(drawn_manifests)
def test_schema_allows_every_manifest_that_is_encoded(manifest: Manifest) -> None:
    SCHEMA.validate(json.loads(encode_manifest(manifest)))


@settings(max_examples=40)
@given(drawn_manifests, st.data())
def test_decoder_and_schema_refuse_a_spoiled_field_of_any_manifest(manifest: Manifest, data: st.DataObject) -> None:
    document = json.loads(encode_manifest(manifest))
    corruption = data.draw(st.sampled_from(list(corruptions(document))))
    spoiled = corruption.of(document)
    assert not SCHEMA.is_valid(spoiled)
    with pytest.raises(InputError) as error:
        decode_manifest(json.dumps(spoiled).encode())
    assert str(error.value).startswith(f"manifest.json: {corruption.message}")


@pytest.mark.parametrize("golden", [GOLDEN, GOLDEN_VIRTUAL, GOLDEN_TRAINING])
def test_decoder_and_schema_refuse_every_spoiled_field_of_a_golden_file_by_its_path(golden: Path) -> None:
    document = json.loads(golden.read_bytes())
    found = list(corruptions(document))
    assert len(found) > 500
    assert [one.message for one in found if SCHEMA.is_valid(one.of(document))] == []
    for one in found:
        with pytest.raises(InputError) as error:
            decode_manifest(json.dumps(one.of(document)).encode())
        assert str(error.value).startswith(f"manifest.json: {one.message}"), one.message


@pytest.mark.parametrize("field", sorted(OPTIONAL))
def test_a_field_with_a_default_may_be_left_out(field: str) -> None:
    document = json.loads((GOLDEN_TRAINING if field.startswith("training.") else GOLDEN).read_bytes())
    if field == "training.optimizer":  # then there are no moments
        document["stages"] = json.loads(GOLDEN.read_bytes())["stages"]
    if field == "training.optimizer.groups.fqns":  # then it is the only group
        del document["training"]["optimizer"]["groups"][1]
    for keys in list(_paths(document)):
        if _field(keys) == field and isinstance(keys[-1], str):
            document = _with(document, keys, _REMOVED)
    SCHEMA.validate(document)
    decode_manifest(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("golden", "manifest"),
    [(GOLDEN, full_manifest()), (GOLDEN_VIRTUAL, virtual_manifest()), (GOLDEN_TRAINING, training_manifest())],
    ids=["full", "virtual", "training"],
)
def test_golden_file_of_version_1_without_a_digest_is_read(golden: Path, manifest: Manifest) -> None:
    assert decode_manifest(golden.read_bytes()) == manifest
    assert without_digest(encode_manifest(manifest)) == golden.read_bytes()


def test_golden_file_of_version_1_is_read_and_is_what_is_written_today() -> None:
    assert decode_manifest(GOLDEN_DIGEST.read_bytes()) == training_manifest()
    assert encode_manifest(training_manifest()) == GOLDEN_DIGEST.read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "m: is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff{}", "m: is not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[1]", "m: expected a JSON object, found a list"),
        (b'{"a": 1, "a": 2}', "m: is not JSON: key 'a' occurs twice"),
        (b'{"a": NaN}', "m: is not JSON: NaN is not JSON"),
        (b'{"a": -Infinity}', "m: is not JSON: -Infinity is not JSON"),
        (b'{"a":' * 100_000, "m: is nested too deeply"),
        (
            b'{"a": "\\ud800"}',
            "m: is not JSON: 'utf-8' codec can't encode character '\\ud800' in position 7: surrogates not allowed",
        ),
        (b"{}", "m: format: expected 'reshard-manifest'\nhint: this file was not written by reshard"),
        (
            b'{"format": "reshard-manifest"}',
            "m: version: expected 1, found None\n"
            "hint: write it again with this version of reshard, or read it with the one that wrote it",
        ),
        (
            b'{"format": "reshard-manifest", "version": true}',
            "m: version: expected 1, found True\n"
            "hint: write it again with this version of reshard, or read it with the one that wrote it",
        ),
        (
            b'{"format": "reshard-manifest", "version": 2, "shape": "unheard of"}',
            "m: version: expected 1, found 2\n"
            "hint: write it again with this version of reshard, or read it with the one that wrote it",
        ),
    ],
)
def test_text_that_is_no_manifest_is_refused_with_one_sentence(text: bytes, message: str) -> None:
    with pytest.raises(InputError) as error:
        decode_manifest(text, "m")
    assert str(error.value) == message


def test_numbers_of_thousands_of_digits_are_refused_without_being_printed() -> None:
    document = json.loads(GOLDEN.read_bytes())
    document["layout"]["num_ranks"] = int("9" * 4000)
    with pytest.raises(InputError) as error:
        decode_manifest(json.dumps(document).encode())
    assert str(error.value) == (f"manifest.json: layout.num_ranks: expected a count below 2^63, found {'9' * 80}")


_REMOVED = object()


def _paths(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
    yield list(keys)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*keys, key))


def _shown(keys: list[Any]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _field(keys: list[Any]) -> str:
    """Name a field whatever its place in a list: `stages.spans`."""
    return ".".join(key for key in keys if isinstance(key, str))


def _at(document: Any, keys: list[Any]) -> Any:
    for key in keys:
        document = document[key]
    return document


def _with(document: dict[str, Any], keys: list[Any], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    parent = _at(changed, keys[:-1])
    if value is _REMOVED:
        del parent[keys[-1]]
    else:
        parent[keys[-1]] = value
    return changed


def _kinds_allowed(keys: list[Any], value: Any) -> set[type]:
    if _field(keys) not in NULLABLE:
        return {float, int} if type(value) is float else {type(value)}
    return {type(None), dict if _field(keys) in OBJECTS else str}


def _expected(keys: list[Any], value: Any, other: Any) -> str:
    if choices := CHOICES.get(_field(keys)):
        return f"expected one of {', '.join(map(repr, choices))}, found {str(other)!r}"
    wanted = "an object" if _field(keys) in OBJECTS else "a string" if value is None else KINDS[type(value)]
    return f"expected {wanted}, found {FOUND[type(other)]}"
