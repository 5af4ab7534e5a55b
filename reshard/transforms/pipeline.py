"""The layers of a DeepSpeed PipelineModule that a model is exported to, and the names of tensors in them.

What runs before the decoder layers is one layer, each decoder layer is one, and so is each module after them. See
Note [Layers that are tied].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from manifests.models import ModelShape

# Note [Layers that are tied]: a head that is tied to the input embedding is a `TiedLayerSpec` with the key of the first
# layer. With a `forward_fn` it computes with the first layer's module, and DeepSpeed neither saves nor loads a file of
# it. Without one it is a module that has the weight once more, in a file of its own, and DeepSpeed replaces what it
# loads from there by the first layer's. Outside of these files, parameters of both are called `tied_modules.KEY.*`.
_DECODER = re.compile(r"\.\d+$")


def pipeline_layers(shape: ModelShape) -> list[Mapping[str, str]]:
    """Return the layers, in the order they run: the name that each tensor has in its layer, by its owner's FQN."""
    named = {module: fqns for module, fqns in shape.by_module().items() if fqns}
    owners = {fqn: group[0] for group in shape.ties for fqn in group}
    before = next(iter([number for number, module in enumerate(named) if _DECODER.search(module)]), 0)
    inputs, rest = list(named)[:before], list(named)[before:]
    first = {fqn: _relative(fqn, module, len(inputs)) for module in inputs for fqn in named[module]}
    return [first, *({owners.get(fqn, fqn): _relative(fqn, module, 1) for fqn in named[module]} for module in rest)]


def is_tied_input(shape: ModelShape, layers: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the first layer's weights are used again, by the head."""
    return any(group[0] in layers[0] for group in shape.ties)


def _relative(fqn: str, module: str, num_modules: int) -> str:
    """Return a name relative to its module, or, where several are one layer, to what they are in."""
    if num_modules > 1:
        return fqn.removeprefix(module.rpartition(".")[0] + ".")
    return fqn.removeprefix(f"{module}.")
