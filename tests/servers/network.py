"""Machines on one machine: network namespaces, each with an address and a host name of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONTROL = "ctl"  # a machine more, which all others reach
_PROGRAMS = ("ip", "nsenter", "unshare")
_numbers = itertools.count()  # two networks of one process do not share their names


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Machines named `nodes`, and the controller, who know each other by name."""

    folder: Path
    tag: str
    nodes: tuple[str, ...]

    def beside(self, *command: str | Path) -> list[str]:
        """Give a command as it is run in the controller's network."""
        return ["nsenter", f"--net=/run/netns/{self.tag}-{CONTROL}", *map(str, command)]

    def on(self, node: str, *command: str | Path) -> list[str]:
        """Give a command as it is run on a node, under its host name."""
        script = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        inside = ("unshare", "--uts", "--mount", "bash", "-ec", script, "_", str(self.folder / "hosts"), node)
        return ["nsenter", f"--net=/run/netns/{self.tag}-{node}", *inside, *map(str, command)]

    def pids(self, node: str) -> list[int]:
        """Give the processes in a node's network."""
        found = subprocess.run(["ip", "netns", "pids", f"{self.tag}-{node}"], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, node: str) -> None:
        """End all that runs on a node, as a loss of power would."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def missing_for_network() -> str | None:
    """Say what this machine lacks to hold others; None when it lacks nothing."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} missing: apt-get install iproute2 util-linux"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True)
    return None if probe.returncode == 0 else "this machine does not let root make network namespaces"


@contextmanager
def start_network(folder: Path, nodes: Sequence[str], aliases: Sequence[str] = ()) -> Iterator[Network]:
    """Hold the machines until the block ends, and whatever runs on them; `aliases` are more names of the first."""
    # Namespaces are the machine's: their names carry this process's number.
    network = Network(folder=folder, tag=f"rs{os.getpid()}n{next(_numbers)}", nodes=tuple(nodes))
    names = [" ".join((node, *aliases)) if number == 1 else node for number, node in enumerate(nodes, 1)]
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n10.77.0.254 ctl\n"
        + "".join(f"10.77.0.{number} {name}\n" for number, name in enumerate(names, 1))
    )
    try:
        _make(network)
        yield network
    finally:
        for name in (*nodes, CONTROL):
            network.kill(name)
            subprocess.run(["ip", "netns", "del", f"{network.tag}-{name}"], capture_output=True)


def call(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}"


def _make(network: Network) -> None:
    control = f"{network.tag}-{CONTROL}"
    call("ip", "netns", "add", control)
    for command in ("ip link set lo up", "ip link add br0 type bridge", "ip addr add 10.77.0.254/24 dev br0",
                    "ip link set br0 up"):  # fmt: skip
        call(*network.beside(*command.split()))
    for number, node in enumerate(network.nodes, 1):
        space, link = f"{network.tag}-{node}", f"v{number}"
        call("ip", "netns", "add", space)
        call("ip", "link", "add", link, "netns", control, "type", "veth", "peer", "name", "eth0", "netns", space)
        call(*network.beside("ip", "link", "set", link, "master", "br0", "up"))
        call("ip", "-n", space, "link", "set", "lo", "up")
        call("ip", "-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        call("ip", "-n", space, "link", "set", "eth0", "up")
