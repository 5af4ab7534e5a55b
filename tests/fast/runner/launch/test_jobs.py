"""Jobs for Slurm and Kubernetes as they are rendered, and what is refused before anything is submitted."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from manifests.errors import UserError
from runner.commands import cli
from runner.config.flags import parse_training
from tests.builders import llama_config, reshard, write_model
from tests.fast.trained import write_trained

SAVING = ("--checkpoint", "ck", "--checkpoint-every", "5", "--resume", "auto")
TRAINING = ("--data", "synthetic", "--steps", "4")
SAVED = (*TRAINING, *SAVING)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_model(folder / "model", llama_config(num_hidden_layers=4))
    reshard("pack", folder / "model", "--layout", "pp=4", "--out", folder / "pp4")
    return folder / "pp4"


Wording = Callable[[str], None]


def launch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["launch", *map(str, arguments)])


def rendered(packed: Path, scheduler: str, *flags: str, training: tuple[str, ...] = TRAINING) -> str:
    done = launch(packed, "--scheduler", scheduler, "--name", "tiny", "--dry-run", *flags, "--", *training)
    assert done.exception is None, done.exception
    return done.stdout


def refusal(packed: Path, *flags: str, training: tuple[str, ...] = TRAINING) -> UserError:
    done = launch(packed, *flags, "--", *training)
    assert isinstance(done.exception, UserError), done.output
    return done.exception


def test_batch_script_is_bash_and_says_what_was_asked(packed: Path, tmp_path: Path) -> None:
    script = rendered(
        packed, "slurm", "--nnodes", "2", "--nproc-per-node", "2", "--partition", "main", "--account", "a b",
        "--time", "1:00:00", "--signal", "USR2@120", "--restarts", "3", "--requeue", "--env", "A=1,2 'x'",
        "--sbatch-arg=--gpus-per-node=2", training=(*TRAINING, *SAVING, "--log-dir", str(tmp_path)),
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
    assert command[:5] == ["exec", command[1], "-P", "-m", "runner.launch.supervisor"]
    assert command[command.index("--") + 1 :] == [*TRAINING, *SAVING, "--log-dir", str(tmp_path)]


def test_jobset_is_what_the_api_models_allow(packed: Path) -> None:
    text = rendered(
        packed, "jobset", "--nnodes", "2", "--nproc-per-node", "2", "--image", "registry/runner:1", "--env", "A=1",
        "--mount", "checkpoints:/data", "--mount", f"{packed}:{packed}/", "--restarts", "2", "--log-dir", "/data/log",
        training=(*TRAINING, "--checkpoint", "/data/ck", "--checkpoint-every", "5", "--resume", "auto"),
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
    pod = job["spec"]["template"]["spec"]
    shown = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert {path: volumes[name] for path, name in shown.items()} == {
        "/data": {"persistentVolumeClaim": {"claimName": "checkpoints"}},
        str(packed): {"hostPath": {"path": str(packed)}},
        "/dev/shm": {"emptyDir": {"medium": "Memory"}},
    }
    assert "workingDir" not in pod["containers"][0]


def container(packed: Path, *flags: str, training: tuple[str, ...] = TRAINING) -> dict[str, Any]:
    """Give what a pod runs, of a job that sees the folder of its manifest."""
    mounts = ("--image", "i", "--mount", f"claim:{packed.parent}", *flags)
    pod = yaml.safe_load(rendered(packed, "jobset", *mounts, training=training))["spec"]["replicatedJobs"][0]
    (found,) = pod["template"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_what_is_written_reaches_a_pod_as_it_was_written(packed: Path) -> None:
    """Kubernetes expands $(NAME) in commands and variables, and makes $ of $$; the runner expands $NAME itself."""
    log, values = str(packed.parent / "log"), {"A": "a$$b", "B": "$(A)", "C": "$C$", "D": "$$(A)$"}
    flags = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    found = container(packed, *flags, "--log-dir", log, "--stage-to-local", "$TMPDIR/$(A)")
    environment = {item["name"]: item["value"] for item in found["env"] if "value" in item}
    assert {name: expanded(environment[name]) for name in values} == values
    words = [expanded(word) for word in found["command"]]
    assert words[words.index("--stage-to-local") + 1] == "$TMPDIR/$(A)"


def expanded(text: str) -> str:
    """Do what Kubernetes does before a container begins; here, no variable has another value than "expanded".

    Source: kubernetes/third_party/forked/golang/expansion/expand.go.
    """
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else "expanded", text)


def test_relative_paths_are_looked_up_in_the_same_folder_in_a_pod(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(packed.parent)
    found = container(packed, training=("--data", "text/*.txt", *SAVING))
    assert found["workingDir"] == str(packed.parent)


@pytest.mark.parametrize(
    ("flag", "path", "folder"),
    [
        ("--log-dir", "PLACE/../log", "PARENT/log"),
        ("--checkpoint", "/ck", "/ck"),
        ("--save", "/elsewhere/out", "/elsewhere/out"),
        ("--save", "PLACEX/out", "PLACEX/out"),
        ("--publish", "/served/chain", "/served/chain"),
    ],
)
def test_path_that_pods_do_not_share_is_not_written(packed: Path, flag: str, path: str, folder: str) -> None:
    place = packed.parent
    found, lies = (text.replace("PLACE", str(place)).replace("PARENT", str(place.parent)) for text in (path, folder))
    data = ("--data", "synthetic")
    jobset = ("--scheduler", "jobset", "--image", "i", "--name", "tiny", "--mount", f"claim:{place}")
    error = refusal(packed, *jobset, training=("--log-dir", f"{place}/log", *data, flag, found))
    assert (error.code, error.where) == ("launch.not-mounted", f"{flag} {lies}")
    assert f"--mount CLAIM:{lies.rpartition('/')[0] or lies}, " in error.hint


READ = ("--data", "--eval-data", "--resume")


def test_relative_path_of_a_folder_that_pods_do_not_share_is_refused(packed: Path) -> None:
    jobset = ("--scheduler", "jobset", "--image", "i", "--name", "tiny", "--mount", f"claim:{packed.parent}")
    error = refusal(packed, *jobset)
    assert error.code == "launch.not-mounted"
    assert re.fullmatch(r"--log-dir runner-log/\S+-tiny", error.where)


@pytest.mark.parametrize("flag", READ)
@pytest.mark.parametrize("given", ["a/b", "../b"])
def test_relative_path_that_pods_do_not_find_is_not_read(
    packed: Path, flag: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, shown = () if flag == "--data" else ("--data", "synthetic"), packed if given[0] == "." else "/kept"
    monkeypatch.chdir(packed)  # which is on no mount where a/b is: pods start elsewhere
    mounts = ("--mount", f"claim:{shown}", "--mount", f"text:{packed}/a")
    jobset = ("--scheduler", "jobset", "--image", "i", "--name", "tiny", *mounts)
    error = refusal(packed, *jobset, "--log-dir", f"{shown}/log", training=(*data, flag, given))
    assert (error.code, error.where) == ("launch.not-mounted", f"{flag} {given}")


@pytest.mark.parametrize(("flag", "given"), [("--lora-from", "adapter"), ("--optimizer", "groups.toml")])
def test_relative_adapter_and_parameter_groups_that_pods_do_not_find_are_not_read(
    packed: Path, flag: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "groups.toml").write_text('[[group]]\nalgorithm = "AdamW"\n')
    monkeypatch.chdir(tmp_path)
    jobset = ("--scheduler", "jobset", "--image", "i", "--name", "tiny", "--log-dir", "/kept/log", "--mount")
    error = refusal(packed, *jobset, "claim:/kept", training=(*TRAINING, flag, given))
    assert (error.code, error.where) == ("launch.not-mounted", f"{flag} {given}")
    for place in (str(tmp_path), "/kept"):  # relative paths below a mount, and absolute ones, which images may have
        shown = given if place == str(tmp_path) else f"{tmp_path}/{given}"
        rendered(packed, "jobset", "--image", "i", "--log-dir", f"{place}/log", "--mount", f"claim:{place}",
                 training=(*TRAINING, flag, shown))  # fmt: skip


def srun_words(script: str) -> list[str]:
    """Return the flags for srun in a batch script."""
    words = shlex.split(script.splitlines()[-1])
    return [word.removeprefix("--srun-arg=") for word in words if word.startswith("--srun-arg=")]


@pytest.mark.parametrize("flags", ["", ":ro+rprivate"])
def test_ranks_in_a_container_of_slurm_start_in_the_folder_of_the_launch(
    packed: Path, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(packed.parent)
    mount = f"{packed.parent}:{packed.parent}{flags}"
    script = rendered(packed, "slurm", "--image", "i", "--mount", mount, "--env", "B=1", "--env", "A=2", training=SAVED)
    assert srun_words(script) == [
        "--container-image=i", f"--container-mounts={mount}", f"--container-workdir={packed.parent}",
        "--container-env=B,A",
    ]  # fmt: skip


@pytest.mark.parametrize("mounts", [(), ("--mount", "/kept:/kept"), ("--mount", "PLACE/ck:PLACE/ck")])
def test_relative_path_that_a_container_of_slurm_does_not_have_is_refused(
    packed: Path, mounts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(packed.parent)
    given = ("--image", "i", *(word.replace("PLACE", str(packed.parent)) for word in mounts))
    error = refusal(packed, "--scheduler", "slurm", *given, "--log-dir", "/site/log", training=SAVED)
    assert (error.code, error.where) == ("launch.not-mounted", "--checkpoint ck")
    absolute = (*TRAINING, "--checkpoint", "/site/ck")  # which a site may mount
    script = rendered(packed, "slurm", *given, "--log-dir", "/site/log", training=absolute)
    assert "--container-workdir" not in script


@pytest.mark.parametrize("flag", ["--checkpoint", "--log-dir"])
def test_folder_that_a_supervisor_would_look_for_elsewhere_is_refused(packed: Path, flag: str) -> None:
    """It runs outside the container: it would find no checkpoint there, and give up while they advance."""
    folders = {"--checkpoint": "/scratch/ck", "--log-dir": "/scratch/log", flag: "/ck/run"}
    training = (*TRAINING, *(word for given in folders.items() for word in given), "--resume", "auto")
    given = ("--image", "i", "--mount", "/scratch:/scratch/", "--mount", "/scratch/ck:/ck:rw")
    error = refusal(packed, "--scheduler", "slurm", *given, "--restarts", "3", "--dry-run", training=training)
    assert (error.code, error.where) == ("launch.not-mounted", f"{flag} /ck/run")
    rendered(packed, "slurm", *given, training=training)
    same = (*given[:-1], "/ck:/ck")
    rendered(packed, "slurm", *same, "--restarts", "3", training=training)


def test_manifest_that_a_mount_shows_only_as_it_is_written_is_found_so(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(packed.parent)
    written, log = f"{tmp_path}/data/{packed.name}", ("--log-dir", f"{tmp_path}/data/log")
    for mount, found in ((f"{tmp_path}/data", written), (str(packed.parent), str(packed))):
        paths = rendered(Path(written), "jobset", "--image", "i", "--mount", f"claim:{mount}",
                         "--mount", f"logs:{tmp_path}/data/log", *log)  # fmt: skip
        assert f"- {found}/manifest.json\n" in paths


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--nnodes", "1:2"), "launch.nodes"),
        (("--nnodes", "2"), "launch.scheduler-flag"),
        (("--requeue", "--scheduler", "slurm"), "options.needs-checkpoint"),
        (("--restarts", "1", "--scheduler", "slurm"), "options.needs-checkpoint"),
        (("--env", "NOT_SET_ANYWHERE", "--scheduler", "slurm"), "launch.environment"),
        (("--mount", "/a:/b", "--scheduler", "slurm"), "launch.scheduler-flag"),
        (("--image", "i", "--scheduler", "jobset", "--name", "Not_a_name"), "launch.job-name"),
        (("--gpu-memory", "107B"), "launch.gpu-memory"),
    ],
)
def test_impossible_request_is_refused(packed: Path, flags: tuple[str, ...], code: str, wording: Wording) -> None:
    error = refusal(packed, *flags)
    assert (error.code, error.where) == (code, "--name" if "--name" in flags else flags[0])
    if flags[0] != "--image":
        wording(str(error))


@pytest.mark.parametrize(
    ("training", "start"),
    [
        (("--resume", "ck/step-000004", "--checkpoint", "other"), "reshard pack ck/step-000004 --layout pp=N "),
        (("--resume", "step-4", "--checkpoint", "my ck"), "reshard pack 'my ck/step-000004' --layout pp=N "),
        (("--resume", "ck/step-000004", "--resume-weights-only"), "reshard export ck/step-000004 --to hf "),
        (("--resume-weights-only",), "reshard export LAUNCHED"),
        (("--resume", "ck/step-000004", "--lora-rank", "2"), "copy ck/step-000004 "),
    ],
)
def test_job_that_would_be_restarted_at_step_0_is_told_how_it_starts_from_the_checkpoint_that_it_names(
    packed: Path, training: tuple[str, ...], start: str, tmp_path: Path
) -> None:
    launched = packed if "--resume" in training else write_trained(tmp_path, "pp=4")
    error = refusal(launched, "--scheduler", "slurm", "--requeue", training=(*TRAINING, *training))
    assert (error.code, error.where) == ("options.needs-checkpoint", "--requeue")
    assert start.replace("LAUNCHED", str(launched)) in error.hint


def test_jobset_without_an_image_is_refused(packed: Path, wording: Wording) -> None:
    error = refusal(packed, "--scheduler", "jobset")
    assert (error.code, error.where) == ("launch.no-image", "--image")
    wording(str(error))


def test_job_file_holds_all_flags_and_those_given_win(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        f'manifest = "{packed}"\nscheduler = "slurm"\nnnodes = 2\nnproc-per-node = 2\npartition = "main"\n'
        'env = ["A=1", "B=2"]\nrequeue = true\n\n[training]\ndata = ["synthetic"]\nsteps = 4\nlr = 0.001\n'
        'checkpoint = "ck"\nresume = "auto"\npacking = false\n'
    )
    done = launch("--job", path, "--partition", "urgent", "--dry-run", "--", "--steps", "9")
    assert done.exception is None, done.exception
    assert "#SBATCH --partition=urgent\n#SBATCH --requeue\n\nexport A=1\nexport B=2\n" in done.stdout
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[-2] == "--log-dir"
    assert command[command.index("--") + 1 : -2] == [
        "--data", "synthetic", "--lr", "0.001", "--checkpoint", "ck", "--resume", "auto", "--no-packing",
        "--steps", "9",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "written", "expected"),
    [
        ((), (), ["--data", "a", "--data", "b", "--packing", "--log-dir", "of-file"]),
        ((), ("--log-dir", "mine"), ["--data", "a", "--data", "b", "--packing", "--log-dir", "mine"]),
        (("--log-dir", "mine"), (), ["--data", "a", "--data", "b", "--packing", "--log-dir", "mine"]),
        ((), ("--data=c", "--no-packing"), ["--log-dir", "of-file", "--data=c", "--no-packing"]),
    ],
)
def test_flag_of_a_job_file_gives_way_to_the_same_flag_wherever_it_is_written(
    packed: Path, tmp_path: Path, flags: tuple[str, ...], written: tuple[str, ...], expected: list[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        f'manifest = "{packed}"\nscheduler = "slurm"\nlog-dir = "of-file"\n\n'
        '[training]\ndata = ["a", "b"]\npacking = true\nlog-dir = "of-table"\n'
    )
    done = launch("--job", path, *flags, "--dry-run", "--", *written)
    assert done.exception is None, done.exception
    command = shlex.split(done.stdout.splitlines()[-1])
    assert sorted(command[command.index("--") + 1 :]) == sorted(expected)
    options = parse_training(command[command.index("--") + 1 :])
    assert options.log_dir == Path("mine" if "mine" in expected else "of-file")
    assert options.data.sources == (("c",) if written[:1] == ("--data=c",) else ("a", "b"))


@pytest.mark.parametrize("written", [(), ("--quiet",)])
@pytest.mark.parametrize(
    ("flags", "line"), [(("--quiet",), ""), ((), "quiet = true\n"), (("--quiet",), "quiet = true\n")]
)
def test_quiet_before_the_dashes_is_that_of_training(
    packed: Path, tmp_path: Path, flags: tuple[str, ...], line: str, written: tuple[str, ...]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'manifest = "{packed}"\nscheduler = "slurm"\n{line}[training]\ndata = "synthetic"\n')
    done = launch("--job", path, *flags, "--dry-run", "--", *written)
    assert (done.exception, done.stderr) == (None, "")
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[command.index("--") + 1 :].count("--quiet") == 1


def test_job_file_for_a_cluster_that_names_none_is_not_run_here(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'manifest = "{packed}"\nenv = ["NCCL_DEBUG=INFO"]\n[training]\ndata = ["synthetic"]\n')
    error = launch("--job", path, "--dry-run").exception
    assert isinstance(error, UserError)
    assert (error.code, error.where) == ("launch.scheduler-flag", "--env")
    tried = launch("--job", path, "--scheduler", "local", "--dry-run")
    assert tried.exception is None, tried.exception
    assert "note: the job file's --env have no effect" in tried.stderr


def test_switches_of_a_job_file_that_are_off_ask_for_nothing(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    off = "requeue = false\nrestarts = 0\nenv = []\nfollow = false\n"
    path.write_text(f'manifest = "{packed}"\n{off}[training]\ndata = ["synthetic"]\n')
    for flags in ((), ("--scheduler", "local")):
        done = launch("--job", path, *flags, "--dry-run")
        assert done.exception is None, done.exception
        assert "no effect" not in done.stderr


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("nodes = 2", ": nodes"),
        ("nnodes = [1]", ": nnodes"),
        ("nnodes = ", ""),
        ("training = 3", ": training"),
        ("[training]\nsteps = {a = 1}", ": training.steps"),
        ("[training]\ntrain-only = ['']", ": training.train-only"),
    ],
)
def test_bad_job_file_is_refused_where_it_is_bad(tmp_path: Path, text: str, where: str, wording: Wording) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    error = launch("--job", path).exception
    assert isinstance(error, UserError)
    assert (error.code, error.where) == ("launch.job-file", f"{path}{where}")
    if where:
        wording(str(error))


def test_value_of_a_job_file_that_no_flag_takes_is_said_to_be_of_it(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'manifest = "{packed}"\nscheduler = "slurm"\nrestarts = "x"\n[training]\ndata = "synthetic"\n')
    shown = launch("--job", path).stderr
    assert "'--restarts': 'x'" in shown
    assert "(the job file)" in shown


def test_training_flags_are_listed_without_a_manifest() -> None:
    listed = CliRunner().invoke(cli, ["launch", "--", "--help"])
    assert listed.exit_code == 0
    assert "--global-batch" in listed.stdout


@pytest.mark.parametrize("name", ["a\n#SBATCH --wrap=x", "a\rb"])
def test_working_folder_that_would_write_another_line_is_refused(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    error = refusal(packed, "--scheduler", "slurm", "--dry-run", "--log-dir", str(tmp_path / "log"))
    assert (error.code, error.where) == ("launch.scheduler-value", "sbatch --chdir")
