"""What a Hugging Face config asks of torchtitan's families, read and checked whole: by the launcher, too. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from manifests.errors import ModelError
from manifests.models import ConfigReader, model_shape
from runner.models.rope_fields import Rope, positive_number, read_rope


class TitanFields(ABC):
    """The fields of a config that a family computes with."""

    supported: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # besides those below
    default_eps: ClassVar[float] = 1e-6
    default_theta: ClassVar[float] = 10000.0
    default_head: ClassVar[int | None] = None  # None: the hidden size over the number of heads

    def __init__(self, config: Mapping[str, object], where: str = "config.json") -> None:
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        self.read = read = ConfigReader(plain, where)
        for field, allowed in {**_SUPPORTED, **self.supported}.items():
            if (value := config.get(field)) is not None and value not in allowed:
                problem = f"{value!r} is not supported; expected {allowed[0]!r} or nothing"
                raise read.error(field, problem, code="config.unsupported-value")
        shape = model_shape(plain, where)
        self.architecture, self.shapes, self._extra = shape.architecture, shape.tensors, shape.optional
        self.modules = tuple(module for module in shape.modules if module not in shape.optional)
        self.hidden_size, self.vocab_size = read.count("hidden_size"), read.count("vocab_size")
        self.padding_row = _padding_row(read, self.vocab_size)
        self.num_layers = shape.num_layers
        self.eps = positive_number(plain, "rms_norm_eps", f"{where}: ", self.default_eps)
        self.rope = self.read_rope()
        self.read_layers()

    @abstractmethod
    def read_layers(self) -> None:
        """Read what layers need from `read`, the config."""

    def read_rope(self) -> Rope:
        return read_rope(self.read.config, head_dim=self.head_dim, where=self.read.where, theta=self.default_theta)

    def check_modules(self, modules: Iterable[str]) -> None:
        """Check that none of these modules is for multi-token prediction."""
        if extra := self._extra & set(modules):
            raise ModelError(
                f"{self.read.where}: num_nextn_predict_layers",
                f"{min(extra)} predicts further tokens (MTP), which torchtitan's modules do not train",
                "use --implementation transformers, or pack again without them: num_nextn_predict_layers 0 in "
                "config.json, and --drop for each of their tensors",
                code="config.mtp-layers",
            )

    @property
    def head_dim(self) -> int:
        return self.read.count("head_dim", self.default_head or self.hidden_size // self.num_heads)

    @property
    def num_heads(self) -> int:
        return self.read.count("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        return self.read.count("num_key_value_heads", self.num_heads)


class LlamaFields(TitanFields):
    """`LlamaForCausalLM`."""

    window: int | None = None

    def read_layers(self) -> None:
        self.ffn = self.read.count("intermediate_size")


class MistralFields(LlamaFields):
    """`MistralForCausalLM`."""

    _default_window = 4096  # MistralConfig, where the field is absent; null means no window

    def read_layers(self) -> None:
        super().read_layers()
        if "sliding_window" not in self.read.config:
            self.window = self._default_window
        elif self.read.has("sliding_window"):
            self.window = self.read.count("sliding_window")


class Qwen3Fields(TitanFields):
    """`Qwen3ForCausalLM`."""

    default_head: ClassVar[int | None] = 128
    _default_window, _default_full = 4096, 28  # Qwen3Config: tokens, and layers before the first with a window

    def read_layers(self) -> None:
        self.ffn = self.read.count("intermediate_size")
        self.windows = self.read_windows()

    def read_windows(self) -> tuple[int | None, ...]:
        """Return each layer's window."""
        window = self.read_window()
        first = self.read.count("max_window_layers", self._default_full, least=0)
        usual = [window is not None and layer >= first for layer in range(self.num_layers)]
        return _windows_of(self.read, window, usual)

    def read_window(self) -> int | None:
        if not self.read.flag("use_sliding_window", False):
            return None
        if "sliding_window" in self.read.config and not self.read.has("sliding_window"):
            return None
        return self.read.count("sliding_window", self._default_window)


class Qwen3MoeFields(Qwen3Fields):
    """`Qwen3MoeForCausalLM`.

    Layers named by `mlp_only_layers`, and all but every `decoder_sparse_step`-th, are dense.
    """

    default_head = None

    def read_layers(self) -> None:
        super().read_layers()
        read = self.read
        self.num_experts = read.count("num_experts" if read.has("num_experts") else "num_local_experts")
        self.top_k = read.count("num_experts_per_tok", most=self.num_experts)
        self.is_normed = read.flag("norm_topk_prob", False)
        self._sparse_step, self._dense = read.count("decoder_sparse_step", 1), read.counts("mlp_only_layers")
        has_experts = any(map(self.is_sparse, range(self.num_layers)))
        self.expert_ffn = read.count("moe_intermediate_size", None if has_experts else 1)

    def read_windows(self) -> tuple[int | None, ...]:
        return (self.read_window(),) * self.num_layers

    def is_sparse(self, layer: int) -> bool:
        return (layer + 1) % self._sparse_step == 0 and layer not in self._dense


class DeepSeekV3Fields(TitanFields):
    """`DeepseekV3ForCausalLM`."""

    supported: ClassVar[Mapping[str, tuple[object, ...]]] = {"scoring_func": ("sigmoid",)}
    _default_groups, _default_chosen = 8, 4  # DeepseekV3Config

    def read_layers(self) -> None:
        read = self.read
        self.ffn = read.count("intermediate_size")
        self.num_dense = read.count("first_k_dense_replace", least=0)
        if self.num_kv_heads != self.num_heads:
            problem = f"expected num_attention_heads {self.num_heads}, found {self.num_kv_heads}"
            raise read.error("num_key_value_heads", problem, code="config.unsupported-value")
        self.plain_dim, self.rotary_dim = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
        self.value_dim, self.kv_rank = read.count("v_head_dim"), read.count("kv_lora_rank")
        self.q_rank = read.count("q_lora_rank", 0)
        self._read_experts()

    def read_rope(self) -> Rope:
        self.is_interleaved = self._flag("rope_interleave")
        return read_rope(self.read.config, head_dim=self.read.count("qk_rope_head_dim"), where=self.read.where)

    def _read_experts(self) -> None:
        """Read the groups of experts, and how many groups and experts are chosen."""
        read = self.read
        self.num_experts, self.num_groups = read.count("n_routed_experts"), read.count("n_group", self._default_groups)
        if self.num_experts % self.num_groups or self.num_experts // self.num_groups < 2:
            problem = f"expected groups of equally many experts, 2 or more, found {self.num_groups}"
            raise read.error("n_group", problem, code="config.unsupported-value")
        self.num_chosen = read.count("topk_group", self._default_chosen, most=self.num_groups)
        self.top_k = read.count("num_experts_per_tok", most=self.num_chosen * (self.num_experts // self.num_groups))
        self.is_normed = self._flag("norm_topk_prob")
        self.route_scale = positive_number(read.config, "routed_scaling_factor", f"{read.where}: ", 2.5)
        default = None if self.num_dense < self.num_layers else 1  # without experts, nobody asks
        self.expert_ffn = read.count("moe_intermediate_size", default)
        self.num_shared = read.count("n_shared_experts", default)

    def _flag(self, name: str) -> bool:
        """Return a flag that is on where it is absent and, as transformers reads it, off where it is null."""
        return self.read.flag(name, name not in self.read.config)


class GptOssFields(TitanFields):
    """`GptOssForCausalLM`."""

    supported: ClassVar[Mapping[str, tuple[object, ...]]] = {"attention_bias": (True, False)}
    default_eps = 1e-5
    default_theta = 150000.0
    default_head = 64
    _default_window = 128  # GptOssConfig, as the rest
    _default_alpha, _default_limit = 1.702, 7.0
    _default_rope: ClassVar[Mapping[str, object]] = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }

    def read_layers(self) -> None:
        read, prefix = self.read, f"{self.read.where}: "
        self.has_bias, self.ffn = read.flag("attention_bias", True), read.count("intermediate_size")
        self.alpha = positive_number(read.config, "swiglu_alpha", prefix, self._default_alpha)
        self.limit = positive_number(read.config, "swiglu_limit", prefix, self._default_limit)
        self.num_experts = read.count("num_local_experts")
        self.top_k = read.count("num_experts_per_tok", most=self.num_experts)
        window: int | None = None
        if "sliding_window" not in read.config or read.has("sliding_window"):
            window = read.count("sliding_window", self._default_window)
        self.windows = _windows_of(read, window, [layer % 2 == 0 for layer in range(self.num_layers)])

    def read_rope(self) -> Rope:
        config = dict(self.read.config)
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config["rope_parameters"] = self._default_rope
        return read_rope(config, head_dim=self.head_dim, where=self.read.where, theta=self.default_theta)


def _windows_of(read: ConfigReader, window: int | None, usual: Sequence[bool]) -> tuple[int | None, ...]:
    """Return each layer's window: as in `layer_types`, or `usual` where the config lacks it."""
    kinds = read.names("layer_types") or tuple(_LAYER_TYPES[is_sliding] for is_sliding in usual)
    if len(kinds) != len(usual):
        raise read.error(
            "layer_types", f"expected {len(usual)}, one for each layer, found {len(kinds)}", code="config.invalid-field"
        )
    if unknown := sorted(set(kinds).difference(_LAYER_TYPES)):
        raise read.error(
            "layer_types",
            f"{unknown[0]!r} is not supported",
            f"known: {', '.join(_LAYER_TYPES)}",
            code="config.unsupported-value",
        )
    if window is None and _LAYER_TYPES[1] in kinds:
        raise read.error(
            "sliding_window",
            "expected a positive integer, found nothing",
            "layer_types asks for windows",
            code="config.invalid-field",
        )
    return tuple(window if kind == _LAYER_TYPES[1] else None for kind in kinds)


def _padding_row(read: ConfigReader, vocab_size: int) -> int | None:
    """Return the row of the embedding that gets no gradient: that of `pad_token_id`, counted from the end if negative.

    Source: transformers builds `nn.Embedding(…, padding_idx=config.pad_token_id)`.
    """
    token = read.config.get("pad_token_id")
    if token is None:
        return None
    if type(token) is not int or not -vocab_size <= token < vocab_size:
        raise read.error(
            "pad_token_id",
            f"expected an integer within the vocabulary of {vocab_size}, found {repr(token)[:80]}",
            "null if the model has no padding token",
            code="config.pad-token",
        )
    return token % vocab_size


_LAYER_TYPES = ("full_attention", "sliding_attention")
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "pretraining_tp": (1,),
    "attention_dropout": (0.0,),
    "output_router_logits": (False,),  # the loss that balances experts needs every stage's logits
}
TITAN_FIELDS: Mapping[str, Callable[[Mapping[str, object], str], TitanFields]] = {
    "DeepseekV3ForCausalLM": DeepSeekV3Fields,
    "GptOssForCausalLM": GptOssFields,
    "LlamaForCausalLM": LlamaFields,
    "MistralForCausalLM": MistralFields,
    "Qwen3ForCausalLM": Qwen3Fields,
    "Qwen3MoeForCausalLM": Qwen3MoeFields,
}
