"""Flags of `runner launch` with values that cannot be: a sentence each, before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from manifests.errors import InputError, UsageError, UserError
from runner.commands import cli
from runner.config.parallel_dims import Degrees
from runner.launch.gpus import check_gpus, memories_gib
from runner.launch.nodes import check_groups, check_ranks
from runner.launch.scheduler_checks import parse_time
from tests.builders import llama_config, reshard, write_model

SAVING = ("--checkpoint", "ck", "--checkpoint-every", "5", "--resume", "auto")
TRAINING = ("--data", "synthetic", "--steps", "4")
SLURM = ("--scheduler", "slurm")
JOBSET = ("--scheduler", "jobset", "--image", "i", "--name", "tiny")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flags")
    write_model(folder / "model", llama_config(num_hidden_layers=4))
    assert reshard("pack", folder / "model", "--layout", "pp=4", "--out", folder / "pp4").code == 0
    assert reshard("pack", folder / "model", "--layout", "pp=4", "--virtual", "--out", folder / "virtual").code == 0
    return folder / "pp4"


def launch(*arguments: object, training: tuple[str, ...] = TRAINING) -> Result:
    return CliRunner().invoke(cli, ["launch", *map(str, arguments), "--dry-run", "--", *training])


def shown(packed: Path, scheduler: tuple[str, ...]) -> tuple[str, ...]:
    """Give the mount that a pod needs for what tests write."""
    return ("--mount", f"claim:{packed.parent.parent}") if scheduler == JOBSET else ()


def said(done: Result) -> str:
    """Give the whole message of a refusal."""
    assert isinstance(done.exception, UserError), (done.output, done.exception)
    return str(done.exception)


SIGNAL_HINT = "\nhint: seconds before the end, 1 to 65535, such as USR2@120"
OTHER_SIGNAL = "\nhint: torchrun dies of SIGUSR1 and leaves its ranks behind; the runner saves and stops at SIGUSR2"
TIME = "--time: expected minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, found {!r}\nhint: such as 30, 4:00:00 or 1-12"
CLAIM = "--mount: expected CLAIM:/FOLDER or /FOLDER-OF-THE-NODE:/FOLDER, found {!r}"
BIND = "--mount: expected /FOLDER-OF-THE-NODE:/FOLDER, found {!r}"
NAME = "--name: expected up to 40 of a-z, 0-9 and -, a letter first, found {!r}{}"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        *(((*SLURM, "--signal", text), f"--signal: expected USR2@SECONDS, found {text!r}{SIGNAL_HINT}")
          for text in ("USR2", "USR2@", "USR2@-1", "USR2@0", "USR2@65536", "USR2@1m")),
        *(((*SLURM, "--signal", text), f"--signal: expected USR2@SECONDS, found {text!r}{OTHER_SIGNAL}")
          for text in ("USR1@60", "B:USR2@120", "TERM@60", "12@60", "")),
        ((*SLURM, "--signal", "USR2@60"),
         "--signal: asks the ranks to save, and there is nothing to save to\nhint: add --checkpoint DIR after --"),
        ((*SLURM, "--signal", "USR2@300", "--time", "5:00"),
         "--signal: 300 s before the end is before the job begins: --time is 300 s"),
        *(((*JOBSET, *given), f"{given[0]}: is Slurm's; a JobSet has no such thing")
          for given in (("--signal", "USR2@60"), ("--time", "4h"), ("--qos", "x"), ("--sbatch-arg", "--x"))),
        *(((*SLURM, "--time", text), TIME.format(text)) for text in ("", "4h", "-1", "1:00:00:00", "1-", "a:b")),
        *(((*SLURM, "--image", "x", "--mount", text), BIND.format(text))
          for text in ("", "/a", "claim:/b", "/a:b", "/a:/b,/c:/d", "/a/../b:/c")),
        ((*SLURM, "--image", "x", "--mount", "/a:/c", "--mount", "/b:/c/"),
         "--mount: '/a:/c' and '/b:/c/' are both shown as /c"),
        *(((*JOBSET, "--mount", text), CLAIM.format(text))
          for text in ("", "claim", "claim:folder", "Claim:/b", "a/b:/c", ":/b", "/a:", "/a/../b:/c", "a:/b:ro")),
        ((*JOBSET, "--mount", "a:/"), CLAIM.format("a:/")),
        ((*JOBSET, "--mount", "a:/c", "--mount", "b:/c"), "--mount: 'a:/c' and 'b:/c' are both shown as /c"),
        *(((*SLURM, "--env", text), f"--env: expected NAME or NAME=VALUE, found {text!r}")
          for text in ("", "=1", "1A=2")),
        *(((*SLURM, "--env", f"{name}=1"), f"--env: {name} is torchrun's: every rank finds its own value there\n"
           "hint: leave it out") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES")),
        *(((*SLURM, "--nnodes", text), f"--nnodes: expected one number from 1 to 99999, found {text!r}")
          for text in ("0", "-1", "2-4", "", "1.5", "٣", "100000")),
        *((("--scheduler", "jobset", "--image", "i", "--name", text), NAME.format(text, near)) for text, near in (
            ("Llama-3.2-1B", "\nhint: --name llama-3-2-1b"), ("x-", "\nhint: --name x"), ("1a", ""), ("ä", ""),
            ("a" * 41, f"\nhint: --name {'a' * 40}"))),
        *(((*SLURM, flag, "a\nb"), f"{flag}: expected a text on one line, found 'a\\nb'")
          for flag in ("--name", "--partition", "--account", "--qos")),
        *(((*SLURM, flag, ""), f"{flag}: expected a text on one line, found ''")
          for flag in ("--name", "--partition", "--account", "--qos")),
        (("--scheduler", "jobset", "--name", "tiny", "--image", "a b"), "--image: expected a word, found 'a b'"),
        ((*SLURM, "--sbatch-arg", "gpus=1"),
         "--sbatch-arg: expected a flag of sbatch, found 'gpus=1'\nhint: --sbatch-arg=--gpus=8"),
        ((*SLURM, "--sbatch-arg", "--gpus=1\nrm"),
         "--sbatch-arg: expected a flag of sbatch, found '--gpus=1\\nrm'\nhint: --sbatch-arg=--gpus=8"),
        ((*SLURM, "--sbatch-arg", "--comment='a"), "--sbatch-arg: expected quotes in pairs, found \"--comment='a\""),
        *(((*SLURM, "--sbatch-arg", text), f"--sbatch-arg: {text!r} is not for you to say: the job is planned with its "
           f"own --{name}\nhint: {hint}") for text, name, hint in (
            ("--nodes=3", "nodes", "--nnodes says it"), ("-N3", "nodes", "--nnodes says it"),
            ("-n 4", "ntasks", "--nproc-per-node says it"), ("--array=1-2", "array", "leave it out"))),
        *(((*SLURM, "--sbatch-arg", text), f"--sbatch-arg: expected one flag, found {text!r}\n"
           "hint: quote a value with spaces: --sbatch-arg=\"--comment='a b'\"") for text in (
            "--comment=a b", "--comment a b", "-Cgpu b", "--exclusive # all of it", "--exclusive #all",
            "--exclusive --nodes=3", "-")),
    ],
)  # fmt: skip
def test_value_that_cannot_be_is_refused(packed: Path, flags: tuple[str, ...], expected: str) -> None:
    assert said(launch(packed, *flags)) == expected


@pytest.mark.parametrize("argument", ["--gpus=8", "-s", "-C gpu", "-Cgpu", "--comment 'a b'", "--comment='a b'"])
def test_one_flag_for_sbatch_is_taken_with_its_value(packed: Path, argument: str) -> None:
    done = launch(packed, *SLURM, f"--sbatch-arg={argument}")
    assert done.exception is None, done.exception
    assert f"#SBATCH {argument}\n" in done.stdout


@pytest.mark.parametrize("value", ["nan", "0", "80", "79.5", "-1GB", "80 apples"])
def test_memory_of_a_gpu_without_a_unit_is_a_usage_error(packed: Path, value: str) -> None:
    done = launch(packed, "--gpu-memory", value)
    assert isinstance(done.exception, UsageError), done.exception
    assert (done.exception.code, done.exception.where) == ("options.memory-size", "--gpu-memory")


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--scheduler", "ray", "Invalid value for '--scheduler': 'ray' is not one of 'local', 'slurm', 'jobset'."),
        ("--nproc-per-node", "0", "Invalid value for '--nproc-per-node': 0 is not in the range x>=1."),
        ("--restarts", "-1", "Invalid value for '--restarts': -1 is not in the range x>=0."),
        ("--partitions", "main", "No such option '--partitions'. Did you mean '--partition'?"),
    ],
)
def test_value_of_another_kind_is_a_usage_error(packed: Path, flag: str, value: str, expected: str) -> None:
    with pytest.raises(click.UsageError) as error:  # `main` shows it, and ends with 2
        cli.main(["launch", str(packed), flag, value, "--", *TRAINING], standalone_mode=False)
    assert error.value.format_message() == expected


@pytest.mark.parametrize("flag", ["--data", "--no-pack"])
def test_flag_of_training_before_the_dashes_is_told_where_it_belongs(packed: Path, flag: str) -> None:
    ended = launch(packed, flag, "text")
    assert said(ended) == (f"{flag}: is for the training\nhint: put it after --: runner launch MANIFEST … -- {flag} …")


@pytest.mark.parametrize(
    ("address", "code", "expected"),
    [
        ("", 2, "MANIFEST: is missing\nhint: runner launch DIR/manifest.json, or manifest = … in the job file"),
        ("/nowhere", 3, "/nowhere: no such file or folder\n"
         "hint: expected an output of reshard pack; check the path for typos"),
    ],
)  # fmt: skip
def test_place_without_a_manifest_is_refused(address: str, code: int, expected: str) -> None:
    done = launch(address, *SLURM)
    assert said(done) == expected
    assert isinstance(done.exception, UserError)
    assert done.exception.exit_code == code


def test_virtual_bundles_are_not_cached_and_remote_ones_must_be(packed: Path) -> None:
    virtual = packed.parent / "virtual"
    for address, flags, where, code in (
        (virtual, ("--stage-to-local", "/scratch"), "--stage-to-local", "options.cache-virtual"),
        ("s3://bucket/pp4", (), "s3://bucket/pp4", "options.remote-manifest"),
    ):
        error = launch(address, *SLURM, *flags).exception
        assert isinstance(error, UserError)
        assert (error.where, error.code) == (where, code)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("manifest = [1]", "manifest: expected a text or a number, found [1]"),
        ("requeue = 'yes'", "requeue: expected true or false, found 'yes'"),
        ("restarts = true", "restarts: expected a text or a number, found True"),
        ("env = 'A=1'", "env: expected a list of texts, such as [\"A=1\"], found 'A=1'"),
        ("env = [1]", 'env: expected a list of texts, such as ["A=1"], found [1]'),
        ("partition = ['a', 'b']", "partition: expected a text or a number, found ['a', 'b']"),
        ("time = 04:00:00", "time: expected a text or a number, found datetime.time(4, 0)"),
        ("[training]\n'' = 1", "training.: is no flag\nhint: runner launch MANIFEST -- --help lists them"),
        ("[training]\n'a b' = 1", "training.a b: is no flag\nhint: runner launch MANIFEST -- --help lists them"),
    ],
)
def test_job_file_with_a_value_of_another_kind_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(line)
    assert said(launch("--job", path)) == f"{path}: {problem}"


def test_job_file_takes_numbers_where_flags_do(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'manifest = "{packed}"\nscheduler = "slurm"\ngpu-memory = "79.5GB"\ntime = 30\nnnodes = 2\n')
    done = launch("--job", path)
    assert done.exception is None, done.exception
    assert "#SBATCH --time=30\n" in done.stdout


@pytest.mark.parametrize("scheduler", [SLURM, JOBSET])
def test_log_folder_that_cannot_be_written_is_refused(packed: Path, tmp_path: Path, scheduler: tuple[str, ...]) -> None:
    (tmp_path / "file").write_bytes(b"")
    arguments = [str(packed), *scheduler, *shown(packed, scheduler), "--log-dir", str(tmp_path / "file" / "log")]
    done = CliRunner().invoke(cli, ["launch", *arguments, "--", *TRAINING])
    assert isinstance(done.exception, UserError)
    assert (done.exception.code, done.exception.where) == ("output.unwritable", f"--log-dir {tmp_path}/file/log")


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (SLURM, "scontrol: is not on this machine\nhint: run it where Slurm's commands are, on a login node"),
        (JOBSET, "kubectl: is not on this machine\n"
         "hint: run it where kubectl reaches the cluster; launch --dry-run needs none"),
    ],
)  # fmt: skip
def test_machine_without_the_scheduler_is_said_to_be(
    packed: Path, tmp_path: Path, scheduler: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = [str(packed), *scheduler, *shown(packed, scheduler), "--log-dir", str(tmp_path / "log")]
    done = CliRunner().invoke(cli, ["launch", *arguments, "--", *TRAINING])
    assert said(done) == expected
    assert not (tmp_path / "log" / "job.json").exists()


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"scheduler": "slurm"}',
        '{"scheduler": "ray", "id": "7", "name": "x", "output": ""}',
        '{"scheduler": "local", "id": "x", "name": "x", "output": ""}',
    ],
)
def test_damaged_job_record_is_refused(tmp_path: Path, verb: str, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    error = CliRunner().invoke(cli, [verb, str(tmp_path)]).exception
    assert isinstance(error, UserError)
    assert (error.where, error.code) == (f"{tmp_path}/job.json", "launch.bad-record")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("5:30", 330), ("1:00:00", 3600), ("1-12", 129600), ("2-0:30", 174600), ("1-0:0:1", 86401),
     ("0", None), ("UNLIMITED", None), ("infinite", None)],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_does(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("nnodes", "nproc", "hint"),
    [
        (2, 1, "take --nproc-per-node 2 or --nnodes 4, or reshard pack MANIFEST --layout pp=2 --out DIR"),
        (3, 2, "take --nproc-per-node 4 or --nnodes 2 or 4, or reshard pack MANIFEST --layout pp=6 --out DIR"),
        (2, 3, "take --nproc-per-node 2 or 4 or --nnodes 4, or reshard pack MANIFEST --layout pp=6 --out DIR"),
    ],
)
def test_ranks_that_do_not_fit_the_manifest_are_refused_with_the_nearest_that_do(
    packed: Path, nnodes: int, nproc: int, hint: str
) -> None:
    with pytest.raises(InputError) as error:
        check_ranks(4, nnodes, nproc)
    assert str(error.value) == (
        f"manifest needs 4 ranks, or a multiple of them, and {nnodes} nodes with {nproc} each are {nnodes * nproc}\n"
        f"hint: {hint}"
    )
    assert said(launch(packed, *SLURM, "--nnodes", nnodes, "--nproc-per-node", nproc)) == str(error.value)


@pytest.mark.parametrize(
    ("degrees", "nnodes", "nproc", "notes"),
    [
        (Degrees(pipeline=4), 2, 2, ()),
        (Degrees(pipeline=4, tensor=2), 2, 4, ()),
        (Degrees(pipeline=2, replicate=2, tensor=2), 2, 4, ()),
        (Degrees(pipeline=2, tensor=8), 4, 4, (
            "the 8 ranks of each tensor-parallel group are on several nodes, and talk in every layer: "
            "--tp 4 keeps them on one",)),
        (Degrees(pipeline=4, shard=3), 3, 4, (
            "ranks 3-5 hold the same stages and are on two nodes, although 3 fit one: "
            "--nnodes 4 --nproc-per-node 3 keeps them together",)),
        (Degrees(pipeline=2, shard=16), 4, 8, ()),  # they need two nodes
        (Degrees(pipeline=4, shard=3), 1, 12, ()),
    ],
)  # fmt: skip
def test_ranks_that_work_closely_together_share_a_node_where_they_fit(
    degrees: Degrees, nnodes: int, nproc: int, notes: tuple[str, ...]
) -> None:
    assert degrees.world_size == nnodes * nproc
    assert check_groups(degrees, nnodes, nproc) == notes


def test_tensor_parallel_group_that_fits_a_node_is_not_cut(packed: Path) -> None:
    with pytest.raises(UsageError) as error:
        check_groups(Degrees(pipeline=4, tensor=4), 2, 8 - 2)
    assert str(error.value) == (
        "--nproc-per-node: 6 ranks on a node cut a tensor-parallel group of 4 in two, and its ranks talk in every "
        "layer\nhint: take a multiple of --tp 4: 4 or 8"
    )
    done = launch(packed, *SLURM, "--nnodes", 8, "--nproc-per-node", 1, training=(*TRAINING, "--tp", "2"))
    assert done.exception is None, done.exception
    assert "note: the 2 ranks of each tensor-parallel group are on several nodes" in done.stderr
    assert "node 7: ranks 7-7, stages 3\n" in done.stderr


def test_gpus_are_those_that_ranks_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '0, GPU-aa11, 81559\\n1, GPU-bb22, 40960\\n'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cu130")
    assert memories_gib("auto", {}) == (81559 / 1024, 40.0)
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": "1"}) == (40.0,)
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-bb, 0"}) == (40.0, 81559 / 1024)
    assert memories_gib("cuda", {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert memories_gib("cpu", {}) == ()
    driver.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert memories_gib("cuda", {}) == ()
    driver.unlink()
    assert memories_gib("cuda", {}) == ()


def test_stages_that_do_not_fit_this_machines_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=4, vocab_size=5000))  # 80,000 embeddings
    assert reshard("pack", tmp_path / "model", "--layout", "pp=2", "--out", tmp_path / "pp2").code == 0
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '0, GPU-aa11, 1\\n1, GPU-bb22, 1\\n'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cu130")
    assert said(launch(tmp_path / "pp2")) == (
        "nvidia-smi: pipeline rank 1 needs 0.00125 GiB for weights, gradients and moments alone, its GPU has "
        "0.000976562 GiB\n"
        "hint: more pipeline ranks (reshard pack MANIFEST --layout pp=N) or --dp-shard N make it smaller"
    )
    assert launch(tmp_path / "pp2", "--gpu-memory", "1GB").exception is None
    assert launch(tmp_path / "pp2", training=(*TRAINING, "--device", "cpu")).exception is None


def test_ranks_without_a_gpu_of_their_own_are_refused() -> None:
    check_gpus(0, 4)  # none, or no telling: the ranks see
    check_gpus(4, 4)
    with pytest.raises(UsageError) as error:
        check_gpus(2, 4)
    assert str(error.value) == (
        "--nproc-per-node: 4 ranks need a GPU each, and this machine shows 2\n"
        "hint: reshard pack MANIFEST --layout pp=2, or train without GPUs: --device cpu after --"
    )
