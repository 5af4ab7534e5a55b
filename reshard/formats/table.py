"""The formats of checkpoints, of which each verb asks the same: a new one is a folder and a row.

Rows name the modules that have a format's code, which are imported when they are used: most read pickles, and a pack of
safetensors does without. A row's field names the module whose function it is:

    read      open_checkpoint(folder, options) -> Checkpoint
    check     check(folder, findings, options) -> Contents      without: `reshard check` reports whether it opens
    write     export(checkpoint, out, options) -> ExportResult
    listing   list_tensors(folder) -> Listing | None            for `reshard inspect`, which has no other formats
    weights   read_weights(folder) -> Mapping[str, TensorAt]    by Hugging Face's names, and perhaps not all of a model
    stored    read_stored(folder) -> Mapping[str, TensorAt]     all tensors, by the names in files if those differ

`reshard check --against` compares what both formats have: `stored`, or else `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from reshard.archives.names import is_chain, is_dcp, is_deepspeed, is_megatron

if TYPE_CHECKING:
    from manifests.schema import ModelDescription
    from reshard.copy.engine import WriteOptions
    from reshard.tensors.checkpoint import Checkpoint
    from reshard.tensors.comparison import Contents, Findings
    from reshard.transforms.conversion import ExportDtype
    from stores.base import Folder
    from stores.bundles import TensorAt
    from stores.open import Address

TIED_KEY = "embed"  # of the TiedLayerSpec of a PipelineModule, as Megatron-DeepSpeed and GPT-NeoX call it


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenOptions:
    """What is left out (`drop`), and the model if no table knows it."""

    drop: frozenset[str] = frozenset()
    description: ModelDescription | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Whether the caller needs the tensors, the model if no table knows it, and what counts bytes that are read."""

    reads_tensors: bool = False
    description: ModelDescription | None = None
    progress: Callable[[int], object] = lambda nbytes: None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What `reshard export` writes: `to` is the target, `names` are those of its tensors. See `reshard.export`."""

    to: str
    names: str = "hf"
    tied_key: str = TIED_KEY
    dtype: ExportDtype = "source"
    force: bool = False
    write: WriteOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """The result of an export.

    `identical`: headers, order and index are byte for byte those of the source. `flags` are those without which its
    reader does not resume as the checkpoint says. Units: bytes.
    """

    num_files: int
    nbytes: int
    identical: bool
    casts: Mapping[tuple[str, str], int]  # tensors, by their dtypes before and after
    flags: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedTensor:
    """A tensor as its checkpoint stores it; `part` is its part of the state dict: `model`, `optimizer`."""

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    num_chunks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """A checkpoint's tensors, and the parts of its state dict that have other values."""

    format: str
    title: str
    num_files: int
    tensors: tuple[ListedTensor, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportTarget:
    """A choice of `reshard export --to`.

    `names` are those that its tensors can have besides Hugging Face's. `reader` is who reads the output, `{out}`, and
    `notes` what that takes, by the names of the tensors.
    """

    to: str
    names: tuple[str, ...] = ()
    has_state: bool = False  # optimizer state, if there is any
    is_float32: bool = False  # has float32 weights only
    reader: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of checkpoints: how a folder of it is recognized by the names of its files, and its modules."""

    name: str
    is_in: Callable[[Collection[str]], bool]
    read: str
    check: str | None = None
    write: str | None = None
    listing: str | None = None
    weights: str | None = None
    stored: str | None = None
    targets: tuple[ExportTarget, ...] = ()

    def open_checkpoint(self, folder: Folder, options: OpenOptions | None = None) -> Checkpoint:
        """Open a folder of this format; raises UserError for one that is damaged or not a model's."""
        return cast("Checkpoint", self._function(self.read, "open_checkpoint")(folder, options or OpenOptions()))

    def check_folder(self, folder: Folder, findings: Findings, options: CheckOptions) -> Contents:
        """Report what is wrong with a folder, and return what it has; raises UserError if it cannot be read at all."""
        if self.check is not None:
            return cast("Contents", self._function(self.check, "check")(folder, findings, options))
        return _contents_of(self.open_checkpoint(folder, OpenOptions(description=options.description)))

    def list_tensors(self, folder: Folder) -> Listing | None:
        """Return the tensors of a folder as they are stored; None if `reshard inspect` does not list this format."""
        if self.listing is None:
            return None
        return cast("Listing | None", self._function(self.listing, "list_tensors")(folder))

    def read_weights(self, folder: Folder) -> Mapping[str, TensorAt]:
        """Return the weights of a folder under Hugging Face's names, which may be less than a model."""
        if self.weights is None:
            return self.open_checkpoint(folder).tensors
        return cast("Mapping[str, TensorAt]", self._function(self.weights, "read_weights")(folder))

    def read_stored(self, folder: Folder) -> Mapping[str, TensorAt]:
        """Return all tensors of a folder under the names that are `stored`."""
        assert self.stored is not None, "asked by the caller"
        return cast("Mapping[str, TensorAt]", self._function(self.stored, "read_stored")(folder))

    def export(self, checkpoint: Checkpoint, out: Address, options: ExportOptions) -> ExportResult:
        """Write a checkpoint in this format, to one of its `targets`."""
        assert self.write is not None, "formats with targets write"
        return cast("ExportResult", self._function(self.write, "export")(checkpoint, out, options))

    def _function(self, module: str, name: str) -> Callable[..., Any]:
        return cast("Callable[..., Any]", getattr(import_module(module), name))


def _contents_of(checkpoint: Checkpoint) -> Contents:
    from reshard.tensors.comparison import Contents

    assert checkpoint.originals is not None, "every source has them"
    tensors = [*checkpoint.tensors.values(), *checkpoint.state]
    return Contents(
        num_tensors=len(tensors),
        num_files=len(checkpoint.originals.files),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        tensors=checkpoint.tensors,
        state=checkpoint.state,
    )


_LOAD_UNIVERSAL = (
    "next: engine.load_checkpoint(DIR, load_lr_scheduler_states=False), with ZeRO 1 or 2 and "
    '"checkpoint": {"load_universal": true}; a learning-rate scheduler starts at its first step'
)
_LOAD_MEGATRON = (
    "next: load it without --no-position-embedding: Megatron-LM compares that flag with the checkpoint, and rotary "
    "embeddings do not use it"
)
HUGGINGFACE = Format(
    name="huggingface",
    is_in=lambda names: False,  # it is what a folder is that is nothing else
    read="reshard.formats.huggingface.read",
    check="reshard.formats.huggingface.check",
    write="reshard.formats.huggingface.write",
    listing="reshard.formats.huggingface.read",
    weights="reshard.formats.huggingface.check",
    targets=(ExportTarget(to="hf"),),
)


def _is_packed(names: Collection[str]) -> bool:
    from manifests.invariants import MANIFEST_NAME  # slow to import

    return MANIFEST_NAME in names


MANIFEST = Format(
    name="manifest",
    is_in=_is_packed,
    read="reshard.formats.manifest.read",
)
DELTA = Format(name="delta", is_in=is_chain, read="reshard.formats.delta.read", listing="reshard.formats.delta.read")
FORMATS: tuple[Format, ...] = (
    HUGGINGFACE,
    MANIFEST,
    DELTA,
    Format(
        name="dcp",
        is_in=lambda names: is_dcp(names) and not is_megatron(names),
        read="reshard.formats.dcp.read",
        check="reshard.formats.dcp.read",
        write="reshard.formats.dcp.write",
        listing="reshard.formats.dcp.read",
        weights="reshard.formats.dcp.read",
        stored="reshard.formats.dcp.read",
        targets=(
            ExportTarget(
                to="dcp",
                names=("torchtitan",),
                has_state=True,
                reader="torch.distributed.checkpoint: {out}",
                notes={
                    "torchtitan": "torchtitan's data loader starts from scratch: "
                    "--checkpoint.exclude_from_loading dataloader"
                },
            ),
        ),
    ),
    Format(
        name="deepspeed",
        is_in=is_deepspeed,
        read="reshard.formats.deepspeed.read",
        write="reshard.formats.deepspeed.write",
        listing="reshard.formats.deepspeed.read",
        targets=(
            ExportTarget(
                to="deepspeed",
                reader="DeepSpeed: {out}",
                notes={"hf": "next: engine.load_checkpoint(DIR, load_module_only=True)"},
            ),
            ExportTarget(
                to="universal",
                names=("pipeline",),
                has_state=True,
                is_float32=True,
                reader="DeepSpeed: {out}",
                notes={"hf": _LOAD_UNIVERSAL, "pipeline": _LOAD_UNIVERSAL},
            ),
        ),
    ),
    Format(
        name="megatron",
        is_in=is_megatron,
        read="reshard.formats.megatron.read",
        check="reshard.formats.megatron.read",
        write="reshard.formats.megatron.write",
        listing="reshard.formats.megatron.read",
        weights="reshard.formats.megatron.read",
        stored="reshard.formats.dcp.read",  # the folder is one of DCP, too
        targets=(
            ExportTarget(
                to="megatron",
                has_state=True,
                reader="Megatron-LM: --load {out}",
                notes={"hf": _LOAD_MEGATRON},
            ),
        ),
    ),
)


def export_targets() -> dict[str, tuple[Format, ExportTarget]]:
    """Return what `reshard export --to` can be."""
    return {target.to: (kind, target) for kind in FORMATS for target in kind.targets}


def names_of_targets() -> tuple[str, ...]:
    """Return what `reshard export --for` can be."""
    return tuple(dict.fromkeys(("hf", *(name for kind in FORMATS for target in kind.targets for name in target.names))))
