"""The file of `--model`: the modules of an architecture that no table knows, in TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from manifests.errors import ModelError, Parameter, refused_by_system
from manifests.jsontext import kind_of
from manifests.models.described import description_problems
from manifests.schema import ModelDescription
from reshard.formatting import list_words, nearest_word

_MOST_BYTES = 1 << 20
_KEYS = tuple(field.name for field in fields(ModelDescription))
_REQUIRED = ("inputs", "layers", "outputs")
_WORDS = ("architecture", "width", "mtp")
_ONE_OR_MORE = ("layers", "count")
_LISTS_OF_LISTS = ("ties", "kinds")


def read_model_file(path: Path) -> ModelDescription:
    """Read a description; `layers` and `count` may be one name instead of a list.

    Raises:
        ModelError: the file is not TOML, lacks a key or has an unknown one, a value of the wrong type, or modules that
            overlap.
        InputError: it cannot be read.
    """
    document = _load(path)
    for key in document:
        if key not in _KEYS:
            nearest = nearest_word(key, _KEYS)
            hint = f"did you mean {nearest}?" if nearest else f"known keys: {list_words(_KEYS, 'and')}"
            raise ModelError(f"{path}: {key}", "unknown key", hint, code="model.unknown-key")
    for key in _REQUIRED:
        if key not in document:
            hint = "docs/own-models.md shows a whole file"
            raise ModelError(f"{path}: {key}", "required key is missing", hint, code="model.missing-key")
    values = {key: _value(document, key, path) for key in document}
    values.setdefault("count", ("num_hidden_layers",) * len(values["layers"]))
    description = ModelDescription(**{"width": "hidden_size", "tied": True, **values})
    for place, problem, is_overlap in description_problems(description):
        if is_overlap:
            hint = "list each module once, and none inside another"
            raise ModelError(f"{path}: {place}", problem, hint, code="model.overlapping-modules")
        raise ModelError(f"{path}: {place}", problem, code="model.invalid-field")
    return description


def _load(path: Path) -> Mapping[str, object]:
    where = Parameter("model", str(path))
    try:
        if not path.is_file():
            problem, hint = "no such file", "name the TOML file that describes the model"
            raise ModelError(where, problem, hint, code="model.no-file")
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise refused_by_system(where, error, code="model.unreadable") from error
    if len(data) > _MOST_BYTES:
        raise ModelError(
            Parameter("model", str(path)), f"expected at most {_MOST_BYTES} bytes", code="model.unreadable"
        )
    try:
        return tomllib.loads(data.decode())
    except (RecursionError, ValueError) as error:
        raise ModelError(where, f"is not TOML: {error}", code="model.not-toml") from error


def _value(document: Mapping[str, object], key: str, path: Path) -> Any:
    found = document[key]
    if key == "tied":
        expected, is_valid = "true or false", isinstance(found, bool)
    elif key in _WORDS:
        expected, is_valid = "a string", isinstance(found, str)
    elif key in _LISTS_OF_LISTS:
        expected, is_valid = "a list of lists of strings", isinstance(found, list) and all(map(_is_names, found))
    else:
        if key in _ONE_OR_MORE and isinstance(found, str):
            found = [found]
        expected, is_valid = "a list of strings", _is_names(found)
    if not is_valid:
        shown = "a list of other things" if isinstance(found, list) else kind_of(found)
        raise ModelError(f"{path}: {key}", f"expected {expected}, found {shown}", code="model.invalid-field")
    return _as_tuples(found)


def _is_names(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(item, str) for item in found)


def _as_tuples(found: object) -> object:
    return tuple(map(_as_tuples, found)) if isinstance(found, list) else found
