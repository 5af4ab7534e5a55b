"""A repository on the hub is read by ranges at one commit, and the token stays at the hub."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants, hf_hub_download, snapshot_download

from manifests.safetensors import TensorEntry, encode_header, read_header
from stores.address import HubAddress
from stores.base import read_file_header, read_whole
from stores.hub.store import HubFolder, open_hub
from stores.open import open_store
from tests.builders import files_in, llama_config, pack, reshard, run, write_model
from tests.refusals import refusal
from tests.servers.hub import AGENTS, MEMBER, Hub, Request, serve_hub, set_up

ROOT = Path(__file__).parents[4]
MIB = 1 << 20
WEIGHTS = "model.safetensors"
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'


def random_bytes(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def open_repo(text: str) -> HubFolder:
    folder = open_store(text)
    assert isinstance(folder, HubFolder)
    return folder


def body_nbytes(requests: list[Request]) -> int:
    return sum(request.nbytes for request in requests if request.is_cdn)


def read_ranges(folder: HubFolder, name: str, *ranges: tuple[int, int]) -> bytes:
    """Read ranges as an engine does: opened once, in blocks of 1 MiB."""
    data = bytearray()
    reader = folder.file(name).open(ranges)
    for begin, end in ranges:
        for first in range(begin, end, MIB):
            block = bytearray(min(MIB, end - first))
            reader.read_into(memoryview(block), first)
            data += block
    reader.close()
    return bytes(data)


def test_folder_lists_the_files_of_the_commit_that_a_revision_means(hub: Hub) -> None:
    commit = hub.push("org/name", {"config.json": CONFIG, "sub/a.json": b"{}", ".cache/x": b"", WEIGHTS: bytes(5000)})
    tagged = hub.push("org/name", {"config.json": b"{}"}, ref="v1")
    for text in ("org/name", "hf://org/name", "hf://org/name@main", f"org/name@{commit}"):
        folder = open_repo(text)
        assert (folder.kind, folder.location, folder.revision) == ("huggingface", "hf://org/name", commit)
        assert folder.names() == ("config.json", WEIGHTS, "sub/a.json")
        assert folder.file(WEIGHTS).nbytes == 5000
    assert open_repo("org/name@v1").revision == tagged
    assert str(open_repo("org/name@v1").file("config.json")) == "hf://org/name@v1/config.json"


def test_reading_a_stage_transfers_its_bytes_and_the_header(hub: Hub) -> None:
    nbytes = 3 * MIB
    entries = [
        TensorEntry(name=f"model.layers.{layer}", dtype="U8", shape=(nbytes,), begin=begin, end=begin + nbytes)
        for layer, begin in zip(range(16), range(0, 16 * nbytes, nbytes), strict=True)
    ]
    header = encode_header(entries, {})
    weights = header + random_bytes(16 * nbytes)
    hub.push("org/name", {WEIGHTS: weights})
    folder = open_repo("org/name")
    table = read_file_header(folder.file(WEIGHTS))
    begins = {entry.name: table.nbytes + entry.begin for entry in table.tensors}
    stage = [(begin, begin + 7 * nbytes) for begin in (begins["model.layers.1"], begins["model.layers.9"])]
    assert read_ranges(folder, WEIGHTS, *stage) == b"".join(weights[begin:end] for begin, end in stage)
    requests = hub.take_requests()
    assert body_nbytes(requests) == (128 << 10) + 14 * nbytes
    assert [request.path for request in requests].count(f"/org/name/resolve/{folder.revision}/{WEIGHTS}") == 1
    assert all(request.range for request in requests if request.is_cdn)


def test_short_gaps_are_fetched_along_and_long_ones_are_not(hub: Hub) -> None:
    weights = random_bytes(8 * MIB)
    hub.push("org/name", {WEIGHTS: weights})
    ranges = [(100, 200), (1000, 1100), (5 * MIB, 5 * MIB + 10)]
    data = read_ranges(open_repo("org/name"), WEIGHTS, *ranges)
    assert data == b"".join(weights[begin:end] for begin, end in ranges)
    fetched = [request.range for request in hub.take_requests() if request.is_cdn]
    assert sorted(map(str, fetched)) == ["bytes=100-1099", f"bytes={5 * MIB}-{5 * MIB + 9}"]


def test_token_goes_to_the_endpoint_and_to_no_other_host(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/secret", {"config.json": CONFIG, WEIGHTS: random_bytes(40 * MIB)}, private=True, gated=True)
    hub.fail("/cdn/", times=3, status=503)
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    folder = open_repo("org/secret")
    assert read_whole(folder.file("config.json")) == CONFIG
    assert read_whole(folder.file(WEIGHTS)) == random_bytes(40 * MIB)
    hub.expire_links()
    read_whole(folder.file(WEIGHTS))
    requests = hub.take_requests()
    assert {(request.host, request.token) for request in requests} == {("127.0.0.1", MEMBER), ("localhost", None)}
    assert sum(request.is_cdn for request in requests) >= 9


def test_token_does_not_follow_a_redirect_off_the_endpoint(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/secret", {"config.json": CONFIG}, private=True)
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    folder = open_repo("org/secret")
    elsewhere = hub.endpoint.replace("127.0.0.1", "localhost") + "/stolen"
    hub.fail("resolve-cache", status=302, headers={"Location": elsewhere})
    hub.fail("/stolen", body=CONFIG)
    assert read_whole(folder.file("config.json")) == CONFIG
    assert [(request.host, request.token) for request in hub.take_requests()[-2:]] == [
        ("127.0.0.1", MEMBER),
        ("localhost", None),
    ]


def test_token_that_the_user_disabled_is_not_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/name", {"config.json": CONFIG})
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert read_whole(open_repo("org/name").file("config.json")) == CONFIG
    assert {request.token for request in hub.take_requests()} == {None}


def test_threads_read_one_file_at_once_and_ask_where_it_lies_once(hub: Hub) -> None:
    weights = random_bytes(24 * MIB)
    hub.push("org/name", {WEIGHTS: weights})
    folder = open_repo("org/name")
    ranges = [(begin * MIB, (begin + 6) * MIB) for begin in range(0, 24, 6)]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda range_: read_ranges(folder, WEIGHTS, range_), ranges))
    assert b"".join(parts) == weights
    requests = hub.take_requests()
    assert [request.status for request in requests].count(302) == 1
    assert body_nbytes(requests) == len(weights)


def test_reading_survives_huggingface_hub_closing_its_session(hub: Hub) -> None:
    weights = random_bytes(40 * MIB)
    hub.push("org/name", {WEIGHTS: weights})
    folder = open_repo("org/name")
    reader = folder.file(WEIGHTS).open([(0, len(weights))])
    data = bytearray(len(weights))
    for first in range(0, len(weights), MIB):
        reader.read_into(memoryview(data)[first : first + MIB], first)
        if first == MIB:
            close_session()
    reader.close()
    assert bytes(data) == weights


def test_cached_file_is_read_without_a_request(hub: Hub) -> None:
    hub.push("org/name", {"config.json": CONFIG, WEIGHTS: random_bytes(5000)})
    hf_hub_download("org/name", WEIGHTS)
    folder = open_repo("org/name")
    hub.take_requests()
    assert read_whole(folder.file(WEIGHTS)) == random_bytes(5000)
    assert read_ranges(folder, WEIGHTS, (7, 4000)) == random_bytes(5000)[7:4000]
    assert hub.take_requests() == []


def test_cached_file_of_another_commit_or_size_is_not_read(hub: Hub) -> None:
    hub.push("org/name", {WEIGHTS: b"o" * 5000})
    cached = Path(hf_hub_download("org/name", WEIGHTS))
    hub.push("org/name", {WEIGHTS: b"n" * 5000})
    assert read_whole(open_repo("org/name").file(WEIGHTS)) == b"n" * 5000
    cached.resolve().write_bytes(b"o" * 4000)
    assert read_whole(open_repo(f"org/name@{cached.parent.name}").file(WEIGHTS)) == b"o" * 5000


def test_offline_a_cached_snapshot_is_the_same_folder(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/name", {"config.json": CONFIG, "sub/a.json": b"{}", WEIGHTS: random_bytes(5000)})
    online = open_repo("org/name")
    snapshot_download("org/name")
    hub.take_requests()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for text in ("org/name", f"org/name@{online.revision}"):
        offline = open_repo(text)
        assert str(offline) == f"hf://{text} (local cache)"
        assert (offline.location, offline.revision) == (online.location, online.revision)
        assert offline.names() == online.names()
        assert [offline.file(name).fingerprint for name in offline.names()] == [
            online.file(name).fingerprint for name in online.names()
        ]
        assert read_whole(offline.file(WEIGHTS)) == random_bytes(5000)
    assert hub.take_requests() == []


def test_offline_says_what_the_cache_lacks(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, wording: Callable[[str], None]
) -> None:
    commit = hub.push("org/name", {"config.json": CONFIG, WEIGHTS: random_bytes(5000)})
    hf_hub_download("org/name", "config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = open_repo("org/name")
    assert folder.names() == ("config.json",)
    for ask in (lambda: folder.file(WEIGHTS).nbytes, lambda: folder.file(WEIGHTS).open([(0, 1)])):
        error = refusal(ask)
        assert (error.code, error.where) == ("store.offline", f"hf://org/name/{WEIGHTS}")
        assert error.hint.endswith(f"hf download org/name {WEIGHTS} --revision {commit}")
    other = refusal(lambda: open_hub(HubAddress(repo="org/other", revision="v1")))
    assert (other.code, other.where) == ("store.offline", "hf://org/other@v1")
    wording(f"{error}\n{other}".replace(commit, "COMMIT"))


@pytest.mark.parametrize("is_offline", [False, True])
def test_environment_of_huggingface_hub_is_respected(hub: Hub, tmp_path: Path, is_offline: bool) -> None:
    hub.push("org/secret", {"config.json": CONFIG}, private=True)
    code = (
        "import sys; from stores.base import read_whole; from stores.open import open_store;"
        "sys.stdout.buffer.write(read_whole(open_store('org/secret').file('config.json')))"
    )
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": MEMBER}
    env["HF_HUB_OFFLINE"] = "1" if is_offline else "0"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, timeout=60)
    if is_offline:
        assert b"HF_HUB_OFFLINE is set [store.offline]\nhint: unset it" in ended.stderr
        assert hub.take_requests() == []
    else:
        assert json.loads(ended.stdout) == json.loads(CONFIG)


SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Return the files of a model in three shards."""
    write_model(tmp_path / "model", llama_config(), num_shards=3)
    return files_in(tmp_path / "model")


def problems(address: str, *flags: str | Path) -> list[tuple[str, str]]:
    """Return the code and the place of each problem, below the repository's address."""
    ended = reshard("check", address, "--json", *flags)
    assert ended.code == (0 if ended.json["ok"] else 4), ended.err
    found = [(each["code"], each["where"]) for each in ended.json["problems"]]
    return [(code, where.removeprefix(f"{address}/").partition(":")[0]) for code, where in found]


def test_repository_is_compared_with_a_folder_byte_by_byte(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.push("org/tiny", files)
    assert problems("hf://org/tiny", "--against", tmp_path / "model", "--bytes") == []
    (flipped := bytearray(files[SHARDS[0]]))[-1] ^= 1
    hub.push("org/flipped", {**files, SHARDS[0]: bytes(flipped)})
    assert problems("hf://org/flipped", "--against", tmp_path / "model") == []
    assert problems("hf://org/flipped", "--against", tmp_path / "model", "--bytes") == [
        ("check.other-bytes", SHARDS[0])
    ]


def test_digests_are_verified_on_the_hub_and_written_to_folders_only(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    assert reshard("check", tmp_path / "model", "--digests", "write").code == 0
    digests = (tmp_path / "model" / "digests.json").read_bytes()
    hub.push("org/tiny", {**files, "digests.json": digests})
    assert problems("hf://org/tiny", "--digests", "verify") == []
    hub.push("org/changed", {**files, "digests.json": digests, "tokenizer.json": b'{"model": {}}'})
    assert problems("hf://org/changed", "--digests", "verify") == [("check.changed-file", "tokenizer.json")]
    refused = reshard("check", "hf://org/tiny", "--digests", "write", "--json").refusal
    assert refused[:2] == (3, "output.unwritable")


def test_pack_from_the_hub_is_the_pack_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True), num_shards=3)
    here = ("--layout", "pp=2", "--out", tmp_path / "here")
    assert reshard("pack", tmp_path / "source", *here).code == 0
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        commit = hub.push("org/tiny", files_in(tmp_path / "source"))
        ended = reshard("pack", "hf://org/tiny", "--layout", "pp=2", "--out", tmp_path / "there")
    assert ended.code == 0, ended.err
    here_files, there_files = files_in(tmp_path / "here"), files_in(tmp_path / "there")
    manifest = there_files.pop("manifest.json").decode()
    assert here_files.pop("manifest.json")
    assert there_files == here_files
    assert str(commit) in manifest
    assert reshard("export", tmp_path / "there", "--to", "hf", "--out", tmp_path / "back").code == 0
    assert files_in(tmp_path / "back") == files_in(tmp_path / "source")


def test_a_pack_asks_for_each_file_once_and_each_header_in_one_request(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if agents := sys.modules.get("huggingface_hub.utils._detect_agent"):
        monkeypatch.setattr(agents, "_registry", None)  # as in a new process
    write_model(tmp_path / "source", num_shards=3)
    files = files_in(tmp_path / "source")
    commit = hub.push("org/tiny", files)
    pack("hf://org/tiny", tmp_path / "out")

    def kind(request: Request) -> str:
        return "data" if request.status == 206 else "answer" if request.status == 200 else "redirect"

    listing, *requests = hub.requests
    assert listing.path == "/api/models/org/tiny?blobs=true"
    assert AGENTS not in [request.path for request in requests]
    resolved = [request.path for request in requests if "/resolve/" in request.path]
    assert sorted(resolved) == [f"/org/tiny/resolve/{commit}/{name}" for name in sorted(files)]
    # With a HEAD for each file, two requests for each header and config.json read twice, there were 29 of them.
    assert Counter(map(kind, requests)) == {"redirect": 7, "answer": 7, "data": 6}
    assert len(hub.requests) == 21
    shards = [tmp_path / "source" / name for name in files if name.endswith(".safetensors")]
    data_nbytes = sum(path.stat().st_size - read_header(path).nbytes for path in shards)
    assert sum(request.nbytes for request in requests if request.status == 206) == data_nbytes


def test_manifest_on_the_hub_keeps_its_layout_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        hub.push("org/packed", files_in(tmp_path / "packed"))
        hub.push("org/model", files_in(tmp_path / "source"))
        for number, name in enumerate(("hf://org/packed", "org/packed", "org/packed@main")):
            run("pack", name, "--out", tmp_path / f"out-{number}")
            assert reshard("verify", tmp_path / f"out-{number}", "--against", tmp_path / "packed").code == 0
        for name in ("hf://org/model", "org/model"):
            ended = reshard("pack", name, "--out", tmp_path / "refused", "--json")
            assert ended.refusal == (2, "usage.arguments", "--layout")
