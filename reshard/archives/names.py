"""The files of folders that torch.save wrote, by name: what a folder is, is known without what reads it."""

from __future__ import annotations

import re
from collections.abc import Collection

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"
MARK_NAME = "metadata.json"  # of Megatron-Core: which format this is; it writes it last
LATEST_NAMES = ("latest_universal", "latest")  # files of DeepSpeed's that name the folder of the last checkpoint
_DEEPSPEED = re.compile(
    r"(?:[^/]+/)?(?:(?:layer|mp_rank|(?:bf16_|fp16_)?zero_pp_rank)_\d+[^/]*_states\.pt|zero/[^/]+/fp32\.pt)"
)


_OF_TRANSFORMERS = re.compile(r".+\.safetensors|(?:.+/)?pytorch_model[^/]*\.bin")


def is_dcp(names: Collection[str]) -> bool:
    """Return whether a folder with these files is a DCP folder, all of whose `.distcp` files may be missing."""
    has_data = any(name.endswith(DATA_SUFFIX) for name in names)
    return METADATA_NAME in names and (has_data or not any(map(_OF_TRANSFORMERS.fullmatch, names)))


def is_deepspeed(names: Collection[str]) -> bool:
    """Return whether a folder with these files is a checkpoint of DeepSpeed's, or has one in a folder."""
    return any(map(_DEEPSPEED.fullmatch, names))


def is_megatron(names: Collection[str]) -> bool:
    """Return whether a folder with these files is one of Megatron-Core's `torch_dist` format, which is DCP's."""
    return is_dcp(names) and MARK_NAME in names


def is_chain(names: Collection[str]) -> bool:
    """Return whether a folder with these files is a chain of versions, as `reshard delta` writes it."""
    from manifests.versions import VERSION_INDEX  # slow to import

    return any(map(VERSION_INDEX.fullmatch, names))
