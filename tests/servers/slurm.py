"""A real Slurm on one machine: each node has a network namespace, an address and a host name of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.network import CONTROL, Network, call, missing_for_network, start_network

REQUEUE_S = 15  # for so long a job that is queued again waits; by default 120
SAFE_REQUEUE_S = 75  # above the 60 s after which Slurm repeats a signal to a node that did not answer
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_CONF = """\
ClusterName={tag}
SlurmctldHost=ctl(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire={requeue_s}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=15
SlurmctldTimeout=10
SlurmdTimeout=10
MinJobAge=300
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm:
    """A running cluster on the nodes of a network."""

    folder: Path
    network: Network

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str | Path, timeout_s: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command beside the controller."""
        beside = self.network.beside(*command)
        done = subprocess.run(beside, env=self.environment, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done

    def start_node(self, node: str) -> None:
        call(*self.network.on(node, "slurmd", "-N", node, "-c"), environment=self.environment)


def missing_for_slurm() -> str | None:
    """Say what this machine lacks to run Slurm; None when it lacks nothing."""
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} missing: apt-get install --no-install-recommends slurm-wlm munge"
    return missing_for_network()


@contextmanager
def start_slurm(
    folder: Path, nodes: Sequence[str] = ("n1", "n2"), cpus: int = 4, requeue_s: int = REQUEUE_S
) -> Iterator[Slurm]:
    """Run a cluster until the block ends; everything it writes lies below `folder`."""
    for name in ("state", "log", "run", *(f"spool.{node}" for node in nodes)):
        (folder / name).mkdir()
    (folder / "munge").mkdir(mode=0o700)
    folder.chmod(0o755)
    with start_network(folder, nodes) as network:
        slurm = Slurm(folder=folder, network=network)
        (folder / "slurm.conf").write_text(
            _CONF.format(tag=network.tag, folder=folder, requeue_s=requeue_s)
            + "".join(
                f"NodeName={node} NodeAddr=10.77.0.{number} CPUs={cpus} RealMemory=4000 State=UNKNOWN\n"
                for number, node in enumerate(nodes, 1)
            )
        )
        try:
            _start_munge(folder)
            call(*network.on(CONTROL, "slurmctld", "-c"), environment=slurm.environment)
            for node in nodes:
                slurm.start_node(node)
            _wait_for_nodes(slurm)
            yield slurm
        finally:
            _stop_munge(folder)


def _start_munge(folder: Path) -> None:
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    call(
        "munged", "--force", f"--socket={folder}/run/munge.sock", f"--key-file={key}",
        f"--pid-file={folder}/run/munged.pid", f"--log-file={folder}/munge/munged.log",
        f"--seed-file={folder}/munge/seed",
    )  # fmt: skip


def _stop_munge(folder: Path) -> None:
    path = folder / "run" / "munged.pid"
    if path.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _wait_for_nodes(slurm: Slurm, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        states = slurm.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).stdout.split()
        if states == ["idle"] * len(slurm.network.nodes):
            return
        assert time.monotonic() < deadline, f"nodes are {states}"
        time.sleep(0.1)
