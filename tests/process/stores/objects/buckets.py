"""What tests of buckets share: servers by name, an environment to reach them with, and a worker whose memory counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from tests.servers.s3 import MotoServer

BUCKET = "checkpoints"  # that the servers of `conftest.py` have
MIB = 1 << 20
ROOT = Path(__file__).parents[4]


def become(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Put on an environment, and nothing else of this machine's AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    nowhere = {
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere/credentials",
        "AWS_CONFIG_FILE": "/nowhere/config",
        "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
    }
    for name, value in (nowhere | environment).items():
        monkeypatch.setenv(name, value)


def url_of(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


def objects_in(moto: MotoServer, name: str) -> dict[str, bytes]:
    """Return the objects of a prefix, named as below it."""
    return {key.removeprefix(f"{name}/"): data for key, data in moto.objects(BUCKET, f"{name}/").items()}


def problem(call: Any) -> str:
    """Return the whole message with which a call is refused."""
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def refusal(call: Any) -> tuple[str, str]:
    """Return code and place of the error with which a call is refused."""
    with pytest.raises(InputError) as caught:
        call()
    return caught.value.code, caught.value.where


def start_worker(*args: str | int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.process.stores.objects.bucket_worker", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def measured(*args: str | int) -> tuple[int, str]:
    """Run the worker; give its peak of anonymous memory in bytes, and the SHA-256 of the bytes that it moved."""
    worker = start_worker(*args)
    out, _ = worker.communicate(timeout=100)
    assert worker.returncode == 0
    found = json.loads(out.splitlines()[-1])
    return found["peak_nbytes"], found["sha256"]
