"""Time `reshard pack` of a DCP checkpoint beside `cp -r` and a flush, and torch's dcp_to_torch_save, run by run.

    python bench/imports.py --gb 4 --out bench/results/imports-4gb.json [--runs 3] [--ranks 2] [--folder DIR]

torch writes the checkpoint: whole tensors, or with --ranks N the rows of N ranks, as FSDP shards them. Each turn begins
with another contender; dcp_to_torch_save flushes nothing. Processor time includes the start of Python.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint
from paired import ratio

WIDTH = 2048
PEERS_SCRIPT = Path(__file__).with_name("peers.py")
CONVERT = (
    "import os, sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save; "
    "os.mkdir(sys.argv[2]); dcp_to_torch_save(sys.argv[1], sys.argv[2] + '/whole.pt')"
)


def main() -> None:
    parser = measure.options_of(__doc__, gb=4.0)
    parser.add_argument("--ranks", type=int, default=1, help="ranks that save the checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-imports-") as scratch:
        root = Path(scratch)
        nbytes = write_checkpoint(root / "model", llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        source, packed, copied = root / "step-0", root / "packed", root / "copied"
        save_dcp(root / "model", source, options.ranks)
        pack = [*measure.RESHARD, "pack", str(source), "--layout", "pp=4", "--out", str(packed), "--quiet"]
        check(pack, root)
        shutil.rmtree(root / "model")
        commands = {
            "pack": (pack, packed),
            "cp_and_sync": (["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', str(source), str(copied)], copied),
            "dcp_to_torch_save": ([sys.executable, "-c", CONVERT, str(source), str(root / "whole")], root / "whole"),
        }
        load = [measure.load_average()]
        measures = {name: partial(measure.run_measured, *command) for name, command in commands.items()}
        turns = measure.take_turns(measures, options.runs)
    result = {
        "what": "reshard pack of a DCP checkpoint to 4 stages with digests, cp -r and sync, and torch's "
        "dcp_to_torch_save, in turn; warm cache; medians of ratios within a turn",
        **measure.circumstances(),
        "nbytes": nbytes,
        "ranks": options.ranks,
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        "pack_gib_per_s": round(nbytes / 2**30 / statistics.median(turn["pack"].wall_s for turn in turns), 2),
        "ratios": {f"pack to {other}": ratio(turns, "pack", other) for other in ("cp_and_sync", "dcp_to_torch_save")},
        "commands": {name: measure.summary([turn[name] for turn in turns]) for name in commands},
    }
    measure.write_result(result, options.out)


def save_dcp(model: Path, folder: Path, num_ranks: int) -> None:
    """Let torch write the model's tensors, each rank its rows, and add its config."""
    measure.run_ranks(num_ranks, str(PEERS_SCRIPT), "dcp-shards", str(model), str(folder))
    shutil.copy(model / "config.json", folder)


def check(pack: list[str], root: Path) -> None:
    """Check the result first: every tensor of the pack equals that of the model that was saved."""
    measure.run_quietly(pack)
    measure.run_quietly([*measure.RESHARD, "verify", str(root / "packed"), "--against", str(root / "model"), "--quiet"])
    shutil.rmtree(root / "packed")


if __name__ == "__main__":
    main()
