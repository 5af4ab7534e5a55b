"""Options of `reshard plan`: measured times, memory limits, schedules, and layouts in and out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from manifests.errors import InputError
from manifests.models import ModelShape, model_shape
from manifests.module_times import ModuleTime, parse_times
from manifests.placement import Placement
from manifests.schedules.csvtext import read_csv
from manifests.schedules.rules import SCHEDULES
from manifests.schedules.tables import schedule_table
from reshard.estimate.costs import costs_of, times_of
from tests.builders import files_in, refusal, reshard, run, write_model
from tests.fast.manifests.models.built import TINY, build, read_config
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
    ended = reshard("plan", config, "--layout", "pp=2", "--cost", times, "--json")
    assert ended.refusal == (3, "options.cost-modules", "--cost")


@pytest.mark.parametrize("spec", ["balance:time,pp=4", "balance:time,pp=2,vpp=2", "balance:time,pp=2,vpp=2,style=v"])
def test_balanced_layout_keeps_a_limit_that_the_fastest_one_exceeds(spec: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", num_hidden_layers=12, vocab_size=400)
    flags = ("--layout", spec, "--seq-len", "64", "--microbatches", "8", "--json")

    def planned(*more: str) -> tuple[int, float]:
        shown = reshard("plan", config, *flags, *more).json
        return max(rank["memory_nbytes"]["total"] for rank in shown["ranks"]), shown["imbalance"]["stages"]

    free, best = planned()
    limited, worse = planned("--gpu-memory", f"{free - 1}B")
    assert limited < free
    assert best <= worse


@pytest.mark.parametrize("name", ["layout.toml", "layout.json"])
@pytest.mark.parametrize(
    ("spec", "flags"),
    [("balance:time,pp=2", ()), ("balance:params,pp=2", ("--gpu-memory", "80GB")), ("pp=2", ("--schedule", "gpipe"))],
)
def test_written_layout_is_packed_as_its_plan_says(
    name: str, spec: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    source, file = tmp_path / "source", tmp_path / name
    write_model(source)
    planned = run("plan", source, "--layout", spec, *flags, "--write", file, "--json").json
    run("pack", source, "--layout", file, "--out", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    limit = ",limit=80GiB" if flags[:1] == ("--gpu-memory",) else ""
    assert manifest["layout"]["spec"] == spec + limit
    assert manifest["layout"]["schedule"] == ("GPipe" if flags[:1] == ("--schedule",) else None)
    assert [stage["modules"] for stage in manifest["stages"]] == [stage["modules"] for stage in planned["stages"]]
    if not flags:
        run("pack", source, "--layout", spec, "--out", tmp_path / "same")
        assert files_in(tmp_path / "same") == files_in(tmp_path / "out")


def test_layout_of_another_suffix_or_over_a_file_is_not_written(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    for file, refused in (("layout.txt", (2, "options.layout-suffix", "--write")),
                          ("config.json", (3, "output.exists", str(config)))):  # fmt: skip
        ended = reshard("plan", config, "--layout", "pp=2", "--write", tmp_path / file, "--json")
        assert ended.refusal == refused


def test_schedule_that_is_written_is_planned_and_simulated_as_its_flags(tmp_path: Path) -> None:
    config, table = write_config(tmp_path / "config.json"), tmp_path / "table.csv"
    five = ("plan", config, "--layout", "pp=2,vpp=2", "--microbatches", 5)
    group = ("--schedule", "interleaved1f1b", "--microbatch-group", 3)
    ended = run(*five, *group, "--write-schedule", table, "--json")
    planned = ended.json
    assert f"written: {table}" in ended.err.splitlines()
    placement = Placement(num_stages=4, num_ranks=2)
    megatron = schedule_table("Interleaved1F1B", placement, 5, microbatch_group=3)  # see test_tables.py
    assert read_csv(table.read_text(), "table.csv", placement) == megatron
    again = run(*five, "--schedule", table, "--json").json
    assert again["assumed"].pop("schedule") == str(table)
    assert planned["assumed"].pop("schedule") == "Interleaved1F1B"
    assert (planned["assumed"].pop("microbatch_group"), again["assumed"].pop("microbatch_group")) == (3, None)
    assert again == planned
    assert planned["bubble"] == pytest.approx(again["bubble"])
    file = ("plan", config, "--layout", "pp=2,vpp=2", "--schedule", table)
    for flags, refused in (
        ((*file, "--microbatches", 6), (2, "schedule.microbatches", "--microbatches")),
        ((*file, "--microbatches", 5, "--microbatch-group", 3), (2, "schedule.microbatch-group", "--microbatch-group")),
        ((*five, "--microbatch-group", 4), (2, "schedule.microbatch-group", "--microbatch-group")),
        (
            (*five, *group, "--write-schedule", tmp_path / "table.txt"),
            (2, "options.schedule-suffix", "--write-schedule"),
        ),
        ((*five, *group, "--write-schedule", table), (3, "output.exists", str(table))),
    ):
        assert reshard(*flags, "--json").refusal == refused
    assert "written" not in run(*five, *group, "--write-schedule", table, "--force", "--quiet").err


@pytest.mark.parametrize("flags", [("--microbatch", "3"), ("--dp-replicate", "2", "--dp-shard", "8")])
def test_batch_that_no_launch_splits_is_not_planned(flags: tuple[str, ...], tmp_path: Path) -> None:
    words = ("plan", write_config(tmp_path / "config.json"), "--layout", "pp=2", *flags, "--json")
    ended = reshard(*words, "--global-batch", "8")
    assert ended.refusal == (2, "options.batch-size", "--global-batch")
    assert reshard(*words, *ended.json["error"]["hint"].split()[1:]).code == 0
    assert reshard(*words).json["assumed"]["num_microbatches"] == 2
    assert reshard(*words, "--microbatches", "4").code == 0


def test_single_pipeline_rank_is_planned_with_any_schedule_as_it_trains(tmp_path: Path) -> None:
    words = ("plan", write_config(tmp_path / "config.json"), "--layout", "pp=1", "--json", "--schedule")
    plans = [reshard(*words, schedule).json for schedule in SCHEDULES]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0]["assumed"]["schedule"] == "1F1B"
    assert reshard(*words, "none").refusal[:2] == (2, "schedule.unknown")


@pytest.mark.parametrize(
    ("flags", "exit_code", "code", "where"),
    [
        (
            ("--layout", "balance:params,pp=2,limit=80GB", "--gpu-memory", "1GB"),
            2,
            "options.conflict",
            "--gpu-memory",
        ),
        (("--layout", "pp=2", "--gpu-memory", "plenty"), 2, "options.memory-size", "--gpu-memory"),
        (("--layout", "pp=2", "--schedule", "ZBVZeroBubble"), 2, "schedule.other-placement", "--schedule"),
        (
            ("--layout", "pp=2,vpp=2,style=v", "--schedule", "DualPipeV", "--microbatches", "1"),
            2,
            "schedule.too-few-microbatches",
            "--schedule",
        ),
        (
            ("--layout", "balance:params,pp=2", "--seq-len", "64", "--gpu-memory", "300000B"),
            3,
            "layout.memory-limit",
            "layout",
        ),
    ],
)
def test_options_that_cannot_be_planned_are_refused(
    flags: tuple[str, ...], exit_code: int, code: str, where: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    ended = reshard("plan", write_config(tmp_path / "config.json"), "--microbatches", "64", *flags, "--json")
    assert ended.refusal == (exit_code, code, where)
    wording(ended.json["error"]["problem"])


@pytest.mark.parametrize("verb", ["plan", "pack"])
def test_number_of_ranks_is_refused_without_a_layout(verb: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    packed, out = tmp_path / "packed", ("--out", tmp_path / "out") if verb == "pack" else ()
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", packed).code == 0
    assert reshard(verb, packed, "--pp", "4", *out, "--json").refusal == (2, "options.needs-layout", "--pp")
    assert not (tmp_path / "out").exists()


def test_a_step_too_long_to_simulate_is_left_out(tmp_path: Path, wording: Callable[[str], None]) -> None:
    config = write_config(tmp_path / "config.json", num_hidden_layers=1024)
    planned = run("plan", config, "--layout", "pp=1024")
    (line,) = [line for line in planned.out.splitlines() if line.startswith("1F1B, 1024 microbatches on 1024 stages")]
    wording(line)
    shown = reshard("plan", config, "--layout", "pp=1024", "--json").json
    simulated = (shown["bubble"], shown["step_s"], shown["ranks"][0]["bubble"], shown["stages"][0]["memory_nbytes"])
    assert simulated == (None,) * 4
    assert shown["stages"][0]["nbytes"] > 0
    short = reshard("plan", config, "--layout", "pp=1024", "--schedule", "gpipe", "--microbatches", "1", "--json").json
    assert short["bubble"] == pytest.approx(1, abs=0.01)


def test_a_memory_limit_is_refused_where_a_step_is_too_long_to_simulate(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", num_hidden_layers=1024)
    ended = reshard("plan", config, "--layout", "balance:params,pp=512", "--microbatches", "2048",
                    "--gpu-memory", "80GB", "--json")  # fmt: skip
    assert ended.refusal == (2, "options.too-many-microbatches", "--microbatches")


def test_pack_simulates_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "source")

    def pack(seq_len: int) -> None:
        reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / f"{seq_len}")

    pack(4)  # caches are warm
    packed, planned = (
        steps_of(lambda: pack(5)),
        steps_of(lambda: reshard("plan", tmp_path / "source", "--layout", "pp=2", "--microbatches", "5000")),
    )
    assert packed < planned / 5


TRUE = Path(__file__).parents[4] / "tests" / "data" / "configs"


def test_plan_takes_the_degrees_that_training_takes() -> None:
    flags = (
        "--dp-replicate", "2", "--dp-shard", "4", "--tp", "2", "--ac", "full",
        "--dtype", "bf16", "--master-dtype", "fp32",
    )  # fmt: skip
    alone, shared = (
        reshard("plan", TRUE / "llama-3.1-8b.json", "--layout", "pp=4", *given, "--json").json for given in ((), flags)
    )
    assumed = {name: shared["assumed"][name] for name in ("dp_replicate", "dp_shard", "tp", "ac", "loss_chunk")}
    assert assumed == {"dp_replicate": 2, "dp_shard": 4, "tp": 2, "ac": "full", "loss_chunk": None}
    for one, other in zip(alone["ranks"], shared["ranks"], strict=True):
        assert other["memory_nbytes"]["activations"] < one["memory_nbytes"]["activations"] / 4
        assert other["memory_nbytes"]["total"] < one["memory_nbytes"]["total"] / 2


def test_plan_of_deepseek_v3_with_expert_parallelism_fits_where_it_does_not_without() -> None:
    flags = (
        "--layout", "pp=16", "--dp-shard", "64", "--dtype", "bf16", "--master-dtype", "fp32",
        "--ac", "full", "--global-batch", "1024", "--json",
    )  # fmt: skip
    alone, distributed = (reshard("plan", TRUE / "deepseek-v3.json", *flags, *ep).json for ep in ((), ("--ep", "64")))
    assert (alone["assumed"]["ep"], distributed["assumed"]["ep"]) == (1, 64)
    most_nbytes = [max(rank["memory_nbytes"]["total"] for rank in plan["ranks"]) for plan in (alone, distributed)]
    assert most_nbytes[0] > 300 << 30
    assert most_nbytes[1] < 42 << 30


def test_where_nothing_fits_the_headline_has_the_largest_degrees_that_were_tried() -> None:
    asked = ("plan", TRUE / "llama-3.1-8b.json", "--dtype", "bf16", "--master-dtype", "fp32", "--gpu-memory", "20MB")
    assert reshard(*asked, "--layout", "pp=4").out.splitlines()[2].endswith("up to pp=32, dp-shard=32, tp=8, ac=full")
    assert reshard(*asked, "--layout", "pp=4", "--json").json["smallest_fit"] is None


def test_the_headline_names_no_tensor_parallelism_that_the_proof_before_step_1_refuses(tmp_path: Path) -> None:
    config = json.loads((TRUE / "llama-3.1-8b.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("plan", tmp_path / "config.json", "--layout", "pp=4", "--gpu-memory", "20MB")
    assert reshard(*asked).out.splitlines()[2].endswith("up to pp=32, dp-shard=32, ac=full")


@pytest.mark.parametrize("given", [(), ("--ac", "full"), ("--tp", "2"), ("--dp-shard", "4", "--ac", "full")])
def test_smallest_change_that_fits_is_the_headline_and_fits(given: tuple[str, ...]) -> None:
    asked = ("plan", TRUE / "llama-3.1-8b.json", "--dtype", "bf16", "--master-dtype", "fp32", "--gpu-memory", "20GB",
             "--seq-len", "4096")  # fmt: skip
    whole = reshard(*asked, "--layout", "pp=4", *given)
    headline = whole.out.splitlines()[2]
    assert headline.startswith("DOES NOT FIT: ranks 0")
    found = reshard(*asked, "--layout", "pp=4", *given, "--json").json["smallest_fit"]
    assert ",".join(found["changes"]) in headline
    changes = dict(change.split("=") for change in found["changes"])
    layout = f"pp={changes.pop('pp', 4)}"
    flags = dict(zip(given[::2], given[1::2], strict=True)) | {f"--{name}": value for name, value in changes.items()}
    words = [word for pair in flags.items() for word in pair]
    fitting = reshard(*asked, "--layout", layout, *words, "--json").json
    assert fitting["smallest_fit"] is None
    assert max(rank["memory_nbytes"]["total"] for rank in fitting["ranks"]) <= 20 << 30
    degrees = fitting["assumed"]
    assert found["num_ranks"] == fitting["num_ranks"] * degrees["dp_shard"] * degrees["tp"]


def test_flags_of_a_step_are_those_of_training(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.json")
    flags = (
        "--layout", "pp=2", "--global-batch", "48", "--microbatch", "2", "--dp-replicate", "3",
        "--dtype", "bfloat16",
    )  # fmt: skip
    shown = reshard("plan", config, *flags, "--json").json["assumed"]
    assert (shown["num_microbatches"], shown["dtype"], shown["master_dtype"]) == (8, "bf16", "bf16")
    mixed = reshard("plan", config, *flags, "--master-dtype", "fp32", "--json").json["assumed"]
    assert (mixed["dtype"], mixed["master_dtype"]) == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("flags", "code", "where"),
    [
        (("--global-batch", "8", "--microbatches", "4"), "options.conflict", "--global-batch"),
        (("--global-batch", "8", "--dp-replicate", "3"), "options.batch-size", "--global-batch"),
        (("--master-dtype", "bf16"), "options.master-dtype", "--master-dtype"),
        (("--dtype-policy", "mixed"), "usage.moved", "reshard plan --dtype-policy"),
    ],
)
def test_flags_of_a_step_that_conflict_are_refused(
    tmp_path: Path, flags: tuple[str, ...], code: str, where: str
) -> None:
    config = write_config(tmp_path / "tiny.json")
    assert refusal("plan", config, "--layout", "pp=2", *flags).found == (2, code, where)


def test_state_of_an_average_and_of_groups_is_counted(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    (tmp_path / "groups.toml").write_text('[[group]]\nalgorithm = "sgd"\n')

    def state(*flags: str) -> int:
        shown = reshard("plan", config, "--layout", "pp=1", "--dtype", "bf16", *flags, "--json").json
        (rank,) = shown["ranks"]
        return rank["memory_nbytes"]["optimizer"]

    (stage,) = reshard("plan", config, "--layout", "pp=1", "--json").json["stages"]
    params, groups = stage["params"], ("--optimizer", str(tmp_path / "groups.toml"))
    assert state() == 4 * params
    assert state("--ema", "0.99") == (4 + 4) * params  # in float32
    assert state("--ema", "0.99", "--master-dtype", "fp32") == (8 + 4 + 4) * params
    assert state(*groups) == 2 * params
    assert refusal("plan", config, "--layout", "pp=1", "--optimizer", "groups.json").found == (
        2, "options.invalid-value", "--optimizer"
    )  # fmt: skip


# What modules cost: against packed bundles, and from measured times.


LLAMA = model_shape(read_config("tiny-llama"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_params_and_bytes_of_modules_add_up_to_those_of_packed_stages(name: str, tied: bool, tmp_path: Path) -> None:
    model = build(read_config(name, tie_word_embeddings=tied))
    model.model.norm.half()  # sizes come from the files, not from one dtype
    source, out = tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source)
    run("pack", source, "--layout", "pp=3", "--out", out, "--quiet", "--json")
    shape = model_shape(json.loads((source / "config.json").read_text()))
    with safe_open(source / "model.safetensors", "pt") as file:
        stored = {fqn: file.get_tensor(fqn).nbytes for fqn in file.keys()}  # noqa: SIM118
    costs = costs_of(shape, seq_len=8, nbytes=stored)
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    assert len(stages) == 3
    for stage in stages:
        assert sum(costs["bytes"][module] for module in stage["modules"]) == stage["nbytes"]
        assert sum(costs["params"][module] for module in stage["modules"]) == stage["num_params"]
    copies = shape.hidden_size * 96 if tied else 0
    assert sum(costs["params"].values()) == shape.num_params + copies


def test_time_is_three_forward_passes_of_flops_until_it_is_measured() -> None:
    costs = costs_of(LLAMA, seq_len=8, nbytes={})
    assert costs["time"] == {module: 3 * flops for module, flops in costs["flops"].items()}
    assert costs["time"]["model.embed_tokens"] == costs["time"]["model.norm"] == 0
    measured = {module: ModuleTime(forward=index, backward=0.5) for index, module in enumerate(LLAMA.modules)}
    assert costs_of(LLAMA, seq_len=8, nbytes={}, measured=measured)["time"] == {
        module: index + 0.5 for index, module in enumerate(LLAMA.modules)
    }
    assert list(times_of(LLAMA, 8, dict(reversed(measured.items())))) == list(LLAMA.modules)


def times_document(shape: ModelShape, **changes: Any) -> dict[str, Any]:
    modules = {module: {"forward_s": 0.25, "backward_s": 1} for module in shape.modules}
    return {"version": 1, "modules": modules, **changes}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"version": 2}, "times.json: version"),
        ({"version": None}, "times.json: version"),
        ({"version": True}, "times.json: version"),
        ({"modules": None}, "times.json: modules"),
        ({"modules": [1]}, "times.json: modules"),
        ({"modules": {"lm_head": 1}}, "times.json: modules['lm_head']"),
        ({"modules": {"lm_head": {"forward_s": 1}}},
         "times.json: modules['lm_head'].backward_s"),
        ({"modules": {"lm_head": {"forward_s": -1, "backward_s": 1}}},
         "times.json: modules['lm_head'].forward_s"),
        ({"modules": {"lm_head": {"forward_s": True, "backward_s": 1}}},
         "times.json: modules['lm_head'].forward_s"),
        ({"modules": {"lm_head": {"forward_s": 1e999, "backward_s": 1}}}, "times.json"),
        ({"modules": {"lm_head": {"forward_s": 10**400, "backward_s": 1}}},
         "times.json: modules['lm_head'].forward_s"),
        ({"step": {"overhead_s": 0.1, "num_params": 0}}, "times.json: step.num_params"),
        ({"step": {"overhead_s": 0.1, "num_params": 1, "nbytes_per_s": 0}}, "times.json: step.nbytes_per_s"),
        ({"step": {"overhead_s": 0.1, "num_params": 1, "latency_s": -1}}, "times.json: step.latency_s"),
    ],
)  # fmt: skip
def test_file_that_holds_no_times_is_refused(
    changes: dict[str, Any], where: str, wording: Callable[[str], None]
) -> None:
    text = json.dumps(times_document(LLAMA, **changes)).replace("Infinity", "1e999").encode()
    with pytest.raises(InputError) as error:
        parse_times(text, "times.json")
    assert error.value.where == where
    wording(f"{error.value.code}: {error.value}")
