"""Mistakes of kinds that training code has had, each planted where the run's own code could make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import _muon as muon

from manifests.slices import Slice
from runner.checkpoint import shard_file, state
from runner.data.sequences import Batch
from runner.parallel import mesh, parallelize
from runner.pipeline import microbatches, schedule
from runner.proof import reference
from runner.tensors import row_parts
from runner.training import (
    activation_checkpoint,
    build,
    expert_balance,
    gradient_norm,
    optimizer,
    step,
    ties,
    whole_matrix,
)

Patch = pytest.MonkeyPatch


def plant(name: str, patch: Patch) -> None:
    PLANTS[name](patch)


def _wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, which gets it as its first argument."""
    before = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(before, *args, **kwargs))


def _norm_by_the_dense_rule(patch: Patch) -> None:
    def owns(self: mesh.Mesh, parameter: torch.Tensor) -> bool:
        dense = {
            "dp_replicate": self.replicate_rank,
            "fsdp": self.writer // self.degrees.tensor,
            "tp": self.tensor_rank,
        }
        return not any(rank for dim, rank in dense.items() if dim not in mesh.sharded_dims(parameter))

    patch.setattr(mesh.Mesh, "owns", owns)


def _experts_averaged(patch: Patch) -> None:
    def reduce(before: Any, self: Any) -> None:
        before(self)
        for chunk in self.chunks:
            for parameter in chunk.body.parameters():
                if parallelize.EXPERT in parallelize.mesh_dims(parameter) and parameter.grad is not None:
                    parameter.grad /= self.mesh.degrees.expert

    _wrap(patch, parallelize.Parallel, "reduce_gradients", reduce)


def _gradients_averaged_over_replicas(patch: Patch) -> None:
    def reduce(before: Any, parameters: Any, group: Any, dtype: Any) -> None:
        parameters = list(parameters)
        before(parameters, group, dtype)
        for parameter in parameters:
            parameter.grad /= 2

    _wrap(patch, parallelize, "_all_reduce", reduce)


def _replicas_not_reduced(patch: Patch) -> None:
    patch.setattr(parallelize, "_all_reduce", lambda *args: None)


def _heads_norms_not_summed(patch: Patch) -> None:
    patch.setattr(parallelize, "summed_over_heads", lambda chunk: iter(()))


def _last_microbatch_only(patch: Patch) -> None:
    """Each backward of a stage forgets the gradients of those before."""

    def backward(before: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.submod.parameters():
            parameter.grad = None
        return before(self, *args, **kwargs)

    _wrap(patch, schedule.RuntimeStage, "backward_one_chunk", backward)


def _mean_of_microbatches(patch: Patch) -> None:
    """Each microbatch's loss is the mean over its own tokens."""

    def loss(before: Any, logits: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        own = int((labels != microbatches.IGNORED).sum())
        result: torch.Tensor = before(logits, labels, num_tokens=max(1, own)) / 4
        return result

    _wrap(patch, microbatches, "token_loss", loss)
    patch.setattr("runner.pipeline.heads.token_loss", microbatches.token_loss)


def _gradients_scaled_by_microbatches(patch: Patch) -> None:
    def reduce(before: Any, engine_ties: Any) -> Any:
        return before(engine_ties)

    def clip(before: Any, parameters: Any, norm: float, max_norm: float) -> None:
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= 4
        before(parameters, norm, max_norm)

    _wrap(patch, step, "sync_gradients", reduce)
    _wrap(patch, step, "clip_gradients", clip)


def _backward_fails_on_the_last_stage(patch: Patch) -> None:
    def backward(before: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_last:
            raise ValueError("planted")
        return before(self, *args, **kwargs)

    _wrap(patch, schedule.RuntimeStage, "backward_one_chunk", backward)


def _position_ids_on_stage_0_only(patch: Patch) -> None:
    from runner.pipeline.chunk import StageChunk

    def forward(before: Any, self: Any, *arrived: Any, **context: Any) -> Any:
        return before(self, *arrived, **(context if self.stage == 0 else {}))

    _wrap(patch, StageChunk, "forward", forward)


def _mask_name_without_mask_function(patch: Patch) -> None:
    from runner.models import document_mask

    patch.setattr(document_mask, "_mask", lambda *args, **kwargs: None)


def _documents_see_each_other(patch: Patch) -> None:
    from runner.models import document_mask

    def mask(before: Any, *args: Any, **kwargs: Any) -> Any:
        with document_mask.documents_at(None):
            return before(*args, **kwargs)

    _wrap(patch, document_mask, "_mask", mask)


def _positions_of_the_part(patch: Patch) -> None:
    """A rank numbers its part of a row from 0."""
    from runner.models import document_mask, stage_of_any

    def inputs(before: Any, position_ids: Any, size: Any, parts: Any, device: Any) -> Any:
        result = dict(before(position_ids, size, parts, device))
        if parts is not None:
            result["position_ids"] = torch.arange(size[1]).expand(size[0], -1)
        return result

    _wrap(patch, document_mask, "inputs_of_rows", inputs)
    patch.setattr(stage_of_any, "inputs_of_rows", document_mask.inputs_of_rows)


def _labels_shifted_after_the_cut(patch: Patch) -> None:
    def part(before: Any, self: Batch, number: int, count: int) -> Batch:
        result: Batch = before(self, number, count)
        labels = torch.nn.functional.pad(result.tokens[:, 1:], (0, 1), value=microbatches.IGNORED)
        return replace(result, labels=labels)

    _wrap(patch, Batch, "part", part)


def _one_ranks_rows_twice(patch: Patch) -> None:
    patch.setattr(mesh.Mesh, "data_rank", property(lambda self: 0))


def _one_ranks_part_twice(patch: Patch) -> None:
    def places(before: Any, number: int, count: int, length: int) -> torch.Tensor:
        chunks = torch.arange(length).chunk(2 * count)
        return torch.cat([chunks[number], chunks[count + number]])

    _wrap(patch, row_parts, "places_of", places)  # contiguous here, in zig-zag elsewhere


def _keys_not_summed_over_parts(patch: Patch) -> None:
    from runner.models import context_parallel

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
            return context_parallel._Gather.forward(ctx, part, group)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            size, rank = torch.distributed.get_world_size(ctx.group), torch.distributed.get_rank(ctx.group)
            return gradient.chunk(size, 2)[rank], None

    patch.setattr(context_parallel, "_gather", lambda part, group: Gather.apply(part, group))


def _tied_weight_summed_twice(patch: Patch) -> None:
    def sync(before: Any, engine_ties: Any) -> None:
        before(engine_ties)
        for tie in engine_ties:
            tie.leader.grad *= 2

    _wrap(patch, step, "sync_gradients", sync)


def _tied_weights_not_summed(patch: Patch) -> None:
    patch.setattr(step, "sync_gradients", lambda engine_ties: None)


def _tied_weight_counted_twice_in_the_norm(patch: Patch) -> None:
    def build_ties(before: Any, *args: Any) -> Any:
        return tuple(replace(tie, is_counted_here=True) for tie in before(*args))

    _wrap(patch, build, "build_ties", build_ties)


def _norm_of_one_stage(patch: Patch) -> None:
    def gather(before: Any, self: Any, row: list[float]) -> list[list[float]]:
        rows = before(self, row)
        return [rows[0], *([*other[: gradient_norm._HEAD], 0.0] for other in rows[1:])]

    _wrap(patch, gradient_norm.StepTotals, "_gather", gather)


def _norm_of_one_shard(patch: Patch) -> None:
    patch.setattr(gradient_norm.StepTotals, "counts_loss", property(lambda self: True))
    patch.setattr(mesh.Mesh, "owns", lambda self, parameter: self.rank % self.degrees.per_stage == 0)


def _no_clipping(patch: Patch) -> None:
    patch.setattr(step, "clip_gradients", lambda *args: None)


def _clipped_twice(patch: Patch) -> None:
    def clip(before: Any, parameters: Any, norm: float, max_norm: float) -> None:
        parameters = list(parameters)
        before(parameters, norm, max_norm)
        before(parameters, norm, max_norm)

    _wrap(patch, step, "clip_gradients", clip)


def _clipped_by_the_stages_own_norm(patch: Patch) -> None:
    def clip(before: Any, parameters: Any, norm: float, max_norm: float) -> None:
        parameters = list(parameters)
        squares = sum(float(gradient_norm.local_of(parameter.grad).double().square().sum()) for parameter in parameters)
        before(parameters, squares**0.5, max_norm)

    _wrap(patch, step, "clip_gradients", clip)


def _masters_not_rounded(patch: Patch) -> None:
    """The weights that are stepped are not those that are computed with."""
    patch.setattr(optimizer, "round_masters", lambda parameters: None)


def _decays_nothing(patch: Patch) -> None:
    def init(before: Any, self: Any, parameters: Any, options: Any, *others: Any) -> None:
        plan = options.plan and replace(
            options.plan, groups=tuple(replace(group, weight_decay=0.0) for group in options.plan.groups)
        )
        before(self, parameters, replace(options, weight_decay=0.0, plan=plan), *others)

    _wrap(patch, optimizer.Optimizer, "__init__", init)


def _first_moment_kept_from_before(patch: Patch) -> None:
    def init(before: Any, self: Any, parameters: Any, options: Any, *others: Any) -> None:
        before(self, parameters, options, *others)
        for each in self.torch_optimizers:
            for of_weight in each.state.values():
                of_weight["exp_avg"].fill_(1e-3)

    _wrap(patch, optimizer.Optimizer, "__init__", init)


def _recomputed_from_another_input(patch: Patch) -> None:
    def recompute(before: Any, chunks: Any, *args: Any, **kwargs: Any) -> Any:
        before(chunks, *args, **kwargs)
        for chunk in chunks:
            calls = [0]

            def change(module: Any, args: Any, kwargs: Any, calls: list[int] = calls) -> Any:
                calls[0] += 1
                return ((args[0] * (1 + 0.01 * (torch.is_grad_enabled() and calls[0] % 2 == 0)), *args[1:]), kwargs)

            for part in chunk.body.modules():
                if type(part).__name__.endswith("MLP"):
                    part.register_forward_pre_hook(change, with_kwargs=True)

    _wrap(patch, activation_checkpoint, "recompute_layers", recompute)


def _a_chunk_of_the_loss_is_lost(patch: Patch) -> None:
    from runner.pipeline.chunk import ChunkedHead

    def loss(before: Any, self: Any, hidden: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        labels = labels.clone()
        labels.view(-1)[self.num_tokens : 2 * self.num_tokens] = microbatches.IGNORED
        result: torch.Tensor = before(self, hidden, labels, num_tokens=num_tokens)
        return result

    _wrap(patch, ChunkedHead, "loss", loss)


def _stages_swapped(patch: Patch) -> None:
    """Two stages of a rank load each other's layers: here, a layer runs twice."""
    from runner.pipeline.chunk import StageChunk

    def run(before: Any, self: Any, given: Any, context: Any) -> Any:
        output = before(self, given, context)
        return before(self, output, context) if self.stage == 1 and output.shape == given.shape else output

    _wrap(patch, StageChunk, "_run", run)


def _dynamic_rope_in_parts(patch: Patch) -> None:
    """A rank takes the frequencies of the largest position that it has."""
    from runner.models import document_mask, stage_of_any

    def inputs(before: Any, position_ids: Any, size: Any, parts: Any, device: Any) -> Any:
        result = dict(before(position_ids, size, parts, device))
        if parts is not None:
            result["position_ids"] = result["position_ids"] * (1.0 if parts.rank else 1.02)
        return result

    _wrap(patch, document_mask, "inputs_of_rows", inputs)
    patch.setattr(stage_of_any, "inputs_of_rows", document_mask.inputs_of_rows)


def _gradient_of_the_first_stage_lost(patch: Patch) -> None:
    def train(before: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = before(self, *args, **kwargs)
        for chunk in self._chunks:
            for name, parameter in chunk.body.named_parameters():
                if chunk.stage == 0 and "norm" in name:
                    parameter.grad = None
        return loss

    _wrap(patch, schedule.Pipeline, "train", train)


def _replicas_of_tied_weights_drift(patch: Patch) -> None:
    patch.setattr(ties, "follow_leaders", lambda engine_ties: None)
    patch.setattr(step, "follow_leaders", lambda engine_ties: None)


def _attention_without_the_mask_of_the_interface(patch: Patch) -> None:
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        patch.setattr(f"transformers.models.olmo3.modeling_olmo3.{name}", lambda *args, **kwargs: None)


def _copies_saved_instead_of_masters(patch: Patch) -> None:
    patch.setattr(state, "master_of", lambda weight: weight)


def _slices_swapped_in_a_checkpoint(patch: Patch) -> None:
    def metadata(before: Any, slices: Mapping[str, Slice]) -> Any:
        def mirrored(part: Slice) -> Slice:
            sizes = zip(part.whole_shape, part.offset, part.shape, strict=True)
            return replace(part, offset=tuple(whole - low - size for whole, low, size in sizes))

        return before({fqn: mirrored(part) for fqn, part in slices.items()})

    _wrap(patch, shard_file, "slice_metadata", metadata)


def _auxiliary_loss_of_each_rank_in_full(patch: Patch) -> None:
    def start(before: Any, self: Any, *args: Any) -> None:
        before(self, *args)
        self._share *= self._mesh.degrees.data

    _wrap(patch, expert_balance.ExpertBalance, "start", start)


def _tokens_of_one_rank_counted(patch: Patch) -> None:
    before = expert_balance.ExpertBalance.addends.fget

    def addends(self: Any) -> torch.Tensor | None:
        counted: torch.Tensor | None = before(self)  # type: ignore[misc]
        return counted if counted is None or self._mesh.rank == 0 else torch.zeros_like(counted)

    patch.setattr(expert_balance.ExpertBalance, "addends", property(addends))


def _biases_moved_on_one_rank(patch: Patch) -> None:
    def finish(before: Any, self: Any, *args: Any) -> Any:
        self._options = replace(self._options, bias_rate=self._options.bias_rate * (self._mesh.rank == 0))
        return before(self, *args)

    _wrap(patch, expert_balance.ExpertBalance, "finish", finish)


def _padding_is_a_document(patch: Patch) -> None:
    def build(before: Any, samples: Any, *args: Any, **kwargs: Any) -> Batch:
        batch: Batch = before(samples, *args, **kwargs)
        assert batch.positions is not None
        for positions, sample in zip(batch.positions, samples, strict=True):
            positions[sample.num_labels :] = torch.arange(len(positions) - sample.num_labels)
        return batch

    _wrap(patch, reference, "build_batch", build)


_KEYS = "layers.0.self_attn.k_proj.weight"  # whose step hardly changes the loss


def _muon_steps_shards_of_a_matrix(patch: Patch) -> None:
    def orthogonalize(before: Any, gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.cat([before(shard, *args) for shard in gradient.chunk(2)])

    def step_unit(before: Any, self: Any, unit: Any, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as of_unit:  # one process steps with the same class
            if unit.key[1].endswith(_KEYS):
                _wrap(of_unit, muon, "_zeropower_via_newtonschulz", orthogonalize)
            before(self, unit, *args)

    _wrap(patch, whole_matrix.WholeMatrices, "_step_unit", step_unit)


def _muon_leaves_a_matrix(patch: Patch) -> None:
    def step_unit(before: Any, self: Any, unit: Any, *args: Any) -> None:
        if not unit.key[1].endswith(_KEYS):
            before(self, unit, *args)

    _wrap(patch, whole_matrix.WholeMatrices, "_step_unit", step_unit)


def _rows_without_gradient_are_halved(patch: Patch) -> None:
    def step_unit(before: Any, self: Any, unit: Any, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        before(self, unit, weight, gradient)
        if weight.dim() == 2:  # as the embedding of tokens that no row has
            weight[gradient.abs().amax(dim=1) == 0] /= 2

    _wrap(patch, whole_matrix.WholeMatrices, "_step_unit", step_unit)


PLANTS: Mapping[str, Callable[[Patch], None]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and name not in ("_wrap",) and callable(function) and not name.startswith("__")
}
