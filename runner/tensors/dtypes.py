"""torch's dtypes by the names of safetensors, and by the values of `--dtype`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["FLAG_DTYPES", "STORED_DTYPES"]

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
FLAG_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
