"""A real object store on loopback: Ceph's S3 gateway on one daemon of each kind, all in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.s3 import Account, S3Server

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "radosgw", "radosgw-admin")
_DISK_NBYTES = 4 << 30
_ALL = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
_CONF = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}/0]
ms bind ipv4 = true
public addr = 127.0.0.1
keyring = {folder}/keyring
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
mon data avail warn = 2
mon data avail crit = 1
run dir = {folder}
pid file = {folder}/$name.pid
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
osd max object name len = 460
osd max object namespace len = 64
memstore device bytes = {disk_nbytes}
rgw frontends = beast endpoint=127.0.0.1:{gateway_port}
rgw dns name = localhost
rgw enable usage log = false
rgw gc obj min wait = 1
"""


def missing_for_ceph() -> str | None:
    """Say what this machine lacks to run Ceph; None when it lacks nothing."""
    if os.geteuid() != 0:
        return "Ceph's daemons are started by root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} missing: apt-get install radosgw ceph-mon ceph-osd" if absent else None


@contextmanager
def start_ceph(folder: Path) -> Iterator[S3Server]:
    """Run Ceph until the block ends; everything it writes lies below `folder`."""
    (mon_port, gateway_port), fsid = _free_ports(2), str(uuid.uuid4())
    conf, endpoint = folder / "ceph.conf", f"http://127.0.0.1:{gateway_port}"
    (folder / "mon").mkdir()
    (folder / "osd").mkdir()
    conf.write_text(_CONF.format(
        folder=folder, fsid=fsid, mon_port=mon_port, gateway_port=gateway_port, disk_nbytes=_DISK_NBYTES
    ))  # fmt: skip
    try:
        _start_daemons(folder, mon_port, fsid)
        _wait_for(endpoint)
        owner = Account(access_key="owner", secret_key="owner-secret")
        stranger = Account(access_key="stranger", secret_key="stranger-secret")
        for account in (owner, stranger):
            keys = (f"--access-key={account.access_key}", f"--secret-key={account.secret_key}")
            name = account.access_key
            _run(folder, "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}", *keys)
        yield S3Server(endpoint=endpoint, owner=owner, stranger=stranger)
    finally:
        _stop_daemons(folder)


def _start_daemons(folder: Path, mon_port: int, fsid: str) -> None:
    keyring, monmap = folder / "keyring", folder / "monmap"
    _call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", monmap)
    _call("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    _call("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *_ALL)
    _run(folder, "ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
    _run(folder, "ceph-mon", "-i", "a")
    _run(folder, "ceph", "osd", "create")
    osd_caps = ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *")
    _call("ceph-authtool", keyring, "--gen-key", "-n", "osd.0", *osd_caps)
    _run(folder, "ceph", "auth", "import", "-i", keyring)
    (folder / "osd" / "type").write_text("memstore\n")
    _run(
        folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()), check=False
    )  # it fails after its work is done
    _run(folder, "ceph-osd", "-i", "0")
    _run(folder, "ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=h")
    _run(folder, "radosgw", "-n", "client.admin")


def _stop_daemons(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(folder: Path, program: str, *args: str | Path, check: bool = True) -> None:
    _call(program, "-c", folder / "ceph.conf", *args, check=check)


def _call(*command: str | Path, check: bool = True) -> None:
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert ended.returncode == 0 or not check, f"{command}: {ended.stdout}"


def _wait_for(endpoint: str, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            urllib.request.urlopen(endpoint).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
