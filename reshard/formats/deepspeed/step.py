"""The folder of one step of DeepSpeed's, and the folder with `config.json` that it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manifests.errors import SourceError
from manifests.models.config import CONFIG_NAME
from manifests.paths import problem_with_path
from manifests.schema import Holds
from reshard.archives.names import LATEST_NAMES, is_deepspeed
from stores.base import Folder, InputFile, read_whole
from stores.bundles import TensorAt
from stores.local import LocalFolder

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
        """Return the step's files."""
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
    layers: Mapping[str, tuple[str, str]] | None = None  # by name: the layer, and the name in it; layers as they run
    copies: Mapping[str, TensorAt] = field(default_factory=dict)  # of weights, as the model computes with them
    moments: Mapping[Holds, Mapping[str, TensorAt]] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)  # that the optimizer took
    flat: frozenset[str] = frozenset()  # parameters that ZeRO 3 saved without their shapes
    options: tuple[str, Mapping[object, object]] | None = None  # of the optimizer, and the file that has them
    partition: Mapping[object, object] | None = None  # what ZeRO saved around them


def find_step(folder: Folder, *, needs_config: bool = True) -> Step:
    """Return the step that a folder is, or that its file `latest` or `latest_universal` names.

    A step of this machine without config.json takes that of the folder that it is in.

    Raises:
        SourceError: no step, several, or no config.json although it `needs_config`.
    """
    names = folder.names()
    if is_deepspeed([name for name in names if "/" not in name or name.startswith("zero/")]):
        step = Step(root=folder, tag="")
        if needs_config and CONFIG_NAME not in names and isinstance(folder, LocalFolder):
            path = Path(folder.location)
            step = Step(root=LocalFolder(path.parent), tag=path.name)
    else:
        step = Step(root=folder, tag=_latest(folder, names))
    if needs_config and CONFIG_NAME not in step.root.names():
        raise SourceError(
            f"{folder}/{CONFIG_NAME}",
            "no such file, and the checkpoint itself does not describe the model",
            "copy the config.json (and tokenizer files) of the Hugging Face model into the folder",
            code="source.no-config",
        )
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
