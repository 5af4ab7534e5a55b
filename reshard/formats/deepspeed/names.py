"""Names of a PipelineModule's parameters, which are relative to numbered layers, as FQNs of the model.

A PipelineModule is a list of layers in the order they run. What its layers are called, and how many modules of the
model each is, is its author's choice; the names in a layer decide it, or it is refused. A tied head may be a module of
its own or all of the input layer once more: see Note [Layers that are tied].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from manifests.errors import SourceError
from manifests.models import ModelShape

_TAKEN = "a layer is one module of the model, or several that follow each other, with the names that they have there"


def fqns_of_layers(layers: Mapping[str, Collection[str]], shape: ModelShape, where: str) -> dict[tuple[str, str], str]:
    """Return the FQN of each tensor, by layer and by its name in it. `layers` are in the order they run.

    Tensors that the model recomputes keep their names, below the layer's first module. Those beside a tied weight in a
    second copy of its layer have no FQN.

    Raises:
        SourceError: the names of a layer are those of no module that could be there.
    """
    modules = list(shape.by_module().items())
    ignored = shape.ignored_suffixes or ("\0",)
    found: dict[tuple[str, str], str] = {}
    position = 0
    for layer, names in layers.items():
        wanted = [name for name in names if not name.endswith(ignored)]
        taken = _match(wanted, modules[position:]) or _match_tied(wanted, layers, modules[position:], shape, found)
        if taken is None:
            raise _unlike(where, layer, wanted, modules[position : position + 1])
        count, fqns = taken
        found |= {(layer, name): fqn for name, fqn in fqns.items()}
        first = modules[position][0]
        found |= {(layer, name): f"{first}.{name}" for name in names if name.endswith(ignored)}
        position += count
    return found


def _match(names: Sequence[str], modules: Sequence[tuple[str, Sequence[str]]]) -> tuple[int, dict[str, str]] | None:
    """Return how many of the modules a layer is, and the FQN of each name; None if it is none of them."""
    if not modules or not names:
        return None
    prefix, fqns = modules[0]
    if (found := _below(names, {_relative(fqn, prefix): fqn for fqn in fqns})) is not None:
        return 1, found
    several: list[str] = []
    for count, (_, fqns) in enumerate(modules, start=1):
        several += fqns
        if len(several) > len(names):
            return None
        if len(several) == len(names) and (found := _by_ends(names, several)) is not None:
            return count, found
    return None


def _match_tied(
    names: Sequence[str],
    layers: Mapping[str, Collection[str]],
    modules: Sequence[tuple[str, Sequence[str]]],
    shape: ModelShape,
    found: Mapping[tuple[str, str], str],
) -> tuple[int, dict[str, str]] | None:
    """Return the tied weights of a module that is the first layer once more; None if it is not."""
    first = next(iter(layers))
    if not modules or set(names) != set(layers[first]):
        return None
    replicas = {group[0]: fqn for group in shape.ties for fqn in group[1:] if fqn in modules[0][1]}
    tied = {name: replicas[found[first, name]] for name in names if found.get((first, name)) in replicas}
    return (1, tied) if set(tied.values()) == set(modules[0][1]) else None


def _below(names: Sequence[str], relative: Mapping[str, str]) -> dict[str, str] | None:
    """Return the FQNs of names that are a module's, all below one prefix, which may be empty."""
    if len(names) != len(relative):
        return None
    first = next(iter(relative))
    for name in names:
        if name == first or name.endswith(f".{first}"):
            prefix = name.removesuffix(first)
            if {f"{prefix}{each}" for each in relative} == set(names):
                return {f"{prefix}{each}": fqn for each, fqn in relative.items()}
    return None


def _by_ends(names: Sequence[str], fqns: Sequence[str]) -> dict[str, str] | None:
    """Return the FQNs that end in these names, if each ends one."""
    found: dict[str, str] = {}
    for name in names:
        ending = [fqn for fqn in fqns if fqn == name or fqn.endswith(f".{name}")]
        if len(ending) != 1:
            return None
        found[name] = ending[0]
    return found if len(set(found.values())) == len(fqns) else None


def _relative(fqn: str, module: str) -> str:
    return fqn.removeprefix(f"{module}.") if fqn != module else fqn.rpartition(".")[2]


def _unlike(where: str, layer: str, names: Sequence[str], modules: Sequence[tuple[str, Sequence[str]]]) -> SourceError:
    expected = f"the tensors of {modules[0][0]}: {_some(modules[0][1])}" if modules else "no more layers (config.json)"
    problem = f"expected {expected}; found {_some(names) if names else 'no tensors'}"
    return SourceError(f"{where}: {layer}", problem, _TAKEN, code="source.other-layers")


def _some(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:80]) for name in names[:4]) + (", ..." if len(names) > 4 else "")
