"""Parts and their commit on Slurm, told to other programs."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from manifests.errors import UnreachableError, UsageError
from tests.builders import files_in, refusal, reshard, run, write_model
from tests.fast.reshard.formats.test_open import write_description, write_own
from tests.fast.reshard.transforms.adapters import write_adapter
from tests.servers.hub import serve_hub, set_up

ROOT = Path(__file__).resolve().parents[4]
ASKED = ("--layout", "pp=2", "--parts", "2", "--scheduler", "slurm", "--account", "us", "--time", "1:00:00")
OPTIONS = ("--account=us", "--time=1:00:00")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "source")
    return tmp_path / "source"


def test_dry_run_gives_commands_and_scripts_as_one_object(source: Path, tmp_path: Path) -> None:
    pack = ("pack", source, "--out", tmp_path / "out", *ASKED, "--dry-run")
    text, told = reshard(*pack).out, reshard(*pack, "--json").json
    assert set(told) == {"version", "num_parts", "parts", "commit"}
    assert (told["version"], told["num_parts"]) == (1, 2)
    # On the command line, too: over the script's own options the environment's would win.
    assert told["parts"]["command"] == ["sbatch", "--parsable", *OPTIONS]
    after = ("--dependency=afterok:ARRAY_JOB_ID", "--kill-on-invalid-dep=yes")
    assert told["commit"]["command"] == ["sbatch", "--parsable", *OPTIONS, *after]
    again = told["parts"]["script"].replace(" --json --part", " --part")
    commands = [" ".join(told[job]["command"]) for job in ("parts", "commit")]
    assert f"$ {commands[0]}\n{again}\n$ {commands[1]}\n{told['commit']['script']}" == text


def test_submission_gives_the_numbers_of_both_jobs_as_one_object(source: Path, tmp_path: Path) -> None:
    """Another program stands for sbatch: it numbers what it is given, and keeps it."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\ncat > "{tmp_path}/$#.sh"\necho "1$#;cluster"\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "reshard", "pack", str(source), "--out", str(tmp_path / "out"), *ASKED]
    environment = {**os.environ, "PATH": f"{sbatch.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == {"version": 1, "num_parts": 2, "parts": {"job": "13"}, "commit": {"job": "15"}}
    assert "#SBATCH --array=1-2\n" in (tmp_path / "3.sh").read_text()
    assert "-P -m reshard commit" in (tmp_path / "5.sh").read_text()


def test_sizes_reach_parts_as_they_are(source: Path, tmp_path: Path) -> None:
    sizes = ("--max-shard-size", "1.5KB", "--io-memory", "640MB")
    told = reshard("pack", source, "--out", tmp_path / "out", *ASKED, *sizes, "--dry-run", "--json").json
    (line,) = [line for line in told["parts"]["script"].splitlines() if " -m reshard " in line]
    words = shlex.split(line)
    pack = words[words.index("pack") : words.index("--json")]
    assert pack[-4:] == ["--max-shard-size", "1536B", "--io-memory", "671088640B"]
    assert reshard(*pack, "--part", "1/2").code == 0


@pytest.mark.parametrize(
    ("sbatch", "scancel", "code", "hint"),
    [
        ("echo queued", "", "launch.scheduler-silent", "squeue --me --name=reshard-pack"),
        ("echo Socket timed out >&2; exit 1", "", "launch.scheduler-failed", "squeue --me --name=reshard-pack"),
        ("echo Zero Bytes were transmitted or received >&2; exit 1", "", "launch.scheduler-failed", "squeue --me"),
        ("echo Invalid account >&2; exit 1", "", "launch.scheduler-failed", ""),
        ("[ $# = 3 ] && echo 7 || exit 1", "exit 0", "launch.scheduler-failed", ""),
        ("[ $# = 3 ] && echo 7 || exit 1", "exit 1", "launch.scheduler-failed", "scancel 7"),
        ("[ $# = 3 ] && echo '7;b' || exit 1", "exit 1", "launch.scheduler-failed", "scancel --clusters=b 7"),
    ],
)
def test_jobs_that_may_be_queued_all_the_same_are_named(
    sbatch: str, scancel: str, code: str, hint: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("sbatch", sbatch), ("scancel", f'echo "$@" > {tmp_path}/cancelled; {scancel or "exit 9"}')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    error = reshard("pack", source, "--out", tmp_path / "out", *ASKED, "--json").json["error"]
    assert error["code"] == code
    assert hint in error["hint"] if hint else not error["hint"]
    assert (tmp_path / "cancelled").exists() is bool(scancel)


def pods(source: Path, *more: str) -> tuple[str | Path, ...]:
    asked = ("--layout", "pp=2", "--out", source.parent / "out", "--parts", "2", "--scheduler", "job")
    return ("pack", source, *asked, *more)


def test_job_of_kubernetes_has_a_pod_for_each_part(source: Path) -> None:
    mounts = ("--mount", f"checkpoints:{source.parent}", "--mount", "/scratch:/tmp/x/")
    text = reshard(*pods(source, "--image", "registry/reshard:1", *mounts, "--dry-run")).out
    job = yaml.safe_load(text)
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["maxFailedIndexes"] == 0  # the first pod waits for all parts
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert UsageError.exit_code in rule["onExitCodes"]["values"]
    assert UnreachableError.exit_code not in rule["onExitCodes"]["values"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["volumeMounts"] == [
        {"name": "mount-0", "mountPath": str(source.parent)},
        {"name": "mount-1", "mountPath": "/tmp/x"},
    ]
    assert pod["volumes"] == [
        {"name": "mount-0", "persistentVolumeClaim": {"claimName": "checkpoints"}},
        {"name": "mount-1", "hostPath": {"path": "/scratch"}},
    ]
    assert "--wait" in container["command"][-1]
    told = reshard(*pods(source, "--image", "registry/reshard:1", *mounts, "--dry-run", "--json")).json
    assert (told["num_parts"], told["script"].replace(" --json", "")) == (2, text)


def test_what_a_pod_runs_packs_and_commits_and_may_run_again(source: Path, tmp_path: Path) -> None:
    mount = ("--image", "i", "--mount", f"c:{tmp_path}", "--dry-run")
    job = yaml.safe_load(reshard(*pods(source, *mount)).out)
    command = [word.replace("$$", "$") for word in job["spec"]["template"]["spec"]["containers"][0]["command"]]
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for index in ("1", "1", "0", "0"):
        done = subprocess.run(
            command, env={**environment, "JOB_COMPLETION_INDEX": index}, cwd=tmp_path, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "whole").code == 0
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--mount", "c:{place}"), (2, "launch.no-image", "--image")),
        (("--image", "i", "--mount", "nothing"), (2, "launch.mount", "--mount")),
        (("--image", "i", "--mount", "c:/elsewhere"), (2, "launch.not-mounted", "--out")),
        (("--image", "i", "--mount", "c:{place}/out"), (2, "launch.not-mounted", "SOURCE")),
        (("--image", "i", "--mount", "c:{place}", "--force"), (2, "options.conflict", "--force")),
        (("--image", "i", "--account", "us"), (2, "options.needs-scheduler", "--account")),
    ],
)
def test_job_that_pods_could_not_run_is_refused(
    flags: tuple[str, ...], found: tuple[int, str, str], source: Path
) -> None:
    asked = [flag.format(place=source.parent) for flag in flags]
    assert refusal(*pods(source, *asked, "--dry-run")).found == found


@pytest.mark.parametrize("hidden", ["--layout", "--model", "--adapter"])
def test_files_of_flags_that_pods_do_not_see_are_refused(hidden: str, tmp_path: Path) -> None:
    write_own(source := tmp_path / "source")
    files = {"--model": write_description(tmp_path / "model.toml"), "--adapter": write_adapter(tmp_path / "adapter")}
    files["--layout"] = tmp_path / "layout.toml"
    run("plan", source, "--model", files["--model"], "--layout", "pp=2", "--write", files["--layout"])
    job = [*pods(source, "--image", "i", "--dry-run"), *(word for item in files.items() for word in item)]
    for path in (source, source.parent / "out", *(path for flag, path in files.items() if flag != hidden)):
        job += ["--mount", f"claim:{path}"]
    assert refusal(*job).found == (2, "launch.not-mounted", hidden)
    assert reshard(*job, "--mount", f"claim:{files[hidden]}").code == 0


def test_source_of_the_hub_is_no_path_that_pods_must_see(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        hub.push("org/tiny", files_in(source))
        asked = pods(source, "--image", "i", "--mount", f"claim:{tmp_path}/out", "--dry-run")[2:]
        done = run("pack", "org/tiny", *asked)
    (container,) = yaml.safe_load(done.out)["spec"]["template"]["spec"]["containers"]
    assert " pack org/tiny " in container["command"][-1]


NAMES = ["it's here", 'a "b" $(touch x) `c`', "a#b", "a\\b"]


@pytest.mark.parametrize("name", NAMES)
def test_working_folder_is_quoted_in_both_scripts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    told = reshard("pack", source, "--out", "out", *ASKED, "--dry-run", "--json").json
    for job in ("parts", "commit"):
        (line,) = [line for line in told[job]["script"].splitlines() if line.startswith("#SBATCH --chdir=")]
        assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--chdir={tmp_path / name}"]


@pytest.mark.parametrize("name", ["a\n#SBATCH --wrap=x", "a\rb", "a\x1b[2Jb"])
def test_working_folder_that_would_write_another_line_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    found = refusal("pack", source, "--out", "out", *ASKED, "--dry-run").found
    assert found == (2, "launch.scheduler-value", "sbatch --chdir")


@pytest.mark.parametrize("name", [*NAMES, "a\n- name: x"])
def test_working_folder_of_pods_is_one_value(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    done = reshard(*pods(source, "--image", "i", "--mount", f"claim:{tmp_path}", "--dry-run"))
    (container,) = yaml.safe_load(done.out)["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == str(tmp_path / name)
