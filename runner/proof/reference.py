"""What one process trains: a tiny model as a whole, by its own forward and loss, each document by itself."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from manifests.optimizer_state import GroupNumbers
from manifests.schema import TieGroup
from runner.config.loss import BalanceOptions
from runner.config.schema import OptimOptions
from runner.config.trained import Trains
from runner.data.packing import Sample
from runner.data.rows import IGNORED, RowForm
from runner.data.sequences import Batch, build_batch
from runner.models.routers import Router
from runner.pipeline.heads import of_evaluation
from runner.pipeline.losses import Loss
from runner.proof.stages import LENGTH, SelfChecked, check_gradients, largest_of, rms_of, run_loss
from runner.tensors.local_shard import Piece, default_dtype
from runner.training.algorithms import algorithms_of
from runner.training.optimizer import plain_adamw

# Of the documents of rows, in turn: a row has a label more than tokens, and one has none.
_DOCUMENTS = ((1, 9, 3), (5, 8), (1,), (3, 7))
# Where rows are one text. The last token is that of padding, so that rows of one process are the same.
_ROWS = ((12,), (10,), (1,), (6,))
_FILLER = 0
_LR = 1e-2
_EPS = 0.1  # of the largest gradient: an update does not magnify what rounding leaves of a gradient that is 0
_COARSE = 2e-3  # times the relative difference of updates: Newton-Schulz iterations in bfloat16 magnify what differs
_LEAST = 1e-3  # of the largest gradient: what is smaller may be nothing but rounding
_LEAST_ELEMENT = 1e-6  # of the largest gradient: the same of an element
_LEAST_UPDATE = 0.1  # of the learning rate: what a class without an epsilon may make of it
_OPPOSITE = 2.0  # the same of a class by its dotted name, which may step by the sign


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """What a router made of all tokens, in rows end to end: logits (N, E), and chosen experts (N, K)."""

    of: Router
    logits: torch.Tensor
    chosen: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Balance:
    """What acts on routers; `parts` are the places, in rows end to end, of the tokens that a rank takes at once."""

    options: BalanceOptions
    parts: tuple[torch.Tensor, ...]

    def loss(self, routed: Sequence[Routing]) -> torch.Tensor:
        """Return the mean of transformers' auxiliary loss of each router and part, times the coefficient."""
        if not self.options.aux_loss:
            return torch.zeros(())
        from runner.models.whole_model import router_loss

        losses = [router_loss(router.logits[part], router.chosen.shape[-1]) for router in routed for part in self.parts]
        return self.options.aux_loss * torch.stack(losses).mean()

    @torch.no_grad()
    def move_biases(self, routed: Sequence[Routing]) -> None:
        for router in routed:
            load = torch.bincount(router.chosen.flatten(), minlength=router.of.num_experts)
            if router.of.bias is not None:
                router.of.bias.add_(torch.sign(load.sum() - load * len(load)), alpha=self.options.bias_rate)


def route(routers: Sequence[Router], run: Callable[[], Any]) -> list[Routing]:
    """Return what routers do while all rows run, document by document."""
    calls: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in routers]
    hooks = [
        router.module.register_forward_hook(lambda _, __, output, of=of: of.append(output))
        for router, of in zip(routers, calls, strict=True)
    ]
    run()
    for hook in hooks:
        hook.remove()

    def in_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.flatten(0, -2) for tensor in tensors])

    return [
        Routing(
            of=router,
            logits=in_rows([output[0] for output in outputs]),
            chosen=in_rows([next(part for part in output if not part.is_floating_point()) for output in outputs]),
        )
        for router, outputs in zip(routers, calls, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Rows of tokens, whose documents may be kept apart."""

    documents: tuple[tuple[torch.Tensor, ...], ...]
    is_masked: bool
    fields: Mapping[str, torch.Tensor]  # that the loss reads

    def batch(self) -> Batch:
        """Return the rows as the run's data has them."""
        samples = []
        for row in self.documents:
            ends = torch.tensor([len(document) for document in row]).cumsum(0).tolist()
            ids = array("i", torch.cat(row).tolist())
            samples.append(Sample(ids=ids, begins=tuple(ends[:-1]), is_masked=self.is_masked))
        return replace(build_batch(samples, LENGTH, filler=_FILLER), fields=self.fields)


def draw_rows(seed: int, num_rows: int, vocab_size: int, *, is_masked: bool, form: RowForm | None = None) -> Rows:
    drawn = torch.Generator().manual_seed(seed)
    lengths = _DOCUMENTS if is_masked else _ROWS
    rows = [lengths[number % len(lengths)] for number in range(num_rows)] if num_rows > 1 else lengths[:1]
    documents = [tuple(torch.randint(vocab_size, (length,), generator=drawn) for length in row) for row in rows]
    for (text,) in () if is_masked else documents:
        text[-1] = _FILLER
    fields = {name: torch.rand(num_rows, LENGTH, generator=drawn) + 0.5 for name in (form.per_token if form else ())}
    fields |= {name: torch.rand(num_rows, generator=drawn) + 0.5 for name in (form.per_row if form else ())}
    for values in fields.values():
        values[..., ::2] = 1  # as of flags: a loss may count nothing else
    return Rows(documents=tuple(documents), is_masked=is_masked, fields=fields)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reference:
    """A step of one process; tensors are as files have them, by Hugging Face FQN."""

    weights: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]  # clipped
    stepped: Mapping[str, torch.Tensor]  # weights after the step, of those that the loss depends on, and buffers
    loss: float
    scales: Mapping[str, float]  # the largest of each, or what is more than rounding may leave of one that is 0
    rounding: Mapping[str, float]  # by how much a gradient computed and clipped in the stages' dtype differs
    norm: float
    norm_rounding: float  # by how much that of gradients computed in the stages' dtype differs
    evaluation: float  # the loss in evaluation mode, after the step
    optim: OptimOptions
    coarse: frozenset[str]  # weights whose step is computed in bfloat16
    scale_free: Mapping[str, float]  # by how much weights may differ where a gradient is nothing but rounding
    is_training: bool  # whether modules were in training mode: not if they draw random numbers there

    def distance(self, gradient: Piece) -> float:
        """Return how much a gradient differs, relative to the largest of its tensor."""
        expected = self.gradients[gradient.fqn][gradient.part.index]
        return largest_of(gradient.memory - expected) / self.scales[gradient.fqn]

    def weight_distance(self, weight: Piece, allowed: float) -> float:
        """Return how much a weight differs, whose gradient may differ by `allowed`; see Note [Limits of a proof]."""
        fqn, index = weight.fqn, weight.part.index
        if fqn not in self.stepped:
            return 0.0
        difference = weight.memory - self.stepped[fqn][index]
        if fqn in self.scale_free:
            least = max(_LEAST_ELEMENT * max(map(largest_of, self.gradients.values())), allowed * self.scales[fqn])
            is_rounding = self.gradients[fqn][index].abs() <= least
            difference = torch.where(is_rounding, (difference.abs() - self.scale_free[fqn]).relu(), difference)
        if fqn not in self.coarse:
            return largest_of(difference) / _LR
        return _COARSE * rms_of(difference) / max(1e-30, rms_of(self.stepped[fqn] - self.weights[fqn]))


def run_reference(
    seed: int,
    tiny: SelfChecked,
    ties: Iterable[TieGroup],
    rows: Rows,
    optim: OptimOptions,
    compute_dtype: torch.dtype,
    dtype: torch.dtype,
    trains: Trains | None,
    loss_function: Loss | None,
    balance: Balance | None = None,
) -> Reference:
    """Take a step with the whole of a tiny model, with these options but for the learning rate and epsilon.

    It is in `dtype`, and stages compute in `compute_dtype`. Gradients are clipped to half of their norm, unless
    clipping is off.
    """
    torch.manual_seed(seed)
    whole = tiny.whole().train()
    _tie(whole, ties)
    for parameter in whole.body.parameters():
        parameter.data = parameter.data.to(dtype)
    if trains is not None:
        _freeze(whole, trains)
    weights = _in_files(whole, {})
    state = torch.get_rng_state()
    loss = _loss(whole, rows, loss_function)
    is_training = torch.equal(state, torch.get_rng_state())
    if not is_training:
        loss = _loss(whole.eval(), rows, loss_function)
    if balance is not None:
        routed = _route(whole, rows)
        loss = loss + balance.loss(routed)
    torch.autograd.backward(loss)
    parameters = list(whole.body.parameters())
    gradients = {parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                 for parameter in parameters}  # fmt: skip
    check_gradients(loss_function, gradients.values())
    rounded = gradients if compute_dtype == dtype else _rounded_gradients(
        whole, rows, compute_dtype, loss_function, balance)  # fmt: skip
    in_files = _in_files(whole, gradients)
    fqns = _fqns_of(whole, parameters)
    plan = optim.plan or plain_adamw(((fqn, in_files[fqn]) for fqn in fqns), optim)
    numbers = GroupNumbers(plan.groups, [[member.fqn for member in group.members] for group in ties])
    is_clipped = {fqn: not plan.groups[numbers.of(fqn)].skips_clipping for fqn in fqns}
    in_rounded_files = _in_files(whole, rounded)
    norm, rounded_norm = (
        _norm(of_parameters.values() if all(is_clipped.values()) else (of_files[f] for f in fqns if is_clipped[f]))
        for of_parameters, of_files in ((gradients, in_files), (rounded, in_rounded_files))
    )
    optim = _small_step(replace(optim, plan=plan), norm, _EPS * max(map(largest_of, gradients.values())))
    clipped, rounded_clipped = (
        {
            fqn: gradient * (optim.max_norm / (of_norm + 1e-6) if optim.max_norm and is_clipped.get(fqn) else 1.0)
            for fqn, gradient in of_files.items()
        }
        for of_norm, of_files in ((norm, in_files), (rounded_norm, in_rounded_files))
    )
    used = [parameter for parameter in parameters if parameter.grad is not None]  # the optimizer leaves others alone
    coarse, scale_free = _take_step(whole, {fqn: clipped[fqn] for fqn in _fqns_of(whole, used)}, optim, numbers)
    if balance is not None:
        balance.move_biases(routed)
    stepped = _in_files(whole, {})
    with torch.no_grad():
        evaluation = _loss(whole.eval(), rows, of_evaluation(loss_function)).item()
    # Whether a weight that no loss depends on decays depends on whether ranks reduce gradients of zero.
    used = [parameter for parameter in parameters if parameter.grad is not None or not parameter.requires_grad]
    expected = {fqn: clipped[fqn] for fqn in _fqns_of(whole, parameters)}
    least = max(1e-30, _LEAST * max(map(largest_of, expected.values())))
    scales = {fqn: max(least, largest_of(gradient)) for fqn, gradient in expected.items()}
    return Reference(
        weights=weights,
        gradients=expected,
        scales=scales,
        rounding={fqn: largest_of(rounded_clipped[fqn] - expected[fqn]) / scale for fqn, scale in scales.items()},
        stepped={fqn: stepped[fqn] for fqn in stepped.keys() - _fqns_of(whole, parameters) | _fqns_of(whole, used)},
        loss=loss.item(),
        norm=norm,
        norm_rounding=abs(rounded_norm - norm) / (norm or 1.0),
        evaluation=evaluation,
        optim=optim,
        coarse=coarse,
        scale_free=scale_free,
        is_training=is_training,
    )


def _take_step(
    whole: Any, gradients: Mapping[str, torch.Tensor], optim: OptimOptions, numbers: GroupNumbers
) -> tuple[frozenset[str], Mapping[str, float]]:
    """Step the tensors of files, one by one, with torch's own classes; return the coarse and the scale-free ones.

    A parameter of the model may consist of several: what each element of them is, numbers in their place tell.
    """
    assert optim.plan is not None
    parameters, algorithms = list(whole.body.parameters()), algorithms_of(optim.plan)
    sizes = [parameter.numel() for parameter in parameters]
    places = torch.split(torch.arange(sum(sizes), dtype=torch.float64), sizes)
    numbered = dict(zip(parameters, places, strict=True))
    places_in_files = _in_files(
        whole, {parameter: place.view(parameter.shape) for parameter, place in numbered.items()}
    )
    before = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    flat = before.clone()  # a tied weight is stepped under each of its names, each time from what it was
    coarse, scale_free = set[str](), dict[str, float]()
    for fqn, gradient in gradients.items():
        algorithm, place = algorithms[numbers.of(fqn)], places_in_files[fqn].long()
        weight = before[place]
        matrices = [torch.nn.Parameter(part.clone()) for part in algorithm.matrices(weight)]
        for matrix, of_matrix in zip(matrices, algorithm.matrices(gradient), strict=True):
            matrix.grad = of_matrix.to(weight.dtype)
        optimizer = algorithm.make(matrices, algorithm.scale_rate(_LR))
        for group in optimizer.param_groups:
            group["lr"] = algorithm.scale_rate(_LR)
        optimizer.step()
        flat[place] = torch.stack([matrix.detach() for matrix in matrices]).view(weight.shape)
        coarse |= {fqn} if algorithm.num_dims == {2} else set()
        if not algorithm.group.eps and algorithm.name != "SGD":
            scale_free[fqn] = (_OPPOSITE if "." in algorithm.name else _LEAST_UPDATE) * algorithm.scale_rate(_LR)
    for parameter, values in zip(parameters, torch.split(flat, sizes), strict=True):
        parameter.data = values.view(parameter.shape)
    return frozenset(coarse), scale_free


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(gradient.double().square().sum().item() for gradient in gradients))


def _rounded_gradients(
    whole: Any, rows: Rows, dtype: torch.dtype, loss_function: Loss | None, balance: Balance | None
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return the gradients of a whole model in another dtype, as those of its own."""
    weights = {parameter: (parameter.data, parameter.grad) for parameter in whole.body.parameters()}
    try:
        for parameter in weights:
            parameter.grad, parameter.data = None, parameter.data.to(dtype)
        loss = _loss(whole, rows, loss_function)
        torch.autograd.backward(loss if balance is None else loss + balance.loss(_route(whole, rows)))
        return {
            parameter: torch.zeros_like(data) if parameter.grad is None else parameter.grad.to(data.dtype)
            for parameter, (data, _) in weights.items()
        }
    finally:
        for parameter, (data, gradient) in weights.items():
            parameter.grad, parameter.data = None, data
            parameter.grad = gradient


def _tie(whole: Any, ties: Iterable[TieGroup]) -> None:
    """Make the members of each group one parameter, as they are in a model of transformers that ties them by itself."""
    fqns = {tensor.data_ptr(): fqn for fqn, tensor in whole.in_files().items()}
    names = {fqns.get(parameter.data_ptr(), name): name for name, parameter in whole.body.named_parameters()}
    for group in ties:
        members = [names[member.fqn] for member in group.members if member.fqn in names]
        for replica in members[1:]:
            module, _, leaf = replica.rpartition(".")
            setattr(whole.body.get_submodule(module), leaf, whole.body.get_parameter(members[0]))


def _freeze(whole: Any, trains: Trains) -> None:
    for parameter in whole.body.parameters():
        parameter.requires_grad_(any(map(trains, _fqns_of(whole, [parameter]))))


def _small_step(optim: OptimOptions, norm: float, eps: float) -> OptimOptions:
    clip = {"max_norm": norm / 2} if optim.max_norm else {}
    still = {"warmup_steps": 0, "stable_steps": 0, "decay": "constant", "decay_steps": 0, "min_lr": 0.0}
    assert optim.plan is not None
    groups = tuple(replace(group, eps=eps) if group.eps else group for group in optim.plan.groups)
    plan = replace(optim.plan, groups=groups)
    return replace(optim, lr=_LR, eps=eps, plan=plan, **clip, **still)  # type: ignore[arg-type]


def _loss(whole: Any, rows: Rows, loss_function: Loss | None = None) -> torch.Tensor:
    """Return the mean loss over the tokens of all rows, or of all documents, by the model's own loss of each alone.

    A loss of the run's own is that of the logits of all rows at once.
    """
    if loss_function is not None:
        return run_loss(loss_function, _logits(whole, rows), rows.batch())
    if not rows.is_masked:
        texts = [text for (text,) in rows.documents]
        tokens, labels = (torch.stack([torch.nn.functional.pad(text, (0, LENGTH - len(text)), value=value)
                                       for text in texts]) for value in (_FILLER, IGNORED))  # fmt: skip
        loss: torch.Tensor = _run(whole, tokens, labels)[1]
        return loss
    by_length: dict[int, list[torch.Tensor]] = {}
    for document in (document for row in rows.documents for document in row if len(document) > 1):
        by_length.setdefault(len(document), []).append(document)
    counts = {length: len(documents) * (length - 1) for length, documents in by_length.items()}
    losses = [_run(whole, torch.stack(documents))[1] * counts[length] for length, documents in by_length.items()]
    return torch.stack(losses).sum() / sum(counts.values())


def _logits(whole: Any, rows: Rows) -> torch.Tensor:
    """Return the logits of all rows, those of each document by itself; padding is part of the last one."""
    of_rows = []
    for *before, last in rows.documents:  # the last token is a label alone
        length = LENGTH - sum(map(len, before))
        texts = (*before, torch.nn.functional.pad(last[:-1], (0, length - len(last) + 1), value=_FILLER))
        of_rows.append(torch.cat([_run(whole, text[None])[0][0] for text in texts]))
    return torch.stack(of_rows)


def _run(whole: Any, *inputs: torch.Tensor) -> Any:
    """Run a whole model; what it creates without a dtype, such as XGLM's lowest score, is as wide as its parameters."""
    with default_dtype(next(whole.body.parameters()).dtype):
        return whole(*inputs)


def _route(whole: Any, rows: Rows) -> list[Routing]:
    return route([*whole.routers()], partial(_logits, whole, rows))


def _fqns_of(whole: Any, parameters: Iterable[torch.nn.Parameter]) -> set[str]:
    """Return the names in files of these parameters; other tensors of files are buffers, or other parameters."""
    unknown = {parameter: torch.full_like(parameter, torch.nan) for parameter in parameters}
    return {fqn for fqn, tensor in _in_files(whole, unknown).items() if tensor.isnan().any()}


def _in_files(whole: Any, values: Mapping[torch.nn.Parameter, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of a model's tensors as files have them, with these values in place of its parameters'."""
    weights = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        return {fqn: tensor.clone() for fqn, tensor in whole.in_files().items()}
    finally:
        for parameter, weight in weights.items():
            parameter.data = weight
