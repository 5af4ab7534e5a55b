"""pack --init: a model without weights gets those that transformers initializes it with, and is packed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from manifests.errors import Parameter, UsageError, refused_by_system
from manifests.index import INDEX_NAME
from manifests.models.config import CONFIG_NAME
from manifests.schema import Source
from manifests.store import read_config, write_file
from reshard.copy.destination import check_space
from reshard.estimate.meta_model import InitialWeights, write_initial
from reshard.formats.open import DEFAULT_DTYPE, find_config, open_config, open_source
from reshard.packing.options import PackOptions
from reshard.tensors.checkpoint import Checkpoint
from reshard.transforms.conversion import CONFIG_DTYPES, STORED, Conversion
from stores.address import is_url
from stores.folders.owned import files_of_manifest
from stores.folders.publish import check_target, partial_of

_INIT = Parameter("init")
# What trains on text needs beside the config.
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja",
)  # fmt: skip


@contextmanager
def initial_model(
    source: str, options: PackOptions, on_config: Callable[[PackOptions, Checkpoint], object]
) -> Iterator[tuple[PackOptions, Checkpoint]]:
    """Initialize the model of a config in a folder beside the output, which is removed after the block.

    Yields the options and the checkpoint to pack. `on_config` gets them before anything is written, without weights.
    Every tensor depends on the seed and its name alone. A pack that was killed finds the folder again.

    Raises:
        UsageError: SOURCE has weights or a quantized model's config, or options conflict with `init`.
        ModelError: the config is invalid, or transformers cannot initialize the model.
        OutputError: as `pack`.
    """
    config_path, seed = _check(source, options), options.init or 0
    config = read_config(config_path)
    if "quantization_config" in config:
        problem, hint = "does not quantize weights", f"remove quantization_config from {config_path}"
        raise UsageError(_INIT, problem, hint, code="options.init")
    if stored := STORED.get(options.conversion.dtype or "source"):
        config["dtype"] = next(name for name, dtype in CONFIG_DTYPES.items() if dtype == stored)
    options = replace(options, conversion=Conversion())
    dtype = str(config.setdefault("dtype", config.pop("torch_dtype", None) or DEFAULT_DTYPE))
    document = (json.dumps(config, indent=2) + "\n").encode()
    with TemporaryDirectory() as scratch:
        (Path(scratch) / CONFIG_NAME).write_bytes(document)
        planned = open_config(Path(scratch) / CONFIG_NAME)
        on_config(options, planned)
    out = Path(options.out)
    check_target(out, options.force, files_of_manifest)
    versions = [f"{package} {version(package)}" for package in ("torch", "transformers") if find_spec(package)]
    key = hashlib.sha256(b"\0".join([document, str(seed).encode(), *map(str.encode, versions)])).hexdigest()[:12]
    folder = partial_of(out).with_suffix(f".init-{key}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        needed = 2 * sum(tensor.nbytes for tensor in planned.tensors.values())
        if not (folder / INDEX_NAME).exists():
            check_space(needed, shutil.disk_usage(folder).free, folder)
        write_file(folder / CONFIG_NAME, document)
        for name in _BESIDE:
            if (config_path.parent / name).is_file():
                shutil.copyfile(config_path.parent / name, folder / name)
    except OSError as error:
        raise refused_by_system(str(folder), error, "cannot be written", code="output.unwritable") from error
    if not (folder / INDEX_NAME).exists():
        start = InitialWeights(folder=folder, dtype=dtype, seed=seed)
        write_initial(config, str(config_path), planned.tensors, start)
    origin = Source(kind="init", location=str(config_path.resolve()), revision=f"seed {seed}, {', '.join(versions)}")
    yield options, replace(open_source(str(folder)), source=origin)
    shutil.rmtree(folder, ignore_errors=True)


def _check(source: str, options: PackOptions) -> Path:
    """Return the path of the config; refuse what `init` does not support."""
    given = {
        "virtual": options.virtual, "stages": options.stages is not None, "drop": bool(options.drop),
        "model": options.model is not None, "verify_source": options.verify_source,
    }  # fmt: skip
    for name in (name for name, is_given in given.items() if is_given):
        raise UsageError(Parameter(name), f"conflicts with {_INIT}", "remove one of them", code="options.conflict")
    if is_url(options.out):
        hint = "pack into a folder, and then that folder to the address"
        raise UsageError(Parameter("out"), f"{_INIT} requires a folder", hint, code="options.init")
    config_path = find_config(source)
    if config_path is None:
        problem, hint = "is for a model without weights", f"name a config.json, or remove {_INIT}"
        raise UsageError(_INIT, problem, hint, code="options.init")
    return config_path
