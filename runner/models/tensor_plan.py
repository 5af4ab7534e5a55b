"""Tensor and expert parallelism of a decoder of transformers, by the plans that transformers has for it.

# Note [Plans of transformers]
`base_model_tp_plan` of a config class names a style for each module and bare parameter that is sharded. transformers
places the parameters and wraps the forwards, except that
- embeddings, and heads that are tied to them, are whole on every rank;
- gradients of parameters that every rank has, and that cover its own heads only, are summed once per step
  (Note [One reduction a step]): transformers would sum what was accumulated after each microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from manifests.errors import UsageError
from runner.models.regions import Region
from runner.tensors.dtensor import packed_dim

_SUMMED = "replicated_with_grad_allreduce"
_LATENT = "mla_kv_a_proj"


def shard_by_plan(model: PreTrainedModel, mesh: DeviceMesh, *, whole: Collection[nn.Module]) -> None:
    """Shard a model, which is on the meta device, over the ranks of a mesh, except for the modules in `whole`.

    Raises:
        UsageError: the number of ranks does not divide a dimension that the plan shards.
    """
    for path, module in list(model.named_modules()):
        if module in whole:
            continue
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if (style := _style_of(model, f"{path}.{leaf}", path)) is not None:
                ALL_PARALLEL_STYLES[style].shard_param(module, leaf, mesh)
                _check_even(f"{path}.{leaf}", parameter, module.get_parameter(leaf))
        if (style := _style_of(model, path)) is not None:
            if style == _LATENT:
                module.config = model.config.get_text_config()  # which that style reads
            ALL_PARALLEL_STYLES[style].install_forward(module, mesh)


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


def _style_of(model: PreTrainedModel, *names: str) -> str | None:
    """Return the style that a plan has for the first of these names that it has."""
    style_name = next((style for name in names if (style := model.tp_plan.get(_pattern(name))) is not None), None)
    return None if style_name == _SUMMED else style_name


def _pattern(name: str) -> str:
    pattern: str = replace_layer_number_by_wildcard(name)
    return pattern


def _check_even(name: str, before: nn.Parameter, after: nn.Parameter) -> None:
    if not isinstance(after, DTensor):
        return
    (where,), num_ranks = after.placements, after.device_mesh.size()
    unit = num_ranks * getattr(where, "split_factor", 1)
    if not where.is_replicate() and before.shape[where.dim] % unit:  # type: ignore[attr-defined]
        problem = f"expected a divisor of the sizes {list(before.shape)} of {name}, found {num_ranks}"
        raise UsageError("--tp", problem, code="options.tp-divisor")
