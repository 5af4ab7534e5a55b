"""Compare the measured pipeline bubble of a run with the simulated bubble of its schedule.

    python bench/bubble.py [--steps 20] [--out bench/results/bubble.json] [--page docs/pictures/report-pp4.html]

Each run is an ordinary `runner launch` with --trace; the numbers are those of `runner report`. In the simulation, every
action takes the median time that was measured for its stage, and transfers cost nothing. `two ranks` really compute,
one core each. Four ranks may share cores: there, every layer of a small model also sleeps for 100 ms in its forward
and 200 ms in its backward, as if an accelerator were busy. Tensors, transfers and their order are real; only the time
of a layer is simulated. --page keeps the report of `four ranks`, on the demo's text, and its pipeline as a picture
beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import RESHARD, ROOT, circumstances, load_average, run_quietly, run_ranks, write_result

WARM = 3  # the first step that is traced
_LEGEND = 30  # pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run: its layout, schedule and model, and how long each layer sleeps in the forward of a sequence."""

    name: str
    layout: str
    num_ranks: int
    schedule: str
    width: int
    seq_len: int
    wait_s: float = 0.0
    num_layers: int = 8
    vocab_size: int = 4096


CASES = (
    Case(name="two ranks", layout="Et*4|t*4L", num_ranks=2, schedule="1F1B", width=768, seq_len=256),
    Case(name="four ranks", layout="Et*2|t*2|t*2|t*2L", num_ranks=4, schedule="1F1B", width=128, seq_len=32,
         wait_s=0.1),
    Case(name="four ranks, two stages each", layout="Et|t|t|t|t|t|t|tL", num_ranks=4, schedule="Interleaved1F1B",
         width=128, seq_len=32, wait_s=0.1),
)  # fmt: skip


def make_layers_wait(wait_s: float) -> None:
    """Let every layer sleep in this process, in its forward and twice as long in its backward."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, crossing: torch.Tensor) -> torch.Tensor:
            time.sleep(wait_s * len(crossing))
            return crossing.view_as(crossing)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * wait_s * len(gradient))
            return gradient

    def wait(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return Wait.apply(output) if type(module).__name__.endswith("DecoderLayer") else None

    register_module_forward_hook(wait)


def be_rank(wait_s: float, arguments: Sequence[str]) -> None:
    """Run one rank, whose layers sleep."""
    from runner import train as worker

    if wait_s:
        make_layers_wait(wait_s)
    sys.argv = ["runner.train", *arguments]
    worker.main()


def _standalone(picture: str, width: int) -> str:
    """Return the picture of a pipeline as a file, this wide in pixels, with a legend, in letters for narrow screens."""
    from manifests.command.palette import WORK_COLORS
    from manifests.schedules.picture import STYLE

    height = int(re.findall(r'height="(\d+)"', picture)[0]) + _LEGEND
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" style="background: var(--paper)" viewBox="0 0 {width} {height}"'
    entries = [*(WORK_COLORS[kind] for kind in "FB"), ("waiting", "var(--faint)")]
    legend = [
        f'<rect x="{120 * place}" y="3" width="14" height="14" fill="{color}"/>'
        f'<text x="{120 * place + 19}" y="15">{text}</text>'
        for place, (text, color) in enumerate(entries)
    ]
    legend.append(f'<text x="{120 * len(entries)}" y="15">thin rows: as simulated</text>')
    inner = (
        picture.replace("<svg", f'<svg y="{_LEGEND}"', 1)
        .replace(' width="100%"', "", 1)
        .replace(' tabindex="0"', "", 1)
    )
    style = f"<style>{STYLE} svg text {{ font-size: 14px; }}</style>"
    return f'{opening} width="{width}">{style}{"".join(legend)}{inner}</svg>\n'


def measure(case: Case, num_steps: int, scratch: Path, page: Path | None) -> dict[str, object]:
    """Run a case, and return its measured and its simulated bubble."""
    from runner.report.page import write_report
    from runner.report.read import read_run

    waits = f", layers wait {case.wait_s * 1e3:g} ms" if case.wait_s else ""
    log, folder = scratch / f"Llama on {case.num_ranks} ranks, {case.schedule}{waits}", packed(case, scratch)
    before = load_average()
    run_ranks(
        case.num_ranks, __file__, "--as-rank", str(case.wait_s), str(folder / "manifest.json"),
        "--data", str(scratch / "text" / "train.jsonl"), "--seq-len", str(case.seq_len), "--global-batch", "8",
        "--lr", "1e-3", "--schedule", case.schedule, "--steps", str(num_steps), "--trace", f"{WARM}-{num_steps}",
        "--log-dir", str(log),
    )  # fmt: skip
    run = read_run(log)
    assert run.traces is not None
    if page is not None:
        write_report(log, page)
        picture = re.search(r'<svg class="pipeline".*?</svg>', page.read_text(), re.DOTALL)
        assert picture is not None
        page.with_suffix(".svg").write_text(_standalone(picture[0], 640))
    traces, plan, steps = run.traces, run.traces.planned(), run.steps[WARM - 1 :]
    assert traces.seconds >= 3 * case.wait_s * case.num_layers * 8 / case.num_ranks, "layers did not wait"
    parts = {part: [sum(line[f"{part}_s"]) for line in steps] for part in ("compute", "communication", "bubble")}
    return {
        "layout": case.layout,
        "schedule": case.schedule,
        "layer_waits_s": case.wait_s,
        "traced_steps": len(traces.steps),
        "load_average": before,
        "schedule_s": round(traces.seconds, 4),
        "simulated_schedule_s": round(plan.makespan_s, 4),
        "bubble": round(traces.bubble, 4),
        "simulated_bubble": round(plan.bubble, 4),
        "bubble_ratio": round(traces.bubble / plan.bubble, 3),
        "metrics_s_per_rank": {part: round(median(found) / case.num_ranks, 4) for part, found in parts.items()},
    }


def packed(case: Case, scratch: Path) -> Path:
    """Pack a model with the demo's tokenizer, and write its text beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    if not (scratch / "text").exists():
        run_quietly([sys.executable, str(ROOT / "demo" / "make_model.py"), str(scratch)])
    source, out = scratch / f"llama-{case.width}-{case.num_layers}", scratch / f"packed-{case.name}"
    if not source.exists():
        set_seed(0)
        config = LlamaConfig(
            hidden_size=case.width, intermediate_size=case.width * 11 // 4, num_hidden_layers=case.num_layers,
            num_attention_heads=8, num_key_value_heads=8, vocab_size=case.vocab_size, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(source)
        for path in (scratch / "model").glob("tokenizer*"):
            shutil.copy(path, source)
    if not (out / "manifest.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        words = ["--layout", case.layout, "--pp", str(case.num_ranks), "--out", str(out)]
        run_quietly([*RESHARD, "pack", str(source), *words])
    return out


def main() -> None:
    if sys.argv[1:2] == ["--as-rank"]:
        be_rank(float(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--page", type=Path, help="where to write the report of the four ranks")
    parser.add_argument("--only", help="the one case to run")
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory(prefix="bench-bubble-") as scratch:
        found = {
            case.name: measure(case, options.steps, Path(scratch), options.page if case.name == "four ranks" else None)
            for case in CASES
            if options.only in (None, case.name)
        }
    result = {
        "what": "fraction of all ranks' time in which they do not compute, measured and simulated",
        **circumstances(),
        "cases": found,
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
