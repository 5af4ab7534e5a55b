"""The shape of a model that the catalogue or its user describes by the names in its files, which say its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manifests.errors import ModelError, Parameter, SourceError
from manifests.models.catalogue import CatalogueEntry, described_entry, entry_of
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.shape import ModelShape, Shape, StoredTensors, module_of
from manifests.models.windows import windows_of
from manifests.models.work_by_names import NamedLayer, count_of, work_of
from manifests.schema import ModelDescription

_COMPUTED = ("rotary_emb.inv_freq",)  # what files of older code have in every layer, and models compute
BASE = "transformer."  # what files of such models without their head, as BLOOM's own, leave out; their masks:
_MASKS = ("attn.bias", "attn.masked_bias", "attn.attention.bias", "attn.attention.masked_bias", "attn.causal_mask")
_INCOMPLETE = "the checkpoint is incomplete, or its files are another model's; download files and config again"
_OTHER_CONFIG = "weights and config disagree, and the model may need it; download both from one revision"


def shape_by_names(entry: CatalogueEntry, config: ConfigReader, stored: StoredTensors) -> ModelShape:
    """Return the shape of a model whose tensors are in files, seen that none is missing and none unknown."""
    whole, config = config, _text_config(entry, config)
    lists = ((entry.layers, entry.count), *entry.more_layers)
    base = BASE if entry.layers.startswith(BASE) and not entry.is_described else ""
    ignored = (*entry.ignored, *_COMPUTED, *(_MASKS if base else ()))
    tensors = {name: dims for name, dims in stored.tensors.items() if not _ends(name, ignored)}
    if base:
        parts = {*entry.inputs, entry.layers, *entry.outputs}
        tensors = {f"{base if module_of(base + name, parts) else ''}{name}": dims for name, dims in tensors.items()}
    if tensors:
        _check_shapes(tensors, stored.where)
    ties = _ties(entry, whole, tensors)
    inner, outside = _sort([name for name, _ in lists], tensors)
    layers: list[NamedLayer] = []
    names: list[str] = []
    num_layers = 0
    for name, count in lists:
        listed = _count_layers(config, count)
        read_layers = _read_layers(entry, config, name, inner[name], listed, stored.where)
        layers += read_layers
        names += [f"{name}.{number}" for number in range(len(read_layers))]
        num_layers += listed
    spare, towers = (
        [module for module in modules if any(module_of(name, {module}) for name in outside)]
        for modules in (entry.spare, entry.towers)
    )
    modules = (*towers, *entry.inputs, *names, *spare, *entry.outputs)
    owned = set(modules)
    for name in outside:
        if module_of(name, owned) is None:
            raise _unknown(entry, name, stored.where)
    kinds: list[int] = []
    are_quantized = whole.has("quantization_config")  # which has names of its own for the parts of a weight
    outer, expected = entry.names(config.config)
    if are_quantized:
        # One of two tied tensors is enough, whatever it is called.
        copies = zip(*entry.ties, strict=True) if _are_tied(entry, whole) else ()
        modules_outside = _by_module(NamedLayer(shapes=outside, numbers={}))
        _check_modules(modules_outside, [outer.difference(of_one) for of_one in copies] or [outer], "", stored.where)
    else:
        _check_outside(entry, whole, outer, outside, [*spare, *towers], stored.where)
    checked = [*map(_by_module, layers)] if are_quantized else layers
    for number, layer in enumerate(checked):
        _check_experts(entry, layer, names[number], stored.where)
        if number >= num_layers:
            continue
        here = {kind for kind, place in entry.places.items() if number == place % num_layers}
        possible = {
            kind: names for kind, names in expected.items() if kind in here or not (here or kind in entry.places)
        }
        if are_quantized:
            _check_modules(layer, [*possible.values()], f"{names[number]}.", stored.where)
        else:
            kinds.append(_kind_of(entry, layer, possible, names[number], stored.where))
    _check_alike(names, checked[:num_layers], kinds, stored.where)
    if entry.is_described:
        _check_described(entry, modules, tensors, stored.where)
    return ModelShape(
        architecture=entry.architecture,
        num_layers=num_layers,
        modules=modules,
        tensors=tensors,
        ties=ties,
        ignored_suffixes=tuple(f".{leaf}" for leaf in ignored),
        untrained_suffixes=tuple(leaf.rpartition("*")[2] for leaf in entry.buffers),
        float32_suffixes=tuple(leaf.rpartition("*")[2] for leaf in entry.float32),
        whole_suffixes=entry.whole,
        hands_on_float32=bool(config.config.get("residual_in_fp32", entry.residual_in_fp32)),
        optional=frozenset((*names[num_layers:], *spare)),
        work=work_of(entry, config, modules, dict(zip(names, layers, strict=True)), kinds, tensors),
        hidden_size=count_of(config, entry.width),
        windows=windows_of(entry.architecture, config.config, names[:num_layers]),
        base=base,
        is_estimated=True,
    )


def _check_shapes(tensors: Mapping[str, Shape], where: str) -> None:
    """Refuse tensors whose shapes ZeRO 3 has left behind, since nothing else says them: empty ones, or all in a row."""
    name = next((name for name, dims in tensors.items() if dims == (0,)), None)
    if name is not None or all(len(dims) < 2 for dims in tensors.values()):
        problem = f"expected matrices, found {name or next(iter(tensors))} without its shape, as ZeRO 3 leaves it"
        hint = "save the model again with stage3_gather_16bit_weights_on_model_save, or convert it with zero_to_fp32.py"
        raise SourceError(where, problem, hint, code="source.shape-mismatch")


def _text_config(entry: CatalogueEntry, config: ConfigReader) -> ConfigReader:
    if not entry.section:
        return config
    section = config.section(entry.section)
    if section is None:
        raise config.error(entry.section, "expected an object, found nothing", code="config.invalid-field")
    return section


def _count_layers(config: ConfigReader, names: tuple[str, ...]) -> int:
    """Return the number of layers; some configs have a list of their types instead."""
    name = next((name for name in names if config.has(name)), names[0])
    value = config.config.get(name)
    return len(value) if isinstance(value, list) and value else config.count(name, most=MAX_LAYERS)


def _sort(
    lists: list[str], tensors: Mapping[str, Shape]
) -> tuple[dict[str, dict[str, dict[str, Shape]]], dict[str, Shape]]:
    """Return the tensors of each list of layers, by number and name in the layer, and the others."""
    inner: dict[str, dict[str, dict[str, Shape]]] = {name: {} for name in lists}
    outside = {}
    for name, dims in tensors.items():
        prefix = next((prefix for prefix in lists if name.startswith(f"{prefix}.")), None)
        number, _, leaf = name[len(prefix) + 1 :].partition(".") if prefix else ("", "", "")
        if prefix and number.isdecimal() and leaf:
            inner[prefix].setdefault(number, {})[leaf] = dims
        else:
            outside[name] = dims
    return inner, outside


def _read_layers(
    entry: CatalogueEntry,
    config: ConfigReader,
    listed: str,
    inner: Mapping[str, Mapping[str, Shape]],
    num_layers: int,
    where: str,
) -> list[NamedLayer]:
    """Return the layers of a list, MTP layers after the others, all of them there."""
    num_mtp = config.count(entry.mtp, 0, most=MAX_LAYERS, least=0) if entry.mtp else 0
    for number in range(num_layers):
        if str(number) not in inner:
            listing = f"found {len(inner)} layers" if inner else "found no layers of that name"
            problem = f"expected layers 0 to {num_layers - 1} of {listed}, {listing} and no {listed}.{number}"
            hint = _INCOMPLETE
            if not inner and entry.is_described:
                hint = f"correct layers in the file of {Parameter('model')}"
            raise SourceError(where, problem, hint, code="source.missing-tensor")
    count = num_layers
    while str(count) in inner and count < num_layers + num_mtp:
        count += 1
    if len(inner) > count:
        odd = next(number for number in inner if number not in {str(expected) for expected in range(count)})
        leaf = next(iter(inner[odd]))
        raise _unknown(entry, f"{listed}.{odd}.{leaf}", where)
    return [_layer(inner[str(number)]) for number in range(count)]


def _layer(tensors: Mapping[str, Shape]) -> NamedLayer:
    layer = NamedLayer(shapes={}, numbers={})
    for leaf, dims in tensors.items():
        words = leaf.split(".")
        numbers = [word for word in words[:-1] if word.isdecimal()]
        if numbers:
            leaf = ".".join("*" if word.isdecimal() else word for word in words[:-1]) + f".{words[-1]}"
            layer.numbers.setdefault(leaf, set()).add(".".join(numbers))
        layer.shapes.setdefault(leaf, dims)
    return layer


def _by_module(layer: NamedLayer) -> NamedLayer:
    """Return a quantized layer with a name for each module, whose tensors may have any names."""
    modules = NamedLayer(shapes={}, numbers={})
    for leaf, dims in layer.shapes.items():
        module = leaf.rpartition(".")[0]
        modules.shapes.setdefault(module, dims)
        if leaf in layer.numbers:
            modules.numbers.setdefault(module, set()).update(layer.numbers[leaf])
    return modules


def _check_experts(entry: CatalogueEntry, layer: NamedLayer, name: str, where: str) -> None:
    """Refuse a layer that lacks what others of its experts have of one expert."""
    for leaf, numbers in layer.numbers.items():
        if leaf.count("*") == 1 and "expert" in leaf:
            alike = leaf.partition("*")[0]
            together = [numbers for other, numbers in layer.numbers.items() if other.partition("*")[0] == alike]
            if entry.uneven:
                together = [numbers]
            most = max(len(numbers) for numbers in together)
            gap = next((number for number in range(most) if str(number) not in numbers), None)
            if gap is not None:
                raise _missing(f"{name}.{leaf.replace('*', str(gap))}", where)


def _check_modules(layer: NamedLayer, kinds: Sequence[frozenset[str]], prefix: str, where: str) -> None:
    """Refuse quantized files of which a module has no tensor. A matrix may have become several modules."""
    stored = {module[:end] for module in layer.shapes for end, char in enumerate(f"{module}.") if char == "."}
    modules = [{leaf.rpartition(".")[0].partition(".*")[0] for leaf in leaves} - {""} for leaves in kinds]
    lacking = [sorted(of_kind - stored) for of_kind in modules]
    if lacking and all(lacking):
        raise _missing(f"{prefix}{min(lacking, key=len)[0]}", where)


def _kind_of(
    entry: CatalogueEntry, layer: NamedLayer, kinds: Mapping[int, frozenset[str]], name: str, where: str
) -> int:
    if not kinds:
        return 0
    names = frozenset(layer.shapes)
    for kind, expected_names in kinds.items():
        if names == expected_names:
            return kind
    nearest = max(kinds.values(), key=lambda kind: len(kind & names) - len(kind ^ names))
    if lacking := sorted(nearest - names):
        raise _missing(f"{name}.{lacking[0].replace('*', '0')}", where)
    odd = sorted(names - nearest)[0]
    raise _unknown(entry, f"{name}.{odd.replace('*', '0')}", where)


def _check_alike(names: list[str], layers: list[NamedLayer], kinds: list[int], where: str) -> None:
    """Refuse a layer with fewer experts than others of its kind, or whose names are but a part of another's.

    `kinds` is empty for quantized layers, of which some may have more names than others.
    """
    first: dict[tuple[int, frozenset[str]], int] = {}
    for number, (layer, kind) in enumerate(zip(layers, kinds or [0] * len(layers), strict=True)):
        other = first.setdefault((kind, frozenset(layer.shapes)), number)
        if layer.num_experts != layers[other].num_experts:
            fewer, more = sorted((number, other), key=lambda layer: layers[layer].num_experts)
            leaf, numbers = next(
                (leaf, numbers) for leaf, numbers in sorted(layers[more].numbers.items())
                if len(numbers) > len(layers[fewer].numbers[leaf])
            )  # fmt: skip
            gone = sorted(numbers - layers[fewer].numbers[leaf])[0]
            raise _missing(f"{names[fewer]}.{leaf.replace('*', gone, 1)}", where)
    for (kind, few), number in first.items() if kinds else ():
        for other_kind, many in first:
            if kind == other_kind and few < many:
                raise _missing(f"{names[number]}.{sorted(many - few)[0].replace('*', '0')}", where)


def _check_outside(
    entry: CatalogueEntry, config: ConfigReader, expected: frozenset[str], stored: Mapping[str, Shape],
    others: list[str], where: str,
) -> None:  # fmt: skip
    if not expected:
        return
    tied = {}
    if _are_tied(entry, config):
        tied = {member: partner for pair in entry.ties for member, partner in (pair, pair[::-1])}
    for name in sorted(expected):
        if name not in stored and tied.get(name) not in stored:
            raise _missing(name, where)
    for name in stored:
        if name not in expected and module_of(name, others) is None:
            raise _unknown(entry, name, where)


def _check_described(entry: CatalogueEntry, modules: tuple[str, ...], tensors: Mapping[str, Shape], where: str) -> None:
    """Refuse a description that names a module or a tie that the files do not have."""
    owned = {module_of(name, set(modules)) for name in tensors}
    for module in modules:
        if module not in owned:
            problem = f"module {module} has no tensor"
            hint = (
                f"correct its name in the file of {Parameter('model')}, or leave it out: what has no weights needs "
                "no stage"
            )
            raise ModelError(where, problem, hint, code="model.no-tensors")
    for owner, replica in entry.ties:
        if owner not in tensors and replica not in tensors:
            problem = f"no tensor is named {owner} or {replica}, which are described as tied"
            hint = f"correct ties in the file of {Parameter('model')}"
            raise ModelError(where, problem, hint, code="model.no-tensors")


def _are_tied(entry: CatalogueEntry, config: ConfigReader) -> bool:
    section = config.section(entry.section) if entry.tied_by_section else None
    of_section = section is not None and section.flag("tie_word_embeddings", False)
    return config.flag("tie_word_embeddings", entry.tied) or of_section


def _ties(entry: CatalogueEntry, config: ConfigReader, tensors: dict[str, Shape]) -> tuple[tuple[str, ...], ...]:
    """Return the tie groups, owner first, and add to `tensors` what no file stores of them.

    The config decides about the embedding and the head; other tensors that a description ties are tied.
    """
    are_tied = _are_tied(entry, config)
    groups: dict[str, list[str]] = {}
    for owner, replica in entry.ties:
        ends = [module_of(owner, set(entry.inputs)), module_of(replica, set(entry.outputs))]
        if are_tied or (entry.is_described and None in ends):
            groups.setdefault(owner, [owner]).append(replica)
        elif entry.is_described and entry.tied:
            problem = f"expected true, or nothing, as {Parameter('model')} ties {owner} and {replica}, found false"
            hint = (
                f"correct the field; or say tied = false in the file of {Parameter('model')}: the field alone decides "
                "then; if this is a packed folder, pack its source again with either"
            )
            raise config.error("tie_word_embeddings", problem, hint, code="model.untied-by-config")
    for owner, group in [*groups.items()]:
        dims = next((tensors[name] for name in group if name in tensors), None)
        if dims is None:
            del groups[owner]
        else:
            tensors |= {name: dims for name in group if name not in tensors}
    return tuple(tuple(group) for group in groups.values())


def _ends(name: str, leaves: tuple[str, ...]) -> bool:
    return any(name == leaf or name.endswith(f".{leaf}") for leaf in leaves)


def _missing(name: str, where: str) -> SourceError:
    return SourceError(where, f"1 tensor of the model missing: {name}", _INCOMPLETE, code="source.missing-tensor")


def _unknown(entry: CatalogueEntry, name: str, where: str) -> SourceError:
    dropped = Parameter("drop", [name])
    if entry.is_described:
        problem = f"1 tensor that no module of {Parameter('model')} has: {name}"
        hint = f"name its module in the file of {Parameter('model')}; to leave one behind say {dropped}"
    else:
        problem = f"1 tensor that {entry.architecture} does not have with this config: {name}"
        other = f"weights and config disagree; to leave one behind say {dropped}"
        hint = _OTHER_CONFIG if entry.has(name) else other
    return SourceError(where, problem, hint, code="source.unknown-tensor")


def shape_by_catalogue(
    architecture: str,
    config: Mapping[str, object],
    where: str,
    stored: StoredTensors | None,
    description: ModelDescription | None,
) -> ModelShape:
    """Return the shape of a model that the catalogue or a description has; see `model_shape`."""
    entry = entry_of(architecture) if description is None else described_entry(description, architecture)
    assert entry is not None, architecture
    if stored is None:
        raise ModelError(
            f"{where}: architectures",
            f"the sizes of {entry.architecture}'s tensors are known from its weights, and config.json is alone",
            "give the folder with its safetensors; their headers are enough",
            code="config.needs-weights",
        )
    return shape_by_names(entry, ConfigReader(config, where), stored)
