"""LoRA adapters by name: which modules a target matches, how large their tensors are, and their config. No torch.

Of `adapter_config.json` in a PEFT folder, what is not supported is refused by name.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manifests.digest import digest_hex, digest_pieces
from manifests.errors import SourceError
from manifests.jsontext import parse_config, parse_json_object
from manifests.models.shape import ModelShape, is_expert
from manifests.models.training import Training
from manifests.schema import Manifest

ALL_LINEAR = "all-linear"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
PEFT_PREFIX = "base_model.model."  # of names in a PEFT folder
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RECORD_NAME = "adapter.json"  # of a checkpoint that has adapters alone, and refers to their base
BASE_DIGEST = "base_digest"  # of the metadata of our own PEFT folders, see `digest_of_base`
BASE_TENSORS = "base_tensors"  # likewise, see `BaseTensor`
BASE_PARENTS = "base_parents"  # likewise: digests of the manifests that the base descends from
Names = str | tuple[str, ...]  # a regular expression, or the ends of names
_NAMES = re.compile(r"[\w.]+(,[\w.]+)*")
_BASE_TENSOR = re.compile(r"[A-Z0-9_]+ [0-9a-f]{64}( [0-9]{1,18})+")
_ROUTERS = (".gate.weight", ".router.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Modules of these names but for some, and of some layers alone."""

    names: Names
    excluded: Names
    layers: tuple[int, ...]  # empty: all
    lists: tuple[str, ...]  # regular expressions of the names of lists of layers; empty: any list


Target = Names | Selection


def parse_target(text: str) -> Names:
    """Read names with commas between them, `all-linear`, or a regular expression that is none of these."""
    if text != ALL_LINEAR and _NAMES.fullmatch(text):
        return tuple(text.split(","))
    re.compile(text)
    return text


def matches_target(target: Target, module: str) -> bool:
    """Return whether peft adapts a linear module of this name; `all-linear` leaves out the head.

    Source: peft 0.21.2, `check_target_module_exists`.
    """
    names = names_of(target)
    if isinstance(target, Selection):
        is_whole_name = not isinstance(names, str) and module in names  # of whichever layer
        if _has_name(target.excluded, module) or not (is_whole_name or _is_in_layers(target, module)):
            return False
    return names == ALL_LINEAR or _has_name(names, module)


def names_of(target: Target) -> Names:
    return target.names if isinstance(target, Selection) else target


def _has_name(names: Names, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_in_layers(selection: Selection, module: str) -> bool:
    if not selection.layers:
        return True
    patterns = [_layer_pattern(name) for name in selection.lists] or [r".*?\.[^.]*\.(?P<layer>\d{1,18})\."]
    match = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
    return match is not None and int(match["layer"]) in selection.layers


def _layer_pattern(name: str) -> str:
    return rf"(?:^|.*?\.){name}\.(?P<layer>\d{{1,18}})\."


def has_adapters(manifest: Manifest) -> bool:
    """Return whether a manifest is a checkpoint of adapters, whose base is another manifest."""
    return any(file.path == RECORD_NAME for file in manifest.files)


def is_adapter(fqn: str) -> bool:
    return fqn.endswith((LORA_A, LORA_B))


def merge_hint(folder: str) -> str:
    """Return what to do with a PEFT folder where a model is expected."""
    return f"it is a PEFT folder, of adapters alone: reshard merge BASE {shlex.quote(folder)} --out DIR"


def adapter_sizes(shape: ModelShape, target: Target, rank: int, *, has_experts: bool) -> Iterator[tuple[str, int]]:
    """Yield about which adapters a model of this shape gets, with the parameters of each.

    Experts are counted as files have them; in memory, two matrices of each may be one.
    """
    for fqn, dims in shape.tensors.items():
        module = fqn.removesuffix(".weight")
        if module in shape.modules or not shape.count_params(fqn) or fqn.endswith(_ROUTERS):
            continue
        if is_expert(fqn):
            is_adapted = has_experts and len(dims) > 1 and not fqn.endswith("bias")
        else:
            is_adapted = module != fqn and len(dims) == 2 and matches_target(target, module)
        if is_adapted:
            *experts, rows, columns = dims
            num_experts = experts[0] if experts else 1
            yield f"{module}{LORA_A}", rank * num_experts * columns
            yield f"{module}{LORA_B}", rank * num_experts * rows


def kept_for_adapters(shape: ModelShape, sizes: Mapping[str, int], training: Training) -> tuple[int, int]:
    """Return the bytes that a layer keeps for its adapters: sums of these and experts, and inputs that are dropped out.

    `sizes` has the parameters of each of the layer's tensors on a rank.
    """
    if not training.adapters:
        return 0, 0
    adapted = {fqn.removesuffix(LORA_A) for fqn in sizes if fqn.endswith(LORA_A)}
    summed = sum(sizes[fqn] for fqn in filter(is_expert, sizes) if fqn.removesuffix(".weight") in adapted)
    nbytes, num_inputs = training.policy.compute, 0
    for fqn in adapted if training.dropout_rank else ():
        width = sizes[f"{fqn}{LORA_A}"] // training.dropout_rank
        # Of what is as wide as the model, tensor-parallel ranks have all.
        num_inputs += width if width == shape.hidden_size else width // training.tensor
    mask = 1 if training.is_fused else nbytes
    return nbytes * summed, training.num_tokens * num_inputs * (nbytes + mask)


def digest_of_base(digests: Iterable[tuple[str, str | None]]) -> str | None:
    """Return a digest of adapted base tensors by their names and digests; None if one has no digest.

    It is the same however the base is packed.
    """
    items = sorted(digests)
    if not items or any(digest is None for _, digest in items):
        return None
    return digest_pieces(f"{fqn} {digest}\n".encode() for fqn, digest in items)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseTensor:
    """An adapted tensor as training read it, in ranges of rows.

    `digest` is of the hex digests of the ranges: see `digest_of_ranges`. Units: `sizes` of the ranges in bytes.
    """

    dtype: str
    digest: str
    sizes: tuple[int, ...]


def digest_of_ranges(digests: Iterable[str]) -> str:
    return digest_hex(map(str.encode, digests))


def encode_base(tensors: Mapping[str, BaseTensor]) -> str:
    """Return the text that the metadata of a PEFT folder has of the tensors that it adapts."""
    shown = {fqn: " ".join((tensor.dtype, tensor.digest, *map(str, tensor.sizes))) for fqn, tensor in tensors.items()}
    return json.dumps(shown, separators=(",", ":"))


def parse_base(text: str, where: str) -> dict[str, BaseTensor]:
    tensors = {}
    for fqn, value in parse_json_object(text.encode(), where).items():
        if not isinstance(value, str) or not _BASE_TENSOR.fullmatch(value):
            raise _invalid(f"{where}: {fqn}", "a dtype, a digest and sizes", value)
        dtype, digest, *sizes = value.split(" ")
        tensors[fqn] = BaseTensor(dtype=dtype, digest=digest, sizes=tuple(map(int, sizes)))
    return tensors


_KINDS = {"use_dora": "DoRA", "use_qalora": "QA-LoRA", "lora_bias": "biases of adapters", "arrow_config": "Arrow",
          "layer_replication": "replicated layers", "alora_invocation_tokens": "activated LoRA",
          "trainable_token_indices": "trained tokens", "kasa_config": "KaSA", "use_bdlora": "block-diagonal LoRA",
          "monteclora_config": "MonteCLoRA", "velora_config": "VeLoRA"}  # fmt: skip
# Others than these change the base's weights, or what the adapter is relative to.
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A LoRA adapter as peft describes it; `target` and `parameters` select what it adapts."""

    rank: int
    alpha: float
    target: Target | None  # None: peft's default, which depends on the model
    parameters: tuple[str, ...]
    is_rank_scaled: bool
    dropout: float
    ranks: Mapping[str, int]  # of modules that match a pattern
    alphas: Mapping[str, float]
    saved: tuple[str, ...]  # modules that are replaced as a whole

    def selects(self, module: str, head: str) -> bool:
        """Return whether a linear module has an adapter, as far as the config says; `head` is that of the model."""
        if matches_target(self.parameters, f"{module}.weight"):
            return True
        if any(f".{name}." in f".{module}." for name in self.saved):
            return False
        if self.target is None:
            return True
        return matches_target(self.target, module) and not (names_of(self.target) == ALL_LINEAR and module == head)

    def scale_of(self, module: str, rank: int) -> float:
        """Return what the product of a module's adapter is multiplied by; `rank` is that of its tensors."""
        alpha: float = _find(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_scaled else rank)

    def rank_of(self, module: str) -> int:
        rank: int = _find(self.ranks, module, self.rank)
        return rank


def parse_peft_config(text: bytes, where: str) -> PeftConfig:
    """Parse the config of a LoRA adapter."""
    fields = parse_config(text, where)
    if fields.get("peft_type") != "LORA":
        raise _unsupported(f"{where}: peft_type", f"{fields.get('peft_type')!r} adapters are not supported")
    for name, kind in _KINDS.items():
        if fields.get(name):
            raise _unsupported(f"{where}: {name}", f"{kind} is not supported")
    if (bias := fields.get("bias", "none")) != "none":
        raise _unsupported(f"{where}: bias", f"trained biases ({bias!r}) are not supported")
    if (initial := fields.get("init_lora_weights", True)) not in _INITIAL:
        problem = f"{initial!r} changes the base, so that the adapter is not relative to the original weights"
        raise _unsupported(f"{where}: init_lora_weights", problem)
    patterns = {name: fields.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, pattern in patterns.items():
        is_rank = name == "rank_pattern"
        if not isinstance(pattern, dict) or not all(_is_number(value, is_rank) for value in pattern.values()):
            raise _invalid(f"{where}: {name}", "an object of numbers", pattern)
        for key in pattern:
            _check_pattern(key, f"{where}: {name}")
    return PeftConfig(
        rank=int(_number(fields, "r", where, least=1, is_rank=True)),
        alpha=_number(fields, "lora_alpha", where),
        target=_target(fields, where),
        parameters=tuple(_list(fields, "target_parameters", where)),
        is_rank_scaled=bool(fields.get("use_rslora")),
        dropout=_number(fields, "lora_dropout", where, default=0.0),
        ranks={key: int(value) for key, value in patterns["rank_pattern"].items()},
        alphas=patterns["alpha_pattern"],
        saved=tuple(_list(fields, "modules_to_save", where)),
    )


def _target(fields: Mapping[str, Any], where: str) -> Target | None:
    names, excluded = (_names(fields, name, where) for name in ("target_modules", "exclude_modules"))
    layers, lists = fields.get("layers_to_transform"), fields.get("layers_pattern") or ()
    layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if any(type(layer) is not int for layer in layers):
        raise _invalid(f"{where}: layers_to_transform", "whole numbers", layers)
    lists = (lists,) if isinstance(lists, str) else tuple(_list(fields, "layers_pattern", where))
    for name in lists:
        _check_pattern(_layer_pattern(name), f"{where}: layers_pattern")
    for name, value in (("layers_to_transform", layers), ("layers_pattern", lists)):
        if value and (isinstance(names, str) or fields.get("layers_to_transform") is None):
            expected = "null beside a target_modules that is a string, or without layers_to_transform"
            raise _invalid(f"{where}: {name}", expected, value)
    if fields.get("target_modules") is None:
        return None
    if not excluded and not layers:
        return names
    return Selection(names=names, excluded=excluded, layers=tuple(layers), lists=lists)


def _names(fields: Mapping[str, Any], name: str, where: str) -> Names:
    value = fields.get(name)
    if not isinstance(value, str):
        return tuple(_list(fields, name, where))
    if name == "target_modules" and value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    _check_pattern(value, f"{where}: {name}")
    return value


def _find(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Source: peft 0.21.2, `get_pattern_key`."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _number(
    fields: Mapping[str, Any], name: str, where: str, *, least: float = 0, default: Any = None, is_rank: bool = False
) -> float:
    value = fields.get(name, default)
    if not _is_number(value, is_rank) or value < least:
        raise _invalid(f"{where}: {name}", f"a {'whole ' * is_rank}number >= {least}", value)
    return float(value)


def _list(fields: Mapping[str, Any], name: str, where: str) -> list[str]:
    value = fields.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _invalid(f"{where}: {name}", "a list of names", value)
    return value


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _invalid(where, "a regular expression", pattern) from error


def _is_number(value: object, is_rank: bool = False) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return False  # NaN, too
    return not is_rank or (value >= 1 and value == int(value))


def _invalid(where: str, expected: str, value: object) -> SourceError:
    return SourceError(where, f"expected {expected}, found {str(value)[:80]!r}", code="source.bad-adapter")


def _unsupported(where: str, problem: str) -> SourceError:
    hint = "merge it with peft's merge_and_unload"
    return SourceError(where, problem, hint, code="source.adapter-kind")
