"""What other programs read in a packed folder: the Hugging Face index, and files by the names that they look for.

# Note [A packed folder is a Hugging Face folder]
Shards of whole weights are in the root, under the names that transformers gives them, and the index lists each tensor
of the model once. A tied replica that another stage needs is in that stage's folder and not in the index
(docs/adr/0022). Bundles that others could misread get no index and are in folders of their stages: those in slices,
and those beside virtual bundles.

# Note [Names that readers consult]
A manifest vouches for the files that it lists. transformers, vLLM and others never see it: they look for names, and
`model.safetensors` is preferred to the index, an `adapter_config.json` to the model beside it. So a file of such a name
that no manifest lists is a difference, and an auxiliary file may not have the name of weights. The names are compared
with the sources of transformers in `tests/fast/reshard/formats/huggingface/test_consulted.py`, and with those of vLLM,
SGLang and PEFT in `tests/interop/test_readers.py`, which fail when one consults another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from manifests.paths import is_in_stage_folder
from manifests.schema import WEIGHTS, Holds, Manifest, TieGroup

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_NBYTES = 45 << 30  # the Hugging Face hub recommends files below 50 * 10^9 bytes
MOST_READ_HEADER_NBYTES = 25_000_000  # huggingface_hub and huggingface.js refuse longer headers

T = TypeVar("T")
K = TypeVar("K")


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


def share_evenly(
    sizes: Iterable[tuple[K, int]], num_ranks: int, among: Mapping[K, Sequence[int]] | None = None
) -> dict[K, int]:
    """Return the rank of each item, one after the other: the one with the least so far, `among` those of the item."""
    loads, ranks = [0] * num_ranks, dict[K, int]()
    for item, size in sizes:
        ranks[item] = min(range(num_ranks) if among is None else among[item], key=loads.__getitem__)
        loads[ranks[item]] += size
    return ranks


def encode_index(weights: Mapping[str, Iterable[str]], total_nbytes: int) -> bytes:
    """Return the text of an index, given the FQNs in each shard, by its path, and the bytes of all these tensors."""
    weight_map = {name: path for path, names in weights.items() for name in names}
    return (json.dumps({"metadata": {"total_size": total_nbytes}, "weight_map": weight_map}, indent=2) + "\n").encode()


# Weights in other formats than safetensors, by suffix.
OTHER_WEIGHTS = (
    ".bin", ".ckpt", ".gguf", ".h5", ".mlmodel", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".pb", ".pt", ".pth",
    ".tflite",
)  # fmt: skip
ADAPTER_NAMES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Configs and indices, templates, code, vocabularies, and what programs unpickle or unpack.
_SUFFIXES = (
    ".bpe", ".codes", ".faiss", ".jinja", ".json", ".model", ".pkl", ".py", ".so", ".spm", ".tensors", ".tiktoken",
    ".tokenizer", ".vocab", ".yaml", ".yml",
)  # fmt: skip
_PREFIXES = (
    "tokenizer.", "vocab.", "merges.", "dict.", "emoji.", "spiece.", "sentencepiece.", "bpe.", "requirements.",
    "system_prompt.",
)  # fmt: skip
# Folders of transformers, and those from which vLLM and SGLang take weights of a model, or of a draft of it.
CONSULTED_FOLDERS = (
    "adapters", "additional_chat_templates", "audio_tokenizer", "custom_generate", "dspark", "np", "presharded",
    "speech_tokenizer", "transformer", "vision_encoder", "whisper-large-v3",
)  # fmt: skip
DIGESTS_NAME, SIGNATURE_NAME = "digests.json", "manifest.sig"  # of `reshard check --digests write` and `reshard sign`


def is_weights(path: str) -> bool:
    """Return whether a file has a name that readers of a folder take for weights or for an index of them."""
    name = path.lower()
    return "/" not in name and name.endswith((".safetensors", ".index.json", ".tensors", *OTHER_WEIGHTS))


def is_consulted(path: str) -> bool:
    """Return whether programs that open a folder may read a file of this path; see Note [Names that readers consult].

    Files in other folders than these are read only if a listed file or a caller names them.
    """
    folder, _, name = path.lower().rpartition("/")
    if folder and folder.split("/")[0] not in CONSULTED_FOLDERS:
        return False
    is_named = name.endswith(_SUFFIXES) or name.startswith(_PREFIXES)
    return (is_named or is_weights(name)) and not name.startswith(".") and path != DIGESTS_NAME
