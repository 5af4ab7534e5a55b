"""Time pack, load and a training step of this commit beside those of an older one, and `cp -r`, turn by turn.

    git worktree add /tmp/old COMMIT
    python bench/paired.py /tmp/old --gb 1 --out bench/results/paired.json [--runs 7] [--verbs load step]

Both commits run with this Python and these packages, each command in a process of its own. Each turn begins with
another contender. Large tensors are two of 512 MiB, each of which several threads of this commit share. A load is what
`bench/load.py` times: one stage of four, read, verified and copied, imports not timed. A step is the median of those
of a small Llama on two ranks, one thread each. Ratios are medians of ratios within a turn; CPU time is reported too,
which other work affects less. With --verbs, the ratios of others stay in --out, under the commit that they are of.
"""

from __future__ import annotations

import filecmp
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_config, llama_of, write_checkpoint

WIDTH = 1024
LARGE = {"vocab_size": 256 << 10}  # so that the embedding and the head have 512 MiB each
NUM_STEPS = 10  # of the timed training
VERBS = ("pack", "pack large tensors", "load", "step")
LOADS_PER_PACK = 4  # a load takes a fifth of a second, in which other work and the placement of pages show most
CACHE = os.path.join(tempfile.gettempdir(), "bench-paired-compiled")
COMMAND = (sys.executable, "-c", "from reshard.cli import main; main()")  # of either commit


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = measure.options_of(__doc__, gb=1.0, runs=7)
    parser.add_argument("old", type=Path, help="checkout of the older commit")
    parser.add_argument("--verbs", nargs="+", default=VERBS, choices=VERBS, help="which of them to time")
    options = parser.parse_args()
    checkouts = {"new": measure.ROOT, "old": options.old.resolve()}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-paired-") as scratch:
        root = Path(scratch)
        source, packed = root / "source", root / "packed"
        nbytes = write_checkpoint(source, llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        check(checkouts, source, packed)
        large = root / "large"
        write_checkpoint(large, llama_config(4, WIDTH) | LARGE, num_shards=4)
        packs, packs_of_large = (
            {name: partial(pack, checkout, each, root / f"packed-{name}") for name, checkout in checkouts.items()}
            for each in (source, large)
        )
        loads: dict[str, Callable[[], Taken]] = {
            name: partial(load, checkout, source, packed / name) for name, checkout in checkouts.items()
        }
        measure.write_llama(root / "small")
        for name, checkout in checkouts.items():
            small = ["pack", str(root / "small"), "--layout", "pp=2", "--out", str(root / "small-packed" / name)]
            run([*COMMAND, *small], checkout)
        steps: dict[str, Callable[[], Taken]] = {
            name: partial(step, checkout, root / "small-packed" / name) for name, checkout in checkouts.items()
        }
        average = [measure.load_average()]
        contenders: dict[str, Mapping[str, Callable[[], Taken]]] = {
            "pack": {**packs, "cp": partial(copy, source, root / "copied")},
            "pack large tensors": packs_of_large,
            "load": loads,
            "step": steps,
        }
        found = {
            verb: measure.take_turns(contenders[verb], options.runs * (LOADS_PER_PACK if verb == "load" else 1))
            for verb in options.verbs
        }
    measure.write_result(
        {
            "what": "pack (4 shards to 4 stages, --no-sync) and load (one stage of four) by two commits and cp -r, and "
            "training steps, in rotating order; warm cache; medians of ratios within a turn",
            **measure.circumstances(),
            "old_commit": commit_of(checkouts["old"]),
            "nbytes": nbytes,
            "load_average": [*average, measure.load_average()],
            "turns": options.runs,
            "note": "wall and processor time of whole processes, with the start of Python; under a load average above "
            "the number of cores, only processor time means much",
            "ratios": {
                **ratios_of_others(options.out, options.verbs),
                **{
                    f"{verb}, new to {other}": ratio(found[verb], "new", other)
                    for verb, other in (*((verb, "old") for verb in VERBS), ("pack", "cp"))
                    if verb in found
                },
            },
            "taken": {
                verb: [{name: asdict(each) for name, each in turn.items()} for turn in found[verb]] for verb in found
            },
        },
        options.out,
    )


def ratios_of_others(out: str | None, verbs: Collection[str]) -> dict[str, object]:
    """Return the ratios of verbs that were not timed now from the older result, named by its commit."""
    if out is None or not Path(out).exists():
        return {}
    result = json.loads(Path(out).read_text())
    return {
        name.replace("new", result["commit"]): figures
        for name, figures in result["ratios"].items()
        if name.partition(",")[0] not in verbs
    }


def check(checkouts: Mapping[str, Path], source: Path, packed: Path) -> None:
    """Check the result first: both commits write the same shards, byte for byte; each loads those that it wrote."""
    for name, checkout in checkouts.items():
        run(pack_command(source, packed / name), checkout)
    shards = sorted({path.name for name in checkouts for path in (packed / name).glob("*.safetensors")})
    _, differing, missing = filecmp.cmpfiles(packed / "new", packed / "old", shards, shallow=False)
    if not shards or differing or missing:
        raise SystemExit(f"the commits write other shards: {differing + missing or 'none at all'}")


def pack_command(source: Path, out: Path) -> list[str]:
    return [*COMMAND, "pack", str(source), "--layout", "pp=4", "--out", str(out), "--quiet", "--no-sync"]


def pack(checkout: Path, source: Path, out: Path) -> Taken:
    return timed(pack_command(source, out), checkout, out)


def copy(source: Path, out: Path) -> Taken:
    return timed(["cp", "-r", str(source), str(out)], measure.ROOT, out)


def load(checkout: Path, source: Path, packed: Path) -> Taken:
    """Return the seconds that the loader measured itself; the processor's are of the whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    script = checkout / "bench/load.py"
    state = ["warm"] if "STATES" in script.read_text() else []  # an older one has no others
    command = [sys.executable, str(script), "--child", "runner", *state, str(source), str(packed)]
    said = run(command, checkout)
    return Taken(wall_s=round(json.loads(said.splitlines()[-1])["load_s"], 4), cpu_s=measure.cpu_s_since(before))


def step(checkout: Path, packed: Path) -> Taken:
    """Return the seconds of a step that the run logged; the processor's are of the whole run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall_s = measure.step_s(packed, NUM_STEPS, checkout=checkout, PYTHONPYCACHEPREFIX=CACHE)
    return Taken(wall_s=round(wall_s, 5), cpu_s=measure.cpu_s_since(before))


def timed(command: Sequence[str], checkout: Path, out: Path) -> Taken:
    """Run a command, then remove what it wrote and leave nothing to flush to the next one."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run(command, checkout)
    taken = Taken(wall_s=round(time.perf_counter() - began_s, 4), cpu_s=measure.cpu_s_since(before))
    shutil.rmtree(out)
    os.sync()
    return taken


def run(command: Sequence[str], checkout: Path) -> str:
    """Run a command with the packages of a checkout, and return what it printed.

    Modules are compiled once, in the warmup, as those of an installed package: else the length of the code is timed.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": CACHE}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def ratio(turns: Sequence[Mapping[str, Taken]], ours: str, theirs: str) -> dict[str, float]:
    """Return the medians of the ratios within a turn, and the lowest and highest of the wall times'."""
    walls = [turn[ours].wall_s / turn[theirs].wall_s for turn in turns]
    return {
        "turns": len(turns),
        "wall": round(statistics.median(walls), 3),
        "lowest": round(min(walls), 3),
        "highest": round(max(walls), 3),
        "cpu": measure.median_ratio((turn[ours].cpu_s for turn in turns), (turn[theirs].cpu_s for turn in turns)),
    }


def commit_of(checkout: Path) -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return told.stdout.strip()


if __name__ == "__main__":
    main()
