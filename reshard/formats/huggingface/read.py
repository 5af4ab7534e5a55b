"""A Hugging Face folder: config.json, safetensors shards, their index and auxiliary files."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.errors import InputError, ModelError, Parameter, SourceError
from manifests.index import INDEX_NAME, OTHER_WEIGHTS
from manifests.models import ModelShape, is_sized_by_files, model_shape
from manifests.models.adapters import PEFT_CONFIG, merge_hint
from manifests.models.config import CONFIG_DTYPES, CONFIG_NAME, says_tied
from manifests.paths import problem_with_path
from manifests.schema import Source
from manifests.store import newest_below
from manifests.versions import VERSION_INDEX
from reshard.formats.auxiliary import auxiliary_files, describes_files, names_weights
from reshard.formats.huggingface.weight_map import (
    SINGLE_NAME,
    TORCH_INDEX_NAME,
    TORCH_NAME,
    TORCH_SUFFIX,
    is_torch_shard,
    read_shard_index,
    refuse_ranks,
    refuse_slices,
)
from reshard.formats.table import ListedTensor, Listing, OpenOptions
from reshard.formatting import some
from reshard.tensors.checkpoint import Checkpoint, OriginalFiles
from reshard.tensors.comparison import check_coverage, drop_tensors, stored_in, under_fqns, without_absent
from reshard.tensors.lazy import FolderInPart
from reshard.tensors.source_index import SUFFIX, RecordedShard, SourceRecord, index_of, shard_anew
from reshard.transforms.casts import have_equal_samples
from stores.base import Folder, InputFile, read_config, read_whole
from stores.bundles import TensorAt, tensors_in
from stores.workers import each_file_header, each_of

_WANTED = "SOURCE must contain safetensors weights; reshard plan also takes a config.json alone"
_CONVERT = "convert it with transformers: from_pretrained(SOURCE).save_pretrained(DIR)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shards:
    """The names of the shards, and the index, if there is one."""

    names: tuple[str, ...]
    beside: tuple[str, ...]  # other safetensors files
    weight_map: Mapping[str, str] | None = None
    index: bytes | None = None
    are_torch: bool = False  # files of torch.save, not of safetensors

    @property
    def index_name(self) -> str:
        return TORCH_INDEX_NAME if self.are_torch else INDEX_NAME


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Read the headers of a Hugging Face folder and check that they cover the model exactly."""
    files, description = folder.names(), options.description
    refuse_ranks(folder)
    if CONFIG_NAME not in files:
        raise no_config(folder, files)
    small = [name for name in (CONFIG_NAME, INDEX_NAME, TORCH_INDEX_NAME) if name in files]
    folder = FolderInPart(folder, small, [name for name in files if name.endswith(SUFFIX) and not is_beside(name)])
    config_file = folder.file(CONFIG_NAME)
    config = read_config(config_file)
    try:
        needs_files = is_sized_by_files(config, str(config_file), description)
    except ModelError as error:
        raise error if description else _with_guess(error, config, folder, files) from None
    shape = None if needs_files else model_shape(config, str(config_file))
    shards = _find_shards(folder, files)
    tensors: MutableMapping[str, TensorAt]
    tensors, recorded = _read_shards(folder, shards, folder.heads)
    index = index_of(recorded) if shards.are_torch and shards.weight_map is not None else shards.index
    dropped = drop_tensors(tensors, options.drop, shape)
    if shape is None:
        shape = model_shape(config, str(config_file), stored_in(tensors, str(folder)), description)
    tensors = under_fqns(tensors, shape)
    shape = without_absent(shape, tensors)
    check_coverage(tensors, shape, str(folder), frozenset(dropped))
    by_config = shape.ties
    if description is None:
        shape = _without_unequal_ties(shape, tensors, config)
    weights = set(shards.names)
    others = {*shards.beside, *filter(names_weights, files)}
    if dropped or shards.are_torch:  # no export gives back the files of the source
        others |= set(filter(describes_files, files))
    others -= {*weights, INDEX_NAME, shards.index_name}
    left_out = tuple(name for name in files if name in others)
    return Checkpoint(
        shape=shape,
        tensors=tensors,
        auxiliary=auxiliary_files(folder, files, {*weights, *left_out, INDEX_NAME, shards.index_name}),
        record=SourceRecord(shards=recorded, index=index, dropped=dropped),
        source=Source(kind=folder.kind, location=folder.location, revision=folder.revision, left_out=left_out),
        originals=OriginalFiles(
            location=folder.location,
            revision=folder.revision,
            files={name: folder.file(name) for name in shards.names},
        ),
        description=description,
        untied=tuple(group for group in by_config if group not in shape.ties),
        says_tied=says_tied(config),
    )


def _without_unequal_ties(
    shape: ModelShape, tensors: Mapping[str, TensorAt], config: Mapping[str, object]
) -> ModelShape:
    """Return the shape without the ties of weights that are stored twice, with different values in the model's dtype.

    Samples decide: packing compares all values of a tie (docs/adr/0051).
    Source: `PreTrainedModel.tie_weights`, transformers 5.23, whatever the config says.
    """
    dtype, ties = str(config.get("dtype") or config.get("torch_dtype")), list[tuple[str, ...]]()
    for group in shape.ties:
        first, *others = [tensors[fqn] for fqn in group if fqn in tensors]
        common = CONFIG_DTYPES.get(dtype, first.dtype)
        if all(have_equal_samples(first, other, common) for other in others):
            ties.append(group)
    return replace(shape, ties=tuple(ties))


def no_config(folder: Folder, files: Collection[str]) -> SourceError:
    """Return the refusal of a folder without a config, with a hint that depends on its files."""
    newest = newest_below(Path(str(folder)))
    hint = f"did you mean {newest}?" if newest else "SOURCE must be a Hugging Face model folder"
    if version := VERSION_INDEX.fullmatch(f"{Path(str(folder)).name}/{INDEX_NAME}"):
        hint = f"it is a delta; name its chain with the version: CHAIN@{int(version[1])}"
    if PEFT_CONFIG in files:
        hint = merge_hint(str(folder))
    return SourceError(f"{folder}/{CONFIG_NAME}", "no such file", hint, code="source.no-config")


def list_tensors(folder: Folder) -> Listing | None:
    """Return the tensors of `pytorch_model*.bin` files; None for a folder without any."""
    shards = sorted(filter(is_torch_shard, folder.names()))
    if not shards:
        return None
    from reshard.archives.tensors import read_archive  # with the reader of pickles

    tensors = tuple(
        ListedTensor(name=tensor.name, part="model", dtype=tensor.dtype, shape=tensor.shape)
        for name in shards
        for tensor in read_archive(folder.file(name))
    )
    return Listing(format="bin", title="torch.save files", num_files=len(shards), tensors=tensors)


def _with_guess(error: ModelError, config: Mapping[str, object], folder: Folder, files: tuple[str, ...]) -> ModelError:
    """Return the refusal of an unknown architecture with the description to write, as far as it can be guessed."""
    try:
        guess = guess_description(config, _names_in(folder, files))
    except InputError:  # of weights that nobody can read: the architecture is the first thing to say
        return error
    if guess is None:
        return error
    hint = (
        "docs/models.md lists what is; describe another in a file and pass it, as "
        f"{Parameter('model', 'model.toml')}:\n{guess.text}"
    )
    if guess.alike:
        problem = f"{error.problem}, and {' and '.join(guess.alike)} are lists of equal length"
        return ModelError(error.where, problem, hint, code="model.ambiguous-layers")
    return error.changed(hint=hint)


def _names_in(folder: Folder, files: tuple[str, ...]) -> Collection[str]:
    """Return the names of all tensors: those of the index, or of the only file's header."""
    shards = _find_shards(folder, files)
    return _read_shards(folder, shards)[0] if shards.weight_map is None else shards.weight_map


def _find_shards(folder: Folder, files: tuple[str, ...]) -> _Shards:
    present = dict.fromkeys(name for name in files if name.endswith(SUFFIX))
    if INDEX_NAME not in files:
        beside = tuple(name for name in present if is_beside(name))
        present = dict.fromkeys(name for name in present if not is_beside(name))
        if list(present) == [SINGLE_NAME]:
            return _Shards(names=(SINGLE_NAME,), beside=beside, weight_map=None, index=None)
        if not present and not {TORCH_NAME, TORCH_INDEX_NAME}.isdisjoint(files):
            return _find_torch_files(folder, files, beside)
        if not present:
            others = [name for name in files if name.endswith(OTHER_WEIGHTS)]
            hint = f"the format of {others[0]} is not supported; {_CONVERT}" if others else _WANTED
            raise SourceError(str(folder), "found no safetensors file", hint, code="source.no-shards")
        hint = "download the index"
        if SINGLE_NAME in present:
            hint = f"move the others out of the folder, if {SINGLE_NAME} is the whole model"
        elif len(present) == 1:
            hint = f"rename it to {SINGLE_NAME}, if it is the whole model"
        problem = f"expected {SINGLE_NAME} alone or {INDEX_NAME}, found {some(present)} and no index"
        raise SourceError(str(folder), problem, hint, code="source.no-index")
    raw, weight_map = _read_index(folder, INDEX_NAME, present)
    names = dict.fromkeys(sorted(set(weight_map.values())))
    others = [name for name in present if name not in names]
    beside = tuple(name for name in others if is_beside(name))
    _refuse_strays(folder, INDEX_NAME, [name for name in others if not is_beside(name)])
    return _Shards(names=tuple(names), beside=beside, weight_map=weight_map, index=raw)


def _find_torch_files(folder: Folder, files: tuple[str, ...], beside: tuple[str, ...]) -> _Shards:
    """Return the `pytorch_model*.bin` files of a folder without safetensors; other .bin files are not the model's."""
    if TORCH_INDEX_NAME not in files:
        return _Shards(names=(TORCH_NAME,), beside=beside, are_torch=True)
    _, weight_map = _read_index(folder, TORCH_INDEX_NAME, files, TORCH_SUFFIX)
    names = dict.fromkeys(sorted(set(weight_map.values())))
    strays = [name for name in files if is_torch_shard(name) and name not in names]
    _refuse_strays(folder, TORCH_INDEX_NAME, strays)
    return _Shards(names=tuple(names), beside=beside, weight_map=weight_map, are_torch=True)


def _read_index(
    folder: Folder, index_name: str, present: Collection[str], suffix: str = SUFFIX
) -> tuple[bytes, Mapping[str, str]]:
    """Return the text of an index and its map, after checking that it lists files that are there."""
    where = str(folder.file(index_name))
    raw = read_whole(folder.file(index_name))
    weight_map = read_shard_index(raw, where).weight_map
    for name in sorted(set(weight_map.values())):
        if problem := problem_with_path(name):
            raise SourceError(f"{where}: weight_map", f"{problem}, found {name[:80]!r}", code="source.bad-index")
        if not name.endswith(suffix):
            raise SourceError(
                f"{where}: weight_map",
                f"expected names of {suffix} files, found {name!r}",
                "the index is damaged, or is for weights in another format; download it again",
                code="source.bad-index",
            )
        if name not in present:
            whole = SINGLE_NAME if suffix == SUFFIX else TORCH_NAME
            hint = f"; or remove the index, if {whole} is the whole model" if whole in present else ""
            raise SourceError(
                f"{where}: weight_map",
                f"file {name!r} is missing",
                f"download the missing shard{hint}",
                code="source.missing-shard",
            )
    return raw, weight_map


def _refuse_strays(folder: Folder, index_name: str, strays: Sequence[str]) -> None:
    if strays:
        raise SourceError(
            str(folder.file(strays[0])),
            f"stray shard, not listed in {index_name}",
            "remove it, or download the index of these shards",
            code="source.stray-shard",
        )


def is_beside(name: str) -> bool:
    """Return whether a file is not part of the model that transformers reads: in a subfolder (`original/` of gpt-oss),
    or under Mistral's own name."""
    return "/" in name or name.startswith("consolidated")


def _read_shards(
    folder: Folder, shards: _Shards, heads: Mapping[InputFile, Future[bytes]] | None = None
) -> tuple[dict[str, TensorAt], tuple[RecordedShard, ...]]:
    """Return the tensors of all shards, checked against the index, and each shard's header to record."""
    tensors: dict[str, TensorAt] = {}
    recorded = []
    for name, (file, shard, stored) in zip(shards.names, _each_shard(folder, shards, heads), strict=True):
        recorded.append(shard)
        for tensor in stored:
            listed = name if shards.weight_map is None else shards.weight_map.get(tensor.name)
            if listed != name:
                claim = "does not list it" if listed is None else f"lists it in {listed}"
                raise SourceError(
                    f"{file}: {tensor.name!r}",
                    f"is in this shard, but {shards.index_name} {claim}",
                    "download shards and index from one revision",
                    code="source.index-disagrees",
                )
            tensors[tensor.name] = tensor
    for fqn, name in (shards.weight_map or {}).items():
        if fqn not in tensors:
            raise SourceError(
                f"{folder.file(shards.index_name)}: weight_map[{fqn!r}]",
                f"{name} does not contain this tensor",
                "download shards and index from one revision",
                code="source.index-disagrees",
            )
    return tensors, tuple(recorded)


def _each_shard(
    folder: Folder, shards: _Shards, heads: Mapping[InputFile, Future[bytes]] | None
) -> Iterator[tuple[InputFile, RecordedShard, list[TensorAt]]]:
    """Yield each file, what to record of it, and its tensors."""
    files = [folder.file(name) for name in shards.names]
    if shards.are_torch:
        from reshard.archives.tensors import read_archive  # with the reader of pickles

        for name, (file, tensors) in zip(shards.names, each_of(files, read_archive), strict=True):
            renamed = name.removeprefix("pytorch_").removesuffix(TORCH_SUFFIX) + SUFFIX
            yield file, shard_anew(renamed, tensors), tensors
    else:
        for name, (file, header) in zip(shards.names, each_file_header(files, heads), strict=True):
            yield file, RecordedShard(name, header.raw), tensors_in(file, header)
            refuse_slices(file, header)


_COUNTS = re.compile(r"layer|depth|block")  # in names of config fields
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "model_dim", "hidden_dim", "width")
_BEFORE = re.compile(r"emb|wte|wpe|tok|pos|vis|image|audio|patch|proj_in|project_in")
_EMBEDDING = re.compile(r"tok|word|wte|embed|emb")
_HEAD = re.compile(r"head|logits|unembed|output|to_vocab")
_TOWER = re.compile(r"vis|image|audio|speech|enc")  # not a decoder's layers, as far as a name tells
_NUMBER = re.compile(r"[0-9]{1,9}")
_MOST_MODULES = 12  # listed; a longer list is cut short


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """The text of a file for `--model`, and the lists of layers that it could mean, if there are several."""

    text: str
    alike: tuple[str, ...]


def guess_description(config: Mapping[str, object], names: Collection[str]) -> Guess | None:
    """Return a description of a model with these tensors; None if no list of layers is among them."""
    lists = _lists_of(names)
    if not lists:
        return None
    fields = {
        value: name for name, value in reversed(list(config.items())) if type(value) is int and _COUNTS.search(name)
    }
    counted = {name: num for name, num in lists.items() if num in fields} or lists
    longest = max(counted.values())
    alike = sorted(
        (name for name, num in counted.items() if num == longest), key=lambda name: bool(_TOWER.search(name))
    )
    layers, count = alike[0], fields.get(longest)
    others = _modules_outside(names, layers, lists)
    inputs = [module for module in others if _BEFORE.search(module.lower())]
    outputs = sorted((module for module in others if module not in inputs), key=lambda name: bool(_HEAD.search(name)))
    also = f"; so has {', '.join(alike[1:])}" if len(alike) > 1 else ""
    lines = [
        _line("inputs", inputs[:_MOST_MODULES]),
        _line("layers", layers) + f"  # {longest} layers" + also,
        _line("outputs", outputs[:_MOST_MODULES]),
        _line("count", count or "num_hidden_layers") + ("" if count else "  # the field of config.json that says it"),
        _line("width", next((name for name in _WIDTHS if type(config.get(name)) is int), "hidden_size")),
    ]
    embedding = next((name for name in names if _owner_of(name) in inputs and _EMBEDDING.search(name)), None)
    if embedding is not None and not any(map(_HEAD.search, outputs)):
        lines[2] = _line("outputs", [*outputs, "lm_head"]) + "  # lm_head is not stored: tied"
        lines += [_line("ties", [[embedding, "lm_head.weight"]]), "tied = true"]
    return Guess(text="\n".join(lines), alike=tuple(alike) if len(alike) > 1 else ())


def _lists_of(names: Collection[str]) -> dict[str, int]:
    """Return the numbered lists that are in no other list, and their lengths, if they begin at 0 and have no gap."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        words = name.split(".")
        at = next((at for at, word in enumerate(words[:-1]) if at and _NUMBER.fullmatch(word)), None)
        if at is not None:
            numbers.setdefault(".".join(words[:at]), set()).add(int(words[at]))
    return {name: len(indices) for name, indices in numbers.items() if max(indices) + 1 == len(indices)}


def _modules_outside(names: Collection[str], layers: str, lists: Collection[str]) -> list[str]:
    """Return the modules that own what is not in the list of layers; another list counts as one module."""
    others = [f"{name}." for name in lists if name != layers]
    modules: dict[str, None] = {}
    for name in names:
        if name.startswith(f"{layers}."):
            continue
        around = next((other for other in others if name.startswith(other)), None)
        modules.setdefault(around.removesuffix(".") if around else _owner_of(name))
    return [module for module in modules if not any(module.startswith(f"{other}.") for other in modules)]


def _owner_of(name: str) -> str:
    """Return the module that owns a tensor, or the one around it whose name does not end in a number, as a layer's."""
    words = name.split(".")[:-1]
    while words and _NUMBER.fullmatch(words[-1]):
        words.pop()
    return ".".join(words) or name


def _line(key: str, value: object) -> str:
    return f"{key} = {json.dumps(value)}"  # strings and lists of them are written in TOML as in JSON
