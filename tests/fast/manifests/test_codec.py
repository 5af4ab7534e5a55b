"""manifest.json: what is written is read back with its digest, and what is not a manifest is refused by its path."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import manifests
from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError
from manifests.schema import Manifest
from tests.builders import with_digest
from tests.fast.manifests.drawn_manifests import described_manifest, full_manifest, virtual_manifest
from tests.fast.manifests.drawn_manifests import manifests as packed_manifests
from tests.fast.manifests.drawn_training import grouped_manifest, trained_manifests, training_manifest
from tests.refusals import refusal, refused

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "manifest-v1.json"
GOLDEN_VIRTUAL = GOLDEN.with_name("manifest-v1-virtual.json")
GOLDEN_DESCRIBED = GOLDEN.with_name("manifest-v1-described.json")
GOLDEN_TRAINING = GOLDEN.with_name("manifest-v1-training.json")
GOLDEN_OPTIMIZER = GOLDEN.with_name("manifest-v2-optimizer.json")
SCHEMA = Draft202012Validator(json.loads(Path(manifests.__file__).with_name("schema.json").read_text()))
STRINGS = {"layout.schedule", "source.revision", "virtual.revision"}
DESCRIBED = {f"model.description.{name}" for name in ("architecture", "mtp")}
DTYPES = {f"training.{name}" for name in ("dtype", "compute_dtype", "reduce_dtype")}
TRAINING = ("optimizer", "learning_rate", "batch", "data", "data.cursor")
OBJECTS = {"training", "virtual", "model.description", *(f"training.{name}" for name in TRAINING)}
NULLABLE = STRINGS | DESCRIBED | DTYPES | OBJECTS
OPTIONAL = NULLABLE | {"source.left_out", "stages.shards.holds", "stages.spans", "ties", "files", "parents"}
OPTIONAL |= {f"model.description.{name}" for name in ("ties", "buffers", "ignored", "spare", "kinds")}
# Since version 2, with the types of their values.
LATER: dict[str, set[type]] = {
    "training.optimizer.kinds": {type(None), list},
    "training.optimizer.groups.algorithm": {type(None), str},
    "training.optimizer.groups.rate_factor": {type(None), float, int},
    "training.optimizer.groups.skips_clipping": {bool},
    "training.optimizer.groups.options": {list},
    "training.optimizer.ema": {float, int},
}
OPTIONAL |= {*LATER, "training.optimizer.kinds.groups"}
OPTIONAL |= {"training.optimizer.groups.fqns", "training.learning_rate.stable_steps", "training.random"}
_REMOVED = object()
OTHERS: tuple[Any, ...] = (None, True, 7, -1.5, "seven", [], {})


@dataclass(frozen=True, slots=True)
class Corruption:
    """What to put at one place of a document, and the code and place of the refusal."""

    keys: list[Any]
    value: object
    code: str = "manifest.invalid-field"

    @property
    def where(self) -> str:
        return f"manifest.json: {_shown(self.keys)}"

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
                yield Corruption(keys, other)
        if type(value) is float:
            yield Corruption(keys, -1.5)
        if type(value) is int:
            yield Corruption(keys, -1)
            yield Corruption(keys, 2**63)
    for keys in _paths(document):
        value = _at(document, keys)
        for key in list(value) if isinstance(value, dict) else ():
            if _field([*keys, key]) not in OPTIONAL | {"format", "version"}:
                code = "manifest.no-digest" if [*keys, key] == ["digest"] else "manifest.missing-field"
                yield Corruption([*keys, key], _REMOVED, code)
        if isinstance(value, dict):
            yield Corruption([*keys, "stray"], 1, "manifest.unknown-field")


drawn_manifests = packed_manifests() | trained_manifests()


@given(drawn_manifests)
def test_schema_allows_what_is_encoded_and_decoding_it_returns_the_same_manifest(manifest: Manifest) -> None:
    encoded = encode_manifest(manifest)
    SCHEMA.validate(json.loads(encoded))
    assert decode_manifest(encoded) == manifest


@settings(max_examples=20)
@given(drawn_manifests, st.data())
def test_decoder_and_schema_refuse_a_spoiled_field_of_any_manifest(manifest: Manifest, data: st.DataObject) -> None:
    corruption = data.draw(st.sampled_from(list(corruptions(document := json.loads(encode_manifest(manifest))))))
    spoiled = corruption.of(document)
    assert not SCHEMA.is_valid(spoiled)
    assert refused(lambda: decode_manifest(json.dumps(spoiled).encode())) == (corruption.code, corruption.where)


def test_types_of_fields_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    records = list[type]()

    def look_up(record: type) -> dict[str, Any]:
        records.append(record)
        return get_type_hints(record)

    monkeypatch.setattr("manifests.codec.get_type_hints", look_up)
    for _ in range(2):
        decode_manifest(GOLDEN.read_bytes())
    assert len(records) == len({*records})


def test_decoder_and_schema_refuse_every_spoiled_field_of_a_golden_file_by_its_path() -> None:
    # Of lists, whose items are alike, the last one that has the field, and of files the one with the fewest fields.
    found = {
        (_field(one.keys), repr(one.value), one.code): (document, one)
        for golden in (GOLDEN_OPTIMIZER, GOLDEN_TRAINING, GOLDEN_DESCRIBED, GOLDEN_VIRTUAL, GOLDEN)
        for document in [json.loads(golden.read_bytes())]
        for one in corruptions(document)
    }
    assert len(found) > 800
    for document, one in found.values():
        spoiled = one.of(document)
        assert not SCHEMA.is_valid(spoiled), one
        text = json.dumps(spoiled).encode()
        assert refused(partial(decode_manifest, text)) == (one.code, one.where), one


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.stray", 1),
        ("model.num_layers", _REMOVED),
        ("model.num_layers", "seven"),
        ("model.num_layers", 2**63),
        ("model.architecture", None),
        ("training.learning_rate.peak", -1.5),
        ("training.learning_rate.decay", "sideways"),
        ("training.learning_rate", []),
        ("stages", {}),
    ],
)
def test_message_says_what_was_expected_and_found(field: str, value: object, wording: Callable[[str], None]) -> None:
    document = _with(json.loads(GOLDEN_TRAINING.read_bytes()), field.split("."), value)
    wording(str(refusal(lambda: decode_manifest(json.dumps(document).encode()))))


@pytest.mark.parametrize("field", sorted(OPTIONAL))
def test_a_field_with_a_default_may_be_left_out(field: str) -> None:
    goldens = {"training.": GOLDEN_TRAINING, "model.": GOLDEN_DESCRIBED}
    golden = next((golden for prefix, golden in goldens.items() if field.startswith(prefix)), GOLDEN)
    document = json.loads(golden.read_bytes())
    if field == "training.optimizer":  # then there is no optimizer state
        document["stages"] = json.loads(GOLDEN.read_bytes())["stages"]
    if field == "training.optimizer.groups.fqns":  # then it is the only group
        del document["training"]["optimizer"]["groups"][1]
    for keys in list(_paths(document)):
        if _field(keys) == field and isinstance(keys[-1], str):
            document = _with(document, keys, _REMOVED)
    SCHEMA.validate(document)
    decode_manifest(with_digest(json.dumps(document).encode()))


@pytest.mark.parametrize(
    ("golden", "manifest"),
    [
        (GOLDEN, full_manifest()),
        (GOLDEN_DESCRIBED, described_manifest()),
        (GOLDEN_VIRTUAL, virtual_manifest()),
        (GOLDEN_TRAINING, training_manifest()),
        (GOLDEN_OPTIMIZER, grouped_manifest()),
    ],
    ids=["full", "described", "virtual", "training", "optimizer"],
)
def test_golden_file_of_each_version_is_read_and_is_what_is_written_today(golden: Path, manifest: Manifest) -> None:
    assert decode_manifest(golden.read_bytes()) == manifest
    assert encode_manifest(manifest) == golden.read_bytes()


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        (b"{}", "manifest.not-a-manifest", "m: format"),
        (b'{"format": "reshard-manifest"}', "manifest.unsupported-version", "m: version"),
        (b'{"format": "reshard-manifest", "version": true}', "manifest.unsupported-version", "m: version"),
        (b'{"format": "reshard-manifest", "version": 3, "shape": 0}', "manifest.unsupported-version", "m: version"),
        (b'{"format": "reshard-manifest", "version": 1, "shape": 0}', "manifest.no-digest", "m: digest"),
    ],
)
def test_text_that_is_not_a_manifest_is_refused(
    text: bytes, code: str, where: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: decode_manifest(text, "m"))
    assert (error.code, error.where) == (code, where)
    wording(str(error))


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
    if _field(keys) in LATER and isinstance(keys[-1], str):
        return LATER[_field(keys)]
    if _field(keys) not in NULLABLE:
        return {float, int} if type(value) is float else {type(value)}
    return {type(None), dict if _field(keys) in OBJECTS else str}


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


@pytest.mark.parametrize(("path", "value"), SPOILED)
def test_a_value_without_a_meaning_is_refused_with_or_without_the_right_digest(path: str, value: Any) -> None:
    text = edited(encode_manifest(training_manifest()), path, value)
    for spoiled in (text, with_digest(text)):
        with pytest.raises(InputError) as error:
            decode_manifest(spoiled, "m")
        assert error.value.where == f"m: {path}"


def test_fields_and_kinds_of_version_2_are_unknown_in_version_1() -> None:
    later = json.loads(GOLDEN_OPTIMIZER.read_bytes())
    later["version"] = 1
    assert refused(lambda: decode_manifest(json.dumps(later).encode())) == (
        "manifest.unknown-field",
        "manifest.json: training.optimizer.kinds",
    )
    earlier = json.loads(GOLDEN_TRAINING.read_bytes())
    earlier["stages"][0]["shards"][-1]["holds"] = "momentum_buffer"
    assert refused(lambda: decode_manifest(json.dumps(earlier).encode()))[0] == "manifest.inconsistent"


def test_the_digest_is_that_of_the_file_with_zeros_in_its_place_and_the_third_field() -> None:
    text = encode_manifest(full_manifest())
    document = json.loads(text)
    blank = text.replace(document["digest"].encode(), b"blake3:" + 64 * b"0")
    assert document["digest"] == f"blake3:{blake3(blank).hexdigest()}"
    assert list(document)[:3] == ["format", "version", "digest"]
