"""Time `reshard pack` of a DCP checkpoint beside `cp -r` and a flush, and torch's dcp_to_torch_save, run by run.

    python bench/imports.py --gb 4 --out bench/results/imports-4gb.json [--runs 3] [--folder DIR]

torch writes the checkpoint, one chunk for each tensor. dcp_to_torch_save flushes nothing.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

WIDTH = 2048
CONVERT = (
    "import os, sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save; "
    "os.mkdir(sys.argv[2]); dcp_to_torch_save(sys.argv[1], sys.argv[2] + '/whole.pt')"
)


def main() -> None:
    options = measure.options_of(__doc__, gb=4.0).parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-imports-") as scratch:
        root = Path(scratch)
        nbytes = write_checkpoint(root / "model", llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        source, packed, copied = root / "step-0", root / "packed", root / "copied"
        save_dcp(root / "model", source)
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
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        "pack_gib_per_s": round(nbytes / 2**30 / statistics.median(turn["pack"].wall_s for turn in turns), 2),
        "ratios": {
            f"pack to {other}": measure.median_ratio(
                (turn["pack"].wall_s for turn in turns), (turn[other].wall_s for turn in turns)
            )
            for other in ("cp_and_sync", "dcp_to_torch_save")
        },
        "commands": {name: measure.summary([turn[name] for turn in turns]) for name in commands},
    }
    measure.write_result(result, options.out)


def save_dcp(model: Path, folder: Path) -> None:
    """Let torch write the model's tensors, and add its config."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    state = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without process groups
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    shutil.copy(model / "config.json", folder)


def check(pack: list[str], root: Path) -> None:
    """Check the result first: every tensor of the pack equals that of the model that was saved."""
    measure.run_quietly(pack)
    measure.run_quietly([*measure.RESHARD, "verify", str(root / "packed"), "--against", str(root / "model"), "--quiet"])
    shutil.rmtree(root / "packed")


if __name__ == "__main__":
    main()
