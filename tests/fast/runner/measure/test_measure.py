"""Seconds of modules: with a clock that counts FLOPs, the FLOPs of each; and those of a run's traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click import Context
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from bench.sparse import write_sparse
from manifests.errors import UserError
from manifests.module_times import Link, read_times, split_s, whole_s
from manifests.placement import Placement
from runner.bundle.packed import Packed, open_packed
from runner.commands import cli
from runner.config.flags import training_command
from runner.config.parallel_dims import ParallelDims
from runner.measure.of_run import read_run_times, write_run_times
from runner.profiling.trace import trace_path
from runner.report.read import read_run
from tests.builders import reshard
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.profiling.traced import write_metrics, write_traces
from tests.fast.runner.tiny import save_model
from tests.process.runner.pipeline.mtp_oracle import config_of, random_weights

CONFIGS = Path(__file__).parents[3] / "data" / "configs"
SEQ_LEN, ROWS = 16, 2
SIZES = ("--seq-len", SEQ_LEN, "--microbatch", ROWS, "--repeats", 2, "--device", "cpu")


def pack(folder: Path, layout: str = "pp=2") -> Path:
    packed = reshard("pack", folder / "model", "--layout", layout, "--out", folder / "packed", "--quiet")
    assert packed.code == 0, packed.err
    return folder / "packed"


def measured(*args: object) -> dict[str, Any]:
    """Run `runner measure` and return its file's modules."""
    out = Path(str(args[0])).parent / "times.json"
    cli.main(["measure", *map(str, args), "--out", str(out), "--force"], standalone_mode=False)
    found: dict[str, Any] = json.loads(out.read_text())["modules"]
    return found


@pytest.fixture
def by_flops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return `measured` with a clock on which an action takes as many seconds as it has FLOPs."""

    def run(*args: object) -> dict[str, Any]:
        with FlopCounterMode(display=False) as counter:
            clock = SimpleNamespace(perf_counter=lambda: float(counter.get_total_flops()))
            monkeypatch.setattr("runner.profiling.trace.time", clock)
            return measured(*args)

    return run


# torch stops the recomputation before the last product of a layer, of which it needs no result.
@pytest.mark.parametrize(("recompute", "backward"), [("none", 2), ("full", 2.75)])
def test_each_module_has_its_own_time(
    recompute: str, backward: float, tmp_path: Path, by_flops: Callable[..., dict[str, Any]]
) -> None:
    save_model(tmp_path / "model", num_hidden_layers=2)
    found = by_flops(pack(tmp_path), *SIZES, "--ac", recompute)
    shape = open_packed(tmp_path / "packed").shape
    assert tuple(found) == shape.modules
    step = read_times(tmp_path / "times.json").step
    assert step is not None
    assert step.num_params == sum(map(shape.count_params, shape.tensors))
    for module, each in found.items():
        # attention's products differ by what is masked, less than a tenth of a layer here
        flops = shape.work[module].forward_flops(SEQ_LEN) * SEQ_LEN * ROWS
        assert each["forward_s"] == pytest.approx(flops, rel=0.1), module
        is_layer = ".layers." in module
        assert each["backward_s"] == pytest.approx((backward if is_layer else 2) * flops, rel=0.1), module


@pytest.mark.parametrize(
    ("architecture", "with_others"),
    [
        ("Olmo3ForCausalLM", set()),
        ("BioGptForCausalLM", {"biogpt.embed_positions"}),
        # its layers take more than the hidden state
        pytest.param("DeepseekV4ForCausalLM", {"model.norm", "head"}, marks=pytest.mark.slow),
    ],
)
def test_modules_of_the_catalogue_are_measured(architecture: str, with_others: set[str], tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", architecture)
    found = measured(pack(tmp_path, "pp=1"), *SIZES, "--quiet")
    assert set(found) == set(open_packed(tmp_path / "packed").shape.modules)
    for module, each in found.items():
        assert (each["forward_s"] > 0) == (module not in with_others), module
    planned = reshard(
        "plan", tmp_path / "packed", "--layout", "balance:time,pp=2", "--cost", tmp_path / "times.json", "--json"
    )
    assert (planned.code, planned.json["assumed"]["times"]) == (0, "measured"), planned.err


def test_mtp_layers_are_measured_and_their_rows_of_the_head(
    tmp_path: Path, by_flops: Callable[..., dict[str, Any]]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config_of(2), "dtype": "float32"}))
    weights = {name: tensor.clone() for name, tensor in random_weights(2).items()}
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    packed = pack(tmp_path, "EttttmmL")
    found, shape = by_flops(packed, *SIZES), open_packed(packed).shape
    assert tuple(found) == shape.modules
    vocab, width = shape.tensors["lm_head.weight"]
    assert found["lm_head"]["forward_s"] == 3 * 2 * SEQ_LEN * ROWS * vocab * width
    joined = 2 * SEQ_LEN * ROWS * 2 * width * width
    for number in (4, 5):
        ratio = found[f"model.layers.{number}"]["forward_s"] / (found["model.layers.3"]["forward_s"] + joined)
        assert ratio == pytest.approx(1, rel=0.1)
    planned = reshard("plan", packed, "--layout", "EttttmmL", "--cost", tmp_path / "times.json", "--json")
    assert (planned.code, planned.json["assumed"]["times"]) == (0, "measured"), planned.err


def test_times_of_a_run_are_divided_among_the_modules_of_a_stage(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=2)
    packed, log = open_packed(pack(tmp_path)), tmp_path / "log"
    log.mkdir()
    write_metrics(log)
    write_traces(log, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    write_run_times(log, partial(read_run_times, packed, log))
    modules = read_times(log / "times.json").modules
    assert tuple(modules) == packed.shape.modules
    for stage, names in enumerate(packed.stage_modules):
        assert sum(modules[name].forward for name in names) == pytest.approx(0.010 + 0.001 * stage)
        assert sum(modules[name].backward for name in names) == pytest.approx(0.021)
    assert modules["model.layers.1"].forward > modules["model.norm"].forward


def test_backward_through_all_stages_of_one_rank_is_divided_among_all_modules(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=4)
    packed, log = open_packed(pack(tmp_path, "pp=1,vpp=2")), tmp_path / "log"
    log.mkdir()
    write_metrics(log)
    write_traces(log, "Interleaved1F1B", packed.manifest.placement, 4)
    traced = json.loads(trace_path(log, 0).read_text())
    is_backward_of_first = [(event["tid"], event["args"]["kind"]) == (0, "B") for event in traced["traceEvents"]]
    assert is_backward_of_first.count(True) == 4
    traced["traceEvents"] = [
        event for event, is_first in zip(traced["traceEvents"], is_backward_of_first, strict=True) if not is_first
    ]  # as a rank that runs no pipeline writes them
    trace_path(log, 0).write_text(json.dumps(traced))
    modules = read_run_times(packed, log).modules
    assert sum(time.backward for time in modules.values()) == pytest.approx(0.021)
    assert modules["model.layers.0"].backward == pytest.approx(modules["model.layers.3"].backward)
    assert modules["model.layers.0"].backward > modules["model.norm"].backward


@pytest.mark.parametrize(
    ("device", "longest"),
    [("cpu", 1.14), ("cuda", 1.45), (None, 1.0)],  # 2 ms of each layer on a GPU are more than half
)
def test_times_of_a_run_that_splits_backwards_are_those_of_whole_ones(
    device: str | None, longest: float, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", num_hidden_layers=24)
    packed, log = open_packed(pack(tmp_path, "pp=2,vpp=2")), tmp_path / "log"
    log.mkdir()
    how = {"device": device, "cp_method": "gather", "document_mask": True}
    (log / "run.json").write_text(json.dumps({"id": "c0ffee", "launches": [{"resolved": how}]}))
    write_metrics(log)
    write_traces(log, "InterleavedZeroBubble", packed.manifest.placement, 4)
    write_run_times(log, partial(read_run_times, packed, log))
    times = read_times(log / "times.json")
    assert {name: times.how.get(name) for name in how} == how
    for stage, names in enumerate(packed.stage_modules):
        backward_s = sum(times.modules[name].backward for name in names)
        assert backward_s == pytest.approx(0.021 / (longest if stage else 1))
    assert whole_s({"device": "cuda"}, 0.1 + split_s({"device": "cuda"}, 0.1, 3), 3) == pytest.approx(0.1)


def test_rest_of_a_step_is_what_its_schedule_and_its_network_leave(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=2)
    packed, log = open_packed(pack(tmp_path)), tmp_path / "log"
    log.mkdir()
    write_traces(log, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    write_metrics(log)
    assert read_run_times(packed, log).step is None  # no step says its seconds
    lines = [{"step": step, "loss": 1.0, "tokens_per_s": 1.0, "step_s": 1.0} for step in (2, 3)]
    (log / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone = read_run_times(packed, log).step
    assert alone is not None
    makespan_s = 4 * 0.032 + 0.010 + 0.021  # rank 1's microbatches, rank 0's first forward and last backward
    assert alone.overhead_s == pytest.approx(1 - makespan_s)
    assert alone.gap_s == pytest.approx(0.0, abs=1e-9)
    stages = [sum(map(packed.shape.count_params, fqns)) for fqns in _fqns_of_stages(packed)]
    assert (alone.num_params, alone.link) == (max(stages), None)
    write_traces(log, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4, hop_s=0.005)
    traces, waiting = read_run(log).traces, read_run_times(packed, log).step
    assert traces is not None
    assert waiting is not None
    assert waiting.gap_s == pytest.approx((traces.seconds - makespan_s) / 8)
    assert waiting.gap_s > 0.001
    write_traces(log, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    degrees, link = ParallelDims(pipeline=2, replicate=2, shard=2), Link(rate=1e6, shard_rate=8e5, latency_s=1e-4)
    shared = read_run_times(packed, log, degrees, link).step
    assert shared is not None
    sent_s = 0.5 * 4 * max(stages) / 8e5 + 2 * 0.5 * 4 * max(stages) / 2 / 1e6  # FSDP's in float32, then replicas'
    assert shared.overhead_s == pytest.approx(1 - makespan_s - sent_s)
    assert (shared.num_params, shared.link) == (max(stages) // 2, link)
    assert read_run_times(packed, log, degrees).how["trained"] == "all"
    times = read_run_times(packed, log, degrees, link, {"model.norm.weight": 64})
    assert times.how["trained"] == "part"
    frozen = times.step
    assert frozen is not None
    assert (frozen.num_params, frozen.overhead_s) == (32, pytest.approx(1 - makespan_s - 4 * 32 / 8e5 - 4 * 32 / 1e6))


def test_expert_parallel_ranks_reduce_their_own_experts(tmp_path: Path) -> None:
    write_sparse(tmp_path / "model", json.loads((CONFIGS / "tiny-mixtral.json").read_text()), 1)
    packed, log = open_packed(pack(tmp_path)), tmp_path / "log"
    log.mkdir()
    write_traces(log, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    (log / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 1.0, "tokens_per_s": 1.0, "step_s": 1.0}) + "\n")
    alone = read_run_times(packed, log).step
    step = read_run_times(packed, log, ParallelDims(pipeline=2, shard=4, expert=2), Link(rate=1e9, shard_rate=1e9)).step
    assert alone is not None
    assert step is not None
    count = packed.shape.count_params
    stages = [
        [sum(count(fqn) for fqn in fqns if (".experts." in fqn) is of_experts) for of_experts in (False, True)]
        for fqns in _fqns_of_stages(packed)
    ]
    sent = max(3 / 4 * 4 * dense + 1 / 2 * 4 * experts / 2 for dense, experts in stages)
    assert step.overhead_s == pytest.approx(alone.overhead_s - sent / 1e9, rel=1e-9)
    assert step.num_params == max(dense // 4 + experts // 4 for dense, experts in stages)


def _fqns_of_stages(packed: Packed) -> list[list[str]]:
    owned = packed.shape.by_module()
    return [[fqn for module in modules for fqn in owned[module]] for modules in packed.stage_modules]


def test_run_of_other_stages_or_without_a_trace_has_no_times(
    tmp_path: Path, wording: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path / "model", num_hidden_layers=2)
    packed, log = open_packed(pack(tmp_path)), tmp_path / "log"
    log.mkdir()
    write_metrics(log)
    for code in ("log.no-trace", "log.other-stages"):
        with pytest.raises(UserError) as caught:
            read_run_times(packed, log)
        assert (caught.value.code, caught.value.where) == (code, str(log))
        wording(str(caught.value).replace(str(tmp_path), "TMP"))
        write_run_times(log, partial(read_run_times, packed, log))
        assert code in caplog.messages[-1]
        write_traces(log, "1F1B", Placement(num_stages=4, num_ranks=4, style="loop"), 4)
    assert not (log / "times.json").exists()


def test_module_that_leaves_no_memory_for_adamw_has_times_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    save_tiny(tmp_path / "model", "LlamaForCausalLM")
    packed = pack(tmp_path)
    monkeypatch.setattr(torch.optim, "AdamW", fail)
    assert len(measured(packed, *SIZES)) == 7
    assert "step" not in json.loads((tmp_path / "times.json").read_text())


def test_measure_has_the_defaults_of_training() -> None:
    training = {param.name: param.default for param in training_command.params}
    measure = {param.name: param.default for param in cli.get_command(Context(cli), "measure").params}
    for name in ("seq_len", "microbatch", "dtype", "ac", "device"):
        assert measure[name] == training[name], name
