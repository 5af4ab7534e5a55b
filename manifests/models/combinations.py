"""Combinations that torch would silently train wrong, and degrees that do not divide a model's sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from manifests.errors import UsageError
from manifests.models import ARCHITECTURES, ModelShape
from manifests.models.parts import is_divided
from manifests.models.trainable import (
    NARROW,
    hands_on_trees,
    is_generic,
    refuses_cp,
    why_not_expert_parallel,
    why_not_tensor_parallel,
)
from manifests.models.training import ContextMethod, Training, check_expert_degree

_CUT_HEADS = ("num_attention_heads", "num_key_value_heads")
_CUT = (*_CUT_HEADS, "intermediate_size", "moe_intermediate_size", "vocab_size")
_ATTENTION = re.compile(r"(attn|attention)\.")  # in the names of its tensors
_HEADS = (  # how configs name the number of heads, or that of each layer
    "num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "swa_num_attention_heads",
    "num_attention_heads_per_layer",
)  # fmt: skip
_DRAWN = re.compile(r"^(?!classifier|summary).*(dropout|pdrop|jitter)")  # fields of random numbers in training
_BY_LENGTH = {  # by flag, on what frequencies may depend besides, and the code of a refusal
    "--cp": ("the largest position that a rank has", "options.cp-architecture"),
    "--document-mask": ("the longest document of a microbatch", "options.document-mask"),
}
_UNSPLIT = "a schedule that does not split the backward, such as 1F1B or Interleaved1F1B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """The features that a run combines; the defaults are those of a plain pipeline."""

    schedule: str = "1F1B"  # as messages name it
    splits_backward: bool = False  # see `runner.pipeline.timetable.Timetable`
    is_compiled: bool = False
    num_mtp_layers: int = 0
    has_own_loss: bool = False  # another loss than cross-entropy
    num_tensor: int = 1  # tensor-parallel ranks
    num_expert: int = 1  # expert-parallel ranks
    architecture: str = "LlamaForCausalLM"
    has_loss_chunks: bool = False
    whole_because: str = ""  # why matrices of the architecture are not sharded
    experts_because: str = ""  # why its experts are not distributed
    is_generic: bool = False  # known by the catalogue alone, or a family that cannot be checked
    is_unverified: bool = False  # with more than the hidden state between stages, or a family that cannot be checked
    num_shards: int = 1  # data-parallel ranks that share each parameter
    keeps_documents: bool = False  # --document-mask
    num_context: int = 1  # context-parallel ranks
    is_own: bool = False  # trained by a family of another package
    is_narrow: bool = False  # hidden states of some stages are narrower
    has_adapters: bool = False  # --lora-rank or --lora-from
    moves_biases: bool = False  # --router-bias-rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One rule: what it applies to, what is wrong with that, and the nearest supported choice."""

    where: str
    code: str
    applies: Callable[[Combination], bool]
    problem: str  # fields of the combination in braces are filled in
    hint: str


def _refuse_mtp(where: str, feature: str) -> Refusal:
    return Refusal(
        where=where,
        code="options.mtp-combination",
        applies=lambda run: run.num_mtp_layers > 0 and getattr(run, feature),
        problem="is not supported with multi-token prediction (MTP) layers",
        hint=f"leave {where} out, or pack again without the layers: --drop each of their modules",
    )


REFUSED = (
    Refusal(
        where="--compile",
        code="schedule.compiled-layers",
        applies=lambda run: run.splits_backward and run.is_compiled,
        problem="is not supported with {schedule}: a backward in two parts makes gradients of compiled layers wrong",
        hint=f"remove --compile, or use {_UNSPLIT}",
    ),
    Refusal(
        where="--tp",
        code="options.tp-architecture",
        applies=lambda run: run.num_tensor > 1 and bool(run.whole_because),
        problem="tensor parallelism is not supported for {architecture}: {whole_because}",
        hint="remove --tp; docs/models.md lists what supports it",
    ),
    Refusal(
        where="--ep",
        code="options.ep-architecture",
        applies=lambda run: run.num_expert > 1 and bool(run.experts_because),
        problem="expert parallelism is not supported for {architecture} here: {experts_because}",
        hint="remove --ep; docs/models.md lists what supports it",
    ),
    Refusal(
        where="--loss-chunk",
        code="options.tp-loss-chunk",
        applies=lambda run: run.num_tensor > 1 and run.has_loss_chunks and not run.is_own,
        problem="conflicts with --tp: a tensor-parallel LM head computes the logits of all tokens at once",
        hint="remove --loss-chunk",
    ),
    Refusal(
        where="--compile",
        code="options.tp-compiled-layers",
        applies=lambda run: run.is_compiled and run.num_tensor > 1,
        problem="is not verified together with --tp: the self-check compares compiled code on one rank",
        hint="remove --compile or --tp",
    ),
    Refusal(
        where="--compile",
        code="options.ep-compiled-layers",
        applies=lambda run: run.is_compiled and run.num_expert > 1,
        problem="is not verified together with --ep: the self-check compares compiled code on one rank",
        hint="remove --compile or --ep",
    ),
    Refusal(
        where="--dp-shard",
        code="options.catalogue-combination",
        applies=lambda run: run.is_unverified and run.num_shards > 1,
        problem="is not verified for {architecture}",
        hint="leave --dp-shard out; --dp-replicate and more stages work",
    ),
    Refusal(
        where="--compile",
        code="options.catalogue-combination",
        applies=lambda run: run.is_generic and run.is_compiled,
        problem="is not verified for {architecture}",
        hint="leave --compile out",
    ),
    Refusal(
        where="--loss-chunk",
        code="options.catalogue-combination",
        applies=lambda run: run.is_unverified and run.has_loss_chunks,
        problem="{architecture} may change its logits after the head, which chunks would leave out",
        hint="leave --loss-chunk out",
    ),
    Refusal(
        where="--schedule",
        code="options.catalogue-combination",
        applies=lambda run: run.is_unverified and run.splits_backward,
        problem="{schedule} splits the backward, which is not verified for {architecture}",
        hint=f"take {_UNSPLIT}",
    ),
    Refusal(
        where="--cp",
        code="options.cp-architecture",
        applies=lambda run: run.num_context > 1 and (run.is_unverified or run.is_narrow or run.is_own),
        problem="is not verified for {architecture}",
        hint="leave it out; more stages and --ac save memory, too",
    ),
    Refusal(
        where="--cp",
        code="options.cp-combination",
        applies=lambda run: run.num_context > 1 and run.is_compiled,
        problem="is not verified together with --compile",
        hint="remove one of them",
    ),
    Refusal(
        where="--lora-rank",
        code="options.lora-architecture",
        applies=lambda run: run.has_adapters and run.is_own,
        problem="adapters are supported on transformers' modules alone",
        hint="train all parameters, or some with --train-only",
    ),
    Refusal(
        where="--router-bias-rate",
        code="options.lora-combination",
        applies=lambda run: run.has_adapters and run.moves_biases,
        problem="changes biases of the base model, to which checkpoints of adapters refer",
        hint="leave it out",
    ),
    Refusal(
        where="--compile",
        code="options.lora-combination",
        applies=lambda run: run.has_adapters and run.is_compiled,
        problem="is not verified together with adapters",
        hint="remove --compile",
    ),
    Refusal(
        where="manifest",
        code="manifest.mtp-layers",
        applies=lambda run: run.num_mtp_layers > 0 and run.is_own,
        problem="multi-token prediction (MTP) layers train on transformers' modules alone",
        hint="pack again without them: --drop each of their modules",
    ),
    *map(_refuse_mtp, ("--compile", "--lora-rank", "--loss"), ("is_compiled", "has_adapters", "has_own_loss")),
)


def combination_of(architecture: str, *, is_own: bool = False, **features: Any) -> Combination:
    """Return the combination of these features with what an architecture supports.

    `is_own` says that a family of another package trains it: ranks, which have it, ask it what it supports.
    """
    if is_own:
        return Combination(architecture=architecture, is_own=True, **features)
    return Combination(
        architecture=architecture,
        whole_because=why_not_tensor_parallel(architecture),
        experts_because=why_not_expert_parallel(architecture),
        is_generic=is_generic(architecture) and architecture not in ARCHITECTURES,
        is_unverified=hands_on_trees(architecture),
        **features,
    )


def check_combination(combination: Combination) -> None:
    refused = [rule for rule in REFUSED if rule.applies(combination)]
    if not refused:
        return
    first, *others = refused
    problem = _problem_of(first, combination)
    for rule in others:
        problem += f"\n{rule.where}: {_problem_of(rule, combination)} ({rule.hint})"
    raise UsageError(first.where, problem, first.hint, code=first.code)


def _problem_of(rule: Refusal, combination: Combination) -> str:
    return rule.problem.format_map(asdict(combination))


def check_degrees(
    shape: ModelShape, config: Mapping[str, Any], training: Training, *, is_own: bool, **features: Any
) -> None:
    """Check that `runner launch` accepts these degrees of parallelism, and `features` of a combination.

    With `is_own`, a family of another package has the modules.
    """
    architecture, tensor, expert, context = shape.architecture, training.tensor, training.expert, training.context
    check_combination(
        combination_of(
            architecture, is_own=is_own, num_tensor=tensor, num_expert=expert, num_context=context,
            num_shards=training.shard // context, is_narrow=NARROW in shape.modules, **features,
        )
    )  # fmt: skip
    check_divides(shape, config, tensor, expert)
    check_heads(config, context, "ulysses" if training.exchanges_heads else "gather", tensor)
    if context > 1:
        check_constant("--cp", architecture, training.seq_len, constant_length(config))
    suffixes = shape.float32_suffixes if training.policy.name == "bf16" and training.is_sharded else ()
    if suffixes and any(fqn.endswith(suffixes) for fqn in shape.tensors):
        problem = f"{architecture} keeps some parameters in float32, which FSDP cannot shard beside others in bfloat16"
        raise UsageError("--dtype bf16", problem, "use --master-dtype fp32", code="options.catalogue-combination")


def why_not_proven(architecture: str, config: Mapping[str, Any], training: Training) -> str:
    """Return why the proof before step 1 refuses these degrees, as far as is known without it, or nothing."""
    if training.context > 1 and refuses_cp(architecture):
        return f"--cp: ranks do not compute what {architecture} computes"
    for name, value in _text_fields(config).items() if training.tensor > 1 else ():
        if _DRAWN.search(name) and not isinstance(value, bool) and isinstance(value, (int, float)) and value > 0:
            return f"--tp: ranks would draw the same random numbers for {name} ({value:g}, config.json)"
    return ""


def _text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("text_config")
    return section if isinstance(section, Mapping) else config


def check_divides(shape: ModelShape, config: Mapping[str, Any], num_tensor: int, num_expert: int) -> None:
    """Check that a model can be shared by so many ranks: whole heads, units, words and experts for each."""
    for name, count in _cut_counts(_text_fields(config)):
        if isinstance(count, int) and count % num_tensor and not (name in _CUT_HEADS and _has_whole_heads(shape)):
            problem = f"expected a divisor of {count} ({name} of config.json), found {num_tensor}"
            raise UsageError("--tp", problem, code="options.tp-divisor")
    check_expert_degree(shape.count_experts() if num_expert > 1 else {}, num_expert, "--ep")


def _has_whole_heads(shape: ModelShape) -> bool:
    """Return whether plans leave attention whole, as that of DeepSeek-V4, all of whose heads have the same keys."""
    matrices = [
        is_divided(fqn, shape) for fqn, dims in shape.tensors.items() if len(dims) > 1 and _ATTENTION.search(fqn)
    ]
    return bool(matrices) and not any(matrices)


def _cut_counts(fields: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what tensor-parallel ranks have parts of, by field: of the model, and of layers with others."""
    layers = fields.get("per_layer_config")
    for part in (fields, *(layers.values() if isinstance(layers, Mapping) else ())):
        yield from ((name, part.get(name)) for name in _CUT if isinstance(part, Mapping))
    if fields.get("attention_k_eq_v"):  # without it, transformers does not read the field
        yield "num_global_key_value_heads", fields.get("num_global_key_value_heads")


def check_heads(config: Mapping[str, Any], num_context: int, method: ContextMethod, num_tensor: int) -> None:
    """Check that context-parallel ranks can exchange parts of rows for heads, if that is their method.

    They exchange those of one tensor-parallel rank.
    """
    fields = _text_fields(config)
    for name in _HEADS if method == "ulysses" else ():
        counts = fields.get(name)
        for count in counts if isinstance(counts, list) else [counts]:
            if isinstance(count, int) and count % (num_context * num_tensor):
                tensor = f" x --tp {num_tensor}" if num_tensor > 1 else ""
                problem = f"expected a divisor of {count} ({name} of config.json), found {num_context}{tensor}"
                raise UsageError("--cp", problem, "use --cp-method gather, or another --cp", code="options.cp-divisor")


def constant_length(config: Mapping[str, Any]) -> float:
    """Return up to which length of rows the frequencies of a RoPE are the same; infinite for most kinds."""
    fields, most = _text_fields(config), math.inf
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling")
    ropes = (parameters, *parameters.values()) if isinstance(parameters, Mapping) else ()  # those of layer types, too
    for rope in (rope for rope in ropes if isinstance(rope, Mapping)):
        kind = str(rope.get("rope_type", rope.get("type")))
        name = "original_max_position_embeddings" if kind == "longrope" else "max_position_embeddings"
        length = rope.get(name, fields.get(name))
        if isinstance(length, int) and (kind == "longrope" or "dynamic" in kind):
            most = min(most, length)
    return most


def check_constant(flag: str, architecture: str, seq_len: int, most: float) -> None:
    """Check that rows of which ranks or documents have parts are not longer than `most`, see `constant_length`."""
    if seq_len > most:
        cause, code = _BY_LENGTH[flag]
        problem = f"is not supported for {architecture} with --seq-len {seq_len}: its RoPE depends on {cause}"
        raise UsageError(flag, problem, f"use --seq-len {most}, or leave {flag} out", code=code)
