"""What vLLM reads of a PEFT folder that a run saves, and the MXFP4 encoder that vLLM has of triton_kernels."""

from __future__ import annotations

import enum
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file

from reshard.transforms.encoders import quantize_mxfp4
from tests.builders import pack
from tests.fast.reshard.transforms.test_quantize import BF16, at, bytes_of, codes_and_scales
from tests.interop.test_readers import HERE, functions_in, part_of_interop
from tests.process.runner.training.adapter_cases import FIELDS, QWEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_vllm_reads_every_adapter_of_a_saved_folder_with_its_scale(tmp_path: Path) -> None:
    import transformers

    place = part_of_interop("vllm")
    kind = getattr(transformers, QWEN)
    kind(kind.config_class(**FIELDS[QWEN])).save_pretrained(tmp_path / "model")
    manifest = pack(tmp_path / "model", tmp_path / "packed", "pp=1")
    flags = ("--lora-rank", "4", "--lora-alpha", "6", "--lora-experts", "--lora-rslora", "--data", "synthetic",
             "--seq-len", "16", "--steps", "1", "--save", tmp_path / "adapter", "--no-self-check")  # fmt: skip
    command = [sys.executable, "-m", "runner", "launch", manifest, "--log-dir", tmp_path / "log", "--", *flags]
    subprocess.run(list(map(str, command)), check=True, timeout=200)
    command = [sys.executable, HERE / "read_vllm_lora.py", place, tmp_path / "adapter", tmp_path / "found.npz"]
    subprocess.run(list(map(str, command)), check=True, timeout=100)
    found, saved = np.load(tmp_path / "found.npz"), load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").removesuffix(".weight"): name for name in saved}
    read = {name.replace(".lora_A", ".a").replace(".lora_B", ".b"): name for name in names}
    assert {name for name in found.files if not name.endswith(".scale")} == read.keys()
    assert all(np.array_equal(found[name], saved[names[read[name]]]) for name in read)
    assert {float(found[name]) for name in found.files if name.endswith(".scale")} == {6 / 4**0.5}


def test_mxfp4_codes_and_scales_are_those_of_triton_kernels() -> None:
    path = part_of_interop("vllm") / "vllm/third_party/triton_kernels/numerics_details/mxfp.py"
    rounding = enum.Enum("DequantScaleRoundingMode", ["ROUND_UP", "ROUND_DOWN"])
    named: dict[str, Any] = {
        "torch": torch, "F": F, "MXFP_BLOCK_SIZE": 32, "DequantScaleRoundingMode": rounding,
        "triton": SimpleNamespace(cdiv=lambda count, size: -(-count // size)),
    }  # fmt: skip
    names = {"downcast_to_mxfp_torch", "right_shift_unsigned", "get_max_quant_val"}
    encode = functions_in(path, names, named)["downcast_to_mxfp_torch"]
    noise = torch.Generator().manual_seed(0)
    finite = torch.where(BF16.isfinite(), BF16, 0)
    for values in (
        finite.reshape(2, 256, -1),
        finite[finite.float().abs().argsort()].reshape(1, -1, 32).transpose(1, 2),
        torch.randn(3, 96, 40, generator=noise).mul(3).exp().bfloat16(),
        (torch.randint(-24, 25, (3, 320, 40), generator=noise) / 4).bfloat16(),
    ):
        codes, scales = encode(values, torch.uint8, 1)
        expected = (bytes_of(codes.transpose(1, 2)), bytes_of(scales.transpose(1, 2)))
        assert codes_and_scales(partial(quantize_mxfp4, at(values))) == expected
