"""The search for layouts: a pack and a launch accept what it suggests, and plans of it need as much memory."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.sparse import write_sparse
from manifests.errors import InputError
from manifests.models import ModelShape, model_shape
from manifests.module_times import Link, MeasuredTimes, ModuleTime, StepTime, parse_times, read_times
from manifests.placement import Placement
from manifests.schedules.simulation import StageCosts, simulate
from manifests.schedules.tables import schedule_table
from reshard.estimate.assumptions import Assumptions
from reshard.estimate.module_seconds import HARDWARE
from reshard.packing.plan import plan as plan_layout
from reshard.report.search_table import launch_command, pack_command
from reshard.search.candidates import SearchRequest
from reshard.search.search import find_layouts
from runner.commands import cli
from tests.builders import reshard, run
from tests.fast.manifests.models.catalogued import save_tiny

CONFIGS = Path(__file__).parents[3] / "data" / "configs"
GROUPS = """
[[group]]
algorithm = "muon"
patterns = ["model.layers.?.*_proj.weight"]
[[group]]
algorithm = "sgd"
patterns = ["lm_head.weight"]
[[group]]
algorithm = "adamw"
"""


def request(gpus: int, memory: int, batch: int, **fixed: object) -> SearchRequest:
    return SearchRequest(
        gpus=gpus, memory_limit=memory << 30, global_batch=batch, seq_len=64, hardware=HARDWARE["h100"],
        efficiency=0.33, gpus_per_node=4, fixed=fixed,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["tiny-llama", "tiny-deepseek-v3", "tiny-gpt-oss", "tiny-qwen3-moe", "tiny-mixtral"],
)
def test_pack_and_launch_accept_what_is_suggested(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    write_sparse(tmp_path / "model", {**config, "quantization_config": None}, 1)
    result = find_layouts("model", request(8, 1, 32))
    assert result.best
    for choice in (*result.best[:2], *random.Random(0).sample(result.choices, min(5, len(result.choices)))):
        packed = reshard(*shlex.split(pack_command(result, choice))[1:], "--virtual", "--force")
        assert packed.code == 0, packed.err
        words = ["synthetic" if word == "PATH" else word for word in shlex.split(launch_command(result, choice))[1:]]
        words.insert(words.index("--"), "--dry-run")
        done = CliRunner().invoke(cli, words)
        assert done.exception is None, (words, done.exception, done.output)


@pytest.mark.parametrize(
    ("architecture", "changes", "degree", "reason"),
    [
        ("Lfm2ForCausalLM", {}, "context", "--cp: ranks do not compute what Lfm2ForCausalLM computes"),
        ("Qwen3NextForCausalLM", {}, "context", "--cp: ranks do not compute what Qwen3NextForCausalLM computes"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}, "context", "--cp: is not verified for OPTForCausalLM"),
        ("LlamaForCausalLM", {"attention_dropout": 0.1}, "tensor", "--tp: ranks would draw the same random numbers"),
    ],
)
def test_no_layout_has_degrees_that_the_proof_refuses(
    architecture: str, changes: dict[str, Any], degree: str, reason: str, tmp_path: Path
) -> None:
    for name, changed in (("plain", {}), ("changed", changes)):
        save_tiny(tmp_path / name, architecture, **changed)
        result = find_layouts(tmp_path / name, request(4, 80, 8))
        is_refused = changed == changes
        assert result.choices
        assert any(getattr(choice.candidate, degree) > 1 for choice in result.choices) != is_refused
        assert any(refusal.startswith(reason) for refusal in result.refusals) == is_refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "gpus", "memory"),
    [
        ("llama-3.1-70b", {}, 64, 80),
        ("deepseek-v3", {}, 2048, 80),
        ("llama-3.1-8b", {}, 8, 24),
        ("gpt-oss-120b", {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": None}, 8, 80),  # the 20b
    ],
)
def test_first_layout_of_a_published_model_is_planned_packed_and_dry_run(
    name: str, changes: dict[str, Any], gpus: int, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    write_sparse(tmp_path / "model", {**config, "quantization_config": None, **changes}, 8)
    words = ("plan", "model", "--gpus", gpus, "--gpu-memory", f"{memory}GB")
    shown = reshard(*words, "--json").json
    first, launch = shown["layouts"][0], shlex.split(shown["launch"].replace("PATH", "synthetic"))[1:]
    packed = reshard(*shlex.split(shown["pack"])[1:], "--virtual")
    assert packed.code == 0, packed.err
    planned = reshard("plan", launch[1], *launch[launch.index("synthetic") + 1 :], "--json")
    assert planned.code == 0, planned.err
    assert max(rank["memory_nbytes"]["total"] for rank in planned.json["ranks"]) == first["memory"]
    launch.insert(launch.index("--"), "--dry-run")
    done = CliRunner().invoke(cli, launch)
    assert done.exception is None, (launch, done.exception, done.output)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt-oss", "tiny-gpt2", "tiny-deepseek-v3"])
def test_no_plan_has_degrees_that_a_launch_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    write_sparse(tmp_path / "model", {**config, "quantization_config": None}, 1)
    assert reshard("pack", "model", "--layout", "pp=2", "--out", "packed", "--virtual").code == 0
    chance, outcomes = random.Random(name), set[bool]()
    for _ in range(8):
        degrees = {flag: chance.choice((1, 1, 2, 3)) for flag in ("--tp", "--ep", "--cp", "--dp-shard")}
        per_stage = degrees["--tp"] * degrees["--cp"] * degrees["--dp-shard"]
        words = [word for flag, degree in degrees.items() if degree > 1 for word in (flag, str(degree))]
        words += ["--seq-len", "24", "--global-batch", "12", "--dtype", chance.choice(("fp32", "bf16"))]
        words += ["--schedule", chance.choice(("1F1B", "GPipe"))]
        planned = reshard("plan", "packed", *words)
        launch = ["launch", "packed", "--nproc-per-node", str(2 * per_stage), "--dry-run", "--", "--data", "synthetic"]
        done = CliRunner().invoke(cli, [*launch, *words])
        assert (planned.code == 0) == (done.exception is None), (words, planned.err, done.exception)
        outcomes.add(planned.code == 0)
    assert outcomes == {True, False}


@pytest.mark.parametrize(("gpus", "is_cluster"), [(8, False), (16, True)])
def test_launch_on_a_cluster_asks_for_the_gpus_that_are_planned(gpus: int, is_cluster: bool) -> None:
    words = ("--gpus", str(gpus), "--gpu-memory", "80GB", "--json")
    shown = shlex.split(reshard("plan", CONFIGS / "llama-3.1-8b.json", *words).json["launch"])
    cluster, training = shown[: shown.index("--")], shown[shown.index("--") :]
    assert ("--sbatch-arg=--gpus-per-node=8" in cluster) == is_cluster
    assert (training[1:3] == ["--device", "cuda"]) == is_cluster


def test_what_is_refused_for_a_model_is_named(tmp_path: Path) -> None:
    result = find_layouts(CONFIGS / "gpt-oss-120b.json", request(8, 80, 64))
    assert not result.best
    assert {choice.candidate.tensor for choice in result.choices if choice.candidate.expert > 1} == {1, 2, 4}
    narrow = find_layouts(CONFIGS / "qwen2-0.5b.json", request(8, 80, 64))  # two heads of keys and values
    assert any(reason.startswith("--tp: ") for reason in narrow.refusals)
    words = ("plan", CONFIGS / "gpt-oss-120b.json", "--gpus", "8", "--gpu-memory", "80GB")
    shown = run(*words).out  # exits with 0
    assert "DOES NOT FIT" in shown
    assert run(*words, "--json").json["layouts"] == []
    # In bfloat16, 8 bytes of each of 116.8 billion parameters; a GPU has 72 GiB.
    assert result.state_nbytes == 8 * result.shape.num_params
    assert f"at least {-(-8 * result.shape.num_params // int(0.9 * (80 << 30)))} GPUs" in shown


@pytest.mark.parametrize(
    ("name", "gpus", "memory", "batch", "optimizer"),
    [
        ("llama-3.1-70b", 64, 80, 512, ()), ("llama-3.1-8b", 8, 24, 512, ("--optimizer", "muon")),
        ("llama-3.1-8b", 8, 24, 512, ("--optimizer", "groups.toml", "--ema", "0.999")),
        ("gemma-3-1b", 8, 24, 512, ()),  # layers with and without a window
    ],
)  # fmt: skip
def test_first_layout_needs_what_its_plan_says(
    name: str, gpus: int, memory: int, batch: int, optimizer: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = CONFIGS / f"{name}.json"
    monkeypatch.chdir(tmp_path)
    Path("groups.toml").write_text(GROUPS)
    words = ("--gpus", gpus, "--gpu-memory", f"{memory}GB", "--global-batch", batch, *optimizer, "--json")
    shown = reshard("plan", config, *map(str, words)).json
    assert shown["launch"].endswith(" ".join(optimizer))
    assert bool(optimizer) == ("--optimizer" in shown["launch"])
    first = shown["layouts"][0]
    ranks = first["replicate"] * first["shard"] * first["context"] * first["tensor"]
    assert first["memory"] <= 0.9 * (memory << 30)
    assert first["tokens_per_s"] == pytest.approx(batch * 4096 / first["step_s"])
    steps = [layout["step_s"] for layout in shown["layouts"]]
    assert steps == sorted(steps, key=lambda step: float(f"{step:.3g}"))
    layout = first["layout"] + f",schedule={first['schedule']}"
    masters = {"mixed": "fp32", "bf16": "bf16"}
    plan = reshard(
        "plan", config, "--layout", layout, "--microbatches", "128", "--microbatch", str(first["microbatch"]),
        "--dtype", "bf16", "--master-dtype", masters[first["policy"]], "--dp-shard", str(first["shard"]),
        "--cp", str(first["context"]), "--tp", str(first["tensor"]), "--ep", str(first["expert"]),
        "--ac", first["recompute"], "--seq-len", "4096", *optimizer, "--json",
    ).json  # fmt: skip
    assert plan["num_ranks"] * ranks == gpus
    assert max(rank["memory_nbytes"]["total"] for rank in plan["ranks"]) == first["memory"]
    if first["num_microbatches"] == 128:
        assert plan["bubble"] == pytest.approx(first["bubble"], abs=0.01)  # there, without transfers


def test_closed_form_is_near_the_simulated_step() -> None:
    result = find_layouts(CONFIGS / "llama-3.1-70b.json", request(64, 80, 512))
    estimates = {choice.candidate: choice.forecast for choice in result.choices}
    for choice in result.best:
        assert estimates[choice.candidate].memory == pytest.approx(choice.forecast.memory, rel=0.1)
        assert estimates[choice.candidate].step_s == pytest.approx(choice.forecast.step_s, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "code", "where"),
    [
        (("--gpu-memory", "80GB", "--layout", "pp=2"), "options.conflict", "--layout"),
        (("--gpu-memory", "80GB", "--hardware", "fast"), "options.hardware", "--hardware"),
        (("--gpu-memory", "80GB", "--efficiency", "nan"), "options.invalid-value", "--efficiency"),
        (("--gpu-memory", "80GB", "--tp", "3"), "launch.degrees", "--tp"),
        (("--gpu-memory", "80GB", "--schedule", "GPipe"), "options.conflict", "--schedule"),
        (("--gpu-memory", "80GB", "--dtype", "fp32"), "options.conflict", "--dtype"),
        (("--gpu-memory", "80GB", "--draw", "a.html"), "options.draw-suffix", "--draw"),
        ((), "options.missing-value", "--gpu-memory"),
    ],
)
def test_flags_that_a_search_cannot_take_are_refused(flags: tuple[str, ...], code: str, where: str) -> None:
    ended = reshard("plan", CONFIGS / "llama-3.1-8b.json", "--gpus", "8", *flags, "--json")
    assert ended.refusal == (2, code, where)


def test_flags_of_a_search_alone_are_refused() -> None:
    for flag, value in (
        ("--hardware", "h100"),
        ("--efficiency", "0.5"),
        ("--gpus-per-node", "4"),
    ):
        ended = reshard("plan", CONFIGS / "llama-3.1-8b.json", "--layout", "pp=2", flag, value, "--json")
        assert ended.refusal == (2, "options.missing-value", flag)


def test_what_no_launch_trains_is_not_searched(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "tiny-mixtral.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    words = ("--gpus", "8", "--gpu-memory", "80GB", "--seq-len", "64", "--json")
    ended = reshard("plan", tmp_path / "config.json", *words)
    assert ended.refusal == (3, "config.unsupported-value", "config.json: output_router_logits")


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_search_is_drawn_the_same_each_time(suffix: str, tmp_path: Path) -> None:
    words = ("plan", CONFIGS / "llama-3.1-8b.json", "--gpus", "8", "--gpu-memory", "80GB", "--force", "--draw")
    for name in ("a", "b"):
        assert reshard(*words, tmp_path / f"{name}{suffix}").code == 0
    drawn = (tmp_path / f"a{suffix}").read_bytes()
    assert drawn == (tmp_path / f"b{suffix}").read_bytes()
    assert len(drawn) > 10_000


def shape_of(config: Path) -> ModelShape:
    return model_shape(json.loads(config.read_text()))


def write_run(folder: Path, config: Path, **how: object) -> Path:
    """Write the times of a run: a millisecond forward and two backward for each module, of 2 x 512 tokens."""
    times = {module: ModuleTime(forward=1e-3, backward=2e-3) for module in shape_of(config).modules}
    how = {"seq_len": 512, "microbatch": 2, "dtype": "fp32", "ac": "none", **how}
    folder.mkdir()
    (folder / "times.json").write_bytes(MeasuredTimes(modules=times, how=how).encode())
    return folder


def test_layout_is_planned_with_the_times_and_options_of_a_run(tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    words = ("plan", config, "--layout", "pp=1", "--from-run", write_run(tmp_path / "log", config), "--json")
    plan = reshard(*words, "--microbatches", "4").json
    num_modules = len(plan["stages"][0]["modules"])
    assumed = {name: plan["assumed"][name] for name in ("seq_len", "microbatch", "dtype", "ac", "times")}
    assert assumed == {"seq_len": 512, "microbatch": 2, "dtype": "fp32", "ac": "none", "times": "measured"}
    assert plan["step_s"] == pytest.approx(4 * num_modules * 3e-3)
    longer = reshard(*words, "--microbatches", "4", "--seq-len", "1024").json
    assert longer["step_s"] == pytest.approx(2 * plan["step_s"])


def test_search_takes_the_times_of_a_run(tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    shown = []
    for ac in ("none", "full"):
        log = write_run(tmp_path / ac, config, ac=ac)
        words = ("--gpus", "1", "--gpu-memory", "200GB", "--global-batch", "64", "--ac", "none", "--microbatch", "2")
        shown.append(reshard("plan", config, *words, "--from-run", log, "--json").json["layouts"][0])
    modules = 32 + 3
    assert [layout["policy"] for layout in shown] == ["fp32", "fp32"]
    assert shown[0]["step_s"] == pytest.approx(32 * modules * 3e-3)
    assert shown[1]["step_s"] == pytest.approx(32 * (modules * 3e-3 - 32 * 1e-3))  # without its recomputation


@pytest.mark.parametrize(("device", "share", "layer_s"), [("cpu", 0.14, 0.0), ("cuda", 0.0, 2e-3)])
def test_backwards_in_two_parts_take_longer_in_plans_and_searches(
    device: str, share: float, layer_s: float, tmp_path: Path
) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    log = write_run(tmp_path / "log", config, num_ranks=2, ranks_per_node=2, device=device)
    flags = ("--global-batch", "64", "--microbatch", "2", "--schedule", "InterleavedZeroBubble", "--json")
    words = ("plan", config, *flags, "--from-run", log)
    planned = reshard(*words, "--layout", "pp=2,vpp=4").json
    modules = [stage["modules"] for stage in planned["stages"]]
    backward_s = [2e-3 * len(names) for names in modules]
    extra_s = [share * seconds + layer_s * sum(".layers." in name for name in names)
               for seconds, names in zip(backward_s, modules, strict=True)]  # fmt: skip
    costs = StageCosts.of([1e-3 * len(names) for names in modules], backward_s, split_s=extra_s)
    table = schedule_table("InterleavedZeroBubble", Placement(num_stages=8, num_ranks=2), 32)
    assert planned["step_s"] == pytest.approx(simulate(table, costs).makespan_s)
    search = ("--gpus", "2", "--gpu-memory", "9TB", "--pp", "2", "--ac", "none", "--hardware", "1,999999,999999")
    found = [layout for layout in reshard(*words, *search).json["layouts"] if layout["layout"] == "pp=2,vpp=4"]
    assert [layout["step_s"] for layout in found] == pytest.approx([planned["step_s"]] * len(found), rel=1e-3)


def test_parts_of_rows_attend_with_masks(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    seconds = {}
    for length in (4096, 32768):
        words = ("--gpus", "2", "--gpu-memory", "9TB", "--pp", "1", "--tp", "1", "--global-batch", "2", "--ac", "none")
        words = (*words, "--seq-len", str(length), "--microbatch", "1", "--hardware", "989,999999,999999", "--json")
        for context in (1, 2):
            flags = ("--cp", str(context), "--dp-shard", str(2 // context), "--dp-replicate", "1")
            seconds[length, context] = first_step_s(reshard("plan", CONFIGS / "llama-3.1-8b.json", *words, *flags).json)
    attention, width = 4 * config["hidden_size"], config["num_hidden_layers"]
    for length in (4096, 32768):
        extra_s = seconds[length, 2] - seconds[length, 1]
        flops = 2 * 3 * width * attention * length * length
        assert extra_s == pytest.approx(1.2 * flops / 2 / (0.33 * 989e12), rel=0.01)


def test_layers_whose_window_is_no_longer_than_a_row_attend_with_masks(tmp_path: Path) -> None:
    config, seconds = json.loads((CONFIGS / "gemma-3-1b.json").read_text()), {}
    words = ("--gpus", "1", "--gpu-memory", "9TB", "--global-batch", "1", "--microbatch", "1", "--ac", "none", "--json")
    for window in (512, 4096, 4097):
        (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        seconds[window] = first_step_s(reshard("plan", tmp_path / "config.json", *words, "--seq-len", "4096").json)
    attention = 4 * config["num_attention_heads"] * config["head_dim"]
    extra_s = 1.2 * 22 * 3 * attention * 4096 * 4096 / (0.33 * 989e12)
    assert seconds[512] == seconds[4096]
    assert seconds[512] - seconds[4097] == pytest.approx(extra_s, rel=0.01)


def test_times_of_a_run_have_the_masks_and_the_sends_of_its_own_method(tmp_path: Path) -> None:
    config, rate, layer_s = CONFIGS / "llama-3.1-8b.json", 1e11, 3e-3
    words = ("plan", config, "--layout", "pp=1", "--microbatches", "1", "--json")

    def step_s(name: str, degree: int, method: str, **how: object) -> float:
        log = write_run(tmp_path / name, config, num_ranks=2, ranks_per_node=2, **how)
        add_step(log, overhead_s=0.0, num_params=1, nbytes_per_s=rate, shard_nbytes_per_s=1e18)
        flags = ("--cp", str(degree), "--cp-method", method)
        return float(reshard(*words, *flags, "--from-run", log).json["step_s"])

    work = shape_of(config).work["model.layers.0"]
    masked = (work.flops + 2.2 * 512 * work.flops_per_key) / (work.flops + 512 * work.flops_per_key)
    gathered_s = 3 * 0.5 * 1024 * 2 * 1024 * 4 / rate
    exchanged_s = 2 * 0.5 * 512 * (2 * 4096 + 2 * 1024) * 4 / rate  # queries and results, keys and values
    rest_s = 3 * layer_s / 2
    assert step_s("plain", 2, "gather") == pytest.approx(rest_s + 32 * (masked * layer_s / 2 + gathered_s))
    documents_s = step_s("documents", 2, "gather", document_mask=True)
    assert documents_s == pytest.approx(rest_s + 32 * (layer_s / 2 + gathered_s))
    assert step_s("ulysses", 2, "ulysses") == pytest.approx(rest_s + 32 * (masked * layer_s / 2 + exchanged_s))
    light = {"cp": 2, "cp_method": "ulysses"}
    assert step_s("same", 2, "ulysses", **light) == pytest.approx(35 * layer_s)
    alone = write_run(tmp_path / "alone", config, num_ranks=1, ranks_per_node=1)
    added = reshard(*words, "--tp", "2", "--from-run", alone).json["step_s"]
    assert added == pytest.approx(35 * layer_s / 2)  # no link was measured


def test_what_each_microbatch_takes_is_not_scaled_to_its_tokens(tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    log = write_run(tmp_path / "log", config, num_ranks=2, ranks_per_node=2)
    times = read_times(log / "times.json")
    assert parse_times(replace(times, fixed_share=0.25).encode(), "again").fixed_share == 0.25
    assert times.how["microbatch"] == 2
    for fixed_share, half in ((0.0, 0.5), (0.25, 0.625), (1.0, 1.0)):
        (log / "times.json").write_bytes(replace(times, fixed_share=fixed_share).encode())
        words = ("plan", config, "--layout", "pp=1", "--global-batch", "8", "--json", "--from-run", log)
        small, large = (reshard(*words, "--microbatch", str(microbatch)).json["step_s"] for microbatch in (1, 2))
        assert small / large == pytest.approx(2 * half)  # there are twice as many


def test_actions_that_hand_on_their_results_take_the_measured_gap_longer(tmp_path: Path) -> None:
    config, gap_s = CONFIGS / "llama-3.1-8b.json", 0.01
    log = write_run(tmp_path / "log", config, num_ranks=2, ranks_per_node=2)
    seconds = {}
    for gap in (0.0, gap_s):
        add_step(log, overhead_s=0.0, num_params=1, gap_s=gap)
        for ranks, schedule in ((1, "1F1B"), (2, "1F1B"), (2, "ZBVZeroBubble")):
            style = "style=v" if schedule == "ZBVZeroBubble" else "vpp=1"
            words = ("plan", config, "--layout", f"pp={ranks},{style}", "--schedule", schedule, "--json")
            planned = reshard(*words, "--microbatches", "8", "--from-run", log).json
            seconds[ranks, schedule, gap] = planned["step_s"]
        found = reshard("plan", config, "--gpus", "2", "--gpu-memory", "1TB", "--pp", "2", "--schedule", "1F1B",
                        "--microbatch", "2", "--global-batch", "16", "--ac", "none", "--json",
                        "--from-run", log).json  # fmt: skip
        seconds["search", gap] = first_step_s(found)
    assert seconds[1, "1F1B", gap_s] == seconds[1, "1F1B", 0.0]
    added = seconds[2, "1F1B", gap_s] - seconds[2, "1F1B", 0.0]
    assert added == pytest.approx((8 + 1) * 2 * gap_s)
    assert seconds["search", gap_s] - seconds["search", 0.0] == pytest.approx(added)
    # Two stages a rank, of which F, I or B, but not W, hand on their results.
    assert seconds[2, "ZBVZeroBubble", gap_s] - seconds[2, "ZBVZeroBubble", 0.0] >= 8 * 2 * 2 * gap_s


@pytest.mark.parametrize("share", ["-0.1", "1.5", "true", '"half"'])
def test_share_that_is_none_is_refused(share: str) -> None:
    text = f'{{"version": 1, "modules": {{}}, "fixed_share": {share}}}'
    with pytest.raises(InputError) as caught:
        parse_times(text.encode(), "times.json")
    assert (caught.value.code, caught.value.where) == ("options.cost-file", "times.json: fixed_share")


def test_rest_of_a_measured_step_and_its_network_are_in_planned_steps(tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    without = write_run(tmp_path / "without", config, num_ranks=2, ranks_per_node=2)
    num_params, rate, log = 8_030_261_248, 1e9, Path(shutil.copytree(without, tmp_path / "log"))
    add_step(log, overhead_s=3.0, num_params=num_params // 2, nbytes_per_s=rate, shard_nbytes_per_s=rate / 2)
    times = read_times(log / "times.json")
    assert parse_times(times.encode(), "again") == times
    words = ("--gpus", "2", "--gpu-memory", "200GB", "--global-batch", "64", "--microbatch", "2", "--pp", "1", "--json")
    sent_s = {"dp-replicate": 4 * num_params / rate, "dp-shard": 0.5 * 8 * num_params / rate}
    for flag, seconds in sent_s.items():
        flags = (*words, "--ac", "none", f"--{flag}", "2")
        network = first_step_s(reshard("plan", config, *flags, "--from-run", without, "--hardware", "1,1,1").json)
        step_s = first_step_s(reshard("plan", config, *flags, "--from-run", log).json)
        overhead_s = 6.0 if flag == "dp-replicate" else 3.0
        assert network == pytest.approx(16 * 35 * 3e-3 + seconds)
        slower_s = seconds if flag == "dp-shard" else 0.0  # at half the rate
        assert step_s == pytest.approx(network + slower_s + overhead_s)
        planned = reshard("plan", config, "--layout", "pp=1", f"--{flag}", "2", "--global-batch", "64", "--json",
                          "--from-run", log).json  # fmt: skip
        assert planned["step_s"] == pytest.approx(step_s)


@pytest.mark.parametrize("flag", ["tp", "cp"])
def test_times_of_a_run_are_divided_over_ranks_in_plans_as_in_searches(flag: str, tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    flags = ("--global-batch", "64", "--microbatch", "2", f"--{flag}", "2", "--json", "--from-run")
    steps = []
    for how in ({}, {flag: 2}):
        log = write_run(tmp_path / f"log{len(steps)}", config, num_ranks=2, ranks_per_node=2, **how)
        add_step(log, overhead_s=3.0, num_params=8_030_261_248, nbytes_per_s=1e18)
        search = ("--gpus", "2", "--gpu-memory", "200GB", "--pp", "1", "--ac", "none")
        steps.append(reshard("plan", config, "--layout", "pp=1", *flags, log).json["step_s"])
        assert steps[-1] == pytest.approx(first_step_s(reshard("plan", config, *search, *flags, log).json), rel=1e-6)
    attention, layer = 4 * 4096 * 512, 2 * 218_103_808  # FLOPs of a token, of the latter in products with weights
    masked = 1.2 * attention / (attention + layer) if flag == "cp" else 0.0
    expected = [32 * (35 + 32 * masked) * 3e-3 / 2 + 1.5, 32 * 35 * 3e-3 + 1.5]
    assert steps == pytest.approx(expected, rel=1e-6)


DENSE, EXPERTS = 1_605_636_096, 45_097_156_608  # parameters of Mixtral 8x7B


@pytest.mark.parametrize("ac", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "flags", "reduced"),
    [
        ("llama-3.1-8b", ("tp",), 0),
        ("llama-3.1-8b", ("cp",), 8_030_261_248),
        ("mixtral-8x7b", ("dp-shard", "ep"), DENSE + EXPERTS // 2),
    ],
)
def test_what_a_run_itself_sent_is_in_its_measured_times_once(
    name: str, flags: tuple[str, ...], reduced: int, ac: str, tmp_path: Path
) -> None:
    config = CONFIGS / f"{name}.json"
    log = write_run(tmp_path / "log", config, ac=ac, num_ranks=2, ranks_per_node=2, **dict.fromkeys(flags, 2))
    degrees = [word for flag in flags for word in (f"--{flag}", "2")]
    words = ("--gpus", "2", "--gpu-memory", "20TB", "--global-batch", "64", "--microbatch", "2", "--pp", "1", "--ac")
    rates = ("--hardware", "1,300,300")  # TFLOP/s and GB/s: layers send for up to a tenth of their time
    shown = reshard("plan", config, *words, ac, *degrees, "--from-run", log, *rates, "--json").json
    num_microbatches = 16 if "dp-shard" in flags else 32
    reduction_s = 0.5 * 8 * reduced / 300e9
    assert first_step_s(shown) == pytest.approx(num_microbatches * 35 * 3e-3 + reduction_s, rel=1e-6)


@pytest.mark.parametrize("hardware", [(), ("--hardware", "990,200,5")])
def test_what_a_run_sent_is_of_its_own_nodes_and_dtype(hardware: tuple[str, ...], tmp_path: Path) -> None:
    config, rate, num_microbatches = CONFIGS / "llama-3.1-8b.json", 2e11, 32
    log = write_run(tmp_path / "log", config, num_ranks=8, ranks_per_node=8, tp=8)
    add_step(log, overhead_s=0.0, num_params=1, nbytes_per_s=rate)
    words = ("plan", config, "--gpu-memory", "2TB", "--global-batch", "64", "--microbatch", "2", "--pp", "1", "--json")
    words = (*words, "--ac", "none", "--from-run", log, *hardware)

    def sent_s(tensor: int, element_nbytes: int) -> float:  # of q, k, v, o, gate, up and down
        return 7 * 2 * (tensor - 1) / tensor * 1024 * 4096 * element_nbytes / rate

    for tensor in (8, 4):
        for dtype, element_nbytes in (("fp32", 4), ("bf16", 2)):
            shown = reshard(*words, "--gpus", str(tensor), "--tp", str(tensor), "--dtype", dtype).json
            layer_s = 8 / tensor * (3e-3 - sent_s(8, 4)) + sent_s(tensor, element_nbytes)
            expected_s = num_microbatches * (32 * layer_s + 3 * 8 / tensor * 3e-3)
            assert first_step_s(shown) == pytest.approx(expected_s, rel=1e-6)


def test_modules_never_compute_in_less_than_no_time(tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    log = write_run(tmp_path / "log", config, num_ranks=8, ranks_per_node=8, tp=8)
    words = ("plan", config, "--gpus", "8", "--gpu-memory", "2TB", "--global-batch", "64", "--microbatch", "2")
    flags = ("--pp", "1", "--ac", "none", "--tp", "8", "--from-run", log, "--hardware", "1,1,1", "--json")
    sent_s = 7 * 2 * 7 / 8 * 1024 * 4096 * 4 / 1e9
    assert first_step_s(reshard(*words, *flags).json) == pytest.approx(32 * (35 * 3e-3 + 32 * sent_s), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "num_layers", "reductions"),
    [("llama-3.1-8b", 32, 7), ("gpt-oss-120b", 36, 4 + 2)],  # q, k, v, o, gate, up, down; a layer's experts: 2
)
def test_tensor_parallel_ranks_reduce_a_tensor_for_each_matrix(
    name: str, num_layers: int, reductions: int, tmp_path: Path
) -> None:
    config, steps = CONFIGS / f"{name}.json", []
    words = ("--gpus", "2", "--gpu-memory", "4TB", "--global-batch", "8", "--microbatch", "2", "--pp", "1", "--tp", "2")
    for latency_s in (0.0, 0.5):
        log = write_run(tmp_path / f"{latency_s}", config, num_ranks=2, ranks_per_node=2)
        add_step(log, overhead_s=0.0, num_params=1, nbytes_per_s=1e18, latency_s=latency_s)
        flags = (*words, "--ac", "none", "--ep", "1", "--from-run", log, "--json")
        steps.append(first_step_s(reshard("plan", config, *flags).json))
    assert steps[1] - steps[0] == pytest.approx(4 * num_layers * reductions * 0.5)


@pytest.mark.parametrize(("ranks_per_node", "link"), [(4, "network"), (8, "node")])
def test_rate_of_a_run_is_that_of_its_slowest_link(ranks_per_node: int, link: str, tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    log = write_run(tmp_path / "log", config, num_ranks=8, ranks_per_node=ranks_per_node)
    add_step(log, overhead_s=0.0, num_params=1, nbytes_per_s=1e9)
    words = ("plan", config, "--gpus", "8", "--gpu-memory", "200GB", "--tp", "1", "--pp", "1", "--from-run", log)
    hardware = reshard(*words, "--json").json["assumed"]["hardware"]
    rates = {"node": HARDWARE["h100"].node, "network": HARDWARE["h100"].network, link: 1e9}
    assert hardware == {"peak": HARDWARE["h100"].peak, **rates, "measured": link}
    place = {"node": "on a node", "network": "between nodes"}[link]
    assert f"1 GB/s {place} (--from-run)" in run(*words).out
    assert "(--from-run)" not in run(*words, "--hardware", "h100").out.partition("modules take")[0]


def test_rest_of_a_step_that_trained_adapters_is_not_that_of_all_parameters(tmp_path: Path) -> None:
    config, steps = CONFIGS / "llama-3.1-8b.json", []
    for how in ({}, {"trained": "all"}, {"trained": "part"}):
        log = write_run(tmp_path / f"log{len(steps)}", config, num_ranks=1, ranks_per_node=1, **how)
        add_step(log, overhead_s=3.0, num_params=1_000_000)
        ended = run("plan", config, "--layout", "pp=1", "--global-batch", "64", "--json", "--from-run", log)
        steps.append(json.loads(ended.out)["step_s"])
        assert ended.err.startswith("note: ") == (how == {"trained": "part"})
    assert steps == pytest.approx([32 * 35 * 3e-3 + 3.0 * 8030.261248] * 2 + [32 * 35 * 3e-3])
    alone = write_run(tmp_path / "alone", config, trained="part")
    assert run("plan", config, "--layout", "pp=1", "--from-run", alone).err.startswith("note: ")


def add_step(log: Path, **step: float) -> None:
    document = json.loads((log / "times.json").read_text())
    (log / "times.json").write_text(json.dumps({**document, "step": step}))


def first_step_s(shown: Any) -> float:
    return shown["layouts"][0]["step_s"]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (None, "options.no-times"),
        ({"tp": "2"}, "options.cost-file"),
        ({"ranks_per_node": 0}, "options.cost-file"),
        ({"tp": 10**400}, "options.cost-file"),
        ({"dtype": "int4"}, "options.cost-file"),
        ({"master_dtype": []}, "options.cost-file"),
    ],
)
@pytest.mark.parametrize("what", [("--layout", "pp=2"), ("--gpus", "2", "--gpu-memory", "80GB")])
def test_run_without_times_is_refused(
    how: dict[str, object] | None, code: str, what: tuple[str, ...], tmp_path: Path
) -> None:
    config, log = CONFIGS / "llama-3.1-8b.json", tmp_path / "log"
    if how is not None:
        write_run(log, config, **how)
    ended = reshard("plan", config, *what, "--from-run", log, "--json")
    assert ended.refusal[:2] == (3, code)


@pytest.mark.parametrize("field", ["gap_s", "overhead_s"])
def test_times_that_no_sum_can_have_are_refused(field: str, tmp_path: Path) -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    log = write_run(tmp_path / "log", config)
    add_step(log, **{"overhead_s": 0.0, "num_params": 1, field: 1.7e308})
    ended = reshard("plan", config, "--layout", "pp=2", "--from-run", log, "--json")
    assert ended.refusal == (3, "options.cost-file", f"{log}/times.json: step.{field}")


def test_times_of_less_than_a_token_are_scaled() -> None:
    times = MeasuredTimes(modules={}, how={"microbatch": 1, "seq_len": 1, "cp": 2})
    assert times.scale_to(1, 1) == 2.0


@pytest.mark.parametrize(("how", "missing"), [({}, "seq_len"), ({"seq_len": 512, "microbatch": 2}, "num_ranks")])
def test_times_of_a_run_without_their_options_are_refused_in_the_api(how: dict[str, int], missing: str) -> None:
    step = StepTime(overhead_s=0.0, num_params=1, link=Link(rate=1.0, shard_rate=1.0))
    with pytest.raises(InputError, match="expected a number from 1 up, found None") as refused:
        plan_layout("model", "pp=2", assumed=Assumptions(run=MeasuredTimes(modules={}, step=step, how=how)))
    assert refused.value.where == f"assumed.run.how.{missing}"


def test_parts_of_rows_are_searched_where_whole_rows_do_not_fit() -> None:
    config, shape = CONFIGS / "llama-3.1-8b.json", ("--seq-len", "65536", "--ac", "full", "--dtype", "bf16")
    words = ("plan", config, "--gpus", "8", "--gpu-memory", "80GB", "--global-batch", "16", *shape, "--json")
    assert not reshard(*words, "--cp", "1").json["layouts"]
    shown = reshard(*words).json
    first = shown["layouts"][0]
    assert first["context"] > 1
    assert f" --cp {first['context']}" in shown["launch"]
    layout = first["layout"] + f",schedule={first['schedule']}"
    plan = reshard(
        "plan", config, "--layout", layout, "--microbatches", str(first["num_microbatches"]), *shape,
        "--dp-shard", str(first["shard"]), "--cp", str(first["context"]), "--tp", str(first["tensor"]), "--json",
    ).json  # fmt: skip
    assert max(rank["memory_nbytes"]["total"] for rank in plan["ranks"]) == first["memory"]
    refused = reshard(*words, "--cp", "3").refusal
    assert refused == (2, "launch.degrees", "--cp")
