"""pack --init: a model without weights gets those that transformers initializes it with, and is packed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manifests.errors import ModelError, Parameter, UsageError
from manifests.index import INDEX_NAME
from manifests.models import architecture_of
from manifests.models.catalogue import entry_of
from manifests.models.config import CONFIG_NAME, ConfigReader, with_dtype
from manifests.schema import Source
from manifests.store import read_config, write_file
from reshard.copy.destination import check_space
from reshard.copy.runs import Progress, counting
from reshard.estimate.meta_model import SHARD_NAME, SHARD_NBYTES, InitialWeights, write_initial
from reshard.formats.auxiliary import BESIDE_CONFIG
from reshard.formats.open import DEFAULT_DTYPE, find_config, open_config, open_source
from reshard.packing.options import PackOptions
from reshard.tensors.checkpoint import Checkpoint
from reshard.transforms.conversion import STORED, Conversion
from stores.address import is_url
from stores.folders.owned import files_of_manifest
from stores.folders.publish import TMPDIR, check_target, scratch_beside, temporary_folder, writing_to

_INIT = Parameter("init")


@contextmanager
def initial_model(
    source: str,
    options: PackOptions,
    on_config: Callable[[PackOptions, Checkpoint], object],
    progress: Progress | None = None,
) -> Iterator[tuple[PackOptions, Checkpoint]]:
    """Initialize the model of a config in a folder beside the output, which is locked, and removed after the block.

    Yields the options and the checkpoint to pack, whose tensors have the digests of what was initialized. `on_config`
    gets them before anything is written, without weights. `progress` gets the bytes of initial weights, of as many that
    are packed later. Every tensor depends on the seed and its name alone. What a killed pack left in the folder is
    never used.
    """
    config_path, seed = _check(source, options), options.init or 0
    config = read_config(config_path)
    if "quantization_config" in config:
        problem, hint = "does not quantize weights", f"remove quantization_config from {config_path}"
        raise UsageError(_INIT, problem, hint, code="options.init")
    _check_mtp(config, config_path)
    if stored := STORED.get(options.conversion.dtype or "source"):
        config = with_dtype({**config, "dtype": None}, stored)
    options = replace(options, conversion=Conversion())
    older = config.pop("torch_dtype", None)
    config["dtype"] = dtype = str(config.get("dtype") or older or DEFAULT_DTYPE)
    document = (json.dumps(config, indent=2) + "\n").encode()
    with temporary_folder("reshard-init-") as temporary:
        with writing_to(*TMPDIR):
            (temporary / CONFIG_NAME).write_bytes(document)
        planned = open_config(temporary / CONFIG_NAME)
        on_config(options, planned)
    versions = [f"{package} {version(package)}" for package in ("torch", "transformers") if find_spec(package)]
    origin = Source(kind="init", location=str(config_path.resolve()), revision=f"seed {seed}, {', '.join(versions)}")
    out, total = Path(options.out), sum(tensor.nbytes for tensor in planned.tensors.values())
    shards = [SHARD_NAME.format(number) for number in range(1, 2 + 2 * total // SHARD_NBYTES)]  # at most
    beside = [name for name in BESIDE_CONFIG if (config_path.parent / name).is_file()]
    wanted = {f"model/{name}" for name in (CONFIG_NAME, INDEX_NAME, *beside, *shards)}
    with scratch_beside(out, wanted) as (scratch, lock):
        check_target(out, options.force, files_of_manifest)
        folder = scratch / "model"
        with writing_to(str(folder)):
            check_space(scratch.parent, 2 * total)
            folder.mkdir()
            write_file(folder / CONFIG_NAME, document)
            for name in beside:
                shutil.copyfile(config_path.parent / name, folder / name)
            start = InitialWeights(folder=folder, dtype=dtype, seed=seed)
            count = counting(progress, 2 * total)
            digests = write_initial(config, str(config_path), planned.tensors, start, lock, count)
        opened = open_source(str(folder))
        tensors = {fqn: replace(tensor, blake3=digests[fqn]) for fqn, tensor in opened.tensors.items()}
        yield options, replace(opened, source=origin, tensors=tensors)


def _check_mtp(config: dict[str, Any], path: Path) -> None:
    """Refuse MTP layers, which transformers' models do not have."""
    entry = entry_of(architecture_of(config, str(path)))
    if entry is None or entry.mtp is None:
        return
    top = ConfigReader(config, str(path))
    reader = top.section(entry.section) if entry.section else top
    if reader is not None and reader.count(entry.mtp, 0, least=0):
        problem = "transformers does not initialize layers for multi-token prediction (MTP)"
        raise ModelError(f"{path}: {entry.mtp}", problem, f"set {entry.mtp} to 0", code="config.mtp-layers")


def _check(source: str, options: PackOptions) -> Path:
    """Return the path of the config; refuse what `init` does not support."""
    options.check()
    given = {
        "virtual": options.virtual, "stages": options.stages is not None, "drop": bool(options.drop),
        "model": options.model is not None, "verify_source": options.verify_source,
        "conversion.dequantize": options.conversion.dequantize is not None,
        "conversion.merge_slices": options.conversion.merge_slices,
        "conversion.adapters": bool(options.conversion.adapters),
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
