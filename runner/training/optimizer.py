"""The optimizer of one rank's parameters, by groups, and the learning-rate schedule: a pure function of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from manifests.errors import CheckpointError, UsageError
from manifests.optimizer_state import EMA, GroupNumbers
from manifests.schedules.learning_rate import rate_at
from manifests.schema import OptimizerState, ParameterGroup, StateKind
from manifests.trained import STEPS_NAME
from runner.config.schema import OptimOptions
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import NamedParameter, StageChunk, pieces_of
from runner.tensors.dtensor import local_of
from runner.tensors.local_shard import Piece
from runner.training.algorithms import Algorithm, algorithms_of, num_steps_of, prepare_state, set_num_steps
from runner.training.mixed_precision import master_of, round_masters, zero_gradient
from runner.training.whole_matrix import Guard, WholeMatrices


class Optimizer:
    """Steps each parameter once; `parameters` pairs each with its Hugging Face FQN.

    The optimizer state exists from the start, as zeros, so that a checkpoint can be loaded into it. Elementwise
    algorithms step each rank's part of a parameter; for the others see Note [Whole tensors]: `chunks` have the
    parameters. `ties` lists the FQNs of tied ones, which are in the group of the first.

    Constructing it is a collective of the replica. What may fail on one rank alone runs inside `guard`.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        options: OptimOptions,
        chunks: Sequence[StageChunk] = (),
        mesh: Mesh | None = None,
        ties: Sequence[Sequence[str]] = (),
        guard: Guard = nullcontext,
    ) -> None:
        self.parameters, self.options, self._mesh, self._chunks = tuple(parameters), options, mesh, tuple(chunks)
        with guard():
            self.plan = options.plan or plain_adamw(parameters, options)
            self.algorithms = algorithms_of(self.plan)
            group_numbers = GroupNumbers(self.plan.groups, ties)
            self._numbers = {id(parameter): group_numbers.of(fqn) for fqn, parameter in parameters}
            self._weights = {id(parameter): local_of(master_of(parameter)) for _, parameter in parameters}
            _check_groups(chunks, self._numbers, group_numbers, self.algorithms)
            numbers = self._numbers.items()
            whole = {key: number for key, number in numbers if not self.algorithms[number].is_elementwise}
            self._by_group: dict[int, torch.optim.Optimizer] = {}
            for number, algorithm in enumerate(self.algorithms):
                weights = [self._weights[key] for key, of in numbers if of == number and key not in whole]
                if weights:  # torch refuses an empty list; a stage may have no parameters
                    self._by_group[number] = algorithm.make(weights, algorithm.scale_rate(options.lr))
                    for weight in weights:
                        prepare_state(algorithm, self._by_group[number], weight)
            # In float32 at least: in bfloat16, steps of an average towards a weight are lost.
            self._averages = {
                key: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
                for key, weight in self._weights.items()
                if self.plan.ema
            }
        self._whole: WholeMatrices | None = None
        if not all(algorithm.is_elementwise for algorithm in self.algorithms):
            group = mesh.replica if mesh else None
            self._whole = WholeMatrices(chunks, whole, self.algorithms, group, options.lr, guard)
        self._is_whole = whole.keys()
        self._skipped = set[int]()  # the ids of parameters that had no gradient in some step

    @property
    def torch_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The torch.optim.Optimizer of each group that has parameters on this rank."""
        return (*self._by_group.values(), *(self._whole.optimizers.values() if self._whole else ()))

    def steps(self, parameter: torch.Tensor) -> bool:
        """Whether this optimizer steps a parameter: of tied ones on a rank, it steps the first."""
        return id(parameter) in self._numbers

    def is_clipped(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is in a group whose gradients are clipped, and counted in their norm."""
        return not self.plan.groups[self._numbers[id(parameter)]].skips_clipping

    def state_of(self, parameter: torch.Tensor, kind: StateKind) -> torch.Tensor | None:
        """Return state that has the shape of a parameter, placed as it is; None if it has none of this kind."""
        key = id(parameter)
        if kind.name == EMA and self._averages:
            state: torch.Tensor | None = self._averages[key]
        elif key in self._is_whole:
            return None
        else:
            state = self._by_group[self._numbers[key]].state[self._weights[key]].get(kind.name)
        weight = master_of(parameter)
        if state is None or not isinstance(weight, DTensor) or kind.shape == "scalar":
            return state
        return DTensor.from_local(
            state, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    def tied_state(self, parameter: torch.Tensor, kind: StateKind) -> torch.Tensor | None:
        """Return this rank's part of a tied parameter's state; None if another rank owns it, or there is none."""
        if self._whole is None or id(parameter) not in self._is_whole or kind.name == EMA:
            return self.state_of(parameter, kind)
        return next((piece.memory for piece in self._whole.state_as("", parameter, kind)), None)

    def state_pieces(
        self,
        chunk: StageChunk,
        kind: StateKind,
        leaders: Mapping[int, torch.nn.Parameter] | None = None,
        is_written_here: Callable[[torch.Tensor], bool] | None = None,
    ) -> Iterator[Piece]:
        """Yield this rank's part of a chunk's state of one kind, by Hugging Face FQN, to load it or to save it.

        `leaders` are the parameters whose state tied ones have, by id; without them, those that follow have none.
        `is_written_here` chooses one of the ranks that have the same part, and None all of them.
        """
        is_first = is_written_here is None or self._mesh is None or self._mesh.replicate_rank == 0
        if self._whole is not None and is_first:
            yield from self._whole.state_on(chunk.stage, kind)
        for name, parameter in chunk.body.named_parameters():
            leader = (leaders or {}).get(id(parameter), parameter)
            if not self.steps(leader):
                continue
            if self._whole is not None and id(leader) in self._is_whole and leader is not parameter and is_first:
                yield from self._whole.state_as(chunk.family.to_hf(name), leader, kind)
            state = self.state_of(leader, kind)
            if state is None or (is_written_here is not None and not is_written_here(parameter)):
                continue
            if kind.shape != "scalar":
                yield from pieces_of(chunk, name, state)
                continue
            for piece in pieces_of(chunk, name, parameter):
                if is_written_here is None or piece.is_first:
                    yield Piece(fqn=piece.fqn, shape=(), offset=(), memory=state)

    def resume(self, num_steps: int, differing: Mapping[str, int] | None = None) -> None:
        """Set the step counts, after the optimizer state was loaded; `differing` has the others, by FQN.

        Raises:
            CheckpointError: of the tensors of files that are one parameter, some took another number of steps.
        """
        counts = self._counts_of(differing, num_steps) if differing else {}
        self._skipped |= counts.keys()
        for _, parameter in self.parameters:
            key = id(parameter)
            if key not in self._is_whole:
                number, count = self._numbers[key], counts.get(key, num_steps)
                set_num_steps(self.algorithms[number], self._by_group[number], self._weights[key], count)
        if self._whole is not None:
            self._whole.set_num_steps(num_steps, differing or {})

    def _counts_of(self, differing: Mapping[str, int], num_steps: int) -> dict[int, int]:
        """Return the step counts that are not `num_steps` of the parameters that this rank has a part of, by their ids.

        Raises:
            CheckpointError: as in `resume`.
        """
        counts: dict[int, int] = {}
        for chunk in self._chunks:
            for name, parameter in chunk.body.named_parameters():
                if not self.steps(parameter) or id(parameter) in self._is_whole:
                    continue
                of_pieces = {differing.get(piece.fqn, num_steps) for piece in pieces_of(chunk, name, parameter)}
                if len(of_pieces) > 1:
                    shown = " and ".join(map(str, sorted(of_pieces)))
                    problem = f"expected one step count of all tensors that are one parameter with it, found {shown}"
                    hint = "--resume DIR --resume-weights-only starts a new run with its weights"
                    where = f"{STEPS_NAME}: {chunk.family.to_hf(name)}"
                    raise CheckpointError(where, problem, hint, code="resume.other-optimizer")
                counts |= {id(parameter): count for count in of_pieces if count != num_steps}
        return counts

    def differing_steps(self, chunk: StageChunk, num_steps: int) -> dict[str, int]:
        """Return the step counts of a chunk's parameters that are not `num_steps`, by Hugging Face FQN.

        As in torch, a parameter without a gradient takes no step: an expert that no token reached, say. Gradients that
        ranks reduce, those of masters and those of whole matrices are zeros instead, and there the step counts.
        """
        steps: dict[str, int] = {}
        for name, parameter in chunk.body.named_parameters():
            key = id(parameter)
            if key in self._skipped and key not in self._is_whole:
                count = num_steps_of(self._by_group[self._numbers[key]], self._weights[key])
                if count not in (None, num_steps):
                    steps |= {piece.fqn: count for piece in pieces_of(chunk, name, parameter)}
        return steps if self._whole is None else steps | self._whole.differing_steps(chunk.stage, num_steps)

    def zero_gradients(self) -> None:
        for _, parameter in self.parameters:
            zero_gradient(parameter)

    def step(self, step: int) -> float:
        """Take optimizer step number `step`, the first being 0, and return its learning rate.

        Every rank of a replica calls this.
        """
        lr = rate_at(step, self.options.schedule)
        for optimizers in (self._by_group, self._whole.optimizers if self._whole else {}):
            for number, optimizer in optimizers.items():
                for group in optimizer.param_groups:
                    group["lr"] = self.algorithms[number].scale_rate(lr)
        for _, parameter in self.parameters:
            # One that is not trained, such as a router's bias in some models, does not decay either.
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is None and parameter.requires_grad:
                self._skipped.add(id(parameter))
            self._weights[id(parameter)].grad = None if gradient is None else local_of(gradient)
        for optimizer in self._by_group.values():
            optimizer.step()
        if self._whole is not None:
            self._whole.step()
        for _, parameter in self.parameters:
            if (weight := self._weights[id(parameter)]) is not parameter:
                weight.grad = None  # the gradient is the parameter's, which frees it
        for key, average in self._averages.items():
            average.lerp_(self._weights[key].detach().to(average.dtype), 1 - self.plan.ema)
        round_masters(parameter for _, parameter in self.parameters)
        return lr


def plain_adamw(parameters: Iterable[tuple[str, torch.Tensor]], options: OptimOptions) -> OptimizerState:
    """Return the groups of AdamW for parameters by their FQNs."""
    group = ParameterGroup(beta1=options.beta1, beta2=options.beta2, eps=options.eps, weight_decay=options.weight_decay)
    lines = tuple(fqn for fqn, parameter in parameters if parameter.dim() == 1)
    bare = () if options.weight_decay_1d or not lines else (replace(group, weight_decay=0.0, fqns=lines),)
    return OptimizerState(name="AdamW", max_norm=options.max_norm, groups=(group, *bare), ema=options.ema)


def _check_groups(
    chunks: Sequence[StageChunk],
    numbers: Mapping[int, int],
    group_numbers: GroupNumbers,
    algorithms: Sequence[Algorithm],
) -> None:
    """Check that all tensors that a fused parameter consists of are in one group, and of shapes that it takes."""
    for chunk in chunks:
        for name, parameter in chunk.body.named_parameters():
            for piece in pieces_of(chunk, name, parameter) if id(parameter) in numbers else ():
                number = group_numbers.of(piece.fqn)
                if number != numbers[id(parameter)]:
                    problem = (
                        f"is in group {number}, and what it is one parameter with in group {numbers[id(parameter)]}"
                    )
                    hint = "let the patterns of one group match all parts of a fused parameter"
                    raise UsageError(f"--optimizer: {piece.fqn}", problem, hint, code="options.optimizer-pattern")
                algorithms[number].check_takes(piece.fqn, piece.shape)
