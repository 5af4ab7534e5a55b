"""Tensor and expert parallelism by plans in the styles of transformers: its own, and those of other families.

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

from manifests.errors import ModelError, UsageError
from manifests.models.mtp import EMBEDDING, HEAD
from runner.models.adapters import sharded_adapters, split_adapters
from runner.models.family import Plan
from runner.models.regions import Region
from runner.tensors.dtensor import packed_dim

_SUMMED = "replicated_with_grad_allreduce"
_LATENT = "mla_kv_a_proj"
_ROWS = "embedding_rowwise"
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
    plan = dict(PLANS.get(model.config.get_text_config().model_type, {}))
    if (head := model.tp_plan.get("lm_head")) is not None:
        plan |= {EMBEDDING: _ROWS, HEAD: head}  # copies in MTP layers
    model._tp_plan = {**model.tp_plan, **{f"{layers}.*.{name}": style for name, style in plan.items()}}


def plans_of(tp_plan: Mapping[str, str], ep_plan: Mapping[str, str]) -> tuple[Plan, ...]:
    """Return the kinds of these plans that are not empty."""
    kinds: tuple[tuple[Plan, Mapping[str, str]], ...] = (("tp", tp_plan), ("ep", ep_plan))
    return tuple(kind for kind, plan in kinds if plan)


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    embedding: nn.Module,
    whole: Collection[nn.Module],
    regions: Mapping[str, tuple[Region, ...]],
) -> None:
    """Shard a model by its own plan, except for the modules in `whole`; its embedding of tokens by the vocabulary."""
    if isinstance(embedding, nn.Embedding):
        _shard_vocabulary(embedding, mesh)
    shard_by_plan(model, model.tp_plan, mesh, whole=whole)
    check_packed(model, regions)


def distribute_model(model: PreTrainedModel, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
    """Distribute the experts of a model by its own plan, and leave them out of its plan of tensor parallelism."""
    distribute_experts(model, model.ep_plan, mesh, tensor_mesh)
    model._tp_plan = without_experts(model.tp_plan, model.ep_plan)


def shard_by_plan(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, *, whole: Collection[nn.Module] = ()
) -> None:
    """Shard a model, which is on the meta device, over the ranks of a mesh, except for the modules in `whole`."""
    for path, module in list(model.named_modules()):
        if module in whole:
            continue
        if isinstance(module, nn.Embedding) and _style_of(plan, path) == _ROWS:
            _shard_vocabulary(module, mesh)
            continue
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if (style := _style_of(plan, f"{path}.{leaf}", path)) is not None:
                _style(style).shard_param(module, leaf, mesh)
                _check_even(f"{path}.{leaf}", parameter, module.get_parameter(leaf))
        if (style := _style_of(plan, path)) is not None:
            if style == _LATENT:
                module.config = getattr(model, "config").get_text_config()  # noqa: B009 # which that style reads
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


def check_packed(model: nn.Module, regions: Mapping[str, tuple[Region, ...]] | None = None) -> None:
    """Refuse a tensor of files with several of the matrices that are packed into a parameter, each of them sharded.

    A rank has rows of each, and so several regions of such a tensor. Without `regions`, files have parameters as they
    are.
    """
    for name, parameter in model.named_parameters():
        if (packed := packed_dim(parameter)) is not None:
            dim, count = packed
            if regions is None or any(region.sizes[dim] > parameter.shape[dim] // count for region in regions[name]):
                problem = "files have several matrices, each of which would be sharded, in one tensor"
                raise UsageError("--tp", problem, code="options.tp-architecture")


def distribute_experts(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
    """Distribute the experts of a model, which is on the meta device, over the ranks of a mesh, by a plan.

    "all_to_all" is named because transformers' own choice depends on whether gradients are needed, and its "all_reduce"
    leaves out collectives of the backward on a rank that no token is for.
    """
    names = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    here = {name: plan[_pattern(name)] for name in names if _pattern(name) in plan}
    apply_expert_parallelism(model, mesh, tensor_mesh, here, "all_to_all")
    split_adapters(model)


def without_experts(plan: Mapping[str, str], experts: Collection[str]) -> dict[str, str]:
    """Return a plan of tensor parallelism without what a plan of experts has rules for."""
    inside = tuple(f"{name}." for name in experts)
    return {rule: style for rule, style in plan.items() if rule not in experts and not rule.startswith(inside)}


def summed_by_plan(model: nn.Module, plan: Mapping[str, str]) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients on a rank cover only its own heads."""
    for path, module in model.named_modules():
        if plan.get(_pattern(path)) == _SUMMED:
            yield from module.parameters()
    yield from sharded_adapters(model)


def check_plan(plan: Mapping[str, str], model: nn.Module, where: str) -> None:
    """Check that each rule of a plan names a style that there is, and something in a whole model."""
    names = {_pattern(name) for name, _ in (*model.named_parameters(), *model.named_modules())}
    for rule, style in plan.items():
        if rule not in names:
            problem = f"nothing in {type(model).__name__} has the name {rule}, which a plan of its family has"
        elif style not in ALL_PARALLEL_STYLES:
            problem = f"expected a style of transformers for {rule}, found {style!r}"
        else:
            continue
        hint = "write * for the number of a layer; docs/own-models.md shows a plan"
        raise ModelError(where, problem, hint, code="model.family-plan")


def _style_of(plan: Mapping[str, str], *names: str) -> str | None:
    """Return the style that a plan has for the first of these names that it has."""
    style_name = next((style for name in names if (style := plan.get(_pattern(name))) is not None), None)
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
