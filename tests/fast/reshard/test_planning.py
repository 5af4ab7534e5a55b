"""What plan takes: measured times, memory limits, schedules, and layouts in and out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import reshard, write_model
from tests.fast.reshard.configs import modules_of, write_config, write_times
from tests.steps import steps_of


def test_measured_times_move_the_cut(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    slow_head = dict.fromkeys(modules_of(4), (0.1, 0.2)) | {"lm_head": (0.5, 1.0)}
    times = write_times(tmp_path / "times.json", slow_head)
    flags = ("--layout", "balance:time,pp=2", "--seq-len", "8", "--json")
    by_flops, by_time = (
        [len(stage["modules"]) for stage in reshard("plan", config, *flags, *cost).json["stages"]]
        for cost in ((), ("--cost", times))
    )
    assert (by_flops, by_time) == ([3, 4], [5, 2])


def test_times_of_another_model_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    times = write_times(tmp_path / "times.json", dict.fromkeys(modules_of(3), (0.1, 0.2)))
    ended = reshard("plan", config, "--layout", "pp=2", "--cost", times)
    assert (ended.code, ended.err) == (
        3,
        "error: --cost: no time for model.layers.3\nhint: measure all modules of LlamaForCausalLM\n",
    )


@pytest.mark.parametrize("spec", ["balance:time,pp=4", "balance:time,pp=2,vpp=2", "balance:time,pp=2,vpp=2,style=v"])
def test_solved_layout_keeps_to_a_limit_that_the_fastest_one_breaks(spec: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", num_hidden_layers=12, vocab_size=400)
    flags = ("--layout", spec, "--seq-len", "64", "--microbatches", "8", "--json")

    def planned(*more: str) -> tuple[int, float]:
        shown = reshard("plan", config, *flags, *more).json
        return max(rank["memory_nbytes"]["total"] for rank in shown["ranks"]), shown["imbalance"]["stages"]

    free, best = planned()
    limited, worse = planned("--memory-limit", f"{free - 1}B")
    assert limited < free
    assert best <= worse


def test_limit_counts_what_each_stage_has_in_flight(tmp_path: Path) -> None:
    # 1F1B on 4 ranks: the last stage, with a head whose logits are most of its memory, keeps 1 microbatch of 4.
    config = write_config(tmp_path / "config.json", num_hidden_layers=12, vocab_size=400)
    flags = ("--layout", "balance:time,pp=4", "--seq-len", "64", "--microbatches", "8", "--json")
    shown = reshard("plan", config, *flags, "--memory-limit", "700kB").json
    assert [len(stage["modules"]) for stage in shown["stages"]] == [3, 3, 4, 5]
    assert [rank["memory_nbytes"]["total"] for rank in shown["ranks"]] == [635904, 652288, 628736, 606720]


def test_limit_is_written_into_the_layout_as_if_the_spec_said_it(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    out = tmp_path / "out"
    packed = reshard(
        "pack", tmp_path / "source", "--layout", "balance:params,pp=2", "--memory-limit", "80GB", "--out", out
    )
    assert packed.code == 0
    assert json.loads((out / "manifest.json").read_text())["layout"]["spec"] == "balance:params,pp=2,limit=80GiB"
    said = reshard("plan", tmp_path / "source", "--layout", "balance:params,pp=2,limit=80GB", "--json").json
    assert said["assumed"]["memory_limit_nbytes"] == 80 << 30


@pytest.mark.parametrize(
    ("flags", "code", "problem"),
    [
        (
            ("--layout", "balance:params,pp=2,limit=80GB", "--memory-limit", "1GB"),
            2,
            "--memory-limit: the layout says limit=80GB itself\nhint: leave one of the two out",
        ),
        (
            ("--layout", "pp=2", "--memory-limit", "plenty"),
            2,
            "--memory-limit: expected a size with a unit, found 'plenty'\nhint: write 80GB, which is 80GiB",
        ),
        (
            ("--layout", "pp=2", "--schedule", "ZBVZeroBubble"),
            2,
            "--schedule: ZBVZeroBubble needs 2 stages on each rank, placed in a v, found 1 placed in a loop\n"
            "hint: take the layout pp=2,vpp=2,style=v, or the schedule GPipe or 1F1B",
        ),
        (
            ("--layout", "pp=2", "--microbatches", "1"),
            2,
            "--schedule: 1F1B needs at least 2 microbatches, one for each stage, found 1\n"
            "hint: take 2 microbatches or more, or the schedule GPipe",
        ),
        (
            ("--layout", "pp=2", "--strict-megatron"),
            2,
            "--strict-megatron: pp=2 is no Megatron string\nhint: leave the flag out",
        ),
        (
            ("--layout", "Ett| ttL", "--strict-megatron"),
            2,
            "layout: Megatron takes no white space here\n  Ett| ttL\n      ^\nhint: write Ett|ttL",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(flags: tuple[str, ...], code: int, problem: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    ended = reshard("plan", config, *flags)
    assert (ended.code, ended.err) == (code, f"error: {problem}\n")


def test_buffers_between_ranks_count_towards_the_limit(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    flags = ("--layout", "balance:params,pp=2", "--seq-len", "64", "--microbatches", "64")
    ended = reshard("plan", config, *flags, "--memory-limit", "400000B")
    assert (ended.code, ended.err) == (
        3,
        "error: layout: a rank may hold 400,000 bytes, 262,144 of them for buffers between ranks; the model takes "
        "393,728 bytes over 2 ranks\nhint: raise limit=SIZE (or --memory-limit), or use more ranks\n",
    )


def test_schedule_asked_for_is_the_manifests_hint(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    flags = ("--layout", "pp=2", "--schedule", "gpipe", "--out", tmp_path / "out")
    assert reshard("pack", tmp_path / "source", *flags).code == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["layout"]["schedule"] == "GPipe"


@pytest.mark.parametrize(
    ("spelling", "text"),
    [
        ("megatron", "Ett|ttL"),
        (
            "torchtitan",
            '[["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "lm_head"]]',
        ),
        ("deepspeed", "parameters,pp=2"),
        (
            "toml",
            'num_ranks = 2\nstyle = "loop"\nstages = [\n    ["model.embed_tokens", "model.layers.0-1"],\n'
            '    ["model.layers.2-3", "model.norm", "lm_head"],\n]',
        ),
    ],
)
def test_layout_of_a_plan_is_printed_in_other_spellings(spelling: str, text: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    flags = ("--layout", "balance:params,pp=2", "--as", spelling)
    assert reshard("plan", config, *flags).out == f"{text}\n"
    shown = reshard("plan", config, *flags, "--json").json
    assert (shown["version"], shown["as"], shown["layout"].rstrip("\n")) == (1, spelling, text)


@pytest.mark.parametrize("verb", ["plan", "pack"])
@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--pp", "4"), "say --layout pp=4, or leave --pp out"),
        (("--strict-megatron",), "give a --layout, or leave the flag out"),
    ],
)
def test_what_goes_with_a_layout_is_refused_without_one(
    flags: tuple[str, ...], hint: str, verb: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "source")
    packed, out = tmp_path / "packed", ("--out", tmp_path / "out") if verb == "pack" else ()
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", packed).code == 0
    ended = reshard(verb, packed, *flags, *out)
    problem = "goes with --layout, and without one a manifest keeps the layout that it has"
    assert (ended.code, ended.err) == (2, f"error: {flags[0]}: {problem}\nhint: {hint}\n")
    assert not (tmp_path / "out").exists()


def test_step_too_long_to_simulate_is_left_out_and_said(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", num_hidden_layers=1024)
    planned = reshard("plan", config, "--layout", "pp=1024")
    assert planned.code == 0, planned.err
    assert (
        "1F1B, 4096 microbatches on 1024 stages: too long a step to simulate; memory and bubble are left out, unless "
        "fewer --microbatches are assumed"
    ) in planned.out.splitlines()
    told = reshard("plan", config, "--layout", "pp=1024", "--json").json
    assert (told["bubble"], told["step_s"], told["ranks"][0]["bubble"], told["stages"][0]["memory_nbytes"]) == (
        None,
    ) * 4
    assert told["stages"][0]["nbytes"] > 0
    short = reshard("plan", config, "--layout", "pp=1024", "--schedule", "gpipe", "--microbatches", "1", "--json").json
    assert short["bubble"] == pytest.approx(1, abs=0.01)


def test_layout_that_memory_decides_is_refused_where_a_step_is_too_long(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", num_hidden_layers=1024)
    ended = reshard("plan", config, "--layout", "balance:params,pp=512", "--memory-limit", "80GB")
    assert (ended.code, ended.err) == (
        2,
        "error: --microbatches: memory depends on the schedule, and a step of 2048 microbatches on 512 stages is too "
        "long to simulate\nhint: take 512 microbatches or fewer, or another layout than one that memory decides\n",
    )


def test_pack_simulates_no_step(tmp_path: Path) -> None:
    write_model(tmp_path / "source")

    def pack(num_microbatches: int) -> None:
        flags = ("--layout", "pp=2", "--microbatches", f"{num_microbatches}", "--out", tmp_path / f"{num_microbatches}")
        assert reshard("pack", tmp_path / "source", *flags).code == 0

    pack(4)  # what is kept for the next time is there
    few, many = steps_of(lambda: pack(5)), steps_of(lambda: pack(130_000))
    assert many < 1.1 * few
