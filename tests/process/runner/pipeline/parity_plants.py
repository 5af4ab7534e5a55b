"""Known mistakes, made on purpose around the runner's own code, to see that the comparison finds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import _defer_recv_ops
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from manifests.schedules.actions import Table
from runner.config.schema import BatchOptions
from runner.data.sequences import IGNORED, Batch
from runner.pipeline.chunk import StageChunk, hf_pieces
from runner.pipeline.runtime import Lane, Pipeline, Purpose
from runner.pipeline.stage_io import Form, StageIO
from runner.training.optimizer import Optimizer
from runner.training.ties import Tie
from tests.process.runner.pipeline.parity_cases import BATCH, Plant

_EXPERT = re.compile(r"\.layers\.2\..*\.experts\.3\.")  # its tensors in files, of several families


class ScaledGradients(Pipeline):
    """torch divides gradients by the number of microbatches once more."""

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        lane = super().build_lane(purpose, cut)
        lane.runtime.scale_grads = True
        return lane


class MeanPerMicrobatch(Pipeline):
    """The mean over the microbatches of each one's mean over its valid tokens."""

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        def loss(logits: torch.Tensor, rows: torch.Tensor, *, batch: Batch) -> torch.Tensor:
            labels = batch.rows(int(rows[0]), len(rows)).labels
            mean = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            return mean / cut.num_microbatches

        lane = super().build_lane(purpose, cut)
        lane.runtime._loss_fn = loss
        return lane


class DeferredReceives(Pipeline):
    """torch's own `defer_pp_recv=True`."""

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        lane = super().build_lane(purpose, cut)
        lane.runtime.pipeline_order_with_comms = _defer_recv_ops(
            lane.runtime.pipeline_order_with_comms, self._timetable.placement.rank_of
        )
        return lane


class UncheckedForm(Form):
    """Hands on whatever comes."""

    __slots__ = ()

    def pack(self, handed_on: Any, arrived: Any = ()) -> Any:
        return handed_on


class StaleShapes(Pipeline):
    """One set of buffers for every shape, nothing that checks, and labels filled up to fit."""

    def evaluate(self, batch: Batch | None, cut: BatchOptions | None = None) -> float | None:
        if batch is not None:
            missing = BATCH.seq_len - batch.labels.shape[1]
            batch = replace(batch, labels=nn.functional.pad(batch.labels, (0, missing), value=IGNORED))
        return super().evaluate(batch, cut)

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        if purpose != "evaluate":
            return super().build_lane(purpose, cut)
        known = [lane for (kind, _), lane in self._lanes.items() if kind == purpose]
        if known:
            return known[0]
        lane = super().build_lane(purpose, cut)
        return replace(
            lane,
            stage_ios=tuple(
                StageIO(
                    inputs=crossing.inputs,
                    outputs=UncheckedForm(tree=crossing.outputs.tree, leaves=crossing.outputs.leaves),
                )
                for crossing in lane.stage_ios
            ),
        )


class ThroughHost(Pipeline):
    """No mistake: stages exchange copies of their tensors, as ranks do that share a GPU."""

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        lane = super().build_lane(purpose, cut)
        for stage in lane.stages:
            stage.is_through_host = True
        return lane


class DataParallel(Pipeline):
    """Stages under torch's wrapper for data parallelism, whose hooks a backward in two parts never calls."""

    replicas: dist.ProcessGroup | None = None

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        lane = super().build_lane(purpose, cut)
        for stage in lane.stages:
            stage.submod = DistributedDataParallel(stage.submod, process_group=self.replicas)
        return lane


PIPELINES: dict[Plant, type[Pipeline]] = {
    "scale_grads": ScaledGradients,
    "mean_per_microbatch": MeanPerMicrobatch,
    "stale_shapes": StaleShapes,
    "defer_pp_recv": DeferredReceives,
    "through_host": ThroughHost,
}


def forwards_last_first(table: Table) -> Table:
    """Turn GPipe's forwards round: the backwards then go to losses that torch numbers otherwise."""
    half = table.num_microbatches
    return replace(table, ranks=tuple((*steps[:half][::-1], *steps[half:]) for steps in table.ranks))


class StepsFollowersToo(Optimizer):
    """An optimizer for each chunk: a weight that two chunks of a rank share is stepped by both."""

    def __init__(self, optimizer: Optimizer, ties: tuple[Tie, ...]) -> None:
        super().__init__(optimizer.parameters, optimizer.options)
        followed = [(tie.fqn, tie.leader) for tie in ties for _ in tie.members[1:]]
        self.other = Optimizer(followed, optimizer.options)

    def step(self, step: int) -> float:
        self.other.step(step)
        return super().step(step)


def drop_expert(chunks: Iterable[StageChunk]) -> None:
    """Leave an expert's part of a stacked parameter empty, as torchtitan's adapter does when a file lacks it."""
    for piece in (piece for chunk in chunks for piece in hf_pieces(chunk)):
        if _EXPERT.search(piece.fqn):
            piece.memory.zero_()


def stop_training_expert(chunks: Iterable[StageChunk]) -> None:
    """Lose an expert's gradients: every loss before the first step is right."""
    for chunk in chunks:
        for name, parameter in chunk.body.named_parameters():
            pieces = chunk.family.pieces(name, parameter.detach(), (0,) * parameter.dim())
            if any(_EXPERT.search(piece.fqn) for piece in pieces):
                parameter.register_hook(partial(_without_expert, chunk, name))


def _without_expert(chunk: StageChunk, name: str, gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    for piece in chunk.family.pieces(name, gradient, (0,) * gradient.dim()):
        if _EXPERT.search(piece.fqn):
            piece.memory.zero_()
    return gradient
