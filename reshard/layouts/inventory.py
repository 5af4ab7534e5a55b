"""A model's modules, in the order in which they run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_BASES = ("model.decoder.", "model.", "transformer.")  # prefixes that short names omit
# Classes whose names do not follow from the architecture's, by the last word of a module or of its list of layers.
_CLASSES: Mapping[str, Mapping[str, str]] = {
    "FalconForCausalLM": {"ln_f": "LayerNorm"},
    "GPT2LMHeadModel": {"h": "GPT2Block", "ln_f": "LayerNorm"},
    "Gemma2ForCausalLM": {"embed_tokens": "Gemma2TextScaledWordEmbedding"},
    "Gemma3ForCausalLM": {"embed_tokens": "Gemma3TextScaledWordEmbedding"},
    "MptForCausalLM": {"blocks": "MptBlock", "norm_f": "LayerNorm"},
    "OPTForCausalLM": {
        "embed_positions": "OPTLearnedPositionalEmbedding",
        "final_layer_norm": "LayerNorm",
        "project_in": "Linear",
        "project_out": "Linear",
    },
    "PhiForCausalLM": {"final_layernorm": "LayerNorm"},
}

# The names of the common Hugging Face decoder, for layouts read without a model.
EMBEDDING, LAYER, NORM, HEAD = "model.embed_tokens", "model.layers.", "model.norm", "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Modules in execution order: inputs, decoder layers, MTP layers, outputs.

    Stages are contiguous runs of `modules`, so a layout is a tuple of bounds into it.
    """

    modules: tuple[str, ...]
    num_inputs: int  # Megatron's E: the embedding
    num_layers: int  # decoder layers, MTP not counted
    num_mtp: int  # multi-token prediction layers, numbered after the decoders
    architecture: str = ""  # "LlamaForCausalLM"; empty without a model

    @property
    def num_outputs(self) -> int:
        """Megatron's L: the final norm and the head."""
        return len(self.modules) - self.layers_stop

    @property
    def layers_stop(self) -> int:
        """The position after the last decoder or MTP layer."""
        return self.num_inputs + self.num_layers + self.num_mtp

    @property
    def mtp_start(self) -> int:
        return self.num_inputs + self.num_layers


def inventory_of_layers(num_layers: int, num_mtp: int = 0) -> Inventory:
    """Return the modules of a decoder with that many layers, by their Hugging Face names."""
    layers = tuple(f"{LAYER}{index}" for index in range(num_layers + num_mtp))
    return Inventory(modules=(EMBEDDING, *layers, NORM, HEAD), num_inputs=1, num_layers=num_layers, num_mtp=num_mtp)


def inventory_of_modules(modules: Sequence[str], num_layers: int, architecture: str = "") -> Inventory:
    """Sort a model's modules, in execution order, into inputs, layers and outputs.

    Names that end in a number are layers; those past `num_layers` are MTP layers.
    """
    numbered = [index for index, name in enumerate(modules) if name.rpartition(".")[2].isdecimal()]
    first = numbered[0] if numbered else 0
    if numbered != list(range(first, first + len(numbered))) or not 0 < num_layers <= len(numbered):
        raise ValueError(f"layers are not one run of at least {num_layers}: {modules}")
    return Inventory(
        modules=tuple(modules),
        num_inputs=first,
        num_layers=num_layers,
        num_mtp=len(numbered) - num_layers,
        architecture=architecture,
    )


def positions_by_name(inventory: Inventory) -> dict[str, int]:
    """Return the position of each module under all its names: Hugging Face's, full and short, and torchtitan's."""
    table = {name: position for position, name in enumerate(inventory.modules)}
    last = len(inventory.modules) - 1
    aliases = [(short_name(name), position) for name, position in table.items()]
    aliases += [("tok_embeddings", 0), ("output", last), ("lm_head", last)]
    aliases += [(f"mtp_layers.{index}", inventory.mtp_start + index) for index in range(inventory.num_mtp)]
    for alias, position in aliases:
        table.setdefault(alias, position)
    return table


def short_name(module: str) -> str:
    """Return a module's name without the base model's prefix: `layers.0` for `model.layers.0`, `h.0` for GPT-2's."""
    base = next((base for base in _BASES if module.startswith(base)), "")
    return module.removeprefix(base)


def class_names(inventory: Inventory) -> tuple[str, ...]:
    """Return the class name of each module in transformers; without a model, without the family's prefix."""
    family = re.sub(r"For[A-Z]\w*$", "", inventory.architecture)
    num_layers = inventory.num_layers + inventory.num_mtp
    usual = (
        *["Embedding"] * inventory.num_inputs,
        *[f"{family}DecoderLayer"] * num_layers,
        *[f"{family}RMSNorm"] * (inventory.num_outputs - 1),
        "Linear",
    )
    own = _CLASSES.get(inventory.architecture, {})
    return tuple(own.get(_word(module), name) for module, name in zip(inventory.modules, usual, strict=True))


def _word(module: str) -> str:
    """Return the last word of a module's name; for a layer, the one before its number."""
    rest, _, last = module.rpartition(".")
    return rest.rpartition(".")[2] if last.isdecimal() else last
