"""What one token costs the modules of a model that is known by the names and sizes of its tensors.

A matrix of n elements costs a token 2 n FLOPs, an expert its share of the tokens; attention what `per_key` of the
catalogue says. A layer keeps the inputs and results of its matrices and norms, times what `kept` of the catalogue says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from manifests.models.catalogue import CatalogueEntry
from manifests.models.components import SOFTCAPPING, mtp_parts, norms_of
from manifests.models.config import ConfigReader
from manifests.models.mtp import BESIDE, COPIES, PROJECTION, is_beside
from manifests.models.shape import Shape, Work

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_MOST_WIDE = 1 << 24
_MOST_SHARED = 256  # as wide as heads may be that share keys and values as they are


@dataclass(slots=True)
class NamedLayer:
    """One layer's tensors: their names with `*` for numbers, and which numbers each such name has."""

    shapes: dict[str, Shape]  # of each name; of an expert's, the first one's
    numbers: dict[str, set[str]]  # by names with a `*`

    @property
    def num_experts(self) -> tuple[int, ...]:
        return tuple(len(numbers) for _, numbers in sorted(self.numbers.items()))


def count_of(config: ConfigReader, names: tuple[str, ...], most: int = _MOST_WIDE) -> int:
    """Return the count that a config has under one of these names."""
    return config.count(next((name for name in names if config.has(name)), names[0]), most=most)


def work_of(
    entry: CatalogueEntry,
    config: ConfigReader,
    modules: tuple[str, ...],
    layers: Mapping[str, NamedLayer],
    kinds: list[int],
    tensors: Mapping[str, Shape],
) -> dict[str, Work]:
    """Return the work of each module, by the names and sizes of its tensors."""
    work = dict.fromkeys(modules, Work())
    per_token = () if entry.all_experts else config.experts_per_token()
    width = count_of(config, entry.width)
    for module in entry.outputs:
        sizes = [dims for name, dims in tensors.items() if len(dims) == 2 and f"{name}.".startswith(f"{module}.")]
        last = max((dims[0] for dims in sizes), default=0) if module == entry.outputs[-1] else 0
        products, widths = sum(2 * prod(dims) for dims in sizes), sum(sum(dims) for dims in sizes)
        capped = last if config.has(SOFTCAPPING) else 0
        work[module] = Work(flops=products, saved=widths + capped, saved_fp32=last)
    for number, (name, layer) in enumerate(layers.items()):
        kind = kinds[number] if number < len(kinds) else -1
        per_key = entry.per_key[kind] if 0 <= kind < len(entry.per_key) else 0.0
        flops, saved, given, whole = 0.0, 0.0, 0.0, 0.0
        for leaf, dims in layer.shapes.items():
            if len(dims) >= 2 and leaf not in COPIES:
                share = _share(leaf, dims, layer, per_token[min(number, len(per_token) - 1)] if per_token else 0)
                flops += 2 * share * prod(dims)
                copies = share * (dims[0] if _are_experts(leaf, dims) else 1)
                saved, given = saved + copies * sum(dims[-2:]), given + copies * dims[-2]
                whole += copies * sum(dims[-2:]) if f".{leaf}".endswith(entry.whole) else 0
        keyed = round(per_key * heads_width(entry, config, layer.shapes)) if per_key else 0
        repeated, of_all_heads = _repeated(config, layer), keyed // 2  # keys and values
        keys = of_all_heads if repeated or entry.keeps_scores else min(of_all_heads, _keys(layer))
        work[name] = norms_of(layer.shapes, width) + Work(
            flops=round(flops), flops_per_key=keyed, saved=round(saved), products=round(given), whole=round(whole),
            keys=keys,
        )  # fmt: skip
        if 0 <= kind < len(entry.kept):
            by_sizes = work[name].saved + work[name].saved_fp32
            work[name] += Work(saved=max(round(entry.kept[kind] * by_sizes) - by_sizes, -work[name].saved))
        work[name] += Work(saved=repeated)
        if keyed and entry.keeps_scores:
            work[name] += Work(softmaxes=next((config.count(field) for field in _HEADS if config.has(field)), 0))
        if PROJECTION in layer.shapes:
            work[name] += work[entry.outputs[-1]]
    if BESIDE in work and is_beside(entry.architecture, BESIDE):
        work[BESIDE] = work[[*layers][-1]] + mtp_parts(width).work + work[entry.outputs[-1]]
    return work


def _repeated(config: ConfigReader, layer: NamedLayer) -> int:
    """Return the keys and values that attention repeats for all heads, as these are too wide to share them, less those
    of fewer heads.

    Source: transformers 5.23, `use_gqa_in_sdpa`.
    """
    queries, keys = (layer.shapes.get(f"self_attn.{name}_proj.weight") for name in "qk")
    norm = layer.shapes.get("self_attn.q_norm.weight", ())
    width = norm[0] if norm else config.count("head_dim") if config.has("head_dim") else 0
    return 2 * (queries[0] - keys[0]) if queries and keys and width > _MOST_SHARED else 0


def _keys(layer: NamedLayer) -> int:
    """Return the keys and values of a token as attention's matrices give them, which heads may share."""
    return sum(dims[0] for name in "kv" if (dims := layer.shapes.get(f"self_attn.{name}_proj.weight")))


def _share(leaf: str, dims: Shape, layer: NamedLayer, per_token: int) -> float:
    """Return how much of a tensor a token goes through, times how many such tensors there are."""
    if leaf in layer.numbers:
        count = len(layer.numbers[leaf])
        return min(per_token, count) if per_token and "expert" in leaf else count
    if _are_experts(leaf, dims) and per_token:
        return min(per_token, dims[0]) / dims[0]
    return 1


def _are_experts(leaf: str, dims: Shape) -> bool:
    """Return whether a tensor has a matrix of each expert."""
    return len(dims) == 3 and ("expert" in leaf or "moe" in leaf)


def heads_width(entry: CatalogueEntry, config: ConfigReader, layer: Mapping[str, Shape]) -> float:
    """Return the width of all heads of a layer together, which `per_key` of the catalogue counts FLOPs in."""
    projection = layer.get("self_attn.o_proj.weight", ())
    if len(projection) == 2 and not entry.latent:
        return projection[1]
    name = next((name for name in _HEADS if config.has(name)), None)
    if name is None:
        return 0
    heads, width = config.count(name), count_of(config, entry.width)
    if entry.latent:
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return heads * sum(config.count(size) if config.has(size) else 0 for size in sizes) / 2
    return heads * config.count("head_dim", width // heads or 1)
