"""The tensors of a catalogue's architecture by its config alone: transformers builds the model on the meta device.

In a process of its own, `python -m reshard.estimate.meta_model`: the only module of reshard that imports torch and
transformers, and no part of a pack imports either.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from manifests.errors import ModelError
from manifests.models.catalogue import entry_of
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.shape import Shape, StoredTensors

_LIMIT_S = 300.0
# Beginnings of the names of fields that say how a model runs or where code is, not which tensors it has.
_NOT_SIZES = (
    "quantization_config", "auto_map", "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation", "transformers_weights", "torch_dtype", "dtype",
)  # fmt: skip


def tensors_by_class(
    config: Mapping[str, object], architecture: str, where: str
) -> tuple[dict[str, object], StoredTensors]:
    """Return a config with what its class means by the fields that it lacks, and the tensors that files would have.

    Weights are as they are before a quantization.

    Raises:
        ModelError: torch or transformers is not installed, or no model can be built from the config, or only one of too
            many layers.
    """
    _check_layers(config, architecture, where)
    command = [sys.executable, "-P", "-m", "reshard.estimate.meta_model", architecture]
    plain = _without(config, _NOT_SIZES)
    try:
        done = subprocess.run(command, input=json.dumps(plain), capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        problem = f"{architecture} was not built on the meta device within {_LIMIT_S:.0f} s"
        raise ModelError(where, problem, "give the folder with its safetensors", code="config.not-buildable") from error
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    if "tensors" in answer:
        tensors = {name: tuple(shape) for name, shape in answer["tensors"].items()}
        return {**answer["config"], **plain}, StoredTensors(tensors=tensors, where=where)
    if "missing" in answer:
        raise ModelError(
            f"{where}: architectures",
            f"the tensors of {architecture} are known from its weights, or with torch and transformers; config.json is "
            f"alone, and {answer['missing']} is not installed",
            "pip install 'reshard[runner]', or give the folder with its safetensors; their headers are enough",
            code="config.needs-weights",
        )
    reason = answer.get("error") or (done.stderr.strip().splitlines() or ["it was killed"])[-1]
    raise ModelError(
        where, f"transformers cannot build {architecture}: {reason[:300]}", "correct the field that it names",
        code="config.not-buildable",
    )  # fmt: skip


def _check_layers(config: Mapping[str, object], architecture: str, where: str) -> None:
    entry = entry_of(architecture)
    assert entry is not None, architecture
    reader: ConfigReader | None = ConfigReader(config, where)
    if entry.section and reader is not None:
        reader = reader.section(entry.section)
    for name in entry.count:
        if reader is not None and reader.has(name) and not isinstance(reader.config[name], list):
            reader.count(name, most=MAX_LAYERS)


def _without(config: Mapping[str, object], names: tuple[str, ...]) -> dict[str, object]:
    """Return a config, and the objects in it, without these fields."""
    return {
        name: _without(value, names) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not name.startswith(names)
    }


def build(architecture: str, config: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Shape]]:
    """Build a model of transformers on the meta device; return its whole config, and its tensors as files have them.

    The second one of tied tensors is left out, as files leave it out.
    """
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    model_class = getattr(transformers, architecture)
    fields = {name: value for name, value in config.items() if name != "architectures"}
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(fields))
    state = dict(model.state_dict())
    if getattr(model.config, "tie_word_embeddings", False):
        for replica in model._tied_weights_keys or {}:
            state.pop(replica, None)
    files = revert_weight_conversion(model, state)
    document = {**model.config.to_dict(), "architectures": [architecture]}
    return json.loads(json.dumps(document, default=str)), {name: tuple(tensor.shape) for name, tensor in files.items()}


def main() -> None:
    """Read a config from standard input, and print a line of JSON: the tensors, or what went wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        document, tensors = build(sys.argv[1], json.load(sys.stdin))
        answer: dict[str, Any] = {"config": document, "tensors": tensors}
    except ImportError as error:
        answer = {"missing": error.name or str(error)}
    except Exception as error:  # whatever transformers raises of a config
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
