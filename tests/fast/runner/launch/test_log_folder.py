"""Whether a log folder may be given to another job, and what sbatch is told on its command line."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from manifests.errors import UserError
from runner.commands import cli
from runner.launch.run_folder import check_free
from runner.launch.schedulers.local import record_here
from runner.launch.verbs import find_status
from runner.rundir.records import (
    Beat,
    JobRecord,
    RunState,
    heartbeat_path,
    launcher_heartbeat_path,
    read_job_record,
    read_run_record,
    read_state,
    write_beat,
    write_job_record,
    write_run_record,
    write_state,
)
from tests.builders import llama_config, pack, write_model

SLURM = JobRecord(scheduler="slurm", id="7", name="tiny", output="/x/slurm-7.out")
ELSEWHERE = JobRecord(scheduler="local", id="7", name="tiny", output="", host="elsewhere", birth="a boot 17")
JOBSET = JobRecord(scheduler="jobset", id="tiny", name="tiny", output="", birth="u")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with no log folder yet, and set a PATH with only the programs that a test puts there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def put_program(place: Path, name: str, script: str) -> None:
    (place / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (place / "bin" / name).chmod(0o755)


def put_job(place: Path, record: JobRecord) -> Path:
    log = place / "log"
    write_job_record(log, record)
    return log


def refusal(log: Path) -> UserError:
    with pytest.raises(UserError) as error:
        check_free(log)
    assert (error.value.code, error.value.where) == ("launch.log-folder-in-use", f"--log-dir {log}")
    return error.value


def test_folder_of_no_job_is_free(tmp_path: Path) -> None:
    check_free(tmp_path / "absent")
    check_free(tmp_path)


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_folder_of_a_job_that_slurm_has_not_ended_is_refused(
    place: Path, word: str, wording: Callable[[str], None]
) -> None:
    put_program(place, "scontrol", f"echo JobId=7 JobState={word} Reason=None ExitCode=0:0")
    log = put_job(place, SLURM)
    error = refusal(log)
    assert word in error.problem
    if word == "PENDING":
        wording(str(error))


@pytest.mark.parametrize(
    "script",
    [
        "echo JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0",
        "echo JobId=7 JobState=CANCELLED Reason=None ExitCode=0:15",
        "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1",
    ],
)
def test_folder_of_a_job_that_slurm_has_ended_or_forgotten_is_free(place: Path, script: str) -> None:
    put_program(place, "scontrol", script)
    check_free(put_job(place, SLURM))


@pytest.mark.parametrize(
    ("folder", "shows", "is_free"),
    [
        ("a log", "StdOut=LOG/slurm-7.out", False),
        ("a log", "StdOut=/home/other/slurm-7.out", True),  # another cluster's, or after a reset
        ("a log", "StdOut=LOG/slurm-%j.out", False),
        ("100% log", "StdOut=PLACE/100%% log/slurm-7.out", False),
        ("a log", "Power=", False),  # one of an array shows none
    ],
)
def test_number_that_slurm_has_given_to_another_job_is_not_the_job(
    folder: str, shows: str, is_free: bool, place: Path
) -> None:
    log = place / folder
    write_job_record(log, replace(SLURM, output=f"{log}/slurm-7.out"))
    shown = shows.replace("LOG", str(log)).replace("PLACE", str(place))
    put_program(place, "scontrol", f"echo 'JobId=7 JobState=RUNNING Reason=None StdErr=/x y {shown} Power='")
    put_program(place, "scancel", f"echo > '{place}/cancelled'")
    said = "slurm job 7 (tiny) has ended already" if is_free else "cancelled slurm job 7 (tiny)"
    assert CliRunner().invoke(cli, ["cancel", str(log)]).stdout == f"{log}: {said}\n"
    assert (place / "cancelled").exists() is not is_free
    if is_free:
        check_free(log)
    else:
        assert "RUNNING" in refusal(log).problem


def test_folder_is_refused_where_slurm_cannot_be_asked(place: Path, wording: Callable[[str], None]) -> None:
    log = put_job(place, SLURM)
    wording(str(refusal(log)))


def test_folder_with_a_damaged_record_is_refused(place: Path) -> None:
    (place / "job.json").write_text("{")
    assert f"{place}/job.json" in refusal(place).problem


def test_job_of_another_machine_has_its_folder_while_its_ranks_send_heartbeats(
    place: Path, wording: Callable[[str], None]
) -> None:
    log = put_job(place, ELSEWHERE)
    assert "process 7 on elsewhere" in refusal(log).problem  # recorded just now: its ranks may still import
    os.utime(log / "job.json", (0, 0))
    check_free(log)
    for age_s, is_free in ((300, True), (1, False)):
        put_beat(log, time.time() - age_s)
        if is_free:
            check_free(log)
    wording(str(refusal(log)))
    write_state(log, RunState(step=3, ended="done"))
    check_free(log)


def test_job_of_another_machine_whose_ranks_still_load_has_its_folder_while_its_launcher_sends_heartbeats(
    place: Path,
) -> None:
    log = put_job(place, ELSEWHERE)
    os.utime(log / "job.json", (0, 0))
    path = launcher_heartbeat_path(log)
    path.parent.mkdir()
    path.touch()
    assert "process 7 on elsewhere" in refusal(log).problem
    os.utime(path, 2 * (time.time() - 300,))
    check_free(log)


@pytest.mark.parametrize("change", ["namespace", "boot"])
def test_job_of_another_container_of_this_host_runs_while_its_ranks_send_heartbeats(change: str, place: Path) -> None:
    mine = record_here(place / "log", "tiny")
    another = {"namespace": "pid:[1]"} if change == "namespace" else {"birth": "another-boot 17"}
    log = put_job(place, replace(mine, **another))
    os.utime(log / "job.json", (0, 0))
    assert find_status(log)["state"] == "KILLED"
    assert "has ended already" in CliRunner().invoke(cli, ["cancel", str(log)]).stdout
    check_free(log)
    put_beat(log, time.time())
    assert find_status(log)["state"] == "RUNNING"
    assert f"process {os.getpid()} on {mine.host}" in refusal(log).problem
    cancelled = CliRunner().invoke(cli, ["cancel", str(log)]).exception
    assert isinstance(cancelled, UserError)
    assert cancelled.code == "launch.other-host"


def test_job_whose_record_has_no_namespace_is_looked_up_in_this_one(place: Path) -> None:
    log = put_job(place, replace(record_here(place / "log", "tiny"), namespace=""))
    assert find_status(log)["state"] == "RUNNING"


def put_beat(log: Path, now_s: float) -> None:
    path = heartbeat_path(log, 0)
    path.parent.mkdir(exist_ok=True)
    beat = Beat(rank=0, stages=(0,), host="elsewhere", pid=8, step=3, phase="train", time=now_s)
    write_beat(path, beat)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_model(folder / "model", llama_config(num_hidden_layers=2))
    return pack(folder / "model", folder / "pp2")


def launch(packed: Path, log: Path, *flags: str) -> Result:
    asked = ["launch", str(packed), "--scheduler", "slurm", "--log-dir", str(log), *flags, "--", "--data", "synthetic"]
    return CliRunner().invoke(cli, asked)


def test_second_job_leaves_the_first_one_its_folder_and_begins_with_a_clean_one(place: Path, packed: Path) -> None:
    put_program(place, "sbatch", "echo 8")
    put_program(place, "scontrol", "echo JobId=7 JobState=RUNNING PartitionName=main Default=YES")
    log = put_job(place, SLURM)
    write_state(log, RunState(step=3, ended="failed", code=5, error="rank 1: killed"))
    error = launch(packed, log).exception
    assert isinstance(error, UserError)
    assert (error.code, error.where) == ("launch.log-folder-in-use", f"--log-dir {log}")
    assert (read_job_record(log), read_state(log) is None) == (SLURM, False)

    put_program(place, "scontrol", "echo JobId=8 JobState=CANCELLED PartitionName=main Default=YES")
    assert launch(packed, log).exception is None
    put_program(place, "scontrol", "echo JobId=8 JobState=PENDING Reason=Priority")
    found = json.loads(CliRunner().invoke(cli, ["status", str(log), "--json"]).stdout)
    assert (found["id"], found["state"], found["error"]) == ("8", "PENDING", None)


def test_sbatch_is_told_all_on_its_command_line_where_nothing_overrules_it(
    place: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: sbatch(1): "environment variables will override any options set in a batch script"."""
    monkeypatch.setenv("SBATCH_PARTITION", "large")  # a site's: as if --partition were it
    put_program(place, "scontrol", "echo PartitionName=main Default=YES TotalNodes=1;"
                                   "echo PartitionName=large Default=NO TotalNodes=9")  # fmt: skip
    put_program(place, "sbatch", f'printf "%s\\n" "$@" > {place}/told; while read -r line; do echo "$line"; done > '
                                 f"{place}/script; echo 8")  # fmt: skip
    log = place / "a 100% log"
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--account", "a b", "--time", "30",
             "--sbatch-arg=--comment='c d'", "--sbatch-arg=-C gpu")  # fmt: skip
    done = launch(packed, log, *flags)
    assert done.exception is None, done.exception
    script = (place / "script").read_text()
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    told = (place / "told").read_text().splitlines()
    assert told == ["--parsable", *(word for line in lines for word in shlex.split(line))]
    output = f"--output={place}/a 100%% log/slurm-%j.out"
    assert {output, "--account=a b", "--time=30", "--comment=c d", "-C", "gpu"} < {*told}
    assert read_job_record(log).output == f"{log}/slurm-8.out"
    assert script == launch(packed, log, *flags, "--dry-run").stdout


def test_job_that_is_not_submitted_is_not_the_latest(
    place: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    put_program(place, "scontrol", "echo PartitionName=main Default=YES")
    asked = ["launch", str(packed), "--scheduler", "slurm", "--", "--data", "synthetic"]
    put_program(place, "sbatch", "echo 8")
    assert CliRunner().invoke(cli, asked).exception is None
    latest = Path("runner-log/latest").resolve()
    put_program(place, "sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    error = CliRunner().invoke(cli, asked).exception
    assert isinstance(error, UserError)
    assert error.code == "launch.scheduler-failed"
    assert Path("runner-log/latest").resolve() == latest
    assert read_job_record(latest).id == "8"


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}])
def test_job_has_nothing_of_the_job_in_which_it_is_submitted(
    job: dict[str, str], place: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: srun(1), "INPUT ENVIRONMENT VARIABLES": SLURM_GPUS_PER_NODE is --gpus-per-node."""
    put_program(place, "scontrol", "echo PartitionName=main Default=YES")
    put_program(place, "sbatch", f"export -p > {place}/exported; echo 8")
    theirs = {"SLURM_GPUS_PER_NODE": "1", "SLURM_CPU_BIND": "mask_cpu:0x1", **job}
    ours = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_QOS": "high", "HF_HOME": "/hub"}
    for name, value in {**theirs, **ours}.items():
        monkeypatch.setenv(name, value)
    done = launch(packed, place / "log")
    assert done.exception is None, done.exception
    names = {line.split()[-1].partition("=")[0] for line in (place / "exported").read_text().splitlines()}
    assert ours.keys() <= names
    assert names.isdisjoint(theirs) if job else theirs.keys() <= names


def test_job_of_another_cluster_is_asked_for_there(place: Path, packed: Path) -> None:
    """Source: sbatch(1), --parsable: the number, and after a semicolon the name of the cluster if present."""
    shown = "echo JobId=7 JobState=RUNNING PartitionName=main Default=YES TotalNodes=1"
    unknown = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    put_program(place, "scontrol", f'case "$*" in *partition*|*--clusters=b?\\ 7) {shown};; *) {unknown};; esac')
    put_program(place, "sbatch", "echo '7;b2'")
    put_program(place, "scancel", f'echo "$@" > {place}/cancelled')
    nodes = ("--nnodes", "2", "--nproc-per-node", "1")  # more than the default cluster has
    done = launch(packed, place / "log", *nodes, "--sbatch-arg=-Mb1,b2")
    assert done.exception is None, done.exception
    assert "RUNNING" in refusal(place / "log").problem
    assert "cancelled slurm job 7 " in CliRunner().invoke(cli, ["cancel", str(place / "log")]).stdout
    assert (place / "cancelled").read_text() == "--clusters=b2 7\n"


def test_names_that_are_not_utf_8_reach_the_script_as_they_are(place: Path, packed: Path) -> None:
    put_program(place, "scontrol", "echo PartitionName=main Default=YES")
    put_program(place, "sbatch", f'while read -r line; do echo "$line"; done > {place}/script; echo 8')
    done = launch(packed, place / "log", "--env", os.fsdecode(b"CORPUS=/data/caf\xe9"))
    assert done.exception is None, done.exception
    assert b"\nexport CORPUS='/data/caf\xe9'\n" in (place / "script").read_bytes()


def test_job_of_which_sbatch_says_nothing_is_looked_for(
    place: Path, packed: Path, wording: Callable[[str], None]
) -> None:
    put_program(place, "scontrol", "echo PartitionName=main Default=YES")
    put_program(place, "sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    error = launch(packed, place / "log", "--name", "a job").exception
    assert isinstance(error, UserError)
    assert error.code == "launch.scheduler-failed"
    wording(str(error))


def refused_jobset(place: Path, packed: Path) -> UserError:
    """Return why a JobSet is not launched with the log folder of JOBSET, another run."""
    log = place / "log"
    log.mkdir()
    write_run_record(log, {"id": "the first"})
    put_job(place, JOBSET)
    (log / "metrics.jsonl").write_text("")
    flags = ("--image", "i", "--name", "tiny", "--mount", f"claim:{place}", "--mount", f"claim:{packed.parent}")
    asked = ["launch", str(packed), "--scheduler", "jobset", "--log-dir", str(log), *flags, "--", "--data", "synthetic"]
    error = CliRunner().invoke(cli, asked).exception
    assert isinstance(error, UserError)
    assert error.code == "launch.scheduler-failed"
    return error


def test_job_whose_name_an_ended_jobset_has_leaves_that_one_on_record(place: Path, packed: Path) -> None:
    """Source: kubectl 1.32, create of what exists; a JobSet stays until it is deleted, whatever its log folder is."""
    ended = json.dumps({"metadata": {"uid": "u"}, "status": {"conditions": [{"type": "Failed", "status": "True"}]}})
    problem = 'Error from server (AlreadyExists): error when creating "STDIN": jobsets "tiny" already exists'
    put_program(place, "kubectl", f"case $1 in create) echo '{problem}' >&2; exit 1;; get) echo '{ended}';; "
                                  f"delete) echo > {place}/deleted;; esac")  # fmt: skip
    error, log = refused_jobset(place, packed), place / "log"
    assert "runner cancel" in error.hint
    assert read_job_record(log) == JOBSET
    names = {path.name for path in log.iterdir()} - {".launch.lock"}
    assert names == {"run.json", "job.json", "metrics.jsonl"}
    assert CliRunner().invoke(cli, ["cancel", str(log)]).exception is None
    assert (place / "deleted").exists()


@pytest.mark.parametrize(
    "problem",
    [
        "unexpected EOF",
        "read tcp 10.0.0.1:5->10.0.0.2:6443: read: connection reset by peer",
        "http2: client connection lost",
        "Error from server: etcdserver: leader changed",
    ],
)
def test_jobset_that_may_run_although_its_answer_is_lost_has_the_log_folder(
    problem: str, place: Path, packed: Path
) -> None:
    """Source: what kubectl prints of Go's net/http and of etcd."""
    put_program(place, "kubectl", f"[ $1 != create ] || {{ echo '{problem}' >&2; exit 1; }}")
    assert "kubectl delete jobset tiny" in refused_jobset(place, packed).hint
    run = read_run_record(place / "log")
    assert run is not None
    assert run["id"] != "the first"
    assert not (place / "log" / "job.json").exists()
    assert not (place / "log" / "metrics.jsonl").exists()


def test_job_that_can_be_neither_recorded_nor_cancelled_is_named(place: Path, packed: Path) -> None:
    put_program(place, "scontrol", f"[ ! -e {place}/log/job.json ] || exit 1; echo PartitionName=main Default=YES")
    put_program(place, "sbatch", f"/bin/mkdir {place}/log/job.json; echo 8")
    error = launch(packed, place / "log").exception
    assert isinstance(error, UserError)
    assert "slurm job 8 is submitted, and not on record" in error.hint


def test_job_that_cannot_be_recorded_is_cancelled(place: Path, packed: Path) -> None:
    put_program(place, "scontrol", "echo JobId=8 JobState=PENDING PartitionName=main Default=YES")
    put_program(place, "sbatch", f"/bin/mkdir {place}/log/job.json; echo 8")
    put_program(place, "scancel", f'echo "$@" > {place}/cancelled')
    error = launch(packed, place / "log").exception
    assert isinstance(error, UserError)
    assert error.code == "output.unwritable"
    assert (place / "cancelled").read_text() == "8\n"
