"""Compare the step times that `reshard plan` predicts, from one traced run, with those that are measured.

    python bench/search.py [--steps 3] [--turns 1] [--only "four ranks"] [--out bench/results/search.json]
                           [--folder DIR --minutes 4]

The first layout of a case is trained with --trace; `reshard plan --from-run` predicts the step of each layout from it,
and each is trained. On four and eight ranks, which share cores, layers sleep as in `bench/bubble.py`: tensors and their
transfers are real, only the time of a layer is simulated. Two ranks compute, on a core each; the result has what the
search, `plan --gpus 2`, finds first for them. Some of their layouts were that at some time: the third, before a
backward in two parts was counted as longer than a whole one; the eighth, before what each microbatch takes beside its
tokens was; the ninth to the eleventh since.

Of several turns, each run's fastest counts: its median step, since other work on the machine only adds to steps. Each
turn begins with another run. --only renews one case of --out, and keeps the others. With --folder, runs are kept there,
and none is repeated: no run begins after --minutes, and the same command resumes with the others, of the same commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bubble
from measure import RESHARD, ROOT, circumstances, load_average, run_runner, write_result

from manifests.module_times import read_times

WARM = 1  # steps that do not count
LAST_TRACED = 6
_TIE = 1.02  # times within 2 % are
DONE = "load-average.json"  # in the folder of a run that has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A layout, the flags that plan and launch share, and the pipeline ranks of the layout."""

    layout: str
    flags: tuple[str, ...] = ()
    pipeline: int = 0  # 0: all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    num_ranks: int
    num_layers: int
    width: int
    seq_len: int
    global_batch: int
    trials: tuple[Trial, ...]
    wait_s: float = 0.0  # of a layer's forward, for each sequence of a microbatch; its backward takes twice that


def _trials(num_ranks: int, *uneven: str) -> tuple[Trial, ...]:
    """Return layouts of two layers a rank: even ones and uneven ones, with other schedules and microbatches."""
    even = "Et*2|" + "t*2|" * (num_ranks - 2) + "t*2L"
    virtual = "Et|" + "t|" * (2 * num_ranks - 2) + "tL"
    return (
        Trial(layout=even),
        *(Trial(layout=layout) for layout in uneven),
        Trial(layout=virtual, flags=("--schedule", "Interleaved1F1B")),
        Trial(layout=even, flags=("--schedule", "GPipe")),
        Trial(layout=even, flags=("--microbatch", "2")),
    )


CASES = (
    Case(name="four ranks", num_ranks=4, num_layers=8, width=128, seq_len=32, global_batch=8, wait_s=0.1,
         trials=_trials(4, "Et|t*2|t*2|t*3L", "Et*4|t|t|t*2L")),
    Case(name="eight ranks", num_ranks=8, num_layers=16, width=128, seq_len=32, global_batch=16, wait_s=0.05,
         trials=_trials(8, "Et|" + "t*2|" * 6 + "t*3L", "Et*4|t|t|" + "t*2|" * 4 + "t*2L")),
    Case(name="two ranks", num_ranks=2, num_layers=8, width=512, seq_len=128, global_batch=8, trials=(
        Trial(layout="pp=2"),
        Trial(layout="pp=2", flags=("--microbatch", "2")),
        Trial(layout="balance:time,pp=2,vpp=2", flags=("--schedule", "InterleavedZeroBubble")),
        Trial(layout="pp=2,vpp=2", flags=("--schedule", "Interleaved1F1B")),
        Trial(layout="pp=1", flags=("--dp-replicate", "2"), pipeline=1),
        Trial(layout="pp=1", flags=("--dp-shard", "2"), pipeline=1),
        Trial(layout="pp=1", flags=("--tp", "2"), pipeline=1),
        Trial(layout="pp=2,vpp=3", flags=("--schedule", "Interleaved1F1B")),
        Trial(layout="pp=2,vpp=4", flags=("--schedule", "Interleaved1F1B", "--microbatch", "2")),
        Trial(layout="pp=2,vpp=4", flags=("--schedule", "Interleaved1F1B", "--microbatch", "4")),
        Trial(layout="pp=1", flags=("--dp-replicate", "2", "--microbatch", "4"), pipeline=1),
    )),
)  # fmt: skip


def measure(case: Case, num_steps: int, num_turns: int, scratch: Path, end_s: float) -> dict[str, object]:
    """Return the predicted and the measured seconds of a step of each layout."""
    loads, rows, fastest = list[float](), list[dict[str, object]](), dict[int, tuple[float, Path]]()
    where = circumstances()
    scratch /= hashlib.blake2b(repr((case, num_steps, where["commit"])).encode(), digest_size=4).hexdigest()
    scratch.mkdir(exist_ok=True)
    trace, numbers = ("--trace", f"{WARM + 1}-{min(num_steps, LAST_TRACED)}"), range(-1, len(case.trials))
    for turn, place in product(range(num_turns), range(len(numbers))):
        number = numbers[(place + turn) % len(numbers)]  # -1: the traced one
        log = scratch / f"log-{turn}-{number}"
        if not (log / DONE).exists():
            if time.monotonic() > end_s:
                raise SystemExit(f"not finished: {log.name} and those after it; run the same command again")
            shutil.rmtree(log, ignore_errors=True)
            load = load_average()
            _train(case, max(0, number), num_steps, scratch, log, *(trace if number < 0 else ()))
            if case.wait_s and number < 0:  # layers sleep for each sequence, and for nothing else
                times = read_times(log / "times.json")
                (log / "times.json").write_bytes(replace(times, fixed_share=0.0).encode())
            (log / DONE).write_text(json.dumps(load))
        loads.append(json.loads((log / DONE).read_text()))
        seconds = _step_s(log, case)
        assert seconds >= 3 * case.wait_s * case.num_layers * case.global_batch / case.num_ranks, "layers did not wait"
        print(turn, number, round(seconds, 3), loads[-1], file=sys.stderr, flush=True)
        fastest[number] = min(fastest.get(number, (seconds, log)), (seconds, log))
    for number, trial in enumerate(case.trials):
        predicted, measured = _predict(case, trial, fastest[-1][1], scratch), fastest[number][0]
        rows.append({
            "layout": trial.layout, "flags": " ".join(trial.flags), "predicted_s": round(predicted, 4),
            "measured_s": round(measured, 4), "error": round(predicted / measured - 1, 4),
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    first = {} if case.wait_s else {"first_of_search": _search(case, fastest[-1][1], scratch)}
    return {
        **where, **first, "layer_waits_s": case.wait_s, "turns": num_turns, "load_average": max(loads),
        **_summary(rows),
    }  # fmt: skip


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, object]:
    predicted, measured = ([row[name] for row in rows] for name in ("predicted_s", "measured_s"))
    by_measured, best = sorted(range(len(rows)), key=measured.__getitem__), predicted.index(min(predicted))
    swapped = [
        f"{rows[first]['layout']} {rows[first]['flags']} / {rows[second]['layout']} {rows[second]['flags']}"
        for place, first in enumerate(by_measured)
        for second in by_measured[place + 1 :]
        if predicted[first] > _TIE * predicted[second] and measured[second] > _TIE * measured[first]
    ]
    return {
        "place_of_predicted_best": 1 + by_measured.index(best),
        "measured_faster_by_more_than_a_tie": sum(_TIE * seconds < measured[best] for seconds in measured),
        "pairs_in_other_order": swapped,
        "median_error": round(median(abs(row["error"]) for row in rows), 4),
        "largest_error": max(abs(row["error"]) for row in rows),
        "layouts": list(rows),
    }


def _train(case: Case, number: int, num_steps: int, scratch: Path, log: Path, *flags: str) -> None:
    """Train with a layout."""
    trial = case.trials[number]
    packed = _packed(case, trial, scratch)
    run_runner(
        "launch", packed, "--nproc-per-node", case.num_ranks, "--log-dir", log, "--", "--data", "synthetic",
        "--seq-len", case.seq_len, "--global-batch", case.global_batch, "--steps", num_steps, "--no-self-check",
        *trial.flags, *flags, PYTHONPATH=_path(case, scratch),
    )  # fmt: skip


def _path(case: Case, scratch: Path) -> str:
    """Return the PYTHONPATH of ranks, whose layers wait."""
    if not case.wait_s:
        return str(ROOT)
    # Run in the agent, too, and again in each rank that is forked from it.
    lines = f'if "RANK" in os.environ:\n    import bubble; bubble.make_layers_wait({case.wait_s})'
    (scratch / "sitecustomize.py").write_text(f"import os\n{lines}\n")
    return os.pathsep.join(map(str, (scratch, ROOT, ROOT / "bench")))


def _packed(case: Case, trial: Trial, scratch: Path) -> Path:
    packing = bubble.Case(
        name=f"{case.num_layers}-{trial.layout}", layout=trial.layout, num_ranks=trial.pipeline or case.num_ranks,
        schedule="", width=case.width, seq_len=case.seq_len, num_layers=case.num_layers,
        # What waits in proportion to FLOPs is divided as the time of a run is: a head that does not has few.
        vocab_size=64 if case.wait_s else 4096,
    )  # fmt: skip
    return bubble.packed(packing, scratch)


def _predict(case: Case, trial: Trial, traced: Path, scratch: Path) -> float:
    """Return the seconds of a step as planned from the traced run."""
    words = ("--layout", trial.layout, "--pp", str(trial.pipeline or case.num_ranks), *trial.flags)
    seconds: float = _plan(case, traced, scratch, *words)["step_s"]
    return seconds


def _search(case: Case, traced: Path, scratch: Path) -> dict[str, object]:
    """Return the layout that the search finds first, from the traced run."""
    first = _plan(case, traced, scratch, "--gpus", str(case.num_ranks), "--gpu-memory", "80GB")["layouts"][0]
    return {
        name: first[name] for name in ("layout", "schedule", "microbatch", "replicate", "shard", "tensor", "step_s")
    }


def _plan(case: Case, traced: Path, scratch: Path, *words: str) -> dict[str, Any]:
    source, batch = scratch / f"llama-{case.width}-{case.num_layers}", ("--global-batch", str(case.global_batch))
    command = [*RESHARD, "plan", str(source), "--from-run", str(traced), "--json", *batch, *words]
    shown: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return shown


def _step_s(log: Path, case: Case) -> float:
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_s"] for line in lines if line.get("step", 0) > WARM and "tokens_per_s" in line]
    return case.seq_len * case.global_batch / median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", help="the one case to run")
    parser.add_argument("--folder", type=Path, help="where runs are kept, to resume from")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no run begins")
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    before = (
        json.loads(Path(options.out).read_text())["cases"]
        if options.only and options.out and Path(options.out).exists()
        else {}
    )
    with tempfile.TemporaryDirectory(prefix="bench-search-") as scratch:
        folder, end_s = options.folder or Path(scratch), time.monotonic() + 60 * options.minutes
        folder.mkdir(parents=True, exist_ok=True)
        cases = {
            case.name: measure(case, options.steps, options.turns, folder, end_s)
            for case in CASES
            if options.only in (None, case.name)
        }
    result = {
        "what": "seconds of a step, as `reshard plan --from-run` predicts them from one traced run, and as measured",
        "cases": before | cases,
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
