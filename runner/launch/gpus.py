"""The GPUs of this machine, as nvidia-smi lists them. No torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from manifests.errors import UsageError
from runner.config.flags import Device

_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_LIMIT_S = 20


def memories_gib(device: Device, environment: Mapping[str, str] = os.environ) -> tuple[float, ...]:
    """Return the memory of each GPU that ranks here would train on; nothing where there is none or it is unknown."""
    if device == "cpu" or _is_cpu_build():
        return ()
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        found = [line.split(", ") for line in done.stdout.splitlines()]
        gpus = [(index, uuid, int(mib) / 2**10) for index, uuid, mib in found]
    except (OSError, subprocess.SubprocessError, ValueError):  # no driver, or unknown output
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gib for _, _, gib in gpus)
    wanted = [word.strip() for word in visible.split(",") if word.strip()]
    return tuple(gib for word in wanted for index, uuid, gib in gpus if word == index or uuid.startswith(word))


def check_gpus(count: int, nproc_per_node: int) -> None:
    """Check that each rank of this machine has a GPU.

    Raises:
        UsageError: naming how many there are.
    """
    if 0 < count < nproc_per_node:
        raise UsageError(
            "--nproc-per-node",
            f"{nproc_per_node} ranks require a GPU each, found {count} GPUs",
            f"reshard pack MANIFEST --layout pp={count}, or train on the CPU with --device cpu after --",
            code="launch.too-few-gpus",
        )


def _is_cpu_build() -> bool:
    """Whether there is no torch, or one without GPU support."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and seldom needed

    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True
