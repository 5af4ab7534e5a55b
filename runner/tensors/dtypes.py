"""torch's dtypes by the names of safetensors, and by the values of `--dtype`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,  # of tables that are not trained, such as DeepSeek-V4's of tokens and experts
    "I32": torch.int32,
}
FLAG_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def readable_as(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the stored dtypes that can be read as this one: floating point as floating point, integers as integers."""
    is_float = dtype.is_floating_point
    return tuple(name for name, stored in STORED_DTYPES.items() if stored.is_floating_point == is_float)
