"""Write docs/performance.md and one sentence of README.md from bench/results/*.json.

`python tools/performance.py` writes both; `--check` exits with 1 where one is out of date. No figure is
written by hand: a sentence here names the file and the fields that it takes its numbers from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.all import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
# By `make test-gpu`.
GPU_RESULTS = ("gpu-suite", "gpu-mfu", "gpu-memory", "gpu-saving", "gpu-beside", "gpu-norm", "gpu-load")
_FACTS = ("nbytes", "turns")  # which are said in a line, not in a table
BEGIN, END = "<!-- figures: written by make performance -->\n", "<!-- end of figures -->\n"
_HEAD = """\
# Performance

What was measured, beside peers and limits in the same run: contenders take turns in rotating order, ratios are medians
of the ratios within a turn, and *cp* is `cp -r` of the same bytes on the same disk, without a flush unless it says
*sync*. Two shared cores and one shared disk: the ratios carry over to other machines, the times do not. Each section
links to the file of its figures, with every single time; its script says with `--help` what is timed.

Written by `make performance` from `bench/results`; `make check` fails when it is out of date.
"""


def main() -> int:
    """Write or check the page and the README's sentence; return the exit code."""
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in SECTIONS}
    results |= {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in GPU_RESULTS}
    texts = {PAGE: render(results), README: with_figures(README.read_text(), results)}
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.write_text(text)
        return 0
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date\nhint: make performance", file=sys.stderr)
    return int(bool(stale))


def with_figures(readme: str, results: Mapping[str, Any]) -> str:
    """Return the README with its figures renewed."""
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    pack, load = results["pack-4gb"], results["load"]
    sentence = (
        f"- **At the disk's speed.** Packing {_gb(pack)}, digests and `fsync` included, takes "
        f"{pack['ratios']['pack to cp_and_sync']:.2f} times as long as `cp -r` plus a flush, in "
        f"{pack['commands']['pack']['peak_anonymous_mb']:.0f} MB of memory. A rank loads its stage with digests "
        f"verified in {load['cold']['runner']['ratio_to_cat']:.2f} times the time of one `cat` from a cold disk "
        "([performance](docs/performance.md))."
    )
    return before + BEGIN + _filled(sentence) + "\n" + END + after


def _sentences(results: Mapping[str, Any]) -> Iterator[str]:
    pack, reshard, load = results["pack-4gb"], results["reshard-4gb"], results["load"]
    times = {name: command["ratio_to_cp"] for name, command in pack["commands"].items()}
    yield (
        f"- Packing {_gb(pack)} in 4 shards into 4 stages, including digests and `fsync`, takes "
        f"{pack['ratios']['pack to cp_and_sync']:.2f} times as long as `cp -r` plus a flush of the same folder in the "
        f"same turn, and {times['pack']:.2f} times as long as a bare `cp -r`, in "
        f"{pack['commands']['pack']['peak_anonymous_mb']:.0f} MB of anonymous memory. Relative to the bare `cp -r`, "
        f"the usual script takes {times['script']:.2f} times, transformers {times['transformers']:.1f} times and "
        f"torch's HF reader and writer {times['dcp']:.1f} times as long {_link('pack-4gb')}."
    )
    yield (
        f"- Resharding {_gb(reshard)} with AdamW's optimizer state from 8 stages to 4 takes "
        f"{reshard['ratios']['reshard to cp_and_sync']:.2f} times as long as `cp -r` plus a flush, in "
        f"{reshard['commands']['reshard']['peak_anonymous_mb']:.0f} MB; torch's DCP takes "
        f"{reshard['ratios']['dcp to reshard']:.1f} times as long, in "
        f"{reshard['ratios']['dcp to reshard, anonymous memory']:.0f} times the memory {_link('reshard-4gb')}."
    )
    cold, warm, touched = (load[state]["runner"] for state in ("cold", "warm", "touched"))
    yield (
        f"- A rank loads its stage, 1 of 4 GB, with digests verified, in {cold['ratio_to_cat']:.2f} times the time of "
        f"one `cat` from a cold disk. From the page cache, into memory that it has touched before, it takes "
        f"{touched['ratio_to_read_hashed']:.2f} times as long as a bare read that also hashes, and "
        f"{touched['ratio_to_load_file']:.2f} times as long as `load_file`, which verifies nothing; into new memory, "
        f"whose first touch takes longer than all else, {warm['ratio_to_load_file']:.1f} times {_link('load')}."
    )
    delta = results["delta"]
    of, core = {name: ratio["wall"] for name, ratio in delta["ratios"].items()}, delta["of_one_core"]
    yield (
        f"- Publishing a delta of {_gb(delta)}, of which 2 % of the elements changed, takes "
        f"{of['publish to bare loop']:.2f} times as long as a bare loop that reads, hashes and compares both and "
        f"compresses what differs, from the page cache, {of['publish to BLAKE3 of both']:.2f} times as long as BLAKE3 "
        f"of both ({of['publish, few tensors to BLAKE3 of both']:.2f} times where whole tensors changed), and from a "
        f"cold disk {of['publish, cold to read both, cold']:.2f} times as long as reading both: zstd of what changed "
        f"takes a core {core['zstd'] / core['BLAKE3'] / 2:.1f} times as long as hashing both. Applying it takes "
        f"{of['apply to copy of what differs']:.2f} times as long as copying and flushing the shards that differ, in "
        f"{delta['commands']['apply']['peak_anonymous_mb']:.0f} MB, and {of['apply to rsync --inplace']:.2f} times as "
        f"long as `rsync --inplace` {_link('delta')}."
    )
    link = results["streams"]["links"]["40 ms, 8 MB/s"]
    yield (
        f"- From a server with 40 ms a request and 8 MB/s a connection, packing a bucket reaches "
        f"{link['bucket']['of_bare_client']:.2f} of what a bare client with 64 requests reads, and the hub "
        f"{link['hub']['of_bare_client']:.2f} ({link['hub']['of_bare_client_sha256']:.2f} of one that hashes, "
        f"too), where `hf download` reaches {link['hf download']['of_bare_client']:.2f}; writing a bucket reaches "
        f"{link['local to bucket']['of_bare_client']:.2f} of 64 bare uploads, and bucket to bucket "
        f"{link['bucket to bucket']['of_bare_client']:.2f} of 64 bare requests and 64 uploads {_link('streams')}."
    )
    runner = results["trainers"]["trainers"]["runner"]
    four = results["bubble"]["cases"]["four ranks"]
    yield (
        f"- A step of `runner launch` takes, with equal losses, as many times as long as one of a bare loop over "
        f"torch's schedule with clipping and AdamW: {_of_steps(results['step']['rows'])} {_link('step')}. It takes "
        f"{runner['step_s, ratio to torchtitan']:.2f} times as long as in "
        f"torchtitan's trainer, with equal losses; from the launch to the end of the first step it is "
        f"{runner['launch_to_first_step_s, ratio to torchtitan']:.2f} times {_link('trainers')}. Four ranks with "
        f"simulated accelerator times had {four['bubble_ratio']:.2f} times the simulated bubble {_link('bubble')}."
    )
    predicted = ", ".join(
        f"{case['median_error']:.1%} on {name}{' whose layers sleep' if case['layer_waits_s'] else ' that compute'}"
        for name, case in results["search"]["cases"].items()
    )
    yield (
        f"- From one traced run, `reshard plan --from-run` predicts the steps of other layouts, schedules and "
        f"microbatches with a median error of {predicted} {_link('search')}."
    )
    yield from _start(results)
    yield (
        f"- Where FLOPs misjudge a model (experts and linear attention), the split by `balance:time` takes "
        f"{results['balance']['splits']['alone']['ratio_to_flops']:.2f} times as long a step as the split by FLOPs "
        f"{_link('balance')}."
    )
    yield (
        f"- An asynchronous save pauses training for {results['saving']['1 ranks'][0]['ratio']:.2f} times as long as a "
        f"plain copy of weights and optimizer state takes {_link('saving')}."
    )
    deepseek = results["deepseek"]
    plan, virtual = (deepseek["commands"][name]["median_s"] for name in ("plan", "pack_virtual"))
    yield (
        f"- DeepSeek-V3 at its true shape ({deepseek['num_tensors']:,} tensors, {deepseek['num_shards']} shards, "
        f"{deepseek['nbytes'] / 1e9:.0f} GB, sparse files) onto 32 stages: `plan` {plan:.1f} s, `pack --virtual` "
        f"{virtual:.1f} s, a manifest of {deepseek['manifest_nbytes'] / 1e3:.0f} kB {_link('deepseek')}."
    )


def _start(results: Mapping[str, Any]) -> Iterator[str]:
    alone, proven = (results["launch"]["commands"][name] for name in ("runner, no self-check", "runner"))
    yield (
        f"- From `runner launch` to the first loss it takes {alone['first_loss_s, ratio to bare script']:.2f} times as "
        f"long as in a bare script under torchrun over transformers' modules, and "
        f"{alone['cpu_s, ratio to bare script']:.2f} times the processor time; with the self-check "
        f"{proven['first_loss_s, ratio to bare script']:.2f} and {proven['cpu_s, ratio to bare script']:.2f} times "
        f"{_link('launch')}."
    )
    ratios = [row["most over least, whole process"] for row in results["memory"]["schedules"].values()]
    yield (
        f"- With 512 microbatches, a rank's peak memory is at most {max(ratios):.3f} times that with 8 "
        f"({', '.join(results['memory']['schedules'])}) {_link('memory')}."
    )


def _of_steps(rows: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{row['ratio to bare']:.2f} ({name}; two runs of the loop: {row['bare lowest']:.2f} to "
        f"{row['bare highest']:.2f})"
        for name, row in rows.items()
    )


def _gpu_sentences(results: Mapping[str, Any]) -> Iterator[str]:
    suite, mfu, saving, load = (results[name] for name in ("gpu-suite", "gpu-mfu", "gpu-saving", "gpu-load"))
    yield (
        f"- {suite['passed']} of {suite['passed'] + suite['failed'] + suite['skipped']} tests passed on one "
        f"{suite['gpu']} with torch {suite['torch']} ({suite['date']}, commit {suite['commit']}), and "
        f"{suite['failed']} failed; the file names the others. Two and four ranks "
        f"shared the GPU and exchanged through host memory: no run has used NCCL between GPUs {_link('gpu-suite')}."
    )
    yield (
        f"- A step of a Llama of {mfu['parameters'] / 1e9:.1f} billion parameters in bfloat16 with float32 masters "
        f"takes {mfu['ratio_to_plain']:.3f} times as long as the same in plain PyTorch, at {mfu['mfu']['runner']:.1%} "
        f"MFU (plain: {mfu['mfu']['plain']:.1%}), without --compile; through `runner launch` with its defaults "
        f"{mfu['launch_to_plain']:.3f} times. Between its first and its last kernel, none runs for "
        f"{mfu['gaps']['runner']['idle_share']:.1%} of the step (plain: {mfu['gaps']['plain']['idle_share']:.1%}) "
        f"{_link('gpu-mfu')}."
    )
    ranks = [(name, rank) for name, ranks in results["gpu-memory"]["runs"].items() for rank in ranks]
    most = {False: 0.0, True: 0.0}  # by whether it is in float32
    for name, rank in ranks:
        is_fp32 = name.startswith("fp32")
        most[is_fp32] = max(most[is_fp32], rank["peak_nbytes"] / rank["planned_nbytes"])
    yield (
        f"- Weights, gradients and optimizer state are the planned bytes exactly; peaks in bfloat16, with and without "
        f"masters, are at most {most[False]:.2f} times the plan. In float32 they were {most[True]:.2f} times: heads "
        f"that share keys had no fused attention then. They have now, which was not measured {_link('gpu-memory')}."
    )
    yield (
        f"- An asynchronous save of {saving['1 ranks'][0]['nbytes'] / 1e9:.1f} GB pauses training for "
        f"{saving['1 ranks'][0]['ratio']:.3f} times as long as a plain copy into host memory {_link('gpu-saving')}."
    )
    beside, norm = results["gpu-beside"], results["gpu-norm"]
    runs = list(beside["runs"].values())
    alone_s = [step_s for run in runs for step_s in run["each, alone"]]
    yield (
        f"- A step of `runner launch` while {runs[0]['saved bytes'] / 1e9:.1f} GB are saved takes "
        f"{beside['ratio']:.3f} times as long as one when none are, the median of {len(runs)} runs "
        f"({', '.join(str(run['ratio']) for run in runs)}). Without a save, steps took {min(alone_s):.2f} to "
        f"{max(alone_s):.2f} s {_link('gpu-beside')}."
    )
    layers, embedding = norm["norm"].values()
    yield (
        f"- The norm of 51 million gradients in many tensors takes {layers['ratio']:.2f} times as long as one "
        f"`torch._foreach_norm` in float64, and in one tensor {embedding['ratio']:.2f} times (commit "
        f"{norm['commit']}) {_link('gpu-norm')}."
    )
    yield (
        f"- A stage of 1 GB is loaded from a cold disk in {load['cold']['runner']['ratio_to_load_file']:.2f} times the "
        f"time of safetensors' `load_file`; from the page cache, where `load_file` verifies nothing, in "
        f"{load['warm']['runner']['ratio_to_load_file']:.1f} times, and with digests in the background in "
        f"{load['warm']['runner_background']['ratio_to_load_file']:.1f} times {_link('gpu-load')}."
    )


def _filled(sentence: str) -> str:
    return fill(sentence, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _gb(result: Mapping[str, Any]) -> str:
    return f"{result['nbytes'] / 1e9:.1f} GB"


def _link(name: str) -> str:
    return f"([{name}.json](../bench/results/{name}.json))"


def render(results: Mapping[str, Any]) -> str:
    """Return the page."""
    short = ("## In short\n", *map(_filled, _sentences(results)), "")
    short += ("## On a GPU\n", *map(_filled, _gpu_sentences(results)), "")
    return "\n".join((_HEAD, *short, *(line for name in SECTIONS for line in _section(name, results[name]))))


def _section(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    section = SECTIONS[name]
    what = result["what"]
    yield f"## {section.title}\n"
    yield f"{what[0].upper()}{what[1:]}.\n"
    facts = list(_circumstances(result))
    turns = result.get("turns", 0)
    facts.append(f"{turns} turn{'' if turns == 1 else 's'}" if turns else "")
    facts.append(f"{_gb(result)}" if "nbytes" in result else "")
    facts.append(f"load average {min(result['load_average'])}" if "load_average" in result else "")
    facts.append(f"`bench/{section.command}`")
    yield f"{'; '.join(filter(None, facts))}. [All figures](../bench/results/{name}.json)\n"
    if "left_out" in result:
        yield f"Left out: {result['left_out']}.\n"
    yield from _tables(result)


def _circumstances(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the date, commit and machine of a result, or those of each of its cases, by their names."""
    if "date" in result:
        yield from (result["date"], f"commit {result['commit']}" if "commit" in result else "", result["machine"])
        return
    names: dict[str, list[str]] = {}
    for name, case in result["cases"].items():
        names.setdefault(", ".join(_circumstances(case)), []).append(name)
    yield from (f"{' and '.join(several)}: {where}" for where, several in names.items())


def _tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of each part of a result whose rows are figures, under the part's name."""
    plain = {key: value for key, value in result.items() if key not in _FACTS and _is_figure(value)}
    if plain:
        yield from _table("", {key: {"": value} for key, value in plain.items()})
    for name, value in result.items():
        part = dict(_by_rank(value))
        if part:
            nested = {key: value for key, value in part.items() if isinstance(value, Mapping)}
            deep = {key: value for key, value in nested.items() if any(isinstance(v, Mapping) for v in value.values())}
            if any(not any(map(_is_figure, value.values())) for value in deep.values()):
                for key, value in deep.items():
                    yield from _table(f"{name}: {key}", value)
            elif nested:
                yield from _table(name, nested)
            elif any(map(_is_figure, part.values())):
                yield from _table(name, {key: {"": value} for key, value in part.items()})


def _by_rank(part: object) -> Iterator[tuple[str, Any]]:
    """Yield a part's rows by name; those of a list are of ranks."""
    if isinstance(part, Mapping):
        yield from part.items()
    elif isinstance(part, list):
        yield from ((f"rank {number}", row) for number, row in enumerate(part) if isinstance(row, Mapping))


def _table(name: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(key for row in rows.values() for key, value in row.items() if _is_figure(value)))
    if not columns:
        return
    head = (word.replace("_", " ") for word in (name or "figure", *(column or "value" for column in columns)))
    yield f"| {' | '.join(head)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for key, row in rows.items():
        if not any(map(_is_figure, row.values())):
            continue
        cells = (f"{row[column]:,}" if column in row and _is_figure(row[column]) else "" for column in columns)
        yield f"| {key.replace('_', ' ')} | {' | '.join(cells)} |"
    yield ""


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


if __name__ == "__main__":
    sys.exit(main())
