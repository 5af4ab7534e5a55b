"""Ranks that the agent forks, beside those that torchrun starts: what each finds, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
