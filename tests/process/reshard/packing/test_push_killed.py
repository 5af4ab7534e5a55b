"""A push that is killed leaves nothing in the repository, and the next one sends what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.builders import files_in, llama_config, pack, write_model
from tests.servers.hub import MEMBER, Hub, serve_hub


def num_sent(hub: Hub) -> int:
    with hub.lock:
        return sum(request.method == "PUT" and request.status == 200 for request in hub.requests)


def test_push_that_is_killed_leaves_nothing_and_is_resumed(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(num_hidden_layers=4))
    out = tmp_path / "out"
    pack(tmp_path / "source", out, "pp=4")
    with serve_hub() as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": MEMBER}
        env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "reshard", "push", str(out), "org/tiny", "--json"]
        hub.fail("^/lfs/", method="PUT", after=2, times=99, delay_s=60)
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 60
            while num_sent(hub) < 2 and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.kill()
            said = b"".join(process.communicate())
        assert MEMBER.encode() not in said
        assert list(hub.files("org/tiny")) == [".gitattributes"]
        assert num_sent(hub) == 2
        hub.faults.clear()
        hub.take_requests()
        ended = subprocess.run(command, env=env, capture_output=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        num_shards = sum(name.endswith(".safetensors") for name in files_in(out))
        assert num_sent(hub) == num_shards - 2
        assert len(hub.messages) == 1
        assert files_in(out).items() <= hub.files("org/tiny").items()
