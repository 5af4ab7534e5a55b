"""What the stages of a catalogue's architecture cannot be asked to train, as its config and layout say. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from manifests.errors import ModelError, UsageError
from manifests.models import ARCHITECTURES
from manifests.models.catalogue import CatalogueEntry
from manifests.models.config import ConfigReader

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
