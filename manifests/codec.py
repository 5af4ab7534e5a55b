"""Manifest to JSON, in the lowest version that has its fields, and back. Errors name the path of what is refused."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import chain
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from manifests.digest import PREFIX, digest_bytes, is_digest
from manifests.errors import InputError, ManifestError
from manifests.invariants import MANIFEST_NAME, check_manifest
from manifests.jsontext import kind_of, parse_json_object
from manifests.paths import is_unicode
from manifests.schema import FORMAT, VERSIONS, Manifest
from manifests.training_state import COUNT_LIMIT, LARGEST_NUMBER

T = TypeVar("T")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the text of manifest.json, ending in a newline, with its digest.

    # Note [Digest of the manifest]
    `digest` is the BLAKE3 of the whole file with the field's own 64 digits replaced by zeros (docs/adr/0031). It is the
    third field, so that it is the first digest in the file.

    Raises:
        ManifestError: a path or a name in it is not valid Unicode.
    """
    version = _version_of(manifest)
    document = {"format": FORMAT, "version": version, "digest": _BLANK, **_as_document(manifest, version)}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if not is_unicode(text):
        raise ManifestError(
            MANIFEST_NAME,
            "expected names in valid UTF-8, found a folder or file whose name is not",
            "rename that folder or file",
            code="manifest.not-unicode",
        )
    encoded = text.encode()
    return encoded.replace(_BLANK.encode(), digest_bytes(encoded).encode(), 1)


def manifest_document(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON object of manifest.json, without its digest."""
    version = _version_of(manifest)
    return {"format": FORMAT, "version": version, **_as_document(manifest, version)}


def decode_manifest(text: bytes, where: str = "manifest.json") -> Manifest:
    """Read a manifest and check that it is consistent.

    Raises:
        SourceError: not a JSON object (see `parse_json_object`).
        ManifestError: not a manifest, another version, no digest, a field missing, unknown or of the wrong type, any
            broken invariant (all of them are listed), or changed since it was written.
    """
    document = parse_json_object(text, where)
    if document.pop("format", None) != FORMAT:
        hint = "name a folder that reshard pack or a training run wrote, or the manifest.json in it"
        raise ManifestError(f"{where}: format", f"expected {FORMAT!r}", hint, code="manifest.not-a-manifest")
    version = document.pop("version", None)
    if type(version) is not int or version not in VERSIONS:
        raise ManifestError(
            f"{where}: version",
            f"expected {' or '.join(map(str, VERSIONS))}, found {str(version)[:40]}",
            "pack it again with this version of reshard, or read it with the version that wrote it",
            code="manifest.unsupported-version",
        )
    if "digest" not in document:
        raise ManifestError(
            f"{where}: digest",
            "expected the digest of the file, found none: a development version of reshard wrote it, or it was edited",
            "pack or save the checkpoint again with this version",
            code="manifest.no-digest",
        )
    try:
        digest = _decode_digest(document.pop("digest"))
        manifest = _decode_fields(document, Manifest, "", version)
    except InputError as error:
        raise error.within(where) from None
    check_manifest(manifest, where)
    if (actual := digest_bytes(text.replace(digest.encode(), _BLANK.encode()))) != digest:
        raise ManifestError(
            where,
            f"changed after it was written: expected {digest} (digest), found {actual}",
            "restore manifest.json from a good copy, or pack or save the checkpoint again",
            code="manifest.digest-mismatch",
        )
    return manifest


def _decode_digest(value: Any) -> str:
    digest: str = _decode(value, str, "digest", 1)
    if not is_digest(digest):
        raise _invalid("digest", f"expected {PREFIX} and 64 hex digits, found {digest[:80]!r}")
    return digest


def _decode(value: Any, wanted: Any, path: str, version: int) -> Any:
    if is_dataclass(wanted) and isinstance(wanted, type):
        return _decode_fields(value, wanted, path, version)
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is tuple:
        if not isinstance(value, list):
            raise _invalid(path, f"expected a list, found {kind_of(value)}")
        return tuple(_decode(item, args[0], f"{path}[{index}]", version) for index, item in enumerate(value))
    if origin in (types.UnionType, Union):
        return None if value is None else _decode(value, args[0], path, version)
    if origin is Literal:
        if value not in args or not isinstance(value, str):
            raise _invalid(path, f"expected one of {', '.join(map(repr, args))}, found {str(value)[:80]!r}")
        return value
    if wanted is float:
        return _number(value, path)
    if type(value) is not wanted:
        raise _invalid(path, f"expected {_NAMES[wanted]}, found {kind_of(value)}")
    if wanted is int and not 0 <= value < COUNT_LIMIT:
        raise _invalid(path, f"expected a count below 2^63, found {str(value)[:80]}")
    return value


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _invalid(path, f"expected a number, found {kind_of(value)}")
    if not 0 <= value <= LARGEST_NUMBER:
        raise _invalid(path, f"expected a number of 0 or more, found {str(value)[:80]}")
    return float(value)


def _decode_fields(document: Any, wanted: Callable[..., T], path: str, version: int) -> T:
    if not isinstance(document, Mapping):
        raise _invalid(path, f"expected an object, found {kind_of(document)}")
    hints = _hints_of(wanted)
    fields_of = {field.name: field for field in _fields_of(wanted, version)}
    prefix = f"{path}." if path else ""
    for key in document:
        if key not in fields_of:
            problem, hint = f"unknown field in version {version}", "known fields: " + ", ".join(fields_of)
            raise ManifestError(f"{prefix}{key}", problem, hint, code="manifest.unknown-field")
    values = {}
    for name, field in fields_of.items():
        if name in document:
            values[name] = _decode(document[name], hints[name], prefix + name, version)
        elif field.default is MISSING:
            raise ManifestError(f"{prefix}{name}", "missing required field", code="manifest.missing-field")
    return wanted(**values)


@cache  # a manifest has thousands of shards, and a restart reads those of all checkpoints
def _hints_of(record: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(record)


def _fields_of(record: Any, version: int) -> list[Field[Any]]:
    return [field for field in fields(record) if field.metadata.get("since", 1) <= version]


def _version_of(value: Any) -> int:
    """Return the lowest version that can express a value: later fields must have their defaults."""
    if isinstance(value, tuple):
        return max(map(_version_of, value), default=1)
    if not is_dataclass(value):
        return 1
    values = [(field, getattr(value, field.name)) for field in fields(value)]
    added = (field.metadata.get("since", 1) for field, of_field in values if of_field != field.default)
    return max(chain(added, (_version_of(of_field) for _, of_field in values)), default=1)


def _as_document(value: Any, version: int) -> Any:
    """Return a value as JSON has it in a version."""
    if isinstance(value, tuple):
        return [_as_document(item, version) for item in value]
    if not is_dataclass(value):
        return value
    return {field.name: _as_document(getattr(value, field.name), version) for field in _fields_of(value, version)}


def _invalid(path: str, problem: str) -> ManifestError:
    return ManifestError(path, problem, code="manifest.invalid-field")


_BLANK = PREFIX + 64 * "0"
_NAMES = {str: "a string", int: "a count", bool: "true or false"}
