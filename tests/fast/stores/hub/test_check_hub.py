"""`reshard check` and `verify --public-key` on the hub find what they find in a folder, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import INDEX, files_in, llama_config, pack, reshard, write_model
from tests.servers.hub import Hub

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


def test_healthy_repository_has_no_problem_and_its_tensors_are_not_read(hub: Hub, files: dict[str, bytes]) -> None:
    hub.push("org/tiny", files)
    ended = reshard("check", "hf://org/tiny", "--json")
    assert (ended.code, ended.json["problems"], ended.json["num_files"], ended.json["read_nbytes"]) == (0, [], 3, 0)
    assert reshard("check", "org/tiny@main").code == 0


def test_faults_of_a_repository_are_found(hub: Hub, files: dict[str, bytes]) -> None:
    hub.push("org/lost", {name: data for name, data in files.items() if name != SHARDS[1]})
    assert problems("hf://org/lost") == [("check.missing-shard", INDEX)]
    hub.push("org/cut", {**files, SHARDS[2]: files[SHARDS[2]][:-7]})
    assert ("header.wrong-data-length", SHARDS[2]) in problems("hf://org/cut")
    hub.push("org/stray", {**files, "more.safetensors": files[SHARDS[0]]})
    assert problems("hf://org/stray") == [("check.override", "more.safetensors")]


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


def test_hub_that_cannot_be_reached_is_no_problem_of_the_checkpoint(hub: Hub, files: dict[str, bytes]) -> None:
    hub.push("org/private", files, private=True)
    assert reshard("check", "hf://org/private", "--json").code == 3
    assert reshard("check", "hf://org/none", "--json").code == 3


def test_folder_of_dcp_on_the_hub_is_checked_by_its_metadata(hub: Hub) -> None:
    hub.push("org/dcp", {".metadata": b"cos\nsystem\n(S'touch ran'\ntR.", "__0_0.distcp": b""})
    assert [code for code, _ in problems("hf://org/dcp")] == ["source.bad-dcp-metadata"]


def test_signature_of_a_packed_repository_is_beside_its_manifest(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="pip install 'reshard[sign]'")
    from tests.fast.reshard.checks.test_sign import write_keys

    write_model(tmp_path / "model", llama_config())
    for name in ("one", "two"):
        write_keys(tmp_path, name)
    out = tmp_path / "packed"
    pack(tmp_path / "model", out)
    hub.push("org/unsigned", files_in(out))
    assert reshard("sign", out, "--key", tmp_path / "one.pem").code == 0
    hub.push("org/packed", files_in(out))
    for key, address, code, error in (
        ("one", "org/packed", 0, ""),
        ("two", "org/packed", 4, "signature.other-key"),
        ("one", "org/unsigned", 4, "signature.missing"),
    ):
        ended = reshard("verify", f"hf://{address}", "--public-key", tmp_path / f"{key}.pub", "--json")
        assert (ended.code, json.loads(ended.out).get("error", {}).get("code", "")) == (code, error)
    refused = reshard("sign", "hf://org/packed", "--key", tmp_path / "one.pem", "--json")
    assert refused.refusal[:2] == (3, "output.unwritable")
