"""The folder of a step, and names of a PipelineModule's parameters, relative to numbered layers, as FQNs of the model.

A PipelineModule is a list of layers in the order they run. What its layers are called, and how many modules of the
model each is, is its author's choice; the names in a layer decide it, or it is refused. A tied head may be a module of
its own or all of the input layer once more: see Note [Layers that are tied].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manifests.errors import SourceError
from manifests.models import ModelShape
from manifests.models.config import CONFIG_NAME
from manifests.paths import problem_with_path
from manifests.schema import Holds
from reshard.archives.names import LATEST_NAMES, is_deepspeed
from stores.base import Folder, InputFile, read_whole
from stores.bundles import TensorAt
from stores.local import LocalFolder

_TAKEN = "a layer is one module of the model, or several that follow each other, with the names that they have there"


def fqns_of_layers(layers: Mapping[str, Collection[str]], shape: ModelShape, where: str) -> dict[tuple[str, str], str]:
    """Return the FQN of each tensor, by layer and by its name in it. `layers` are in the order they run.

    Tensors that the model recomputes keep their names, below the layer's first module. Those beside a tied weight in a
    second copy of its layer have no FQN.
    """
    modules = list(shape.by_module().items())
    ignored = shape.ignored_suffixes
    fqn_of: dict[tuple[str, str], str] = {}
    position = 0
    for layer, names in layers.items():
        wanted, expected = [name for name in names if not name.endswith(ignored)], modules[position : position + 1]
        while (taken := _match(wanted, modules[position:])) is None:
            if position == len(modules) or modules[position][0] not in shape.optional:
                taken = _match_tied(wanted, layers, modules[position:], shape, fqn_of)
                break
            position += 1  # MTP layers, which files may lack
        if taken is None:
            raise _unlike(where, layer, wanted, expected)
        count, fqns = taken
        fqn_of |= {(layer, name): fqn for name, fqn in fqns.items()}
        first = modules[position][0]
        fqn_of |= {(layer, name): f"{first}.{name}" for name in names if name.endswith(ignored)}
        position += count
    return fqn_of


def _match(names: Sequence[str], modules: Sequence[tuple[str, Sequence[str]]]) -> tuple[int, dict[str, str]] | None:
    """Return how many of the modules a layer is, and the FQN of each name; None if it is none of them."""
    if not modules or not names:
        return None
    prefix, fqns = modules[0]
    if (matches := _below(names, {_relative(fqn, prefix): fqn for fqn in fqns})) is not None:
        return 1, matches
    several: list[str] = []
    for count, (_, fqns) in enumerate(modules, start=1):
        several += fqns
        if len(several) > len(names):
            return None
        if len(several) == len(names) and (matches := _by_ends(names, several)) is not None:
            return count, matches
    return None


def _match_tied(
    names: Sequence[str],
    layers: Mapping[str, Collection[str]],
    modules: Sequence[tuple[str, Sequence[str]]],
    shape: ModelShape,
    fqn_of: Mapping[tuple[str, str], str],
) -> tuple[int, dict[str, str]] | None:
    """Return the tied weights of a module that is the first layer once more; None if it is not."""
    first = next(iter(layers))
    if not modules or set(names) != set(layers[first]):
        return None
    replicas = {group[0]: fqn for group in shape.ties for fqn in group[1:] if fqn in modules[0][1]}
    tied = {name: replicas[fqn_of[first, name]] for name in names if fqn_of.get((first, name)) in replicas}
    return (1, tied) if set(tied.values()) == set(modules[0][1]) else None


def _below(names: Sequence[str], relative: Mapping[str, str]) -> dict[str, str] | None:
    """Return the FQNs of names that are a module's, all below one prefix, which may be empty."""
    if len(names) != len(relative):
        return None
    first = next(iter(relative))
    for name in names:
        if name == first or name.endswith(f".{first}"):
            prefix = name.removesuffix(first)
            if {f"{prefix}{inner}" for inner in relative} == set(names):
                return {f"{prefix}{inner}": fqn for inner, fqn in relative.items()}
    return None


def _by_ends(names: Sequence[str], fqns: Sequence[str]) -> dict[str, str] | None:
    """Return the FQNs that end in these names, if each ends one."""
    by_name: dict[str, str] = {}
    for name in names:
        ending = [fqn for fqn in fqns if fqn == name or fqn.endswith(f".{name}")]
        if len(ending) != 1:
            return None
        by_name[name] = ending[0]
    return by_name if len(set(by_name.values())) == len(fqns) else None


def _relative(fqn: str, module: str) -> str:
    return fqn.removeprefix(f"{module}.") if fqn != module else fqn.rpartition(".")[2]


def _unlike(where: str, layer: str, names: Sequence[str], modules: Sequence[tuple[str, Sequence[str]]]) -> SourceError:
    expected = f"the tensors of {modules[0][0]}: {_some(modules[0][1])}" if modules else "no more layers (config.json)"
    problem = f"expected {expected}; found {_some(names) if names else 'no tensors'}"
    return SourceError(f"{where}: {layer}", problem, _TAKEN, code="source.other-layers")


def _some(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:80]) for name in names[:4]) + (", ..." if len(names) > 4 else "")


_MAX_LATEST_NBYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The folder of a step, `tag`, in the folder that has `config.json`; or that folder itself, if `tag` is empty."""

    root: Folder
    tag: str

    @property
    def where(self) -> str:
        return f"{self.root}/{self.tag}" if self.tag else str(self.root)

    def names(self) -> tuple[str, ...]:
        prefix = self.path("")
        return tuple(name.removeprefix(prefix) for name in self.root.names() if name.startswith(prefix))

    def file(self, name: str) -> InputFile:
        return self.root.file(self.path(name))

    def path(self, name: str) -> str:
        """Return where a file of the step is, in `root`."""
        return f"{self.tag}/{name}" if self.tag else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The tensors of a step under DeepSpeed's names, which begin with a layer's number if `layers` says which it is."""

    weights: Mapping[str, TensorAt]
    files: tuple[str, ...]  # that have them, in the step
    layers: Mapping[str, tuple[str, str]] | None  # by name: the layer, and the name in it; layers as they run
    moments: Mapping[Holds, Mapping[str, TensorAt]] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)  # that the optimizer took
    flat: frozenset[str] = frozenset()  # parameters that ZeRO 3 saved without their shapes


def find_step(folder: Folder, *, needs_config: bool = True) -> Step:
    """Return the step that a folder is, or that its file `latest` or `latest_universal` names.

    A step of this machine without config.json takes that of the folder that it is in.
    """
    names = folder.names()
    if is_deepspeed([name for name in names if "/" not in name or name.startswith("zero/")]):
        step = Step(root=folder, tag="")
        if needs_config and CONFIG_NAME not in names and isinstance(folder, LocalFolder):
            path = Path(folder.location)
            step = Step(root=LocalFolder(path.parent), tag=path.name)
    else:
        step = Step(root=folder, tag=_latest(folder, names))
    return step


def _latest(folder: Folder, names: Sequence[str]) -> str:
    """Return the folder of the step that a file names; both kinds of file would name two."""
    there = [name for name in LATEST_NAMES if name in names]
    if len(there) != 1:
        problem = f"expected one of {' and '.join(LATEST_NAMES)}, found {'both' if there else 'neither'}"
        raise SourceError(str(folder), problem, "name the folder of a step", code="source.which-step")
    file = folder.file(there[0])
    tag = read_whole(file, most_nbytes=_MAX_LATEST_NBYTES).decode(errors="replace").strip()
    if problem_with_path(tag) or "/" in tag or not any(name.startswith(f"{tag}/") for name in names):
        problem = f"names {tag[:80]!r}, and there is no such folder beside it"
        raise SourceError(str(file), problem, "name the folder of a step", code="source.which-step")
    return tag
