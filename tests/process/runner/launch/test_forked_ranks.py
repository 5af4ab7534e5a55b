"""Ranks that the agent forks, beside those that torchrun starts: what each finds, and how it ends."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.process.forked import Forked

ROOT = Path(__file__).parents[4]
WORKER = """
import json, os, signal, sys, threading

def main():
    print(json.dumps({
        "argv": sys.argv[1:],
        "environment": {name: os.environ.get(name) for name in ("RANK", "OMP_NUM_THREADS", "OF_AGENT", "OF_SITE")},
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakeup": signal.set_wakeup_fd(-1),
        "files": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],  # the last is the listing's own
        "leads": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "threads": threading.active_count(),
        "streams": [sys.stdout is sys.__stdout__, sys.stdout.fileno(), sys.stderr.fileno(), sys.stdout.encoding],
        "folder": os.getcwd(),
    }))
    print(b"worker" in open("/proc/self/cmdline", "rb").read(), file=sys.stderr)
    if sys.argv[1] == "exits":
        sys.exit(7)
    if sys.argv[1] == "fails":
        raise ValueError
    if sys.argv[1] == "is killed":
        os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    main()
"""
DRIVER = """
import json, os, signal, sys, tempfile, threading, time
from runner.launch.agent.forked import fork_ranks, import_worker, set_log_level

folder, before = sys.argv[1], dict(os.environ)
module = import_worker("worker", ())
assert module is not None and import_worker("no_such_worker", ()) is None
assert dict(os.environ) == before
set_log_level(3)
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: print("the agent's handler"))
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
opened = tempfile.TemporaryFile()

def run(what):
    out, errors = os.path.join(folder, "out"), os.path.join(folder, "errors")
    handler = SubprocessHandler(sys.executable, ("-u", "-m", "worker", what), {"RANK": "3"}, out, errors, 0, None)
    code = handler.proc.wait(60)
    assert handler.proc.poll() == code
    return [json.loads(open(out).read()), code, open(errors).read().split("\\n")[0]]

ways = ("ends", "exits", "fails", "is killed")
ran = {"started": [run(what) for what in ways]}
fork_ranks(module)
ran["forked"] = [run(what) for what in ways]
torch.cuda._is_in_bad_fork = lambda: True
ran["after CUDA"] = [run("exits")]
print(json.dumps(ran))
"""
LIVES = """
import atexit, json, os, random, signal, sys, threading, time
import numpy

def main():
    if sys.argv[1] == "sleeps":
        time.sleep(60)
    if sys.argv[1] == "exits":
        sys.exit(7)
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    print(json.dumps([numpy.random.random(), random.random(), sys.stderr.errors, sys.stdout.errors]), flush=True)
    sys.exit("why it ended")
"""
STARTER = """
import contextlib, json, os, signal, sys, tempfile, threading, time
from runner.launch.agent.forked import ForkedRank, fork_ranks, import_worker

folder, facts = sys.argv[1], {}
cleaned = tempfile.TemporaryDirectory()
fork_ranks(import_worker("lives", ()))
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

fork, setsid, waitpid = os.fork, os.setsid, os.waitpid

def start(what, name="0"):
    paths = [os.path.join(folder, f"{stream}-{name}") for stream in ("out", "errors")]
    return SubprocessHandler(sys.executable, ("-u", "-m", "lives", what), {}, *paths, 0, None)

def raised(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__

def start_two():
    command = ("-u", "-m", "lives", "sleeps")
    two = ({0: command, 1: command}, {0: {}, 1: {}})
    start_processes("two", sys.executable, *two, DefaultLogsSpecs(tempfile.mkdtemp(dir=folder)))

def has_children():
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False

# A rank is ended as soon as it was started, and is slow to lead a session.
os.setsid = lambda: (time.sleep(1), setsid())
slow = start("sleeps")
facts["close"] = [raised(lambda: slow.close(signal.SIGTERM)), slow.proc.wait(60)]
os.setsid = setsid

# A signal, received by another thread, arrives when the first rank was just forked.
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
other = threading.Thread(target=time.sleep, args=(600,), daemon=True)
other.start()

def fork_at_signal():
    pid = fork()
    if pid:
        os.fork = fork
        signal.pthread_kill(other.ident, signal.SIGTERM)
        os.read(reader, 1)
        time.sleep(0.01)
    return pid

os.fork = fork_at_signal
facts["signal"] = [raised(start_two), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), has_children()]

# The second rank cannot be forked.
def fork_once():
    os.fork = refuse
    return fork()

def refuse():
    raise BlockingIOError

os.fork = fork_once
facts["refused"] = [raised(start_two), has_children()]
os.fork = fork
signal.set_wakeup_fd(-1)

# A signal's handler raises when the rank has just been reaped; another has been reaped by someone else.
def reap_and_raise(*which):
    waitpid(*which)
    raise ValueError

ended = start("exits").proc
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
os.waitpid = reap_and_raise
facts["poll"] = [raised(ended.poll), raised(ended.poll), ended.returncode]
os.waitpid = waitpid
lost = start("exits").proc
waitpid(lost.pid, 0)
facts["lost"] = [raised(lost.poll), lost.returncode]

codes = [start("ends", name).proc.wait() for name in "ab"]
facts["ends"] = [[code, *(open(os.path.join(folder, f"{stream}-{name}")).read() for stream in ("out", "errors"))]
                 for name, code in zip("ab", codes)]
facts["cleaned"] = os.path.exists(cleaned.name)
print(json.dumps(facts))
"""
# Imported by the agent, of which the system then takes no other process.
REFUSED = """
import errno, os

def refuse():
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = refuse

def main():
    pass
"""


def test_ranks_that_the_system_refuses_to_start_are_a_sentence_and_may_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "refused.py").write_text(REFUSED)
    words = ("--standalone", "--nproc-per-node", "2", "-m", "refused")
    environment, errors = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, tmp_path / "errors"
    agent = Forked(words, environment, tmp_path / "output", errors, "runner.launch.agent.agent")
    try:
        code = agent.wait(100)
    finally:
        agent.kill()
    error, hint = errors.read_text().splitlines()
    assert code == 5
    assert re.fullmatch(rf"error: node 0, {re.escape(socket.gethostname())}: .+ \[system\.refused\]", error), error
    assert "ulimit" in hint


def test_ranks_whose_start_or_wait_is_interrupted_are_ended_and_each_ends_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "lives.py").write_text(LIVES)
    (tmp_path / "starter.py").write_text(STARTER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "starter.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=150, check=True,
    )  # fmt: skip
    facts = json.loads(done.stdout)
    assert facts["close"] == [None, -15]
    assert facts["signal"] == ["SignalException", [], False]
    assert facts["refused"] == ["BlockingIOError", False]
    assert facts["poll"] == ["ValueError", None, 7]
    assert facts["lost"] == [None, 1]
    assert facts["cleaned"]
    lines = [out.splitlines() for _, out, _ in facts["ends"]]
    assert [(code, errors, *rest) for (code, _, errors), (_, *rest) in zip(facts["ends"], lines, strict=True)] == [
        (1, "why it ended\n", "thread", "at exit")
    ] * 2
    numpys, randoms, errors, _ = zip(*(json.loads(first) for first, *_ in lines), strict=True)
    assert len({*numpys, *randoms}) == 4
    assert errors == ("backslashreplace", "backslashreplace")


def test_forked_rank_finds_and_ends_as_a_started_one_and_python_is_started_where_cuda_was(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    site = "import os; os.environ['OF_SITE'] = 'of rank ' + os.environ.get('RANK', '')"
    (tmp_path / "sitecustomize.py").write_text(site)
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OF_AGENT": "x", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=150, check=True,
    )  # fmt: skip
    ran = json.loads(done.stdout)
    started, forked = ran["started"], ran["forked"]
    assert [code for _, code, _ in started] == [0, 7, 1, -15]
    assert [(facts, code) for facts, code, _ in forked] == [(facts, code) for facts, code, _ in started]
    is_worker = [[line for _, _, line in ran[way]] for way in ("started", "forked", "after CUDA")]
    assert is_worker == [["True"] * 4, ["False"] * 4, ["True"]]
    assert ran["after CUDA"][0][:2] == started[1][:2]
