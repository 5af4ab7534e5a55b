"""Folders in a bucket, read by ranges from a real S3 server: exactly what was asked, or a refusal that says why."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import UnreachableError
from stores.base import SOURCE_CHANGED, InputFile, Range, read_file_header, read_whole
from stores.net.retries import Retries
from stores.objects.store import open_objects
from stores.open import open_store
from tests.builders import Tensor, write_safetensors
from tests.process.stores.objects.buckets import BUCKET, MIB, become, measured, problem, refusal
from tests.servers.s3 import PAGE_KEYS, Fault, MotoServer


def put(moto: MotoServer, key: str, data: bytes) -> bytes:
    moto.client().put_object(Bucket=BUCKET, Key=key, Body=data)
    return data


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def read(file: InputFile, *ranges: Range) -> list[bytes]:
    """Read ranges as the engine does: in order, a block of 1 MiB at a time."""
    with contextlib.closing(file.open(ranges)) as reader:
        return [b"".join(_blocks(reader.read_into, begin, end)) for begin, end in ranges]


def _blocks(read_into: Callable[[memoryview, int], None], begin: int, end: int) -> Iterator[bytes]:
    block = memoryview(bytearray(MIB))
    for position in range(begin, end, MIB):
        part = block[: min(MIB, end - position)]
        read_into(part, position)
        yield bytes(part)


def test_names_are_those_below_the_prefix_and_no_others(moto: MotoServer) -> None:
    for key in ("named/config.json", "named/b c/ü%41+&?#.json", "named/.cache/x", "named/.git/y", "named2/z", "namedz"):
        put(moto, key, b"{}")
    put(moto, "named/", b"")  # as consoles and file browsers mark a folder
    put(moto, "named/b c/", b"")
    folder = open_store(f"s3://{BUCKET}/named/")
    assert folder.names() == ("b c/ü%41+&?#.json", "config.json")
    assert (folder.kind, folder.location, folder.revision) == ("huggingface", f"s3://{BUCKET}/named", None)
    assert [read_whole(folder.file(name)) for name in folder.names()] == [b"{}", b"{}"]
    assert open_objects(f"s3://{BUCKET}/nothing").names() == ()


def test_names_come_from_as_many_pages_as_there_are(moto: MotoServer) -> None:
    names = [f"{number:04}" for number in range(PAGE_KEYS + 1)]
    for name in names:
        put(moto, f"pages/{name}", b"")
    assert list(open_objects(f"s3://{BUCKET}/pages").names()) == names
    assert sum("prefix=pages" in request.query for request in moto.requests("GET", BUCKET)) == 2


@pytest.mark.parametrize("key", ["hostile-1/../x", "hostile-2/a//b"])
def test_object_whose_name_is_no_path_below_its_folder_is_refused(moto: MotoServer, key: str) -> None:
    put(moto, key, b"")
    folder = f"s3://{BUCKET}/{key.partition('/')[0]}"
    assert refusal(open_objects(folder).names) == ("store.invalid-name", folder)


def test_object_with_a_name_that_no_system_takes_is_refused(moto: MotoServer) -> None:
    put(moto, "hostile-3/back\\slash", b"")
    assert refusal(open_objects(f"s3://{BUCKET}/hostile-3").names) == ("store.invalid-name", f"s3://{BUCKET}/hostile-3")
    assert r"'back\\slash'" in problem(open_objects(f"s3://{BUCKET}/hostile-3").names)


def test_bytes_sent_are_the_bytes_asked_for(moto: MotoServer) -> None:
    put(moto, "counted/file", noise(24 * MIB))
    file = open_objects(f"s3://{BUCKET}/counted").file("file")
    ranges = [(MIB, MIB + 10), (4 * MIB, 5 * MIB), (8 * MIB, 24 * MIB)]
    read(file, *ranges)
    sent = moto.requests("GET", "counted/file")
    assert sum(request.sent_nbytes for request in sent) == sum(end - begin for begin, end in ranges)
    assert sorted(request.range for request in sent) == ["bytes=1048576-1048585", "bytes=4194304-5242879",
                                                         "bytes=8388608-25165823"]  # fmt: skip
    assert {request.status for request in sent} == {206}


def test_file_that_is_named_is_read_without_a_listing(moto: MotoServer) -> None:
    put(moto, "unlisted/manifest.json", b"{}")
    assert read_whole(open_objects(f"s3://{BUCKET}/unlisted").file("manifest.json")) == b"{}"
    assert [len(moto.requests(method, "unlisted/manifest.json")) for method in ("HEAD", "GET")] == [1, 1]
    assert not [request for request in moto.requests("GET", BUCKET) if "prefix=unlisted" in request.query]


def test_header_of_a_shard_is_read_without_its_data(moto: MotoServer, tmp_path: Path) -> None:
    tensor = Tensor(dtype="BF16", shape=(1024, 1024), data=noise(2 * MIB))
    write_safetensors(tmp_path / "model.safetensors", {"weight": tensor})
    data = put(moto, "header/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    header = read_file_header(open_objects(f"s3://{BUCKET}/header").file("model.safetensors"))
    assert [entry.name for entry in header.tensors] == ["weight"]
    sent = sum(request.sent_nbytes for request in moto.requests("GET", "header/model.safetensors"))
    assert header.nbytes <= sent == 128 << 10 < len(data)


def test_changed_object_is_refused(moto: MotoServer) -> None:
    put(moto, "changed/file", noise(2 * MIB))
    folder = open_objects(f"s3://{BUCKET}/changed")
    folder.names()
    file, pin = folder.file("file"), folder.file("file").fingerprint
    put(moto, "changed/file", noise(2 * MIB, seed=1))
    changed = (SOURCE_CHANGED, f"s3://{BUCKET}/changed/file")
    assert refusal(lambda: read(file, (0, MIB))) == changed
    assert refusal(lambda: read(folder.file("file"), (0, MIB))) == changed  # pinned by its folder
    assert open_objects(f"s3://{BUCKET}/changed").file("file").fingerprint != pin


def test_changed_object_is_refused_by_its_etag_where_the_server_ignores_conditions(moto: MotoServer) -> None:
    put(moto, "unconditional/file", noise(2 * MIB))
    file = open_objects(f"s3://{BUCKET}/unconditional").file("file")
    put(moto, "unconditional/file", noise(2 * MIB, seed=1))
    moto.fail(Fault(method="GET", address="unconditional/file", what="ignore if-match", times=9))
    assert refusal(lambda: read(file, (0, MIB))) == (SOURCE_CHANGED, f"s3://{BUCKET}/unconditional/file")
    assert [request.status for request in moto.requests("GET", "unconditional/file")] == [206]


def test_object_changed_while_it_is_read_is_refused(moto: MotoServer) -> None:
    data = put(moto, "midway/file", noise(90 * MIB))
    file, part = open_objects(f"s3://{BUCKET}/midway").file("file"), bytearray(MIB)
    with contextlib.closing(file.open([(0, len(data))])) as reader:
        reader.read_into(memoryview(part), 0)
        assert part == data[:MIB]
        put(moto, "midway/file", noise(90 * MIB, seed=1))
        changed = (SOURCE_CHANGED, f"s3://{BUCKET}/midway/file")
        assert refusal(lambda: reader.read_into(memoryview(part), 89 * MIB)) == changed


def test_object_that_is_gone_or_shorter_is_refused(moto: MotoServer) -> None:
    put(moto, "gone/file", b"12345")
    file = open_objects(f"s3://{BUCKET}/gone").file("file")
    assert refusal(lambda: read(file, (3, 9))) == (SOURCE_CHANGED, f"s3://{BUCKET}/gone/file")
    moto.client().delete_object(Bucket=BUCKET, Key="gone/file")
    gone = ("store.no-such-file", f"s3://{BUCKET}/gone/file")
    assert refusal(lambda: read(file, (0, 5))) == gone
    assert refusal(lambda: open_objects(f"s3://{BUCKET}/gone").file("file")) == gone


def test_strangers_are_refused(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    put(moto, "secret/file", b"12345")
    mistyped = {"AWS_SECRET_ACCESS_KEY": "mistyped"}
    unknown = {"AWS_ACCESS_KEY_ID": "UNKNOWNUNKNOWNUNKNOW"}
    for environment, code in [
        (moto.environment(moto.stranger), "AccessDenied"),
        (moto.environment() | mistyped, "SignatureDoesNotMatch"),
        (moto.environment() | unknown, "InvalidAccessKeyId"),
    ]:
        become(monkeypatch, environment)
        folder = open_objects(f"s3://{BUCKET}/secret")
        assert refusal(folder.names) == ("store.denied", f"s3://{BUCKET}/secret")
        assert f"({code})" in problem(folder.names)
        # The answer to a HEAD has no body that could say more.
        assert refusal(lambda folder=folder: folder.file("file")) == ("store.denied", f"s3://{BUCKET}/secret/file")


def test_missing_credentials_are_asked_for(moto: MotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {"AWS_ENDPOINT_URL": moto.endpoint, "AWS_ALLOW_HTTP": "true"}
    become(monkeypatch, environment)
    names = open_objects(f"s3://{BUCKET}/secret").names
    assert refusal(names) == ("store.no-credentials", f"s3://{BUCKET}/secret")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SKIP_SIGNATURE=true"):
        assert variable in problem(names)


def test_profile_of_the_aws_command_is_used(moto: MotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(moto, "profile/file", b"12345")
    profile = tmp_path / "credentials"
    profile.write_text(
        f"[team]\naws_access_key_id = {moto.owner.access_key}\naws_secret_access_key = {moto.owner.secret_key}\n"
    )
    environment = {"AWS_ENDPOINT_URL": moto.endpoint, "AWS_ALLOW_HTTP": "true"}
    environment |= {"AWS_SHARED_CREDENTIALS_FILE": str(profile), "AWS_PROFILE": "team"}
    become(monkeypatch, environment)
    assert open_objects(f"s3://{BUCKET}/profile").names() == ("file",)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert refusal(lambda: open_objects(f"s3://{BUCKET}/profile")) == (
        "store.invalid-profile",
        f"s3://{BUCKET}/profile",
    )


def test_endpoint_that_does_not_answer_is_named_soon(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert refusal(open_objects(f"s3://{BUCKET}/a").names) == ("store.unreachable", f"s3://{BUCKET}/a")
    assert "http://127.0.0.1:1" in problem(open_objects(f"s3://{BUCKET}/a").names)
    with pytest.raises(UnreachableError):  # another attempt may find it
        open_objects(f"s3://{BUCKET}/a").names()


def test_endpoint_without_encryption_needs_consent(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    assert refusal(open_objects(f"s3://{BUCKET}/a").names) == ("store.not-https", f"s3://{BUCKET}/a")
    assert "AWS_ALLOW_HTTP=true" in problem(open_objects(f"s3://{BUCKET}/a").names)


@pytest.mark.parametrize(
    ("url", "environment", "hint"),
    [
        ("gs://b/a", {"GOOGLE_BASE_URL": "http://127.0.0.1:1", "GOOGLE_SKIP_SIGNATURE": "true"}, "GOOGLE_BASE_URL"),
        (
            "az://b/a",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": "a",
                "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1",
                "AZURE_SKIP_SIGNATURE": "true",
                "AZURE_ALLOW_HTTP": "true",
            },
            "AZURE_STORAGE_ENDPOINT",
        ),
    ],
)
def test_other_clouds_are_reached_by_their_own_settings(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str], hint: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert refusal(open_objects(url).names) == ("store.unreachable", url)
    assert problem(open_objects(url).names).endswith(hint)


def test_bucket_in_another_region_is_said_to_be(moto: MotoServer) -> None:
    moto.fail(Fault(method="GET", address=BUCKET, what="redirect"))
    assert refusal(open_objects(f"s3://{BUCKET}/a").names) == ("store.other-region", f"s3://{BUCKET}/a")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://", ("store.malformed-address", "s3://")),
        ("s3://b/a/../c", ("store.malformed-address", "s3://b/a/../c")),
        ("s3://key:secret@b/a", ("store.credentials-in-address", "s3://…")),
        ("sftp://me:secret@host/a", ("store.unsupported-scheme", "sftp://…")),
    ],
)
def test_malformed_address_is_refused(url: str, expected: tuple[str, str]) -> None:
    assert refusal(lambda: open_objects(url)) == expected
    assert "secret" not in problem(lambda: open_objects(url))


def test_missing_client_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)  # as when it is not installed
    assert refusal(lambda: open_objects("s3://b/a")) == ("store.missing-package", "s3://b/a")


def test_busy_server_is_asked_again(moto: MotoServer) -> None:
    data = put(moto, "busy/file", noise(MIB))
    folder = open_objects(f"s3://{BUCKET}/busy")
    moto.fail(
        Fault(method="GET", address="prefix=busy", what="status", status=503),
        Fault(method="GET", address="busy/file", what="status", status=500, times=2),
    )
    assert folder.names() == ("file",)
    assert read(folder.file("file"), (0, MIB)) == [data]
    assert [request.status for request in moto.requests("GET", "busy/file")] == [500, 500, 206]


def test_answer_that_is_cut_is_completed(moto: MotoServer) -> None:
    data = put(moto, "cut/file", noise(8 * MIB))
    file = open_objects(f"s3://{BUCKET}/cut").file("file")
    moto.fail(Fault(method="GET", address="cut/file", what="cut"))
    assert read(file, (0, 8 * MIB)) == [data]
    assert [request.range for request in moto.requests("GET", "cut/file")] == [
        "bytes=0-8388607",
        "bytes=4194304-8388607",  # the other half
    ]


@pytest.mark.parametrize(
    ("what", "code"),
    [("short", "store.wrong-answer"), ("ignore range", "store.wrong-answer"), ("cut", "store.unreachable")],
)
def test_answer_that_is_never_whole_is_refused(moto: MotoServer, what: Any, code: str) -> None:
    put(moto, "never/file", noise(4 * MIB))
    file = open_objects(f"s3://{BUCKET}/never", Retries(num_attempts=2, first_wait_s=0.01)).file("file")
    moto.fail(Fault(method="GET", address="never/file", what=what, times=99))
    assert refusal(lambda: read(file, (MIB, 3 * MIB))) == (code, f"s3://{BUCKET}/never/file")


def test_read_memory_does_not_grow_with_the_object(moto: MotoServer) -> None:
    nbytes = 128 * MIB
    data = noise(MIB) * (nbytes // MIB)
    put(moto, "long/file", data)
    peak_nbytes, digest = measured("read", f"s3://{BUCKET}/long", "file")
    assert digest == hashlib.sha256(data).hexdigest()
    assert peak_nbytes < 110 * MIB  # four answers of 16 MiB, what is on its way to them, and Python
