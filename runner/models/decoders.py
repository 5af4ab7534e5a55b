"""What the cutter of transformers' models must know of each: names, and what the config may not ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from manifests.errors import ModelError, UsageError
from manifests.models import ConfigReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """An architecture of transformers.

    `supported` lists the allowed values of fields that transformers ignores, or that need more than one tensor
    between stages; a dotted field is in a section.
    """

    base: str = "model"  # what runs from tokens to the last hidden state
    positions: str | None = None  # the table that is added to the embedded tokens
    dropouts: Mapping[str, str] = field(default_factory=dict)  # outside layers, and the module each follows
    layers_give_tuples: bool = False
    length: tuple[str, int] | None = None  # the field that limits sequences, and transformers' default
    narrow: str = ""  # a module with less than the hidden width before it, in models that have it
    supported: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    renamed: tuple[str, str] = (".", ".")  # in names: as in memory, as in files
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one tensor for all experts: its parts

    def check(self, config: ConfigReader, seq_len: int) -> None:
        """Refuse fields that would be computed differently from what the config says.

        Raises:
            InputError: naming the field.
            UsageError: sequences longer than the model has positions.
        """
        for path, allowed in self.supported.items():
            section, _, name = path.rpartition(".")
            reader = config.section(section) if section else config
            if reader is not None and (found := reader.config.get(name)) is not None and found not in allowed:
                raise reader.error(
                    name,
                    f"{found!r} is not supported; expected {allowed[0]!r} or nothing",
                    code="config.unsupported-value",
                )
        if self.length is not None and seq_len > (most := self.positions_in(config)):
            problem = f"expected at most {most}, which is {self.length[0]} of the model's config, found {seq_len}"
            raise UsageError("--seq-len", problem, code="options.sequence-length")

    def positions_in(self, config: ConfigReader) -> int:
        """Return the maximum sequence length of this model, if it has one."""
        assert self.length is not None
        name, default = self.length
        return config.count(name, default)


def decoder_of(architecture: str) -> Decoder | None:
    """Return what the cutter knows of an architecture; None: it trains by the catalogue, or not at all."""
    return DECODERS.get(architecture) or TITAN_DECODERS.get(architecture)


def refuse_mtp(modules: Iterable[str], optional: Set[str], where: str) -> None:
    """Make sure that none of these modules is for multi-token prediction; `optional` are those that are.

    Raises:
        ModelError: naming the first that is.
    """
    if extra := optional & set(modules):
        raise ModelError(
            f"{where}: num_nextn_predict_layers",
            f"{min(extra)} predicts further tokens (MTP), which cannot be trained in a pipeline",
            "they can be packed; to train, pack again without them: num_nextn_predict_layers 0 in config.json, "
            "and --drop for each of their tensors",
            code="config.mtp-layers",
        )


DECODERS: Mapping[str, Decoder] = {
    "FalconForCausalLM": Decoder(base="transformer", layers_give_tuples=True),
    "GPT2LMHeadModel": Decoder(
        base="transformer",
        positions="transformer.wpe",
        dropouts={"transformer.drop": "transformer.wpe"},
        length=("n_positions", 1024),
    ),
    "Gemma2ForCausalLM": Decoder(supported={"use_bidirectional_attention": (False,)}),
    "Gemma3ForCausalLM": Decoder(supported={"use_bidirectional_attention": (False,)}),
    "MixtralForCausalLM": Decoder(
        supported={"output_router_logits": (False,)},  # the loss that balances experts needs every stage's logits
        renamed=(".mlp.", ".block_sparse_moe."),
        stacked={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    ),
    "MptForCausalLM": Decoder(
        base="transformer",
        layers_give_tuples=True,
        length=("max_seq_len", 2048),
        supported={  # transformers reads none of these
            "attn_config.alibi_bias_max": (8,),
            "attn_config.attn_uses_sequence_id": (False,),
            "attn_config.prefix_lm": (False,),
            "emb_pdrop": (0,),
            "embedding_fraction": (1,),
            "logit_scale": (1,),
            "resid_pdrop": (0,),
        },
    ),
    "OPTForCausalLM": Decoder(
        base="model.decoder",
        positions="model.decoder.embed_positions",
        length=("max_position_embeddings", 2048),
        narrow="model.decoder.project_in",
        supported={"layerdrop": (0,)},  # would leave whole stages without gradients
    ),
    "Phi3ForCausalLM": Decoder(),
    "PhiForCausalLM": Decoder(dropouts={"model.embed_dropout": "model.embed_tokens"}),
    "Qwen2ForCausalLM": Decoder(),
}
_EXPERTS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Those that torchtitan has modules for: what transformers' need to be known of them.
TITAN_DECODERS: Mapping[str, Decoder] = {
    "DeepseekV3ForCausalLM": Decoder(
        supported={"is_causal": (True,), "output_router_logits": (False,), "scoring_func": ("sigmoid",)},
        stacked=_EXPERTS,
    ),
    "GptOssForCausalLM": Decoder(supported={"is_causal": (True,), "output_router_logits": (False,)}),
    "LlamaForCausalLM": Decoder(supported={"is_causal": (True,), "pretraining_tp": (1,)}),
    "MistralForCausalLM": Decoder(supported={"is_causal": (True,)}),
    "Qwen3ForCausalLM": Decoder(supported={"is_causal": (True,)}),
    "Qwen3MoeForCausalLM": Decoder(
        supported={"is_causal": (True,), "output_router_logits": (False,)},
        stacked=_EXPERTS,
    ),
}
