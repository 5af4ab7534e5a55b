"""A folder of Megatron-Core's `torch_dist` format, such as `iter_0001000`: a DCP folder with Megatron's arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from manifests.errors import Parameter, SourceError, UsageError
from manifests.jsontext import parse_json_object
from manifests.models import model_shape
from manifests.models.config import CONFIG_NAME
from manifests.schema import MOMENTS, Holds
from reshard.archives.dcp import DcpMetadata, DcpTensor, read_chunks, read_entry_object, read_metadata
from reshard.archives.names import DATA_SUFFIX, MARK_NAME, METADATA_NAME
from reshard.archives.tensors import read_object
from reshard.formats.assemble import OPTIMIZER, ModelConfig, ModelTensors, read_model_config
from reshard.formats.auxiliary import BESIDE_CONFIG, auxiliary_files
from reshard.formats.dcp.read import check_files
from reshard.formats.dcp.read import list_tensors as list_dcp_tensors
from reshard.formats.megatron.arguments import check_arguments, config_of, with_defaults
from reshard.formats.megatron.names import (
    COMMON_ENTRY,
    COMMON_NAME,
    EMBEDDING,
    INTEGRITY_NAME,
    MARK,
    TRACKER_NAME,
    Common,
)
from reshard.formats.megatron.tensors import has_megatron_names, is_megatron_weight, under_names_of_huggingface
from reshard.formats.megatron.training import MASTERS, find_optimizer, training_state
from reshard.formats.table import CheckOptions, Listing, OpenOptions
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.comparison import Contents, Findings
from reshard.tensors.lazy import MemoryFile
from reshard.tensors.slices import merge_slices
from stores.base import Folder, InputFile, read_whole
from stores.bundles import TensorAt, join_slices
from stores.local import LocalFolder

_VERSION = 3.0  # of the order of rows of query_key_value
_ITERATION = re.compile(r"iter_(\d{1,12})")
_ALIASES = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}  # in other releases

_READ = ("args", "checkpoint_version", "content_metadata", "iteration", OPTIMIZER)  # of what is beside tensors
Tensors = dict[str, TensorAt]
_EXTRA_STATE = re.compile(r"_extra_state(/|$)")  # of Transformer Engine: no weight


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Read a checkpoint's metadata and check that its weights cover the model exactly, as its arguments describe it.

    The arguments must agree with config.json; without one, it is made from them. Weights are packed whole, under
    Hugging Face's names, however they were sharded; with optimizer state, they are the master weights.
    """
    if options.description is not None:
        problem = "is for Hugging Face folders; Megatron's arguments describe the model"
        raise UsageError(Parameter("model"), problem, "leave it out", code="options.model-of-manifest")
    saved = read_metadata(folder)
    common, where = read_common(folder, saved), str(folder)
    optimizer = None if OPTIMIZER in options.drop else find_optimizer(common, saved.tensors, where)
    config, weights = _read_weights(folder, saved, common)
    model, moments, trained = ModelTensors.cover(weights, config, options, where), dict[Holds, Tensors](), None
    if optimizer is not None:
        state = {
            kind: model.cover_state(kind, _weights(folder, tensors, config.fields))
            for kind, tensors in optimizer.items()
        }
        moments = {kind: state[kind] for kind in MOMENTS}
        dtype = next(model.weights[fqn].dtype for fqn in moments[MOMENTS[0]])
        names = optimizer[MOMENTS[0]].keys()
        trained = training_state(common, arguments_in(common), moments[MOMENTS[0]], names, dtype)
        model = replace(model, weights={**model.weights, **state[MASTERS]})
    files = folder.names()
    data = [name for name in files if name.endswith(DATA_SUFFIX)]
    auxiliary = (
        AuxiliaryAt(path=CONFIG_NAME, file=config.file),
        *auxiliary_files(folder, files, {METADATA_NAME, MARK_NAME, COMMON_NAME, INTEGRITY_NAME, CONFIG_NAME, *data}),
        *(
            AuxiliaryAt(path=name, file=file)
            for name, file in _files_above(folder).items()
            if name not in (CONFIG_NAME, *files)
        ),
    )
    left_out = _left_out(saved, common, is_trained=trained is not None)
    return replace(model.checkpoint(folder, data, auxiliary, left_out), moments=moments, trained=trained)


def read_weights(folder: Folder) -> dict[str, TensorAt]:
    """Return a checkpoint's weights, whole, and under Hugging Face's names."""
    saved = read_metadata(folder)
    return _read_weights(folder, saved, read_common(folder, saved))[1]


def check(folder: Folder, findings: Findings, options: CheckOptions) -> Contents:
    """Report what is wrong with a folder as one of DCP, and with what Megatron-Core writes beside the tensors."""
    contents = check_files(folder, findings, options)
    if not findings:
        try:
            _check_mark(folder)
            read_common(folder, read_metadata(folder))
        except SourceError as error:
            findings.add_error(error)
    return contents


def list_tensors(folder: Folder) -> Listing:
    return replace(list_dcp_tensors(folder), format="megatron", title="Megatron-Core's torch_dist")


def _read_weights(folder: Folder, saved: DcpMetadata, common: Common) -> tuple[ModelConfig, Tensors]:
    _check_mark(folder)
    where = str(folder)
    arguments = arguments_in(common)
    weights = {tensor.name: tensor for tensor in saved.tensors if is_megatron_weight(tensor.name)}
    if not has_megatron_names(weights):
        hint = "checkpoints of GPT models are supported; convert another with Megatron-Bridge"
        problem = f"found no tensor {EMBEDDING!r}, which GPT models of Megatron-Core have"
        raise SourceError(f"{where}/{METADATA_NAME}", problem, hint, code="source.no-shards")
    embedding = weights[EMBEDDING]
    config_file: InputFile
    if CONFIG_NAME in folder.names():
        config_file = folder.file(CONFIG_NAME)
    elif above := _files_above(folder):
        config_file = above[CONFIG_NAME]
    else:
        text = json.dumps(config_of(arguments, embedding.dtype, common.place), indent=2) + "\n"
        config_file = MemoryFile(f"{folder}/{CONFIG_NAME}", text.encode())
    config = read_model_config(config_file)
    if config.shape is None:  # which refuses it: its sizes are known from names that this format does not have
        model_shape(config.fields, str(config_file))
    num_rows = embedding.chunks[0].region.whole_shape[0]
    is_made = isinstance(config_file, MemoryFile)
    check_arguments(arguments, config.fields, num_rows, common.place, where, is_made=is_made)
    return config, _weights(folder, weights, config.fields)


def _files_above(folder: Folder) -> dict[str, InputFile]:
    """Return config.json and what is beside it in the folder of the tracker, for an iteration that has none itself.

    This is looked for on this machine alone, as for the steps of DeepSpeed.
    """
    if not isinstance(folder, LocalFolder) or CONFIG_NAME in folder.names():
        return {}
    above = LocalFolder(Path(folder.location).parent)
    if not all((above.path / name).is_file() for name in (TRACKER_NAME, CONFIG_NAME)):
        return {}
    return {name: above.file(name) for name in (CONFIG_NAME, *BESIDE_CONFIG) if (above.path / name).is_file()}


def _weights(folder: Folder, saved: Mapping[str, DcpTensor], config: Mapping[str, object]) -> Tensors:
    slices = {name: tuple(chunks) for name, chunks in read_chunks(folder, saved).items()}
    named = under_names_of_huggingface(slices, config, str(folder))
    joined = join_slices(part for parts in named.values() for part in parts)
    return {name: merge_slices(parts) for name, parts in joined.items()}


def _check_mark(folder: Folder) -> None:
    file = folder.file(MARK_NAME)
    mark = parse_json_object(read_whole(file, most_nbytes=1 << 20), str(file))
    for name, expected in MARK.items():
        if (value := mark.get(name, expected if name != "sharded_backend" else None)) != expected:
            problem = f"expected {expected!r}, found {str(value)[:80]!r}"
            hint = "save it again with --ckpt-format torch_dist"
            raise SourceError(f"{file}: {name}", problem, hint, code="source.megatron-format")


def _left_out(saved: DcpMetadata, common: Common, *, is_trained: bool) -> tuple[str, ...]:
    """Return what is not packed, by its first name."""
    names = [tensor.name for tensor in saved.tensors if not is_megatron_weight(tensor.name)]
    names += saved.values.keys() - {COMMON_ENTRY}
    unread = {str(name) for name, value in common.values.items() if name not in _READ and value not in (None, 0, {})}
    prefixes = {"_extra_state" if _EXTRA_STATE.search(name) else re.split("[./]", name)[0] for name in names}
    return tuple(sorted((prefixes - {OPTIMIZER}) | unread if is_trained else prefixes))


def read_common(folder: Folder, saved: DcpMetadata) -> Common:
    """Return what a checkpoint has beside tensors: in `common.pt`, if there is one, as Megatron-Core reads it.

    `content_metadata` says how ranks sharded, which names and chunks say too, and how state was gathered.
    """
    place, entry = f"{folder}/{COMMON_NAME}", saved.values.get(COMMON_ENTRY)
    if COMMON_NAME in folder.names():
        common = read_object(folder.file(COMMON_NAME), COMMON_NAME)
    elif entry is not None:
        place, objects = f"{folder}/{entry.path}: {COMMON_ENTRY}", read_entry_object(folder, entry)
        common = objects[0] if isinstance(objects, list) and len(objects) == 1 else objects
    else:
        raise _no_arguments(place, f"no such file, and no {COMMON_ENTRY!r} in {METADATA_NAME}")
    if not isinstance(common, dict):
        raise _no_arguments(place, f"found a {type(common).__name__}")
    if (version := common.get("checkpoint_version", _VERSION)) != _VERSION:
        problem = f"expected {_VERSION}, found {str(version)[:80]}: rows of query_key_value may have another order"
        hint = "load it in Megatron-LM and save it again"
        raise SourceError(f"{place}: checkpoint_version", problem, hint, code="source.megatron-format")
    name = folder.location.rstrip("/").rpartition("/")[2]
    if (match := _ITERATION.fullmatch(name)) and common.get("iteration", int(match[1])) != int(match[1]):
        problem = f"expected {int(match[1])} ({name}), found {str(common['iteration'])[:80]}"
        hint = "the folder was renamed or copied: rename it back, or name the folder of the iteration that you want"
        raise SourceError(f"{place}: iteration", problem, hint, code="source.other-iteration")
    return Common(common, place)


def arguments_in(common: Common) -> dict[str, Any]:
    """Return the arguments of Megatron-LM, by name."""
    fields = getattr(common.values.get("args"), "fields", None)
    if not isinstance(fields, dict) or not fields:
        raise _no_arguments(common.place, "found no 'args'")
    arguments = {name: value for name, value in fields.items() if isinstance(name, str)}
    for name, alias in _ALIASES.items():
        if name not in arguments and alias in arguments:
            arguments[name] = arguments[alias]
    return with_defaults(arguments) if arguments.get("multi_latent_attention") else arguments


def _no_arguments(where: str, actual: str) -> SourceError:
    problem = f"expected the arguments of Megatron-LM, which say what the weights mean, {actual}"
    hint = "convert it with Megatron-Bridge's AutoBridge.export_ckpt"
    return SourceError(where, problem, hint, code="source.no-megatron-arguments")
