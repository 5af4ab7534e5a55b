"""open and inspect: what a checkpoint contains; of a packed one, its manifest, layout, stages and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from manifests.brief import brief
from manifests.errors import CheckpointError, Parameter, UsageError, as_int, check_choice
from manifests.models.config import CONFIG_NAME
from manifests.optimizer_state import stored_kinds
from manifests.schema import MOMENTS, WEIGHTS, Holds, Layout, Manifest, Stage
from manifests.store import file_digest
from reshard.archives.saved import TORCH_NAMES
from reshard.formats.open import find_format
from reshard.formats.table import Listing
from reshard.tensors.lazy import read_blocks
from reshard.tensors.slices import merge_slices
from reshard.transforms.casts import FLOATS, cast_tensor
from reshard.transforms.conversion import STORED
from stores.base import read_config
from stores.bundles import Bundles, TensorAt, join_slices
from stores.open import open_manifest

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Tensor = torch.Tensor

Framework = Literal["numpy", "torch"]

Float = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A stored tensor: dtype as safetensors writes it, whole shape, size in bytes, and BLAKE3 digest if one is known.

    A tensor that ranks stored in slices has one digest per slice, and None here.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class PackedModel:
    """A manifest and its bundles. Files are opened when tensors are requested.

    Example:
        >>> packed = reshard.open("model-pp2")
        >>> packed.layout.spec, len(packed.stages), packed.config["vocab_size"]
        ('pp=2', 2, 40)
    """

    location: str
    manifest: Manifest
    bundles: Bundles = field(repr=False)

    __repr__ = brief

    @property
    def layout(self) -> Layout:
        """The layout: the spec that was asked for, and its numbers of stages and ranks."""
        return self.manifest.layout

    @property
    def stages(self) -> tuple[PackedStage, ...]:
        return tuple(PackedStage(model=self, info=stage) for stage in self.manifest.stages)

    def stage(self, index: int) -> PackedStage:
        """Return a stage by its index, virtual stages included.

        Raises:
            UsageError: there is no such stage (`options.unknown-stage`).
        """
        number, num_stages = as_int(index), len(self.manifest.stages)
        if type(number) is not int or not 0 <= number < num_stages:
            problem = f"expected a stage from 0 to {num_stages - 1}, found {index!r}"
            raise UsageError("index", problem, "stages are numbered from 0", code="options.unknown-stage")
        return PackedStage(model=self, info=self.manifest.stages[number])

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json, its digest verified.

        Raises:
            InputError: it is missing, or does not match its digest.
        """
        return read_config(self.bundles.root.file(CONFIG_NAME), file_digest(self.manifest, CONFIG_NAME))


@dataclass(frozen=True, kw_only=True)
class PackedStage:
    """One pipeline stage: `info` has its rank, modules and sizes.

    Example:
        >>> stage = reshard.open("model-pp2").stage(1)
        >>> stage.info.rank, stage.info.modules[-1], stage.tensors()["lm_head.weight"].shape
        (1, 'lm_head', (40, 16))
    """

    model: PackedModel = field(repr=False)
    info: Stage

    __repr__ = brief

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of its modules, such as `model.layers.7`."""
        return self.info.modules

    @property
    def num_params(self) -> int:
        return self.info.num_params

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.info.nbytes

    def tensors(self, kind: Holds = WEIGHTS) -> dict[str, TensorInfo]:
        """Return the stage's tensors by Hugging Face FQN, from headers alone.

        `kind` is "weights", or one of optimizer state, such as AdamW's "exp_avg" and "exp_avg_sq". A tied weight has
        each of the names that it has on this stage.

        Raises:
            CheckpointError: there is no optimizer state (`checkpoint.no-optimizer-state`).
            ShardError: a file is missing or damaged.
        """
        return {
            fqn: TensorInfo(dtype=at.dtype, shape=at.shape, nbytes=at.nbytes, digest=at.digest)
            for fqn, at in self._located(kind).items()
        }

    @overload
    def state_dict(
        self, kind: Holds = WEIGHTS, *, framework: Literal["numpy"] = "numpy", dtype: Float | None = None
    ) -> dict[str, Array]: ...
    @overload
    def state_dict(
        self, kind: Holds = WEIGHTS, *, framework: Literal["torch"], dtype: Float | None = None
    ) -> dict[str, Tensor]: ...
    def state_dict(
        self, kind: Holds = WEIGHTS, *, framework: Framework = "numpy", dtype: Float | None = None
    ) -> dict[str, Array] | dict[str, Tensor]:
        """Read the stage's tensors by Hugging Face FQN, each byte once, digests verified.

        Names that are tied on this stage share one array. With `dtype`, floating-point tensors are cast (to nearest,
        ties to even); numpy has no BF16, so such models need `dtype="fp32"` or `framework="torch"`. Digests of virtual
        bundles are unknown: their files' sizes, times and headers are compared instead.

        Shapes: whole tensors as stored, slices merged; `mlp.down_proj.weight` is (D, F), D = model width, F =
        feed-forward width.
        Raises:
            CheckpointError: there is no optimizer state (`checkpoint.no-optimizer-state`).
            ShardError: a file is missing or damaged.
            UsageError: the framework has no such dtype (`options.array-dtype`), or is not one of these
                (`options.invalid-value`).

        Example:
            >>> stage = reshard.open("model-pp2").stage(0)
            >>> weights = stage.state_dict(dtype="fp32")
            >>> weights["model.layers.0.mlp.down_proj.weight"].shape
            (16, 24)
        """
        check_choice(Parameter("framework"), framework, get_args(Framework))
        if dtype is not None:
            check_choice(Parameter("dtype"), dtype, get_args(Float))
        read = to_numpy if framework == "numpy" else to_torch
        arrays: dict[TensorAt, Any] = {}
        located = self._located(kind)
        for at in located.values():
            if at not in arrays:
                wanted = STORED[dtype] if dtype is not None and at.dtype in FLOATS else at.dtype
                arrays[at] = read(cast_tensor(at, wanted))
        return {fqn: arrays[at] for fqn, at in located.items()}

    def _located(self, kind: Holds) -> dict[str, TensorAt]:
        """Return where each tensor is, by all names that it has on this stage."""
        manifest = self.model.manifest
        check_choice(Parameter("kind"), kind, dict.fromkeys((*stored_kinds(manifest), *MOMENTS)))
        if kind != WEIGHTS and (manifest.training is None or manifest.training.optimizer is None):
            hint = "open a training checkpoint; a packed model has none"
            raise CheckpointError(
                self.model.location, "there is no optimizer state", hint, code="checkpoint.no-optimizer-state"
            )
        slices = join_slices(self.model.bundles.tensors_on(self.info, kind))
        tensors = {fqn: merge_slices(parts) for fqn, parts in slices.items()}
        for group in manifest.ties:
            names = [member.fqn for member in group.members if member.stage == self.info.index]
            stored = next((tensors[name] for name in names if name in tensors), None)
            if stored is not None:
                tensors |= {name: tensors.get(name, stored) for name in names}
        return tensors


def open(manifest: str | Path) -> PackedModel:
    """Open a packed model or a training checkpoint by its manifest or its folder, here or at a URL.

    Only the manifest is read. Use this in place of Python's `open` as `reshard.open`.

    Raises:
        ManifestError: the manifest is damaged.
        InputError: there is no manifest, or it cannot be read.

    Example:
        >>> reshard.open("model-pp2").manifest.model.architecture
        'LlamaForCausalLM'
    """
    read = open_manifest(manifest)
    return PackedModel(location=str(read), manifest=read.manifest, bundles=Bundles(read.manifest, read.folder))


def inspect(checkpoint: str | Path) -> PackedModel | Listing:
    """Read what a checkpoint contains: a manifest as `open` does, and of other trainers' formats the tensors.

    `checkpoint` is a manifest, a folder with `pytorch_model*.bin` files, or one that torch.distributed.checkpoint,
    DeepSpeed or Megatron-Core has saved. No tensor is read.

    Raises:
        ManifestError: the manifest is damaged, or there is nothing of all these.
        SourceError: the files are damaged, or their pickles not of tensors.
        InputError: they cannot be read.

    Example:
        >>> done = reshard.export("model-pp2", "model-dcp", to="dcp")
        >>> listing = reshard.inspect("model-dcp")
        >>> listing.format, len(listing.tensors), listing.tensors[0].dtype
        ('dcp', 39, 'BF16')
        >>> reshard.inspect("model-pp2").layout.spec
        'pp=2'
    """
    if not str(checkpoint).endswith(".json"):
        format_, folder = find_format(str(checkpoint))
        if listing := format_.list_tensors(folder):
            return listing
    return open(checkpoint)


# By the dtype in a safetensors header. numpy lacks BF16 and the floats of 8 bits and fewer.
_NUMPY: Mapping[str, str] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


def to_numpy(tensor: TensorAt) -> Array:
    """Read a tensor into a new, writable numpy array.

    Shapes: as stored.
    """
    import numpy as np

    if tensor.dtype not in _NUMPY:
        hint = 'use dtype="fp32" or framework="torch"'
        raise _no_dtype(tensor, "numpy", hint)
    return np.frombuffer(_read(tensor), np.dtype(_NUMPY[tensor.dtype])).reshape(tensor.shape)


def to_torch(tensor: TensorAt) -> Tensor:
    """Read a tensor into a new torch tensor on the CPU.

    Shapes: as stored.
    """
    import torch

    if tensor.dtype not in TORCH_NAMES:
        raise _no_dtype(tensor, "torch", "dequantize the weights with reshard pack --dequantize")
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[tensor.dtype])
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(_read(tensor), dtype=dtype).view(tensor.shape)


def _read(tensor: TensorAt) -> bytearray:
    data, position = bytearray(tensor.nbytes), 0
    for block in read_blocks(tensor):
        data[position : position + len(block)] = block
        position += len(block)
    return data


def _no_dtype(tensor: TensorAt, framework: str, hint: str) -> UsageError:
    return UsageError(tensor.place, f"{framework} has no dtype for {tensor.dtype}", hint, code="options.array-dtype")
