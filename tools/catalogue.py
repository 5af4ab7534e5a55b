"""Write manifests/models/catalogue.json: what files of every decoder of transformers contain, and how it is tied.

`python tools/catalogue.py` writes the table from the installed transformers; `--check` exits with 1 where the table is
out of date. Names of architectures after that restrict either to these.

Nothing is downloaded: each class is built tiny, on the meta device for names and on the CPU for the order in which its
modules run.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models import ConfigReader
from manifests.models.catalogue import CatalogueEntry, make_entry
from manifests.models.work_by_names import heads_width
from runner.models.generic import Generic
from runner.models.routers import routers_of
from runner.pipeline.chunk import StageChunk, cast
from tools.config_fields import NotDescribedError, Tensors, Variants, build, names_in_files, scan_fields
from tools.kept import kept_of
from tools.parity import Layers, compare, look_at_layers
from tools.shared_parity import expert_parallel, refusing_cp, why_not_tensor_parallel
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
_SEP = ",\n"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


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
    for name, why in why_not_tensor_parallel(trained).items():
        found[name] |= {"no_tp": why} if why else left_whole(make_entry(name, found[name]))
    simple = [entry for entry in trained if not entry.hands_on_trees]
    for name in expert_parallel(simple):
        found[name]["distributes_experts"] = True
    for name in refusing_cp(simple):
        found[name]["no_cp"] = True
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
    outside = {name: files for name, files in stored.items() if not name.startswith(f"{path}.")}
    inputs, outputs = units_in_order(model_class, config, path, outside, prefix)
    decoder, towers = config, []
    if model_class.__name__ in MULTIMODAL:
        decoder = config.text_config
        towers = [unit for unit in inputs if not unit.startswith(prefix.rpartition(".")[0])]
    variants = Variants(model_class=model_class, prefix=prefix, towers=towers)
    base = variants.tensors_of(model)
    kinds, kind_of = kinds_of(base)
    fields = scan_fields(variants, decoder, base)
    further = fields.kinds[len(kinds) :]
    entry: dict[str, Any] = {
        **({"section": "text_config", "towers": towers} if towers else {}),
        "inputs": [unit for unit in inputs if unit not in towers],
        "layers": prefix,
        "outputs": outputs,
        "count": fields_for("num_hidden_layers", decoder),
        "width": fields_for("hidden_size", decoder),
        **fields.table(),
    }
    if len(further) == len(fields.only) and (places := places_of(kinds, kind_of)):
        entry["places"] = places
    entry |= ties_of(model_class, model, stored)
    if buffers := buffers_of(model, stored, prefix):
        entry["buffers"] = buffers
    entry |= ignored_by(model_class, prefix)
    if has_uneven_experts(model, prefix):
        entry["uneven"] = True
    entry |= work_of(model_class, config, decoder, path, kind_of, entry)
    entry |= kept_of(make_entry(model_class.__name__, entry), path, kind_of)
    for kind in further:
        alike = [kinds[known] & kind for known in range(len(kinds))]
        nearest = max(
            range(len(kinds)), key=lambda known: (sum("attn" in name for name in alike[known]), len(alike[known]))
        )
        for name in ("per_key", "kept"):
            if name in entry:
                entry[name].append(entry[name][nearest])
    layers = look_at_layers(model_class.__name__, path)
    entry |= {name: value for name in ("num_results", "carried", "reshapes") if (value := getattr(layers, name))}
    if why := why_not_trained(model_class, entry, layers):
        entry["refused"] = why
    elif exact := kept_in_float32(model_class, config, entry):
        entry["float32"] = exact
    if "refused" not in entry:
        entry |= balanced_by(model_class, config, entry)
    if (residual := getattr(model_class.config_class(), "residual_in_fp32", None)) is not None:
        entry["residual_in_fp32"] = residual
    return entry


def kept_in_float32(model_class: type[PreTrainedModel], config: Any, entry: Mapping[str, Any]) -> list[str]:
    """Return the names, from the layer's on, of parameters that a model in bfloat16 has in float32."""
    family = Generic(make_entry(model_class.__name__, entry), config.to_dict(), max_seq_len=1)
    parameters = dict(family.build(family.modules).named_parameters())
    layer = re.compile(rf"{re.escape(entry['layers'])}\.\d+")
    exact = {name: parameters[name] for name in parameters.keys() & set(family.float32_names(torch.bfloat16))}
    pieces = (piece for name, tensor in exact.items() for piece in family.pieces(name, tensor, (0,) * tensor.dim()))
    return sorted({_NUMBER.sub("*", layer.sub("", piece.fqn)) for piece in pieces})


def left_whole(entry: CatalogueEntry) -> dict[str, Any]:
    """Return the ends of names, from the layer's or an expert's on, of what every tensor-parallel rank has whole."""
    config = tiny_config(getattr(transformers, entry.architecture))
    family = Generic(entry, config.to_dict(), max_seq_len=1)
    module, layer = family.build(family.modules), re.compile(rf"{re.escape(entry.layers)}\.\d+(.*\.\d+(?=\.))?")
    names = {
        name: {layer.sub("", piece.fqn) for piece in family.pieces(name, parameter, (0,) * parameter.dim())}
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1
    }
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        family.shard(module, init_device_mesh("cpu", (2,)))
    finally:
        dist.destroy_process_group()
    shared = [name for name, parameter in module.named_parameters() if name in names and isinstance(parameter, DTensor)]
    whole = set().union(*names.values()).difference(*(names[name] for name in shared))
    return {"whole": sorted(whole)} if whole else {}


def balanced_by(model_class: type[PreTrainedModel], config: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what can balance the routers that the runner finds in a model in bfloat16."""
    family = Generic(make_entry(model_class.__name__, entry), config.to_dict(), max_seq_len=1)
    chunk = StageChunk(family, 0, family.modules)
    cast(chunk, torch.bfloat16)
    routers = list(routers_of(family, chunk.body))
    dtypes = {str(router.bias.dtype).removeprefix("torch.") for router in routers if router.bias is not None}
    adds_loss = "load_balancing_loss_func" in inspect.unwrap(model_class.forward).__code__.co_names
    return {
        **({"aux_loss": True} if routers and adds_loss else {}),
        **({"router_bias": min(dtypes)} if dtypes else {}),
    }


def why_not_trained(model_class: type[PreTrainedModel], entry: Mapping[str, Any], layers: Layers) -> str:
    """Return why stages on transformers' own forward are not the whole model, or nothing where they are."""
    if not layers.all_run:
        return "some of its layers run for images only"
    if model_class.__name__ in MULTIMODAL and not has_decoder(model_class):
        return "transformers has its text model as a part of this class only"
    for num_stages in (1, 2, LAYERS):
        try:
            found = compare(make_entry(model_class.__name__, entry), num_stages)
        except (DynamicOutputShapeException, GuardOnDataDependentSymNode):
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


def prefix_in_files(path: str, model: PreTrainedModel) -> str:
    """Return the name of the list of layers in files."""
    names = names_in_files(model, [name for name in model.state_dict() if name.startswith(f"{path}.")])
    for prefix in (path, *{name.split(".0.")[0] for name in names if ".0." in name}):
        if all(re.match(rf"{re.escape(prefix)}\.\d+\.", name) for name in names):
            return prefix
    raise NotDescribedError("files have its layers under several names")


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
    if not pairs:
        return {}
    default = model_class.config_class()
    entry: dict[str, Any] = {"ties": pairs, "tied": bool(getattr(default, "tie_word_embeddings", False))}
    if model_class.__name__ in MULTIMODAL and not entry["tied"]:
        section = {**default.text_config.to_dict(), "tie_word_embeddings": True}
        if model_class.config_class(text_config=section).tie_word_embeddings:
            entry["tied_by_section"] = True
    return entry


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
    own = build(model_class, copy.deepcopy(config), "meta").config.get_text_config(decoder=True)
    keeps_scores = own._attn_implementation == "eager"  # transformers chooses a fused one where there is one
    config._attn_implementation = config._experts_implementation = "eager"
    if hasattr(decoder, "index_n_heads"):
        decoder.index_n_heads = 2  # half of all heads' width, near to DeepSeek-V3.2's; tiny configs have more
    try:
        model = build(model_class, config, "cpu")
        counted = [count_flops(model, length) for length in (8, 16)]
    except Exception:  # a model that only runs on other kernels
        return {}
    experts = {"all_experts": True} if computes_all_experts(model, counted[0], 8) else {}
    work = {"latent": True} if getattr(decoder, "qk_nope_head_dim", None) else {}
    work |= {"keeps_scores": True} if keeps_scores else {}
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
        if name in ("kinds", "numbered", "switches"):
            items = _SEP.join(f"  {json.dumps(item)}" for item in value)
            yield f" {json.dumps(name)}: [\n{items}\n ]"
        else:
            yield f" {json.dumps(name)}: {json.dumps(value)}"


if __name__ == "__main__":
    sys.exit(main())
