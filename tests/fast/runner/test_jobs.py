"""Jobs for Slurm and Kubernetes as they are rendered, and what is refused before anything is submitted."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from manifests.errors import UserError
from runner.cli import cli
from runner.launch.record import JobRecord, read_record, write_record
from runner.launch.state import RunState, clear_state, read_state, write_state
from tests.builders import llama_config, reshard, write_model

SAVING = ("--checkpoint", "ck", "--checkpoint-every", "5", "--resume", "auto")
TRAINING = ("--data", "synthetic", "--steps", "4")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_model(folder / "model", llama_config(num_hidden_layers=4))
    reshard("pack", folder / "model", "--layout", "pp=4", "--out", folder / "pp4")
    return folder / "pp4"


def launch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["launch", *map(str, arguments)])


def rendered(packed: Path, scheduler: str, *flags: str, training: tuple[str, ...] = TRAINING) -> str:
    done = launch(packed, "--scheduler", scheduler, "--name", "tiny", "--dry-run", *flags, "--", *training)
    assert done.exception is None, done.exception
    return done.stdout


def refusal(packed: Path, *flags: str, training: tuple[str, ...] = TRAINING) -> str:
    done = launch(packed, *flags, "--", *training)
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


def test_batch_script_is_bash_and_says_what_was_asked(packed: Path, tmp_path: Path) -> None:
    script = rendered(
        packed, "slurm", "--nnodes", "2", "--nproc-per-node", "2", "--partition", "main", "--account", "a b",
        "--time", "1:00:00", "--signal", "USR2@120", "--restarts", "3", "--requeue", "--env", "A=1,2 'x'",
        "--sbatch-arg=--gpus-per-node=2", "--log-dir", str(tmp_path), training=(*TRAINING, *SAVING),
    )  # fmt: skip
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=tiny", "--nodes=2", "--ntasks-per-node=1", f"--chdir={Path.cwd()}",
        f"--output={tmp_path}/slurm-%j.out", "--open-mode=append", "--partition=main", "--account='a b'",
        "--time=1:00:00", "--signal=USR2@120", "--requeue", "--gpus-per-node=2",
    ]  # fmt: skip
    exported = subprocess.run(["bash", "-c", script.partition("exec")[0] + 'printf %s "$A"'], capture_output=True)
    assert exported.stdout.decode() == "1,2 'x'"
    command = shlex.split(script.splitlines()[-1])
    assert command[:4] == ["exec", command[1], "-m", "runner.life.supervise"]
    assert command[command.index("--") + 1 :] == [*TRAINING, *SAVING, "--log-dir", str(tmp_path)]


def test_jobset_is_what_the_api_models_allow(packed: Path) -> None:
    text = rendered(
        packed, "jobset", "--nnodes", "2", "--nproc-per-node", "2", "--image", "registry/runner:1", "--env", "A=1",
        "--mount", "checkpoints:/data", "--mount", "/scratch:/scratch", "--restarts", "2",
        training=(*TRAINING, *SAVING),
    )  # fmt: skip
    document = yaml.safe_load(text)
    read_back = JobsetV1alpha2JobSet.from_dict(document)
    assert read_back is not None
    assert read_back.to_dict() == document, "the models dropped or changed a field"
    job = document["spec"]["replicatedJobs"][0]["template"]
    whole: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "tiny"}, **job}
    kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)
    environment = {item["name"]: item for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["PET_MASTER_ADDR"]["value"] == "tiny-node-0-0.tiny"
    assert environment["A"]["value"] == "1"
    assert document["spec"]["failurePolicy"] == {
        "maxRestarts": 2,
        "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == (
        "FailJob",
        "In",
        [1, 2, 3, 4],
    )
    assert rule["onExitCodes"]["containerName"] == job["spec"]["template"]["spec"]["containers"][0]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--nnodes", "1:2"), "--nnodes: expected one number from 1 to 99999, found '1:2'\n"
         "hint: every rank has its stages: a job cannot grow or shrink while it runs"),
        (("--nnodes", "2"), "--nnodes: needs --scheduler slurm or jobset\n"
         "hint: without one, all ranks run on this machine"),
        (("--partition", "main"), "--partition: needs --scheduler slurm or jobset\n"
         "hint: without one, all ranks run on this machine"),
        (("--scheduler", "slurm", "--signal", "USR1@60"), "--signal: expected USR2@SECONDS, found 'USR1@60'\n"
         "hint: torchrun dies of SIGUSR1 and leaves its ranks behind; the runner saves and stops at SIGUSR2"),
        (("--scheduler", "slurm", "--requeue"), "--requeue: needs checkpoints to go on from\n"
         "hint: add --checkpoint DIR --checkpoint-every N --resume auto after --"),
        (("--scheduler", "slurm", "--restarts", "1"), "--restarts: needs checkpoints to go on from\n"
         "hint: add --checkpoint DIR --checkpoint-every N --resume auto after --"),
        (("--scheduler", "slurm", "--env", "NOT_SET_ANYWHERE"), "--env: NOT_SET_ANYWHERE is not set here\n"
         "hint: --env NOT_SET_ANYWHERE=VALUE sets it"),
        (("--scheduler", "slurm", "--env", "A-B=1"), "--env: expected NAME or NAME=VALUE, found 'A-B=1'"),
        (("--scheduler", "slurm", "--mount", "/a:/b"), "--mount: needs --image\n"
         "hint: without a container, nodes see the files that they share"),
        (("--scheduler", "jobset"), "--image: is needed for --scheduler jobset\n"
         "hint: an image with reshard[runner] in it"),
        (("--scheduler", "jobset", "--image", "i", "--name", "Not_a_name"),
         "--name: expected up to 40 of a-z, 0-9 and -, a letter first, found 'Not_a_name'\nhint: --name not-a-name"),
        (("--scheduler", "jobset", "--image", "i", "--name", "tiny", "--partition", "main"),
         "--partition: is Slurm's; a JobSet has no such thing"),
        (("--scheduler", "jobset", "--image", "i", "--name", "tiny", "--mount", "claim"),
         "--mount: expected CLAIM:/FOLDER or /FOLDER-OF-THE-NODE:/FOLDER, found 'claim'"),
        (("--gpu-memory", "0.0000001"), "--gpu-memory: pipeline rank 1 needs 0.0 GiB for weights, gradients and "
         "moments alone, its GPU has 1e-07 GiB\n"
         "hint: more pipeline ranks (reshard pack MANIFEST --layout pp=N) or --dp-shard N make it smaller"),
    ],
)  # fmt: skip
def test_impossible_request_is_refused_in_a_sentence(packed: Path, flags: tuple[str, ...], expected: str) -> None:
    assert refusal(packed, *flags) == expected


def test_job_file_holds_all_flags_and_those_given_win(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        f'manifest = "{packed}"\nscheduler = "slurm"\nnnodes = 2\nnproc-per-node = 2\npartition = "main"\n'
        'env = ["A=1", "B=2"]\nrequeue = true\n\n[training]\ndata = ["synthetic"]\nsteps = 4\nlr = 0.001\n'
        'checkpoint = "ck"\nresume = "auto"\npack = false\n'
    )
    done = launch("--job", path, "--partition", "urgent", "--dry-run", "--", "--steps", "9")
    assert done.exception is None, done.exception
    assert "#SBATCH --partition=urgent\n#SBATCH --requeue\n\nexport A=1\nexport B=2\n" in done.stdout
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[command.index("--") + 1 :] == [
        "--data", "synthetic", "--steps", "4", "--lr", "0.001", "--checkpoint", "ck", "--resume", "auto", "--no-pack",
        "--steps", "9",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes = 2", ": nodes: is no flag of runner launch\nhint: known: account, "),
        ("nnodes = [1]", ": nnodes: expected a text or a number, found [1]"),
        ("nnodes = ", ": is no TOML: "),
        ("training = 3", ": training: expected a table of the flags that follow --"),
        ("[training]\nsteps = {a = 1}", ": training.steps: expected a text, a number, true, false or a list of these"),
    ],
)
def test_bad_job_file_is_refused_where_it_is_bad(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    error = launch("--job", path).exception
    assert isinstance(error, UserError)
    assert str(error).startswith(f"{path}{problem}")


def test_record_and_state_are_read_back(tmp_path: Path) -> None:
    record = JobRecord(scheduler="slurm", id="7", name="tiny", output="/x/slurm-7.out")
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert read_state(tmp_path) is None
    write_state(tmp_path, RunState(step=3, ended="stopped"))
    assert read_state(tmp_path) == RunState(step=3, ended="stopped")
    clear_state(tmp_path)
    assert read_state(tmp_path) is None


def test_folder_of_no_job_is_said_to_be_none(tmp_path: Path) -> None:
    error = CliRunner().invoke(cli, ["status", str(tmp_path)]).exception
    assert str(error) == (
        f"{tmp_path}/job.json: no such file\nhint: give the --log-dir of a job that runner launch has started"
    )
