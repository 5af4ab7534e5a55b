"""A typed reader of Hugging Face configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from manifests.errors import InputError, ModelError
from manifests.jsontext import kind_of

CONFIG_NAME = "config.json"
CONFIG_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # as in safetensors headers
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 writes the first, 4 the second
_TIED, _TEXT = "tie_word_embeddings", "text_config"

# What configs call the number of experts that a token goes through.
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts",
)  # fmt: skip

MAX_LAYERS = 10_000
MAX_EXPERTS = 10_000
_MAX_COUNT = (1 << 31) - 1
# Fields for which programs read other files than the folder's own, or run other modules than the architecture's.
_REDIRECTS = {
    "transformers_weights": "transformers reads other weights than the folder's",
    "configuration_files": "transformers reads another config",
    "fusion_config": "transformers reads other modules than the architecture's",
    "distributed_config": "transformers reads other modules than the architecture's",
    "model_file": "mlx-lm runs code of the folder in place of the architecture's modules",
    "speculators_config": "vLLM serves the verifier that it names in place of the folder's model",
}
# Attributes of transformers' config classes, methods included: a field of this name would replace the class's own.
_ATTRIBUTES = (
    "allow_global_per_layer_attribute_access", "attribute_map", "base_config_key", "base_model_ep_plan",
    "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan", "convert_rope_params_to_dict",
    "default_config_fields", "default_rope_type", "default_theta", "dict_dtype_to_str", "extra_config_files",
    "extra_files", "from_dict", "from_json_file", "from_pretrained", "get_config_dict", "get_mtp_config",
    "get_text_config", "ignore_keys_at_rope_validation", "is_heterogeneous", "is_remote_code",
    "nested_rope_parameter_keys", "per_layer_attributes", "push_to_hub", "register_for_auto_class",
    "save_pretrained", "serialize_explicit_per_layer_config", "standardize_rope_params", "sub_configs",
    "sub_configs_defaults", "to_dict", "to_diff_dict", "to_json_file", "to_json_string", "update",
    "update_from_string", "validate", "validate_architecture", "validate_layer_type", "validate_output_attentions",
    "validate_rope", "validate_token_ids",
)  # fmt: skip


class ConfigReader:
    """Reads a Hugging Face config with errors that name the field.

    Absent and null mean the same. `prefix` is the path of an object inside the config.
    """

    def __init__(self, config: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.config, self.where, self.prefix = MappingProxyType(dict(config)), where, prefix

    def error(self, name: str, problem: str, hint: str = "", *, code: str) -> InputError:
        return InputError(f"{self.where}: {self.prefix}{name}", problem, hint, code=code)

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def count(self, name: str, default: int | None = None, most: int = _MAX_COUNT, least: int = 1) -> int:
        """Return an integer from `least` to `most`; null or absent means `default`."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            expected = "a positive integer" if least == 1 else f"an integer, {least} or more"
            raise self.error(name, f"expected {expected}, found {_shown(value)}", code="config.invalid-field")
        if value > most:
            raise self.error(name, f"expected at most {most}, found {str(value)[:80]}", code="config.too-large")
        return value

    def divisor(self, name: str, of: str, whole: int, default: int | None = None) -> int:
        """Return an integer that divides `whole`, which is the field `of`."""
        value = self.count(name, default)
        if whole % value:
            problem = f"expected a divisor of {of} {whole}, found {value}"
            raise self.error(name, problem, code="config.inconsistent-fields")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, 0 or more; null or absent means none."""
        value = self.config.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            problem = f"expected a list of integers, 0 or more, found {_shown(value)}"
            raise self.error(name, problem, code="config.invalid-field")
        return tuple(value)

    def experts_per_token(self) -> tuple[int, ...]:
        """Return how many experts a token goes through: one number, one for each layer, or none."""
        name = next((name for name in _PER_TOKEN if self.has(name)), None)
        if name is None:
            return ()
        return self.counts(name) if isinstance(self.config[name], list) else (self.count(name),)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; null or absent means none."""
        value = self.config.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            problem = f"expected a list of strings, found {_shown(value)}"
            raise self.error(name, problem, code="config.invalid-field")
        return tuple(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            problem = f"expected true or false, found {kind_of(value)}"
            raise self.error(name, problem, code="config.invalid-field")
        return value

    def section(self, name: str) -> ConfigReader | None:
        """Return an object inside the config; null or absent means None."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"expected an object, found {kind_of(value)}", code="config.invalid-field")
        return ConfigReader(value, self.where, f"{self.prefix}{name}.")

    def expect(self, name: str, allowed: object) -> None:
        """Refuse a field whose other values are not supported; null or absent is fine."""
        value = self.config.get(name)
        if value is not None and value != allowed:
            problem = f"expected {allowed!r} or nothing, found {_shown(value)}"
            raise self.error(name, problem, "no other value is supported", code="config.unsupported-field")


def check_readable(config: Mapping[str, object], where: str, prefix: str = "") -> None:
    """Refuse a config for which transformers, vLLM or mlx-lm would read another model than this folder's."""
    for name, value in config.items():
        if value is None:
            continue
        if isinstance(value, Mapping) and name.endswith("_config"):
            check_readable(value, where, f"{prefix}{name}.")
        if name in _REDIRECTS:
            problem = f"{_REDIRECTS[name]} because of it; found {_shown(value)}"
        elif name in _ATTRIBUTES or name.startswith(("_validate_", "__")):
            problem = "is an attribute of transformers' config class, which the field would replace"
        else:
            continue
        hint = "remove the field; weights in other files must be moved into the folder"
        raise ModelError(f"{where}: {prefix}{name}", problem, hint, code="config.redirects")


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]


def with_dtype(config: Mapping[str, Any], stored: str) -> dict[str, Any]:
    """Return the config with this dtype (as in safetensors headers) wherever it names one, since readers cast to it."""
    name = next(name for name, dtype in CONFIG_DTYPES.items() if dtype == stored)
    parts = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)}
    parts.pop("quantization_config", None)  # which is of no module
    for key, part in parts.items():  # such as text_config; null is the dtype of the whole
        parts[key] = part | with_dtype({field: value for field, value in part.items() if value is not None}, stored)
    return {**config, **parts, **{key: name for key in _DTYPE_KEYS if key in config}}


def says_tied(config: Mapping[str, object]) -> bool:
    """Return whether a config itself, or its part for text, says that the embedding and the head are one weight."""
    return any(isinstance(part, Mapping) and part.get(_TIED) is True for part in (config, config.get(_TEXT)))


def without_ties(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model whose embedding and head are two weights, for readers that go by the config."""
    text = config.get(_TEXT)
    parts = {_TEXT: {**text, _TIED: False}} if isinstance(text, Mapping) else {}
    return {**config, **parts, _TIED: False}


def encode_config(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
