"""Tensor and expert parallelism of a decoder of transformers, by the plans that transformers has for it.

# Note [Plans of transformers]
`base_model_tp_plan` of a config class names a style for each module and bare parameter that is sharded. transformers
places the parameters and wraps the forwards, except that
- what it leaves out is in `PLANS`, such as all of GPT-OSS, whose experts' last biases are added once (`SharedBias`);
- the embedding is sharded by the vocabulary, as its head is, tied or not; a table of positions is whole on every rank;
- gradients of parameters that every rank has, and that cover its own heads only, are summed once per step
  (Note [One reduction a step]): transformers would sum what was accumulated after each microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import MoeExpertsParallel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from manifests.errors import UsageError
from runner.models.adapters import sharded_adapters, split_adapters
from runner.models.regions import Region
from runner.tensors.dtensor import packed_dim

_SUMMED = "replicated_with_grad_allreduce"
_LATENT = "mla_kv_a_proj"
_EXPERTS = "experts_with_biases"
# By model type, of the names in a layer. A rank has whole gates with their units, which lie side by side.
PLANS: Mapping[str, Mapping[str, str]] = {
    "apertus": {"mlp.act_fn": _SUMMED},  # has parameters, each rank for its hidden units
    "deepseek_v3": {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), "colwise"),
        "self_attn.kv_a_proj_with_mqa": _LATENT,
        "self_attn.o_proj": "rowwise",
    },
    "gpt_oss": {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.sinks"), "colwise"),
        "self_attn.o_proj": "rowwise",
        "self_attn": "local_params",
        "mlp.experts.gate_up_proj": "rowwise",
        "mlp.experts.gate_up_proj_bias": "rowwise",
        "mlp.experts.down_proj": "colwise",
        "mlp.experts": _EXPERTS,
    },
}


def complete_plan(model: PreTrainedModel, layers: str) -> None:
    """Add what transformers' plan of a model lacks; `layers` is the name of its list of layers."""
    plan = PLANS.get(model.config.get_text_config().model_type, {})
    model._tp_plan = {**model.tp_plan, **{f"{layers}.*.{name}": style for name, style in plan.items()}}


def shard_by_plan(
    model: PreTrainedModel, mesh: DeviceMesh, embedding: nn.Module, *, whole: Collection[nn.Module]
) -> None:
    """Shard a model, which is on the meta device, over the ranks of a mesh, except for the modules in `whole`.

    `embedding` is that of tokens, or a module in its place.

    Raises:
        UsageError: the number of ranks does not divide a dimension that the plan shards.
    """
    if isinstance(embedding, nn.Embedding):
        _shard_vocabulary(embedding, mesh)
    for path, module in list(model.named_modules()):
        if module in whole:
            continue
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if (style := _style_of(model, f"{path}.{leaf}", path)) is not None:
                _style(style).shard_param(module, leaf, mesh)
                _check_even(f"{path}.{leaf}", parameter, module.get_parameter(leaf))
        if (style := _style_of(model, path)) is not None:
            if style == _LATENT:
                module.config = model.config.get_text_config()  # which that style reads
            _style(style).install_forward(module, mesh)
    split_adapters(model)


class SharedBias(MoeExpertsParallel):
    """Experts that add a bias which each rank has to what ranks sum: each adds its share, with the whole gradient."""

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        parameters: dict[str, Any] = module._parameters
        bias, share = parameters["down_proj_bias"], 1 / mesh.size()
        with super().context_around_forward(module, mesh):  # type: ignore[no-untyped-call]
            parameters["down_proj_bias"] = bias * share + (bias - bias.detach()) * (1 - share)
            try:
                yield
            finally:
                parameters["down_proj_bias"] = bias


def _shard_vocabulary(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Let a rank have the rows of some tokens, whatever the embedding's class does with what it looks up."""
    whole, rank, look_up = embedding.weight, mesh.get_local_rank(), embedding.forward
    rows = embedding.num_embeddings // mesh.size()
    rows_here = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    embedding.weight = nn.Parameter(rows_here, requires_grad=whole.requires_grad)
    _check_even("the embedding", whole, embedding.weight)
    if embedding.padding_idx is not None:  # that row gets no gradient
        place = embedding.padding_idx - rank * rows
        embedding.padding_idx = place if 0 <= place < rows else None

    def embed(tokens: torch.Tensor) -> Any:
        places = tokens - rank * rows
        elsewhere = (places < 0) | (places >= rows)
        with ALL_PARALLEL_STYLES["local_params"].context_around_forward(embedding, mesh):
            embedded = look_up(places.masked_fill(elsewhere, 0))
        partial = embedded.masked_fill(elsewhere[..., None], 0)
        return ALL_PARALLEL_STYLES["all_reduce"].transform_output_post_forward(embedding, partial, mesh)

    embedding.forward = embed  # type: ignore[method-assign, assignment]


def check_packed(model: PreTrainedModel, regions: Mapping[str, tuple[Region, ...]]) -> None:
    """Refuse a tensor of files with several of the matrices that are packed into a parameter, each of them sharded.

    A rank has rows of each, and so several regions of such a tensor.

    Raises:
        UsageError: there is one.
    """
    for name, parameter in model.named_parameters():
        if (packed := packed_dim(parameter)) is not None:
            dim, count = packed
            if any(region.sizes[dim] > parameter.shape[dim] // count for region in regions[name]):
                problem = "files have several matrices, each of which would be sharded, in one tensor"
                raise UsageError("--tp", problem, code="options.tp-architecture")


def distribute_experts(model: PreTrainedModel, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
    """Distribute the experts of a model, which is on the meta device, over the ranks of a mesh, by transformers' plan.

    "all_to_all" is named because transformers' own choice depends on whether gradients are needed, and its "all_reduce"
    leaves out collectives of the backward on a rank that no token is for.
    """
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, mesh, tensor_mesh, plan, "all_to_all")
    experts = tuple(model.ep_plan)
    model._tp_plan = {  # without a warning of rules that match nothing on this stage
        rule: style
        for rule, style in model.tp_plan.items()
        if rule not in experts and not rule.startswith(tuple(f"{name}." for name in experts))
    }


def summed_by_plan(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients on a rank cover only its own heads."""
    for path, module in model.named_modules():
        if model.tp_plan.get(_pattern(path)) == _SUMMED:
            yield from module.parameters()
    yield from sharded_adapters(model)


def _style_of(model: PreTrainedModel, *names: str) -> str | None:
    """Return the style that a plan has for the first of these names that it has."""
    style_name = next((style for name in names if (style := model.tp_plan.get(_pattern(name))) is not None), None)
    return None if style_name == _SUMMED else style_name


def _style(name: str) -> Any:
    return SharedBias() if name == _EXPERTS else ALL_PARALLEL_STYLES[name]


def _pattern(name: str) -> str:
    pattern: str = replace_layer_number_by_wildcard(name)
    return pattern


def _check_even(name: str, before: torch.Tensor, after: nn.Parameter) -> None:
    if not isinstance(after, DTensor):
        return
    (where,), num_ranks = after.placements, after.device_mesh.size()
    unit = num_ranks * getattr(where, "split_factor", 1)
    if not where.is_replicate() and before.shape[where.dim] % unit:  # type: ignore[attr-defined]
        problem = f"expected a divisor of the sizes {list(before.shape)} of {name}, found {num_ranks}"
        raise UsageError("--tp", problem, code="options.tp-divisor")
