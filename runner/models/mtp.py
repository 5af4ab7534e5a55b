"""Multi-token prediction (MTP) in stages, on transformers' decoder layers.

# Note [MTP layers]
The k-th MTP layer takes what the (k-1)-th returned for each token, the first one what the model's last norm returned,
and the embedding of the k-th token after it, and predicts the token after that. The tokens travel to the stages with
MTP layers, and what these layers return travels to the head, which computes the logits of all depths at once, as more
rows. Masks and positions are those that the last layer gets, in which a token is as far from the others as the one that
it is joined with. Where a row has no further token, token 0 is embedded, and no loss depends on what comes of it.

Files have a copy of the embedding and of the head in each MTP layer. They are parameters of it, tied to the model's.

# Note [Borrowed weights]
A stage whose MTP layer needs the last norm, or an embedding of which files have no copy, and which has not the module
itself, borrows it: its parameter is in no file and no optimizer, its gradient is added to the owner's, and after a step
it takes the owner's value. See `runner.training.ties`. The owner of the norm then receives what it would return.
Without gradients, as in an evaluation, no MTP layer runs, and the owner applies the norm.

Source: DeepSeek-V3 Technical Report, 2.2, equations 21 to 25; transformers 5.23, `MtpModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import MtpModel

from manifests.models.catalogue import CatalogueEntry
from manifests.models.mtp import EMBEDDING, HEAD, MtpLayers
from runner.models.family import BORROWED
from runner.models.stage_of_any import StageOfAny
from runner.tensors.row_parts import shift_left

_BY_LAYER = ("layer_types", "mlp_layer_types")  # lists in configs without entries for MTP layers: they are as the last


def add_mtp_layers(mtp: MtpLayers, model: Any, layers: str, norm: str) -> None:
    """Append the layers to a model's list of layers, of which the model runs only its own."""
    listed, config = model.get_submodule(layers), model.config.get_text_config()
    num_layers, width, norm_class = len(listed), config.hidden_size, type(model.get_submodule(norm))
    is_listed = any(getattr(config, name, None) is not None for name in _BY_LAYER)
    for number in range(len(mtp.modules)):
        layer = _class_of(type(listed[0]))(config, num_layers - 1 if is_listed else num_layers + number)
        layer.enorm, layer.hnorm = (_norm(norm_class, config) for _ in range(2))
        layer.shared_head = nn.Module()
        layer.eh_proj = nn.Linear(2 * width, width, bias=False)
        layer.shared_head.norm = _norm(norm_class, config)
        if EMBEDDING in mtp.copies:
            padding = model.get_input_embeddings().padding_idx
            layer.embed_tokens = nn.Embedding(config.vocab_size, width, padding)
        if HEAD in mtp.copies:
            layer.shared_head.head = nn.Linear(width, config.vocab_size, bias=False)
        listed.append(layer)


def reference_of(mtp: MtpLayers, model: Any, layers: str, norm: str) -> MtpModel:
    """Return transformers' own MTP layers of a whole model, and add layers with the same parameters to it."""
    config, count = model.config.get_text_config(), len(mtp.modules)
    config.num_mtp_layers = count
    for name in _BY_LAYER:
        if getattr(config, name, None) is not None:
            setattr(config, f"mtp_{name}", getattr(config, name)[-1:] * count)
    reference = MtpModel(model, count)  # of the class of the last layer
    for part in reference.layers.modules():
        model._init_weights(part)  # which knows that class
    add_mtp_layers(mtp, model, layers, norm)
    listed = model.get_submodule(layers)
    for layer, added in zip(reference.layers, listed[-len(mtp.modules) :], strict=True):
        tensors = dict((*layer.named_parameters(), *layer.named_buffers()))
        tensors |= {"embed_tokens.weight": model.get_input_embeddings().weight}
        tensors |= {"shared_head.head.weight": model.get_output_embeddings().weight}
        for name, _ in [*added.named_parameters(), *added.named_buffers()]:
            module, _, leaf = name.rpartition(".")
            there = name.replace("shared_head.norm.", "post_norm.")
            tensor = tensors[there] if there in tensors else tensors[f"mtp_block.{name}"]
            setattr(added.get_submodule(module), leaf, tensor)
    return reference


class MtpStage(StageOfAny):
    """Some modules of a model with MTP layers; see Note [MTP layers].

    Shapes: tokens (B, L) in at first. A dict between stages: `main`, as `StageOfAny` has it; `tokens` (B, L), or None
    after the last MTP layer; `depths`, a hidden state (B, L, D) of each MTP layer that has run. Logits (B + K B, L, V)
    out at last, those of each of K depths after those of the depth before; K is 0 without gradients.
    """

    def __init__(
        self,
        model: Any,
        entry: CatalogueEntry,
        layers: str,
        owned: frozenset[str],
        names: Mapping[str, str],
        mtp: MtpLayers,
    ) -> None:
        listed, (embedding, norm) = model.get_submodule(layers), (entry.inputs[0], entry.outputs[0])
        shared = {module: model.get_submodule(names[module]) for module in (embedding, norm)}
        beyond = list(listed[-len(mtp.modules) :])
        del listed[-len(mtp.modules) :]
        super().__init__(model, entry, layers, owned, names)
        listed[-1].register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        if self._gives_logits:
            model.get_submodule(names[entry.outputs[-1]]).register_forward_pre_hook(self._add_depths)
        self._num_mtp = len(mtp.modules)
        self._mtp: dict[int, Any] = {}  # by how many layers run before
        for number, (module, layer) in enumerate(zip(mtp.modules, beyond, strict=True)):
            listed.append(layer if module in owned else nn.Identity())
            if module in owned:
                self._mtp[number] = layer
        needed = {norm} if 0 in self._mtp and norm not in owned else set()
        if self._mtp and EMBEDDING not in mtp.copies:
            needed |= {embedding}
        if norm in owned and 0 not in self._mtp:  # the stage of the first MTP layer applies it
            shared[norm].forward = partial(_without_gradients, shared[norm].forward)
        for module in sorted(needed - owned):
            self._borrow(names[module], shared[module])
        self._norm = (shared[norm],) if norm in needed else ()
        self._embeds = embedding in needed  # in place of its MTP layers
        self.embedding = (shared[embedding],) if self._embeds else self.embedding
        self._depths: list[torch.Tensor] = []
        self._tokens: torch.Tensor | None = None
        self._inputs: Mapping[str, Any] = {}

    def forward(self, given: Any, position_ids: torch.Tensor | None = None) -> Any:
        if isinstance(given, dict):
            main, self._tokens, self._depths = given["main"], given["tokens"], list(given["depths"])
        else:
            main, self._tokens, self._depths = given, given, []
        output = super().forward(main, position_ids)
        if not self._gives_logits:
            if torch.is_grad_enabled():
                output = self._norm[0](output) if self._norm else output
                self._run_mtp(output)
            is_needed = torch.is_grad_enabled() and len(self._depths) < self._num_mtp
            tokens = self._tokens if is_needed else None
            output = {"main": output, "tokens": tokens, "depths": tuple(self._depths)}
        self._tokens, self._depths, self._inputs = None, [], {}
        return output

    def _run_mtp(self, hidden: torch.Tensor) -> None:
        """Run the MTP layers of this stage; `hidden` is what the model's last norm returned."""
        for number, layer in self._mtp.items():
            before = self._depths[-1] if number else hidden
            assert self._tokens is not None
            following = shift_left(self._tokens, number + 1, self.parts)
            given = self.embedding[0](following) if self._embeds else following
            self._depths.append(layer(before, given, **self._inputs))

    def _add_depths(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor] | None:
        hidden, *labels = args
        if labels or not torch.is_grad_enabled():  # labels: in a loss in chunks, of what has left this stage
            return None
        self._run_mtp(hidden)
        return (torch.cat([hidden, *self._depths]),)

    def _note_inputs(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = {name: value for name, value in kwargs.items() if name != "hidden_states"}

    def _borrow(self, name: str, module: nn.Module) -> None:
        """Add a module of another stage under its name; see Note [Borrowed weights]."""
        around: nn.Module = self
        for part in (BORROWED.rstrip("."), *name.split(".")[:-1]):
            if part not in around._modules:
                around.add_module(part, nn.Module())
            around = around.get_submodule(part)
        around.add_module(name.rpartition(".")[2], module)


def _without_gradients(forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return hidden if torch.is_grad_enabled() else forward(hidden)


def _class_of(layer_class: Any) -> Any:
    """Return the class of MTP layers around this class of decoder layers."""

    class MtpLayer(layer_class):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, following: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            # Tokens are embedded here, where FSDP has gathered the layer's copy of the embedding.
            embedded = following if following.is_floating_point() else self.embed_tokens(following)
            joined = torch.cat([self.enorm(embedded), self.hnorm(hidden_states)], dim=-1)
            output = super().forward(self.eh_proj(joined), **kwargs)
            hidden: torch.Tensor = self.shared_head.norm(output[0] if isinstance(output, tuple) else output)
            return hidden

    return MtpLayer


def _norm(norm_class: Any, config: Any) -> Any:
    return norm_class(config.hidden_size, eps=config.rms_norm_eps)
