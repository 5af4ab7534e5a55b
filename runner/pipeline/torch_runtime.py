"""torch's pipeline stage and schedule runtime. The only file that uses torch.distributed.pipelining.

# Note [Releases of torch]
Stages and runtime are private in part, and change between releases. `Adapter` states what this file uses of them that
not every supported release has; the one for the installed torch is chosen by what torch has, not by its version, so
that a build from source, or a later release with the same interface, works too.

torch 2.15 tracks sends: each requires a `WAIT_SEND_F` or `WAIT_SEND_B` after it, and a step fails if one is missing.
Our stages wait for their sends themselves (Note [Waiting for sends]), so a wait follows each send at once: it blocks
for nothing, and lets torch forget the activation, of which the send keeps the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from manifests.schedules.actions import LoweredTable, TracedKind
from runner.distributed.world import exchange_device
from runner.pipeline.chunk import StageChunk
from runner.profiling.trace import Recorder
from runner.tensors.heap import return_holes


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """What the private interface of a release has; see Note [Releases of torch]."""

    since: str  # the first release with this interface
    forwards: str  # the attribute of a stage with what it keeps of its forwards until their backwards
    waits_for_sends: bool  # whether a table must have a wait for every send

    def actions(self, steps: Iterable[object]) -> Iterator[str]:
        """Yield the actions of a table's steps, as torch writes them."""
        for step in steps:
            yield (text := str(step))
            if self.waits_for_sends and "SEND_" in text:
                yield text.replace("SEND_", "WAIT_SEND_")


ADAPTERS = (
    Adapter(since="2.13", forwards="fwd_cache", waits_for_sends=False),
    Adapter(since="2.15", forwards="_forward_chunk_states", waits_for_sends=True),
)
ADAPTER = ADAPTERS[int(hasattr(schedules, "WAIT_SEND_F"))]  # of the installed torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sent:
    """A send that may not have arrived, and the output of which it is; None: a gradient, or in an evaluation."""

    microbatch: int
    works: list[dist.Work]
    output: Any


class RuntimeStage(PipelineStage):
    """A stage that has in memory what the schedule still needs, where torch's has every microbatch until a step ends.

    Where ranks share a GPU, and so use gloo, it sends and receives through host memory (`is_through_host`).

    # Note [Tensors of other ranks]
    torch allocates a buffer for every microbatch in both directions when it prepares a stage. Here it gets meta tensors
    in their place. Memory is allocated when a receive starts, and given up when the microbatch's B or W has run, which
    may recompute from the input and read the gradient of the output. `manifests.schedules.liveness` counts by the same
    rule. The allocator reuses the memory; buffers of our own would be overwritten where a gradient that autograd
    accumulated is a view of one.

    # Note [Waiting for sends]
    Before a stage computes another result, all but the last one must have arrived, so two are in memory at once
    (`manifests.models.memory.MOST_IN_TRANSIT`). That cannot deadlock the pipeline: every send and its receive are
    added to the tables of both ranks together (see Note [Order of transfers] in manifests/schedules/lowering.py), so
    nothing that the receiver does before depends on what the sender does later.

    # Note [Outputs that were sent]
    autograd needs the node of an output and its shape until the backward, but not its values: an operation that saves
    its result saves a reference of its own. So an output's memory is replaced by one element, expanded to the shape. Of
    several outputs, one may be saved as another's input by reference, so they stay.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._examples = {"F": kwargs["input_args"], "B": kwargs["output_args"]}  # meta tensors, of what it receives
        self._outputs: dict[int, Any] = {}  # of forwards that are not sent yet
        self._sent: dict[str, deque[_Sent]] = {"F": deque(), "B": deque()}
        self._received: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}  # buffer, host memory
        self.recorder: Recorder | None = None
        self.is_through_host = exchange_device(self.device, self.group) != self.device

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_sends("F", but=1)
        self._from_host("F", fwd_chunk_id)
        with self._timed("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._outputs[fwd_chunk_id] = output
        else:
            self._free("F", fwd_chunk_id)
            if self.is_last or self.stage_index_to_group_rank[self.stage_index + 1] == self.group_rank:
                getattr(self, ADAPTER.forwards).clear()  # neither a send nor a backward needs them
        return_holes(self.device.type)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.wait_for_sends("B", but=1)
        self._outputs.pop(bwd_chunk_id, None)  # one that was not sent: of the last stage, or for one on this rank
        while any(sent.microbatch == bwd_chunk_id for sent in self._sent["F"]):  # has arrived: its gradient is here
            self.wait_for_sends("F", but=len(self._sent["F"]) - 1)
        self._from_host("B", bwd_chunk_id)
        with self._timed("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            if loss is not None:
                loss.detach_()  # its graph would keep the stage's input until torch clears its losses
            self._free("F", bwd_chunk_id)
            self._free("B", bwd_chunk_id)
        else:
            for info in self._infos("F", bwd_chunk_id):
                if info.buffer is not None:
                    info.buffer.grad = None  # what is sent would stay in memory until W
        return_holes(self.device.type)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._timed("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            cast(StageChunk, self.submod).accumulate()
        self._free("F", bwd_chunk_id)
        self._free("B", bwd_chunk_id)
        return_holes(self.device.type)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate("F", fwd_chunk_id)
        return self._receive("F", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate("B", bwd_chunk_id)
        return self._receive("B", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._allocate("B", mb_index)  # torch sets it to zero
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._send("F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))
        if not self.has_backward:
            getattr(self, ADAPTER.forwards).clear()
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def wait_for_sends(self, kind: str, *, but: int = 0) -> None:
        """Wait until all but the last `but` activations, F, or gradients, B, have arrived; free the activations."""
        sent = self._sent[kind]
        while len(sent) > but:
            first = sent.popleft()
            for work in first.works:
                work.wait()
            if type(first.output) is torch.Tensor:  # see Note [Outputs that were sent]
                first.output.data = first.output.new_empty(1).expand(first.output.shape)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Let torch prepare this stage without memory; see Note [Tensors of other ranks]."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _infos(self, kind: str, microbatch: int) -> Sequence[Any]:
        """Return what torch knows of each tensor that a microbatch's forward, F, or backward, B, takes."""
        return (self.args_recv_info if kind == "F" else self.grad_recv_info).get(microbatch, ())

    def _allocate(self, kind: str, microbatch: int) -> None:
        for info, example in zip(self._infos(kind, microbatch), self._examples[kind], strict=False):
            if info.buffer is not None:
                info.buffer = torch.empty_like(example, device=self.device)

    def _free(self, kind: str, microbatch: int) -> None:
        for info, example in zip(self._infos(kind, microbatch), self._examples[kind], strict=False):
            if info.buffer is not None:
                info.buffer = example

    def _timed(self, kind: TracedKind, microbatch: int) -> AbstractContextManager[None]:
        return self.recorder.action(kind, self.stage_index, microbatch) if self.recorder else nullcontext()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops = super()._get_init_p2p_neighbors_ops()
        self._replace_by_host_memory(ops)
        return ops

    def _receive(self, kind: str, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self._received[kind, microbatch] = self._replace_by_host_memory(ops)
        return ops

    def _from_host(self, kind: str, microbatch: int) -> None:
        """Copy what was received for a microbatch into torch's buffers."""
        for buffer, host in self._received.pop((kind, microbatch), ()):
            buffer.detach().copy_(host)

    def _send(self, kind: str, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self._replace_by_host_memory(ops)
        works = [op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]
        output = self._outputs.pop(microbatch, None) if kind == "F" else None
        self._sent[kind].append(_Sent(microbatch=microbatch, works=works, output=output))
        return []  # nothing is left to send

    def _replace_by_host_memory(self, ops: Iterable[dist.P2POp]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Send or receive a copy of each tensor, if ranks exchange host memory; return the pairs."""
        replaced = []
        for op in ops if self.is_through_host else ():
            replaced.append((op.tensor, op.tensor.to("cpu", copy=True)))
            op.tensor = replaced[-1][1]
        return replaced


def backward_input(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    module: torch.nn.Module,
) -> Callable[[], object]:
    """Add to `.grad` of the inputs, as the first part of a split backward; return the second, that of the weights."""
    _, groups = stage_backward_input(list(outputs), list(gradients), list(inputs), module.parameters())  # type: ignore[arg-type]
    return lambda: stage_backward_weight(module.parameters(), groups)


def runtime_of(stages: Sequence[PipelineStage], table: LoweredTable, loss: Callable[..., torch.Tensor] | None) -> Any:
    """Build torch's runtime with our table, which is validated; torch's own checks would require backwards."""
    # See Note [Loss over tokens].
    runtime: Any = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), table.num_microbatches, loss_fn=loss, scale_grads=False
    )
    ranks = {stage: table.placement.rank_of(stage) for stage in range(table.placement.num_stages)}
    runtime.stage_index_to_group_rank = ranks
    for stage in stages:
        stage.stage_index_to_group_rank = ranks
    runtime.pipeline_order_with_comms = {
        rank: [_Action.from_str(action) for action in ADAPTER.actions(steps)] for rank, steps in enumerate(table.ranks)
    }
    return runtime
