"""Decoders on transformers' own model classes, cut by FQN.

# Note [A stage of a transformers model]
A stage runs the model's own forward. Modules of other stages are replaced by ones that do not change the hidden
state: a layer by a module that returns it, a final norm by the identity, a table of positions by zeros. Stages after
the embedding's get the hidden state in the place of embedded tokens. So masks, windows, ALiBi and rotary tables are
computed on each stage, by transformers, from the length of the sequence, and one tensor crosses between stages.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from manifests.errors import InputError, ModelError
from manifests.models import ConfigReader, model_shape
from runner.models.decoders import Decoder, decoder_of, refuse_mtp
from runner.models.implementations import without_implementations
from runner.models.lengths import forget_lengths, longest_alike
from runner.models.refusals import refusals
from runner.tensors.local_shard import Piece

_PREFIX = "model."  # of names in `CutModel`
# What a pipeline has no use for. A tied head is a parameter of its own here; see `runner.training.ties`.
_CONFIG: Mapping[str, object] = {
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "tie_word_embeddings": False,
    "use_cache": False,
}
# Sizes of experts must be multiples of this for torch's grouped product in 16 bits.
_ALIGNMENT = 8


class CutModel(nn.Module):
    """Some modules of a model; see Note [A stage of a transformers model].

    Shapes: tokens (B, L) or hidden (B, L, D) in, hidden or logits (B, L, V) out.
    """

    def __init__(
        self, model: PreTrainedModel, decoder: Decoder, whole: tuple[str, ...], modules: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.model = model
        self._base_name = decoder.base
        self._takes_tokens = whole[0] in modules
        self._gives_logits = whole[-1] in modules
        for module in whole:
            if module not in modules:
                model.set_submodule(module, _stand_in(module, decoder))
        for dropout, owner in decoder.dropouts.items():
            if owner not in modules:
                model.set_submodule(dropout, nn.Identity())

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        forget_lengths(self.model)
        runs = self.model if self._gives_logits else self.model.get_submodule(self._base_name)
        found = runs(**{"input_ids" if self._takes_tokens else "inputs_embeds": tensor}, use_cache=False)
        out: torch.Tensor = found.logits if self._gives_logits else found.last_hidden_state
        return out


class _HandedOn(nn.Module):
    """A layer of another stage."""

    def __init__(self, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor | tuple[torch.Tensor]:
        return (hidden,) if self._in_tuple else hidden


class _AddedBefore(nn.Module):
    """A table of positions of an earlier stage."""

    def forward(self, like: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros((), device=like.device)


def _stand_in(module: str, decoder: Decoder) -> nn.Module:
    if module == decoder.positions:
        return _AddedBefore()
    is_layer = module.rpartition(".")[2].isdecimal()
    return _HandedOn(in_tuple=decoder.layers_give_tuples) if is_layer else nn.Identity()


class Transformers:
    """A decoder of transformers; see `runner.models.Family`."""

    def __init__(self, config: Mapping[str, object], *, max_seq_len: int, where: str = "config.json") -> None:
        shape = model_shape(config, where)
        self.architecture, self.hidden_size = shape.architecture, shape.hidden_size
        self.modules = tuple(module for module in shape.modules if module not in shape.optional)
        self.vocab_size = shape.tensors[f"{self.modules[-1]}.weight"][0]
        decoder = decoder_of(shape.architecture)
        assert decoder is not None, shape.architecture
        self._shape, self._decoder = shape, decoder
        self.hands_on_trees = self._decoder.narrow in shape.modules  # or one tensor, but not always as wide
        self._decoder.check(ConfigReader(config, where), max_seq_len)
        self._class: type[PreTrainedModel] = getattr(transformers, shape.architecture)
        self._where = where
        with refusals(self._where):
            self._config = self._class.config_class.from_dict(
                copy.deepcopy({**without_implementations(config), **_CONFIG})
            )  # it writes into parts
        self._check_aliases(config)
        if any(size % _ALIGNMENT for name, sizes in shape.tensors.items() if ".experts." in name for size in sizes):
            self._config._experts_implementation = "eager"

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device, layers numbered as in the whole model.

        Raises:
            InputError: a config that transformers takes for no model, a version of it whose model has other
                parameters than files have, or a module for multi-token prediction.
        """
        refuse_mtp(modules, self._shape.optional, self._where)
        with refusals(self._where), torch.device("meta"), no_init_weights():
            model = self._class(copy.deepcopy(self._config))
        built = CutModel(model, self._decoder, self.modules, modules)
        self._check_parameters(built, modules)
        return built

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        for part in module.modules():
            # Both kinds compute their buffers when they are made.
            if hasattr(part, "rope_type"):
                for name, buffer in type(part)(part.config).named_buffers(recurse=False):
                    setattr(part, name, buffer.to(device))
            elif hasattr(part, "scalar_embed_scale"):
                part.embed_scale = torch.tensor(part.scalar_embed_scale, device=device)
            else:
                assert not part._non_persistent_buffers_set, type(part)
                for name, buffer in part.named_buffers(recurse=False):
                    if name in (self._class._keep_in_fp32_modules_strict or ()):
                        setattr(part, name, buffer.float())

    def to_hf(self, name: str) -> str:
        fqn = self._fqn_of(name)
        if fqn in self._shape.tensors:
            return fqn
        experts, _, leaf = fqn.rpartition(".")
        return f"{experts}.0.{self._decoder.stacked[leaf][0]}.weight"

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        fqn, shapes = self._fqn_of(name), self._shape.tensors
        if fqn in shapes:
            return (Piece(fqn=fqn, shape=shapes[fqn], offset=offset, memory=memory),)
        # All experts of a layer: (E, rows of the parts one after another, columns).
        experts, _, leaf = fqn.rpartition(".")
        first, row, column = offset
        found = []
        for index, box in enumerate(memory.unbind()):
            begin = 0
            for part in self._decoder.stacked[leaf]:
                tensor = f"{experts}.{first + index}.{part}.weight"
                rows = shapes[tensor][0]
                low, high = max(row, begin), min(row + box.shape[0], begin + rows)
                if low < high:
                    corner, lies = (low - begin, column), box[low - row : high - row]
                    found.append(Piece(fqn=tensor, shape=shapes[tensor], offset=corner, memory=lies))
                begin += rows
        return tuple(found)

    def padded_length(self, length: int, most: int) -> int:
        return longest_alike(self._config, length, most)

    def _check_aliases(self, config: Mapping[str, object]) -> None:
        """Refuse two names of one field that say different things: which of them counts is transformers' secret."""
        for alias, name in self._config.attribute_map.items():
            if alias in config and name in config and config[alias] != config[name]:
                problem = f"{config[alias]!r} contradicts {name}, which is the same field and is {config[name]!r}"
                raise ModelError(
                    f"{self._where}: {alias}", problem, "leave the wrong one out", code="config.contradictory-fields"
                )

    def _fqn_of(self, name: str) -> str:
        """Return a parameter's name in files, all experts of a layer in one."""
        in_memory, in_files = self._decoder.renamed
        return name.removeprefix(_PREFIX).replace(in_memory, in_files)

    def _check_parameters(self, built: CutModel, modules: tuple[str, ...]) -> None:
        owned = self._shape.by_module()
        expected = {fqn: self._shape.tensors[fqn] for module in modules for fqn in owned[module]}
        found = {
            piece.fqn: tuple(piece.memory.shape)
            for name, tensor in built.state_dict().items()
            for piece in self.pieces(name, tensor, (0,) * tensor.dim())
        }
        different = sorted(fqn for fqn in expected.keys() | found.keys() if expected.get(fqn) != found.get(fqn))
        if different:
            raise InputError(
                f"transformers {transformers.__version__}",
                f"its {self.architecture} differs in {len(different)} parameters, {different[0]} among them",
                "install the version that reshard[runner] asks for",
                code="system.wrong-version",
            )
