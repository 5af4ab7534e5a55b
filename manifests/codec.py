"""Manifest to JSON and back. The decoder names the path of whatever it refuses."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from manifests.errors import InputError, ManifestError
from manifests.invariants import MANIFEST_NAME, check_manifest
from manifests.jsontext import kind_of, parse_json_object
from manifests.paths import is_unicode
from manifests.schema import FORMAT, VERSION, Manifest
from manifests.selfdigest import BLANK, check_own_digest, mark, own_digest, split_mark
from manifests.training_state import COUNT_LIMIT, LARGEST_NUMBER

T = TypeVar("T")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the text of manifest.json, ending in a newline, with the digest of itself.

    Raises:
        ManifestError: a path or a name in it is not valid Unicode.
    """
    document = manifest_document(manifest)
    return _text(document, own_digest(_text(document, BLANK)))


def manifest_document(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON object of manifest.json, without its own digest."""
    document = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    if manifest.model.description is None:  # readers from before this field still read all other models
        del document["model"]["description"]
    return document


def decode_manifest(text: bytes, where: str = "manifest.json") -> Manifest:
    """Read a manifest and check that it is consistent.

    Raises:
        SourceError: not a JSON object (see `parse_json_object`).
        ManifestError: not a manifest, another version, a field missing, unknown or of the wrong type, any broken
            invariant (all of them are listed), or changed since it was written.
    """
    document = parse_json_object(text, where)
    if document.pop("format", None) != FORMAT:
        hint = "this file was not written by reshard"
        raise ManifestError(f"{where}: format", f"expected {FORMAT!r}", hint, code="manifest.not-a-manifest")
    version = document.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ManifestError(
            f"{where}: version",
            f"expected {VERSION}, found {str(version)[:40]}",
            "pack it again with this version of reshard, or read it with the version that wrote it",
            code="manifest.unsupported-version",
        )
    try:
        manifest = _decode_fields(document, Manifest, "")
        created_by, digest = split_mark(manifest.created_by)
    except InputError as error:
        raise error.within(where) from None
    check_manifest(manifest, where)
    check_own_digest(text, digest, where)
    return replace(manifest, created_by=created_by)


def _text(document: dict[str, Any], digest: str) -> bytes:
    marked = document | {"created_by": mark(document["created_by"], digest)}
    text = json.dumps(marked, indent=1, ensure_ascii=False) + "\n"
    if not is_unicode(text):
        raise ManifestError(
            MANIFEST_NAME,
            "expected names in valid UTF-8, found a folder or file whose name is not",
            "rename that folder or file",
            code="manifest.not-unicode",
        )
    return text.encode()


def _decode(found: Any, wanted: Any, path: str) -> Any:
    if is_dataclass(wanted) and isinstance(wanted, type):
        return _decode_fields(found, wanted, path)
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is tuple:
        if not isinstance(found, list):
            raise _invalid(path, f"expected a list, found {kind_of(found)}")
        return tuple(_decode(item, args[0], f"{path}[{index}]") for index, item in enumerate(found))
    if origin in (types.UnionType, Union):
        return None if found is None else _decode(found, args[0], path)
    if origin is Literal:
        if found not in args or not isinstance(found, str):
            raise _invalid(path, f"expected one of {', '.join(map(repr, args))}, found {str(found)[:80]!r}")
        return found
    if wanted is float:
        return _number(found, path)
    if type(found) is not wanted:
        raise _invalid(path, f"expected {_NAMES[wanted]}, found {kind_of(found)}")
    if wanted is int and not 0 <= found < COUNT_LIMIT:
        raise _invalid(path, f"expected a count below 2^63, found {str(found)[:80]}")
    return found


def _number(found: Any, path: str) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise _invalid(path, f"expected a number, found {kind_of(found)}")
    if not 0 <= found <= LARGEST_NUMBER:
        raise _invalid(path, f"expected a number of 0 or more, found {str(found)[:80]}")
    return float(found)


def _decode_fields(found: Any, wanted: Callable[..., T], path: str) -> T:
    if not isinstance(found, Mapping):
        raise _invalid(path, f"expected an object, found {kind_of(found)}")
    hints = get_type_hints(wanted)
    known = {field.name: field for field in fields(wanted)}  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    for key in found:
        if key not in known:
            problem, hint = "unknown field in version 1", "known fields: " + ", ".join(known)
            raise ManifestError(f"{prefix}{key}", problem, hint, code="manifest.unknown-field")
    values = {}
    for name, field in known.items():
        if name in found:
            values[name] = _decode(found[name], hints[name], prefix + name)
        elif field.default is MISSING:
            raise ManifestError(f"{prefix}{name}", "missing required field", code="manifest.missing-field")
    return wanted(**values)


def _invalid(path: str, problem: str) -> ManifestError:
    return ManifestError(path, problem, code="manifest.invalid-field")


_NAMES = {str: "a string", int: "a count", bool: "true or false"}
