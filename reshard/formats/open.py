"""Open SOURCE, as given on the command line: a folder, a manifest, or a config.json that can be planned alone.

`--model` names a TOML file with the modules of an architecture that no table knows.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from manifests.command.interpreter import collector_paused
from manifests.errors import ModelError, Parameter, UsageError, refused_by_system, system_errors
from manifests.invariants import MANIFEST_NAME
from manifests.jsontext import kind_of
from manifests.models import ModelShape, architecture_of, check_experts, check_readable, is_sized_by_files, model_shape
from manifests.models.config import CONFIG_DTYPES, CONFIG_NAME
from manifests.models.shape import description_problems
from manifests.paths import is_file
from manifests.safetensors import nbytes_of
from manifests.schema import ModelDescription, Source
from manifests.store import links_out_of, read_config
from reshard.formats import table
from reshard.formats.delta.chain import ChainAt, split_version
from reshard.formats.megatron.names import find_iteration
from reshard.formats.table import Format, OpenOptions
from reshard.formatting import did_you_mean, list_words
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.source_index import SourceRecord
from stores.address import is_url
from stores.base import Folder
from stores.base import read_config as read_stored_config
from stores.bundles import TensorAt
from stores.local import LocalFile, LocalFolder
from stores.open import locate_manifest, open_store


def find_format(source: str) -> tuple[Format, Folder]:
    """Return the format of a source, given as on the command line, and its folder."""
    if _is_named(source):
        return table.MANIFEST, locate_manifest(source)[0]
    address, version = split_version(source)
    if version is not None:
        return table.DELTA, ChainAt(open_store(address), version)
    folder = find_iteration(source, open_store(source))
    names = folder.names()
    return next((kind for kind in table.FORMATS if kind.is_in(names)), table.HUGGINGFACE), folder


@collector_paused()
def open_source(
    source: str, drop: frozenset[str] = frozenset(), description: ModelDescription | None = None
) -> Checkpoint:
    """Open a checkpoint of any format of the table.

    A manifest has its own description, and `description` is not for it.
    """
    kind, folder = find_format(source)
    return kind.open_checkpoint(folder, OpenOptions(drop=drop, description=description))


def open_with_model_file(source: str, drop: frozenset[str], model: Path | None) -> Checkpoint:
    """Open a source as `open_source` does; `model` is a file that describes a model, if it describes the source."""
    if model is None:
        return open_source(source, drop)
    description = read_model_file(model)
    if names_manifest(source):
        problem = "is for Hugging Face folders; a manifest records its own description"
        raise UsageError(Parameter("model"), problem, "leave it out", code="options.model-of-manifest")
    return open_source(source, drop, description)


def open_both(a: str, b: str, model: Path | None) -> tuple[Checkpoint, Checkpoint]:
    """Open two sources of the same model; what `model` or the manifest of one describes is true of the other."""
    description = None if model is None else read_model_file(model)
    if _is_named(b) and not _is_named(a):
        right = open_source(b, description=description)
        return open_source(a, description=description or right.description), right
    left = open_source(a, description=description)
    return left, open_source(b, description=description or left.description)


def links_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the files of a local Hugging Face folder that are links out of it, and their targets.

    Such files are packed, since folders of links to another model's files are common. But they are reported, since a
    folder from elsewhere may link to files that nobody wants to publish. Names in an index and paths in a manifest
    never lead out of their folder.
    """
    originals = checkpoint.originals
    if checkpoint.manifest is not None or originals is None or is_url(originals.location):
        return
    files = {**originals.files, **{item.path: item.file for item in checkpoint.auxiliary}}
    local = [name for name, file in files.items() if isinstance(file, LocalFile)]
    yield from links_out_of(Path(originals.location), local)


def names_manifest(source: str) -> bool:
    """Return whether a source is a manifest (its file or folder); asks the server if it is remote."""
    if _is_named(source):
        return True
    if split_version(source)[1] is not None:
        return False
    folder = open_store(source)
    return not isinstance(folder, LocalFolder) and MANIFEST_NAME in folder.names()


def _is_named(source: str) -> bool:
    """Return whether a source is a manifest, as far as that is known without a server."""
    path = Path(source)
    if is_url(source) or path.name == MANIFEST_NAME:
        return path.name == MANIFEST_NAME
    with system_errors(path / MANIFEST_NAME, code="store.unreadable"):
        return is_file(path / MANIFEST_NAME)


CONFIG_ONLY = "config"  # kind of source
DEFAULT_DTYPE = "bfloat16"


def find_config(source: str) -> Path | None:
    """Return the config of a source without weights: the file itself, or the only file of a folder."""
    path = Path(source)
    if path.suffix == ".json" and path.name != MANIFEST_NAME and os.path.isfile(path):
        return path
    alone = os.path.isdir(path) and os.listdir(path) == [CONFIG_NAME]
    return path / CONFIG_NAME if alone else None


def config_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the config.json of a checkpoint, or the config that it consists of."""
    if checkpoint.source.kind == CONFIG_ONLY:
        return read_config(Path(checkpoint.source.location))
    file = next((item.file for item in checkpoint.auxiliary if item.path == CONFIG_NAME), None)
    return read_stored_config(file) if file else {}


def open_config(path: Path) -> Checkpoint:
    """Return the checkpoint that a config describes: tensors with sizes, but no bytes.

    Their dtype is the config's, bfloat16 by default; quantized ones have their own.
    """
    config = read_config(path)
    shape = _shape_of(config, str(path))
    dtype = _dtype(config, str(path))
    file, tied = LocalFile(path), {fqn for group in shape.ties for fqn in group[1:]}
    tensors, begin = {}, 0  # as if all were in one file, in this order
    for fqn, dims in shape.tensors.items():
        if fqn not in tied:
            stored = _stored_dtype(fqn, shape, dtype)
            tensors[fqn] = TensorAt(fqn, stored, dims, file, begin, nbytes_of(stored, dims))
            begin = tensors[fqn].end
    return Checkpoint(
        shape=shape,
        tensors=tensors,
        auxiliary=(),
        record=SourceRecord(shards=()),
        source=Source(kind=CONFIG_ONLY, location=str(path.resolve())),
    )


def _shape_of(config: Mapping[str, object], where: str) -> ModelShape:
    if not is_sized_by_files(config, where):
        return model_shape(config, where)
    from reshard.estimate.meta_model import tensors_by_class

    check_readable(config, where)
    check_experts(config, where)
    whole, tensors = tensors_by_class(config, architecture_of(config, where), where)
    return model_shape(whole, where, tensors)


def _dtype(config: Mapping[str, object], where: str) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or DEFAULT_DTYPE
    if not isinstance(name, str) or name not in CONFIG_DTYPES:
        raise ModelError(
            f"{where}: dtype",
            f"expected {list_words(CONFIG_DTYPES)}, found {str(name)[:80]!r}",
            code="config.unknown-dtype",
        )
    return CONFIG_DTYPES[name]


def _stored_dtype(fqn: str, shape: ModelShape, dtype: str) -> str:
    """Return the stored dtype of a tensor; see `manifests.models.components`."""
    if fqn.endswith(".weight_scale_inv"):
        return "F32"
    if f"{fqn}_scale_inv" in shape.tensors:
        return "F8_E4M3"
    if fqn.endswith((*shape.packed_suffixes, "_proj_scales")):
        return "U8"
    return dtype


_MOST_BYTES = 1 << 20
_KEYS = tuple(field.name for field in fields(ModelDescription))
_REQUIRED = ("inputs", "layers", "outputs")
_WORDS = ("architecture", "width", "mtp")
_ONE_OR_MORE = ("layers", "count")
_LISTS_OF_LISTS = ("ties", "kinds")


def read_model_file(path: Path) -> ModelDescription:
    """Read a description; `layers` and `count` may be one name instead of a list."""
    document = _load(path)
    for key in document:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) or f"known keys: {list_words(_KEYS, 'and')}"
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
    value = document[key]
    if key == "tied":
        expected, is_valid = "true or false", isinstance(value, bool)
    elif key in _WORDS:
        expected, is_valid = "a string", isinstance(value, str)
    elif key in _LISTS_OF_LISTS:
        expected, is_valid = "a list of lists of strings", isinstance(value, list) and all(map(_is_names, value))
    else:
        if key in _ONE_OR_MORE and isinstance(value, str):
            value = [value]
        expected, is_valid = "a list of strings", _is_names(value)
    if not is_valid:
        shown = "a list of other things" if isinstance(value, list) else kind_of(value)
        raise ModelError(f"{path}: {key}", f"expected {expected}, found {shown}", code="model.invalid-field")
    return _as_tuples(value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _as_tuples(value: object) -> object:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
