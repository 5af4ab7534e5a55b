"""The Hugging Face index beside a manifest: the shard of each weight, for readers that do not know manifests.

# Note [A packed folder is a Hugging Face folder]
Shards of whole weights are in the root, under the names that transformers gives them, and the index lists each tensor
of the model once. A tied replica that another stage needs is in that stage's folder and not in the index
(docs/adr/0022). Bundles that others could misread get no index and are in folders of their stages: those in slices,
and those beside virtual bundles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from manifests.paths import is_in_stage_folder
from manifests.schema import WEIGHTS, Holds, Manifest, TieGroup

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_NBYTES = 45 << 30  # the Hugging Face hub recommends files below 50 * 10^9 bytes
MOST_READ_HEADER_NBYTES = 25_000_000  # huggingface_hub and huggingface.js refuse longer headers

T = TypeVar("T")


def is_indexed(holds: Holds, path: str) -> bool:
    """Return whether the index lists the tensors of a shard."""
    return holds == WEIGHTS and not is_in_stage_folder(path)


def has_index(manifest: Manifest) -> bool:
    """Return whether there is an index beside a manifest."""
    return any(is_indexed(shard.holds, shard.path) for shard in manifest.shards)


def replicas_elsewhere(ties: Iterable[TieGroup]) -> frozenset[str]:
    """Return the tied FQNs that are on another stage than their owner."""
    return frozenset(member.fqn for tie in ties for member in tie.replicas if member.stage != tie.owner.stage)


def split_by_size(items: Iterable[T], nbytes_of: Callable[[T], int], most_nbytes: int) -> list[list[T]]:
    """Divide items into runs of at most `most_nbytes`; a larger item is a run of its own."""
    runs: list[list[T]] = []
    total = 0
    for item in items:
        nbytes = nbytes_of(item)
        if not runs or total + nbytes > most_nbytes:
            runs.append([])
            total = 0
        runs[-1].append(item)
        total += nbytes
    return runs


def index_blocks(weights: Mapping[str, Iterable[str]], total_nbytes: int) -> Iterator[bytes]:
    """Yield the text of an index, given the FQNs in each shard, by its path, and the bytes of all these tensors."""
    yield b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {' % total_nbytes
    between = b"\n"
    for path, names in weights.items():
        end = f": {json.dumps(path)}"
        for name in names:
            yield between + f"    {json.dumps(name)}{end}".encode()
            between = b",\n"
    yield b"\n  }\n}\n"
