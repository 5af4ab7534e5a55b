"""Tiny models of the catalogue's architectures, and the names and shapes that files of them have."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models import StoredTensors
from tools.tiny_models import tiny_config

# What `make test` packs: dense and sparse, tied and untied, hybrids, renamed and stacked tensors, vision towers.
DOZEN = (
    "BloomForCausalLM", "Cohere2ForCausalLM", "DeepseekV32ForCausalLM", "GPTNeoXForCausalLM",
    "Gemma3ForConditionalGeneration", "Glm4MoeForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM",
    "KimiLinearForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LongcatFlashForCausalLM",
    "MiniMaxM2ForCausalLM", "Olmo3ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip


def config_of(architecture: str, *, is_tiny: bool = True, **changes: Any) -> Any:
    """Return the tiny config of an architecture, or the default of its class, as transformers has it."""
    model_class = getattr(transformers, architecture)
    return tiny_config(model_class, **changes) if is_tiny else model_class.config_class(**changes)


def build_meta(architecture: str, *, is_tiny: bool = True, **changes: Any) -> PreTrainedModel:
    """Build a tiny model, or one of its class's default, without weights."""
    with quiet(), torch.device("meta"):
        config = config_of(architecture, is_tiny=is_tiny, **changes)
        model: PreTrainedModel = getattr(transformers, architecture)(config)
    return model


def stored_by(architecture: str, *, is_tiny: bool = True, **changes: Any) -> tuple[dict[str, Any], StoredTensors]:
    """Return the config.json of such a model, and the tensors that its files have."""
    model = build_meta(architecture, is_tiny=is_tiny, **changes)
    config = model.config
    state = dict(model.state_dict())
    if getattr(config, "tie_word_embeddings", False):
        for replica in model._tied_weights_keys or {}:
            state.pop(replica, None)
    files = revert_weight_conversion(model, state)
    document = {**config.to_dict(), "architectures": [architecture]}
    return document, StoredTensors(
        tensors={name: tuple(tensor.shape) for name, tensor in files.items()}, where="SOURCE"
    )


def save_tiny(folder: Path, architecture: str, **changes: Any) -> None:
    """Write a tiny model with random weights, as transformers does, in several shards."""
    torch.manual_seed(0)
    with quiet():
        model = getattr(transformers, architecture)(config_of(architecture, **changes))
        model.save_pretrained(folder, max_shard_size="200KB")


def check_table(main: Callable[[], int], *names: str) -> int:
    """Run what `python tools/NAME.py --check` runs in this process, which has imported torch; return its exit code."""
    argv, sys.argv = sys.argv, ["", "--check", *names]
    try:
        with quiet():
            return main()
    finally:
        sys.argv = argv
        logging.disable(logging.NOTSET)


class quiet(warnings.catch_warnings):  # used as a function
    """Keep what transformers says of tiny configs to itself."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        return found
