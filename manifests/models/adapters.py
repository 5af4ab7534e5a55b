"""LoRA adapters by name: which modules a target matches, and how large their tensors are. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from manifests.digest import digest_pieces
from manifests.models.shape import ModelShape, is_expert
from manifests.schema import Manifest

ALL_LINEAR = "all-linear"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
PEFT_PREFIX = "base_model.model."  # of names in a PEFT folder
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RECORD_NAME = "adapter.json"  # of a checkpoint that has adapters alone, and refers to their base
BASE_DIGEST = "base_digest"  # of the metadata of our own PEFT folders, see `digest_of_base`
Target = str | tuple[str, ...]  # a regular expression, or the ends of names
_NAMES = re.compile(r"[\w.]+(,[\w.]+)*")
_ROUTERS = (".gate.weight", ".router.weight")


def parse_target(text: str) -> Target:
    """Read names with commas between them, `all-linear`, or a regular expression that is none of these."""
    if text != ALL_LINEAR and _NAMES.fullmatch(text):
        return tuple(text.split(","))
    re.compile(text)
    return text


def matches_target(target: Target, module: str) -> bool:
    """Return whether peft adapts a linear module of this name; `all-linear` leaves out the head."""
    if isinstance(target, str):
        return target == ALL_LINEAR or re.fullmatch(target, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in target)


def has_adapters(manifest: Manifest) -> bool:
    """Return whether a manifest is a checkpoint of adapters, whose base is another manifest."""
    return any(file.path == RECORD_NAME for file in manifest.files)


def is_adapter(fqn: str) -> bool:
    return fqn.endswith((LORA_A, LORA_B))


def adapter_sizes(shape: ModelShape, target: Target, rank: int, *, has_experts: bool) -> Iterator[tuple[str, int]]:
    """Yield about which adapters a model of this shape gets, with the parameters of each.

    Experts are counted as files have them; in memory, two matrices of each may be one.
    """
    for fqn, dims in shape.tensors.items():
        module = fqn.removesuffix(".weight")
        if module in shape.modules or not shape.count_params(fqn) or fqn.endswith(_ROUTERS):
            continue
        if is_expert(fqn):
            is_adapted = has_experts and len(dims) > 1 and not fqn.endswith("bias")
        else:
            is_adapted = module != fqn and len(dims) == 2 and matches_target(target, module)
        if is_adapted:
            *experts, rows, columns = dims
            num_experts = experts[0] if experts else 1
            yield f"{module}{LORA_A}", rank * num_experts * columns
            yield f"{module}{LORA_B}", rank * num_experts * rows


def digest_of_base(digests: Iterable[tuple[str, str | None]]) -> str | None:
    """Return a digest of adapted base tensors by their names and digests; None if one has no digest.

    It is the same however the base is packed.
    """
    items = sorted(digests)
    if not items or any(digest is None for _, digest in items):
        return None
    return digest_pieces(f"{fqn} {digest}\n".encode() for fqn, digest in items)
