"""Measure the peak memory of ranks with 8, 64 and 512 microbatches, by schedule, and compare it with the plan.

    python bench/memory.py [--schedules 1F1B ...] [--allocator compact] [--larger] [--out bench/results/memory.json]

`runner launch` on two pipeline ranks; a rank's peak is the most memory that its process had resident, over what it had
before it built its stages. GPipe and LoopedBFS keep every microbatch until the backwards begin: they run with 8 and 64.
What the plan leaves out hardly grows with the model: --larger trains one of twice the memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

CONFIG = {**measure.LLAMA, "vocab_size": 4096, "num_hidden_layers": 4}
LAYOUTS = {
    "1F1B": "pp=2", "Interleaved1F1B": "pp=2,vpp=2", "InterleavedZeroBubble": "pp=2,vpp=2",
    "ZBVZeroBubble": "pp=2,style=v", "DualPipeV": "pp=2,style=v", "GPipe": "pp=2", "LoopedBFS": "pp=2,vpp=2",
}  # fmt: skip
KEEPS_ALL = ("GPipe", "LoopedBFS")
SEQ_LEN = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak of a rank: of its process, and over what that had before it built its stages, also as planned."""

    nbytes: int
    beyond_nbytes: int
    planned_nbytes: int


def main() -> None:
    parser = measure.options_of(__doc__)
    parser.add_argument("--schedules", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--allocator", choices=("compact", "fast"), default="compact")
    parser.add_argument("--microbatches", nargs="*", type=int, default=[8, 64, 512])
    parser.add_argument("--larger", action="store_true")
    options = parser.parse_args()
    config, rows = measure.LLAMA if options.larger else CONFIG, {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-memory-") as scratch:
        root = Path(scratch)
        measure.write_llama(root / "model", config)
        for schedule in options.schedules:
            layout = LAYOUTS[schedule]
            if not (packed := root / layout).exists():
                measure.run_quietly(
                    [*measure.RESHARD, "pack", str(root / "model"), "--layout", layout, "--out", str(packed)]
                )
            rows[schedule] = compare(packed, schedule, options.allocator, options.microbatches)
            print(schedule, rows[schedule], file=sys.stderr)
    result = {
        "what": "peak memory of the ranks of runner launch over what a rank had before it built its stages, by the "
        "number of microbatches, and over what was planned",
        **measure.circumstances(),
        "model": config,
        "allocator": options.allocator,
        "schedules": rows,
    }
    measure.write_result(result, options.out)


def compare(packed: Path, schedule: str, allocator: str, counts: Sequence[int]) -> dict[str, Any]:
    """Return the peaks of one schedule: the largest, and the ratios of both ranks."""
    row: dict[str, Any] = {}
    peaks: dict[int, list[Peak]] = {}
    for count in (count for count in counts if count < 512 or schedule not in KEEPS_ALL):
        peaks[count] = ranks = run(packed, schedule, count, allocator)
        row[f"{count}, MB"] = round(max(peak.beyond_nbytes for peak in ranks) / 1e6, 1)
        ratios = [peak.beyond_nbytes / peak.planned_nbytes for peak in ranks]
        row[f"{count}, least over plan"], row[f"{count}, most over plan"] = round(min(ratios), 3), round(max(ratios), 3)
    pairs = [*zip(peaks[max(peaks)], peaks[min(peaks)], strict=True)]
    row["most over least"] = round(max(last.beyond_nbytes / first.beyond_nbytes for last, first in pairs), 3)
    row["most over least, whole process"] = round(max(last.nbytes / first.nbytes for last, first in pairs), 3)
    return row


def run(packed: Path, schedule: str, num_microbatches: int, allocator: str) -> list[Peak]:
    """Return the peak of each rank."""
    with tempfile.TemporaryDirectory(dir=packed.parent) as log:
        measure.run_runner(
            "launch", packed, "--nproc-per-node", 2, "--log-dir", log, "--", "--data", "synthetic", "--seq-len",
            SEQ_LEN, "--global-batch", num_microbatches, "--microbatch", 1, "--steps", 1 + (num_microbatches < 512),
            "--schedule", schedule, "--allocator", allocator, "--no-self-check",
        )  # fmt: skip
        lines = [json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]
    loads = {line["rank"]: line for line in lines if "load_s" in line}
    ends = {line["rank"]: line["peak_nbytes"] for line in lines if "rank" in line and "load_s" not in line}
    return [
        Peak(
            nbytes=ends[rank],
            beyond_nbytes=ends[rank] - loads[rank]["base_nbytes"],
            planned_nbytes=loads[rank]["planned_nbytes"],
        )
        for rank in sorted(loads)
    ]


if __name__ == "__main__":
    main()
