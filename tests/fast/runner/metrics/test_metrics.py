"""The lines of metrics.jsonl, and docs/metrics.md, which lists their fields."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
import torch

from manifests.errors import RankError
from manifests.models import model_shape
from manifests.models.memory import estimate_memory
from manifests.models.training import POLICIES, Training
from manifests.placement import Placement
from manifests.schedules.tables import schedule_table
from runner.checkpoint.async_save import SaveReport
from runner.checkpoint.publish import PublishReport
from runner.config.flags import parse_training
from runner.config.memory import planned_memory
from runner.config.parallel_dims import ParallelDims
from runner.load.load import LoadReport
from runner.load.local_cache import CacheReport
from runner.metrics.gauges import least_step_s, peak_flops
from runner.metrics.metrics import Metrics, RankLoad, StepProgress, StepTimes
from runner.metrics.sinks import JsonLines
from runner.metrics.summary import how_to_resume, next_command
from runner.profiling.step_times import PARTS, RankTimes
from runner.training.algorithms import plan_groups
from runner.training.expert_balance import ExpertReport
from runner.training.step import StepReport
from tests.fast.manifests.models.built import read_config

DOCS = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
EXPERTS = ExpertReport(load=((3, (5, 0)), (12, (4, 1))), aux_loss=1.25)
STEP = StepReport(loss=2.5, mtp_loss=3.5, num_tokens=600, grad_norm=1.5, lr=1e-3, experts=EXPERTS)
TIMES = StepTimes(
    step_s=2.0,
    data_s=(0.5, 0.0),
    ranks=(
        RankTimes(data_s=0.5, compute_s=1.0, communication_s=0.25, bubble_s=0.125),
        RankTimes(data_s=0.0, compute_s=0.75, communication_s=0.5, bubble_s=0.625),
    ),
)
LOADED = RankLoad(
    rank=1,
    stages=(1, 3),
    report=LoadReport(num_tensors=7, num_parts=7, nbytes=2 << 30, load_s=4.0),
    base_nbytes=100,
    planned_nbytes=200,
    copied=CacheReport(nbytes=30, reused_nbytes=40, num_damaged=0, copy_s=0.5, peer_nbytes=20),
    start_s=dict.fromkeys(PARTS, 0.25),
)


def saved(failure: RankError | None = None) -> SaveReport:
    return SaveReport(path=Path("step-000004"), step=4, nbytes=100, stall_s=0.1, save_s=0.2, failure=failure)


def published() -> PublishReport:
    return PublishReport(
        location="chain/weight_v000002", step=4, stall_s=0.1, number=2, num_tensors=7, num_changed=3, nbytes=100,
        publish_s=0.2,
    )  # fmt: skip


def tell_all(metrics: Metrics) -> None:
    metrics.loaded([LOADED])
    metrics.step(4, STEP, TIMES, peak_nbytes=4096, num_skipped=1)
    metrics.evaluation(4, 2.25, 1000, 1)
    metrics.checkpoint(saved())
    metrics.checkpoint(saved(RankError("rank 1", "the disk is full", code="output.disk-full")))
    metrics.published(published())
    metrics.published(replace(published(), failure=RankError("rank 1", "the disk is full", code="output.disk-full")))
    metrics.ended([10, 20], "runner report")


def write_all(path: Path, least_step_s: float | None) -> list[dict[str, object]]:
    with Metrics([JsonLines(path)], StepProgress(9), least_step_s=least_step_s) as metrics:
        tell_all(metrics)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time") > 0 for line in lines)
    return lines


def test_lines_say_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, step, evaluation, checkpoint, failed, version, unpublished, *ended = write_all(
        tmp_path / "log" / "metrics.jsonl", 0.5
    )
    assert loaded == {
        "rank": 1, "stages": [1, 3], "num_tensors": 7, "load_nbytes": 2 << 30, "load_s": 4.0, "load_gib_per_s": 0.5,
        "base_nbytes": 100, "planned_nbytes": 200,
        "staged_nbytes": 30, "peer_nbytes": 20, "reused_nbytes": 40, "staged_s": 0.5,
        **dict.fromkeys(PARTS, 0.25),
    }  # fmt: skip
    assert step == {
        "step": 4, "loss": 2.5, "grad_norm": 1.5, "lr": 1e-3, "num_tokens": 600, "step_s": 2.0,
        "data_s": [0.5, 0.0], "compute_s": [1.0, 0.75], "communication_s": [0.25, 0.5], "bubble_s": [0.125, 0.625],
        "tokens_per_s": 300.0, "peak_nbytes": 4096, "mfu": 0.25, "skipped_documents": 1,
        "mtp_loss": 3.5, "aux_loss": 1.25, "expert_load": {"3": [5, 0], "12": [4, 1]},
    }  # fmt: skip
    assert evaluation == {"step": 4, "eval_loss": 2.25, "eval_num_tokens": 1000, "eval_skipped_documents": 1}
    assert checkpoint == {
        "step": 4, "checkpoint": "step-000004", "save_nbytes": 100, "stall_s": 0.1, "save_s": 0.2,
    }  # fmt: skip
    problem = "rank 1: the disk is full [output.disk-full]"
    assert failed == {"step": 4, "checkpoint": "step-000004", "save_error": problem}
    assert version == {
        "step": 4, "published": "chain/weight_v000002", "publish_nbytes": 100, "num_changed": 3, "stall_s": 0.1,
        "publish_s": 0.2,
    }  # fmt: skip
    assert unpublished == {"step": 4, "published": "chain/weight_v000002", "publish_error": problem}
    assert ended == [{"rank": 0, "peak_nbytes": 10}, {"rank": 1, "peak_nbytes": 20}]
    first, *_ = capsys.readouterr().out.splitlines()
    losses = "step 4/9  loss 2.500000  MTP loss 3.500000  grad norm 1.5000"
    assert first == f"{losses}  lr 0.001  300 tokens/s  MFU 25.0%  peak 4.00 KiB"


def test_every_field_is_in_the_document_and_no_other(tmp_path: Path) -> None:
    fields = {name for line in write_all(tmp_path / "metrics.jsonl", 0.5) for name in line}
    listed = set(re.findall(r"`([a-z_]+)`", DOCS.partition("## Where the time goes")[0]))
    assert fields - listed == set()
    assert listed - fields == {"time", "run", "_s", "_nbytes", "_gib_per_s"}


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA RTX A1000", None),
        ("Tesla T4", None),
    ],
)
def test_speed_of_a_gpu_goes_by_its_name(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops


def test_least_time_of_a_step_counts_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model_shape(read_config("tiny-llama"))
    options = parse_training(["--data", "synthetic", "--dtype", "bf16", "--global-batch", "6", "--seq-len", "32"])
    assert least_step_s(shape, options, 2, torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = least_step_s(shape, options, 2, torch.device("cuda", 0))
    assert found == shape.train_flops(32) * 6 * 32 / (2 * 989e12)
    for flags in (["--dtype", "fp32"], ["--lora-rank", "4"], ["--train-only", "norm"]):  # the last of two counts
        others = parse_training(["--data", "synthetic", "--dtype", "bf16", *flags])
        assert least_step_s(shape, others, 2, torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ((), "fp32"),
        (("--dtype", "bf16", "--loss-chunk", "8"), "bf16"),
        (("--dtype", "bf16", "--master-dtype", "fp32", "--ac", "selective"), "mixed"),
    ],
)
def test_memory_of_a_run_is_what_reshard_plan_says_of_it(flags: tuple[str, ...], policy: str) -> None:
    shape = model_shape(read_config("tiny-llama"))
    stages = (shape.modules[:2], shape.modules[2:])
    table = schedule_table("1F1B", Placement(num_stages=2, num_ranks=2), 4)
    options = parse_training(["--data", "synthetic", "--microbatch", "2", "--seq-len", "32", *flags])
    degrees = ParallelDims(pipeline=2, replicate=3, shard=2, tensor=4)
    training = Training(
        policy=POLICIES[policy],
        microbatch=2,
        seq_len=32,
        shard=2,
        tensor=4,
        recompute=options.compute.recompute,
        loss_chunk=options.compute.loss_chunk,
    )
    assert planned_memory(shape, stages, table, options, degrees) == estimate_memory(shape, stages, table, training)


@pytest.mark.parametrize(("flags", "factor"), [((), 1.5), (("--dtype", "bf16"), 2), (("--optimizer", "sgd"), 2)])
def test_average_of_weights_is_planned_by_the_launcher_as_by_ranks(flags: tuple[str, ...], factor: float) -> None:
    shape = model_shape(read_config("tiny-llama"))
    table = schedule_table("1F1B", Placement(num_stages=1, num_ranks=1), 4)

    def optimizer_nbytes(*words: str, is_rank: bool = False) -> int:
        options = parse_training(["--data", "synthetic", *flags, *words])
        options = plan_groups(options, shape, None, "")[0] if is_rank else options
        return planned_memory(shape, (shape.modules,), table, options, ParallelDims(pipeline=1)).stages[0].optimizer

    expected = factor * optimizer_nbytes()
    assert [optimizer_nbytes("--ema", "0.9", is_rank=is_rank) for is_rank in (False, True)] == [expected, expected]


@pytest.mark.parametrize(
    ("flags", "has_state", "command"),
    [
        ((), False, "runner report logs"),
        (("--save", "out"), True, "reshard export out --to hf --out out-hf"),
        (("--save", "an out", "--lora-rank", "4"), False, "reshard merge ./base 'an out' --out 'an out-merged'"),
        (("--save", "out", "--lora-rank", "4"), True, "reshard export ./base --to hf --out out-base && "
         "reshard merge out-base out --out out-merged"),
    ],
)  # fmt: skip
def test_run_ends_with_the_command_that_follows(flags: tuple[str, ...], has_state: bool, command: str) -> None:
    options = parse_training(["--data", "synthetic", "--log-dir", "logs", *flags])
    assert next_command(options, "./base", has_state=has_state) == command


def test_stopped_run_names_what_to_launch_where_its_adapters_are_of_another_base() -> None:
    whole, lora = (parse_training(["--data", "synthetic", *flags]) for flags in ((), ("--lora-rank", "4")))
    assert "full/step-000100" in how_to_resume(lora, "pp2", "full/step-000100")
    others = [how_to_resume(whole, "pp2", "full/step-000100"), how_to_resume(lora, "pp2", "pp2")]
    assert others == ["--resume auto resumes from it"] * 2


# What a run shows: a bar where there is a terminal, every Nth line where there is none.


def test_every_nth_step_and_the_last_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StepProgress(7, first_step=1, every=3)
    for step in range(2, 8):
        progress.step(step, "brief", f"line {step}")
    progress.say("saved")
    progress.close()
    assert capsys.readouterr().out == "line 3\nline 6\nline 7\nsaved\n"


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Give a terminal: the end that its user looks at, and the one that a program writes to."""
    user, program = pty.openpty()
    os.set_blocking(user, False)
    fcntl.ioctl(user, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    with open(program, "w") as stream:
        yield user, stream
    os.close(user)


def read_all(terminal: int) -> str:
    parts = []
    with contextlib.suppress(BlockingIOError):  # all is read
        while True:
            parts.append(os.read(terminal, 1 << 16))
    return b"".join(parts).decode()


def test_terminal_shows_a_bar_with_loss_and_time_left_and_other_lines_above_it(
    terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    user, stream = terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    progress = StepProgress(10, first_step=4, every=2)
    for step in range(5, 11):
        progress.step(step, f"loss {step / 2:.4f}, 1,234 tokens/s", f"line {step}")
        if step == 7:
            progress.say("saved step-000007")
    progress.close()
    stream.flush()
    shown = read_all(user)
    assert [number in shown for number in ("line 6", "line 7", "line 8")] == [True, False, True]
    assert "| 4/10 [" in shown  # what an earlier attempt has done counts as done
    assert "| 10/10 [" in shown
    assert "loss 5.0000, 1,234 tokens/s]" in shown
    assert "<" in shown  # time gone < time left
    assert "saved step-000007\r\n" in shown
