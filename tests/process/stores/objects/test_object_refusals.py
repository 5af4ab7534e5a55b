"""Servers that refuse or never answer, and sources that change meanwhile: said in a sentence, and nothing is left."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence

import pytest

from manifests.errors import InputError
from reshard.copy.bucket import BucketTarget
from reshard.copy.engine import WriteOptions
from reshard.plans.pack_plan import lay_out_shard
from stores.base import InputFile, Range, Reader
from stores.bundles import TensorAt
from stores.objects.output import open_output
from stores.objects.store import open_objects
from tests.process.stores.objects.buckets import BUCKET, become, problem, refusal
from tests.servers.s3 import Fault, MotoServer


def test_server_that_takes_too_long_is_named_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        become(monkeypatch, {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{mute.getsockname()[1]}", "AWS_TIMEOUT": "100ms",
            "AWS_ALLOW_HTTP": "true", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1",
        })  # fmt: skip
        names = open_objects(f"s3://{BUCKET}/a").names
        assert refusal(names) == ("store.unreachable", f"s3://{BUCKET}/a")
        assert problem(names).endswith("AWS_TIMEOUT=5min")


def test_signature_for_another_region_says_which_is_right(moto: MotoServer) -> None:
    # As AWS has it.
    said = "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-1'"
    body = f"<Error><Code>AuthorizationHeaderMalformed</Code><Message>{said}</Message></Error>"
    moto.fail(Fault(method="GET", address=BUCKET, what="status", status=400, body=body))
    names = open_objects(f"s3://{BUCKET}/a").names
    assert refusal(names) == ("store.other-region", f"s3://{BUCKET}/a")
    moto.fail(Fault(method="GET", address=BUCKET, what="status", status=400, body=body))
    assert problem(names).endswith("AWS_REGION=eu-west-1")


class Steps(InputFile):
    """A file of one byte's value, which each opening gives one of `values` in turn; None: it cannot be read."""

    nbytes, fingerprint = 64, "none"

    def __init__(self, *values: int | None) -> None:
        self._values = itertools.cycle(values)

    def __str__(self) -> str:
        return "steps"

    def open(self, ranges: Sequence[Range]) -> Reader:
        return _Reader(next(self._values))


class _Reader:
    def __init__(self, value: int | None) -> None:
        self._value = value

    def read_into(self, part: memoryview, position: int) -> None:
        if self._value is None:
            raise InputError("steps", "cannot be read", code="store.refused")
        part[:] = bytes([self._value]) * len(part)

    def close(self) -> None:
        pass


def write_shards(name: str, files: Sequence[InputFile]) -> None:
    """Write a shard for each file, which holds it as a tensor."""
    shards = [
        lay_out_shard(f"stage-{number:03d}/model.safetensors", [TensorAt("a", "U8", (64,), file, 0, 64)])
        for number, file in enumerate(files)
    ]
    with open_output(f"s3://{BUCKET}/{name}") as objects:
        BucketTarget(objects).write_shards(shards, WriteOptions())


def test_source_that_changes_between_its_two_readings_is_refused(moto: MotoServer) -> None:
    code, where = refusal(lambda: write_shards("changing", [Steps(0, 1)]))
    assert (code, where) == ("shard.digest-mismatch", "steps: 'a'")
    assert moto.objects(BUCKET, "changing/") == {}
    assert moto.uploads(BUCKET, "changing/") == []


def test_one_shard_that_fails_ends_all(moto: MotoServer) -> None:
    files = [Steps(0), Steps(None), *(Steps(0) for _ in range(500))]
    assert refusal(lambda: write_shards("ended", files)) == ("store.refused", "steps")
    assert moto.objects(BUCKET, "ended/") == {}
    assert len(moto.requests("PUT", "ended/stage-")) < 500
