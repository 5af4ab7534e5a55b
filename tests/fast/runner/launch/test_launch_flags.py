"""Flags of `runner launch` with impossible values are refused before anything is submitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from manifests.command.sizes import show_bytes
from manifests.errors import InputError, UsageError, UserError
from runner.commands import cli
from runner.config.parallel_dims import ParallelDims
from runner.launch.command import check_gpus, memories_gib
from runner.launch.nodes import check_groups, check_ranks
from runner.launch.schedulers.slurm import parse_time
from tests.builders import llama_config, pack, reshard, write_model

Wording = Callable[[str], None]
TRAINING = ("--data", "synthetic", "--steps", "4")
SLURM = ("--scheduler", "slurm")
JOBSET = ("--scheduler", "jobset", "--image", "i", "--name", "tiny")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flags")
    write_model(folder / "model", llama_config(num_hidden_layers=4))
    pack(folder / "model", folder / "pp4", "pp=4")
    pack(folder / "model", folder / "virtual", "pp=4", "--virtual")
    return folder / "pp4"


def launch(*arguments: object, training: tuple[str, ...] = TRAINING) -> Result:
    return CliRunner().invoke(cli, ["launch", *map(str, arguments), "--dry-run", "--", *training])


def shown(packed: Path, scheduler: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mount that a pod needs for the outputs of tests."""
    return ("--mount", f"claim:{packed.parent.parent}") if scheduler == JOBSET else ()


def refused(done: Result) -> UserError:
    assert isinstance(done.exception, UserError), (done.output, done.exception)
    return done.exception


Case = tuple[tuple[str, ...], str, str, bool]


def group(code: str, where: str, *flags: tuple[str, ...]) -> list[Case]:
    """Return cases that are refused alike; the wording of the first is a snapshot."""
    return [(each, code, where, number == 0) for number, each in enumerate(flags)]


def slurm(flag: str, *values: str) -> list[tuple[str, ...]]:
    return [(*SLURM, flag, value) for value in values]


VALUE, SBATCH = "launch.scheduler-value", "launch.sbatch-argument"
IMAGE = ("--image", "x", "--mount")
CASES = [
    *group(VALUE, "--signal", *slurm("--signal", "USR2", "USR2@", "USR2@-1", "USR2@0", "USR2@65536", "USR2@1m")),
    *group(VALUE, "--signal", *slurm("--signal", "USR1@60", "B:USR2@120", "TERM@60", "12@60", "")),
    *group("options.needs-checkpoint", "--signal", *slurm("--signal", "USR2@60")),
    *group(VALUE, "--signal", (*SLURM, "--signal", "USR2@300", "--time", "5:00")),
    *(case for given in (("--signal", "USR2@60"), ("--time", "4h"), ("--qos", "x"), ("--sbatch-arg", "--x"))
      for case in group("launch.scheduler-flag", given[0], (*JOBSET, *given))),
    *group(VALUE, "--time", *slurm("--time", "", "4h", "-1", "1:00:00:00", "1-", "a:b")),
    *group("launch.mount", "--mount", *((*SLURM, *IMAGE, text) for text in (
        "", "/a", "claim:/b", "/a:b", "/a:/b,/c:/d", "/a/../b:/c"))),
    *group("launch.mount", "--mount", (*SLURM, *IMAGE, "/a:/c", "--mount", "/b:/c/")),
    *group("launch.mount", "--mount", *((*JOBSET, "--mount", text) for text in (
        "", "claim", "claim:folder", "Claim:/b", "a/b:/c", ":/b", "/a:", "/a/../b:/c", "a:/b:ro", "a:/"))),
    *group("launch.mount", "--mount", (*JOBSET, "--mount", "a:/c", "--mount", "b:/c")),
    *group("launch.environment", "--env", *slurm("--env", "", "=1", "1A=2")),
    *group("launch.environment", "--env", *slurm("--env", *(f"{name}=1" for name in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES")))),
    *group("launch.nodes", "--nnodes", *slurm("--nnodes", "0", "-1", "2-4", "", "1.5", "\u0663", "100000")),
    *group("launch.job-name", "--name", *(("--scheduler", "jobset", "--image", "i", "--name", text) for text in (
        "Llama-3.2-1B", "x-", "1a", "\u00e4", "a" * 41))),
    *(case for flag in ("--name", "--partition", "--account", "--qos")
      for case in group(VALUE, flag, *slurm(flag, "a\nb", ""))),
    *group(VALUE, "--image", ("--scheduler", "jobset", "--name", "tiny", "--image", "a b")),
    *group(SBATCH, "--sbatch-arg", *slurm("--sbatch-arg", "gpus=1", "--gpus=1\nrm")),
    *group(SBATCH, "--sbatch-arg", *slurm("--sbatch-arg", "--comment='a")),
    *group(SBATCH, "--sbatch-arg", *slurm("--sbatch-arg", "--nodes=3", "-N3", "-n 4", "--array=1-2")),
    *group(SBATCH, "--sbatch-arg", *slurm("--sbatch-arg", "--comment=a b", "--comment a b", "-Cgpu b",
                                          "--exclusive # all of it", "--exclusive #all", "--exclusive --nodes=3", "-")),
    *group("options.relative-cache", "--stage-to-local scratch", ("--stage-to-local", "scratch")),
    *group("launch.environment", "--env", *slurm("--env", "PYTHONPATH=:/a", "PYTHONPATH=src")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "code", "where", "is_shown"), CASES, ids=[str(number) for number in range(len(CASES))]
)
def test_value_that_cannot_be_is_refused(
    packed: Path, flags: tuple[str, ...], code: str, where: str, is_shown: bool, wording: Wording
) -> None:
    error = refused(launch(packed, *flags))
    assert (error.code, error.where) == (code, where)
    if is_shown and code != "options.relative-cache":
        wording(str(error))


@pytest.mark.parametrize(
    "given",
    [
        *((flag, "a") for flag in ("--partition", "--account", "--qos")), ("--time", "1:00:00"),
        ("--signal", "USR2@60"), ("--sbatch-arg", "--gpus=8"), ("--requeue",),
        ("--env", "A=1"), ("--restarts", "1"), ("--follow",),
    ],
)  # fmt: skip
def test_flag_without_a_scheduler_is_refused_with_those_that_take_it(packed: Path, given: tuple[str, ...]) -> None:
    error = refused(launch(packed, *given))
    assert (error.code, error.where) == ("launch.scheduler-flag", given[0])
    named = {flags for flags in (SLURM, JOBSET) if flags[1] in error.problem}
    saving = (*TRAINING, "--checkpoint", "ck", "--checkpoint-every", "5", "--resume", "auto")
    ended = {flags: launch(packed, *flags, *given, training=saving).exception for flags in (SLURM, JOBSET)}
    assert named == {flags for flags in ended if getattr(ended[flags], "code", "") != "launch.scheduler-flag"}


@pytest.mark.parametrize("argument", ["--gpus=8", "-s", "-C gpu", "-Cgpu", "--comment 'a b'", "--comment='a b'"])
def test_one_flag_for_sbatch_is_taken_with_its_value(packed: Path, argument: str) -> None:
    done = launch(packed, *SLURM, f"--sbatch-arg={argument}")
    assert done.exception is None, done.exception
    assert f"#SBATCH {argument}\n" in done.stdout


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--dry-run", "--scheduler"])
def test_flag_of_the_launcher_after_the_dashes_is_refused(packed: Path, flag: str) -> None:
    error = refused(launch(packed, training=(*TRAINING, flag, "2")))
    assert (error.code, error.where) == ("launch.flag-order", flag)
    assert f" {flag} … -- " in error.hint


@pytest.mark.parametrize("flag", ["--data", "--no-packing"])
def test_flag_of_training_before_the_dashes_is_refused(packed: Path, flag: str) -> None:
    error = refused(launch(packed, flag, "text"))
    assert (error.code, error.where) == ("launch.flag-order", flag)
    assert f" -- {flag} " in error.hint


@pytest.mark.parametrize(
    ("address", "exit_code", "where", "code"),
    [
        ("", 2, "MANIFEST", "launch.no-manifest"),
        ("/nowhere", 3, "/nowhere", "manifest.no-such-folder"),
        ("s3://bucket/pp4", 2, "s3://bucket/pp4", "options.remote-manifest"),
    ],
)
def test_place_without_a_manifest_is_refused(
    address: str, exit_code: int, where: str, code: str, wording: Wording
) -> None:
    error = refused(launch(address, *SLURM))
    assert (error.exit_code, error.where, error.code) == (exit_code, where, code)
    if not address:
        wording(str(error))


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("manifest = [1]", "manifest"),
        ("requeue = 'yes'", "requeue"),
        ("restarts = true", "restarts"),
        ("env = 'A=1'", "env"),
        ("env = [1]", "env"),
        ("partition = ['a', 'b']", "partition"),
        ("time = 04:00:00", "time"),
        ("[training]\n'' = 1", "training."),
        ("[training]\n'a b' = 1", "training.a b"),
    ],
)
def test_job_file_with_a_value_of_another_kind_is_refused(tmp_path: Path, line: str, key: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(line)
    error = refused(launch("--job", path))
    assert (error.code, error.where) == ("launch.job-file", f"{path}: {key}")


@pytest.mark.parametrize(("scheduler", "where"), [(SLURM, "scontrol"), (JOBSET, "kubectl")])
def test_machine_without_the_scheduler_is_said_to_be(
    packed: Path, tmp_path: Path, scheduler: tuple[str, ...], where: str, monkeypatch: pytest.MonkeyPatch,
    wording: Wording,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = [str(packed), *scheduler, *shown(packed, scheduler), "--log-dir", str(tmp_path / "log")]
    error = refused(CliRunner().invoke(cli, ["launch", *arguments, "--", *TRAINING]))
    assert (error.code, error.where) == ("system.missing-program", where)
    wording(str(error))
    assert not (tmp_path / "log" / "job.json").exists()


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"scheduler": "slurm"}',
        '{"scheduler": "ray", "id": "7", "name": "x", "output": ""}',
        '{"scheduler": "local", "id": "x", "name": "x", "output": ""}',
        '{"scheduler": "slurm", "id": "-ualice", "name": "x", "output": ""}',
        '{"scheduler": "slurm", "id": "7,8", "name": "x", "output": ""}',
        '{"scheduler": "slurm", "id": "\u0667", "name": "x", "output": ""}',
        '{"scheduler": "jobset", "id": "--kubeconfig=/x/k", "name": "x", "output": ""}',
        '{"scheduler": "jobset", "id": "a,b", "name": "x", "output": ""}',
        '{"scheduler": "jobset", "id": "a", "namespace": "--all", "name": "x", "output": ""}',
    ],
)
def test_damaged_record_of_a_job_is_refused(tmp_path: Path, verb: str, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    error = refused(CliRunner().invoke(cli, [verb, str(tmp_path)]))
    assert (error.code, error.where) == ("launch.bad-record", f"{tmp_path}/job.json")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("5:30", 330), ("1:00:00", 3600), ("1-12", 129600), ("2-0:30", 174600), ("1-0:0:1", 86401),
     ("0", None), ("UNLIMITED", None), ("infinite", None)],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_does(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(("nnodes", "nproc"), [(2, 1), (3, 2), (2, 3)])
def test_ranks_that_do_not_fit_the_manifest_are_refused_with_the_nearest_that_do(
    packed: Path, nnodes: int, nproc: int, wording: Wording
) -> None:
    with pytest.raises(InputError) as error:
        check_ranks(4, nnodes, nproc)
    assert (error.value.code, error.value.where) == ("launch.world-size", "")
    wording(str(error.value))
    assert str(refused(launch(packed, *SLURM, "--nnodes", nnodes, "--nproc-per-node", nproc))) == str(error.value)


@pytest.mark.parametrize(
    ("degrees", "nnodes", "nproc", "num_notes"),
    [
        (ParallelDims(pipeline=4), 2, 2, 0),
        (ParallelDims(pipeline=4, tensor=2), 2, 4, 0),
        (ParallelDims(pipeline=2, replicate=2, tensor=2), 2, 4, 0),
        (ParallelDims(pipeline=2, tensor=8), 4, 4, 1),
        (ParallelDims(pipeline=4, shard=3), 3, 4, 1),
        (ParallelDims(pipeline=2, shard=16), 4, 8, 0),  # they need two nodes
        (ParallelDims(pipeline=4, shard=3), 1, 12, 0),
    ],
)
def test_groups_that_communicate_often_share_a_node_where_they_fit(
    degrees: ParallelDims, nnodes: int, nproc: int, num_notes: int, wording: Wording
) -> None:
    assert degrees.world_size == nnodes * nproc
    notes = check_groups(degrees, nnodes, nproc)
    assert len(notes) == num_notes
    for note in notes:
        wording(note)


def test_tensor_or_expert_parallel_group_that_fits_a_node_is_not_split(packed: Path, wording: Wording) -> None:
    for degrees in (ParallelDims(pipeline=4, tensor=4), ParallelDims(pipeline=4, shard=4, expert=4)):
        with pytest.raises(UsageError) as error:
            check_groups(degrees, 2, 8 - 2)
        assert (error.value.code, error.value.where) == ("launch.split-tp-group", "--nproc-per-node")
        wording(str(error.value))
    (note,) = check_groups(ParallelDims(pipeline=1, shard=16, expert=16), 2, 8)
    wording(note)
    done = launch(packed, *SLURM, "--nnodes", 8, "--nproc-per-node", 1, training=(*TRAINING, "--tp", "2"))
    assert done.exception is None, done.exception
    assert "note: each tensor-parallel group of 2 ranks" in done.stderr
    assert "node 7: ranks 7-7, stages 3\n" in done.stderr


def test_gpus_are_those_that_ranks_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '0, GPU-aa11, 81559\\n1, GPU-bb22, 40960\\n'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("runner.preflight.preflight.version", lambda _: "2.13.0+cu130")
    assert memories_gib("auto", {}) == (81559 / 1024, 40.0)
    by_slot = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": "1", **by_slot}) == (40.0,)
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-bb, 0", **by_slot}) == (40.0, 81559 / 1024)
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-bb"}) == (40.0,)
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert memories_gib("cpu", {}) == ()
    driver.write_text("#!/bin/sh\nprintf '0, GPU-a, 4096\\n1, GPU-b, 81920\\n'\n")
    assert memories_gib("cuda", {}) == (80.0, 4.0), "CUDA numbers the fastest first"
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": "0"}) == (80.0,)
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": "0", **by_slot}) == (4.0,)
    driver.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert memories_gib("cuda", {}) == ()
    driver.unlink()
    assert memories_gib("cuda", {}) == ()


def test_stages_that_do_not_fit_this_machines_gpus_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=4, vocab_size=5000))  # 80,000 embeddings
    pack(tmp_path / "model", tmp_path / "pp2")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '0, GPU-aa11, 1\\n1, GPU-bb22, 1\\n'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("runner.preflight.preflight.version", lambda _: "2.13.0+cu130")
    error = refused(launch(tmp_path / "pp2"))
    assert (error.code, error.where) == ("launch.gpu-memory", "nvidia-smi")
    wording(str(error))
    assert launch(tmp_path / "pp2", "--gpu-memory", "1GB").exception is None
    assert launch(tmp_path / "pp2", training=(*TRAINING, "--device", "cpu")).exception is None


def test_ranks_without_a_gpu_of_their_own_are_refused(wording: Wording) -> None:
    check_gpus(0, 4)  # none, or unknown: the ranks see
    check_gpus(4, 4)
    with pytest.raises(UsageError) as error:
        check_gpus(2, 4)
    assert (error.value.code, error.value.where) == ("launch.too-few-gpus", "--nproc-per-node")
    wording(str(error.value))


def test_dry_run_prints_the_plan_of_reshard(packed: Path) -> None:
    flags = ("--dtype", "bf16", "--seq-len", "64", "--global-batch", "8")
    plan = reshard("plan", packed, *flags, "--json").json
    ended = launch(packed, *SLURM, "--log-dir", packed / "log", training=(*TRAINING, *flags))
    lines = ended.stderr.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("rank  stages"))
    rows = [line.split("  ") for line in lines[head + 1 : head + 5]]
    assert [row[-1].strip() for row in rows] == [show_bytes(rank["memory_nbytes"]["total"]) for rank in plan["ranks"]]
    assert f"bubble {plan['bubble']:.1%}" in lines[-1]
    assert "rank  stages" not in ended.stdout  # which is a script
