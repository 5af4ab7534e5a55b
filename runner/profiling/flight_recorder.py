"""torch's flight recorder: the last collectives of each rank, kept in memory and dumped when a rank hangs.

torch itself dumps it when NCCL times out, but not for gloo, nor when a step hangs for another reason: then the rank's
watchdog does. `torchfrtrace LOG_DIR/flight-recorder` shows which ranks joined which collective.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import MutableMapping
from pathlib import Path

# Each with the names that torch 2.13 reads, in order of precedence.
# Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp.
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_NUM_ENTRIES = 2000
_LIMIT_S = 5.0


def enable_flight_recorder(log_dir: Path, environment: MutableMapping[str, str]) -> None:
    """Make torch record this rank's collectives; call it before the first. Variables already set are unchanged."""
    folder = log_dir.resolve() / "flight-recorder"
    for names, value in ((_SIZE, str(_NUM_ENTRIES)), (_ON_TIMEOUT, "1"), (_FILE, str(folder / "rank_"))):
        if not any(name in environment for name in names):
            environment[names[0]] = value
    if environment.get(_FILE[0]) == str(folder / "rank_"):
        with contextlib.suppress(OSError):  # whatever must be written there reports the error
            folder.mkdir(parents=True, exist_ok=True)


def dump_flight_recorder(rank: int) -> None:
    """Dump this rank's flight recorder to the file that torch's tools read.

    It never raises, and waits for at most a few seconds: the rank may hang in any lock.
    """
    writer = threading.Thread(target=_write, args=(rank,), daemon=True)
    writer.start()
    writer.join(_LIMIT_S)


def _write(rank: int) -> None:
    prefix = next((os.environ[name] for name in _FILE if name in os.environ), None)
    if prefix is None:
        return
    import torch
    from torch._C import _distributed_c10d as c10d

    of_nccl = torch.cuda.is_initialized() and hasattr(c10d, "_dump_nccl_trace")  # type: ignore[no-untyped-call]
    dump = c10d._dump_nccl_trace if of_nccl else c10d._dump_fr_trace  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        Path(f"{prefix}{rank}").write_bytes(dump())
