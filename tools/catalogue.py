"""Write manifests/models/catalogue.json: what files of every decoder of transformers contain, and how it is tied.

`python tools/catalogue.py` writes the table from the installed transformers; `--check` exits with 1 where the table is
out of date. Names of architectures after that restrict either to these.

Nothing is downloaded: each class is built tiny, on the meta device for names and on the CPU for the order in which its
modules run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils.flop_counter import FlopCounterMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models import ConfigReader
from manifests.models.by_names import heads_width
from manifests.models.catalogue import make_entry
from manifests.models.shape import module_of
from tools.parity import SHARED_LAYERS, Layers, compare, look_at_layers
from tools.shared_parity import why_not_tensor_parallel
from tools.tiny_models import LAYERS, MULTIMODAL, decoder_classes, tiny_config

PATH = Path(__file__).parents[1] / "manifests" / "models" / "catalogue.json"

_ENCODER = "an encoder, which sees tokens on both sides"
_OTHER_HALF = "one half of an encoder-decoder model"
_SHARED = "the same layers run several times"
# Not decoders, or not decoders of one list of layers.
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("BertGenerationDecoder", "BertLMHeadModel", "BigBirdForCausalLM", "CamembertForCausalLM",
         "Data2VecTextForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM", "MegatronBertForCausalLM",
         "ReformerModelWithLMHead", "RemBertForCausalLM", "RoCBertForCausalLM", "RoFormerForCausalLM",
         "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM",
         "XLMWithLMHeadModel", "XLNetLMHeadModel", "XmodForCausalLM"),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
         "MBartForCausalLM", "MarianForCausalLM", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM",
         "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM", "ProphetNetForCausalLM", "TrOCRForCausalLM",
         "WhisperForCausalLM"),
        _OTHER_HALF,
    ),
    "BltForCausalLM": "several decoders in one model",
    "Gemma4AssistantForCausalLM": "drafts tokens for another model",
    "Gemma4UnifiedAssistantForCausalLM": "drafts tokens for another model",
    "Gemma3nForConditionalGeneration": "its vision tower is a model of the package timm",
    "GitForCausalLM": "takes images",
    "HrmTextForCausalLM": _SHARED,
    "Phi4MultimodalForCausalLM": "takes images and sound; transformers has its text model as a part of this class only",
    "ZambaForCausalLM": "layers share weights",
    "Zamba2ForCausalLM": "layers share weights",
}  # fmt: skip
# Fields beside true or false whose value decides which tensors there are.
_SWITCHES: tuple[tuple[str, Any], ...] = (
    ("q_lora_rank", None),
    ("n_shared_experts", None),
    ("n_shared_experts", 0),
    ("num_shared_experts", 0),
    ("first_k_dense_replace", 0),
    ("num_dense_layers", 0),
    ("moe_num_shared_experts", 0),
    ("num_local_experts", 0),
    ("shared_intermediate_size", 0),
    ("decoder_sparse_step", 2),
    ("hidden_size_per_layer_input", 0),
)
# Fields whose value decides which layers are of which kind, with values for which there may be further kinds.
_KINDS: tuple[tuple[str, Any], ...] = (
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [LAYERS - 1]),
    ("mlp_only_layers", [0]),
    ("first_k_dense_replace", LAYERS - 1),
    ("moe_layers", [1]),
    *SHARED_LAYERS,
)
# What lists of layers' types in configs may have; attention over a window has the tensors of full attention.
_TYPES: tuple[frozenset[str], ...] = (
    frozenset(("chunked_attention", "compressed_sparse_attention", "conv", "full_attention",
               "heavily_compressed_attention", "hybrid", "indexed_attention", "linear_attention", "minimax_m3_sparse",
               "sliding_attention")),
    frozenset(("dense", "hash_moe", "moe", "sparse")),
    frozenset(("full", "shared")),
)  # fmt: skip
_SEP = ",\n"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class NotDescribedError(Exception):
    """An architecture that the catalogue cannot hold, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """The names that files of one config have: outside layers, and in each layer, numbers of experts as `*`."""

    outside: frozenset[str]
    layers: tuple[frozenset[str], ...]


def main() -> int:
    """Write or check the table; return the exit code."""
    only = [word for word in sys.argv[1:] if not word.startswith("--")]
    found, refused = describe_all(only)
    committed = json.loads(PATH.read_text()) if PATH.exists() else {}
    if "--check" in sys.argv[1:]:
        held, found = committed.get("architectures", {}), json.loads(json.dumps(found))  # a tuple is a list there
        wrong = [name for name in only or {*found, *held} if found.get(name) != held.get(name)]
        print(*(f"{name} differs: make catalogue" for name in sorted(wrong)), sep="\n", end="", file=sys.stderr)
        return bool(wrong)
    if only:
        found = {**committed.get("architectures", {}), **found}
        refused = {**committed.get("left_out", {}), **refused}
    PATH.write_text(render(found, {name: why for name, why in refused.items() if name not in found}))
    return 0


def describe_all(only: Iterable[str] = ()) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the entries by architecture, and the reasons of those that have none."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found, refused, wanted = {}, dict[str, str](), set(only)
    for name, model in decoder_classes():
        if wanted and name not in wanted:
            continue
        if name in LEFT_OUT:
            refused[name] = LEFT_OUT[name]
            continue
        try:
            found[name] = describe(model)
        except NotDescribedError as error:
            refused[name] = str(error)
        except Exception as error:  # whatever transformers raises of a tiny config
            refused[name] = f"no tiny model could be built: {type(error).__name__}"
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
    trained = [make_entry(name, entry) for name, entry in found.items() if "refused" not in entry]
    trained = [entry for entry in trained if not entry.hands_on_trees]
    for name, why in why_not_tensor_parallel(trained).items():
        found[name] |= {"no_tp": why} if why else {}
    return found, refused


def describe(model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """Return a class's entry in the table.

    Raises:
        NotDescribedError: files of it have names that the table cannot tell.
    """
    config = tiny_config(model_class)
    model = build(model_class, config, "meta")
    if sum(parameter.numel() for parameter in model.parameters()) > 2e7:
        raise NotDescribedError("needs a tiny config of its own")
    path = list_of_layers(model)
    stored = {name: names_in_files(model, [name]) for name in model.state_dict()}
    prefix = prefix_in_files(path, model)
    base = tensors_of(model, prefix)
    outside = {name: files for name, files in stored.items() if not name.startswith(f"{path}.")}
    inputs, outputs = units_in_order(model_class, config, path, outside, prefix)
    kinds, kind_of = kinds_of(base)
    decoder, towers = config, []
    if model_class.__name__ in MULTIMODAL:
        decoder = config.text_config
        towers = [unit for unit in inputs if not unit.startswith(prefix.rpartition(".")[0])]
        base = Tensors(
            outside=frozenset(name for name in base.outside if module_of(name, towers) is None), layers=base.layers
        )
    further = further_kinds(model_class, decoder, kinds, prefix, towers)
    entry: dict[str, Any] = {
        **({"section": "text_config", "towers": towers} if towers else {}),
        "inputs": [unit for unit in inputs if unit not in towers],
        "layers": prefix,
        "outputs": outputs,
        "count": fields_for("num_hidden_layers", decoder),
        "width": fields_for("hidden_size", decoder),
        "outside": sorted(base.outside),
        "kinds": [sorted(kind) for kind in (*kinds, *further)],
    }
    if not further and (places := places_of(kinds, kind_of)):
        entry["places"] = places
    entry |= ties_of(model_class, model, stored)
    if switches := switches_of(model_class, decoder, base, kind_of, prefix, towers):
        entry["switches"] = switches
    if buffers := buffers_of(model, stored, prefix):
        entry["buffers"] = buffers
    entry |= ignored_by(model_class, prefix)
    if has_uneven_experts(model, prefix):
        entry["uneven"] = True
    entry |= work_of(model_class, config, decoder, path, kind_of, entry)
    for kind in further if "per_key" in entry else ():
        alike = [kinds[known] & kind for known in range(len(kinds))]
        nearest = max(
            range(len(kinds)), key=lambda known: (sum("attn" in name for name in alike[known]), len(alike[known]))
        )
        entry["per_key"].append(entry["per_key"][nearest])
    layers = look_at_layers(model_class.__name__, path)
    entry |= {name: value for name in ("num_results", "carried", "reshapes") if (value := getattr(layers, name))}
    if why := why_not_trained(model_class, entry, layers):
        entry["refused"] = why
    return entry


def why_not_trained(model_class: type[PreTrainedModel], entry: Mapping[str, Any], layers: Layers) -> str:
    """Return why stages on transformers' own forward are not the whole model, or nothing where they are."""
    if not layers.all_run:
        return "some of its layers run for images only"
    if model_class.__name__ in MULTIMODAL and not has_decoder(model_class):
        return "transformers has its text model as a part of this class only"
    for num_stages in (1, 2, LAYERS):
        try:
            found = compare(make_entry(model_class.__name__, entry), num_stages)
        except DynamicOutputShapeException:
            return "sizes inside of its layers depend on the tokens"
        except Exception as error:  # whatever a forward raises in a stage
            return f"a stage fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if found.compared.loss > 1e-6:
            return "transformers' loss for it is not that of predicting the next token"
        if not found.is_equal:
            return "stages compute something else than the whole model"
    return ""


def has_decoder(model_class: type[PreTrainedModel]) -> bool:
    """Return whether transformers has a class for the text model by itself."""
    return type(tiny_config(model_class).text_config) in MODEL_FOR_CAUSAL_LM_MAPPING


def build(model_class: type[PreTrainedModel], config: Any, device: str) -> PreTrainedModel:
    with torch.device(device):
        return model_class(config).eval()


def list_of_layers(model: PreTrainedModel) -> str:
    """Return the name of the list of decoder layers in memory."""
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == LAYERS]
    if not lists:
        # A decoder that counts its layers otherwise has half as many.
        lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == 2]
    least = min((name.count(".") for name in lists), default=0)
    lists = [name for name in lists if name.count(".") == least]
    if len(lists) != 1:
        raise NotDescribedError(f"expected one list of decoder layers, found {len(lists)}")
    return lists[0]


def names_in_files(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    state = model.state_dict()
    return sorted(revert_weight_conversion(model, {name: state[name] for name in names}))


def prefix_in_files(path: str, model: PreTrainedModel) -> str:
    """Return the name of the list of layers in files."""
    names = names_in_files(model, [name for name in model.state_dict() if name.startswith(f"{path}.")])
    for prefix in (path, *{name.split(".0.")[0] for name in names if ".0." in name}):
        if all(re.match(rf"{re.escape(prefix)}\.\d+\.", name) for name in names):
            return prefix
    raise NotDescribedError("files have its layers under several names")


def tensors_of(model: PreTrainedModel, prefix: str) -> Tensors:
    names = names_in_files(model, model.state_dict())
    layers: dict[int, set[str]] = {}
    outside = set()
    for name in names:
        if name.startswith(f"{prefix}."):
            number, _, leaf = name.removeprefix(f"{prefix}.").partition(".")
            layers.setdefault(int(number), set()).add(_NUMBER.sub("*", f".{leaf}")[1:])
        else:
            outside.add(name)
    if sorted(layers) != list(range(len(layers))):
        raise NotDescribedError("some of its layers have no tensors")
    return Tensors(outside=frozenset(outside), layers=tuple(frozenset(layers[number]) for number in sorted(layers)))


def has_uneven_experts(model: PreTrainedModel, prefix: str) -> bool:
    """Return whether files have more experts of one matrix than of another, as where some experts are the identity."""
    counts: dict[str, dict[str, int]] = {}
    for name in names_in_files(model, [name for name in model.state_dict() if ".0." in name]):
        if name.startswith(f"{prefix}.0.") and (match := _NUMBER.search(name, len(prefix) + 2)):
            alike = counts.setdefault(name[: match.start()], {})
            alike[name[match.end() :]] = alike.get(name[match.end() :], 0) + 1
    return any(len(set(alike.values())) > 1 for alike in counts.values())


def kinds_of(tensors: Tensors) -> tuple[list[frozenset[str]], list[int]]:
    """Return the distinct sets of names that layers have, and which of them each layer has."""
    kinds = list(dict.fromkeys(tensors.layers))
    return kinds, [kinds.index(layer) for layer in tensors.layers]


def further_kinds(
    model_class: type[PreTrainedModel], decoder: Any, kinds: list[frozenset[str]], prefix: str, towers: Collection[str]
) -> list[frozenset[str]]:
    """Return kinds of layers that only other configs have."""
    found: list[frozenset[str]] = []
    for fields in _other_layers(decoder.to_dict()):
        changes = {"text_config": fields} if towers else fields
        try:
            changed = tensors_of(build(model_class, tiny_config(model_class, **changes), "meta"), prefix)
        except Exception:  # a combination that transformers refuses
            continue
        found += [kind for kind in dict.fromkeys(changed.layers) if kind not in (*kinds, *found)]
    return found


def _other_layers(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes to a config that may give it layers of other kinds: of each type by each of its lists of types."""
    yield from ({name: value} for name, value in _KINDS if name in config)
    types = {
        name: sorted({*found, *known})
        for name, found in config.items()
        for known in _TYPES
        if isinstance(found, list) and all(isinstance(each, str) for each in found) and not known.isdisjoint(found)
    }
    for chosen in product(*types.values()) if types else ():
        yield {name: [each] * len(config[name]) for name, each in zip(types, chosen, strict=True)}


def places_of(kinds: list[frozenset[str]], kind_of: list[int]) -> dict[str, int]:
    """Return which kinds only the first (0) or last (-1) layer has, if a damaged layer could pass for another kind."""
    found = {}
    for number, kind in enumerate(kinds):
        if any(kind < other or other < kind for other in kinds) and kind_of.count(number) == 1:
            at = kind_of.index(number)
            if at in (0, len(kind_of) - 1):
                found[str(number)] = 0 if at == 0 else -1
    return found


def units_in_order(
    model_class: type[PreTrainedModel], config: Any, path: str, outside: Mapping[str, list[str]], prefix: str
) -> tuple[list[str], list[str]]:
    """Return the modules that run before and after the layers, as files name them."""
    torch.manual_seed(0)
    model = build(model_class, config, "cpu")
    calls: list[str] = []
    for name, part in model.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    run(model)
    layers = [position for position, name in enumerate(calls) if name.startswith(f"{path}.")]
    found: dict[str, tuple[bool, int]] = {}
    for name, files in outside.items():
        unit, stored = unit_of(name, path), {unit_of(file, prefix) for file in files}
        if len(stored) != 1:
            raise NotDescribedError(f"files have {name} in several modules")
        at = [position for position, call in enumerate(calls) if call == unit or call.startswith(f"{unit}.")]
        first = at[0] if at else -1
        found.setdefault(stored.pop(), (first > layers[-1], first))
    ordered = sorted(found, key=lambda unit: found[unit])
    return [unit for unit in ordered if not found[unit][0]], [unit for unit in ordered if found[unit][0]]


def run(model: PreTrainedModel, length: int = 12) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(3, 3 + length)[None], use_cache=False).logits
    return logits


def unit_of(name: str, path: str) -> str:
    """Return the module outside the list of layers `path` that a tensor belongs to: the first not around the list."""
    around = {path[:end] for end in range(len(path)) if path[end] == "."}
    words = name.split(".")
    for end in range(1, len(words)):
        if (unit := ".".join(words[:end])) not in around:
            return unit
    raise NotDescribedError(f"{name} belongs to the model itself, not to one of its modules")


def fields_for(name: str, config: Any) -> list[str]:
    """Return what config.json may call a field, the usual name first."""
    aliases: Mapping[str, str] = type(config).attribute_map
    names = [aliases[name], name] if name in aliases else [name]
    fields = config.to_dict()
    if name == "num_hidden_layers" and not any(known in fields for known in names):
        if "num_layers" in fields:
            return ["num_layers"]
        names += [known for known, value in fields.items() if isinstance(value, list) and len(value) == LAYERS]
    return list(dict.fromkeys(names))


def ties_of(
    model_class: type[PreTrainedModel], model: PreTrainedModel, stored: Mapping[str, list[str]]
) -> dict[str, Any]:
    keys = model._tied_weights_keys or {}
    pairs = []
    for replica, owner in keys.items():
        if replica not in stored or owner not in stored:
            if re.escape(replica) == replica.replace(".", r"\."):
                continue  # of a part that this config does not have
            raise NotDescribedError("weights are tied by patterns")
        pairs.append([stored[owner][0], stored[replica][0]])
    default = model_class.config_class()
    return {"ties": pairs, "tied": bool(getattr(default, "tie_word_embeddings", False))} if pairs else {}


def switches_of(
    model_class: type[PreTrainedModel],
    config: Any,
    base: Tensors,
    kind_of: list[int],
    prefix: str,
    towers: Collection[str],
) -> list[dict[str, Any]]:
    """Return which fields add or remove tensors: outside layers, and of each kind of layer."""
    fields, found = config.to_dict(), []
    default = type(config)().to_dict()
    tried = [(name, not value) for name, value in fields.items() if isinstance(value, bool)]
    tried += [(name, value) for name, value in _SWITCHES if fields.get(name) is not None]
    for name, value in sorted(tried, key=str):
        if name in ("tie_word_embeddings", "use_cache", "return_dict"):
            continue
        try:
            changes = {"text_config": {name: value}} if towers else {name: value}
            changed = tensors_of(build(model_class, tiny_config(model_class, **changes), "meta"), prefix)
        except Exception:  # a combination that transformers refuses
            continue
        outside = frozenset(name for name in changed.outside if module_of(name, towers) is None)
        if outside == base.outside and set(changed.layers) <= set(base.layers):
            continue  # at most, other layers are of the same kinds
        if len(changed.layers) != len(base.layers):
            continue
        deltas = {-1: delta(base.outside, outside)}
        for kind, before, after in zip(kind_of, base.layers, changed.layers, strict=True):
            if deltas.setdefault(kind, delta(before, after)) != delta(before, after):
                deltas = {}  # it changes which layers are of which kind
                break
        if any(added or removed for added, removed in deltas.values()):
            found.append({
                "field": name, "value": value, "absent": default.get(name) == value,
                "changes": [[kind, *change] for kind, change in sorted(deltas.items()) if any(change)],
            })  # fmt: skip
    return found


def delta(before: frozenset[str], after: frozenset[str]) -> tuple[list[str], list[str]]:
    return sorted(after - before), sorted(before - after)


def buffers_of(model: PreTrainedModel, stored: Mapping[str, list[str]], prefix: str) -> list[str]:
    """Return the names, from the layer's on, of tensors in files that nobody trains."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = {file for name, files in stored.items() if name not in parameters for file in files}
    layer = re.compile(rf"{re.escape(prefix)}\.\d+")
    return sorted({_NUMBER.sub("*", layer.sub("", name)) for name in found})


def ignored_by(model_class: type[PreTrainedModel], prefix: str) -> dict[str, Any]:
    """Return which tensors files may have that the model has not: whole modules, MTP layers, leaves."""
    found: dict[str, Any] = {}
    for pattern in sorted(model_class._keys_to_ignore_on_load_unexpected or ()):
        plain = (
            re.sub(r"\([\w.]+\)\?", "", pattern.replace("\\", ""))
            .removeprefix("(^|.)")
            .strip("^$")
            .removesuffix(".*")
            .rstrip(".")
        )
        if re.fullmatch(rf"{re.escape(prefix)}\.\d+", plain):
            found["mtp"] = "num_nextn_predict_layers"
        elif plain.endswith(("mtp", "mtp_layers")):
            found["spare"] = [plain]
        elif re.fullmatch(r"[\w.]+", plain):
            found.setdefault("ignored", []).append(plain)
    if "num_nextn_predict_layers" in model_class.config_class().to_dict():
        found["mtp"] = "num_nextn_predict_layers"
    return found


def work_of(
    model_class: type[PreTrainedModel],
    config: Any,
    decoder: Any,
    path: str,
    kind_of: list[int],
    entry: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what FLOPs follow from, beside the sizes of matrices.

    That is the FLOPs of a token for each key, by kind of layer, as a multiple of all heads' width; a width is that of a
    query head and its value together, halved: what `4 H h` counts where they are equally wide. And whether every expert
    is computed for every token.
    """
    config._attn_implementation = config._experts_implementation = "eager"
    try:
        model = build(model_class, config, "cpu")
        counted = [count_flops(model, length) for length in (8, 16)]
    except Exception:  # a model that only runs on other kernels
        return {}
    experts = {"all_experts": True} if computes_all_experts(model, counted[0], 8) else {}
    work = {"latent": True} if getattr(decoder, "qk_nope_head_dim", None) else {}
    known = make_entry(model_class.__name__, {**entry, **work})
    files = revert_weight_conversion(model, dict(model.state_dict()))
    found: dict[int, float] = {}
    for layer, kind in enumerate(kind_of):
        inside = f"{entry['layers']}.{layer}."
        shapes = {name.removeprefix(inside): tuple(files[name].shape) for name in files if name.startswith(inside)}
        width = heads_width(known, ConfigReader(decoder.to_dict(), "config.json"), shapes)
        short, long = (_beside_experts(flops, f"{path}.{layer}") for flops in counted)
        per_key = (long - 2 * short) / (16 * 16 - 2 * 8 * 8)
        found[kind] = round(per_key / width, 2) if width else 0.0
    kinds = [max(found.get(kind, 0.0), 0.0) for kind in range(max(kind_of) + 1)]
    return {**({"per_key": kinds, **work} if any(kinds) else {}), **experts}


def computes_all_experts(model: PreTrainedModel, counted: Mapping[str, int], length: int) -> bool:
    """Return whether every token goes through the matrices of every expert."""
    experts = {name: part for name, part in model.named_modules() if name.endswith(".experts")}
    products = {name: 2 * length * sum(each.numel() for each in part.parameters()) for name, part in experts.items()}
    return any(0 < products[name] <= counted.get(name, 0) for name in experts)


def _beside_experts(counted: Mapping[str, int], layer: str) -> int:
    """Return a layer's FLOPs without those of experts, which depend on the tokens where some do nothing."""
    experts = [name for name in counted if name.startswith(f"{layer}.") and name.endswith(".experts")]
    return counted.get(layer, 0) - sum(counted[name] for name in experts)


def count_flops(model: PreTrainedModel, length: int) -> dict[str, int]:
    """Return the FLOPs of each module for one sequence."""
    with FlopCounterMode(display=False) as counter:
        run(model, length)
    return {name.partition(".")[2]: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


def render(found: Mapping[str, Mapping[str, Any]], refused: Mapping[str, str]) -> str:
    """Return the text of the table: a line for each field."""
    entries = [f"{json.dumps(name)}: {{\n{_SEP.join(_lines(found[name]))}\n}}" for name in sorted(found)]
    reasons = [f" {json.dumps(name)}: {json.dumps(refused[name])}" for name in sorted(refused)]
    version = json.dumps(transformers.__version__)
    return (
        f'{{\n"transformers": {version},\n"architectures": {{\n{_SEP.join(entries)}\n}},\n'
        f'"left_out": {{\n{_SEP.join(reasons)}\n}}\n}}\n'
    )


def _lines(entry: Mapping[str, Any]) -> Iterator[str]:
    for name, value in entry.items():
        if name in ("kinds", "switches"):
            items = _SEP.join(f"  {json.dumps(item)}" for item in value)
            yield f" {json.dumps(name)}: [\n{items}\n ]"
        else:
            yield f" {json.dumps(name)}: {json.dumps(value)}"


if __name__ == "__main__":
    sys.exit(main())
