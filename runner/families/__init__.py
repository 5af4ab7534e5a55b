"""Model families: from a Hugging Face config to the modules of one stage, and names both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from manifests.models import model_shape
from runner.pieces import Piece
from runner.recipe import check_trainable

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["FAMILIES", "Family", "family_for"]


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

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device."""
        ...

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        """Compute the buffers that no file holds, such as the rotary cache, on `device`."""
        ...

    def to_hf(self, name: str) -> str:
        """Give the Hugging Face FQN of a parameter that `build` made; of several, the first."""
        ...

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        """Give the parts of Hugging Face tensors that lie in `memory`.

        `memory` is a box of the parameter `name`, or of a moment of it, that begins at `offset`.
        """
        ...


def family_for(config: Mapping[str, object], *, max_seq_len: int, where: str = "config.json") -> Family:
    """Give the family of a Hugging Face config, for sequences of at most `max_seq_len` tokens.

    Raises:
        InputError: an architecture that is not known, or a field that the family does not model.
    """
    architecture = model_shape(config, where).architecture
    check_trainable(architecture, where)
    return FAMILIES[architecture](config, max_seq_len, where)


def _llama(config: Mapping[str, object], max_seq_len: int, where: str) -> Family:
    # torchtitan takes seconds to import: not before a model is wanted.
    from runner.families.llama import Llama

    return Llama(config, max_seq_len=max_seq_len, where=where)


FAMILIES: Mapping[str, Callable[[Mapping[str, object], int, str], Family]] = {"LlamaForCausalLM": _llama}
