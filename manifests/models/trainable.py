"""The architectures that can be trained, with tensor or expert parallelism, and with which configs. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from manifests.errors import ModelError, UsageError
from manifests.models import ARCHITECTURES
from manifests.models.catalogue import CatalogueEntry, entry_of
from manifests.models.config import ConfigReader


def is_generic(architecture: str) -> bool:
    """Return whether an architecture trains by the catalogue alone, on transformers' own forward."""
    return generic_entry(architecture) is not None


def generic_entry(architecture: str) -> CatalogueEntry | None:
    """Return the catalogue's entry of an architecture that transformers' own forward trains."""
    entry = entry_of(architecture)
    return None if entry is None or entry.refused else entry


def why_not_tensor_parallel(architecture: str) -> str:
    """Return why the matrices of an architecture are not sharded over tensor-parallel ranks, or nothing if they are."""
    entry = generic_entry(architecture)
    return "there is no plan of how to shard it" if entry is None else entry.no_tp


def why_not_expert_parallel(architecture: str) -> str:
    """Return why the experts of an architecture are not distributed over ranks, or nothing if they are."""
    entry = generic_entry(architecture)
    has_plan = entry is not None and entry.distributes_experts
    return "" if has_plan else "transformers has no plan for its experts that was found to compute the same"


def refuses_cp(architecture: str) -> bool:
    """Return whether the proof before step 1 refuses `--cp`: tokens meet outside of attention, or it takes no mask."""
    entry = generic_entry(architecture)
    return entry is not None and entry.no_cp


def hands_on_trees(architecture: str) -> bool:
    """Return whether stages of an architecture of the catalogue exchange more than the hidden state."""
    entry = generic_entry(architecture)
    return entry is not None and entry.hands_on_trees


NARROW = "model.decoder.project_in"  # of an OPT: hidden states are not as wide before it, nor after the last layer


def check_trainable(architecture: str, where: str = "config.json", *, is_described: bool = False) -> None:
    """Check that this architecture can be trained, here or by a family of an installed package.

    One that `--model` described trains by such a family alone.
    """
    trains = not is_described and generic_entry(architecture) is not None
    family = find_family(architecture)
    if family is not None and trains:
        raise ModelError(
            f"entry points {GROUP}",
            f"{package_of(family)} has a family for {architecture}, which trains without it",
            f"uninstall {package_of(family)}, or give its architecture another name",
            code="model.family-claimed-twice",
        )
    if family is not None or trains:
        return
    if is_described:
        raise ModelError(
            f"{where}: architectures",
            f"{architecture!r} is described by --model, and no installed package has a family for it",
            f"docs/own-models.md shows how to write one (entry points {GROUP})",
            code="model.no-family",
        )
    entry = entry_of(architecture)
    why = f": {entry.refused}" if entry is not None and entry.refused else ""
    raise ModelError(
        f"{where}: architectures",
        f"{architecture!r} can be packed, but not trained{why}",
        "docs/models.md lists the architectures that train",
        code="model.no-family",
    )


GROUP = "runner.families"


def find_family(architecture: str) -> EntryPoint | None:
    """Return the entry point of an installed package for an architecture, if there is one."""
    folders = tuple((path, _mtime_ns(path)) for path in sys.path)
    entries = sorted(_families_in(folders).select(name=architecture), key=package_of)
    if len(entries) > 1:
        raise ModelError(
            f"entry points {GROUP}",
            f"{' and '.join(map(package_of, entries))} both have a family for {architecture}",
            "uninstall one of them",
            code="model.family-claimed-twice",
        )
    return entries[0] if entries else None


@lru_cache(maxsize=1)
def _families_in(folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read the metadata of all packages, which takes milliseconds, again only if a folder of `sys.path` has changed."""
    return entry_points(group=GROUP)


def _mtime_ns(path: str) -> int:
    with suppress(OSError):
        return os.stat(path or ".").st_mtime_ns
    return -1


def package_of(entry_point: EntryPoint) -> str:
    """Return the name of the package that has an entry point."""
    return entry_point.dist.name if entry_point.dist is not None else entry_point.module


# Losses that need the routers of every stage or all logits, and layers that are skipped at random.
_OFF = (("output_router_logits", False), ("z_loss_coefficient", 0), ("layerdrop", 0))
# Of architectures that are described tensor by tensor: the values of fields that transformers ignores, or that need
# more than the hidden state between stages. A dotted field is in a section.
_SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "DeepseekV3ForCausalLM": {"is_causal": (True,), "output_router_logits": (False,), "scoring_func": ("sigmoid",)},
    "Gemma2ForCausalLM": {"use_bidirectional_attention": (False,)},
    "Gemma3ForCausalLM": {"use_bidirectional_attention": (False,)},
    "GptOssForCausalLM": {"is_causal": (True,), "output_router_logits": (False,)},
    "LlamaForCausalLM": {"is_causal": (True,), "pretraining_tp": (1,)},
    "MistralForCausalLM": {"is_causal": (True,)},
    "MixtralForCausalLM": {"output_router_logits": (False,)},
    "MptForCausalLM": {
        "attn_config.alibi_bias_max": (8,),
        "attn_config.attn_uses_sequence_id": (False,),
        "attn_config.prefix_lm": (False,),
        "emb_pdrop": (0,),
        "embedding_fraction": (1,),
        "logit_scale": (1,),
        "resid_pdrop": (0,),
    },
    "OPTForCausalLM": {"layerdrop": (0,)},
    "Qwen3ForCausalLM": {"is_causal": (True,)},
    "Qwen3MoeForCausalLM": {"is_causal": (True,), "output_router_logits": (False,)},
}
# Of these architectures, the field that limits sequences, and transformers' default: others rotate any position.
_POSITIONS: Mapping[str, tuple[str, int]] = {
    "GPT2LMHeadModel": ("n_positions", 1024),
    "MptForCausalLM": ("max_seq_len", 2048),
    "OPTForCausalLM": ("max_position_embeddings", 2048),
}

_SHARING_WIDTH = "StableLmForCausalLM"  # its heads are always as wide as their share of the hidden size


def check_fields(entry: CatalogueEntry, config: ConfigReader) -> None:
    """Refuse fields that add to the loss, skip layers at random, or make another model."""
    if entry.architecture in ARCHITECTURES:
        _check_supported(_SUPPORTED.get(entry.architecture, {}), config)
        return
    for reader in (config, config.section(entry.section) if entry.section else None):
        for name, allowed in _OFF if reader is not None else ():
            assert reader is not None
            reader.expect(name, allowed)
    if entry.architecture == _SHARING_WIDTH and config.config.get("head_dim"):  # only RoPE reads it
        config.expect("head_dim", config.count("hidden_size") // config.count("num_attention_heads"))


def _check_supported(supported: Mapping[str, tuple[object, ...]], config: ConfigReader) -> None:
    for path, allowed in supported.items():
        section, _, name = path.rpartition(".")
        reader = config.section(section) if section else config
        if reader is not None and (value := reader.config.get(name)) is not None and value not in allowed:
            problem = f"{value!r} is not supported; expected {allowed[0]!r} or nothing"
            raise reader.error(name, problem, code="config.unsupported-value")


def check_positions(architecture: str, config: ConfigReader, seq_len: int) -> None:
    """Refuse sequences that are longer than the table of positions, or of ALiBi, that an architecture has."""
    if architecture not in _POSITIONS:
        return
    name, default = _POSITIONS[architecture]
    if seq_len > (most := config.count(name, default)):
        problem = f"expected at most {most}, which is {name} of the model's config, found {seq_len}"
        raise UsageError("--seq-len", problem, code="options.sequence-length")


def modules_together(entry: CatalogueEntry) -> tuple[tuple[str, ...], ...]:
    """Return the modules that must be on one stage.

    Those of an architecture that is described tensor by tensor may be on several: they add to the hidden state.
    """
    if entry.architecture in ARCHITECTURES:
        return ()
    return (entry.inputs, entry.outputs if entry.hands_on_trees else ())


def check_modules(
    entry: CatalogueEntry, trainable: Collection[str], stages: Iterable[Collection[str]], where: str
) -> None:
    """Check that stages have modules of the text model only, of which `trainable` are all, and the inputs together."""
    for modules in stages:
        for module in modules:
            if module in entry.towers:
                raise ModelError(
                    where,
                    f"{module} is for images or sound, which cannot be trained; the text model can",
                    f"pack the source again with --drop {' --drop '.join(entry.towers)}",
                    code="config.towers",
                )
            if module not in trainable:
                raise ModelError(
                    where,
                    f"{module} is for multi-token prediction, of a form that is not trained",
                    f"pack the source again with --drop for the tensors of {module}",
                    code="config.mtp-layers",
                )
        for together in modules_together(entry):
            present = [module for module in together if module in modules]
            if present and len(present) < len(together):
                raise ModelError(
                    where,
                    f"{' and '.join(together)} must be on one stage",
                    "choose a layout that does not cut before the first layer, or after the last",
                    code="model.split-inputs",
                )
