"""Names that transformers' models have in memory, where their files have others: of experts, stacked in one tensor.

Source: transformers 5.23, `conversion_mapping.py`, the entries of qwen2_moe and mixtral, which others refer to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from reshard.formats.assemble import bad_optimizer
from reshard.tensors.slices import Slices, indices_of, rows_of

_STACKED = re.compile(r"^(.+\.experts)\.(gate_up_proj|down_proj)$")  # (experts, 2 F, D) and (experts, D, F)
_MATRICES: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
)


def has_stacked_experts(names: Iterable[str]) -> bool:
    return any(map(_STACKED.match, names))


def under_names_in_files(tensors: Mapping[str, Slices], is_in_files: Callable[[str], bool]) -> dict[str, Slices]:
    """Return the slices of each tensor under its names in files, of which a stack of experts has many."""
    return {
        new: tuple(replace(part, name=new) for part in slices_of)
        for name, slices in tensors.items()
        for new, slices_of in _in_files(name, slices, is_in_files)
    }


def _in_files(name: str, slices: Slices, is_in_files: Callable[[str], bool]) -> Iterator[tuple[str, Slices]]:
    for other in (name, name.replace(".mlp.", ".block_sparse_moe.")):
        if is_in_files(other):
            yield other, slices
            return
        stack = _STACKED.match(other)
        if stack is None or len(slices[0].whole_shape) != 3:
            continue
        for matrices in _MATRICES:
            leaves = matrices[stack[2]]
            if is_in_files(f"{stack[1]}.0.{leaves[0]}.weight"):
                rows, rest = divmod(slices[0].whole_shape[1], len(leaves))
                if rest:  # state that is reduced over both matrices, such as the `col_var` of Adafactor
                    problem = f"expected rows of {' and '.join(leaves)}, found {list(slices[0].whole_shape)} for both"
                    raise bad_optimizer(slices[0].place, problem)
                for expert, of_expert in enumerate(indices_of(slices)):
                    for number, leaf in enumerate(leaves):
                        yield f"{stack[1]}.{expert}.{leaf}.weight", rows_of(of_expert, [(number * rows, rows)])
                return
    yield name, slices
