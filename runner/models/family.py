"""What the pipeline asks of a model family."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from manifests.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from manifests.schema import TieGroup
    from runner.config.lora import LoraOptions
    from runner.models.adapters import Adapters
    from runner.tensors.local_shard import Piece
    from runner.tensors.row_parts import RowParts


RowInput = Literal["position_ids", "attention_mask"]
Plan = Literal["tp", "ep"]
BORROWED = "borrowed."  # of names of parameters in what `build` returns; see Note [Borrowed weights] in mtp.py


class FamilyOutputError(ModelError):
    """What the modules of a family return is not what a stage sends."""


class Family(Protocol):
    """A model that can be built one stage at a time.

    `modules` lists the whole model in the order it runs: the first turns tokens into activations of
    `hidden_size`, the last turns those into `vocab_size` logits.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def modules(self) -> tuple[str, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hands_on_trees(self) -> bool:
        """Whether stages may exchange any tree of dicts, lists and tuples, whose leaves are tensors and constants.

        If not, they exchange one tensor (B, L, D) in the dtype of parameters.
        """

    @property
    def row_inputs(self) -> tuple[RowInput, ...]:
        """What every stage takes as keyword arguments beside its input; see `row_inputs_of`."""

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device.

        Shapes: what is built takes tokens (B, L) or hidden (B, L, D), and returns hidden or logits (B, L, V); with
        `hands_on_trees`, a tree in place of hidden.
        """

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        """Compute the buffers that are in no file, such as the rotary cache, on `device`.

        Shapes: as `module`, which `build` returned, has them on the meta device.
        """

    def to_hf(self, name: str) -> str:
        """Return the Hugging Face FQN of a parameter that `build` made; the first of several."""

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        """Return the parts of Hugging Face tensors that are in `memory`.

        Shapes: `memory` is a region, which begins at `offset`, of the parameter `name`, of its optimizer state, or of
        a buffer that is in files.
        """

    def padded_length(self, length: int, most: int) -> int:
        """Return how many tokens, at most `most`, a row of `length` can be padded to on the right without a change.

        See Note [Padding under RoPE that depends on length] in stage_of_any.py.
        """


@runtime_checkable
class Planned(Family, Protocol):
    """A family whose matrices or experts can be distributed over ranks, by plans that name a style for each module."""

    def plans(self) -> Collection[Plan]:
        """Return the kinds of plans that it has."""

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard what `build` returned, which is on the meta device, over the tensor-parallel ranks of a mesh."""

    def summed_over_heads(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients on a rank cover only its own heads, and must be reduced."""

    def distribute_experts(self, module: nn.Module, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
        """Distribute the experts of what `build` returned, which is on the meta device, over the ranks of a mesh.

        The ranks of `tensor_mesh` have the same tokens. No plan of tensor parallelism applies to these experts.
        """


@runtime_checkable
class OnTransformers(Planned, Protocol):
    """A family of transformers' own modules, which take adapters, masks of documents, and every parallelism.

    It may have MTP layers, see Note [MTP layers] in mtp.py.
    """

    mtp_weight: float  # of the mean loss of MTP layers
    parts: RowParts | None  # of rows, with context parallelism

    @property
    def mtp(self) -> object | None: ...
    def mtp_ties(self, stage_modules: Sequence[Sequence[str]]) -> tuple[TieGroup, ...]:
        """Return what stages with these modules tie beside what the manifest says."""

    @property
    def adapters(self) -> Adapters | None: ...
    def add_adapters(self, lora: LoraOptions, *, checks_names: bool = False) -> None:
        """Build modules with adapters from now on."""

    def keep_documents(self) -> None:
        """Build modules from now on that take `position_ids` (B, L), which begin at 0 in each document."""

    def split_rows(self, parts: RowParts) -> None:
        """Build modules from now on that run on this rank's part of each row."""

    def float32_names(self, dtype: torch.dtype) -> Collection[str]:
        """Return the names, in what `build` returned for any modules, of the tensors that a model of this dtype keeps
        in float32.
        """


def row_inputs_of(
    family: Family,
    tokens: torch.Tensor,
    labels: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of every stage of a family for these rows.

    `position_ids` are those of tokens in their document. `attention_mask` is 1 up to a row's last label that counts,
    and 0 for the padding after it.

    Shapes: tokens, labels and positions (B, L); labels are the next tokens, None: all count; positions, None: 0 to L.
    """
    inputs: dict[str, torch.Tensor] = {}
    if "position_ids" in family.row_inputs and positions is None:
        positions = tokens.new_ones(tokens.shape).cumsum(1) - 1
    if positions is not None:
        inputs["position_ids"] = positions
    if "attention_mask" in family.row_inputs:
        counts = tokens.new_ones(tokens.shape) if labels is None else (labels >= 0).long()
        inputs["attention_mask"] = counts.flip(1).cummax(1).values.flip(1)
    return inputs


def check_output(module: nn.Module, tokens: torch.Tensor, output: object) -> None:
    """Check that modules of a family, called with tokens (B, L) or hidden (B, L, D), returned one tensor (B, L, …)."""
    expected = tuple(tokens.shape[:2])
    shape = getattr(output, "shape", None)
    if shape is not None and len(shape) == 3 and tuple(shape[:2]) == expected:
        return
    kind = type(module)
    returned = type(output).__name__ if shape is None else f"a tensor of shape {list(shape)}"
    raise FamilyOutputError(
        f"{kind.__module__}.{kind.__qualname__}.forward",
        f"expected one tensor, hidden states {[*expected, 'D']} or logits {[*expected, 'V']}, found {returned}",
        "return the tensor alone, as docs/own-models.md shows",
        code="model.family-output",
    )
