"""A JobSet's life as `runner` sees it through kubectl: submitted, followed, looked at and cancelled."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.local_jobs import forked_runner
from tests.servers.kubernetes import Kubernetes, missing_for_kubectl, start_kubernetes

MISSING = missing_for_kubectl()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

PODS = {f"tiny-node-0-{number}": f"step 1 on {number}\nstep 2 on {number}\n" for number in range(7)}
PHASES = ["", "Pending", "Running"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubernetes]:
    """Give a cluster on which a job's pods are made, then scheduled, then print something."""
    with start_kubernetes(tmp_path, dict(PODS), list(PHASES)) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.config))
        monkeypatch.setenv("HOME", str(tmp_path))
        yield cluster


def launch(packed: Path, log: Path, *flags: str, name: str = "tiny") -> tuple[int, str, str]:
    place = packed.parent.parent
    asked = ("--scheduler", "jobset", "--image", "i", "--name", name, "--mount", f"claim:{place}", "--log-dir", log)
    done = forked_runner("launch", packed, *asked, *flags, "--", "--data", "synthetic")
    return done.returncode, done.stdout, done.stderr


def test_job_of_many_pods_is_followed_until_it_ends(cluster: Kubernetes, packed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code, said, problems = launch(packed, log, "--follow")
    assert code == 0, problems
    submitted, pending, *lines = said.splitlines()
    assert submitted == f"submitted tiny as jobset job tiny; runner status {log}"
    assert pending == "7 of 7 pods are pending"
    expected = [f"[pod/{pod}/runner] {line}" for pod, text in PODS.items() for line in text.splitlines()]
    assert sorted(lines) == sorted(expected)
    assert all(query["follow"] == ["true"] for query in cluster.queries.values() if "sinceTime" not in query)
    assert json.loads(forked_runner("status", log, "--json").stdout) == {
        "version": 1, "scheduler": "jobset", "id": "tiny", "name": "tiny", "state": "Completed", "reason": "",
        "nodes": "", "requeues": 0, "error": None, "error_code": None, "silent_ranks": [],
        "last_step": None, "num_steps": 10, "last_loss": None, "last_checkpoint": None,
            "exit_code": 0, "last_heartbeat_s": None, "layout": None,
    }  # fmt: skip
    use = ("kubectl", "config", "use-context", "empty")
    subprocess.run(use, check=True, capture_output=True)  # the job is still known where it is
    assert sorted(forked_runner("logs", log).stdout.splitlines()) == sorted(expected)
    assert forked_runner("cancel", log).returncode == 0
    assert cluster.jobsets == {}
    for phase, state, ended in (("Running", "Terminating", None), ("", "Forgotten", 5)):  # a pod has time to save
        cluster.phases = [phase]
        status = json.loads(forked_runner("status", log, "--json").stdout)
        assert (status["state"], status["exit_code"]) == (state, ended)


def test_log_folder_of_a_job_that_runs_is_not_given_to_another(
    cluster: Kubernetes, packed: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert launch(packed, log)[0] == 0
    (log / "state.json").write_text(json.dumps({"version": 1, "step": 3, "ended": "stopped"}))
    code, _, said = launch(packed, log, name="other")
    assert code == 2
    assert said.startswith(f"node 0: ranks 0-1, stages 0, 1\nerror: --log-dir {log}: ")
    assert "jobset job tiny" in said
    assert (list(cluster.jobsets), json.loads((log / "job.json").read_text())["id"]) == (["tiny"], "tiny")
    assert (log / "state.json").exists()
    assert forked_runner("cancel", log).returncode == 0
    cluster.phases = ["Running"]  # a pod has time to save
    assert "7 pods of jobset job tiny" in launch(packed, log, name="other")[2]
    cluster.phases = [""]
    assert launch(packed, log, name="other")[0] == 0
    assert json.loads((log / "job.json").read_text())["id"] == "other"
    assert not (log / "state.json").exists()


def test_job_that_failed_has_the_exit_code_of_its_ranks(cluster: Kubernetes, packed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert launch(packed, log)[0] == 0
    cluster.jobsets["tiny"]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    for state, code in ((None, 5), ({"ended": "failed", "code": 3}, 3), ({"ended": "done"}, 5)):
        if state is not None:
            (log / "state.json").write_text(json.dumps({"version": 1, "step": 0, **state}))
        assert json.loads(forked_runner("status", log, "--json").stdout)["exit_code"] == code


def test_status_of_a_job_that_waits_for_pods_of_a_node_that_died_counts_them(
    cluster: Kubernetes, packed: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert launch(packed, log)[0] == 0
    cluster.phases, cluster.terminating = ["Running"], ("tiny-node-0-3",)
    said = forked_runner("status", log).stdout.splitlines()[0]
    assert said == "tiny: jobset job tiny is Running (pods terminating: 1)"
    cluster.terminating = ()
    assert json.loads(forked_runner("status", log, "--json").stdout)["reason"] == ""


def test_job_that_was_deleted_is_not_the_next_one_of_its_name(
    cluster: Kubernetes, packed: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "first", tmp_path / "second"
    assert launch(packed, logs[0])[0] == 0
    cluster.jobsets.clear()
    assert launch(packed, logs[1])[0] == 0
    cluster.phases = ["Running"]
    done = forked_runner("logs", logs[0])
    assert (done.returncode, done.stdout) == (3, ""), "the output of the second one"
    assert "launch.scheduler-failed" in done.stderr
    assert forked_runner("logs", logs[1]).returncode == 0
    cluster.jobsets["tiny"]["status"] = {}
    states = [json.loads(forked_runner("status", log, "--json").stdout)["state"] for log in logs]
    assert states == ["Forgotten", "Running"]
    assert forked_runner("cancel", logs[0]).stdout == f"{logs[0]}: jobset job tiny (tiny) has ended already\n"
    assert "tiny" in cluster.jobsets
    assert launch(packed, logs[0], name="other")[0] == 0, "the folder is free"
    del cluster.jobsets["other"]
    assert forked_runner("cancel", logs[1]).stdout == f"{logs[1]}: cancelled jobset job tiny (tiny)\n"
    assert cluster.jobsets == {}


def test_logs_without_kubectl_or_without_pods_are_a_sentence(cluster: Kubernetes, packed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert launch(packed, log)[0] == 0
    done = forked_runner("logs", log)
    problem = "kubectl logs: No resources found in team namespace."
    assert (done.returncode, done.stderr) == (3, f"error: {problem} [launch.scheduler-failed]\n")
    done = forked_runner("logs", log, PATH=str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.startswith("error: kubectl: ")


def test_values_like_numbers_reach_pods_as_texts(cluster: Kubernetes, packed: Path, tmp_path: Path) -> None:
    values = ["1e-3", "08", "0o17", "-2E5", "1.5e3", "y", "N", "3"]
    flags = [word for number, value in enumerate(values) for word in ("--env", f"V{number}={value}")]
    code, _, problems = launch(packed, tmp_path / "log", *flags)
    assert code == 0, problems
    (nodes,) = cluster.jobsets["tiny"]["spec"]["replicatedJobs"]
    (container,) = nodes["template"]["spec"]["template"]["spec"]["containers"]
    assert [variable.get("value") for variable in container["env"][-len(values) :]] == values
