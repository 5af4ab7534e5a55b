"""A model family of another package, such as research code: what it is given, and how it is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from manifests.errors import ModelError
from manifests.models import ModelShape, module_of
from manifests.models.catalogue import described_entry, entry_of
from manifests.models.shape import is_layer
from manifests.models.trainable import GROUP
from manifests.schema import ModelDescription
from runner.models.family import Family, Plan, RowInput, check_output, row_inputs_of
from runner.tensors.local_shard import Piece, persistent_buffers

_ATTRIBUTES = (
    "architecture", "modules", "hidden_size", "vocab_size", "hands_on_trees", "row_inputs", "build", "init_buffers",
    "to_hf", "pieces", "padded_length",
)  # fmt: skip


_Make = Callable[[tuple[str, ...]], nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRequest:
    """The model that a family is asked for: an entry point of `runner.families` takes one and returns a `Family`.

    `modules` are the whole model's, in the order they run; `tensors` has the shape of every tensor, by FQN.
    """

    architecture: str
    config: Mapping[str, Any]
    modules: tuple[str, ...]
    tensors: Mapping[str, tuple[int, ...]]
    hidden_size: int
    vocab_size: int
    max_seq_len: int  # of the sequences to train on
    where: str = "config.json"  # for errors
    description: ModelDescription | None = None  # what --model said


class NamedFamily:
    """A family of modules whose parameters have the names and shapes that files have.

    `make` builds the modules it is given, of a model that may have more; it runs on the meta device. Tied weights are
    parameters of their own in it. Buffers that no file has are computed by a method `init_buffers(device)` of what
    `make` returns. `make_tiny` builds the same modules with small widths, for the self-check, which a small model does
    without: all modules in one stage are compared with those of each stage by itself.

    `hands_on_trees` and `row_inputs` are those of `Family`. `tp_plan` and `ep_plan` map the names of modules and
    parameters, with * for the number of a layer, to styles of transformers: `{"layers.*.up": "colwise"}`.
    """

    def __init__(
        self,
        request: FamilyRequest,
        make: _Make,
        make_tiny: _Make | None = None,
        *,
        hands_on_trees: bool = False,
        row_inputs: tuple[RowInput, ...] = (),
        tp_plan: Mapping[str, str] | None = None,
        ep_plan: Mapping[str, str] | None = None,
    ) -> None:
        self.architecture, self.modules = request.architecture, request.modules
        self.hidden_size, self.vocab_size = request.hidden_size, request.vocab_size
        self.hands_on_trees, self.row_inputs = hands_on_trees, row_inputs
        self._tensors, self._make, self._where = request.tensors, make, request.where
        self._request, self._make_tiny = request, make_tiny
        self._tp_plan, self._ep_plan = dict(tp_plan or {}), dict(ep_plan or {})

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device.

        Shapes: what is built takes tokens (B, L) or hidden (B, L, D), and returns hidden or logits (B, L, V).
        Raises:
            ModelError: they have other parameters than the files.
        """
        with torch.device("meta"):
            built = self._make(modules)
        shapes = {name: tuple(tensor.shape) for name, tensor in _stored_tensors(built)}
        owned = set(modules)
        expected = {name: shape for name, shape in self._tensors.items() if module_of(name, owned) is not None}
        for name in sorted(shapes.keys() | expected.keys()):
            if shapes.get(name) != expected.get(name):
                raise ModelError(
                    self._where,
                    f"expected {_shown(expected.get(name))} for {name} of {self.architecture} (the files), "
                    f"found {_shown(shapes.get(name))} (its family)",
                    "build each module with the names and shapes of its tensors, and no other module",
                    code="model.family-mismatch",
                )
        return built

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        """Let the module compute the buffers that are in no file.

        Shapes: as `module`, which `build` returned, has them on the meta device.
        Raises:
            ModelError: it has such buffers, and no method `init_buffers(device)`.
        """
        init = getattr(module, "init_buffers", None)
        if init is not None:
            init(device)
            return
        for name, part in module.named_modules():
            if computed := sorted(part._non_persistent_buffers_set & part._buffers.keys()):
                raise ModelError(
                    self._where,
                    f"nothing computes {f'{name}.{computed[0]}'.lstrip('.')}, a buffer that is in no file",
                    "define init_buffers(device) in the module that the family makes",
                    code="model.family-buffers",
                )

    def to_hf(self, name: str) -> str:
        """Return the Hugging Face FQN of a parameter, which is its name."""
        return name

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        """Return the region of a Hugging Face tensor that is in `memory`.

        Shapes: `memory` is a region of the tensor `name`, which begins at `offset`.
        """
        return (Piece(fqn=name, shape=self._tensors[name], offset=offset, memory=memory),)

    def padded_length(self, length: int, most: int) -> int:
        """Return how many tokens a row of `length` can be padded to: no length changes what comes before it."""
        return most

    def tiny(self) -> NamedFamily:
        """Return the family of a tiny model with the same modules; see `runner.proof.stages.SelfChecked`."""
        if self._make_tiny is None:
            return self
        with torch.device("meta"):
            tensors = {name: tuple(tensor.shape) for name, tensor in _stored_tensors(self._make_tiny(self.modules))}
        beside, sizes = {name for name in self.modules if not is_layer(name)}, (self.vocab_size, self.hidden_size)
        of_both = (name for name, dims in self._tensors.items() if dims == sizes and module_of(name, beside))
        head = f"{self.modules[-1]}.weight"
        vocab_size, hidden_size = tensors[head if len(tensors.get(head, ())) == 2 else next(of_both, head)]
        small = replace(self._request, tensors=tensors, vocab_size=vocab_size, hidden_size=hidden_size)
        return NamedFamily(
            small, self._make_tiny, hands_on_trees=self.hands_on_trees, row_inputs=self.row_inputs,
            tp_plan=self._tp_plan, ep_plan=self._ep_plan,
        )  # fmt: skip

    def num_parameters(self) -> int:
        """Return the number of weights."""
        return sum(math.prod(shape) for shape in self._tensors.values())

    def whole(self) -> WholeOwn:
        """Return all modules in one, with random weights, on the CPU."""
        model = self._make(self.modules)
        self.init_buffers(model, torch.device("cpu"))
        return WholeOwn(self, model)

    def plans(self) -> tuple[Plan, ...]:
        """Return the kinds of plans that it has, whose names are checked.

        Raises:
            ModelError: a name or style of a plan is unknown.
        """
        from runner.models.tensor_plan import check_plan, plans_of

        with torch.device("meta"):
            model = self._make(self.modules)
        for plan in (self._tp_plan, self._ep_plan):
            check_plan(plan, model, self._where)
        return plans_of(self._tp_plan, self._ep_plan)

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard modules on the meta device over the ranks of a mesh, but for experts that are distributed already.

        Shapes: parameters are as files have them, and become DTensors of that shape.
        """
        from runner.models.tensor_plan import check_packed, shard_by_plan, without_experts

        has_experts = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        plan = without_experts(self._tp_plan, self._ep_plan) if has_experts else self._tp_plan
        shard_by_plan(module, plan, mesh)
        check_packed(module)

    def summed_over_heads(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters whose style says that ranks have parts of their gradients.

        Shapes: as in files; every rank has all of them.
        """
        from runner.models.tensor_plan import summed_by_plan

        return summed_by_plan(module, self._tp_plan)

    def distribute_experts(self, module: nn.Module, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
        """Distribute the experts of modules on the meta device over the ranks of a mesh.

        Shapes: parameters (E, ...) become DTensors of that shape, whose first dimension is sharded; E = experts.
        """
        from runner.models.tensor_plan import distribute_experts

        distribute_experts(module, self._ep_plan, mesh, tensor_mesh)


class WholeOwn(nn.Module):
    """A whole model of a `NamedFamily`; see `runner.proof.stages.WholeModel`."""

    def __init__(self, family: NamedFamily, model: nn.Module) -> None:
        super().__init__()
        self._family, self.body = family, model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        following = None if labels is None else nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        logits = self.body(tokens, **row_inputs_of(self._family, tokens, following))
        check_output(self.body, tokens, logits)
        labels = tokens if labels is None else labels
        return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def cast(self, dtype: torch.dtype) -> None:
        self.body.to(dtype)

    def in_files(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.body.state_dict().items()}


def generic_family(model_class: type[Any], request: FamilyRequest, *, num_results: int = 0) -> Family:
    """Return a family that cuts a model class of transformers' kind between its layers, as the catalogue's are cut.

    `request`: what the entry point of `runner.families` was called with. `num_results`: how many results a layer
    returns in a tuple; 0: one tensor, not in a tuple.

    Shapes: the stages take tokens (B, L) or hidden (B, L, D), and return hidden or logits (B, L, V).
    Raises:
        ModelError: a class that cannot be cut like that, or a config that it does not accept.

    Example, the function that an entry point names:
        >>> def family(request):
        ...     return runner.generic_family(MyForCausalLM, request)
        >>> made = family(request)
        >>> made.modules
        ('model.embed_tokens', 'model.layers.0', 'model.layers.1', 'model.norm', 'lm_head')
        >>> [name for name, _ in made.build(("lm_head",)).named_parameters()]
        ['model.lm_head.weight']
    """
    from runner.models.generic import Generic

    if request.description is None:
        entry = entry_of(request.architecture)
    else:
        entry = described_entry(request.description, request.architecture)
    if entry is None or entry.more_layers:
        raise ModelError(
            request.where,
            f"{request.architecture} does not have one list of layers, which the generic family cuts",
            "write a family of its own",
            code="model.no-family",
        )
    entry = replace(entry, num_results=num_results or entry.num_results)
    return Generic(entry, request.config, max_seq_len=request.max_seq_len, where=request.where, model_class=model_class)


def load_family(entry_point: EntryPoint, request: FamilyRequest) -> Family:
    """Import what an entry point names, and return the family that it makes."""
    place = f"entry point {entry_point.name} = {entry_point.value} ({GROUP})"
    try:
        made: Any = import_module(entry_point.module)
    except ImportError as error:
        hint = "install what the package needs, or correct its entry point"
        raise ModelError(place, f"cannot be imported: {error}", hint, code="model.family-import") from error
    for name in entry_point.attr.split(".") if entry_point.attr else ():
        if not hasattr(made, name):
            problem, hint = f"{entry_point.module} has no {entry_point.attr}", "correct the entry point of the package"
            raise ModelError(place, problem, hint, code="model.family-missing")
        made = getattr(made, name)
    if not callable(made):
        raise _not_a_family(place, f"expected a function of a FamilyRequest, found {type(made).__name__}")
    family: Family = made(request)
    if lacking := [name for name in _ATTRIBUTES if not hasattr(family, name)]:
        raise _not_a_family(place, f"expected a runner.Family, found {type(family).__name__} without {lacking[0]}")
    return family


def request_of(
    shape: ModelShape,
    config: Mapping[str, Any],
    description: ModelDescription | None,
    *,
    max_seq_len: int,
) -> FamilyRequest:
    """Return the request for the family of a packed model."""
    first, last, vocab_size = shape.modules[0], shape.modules[-1], config.get("vocab_size")
    embedding = (vocab_size,) if type(vocab_size) is int else shape.tensors.get(f"{first}.weight")
    head = shape.tensors.get(f"{last}.weight") or shape.tensors.get(last) or embedding or (0,)
    return FamilyRequest(
        architecture=shape.architecture,
        config=config,
        modules=shape.modules,
        tensors=shape.tensors,
        hidden_size=shape.hidden_size,
        vocab_size=head[0],
        max_seq_len=max_seq_len,
        description=description,
    )


def _stored_tensors(built: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from built.named_parameters()
    yield from persistent_buffers(built)


def _shown(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def _not_a_family(place: str, problem: str) -> ModelError:
    return ModelError(place, problem, "docs/own-models.md shows one", code="model.not-a-family")
