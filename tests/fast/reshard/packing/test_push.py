"""A packed folder is pushed to the hub in one commit, which has the whole checkpoint or is not made."""

from __future__ import annotations

import doctest
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import reshard as api
from manifests.digest import digest_bytes
from reshard.formats.auxiliary import with_section, without_section
from tests.builders import edit_manifest, files_in, llama_config, refusal, reshard, write_model
from tests.refusals import refused
from tests.servers.hub import MEMBER, STRANGER, Hub, serve_hub, set_up

# huggingface_hub 1.33 passes files to httpx in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NAME = "org/tiny-pp2"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", MEMBER)
        yield hub


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a packed folder, which tests only read."""
    return pack(tmp_path_factory.mktemp("packed"))


def pack(folder: Path, layout: str = "pp=2", **config: object) -> Path:
    write_model(folder / "source", llama_config(tie_word_embeddings=True, **config))
    out = folder / layout.replace("=", "")
    assert reshard("pack", folder / "source", "--layout", layout, "--out", out).code == 0
    return out


def sent(hub: Hub) -> list[str]:
    """Return the digests of the large files that were sent, since the last call."""
    return [request.path.split("/")[2] for request in hub.take_requests() if request.method == "PUT"]


def num_shards(folder: Path) -> int:
    return sum(name.endswith(".safetensors") for name in files_in(folder))


def test_push_makes_one_private_commit_of_what_the_manifest_lists(hub: Hub, packed: Path) -> None:
    (packed / "notes.txt").write_text("not of the model")
    ended = reshard("push", packed, NAME, "--json")
    done = ended.json
    assert (ended.code, done["is_new"], done["is_private"], done["branch"]) == (0, True, True, "main")
    there, here = hub.files(NAME), files_in(packed)
    assert here.pop("notes.txt")
    assert there.pop(".gitattributes")
    card = there.pop("README.md").decode()
    assert there == here
    assert done["num_files"] == len(there) + 1
    assert done["nbytes"] == sum(map(len, there.values())) + len(card)
    assert hub.messages == ["LlamaForCausalLM, 2 pipeline stages"]
    assert digest_bytes(here["manifest.json"]) in card
    assert str(packed.parent) not in card
    (packed / "notes.txt").unlink()


def test_pushed_model_is_verified_and_exported_as_its_source_is(hub: Hub, tmp_path: Path, packed: Path) -> None:
    source = packed.parent / "source"
    hub.push("org/tiny", {**files_in(source), "README.md": b"---\nlicense: mit\n---\n# Tiny\n\nno newline at the end"})
    assert reshard("pack", "hf://org/tiny", "--layout", "pp=2", "--out", tmp_path / "out").code == 0
    assert reshard("push", tmp_path / "out", NAME, "--revision", "step-1", "--message", "by hand").code == 0
    assert hub.messages == ["by hand"]
    assert "manifest.json" not in hub.files(NAME)
    place = f"hf://{NAME}@step-1"
    assert "\nbase_model: org/tiny\n" in hub.files(NAME, "step-1")["README.md"].decode()
    assert reshard("verify", place).code == 0
    assert reshard("export", place, "--to", "hf", "--out", tmp_path / "back").code == 0
    assert files_in(tmp_path / "back") == hub.files("org/tiny")


def test_gitattributes_that_the_hub_creates_make_no_other_model(hub: Hub, tmp_path: Path, packed: Path) -> None:
    attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
    hub.push("org/tiny", {**files_in(packed.parent / "source"), ".gitattributes": attributes})
    assert reshard("pack", "hf://org/tiny", "--layout", "pp=2", "--out", tmp_path / "out").code == 0
    assert reshard("push", tmp_path / "out", NAME).code == 0
    assert hub.files(NAME)[".gitattributes"] == attributes
    assert reshard("verify", f"hf://{NAME}").code == 0
    other = pack(tmp_path / "other")
    assert reshard("push", other, NAME, "--force").code == 0
    assert hub.files(NAME).keys() == {*files_in(other), ".gitattributes", "README.md"}


def test_gitattributes_that_the_hub_adds_to_are_no_damage(hub: Hub, tmp_path: Path, packed: Path) -> None:
    """As in a commit that has another file which it stores as a large one."""
    attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
    source = {**files_in(packed.parent / "source"), ".gitattributes": attributes, "README.md": b"# Tiny\n"}
    hub.push("org/tiny", source)
    assert reshard("pack", "hf://org/tiny", "--layout", "pp=2", "--out", tmp_path / "out").code == 0
    assert reshard("push", tmp_path / "out", NAME).code == 0
    added = {".gitattributes": attributes + b"a.png filter=lfs diff=lfs merge=lfs -text\n", "a.png": b"\x89PNG"}
    hub.push(NAME, hub.files(NAME) | added, parent="a picture")
    assert reshard("verify", f"hf://{NAME}").code == 0
    assert reshard("pack", f"hf://{NAME}", "--out", tmp_path / "again").code == 0
    assert reshard("export", tmp_path / "again", "--to", "hf", "--out", tmp_path / "back").code == 0
    assert files_in(tmp_path / "back") == source


def test_card_that_was_edited_on_the_hub_is_kept_and_is_no_damage(hub: Hub, tmp_path: Path, packed: Path) -> None:
    assert reshard("push", packed, NAME).code == 0
    edited = hub.files(NAME) | {"README.md": b"# Ours\n" + hub.files(NAME)["README.md"]}
    hub.push(NAME, edited, parent="an edit")
    assert reshard("verify", f"hf://{NAME}").code == 0
    assert reshard("push", packed, NAME, "--json").json["is_new"] is False
    assert hub.files(NAME) == edited


def test_doctest_of_push_runs(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", llama_config())
    api.pack("model", "model-pp2", "pp=2")
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(api.push, "push", globs={"reshard": api}):
        runner.run(test)
    assert (runner.failures, runner.tries) == (0, 2)


def test_what_is_printed(
    hub: Hub, packed: Path, monkeypatch: pytest.MonkeyPatch, wording: Callable[[str], None]
) -> None:
    monkeypatch.chdir(packed)
    printed = [reshard("push", ".", NAME).out for _ in range(2)]
    printed.append(hub.files(NAME)["README.md"].decode())
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    printed += [reshard("push", ".", name).err for name in ("org/new", "org/two--dashes", "s3://bucket")]
    monkeypatch.delenv("HF_TOKEN")
    printed.append(reshard("push", ".", "org/new").err)
    text = "\n".join(printed).replace(hub.endpoint, "ENDPOINT")
    text = re.sub(r"files, [0-9.]+ KiB", "files, ... KiB", text)  # the manifest has the source's path
    wording(re.sub(r"blake3:[0-9a-f]{64}|commit [0-9a-f]{12}", lambda found: found[0][:6] + "...", text))


def test_repeated_push_sends_nothing_and_makes_no_commit(hub: Hub, packed: Path) -> None:
    first = reshard("push", packed, NAME, "--json").json
    assert len(sent(hub)) == num_shards(packed)
    again = reshard("push", packed, NAME, "--json").json
    assert (again["is_new"], again["revision"]) == (False, first["revision"])
    assert not any(request.method == "PUT" or "/commit/" in request.path for request in hub.take_requests())
    assert len(hub.messages) == 1


@pytest.mark.parametrize("part_nbytes", [None, 4096])
def test_interrupted_push_sends_the_rest_later(hub: Hub, packed: Path, part_nbytes: int | None) -> None:
    hub.part_nbytes = part_nbytes
    hub.fail("/commit/", method="POST", status=400, body=b"{}")
    assert refusal("push", packed, NAME).found[1] == "store.refused"
    assert list(hub.files(NAME)) == [".gitattributes"]
    assert len(set(sent(hub))) == num_shards(packed)
    assert reshard("push", packed, NAME).code == 0
    assert sent(hub) == []
    assert {name: data for name, data in hub.files(NAME).items() if name in files_in(packed)} == files_in(packed)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/preupload/", {"status": 503}),
        ("/objects/batch", {"status": 502}),
        ("^/lfs/", {"method": "PUT", "status": 500}),
        ("^/lfs/", {"method": "PUT", "take": 1000}),
        ("/commit/", {"status": 503}),
        ("/commit/", {"drop": True}),
        ("/commit/", {"drop": True, "after_work": True}),
        ("/repos/create", {"status": 500}),
    ],
)
def test_failures_of_the_network_are_retried(
    hub: Hub, packed: Path, path: str, fault: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of huggingface_hub's backoff
    hub.fail(path, **{"method": "POST", **fault})
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    assert reshard("push", packed, NAME, "--json").json["is_new"] is True
    assert len(hub.messages) == 1
    assert set(files_in(packed)) <= set(hub.files(NAME))


def test_another_model_is_replaced_with_force_alone_and_files_of_no_model_are_kept(
    hub: Hub, tmp_path: Path, packed: Path
) -> None:
    other = pack(tmp_path, "pp=3", num_hidden_layers=3)
    assert reshard("push", other, NAME).code == 0
    kept = {"LICENSE": b"MIT", "images/loss.png": b"png", "original/model.safetensors": b"beside"}
    others = {"pytorch_model.bin": b"old", "manifest.sig": b"of the other", "adapter_config.json": b"{}"}
    hub.push(NAME, hub.files(NAME) | kept | others)
    before = hub.files(NAME)
    assert refusal("push", packed, NAME).found == (3, "output.exists", f"hf://{NAME}")
    assert hub.files(NAME) == before
    done = reshard("push", packed, NAME, "--force", "--json").json
    assert set(done["removed"]) == {
        *(name for name in files_in(other) if name.startswith(("model-", "stage-"))) - files_in(packed).keys(),
        *others,
    }
    assert hub.files(NAME).keys() == {*files_in(packed), *kept, ".gitattributes", "README.md"}


def test_model_that_others_uploaded_leaves_nothing_that_readers_take_for_the_new_one(hub: Hub, packed: Path) -> None:
    read = {"config.json": b"{}", "tokenizer.model": b"old", "chat_template.jinja": b"old", "modeling_old.py": b"old"}
    kept = {"LICENSE": b"MIT", "tiny-q4.gguf": b"beside", "original/params.json": b"{}"}
    hub.push(NAME, read | kept | {"model.safetensors": b"old"}, private=True)
    assert refusal("push", packed, NAME).found == (3, "output.exists", f"hf://{NAME}")
    done = reshard("push", packed, NAME, "--force", "--json").json
    assert set(done["removed"]) == {"model.safetensors", *read} - {"config.json"}
    assert hub.files(NAME).keys() == {*files_in(packed), *kept, "README.md"}


@pytest.mark.parametrize("manifest", [b"[]", b"{}"])
def test_manifest_of_another_program_does_not_prevent_a_push(hub: Hub, packed: Path, manifest: bytes) -> None:
    hub.push(NAME, {"manifest.json": manifest}, private=True)
    assert refusal("push", packed, NAME).found == (3, "output.exists", f"hf://{NAME}")
    assert reshard("push", packed, NAME, "--force").code == 0


def test_new_branch_replaces_nothing_of_the_main_branch(hub: Hub, tmp_path: Path, packed: Path) -> None:
    assert reshard("push", packed, NAME).code == 0
    main = hub.files(NAME)
    other = pack(tmp_path, "pp=1")
    assert reshard("push", other, f"{NAME}@step-2").code == 0
    assert hub.files(NAME) == main
    assert hub.files(NAME, "step-2").keys() == {*files_in(other), ".gitattributes", "README.md"}


def test_gitignore_of_the_repository_leaves_nothing_out(hub: Hub, packed: Path) -> None:
    hub.gitignore = "*.safetensors"
    assert reshard("push", packed, NAME).code == 0
    assert set(files_in(packed)) <= set(hub.files(NAME))


def test_commit_of_somebody_else_meanwhile_is_not_overwritten(
    hub: Hub, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, {".gitattributes": b""}, private=True)
    hub.fail("/commit/", method="POST", status=412, body=b"{}")
    assert refused(lambda: api.push(packed, NAME)) == ("output.contended", f"hf://{NAME}")
    assert list(hub.files(NAME)) == [".gitattributes"]


def test_folder_that_is_replaced_while_it_is_pushed_is_not_committed(hub: Hub, tmp_path: Path) -> None:
    packed = pack(tmp_path)

    def replace() -> None:
        edit_manifest(packed, lambda document: document.update(created_by="another run"))

    hub.fail("/objects/batch", method="POST", act=replace)
    assert refused(lambda: api.push(packed, NAME)) == ("manifest.replaced", str(packed / "manifest.json"))
    assert list(hub.files(NAME)) == [".gitattributes"]


def test_signature_is_pushed_with_its_manifest(hub: Hub, tmp_path: Path) -> None:
    packed = pack(tmp_path)
    (packed / "manifest.sig").write_bytes(b"{}")
    assert reshard("push", packed, NAME).code == 0
    assert hub.files(NAME)["manifest.sig"] == b"{}"


@pytest.mark.parametrize(
    ("token", "code"),
    [
        (None, "store.no-token"),
        ("hf_unknown", "store.invalid-token"),
        ("hf_control\x01character", "store.invalid-token"),
        ("hf_nicht-äscii", "store.invalid-token"),
        (STRANGER, "store.denied"),
    ],
)
def test_token_that_may_not_write_is_refused_and_never_printed(
    hub: Hub, packed: Path, token: str | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
        hub.fail("/repos/create", method="POST", status=403, headers={"X-Error-Message": f"{token} may not"})
    for args in ((), ("--json",)):
        ended = reshard("push", packed, NAME, *args)
        assert ended.code == 3
        assert token is None or token not in ended.err + ended.out
    assert ended.json["error"]["code"] == code


def test_public_repository_is_written_with_public_alone(hub: Hub, packed: Path) -> None:
    hub.push(NAME, {".gitattributes": b""})
    assert refusal("push", packed, NAME).found == (3, "store.public-repository", f"hf://{NAME}")
    assert reshard("push", packed, NAME, "--public", "--json").json["is_private"] is False
    assert reshard("push", packed, "org/new", "--public", "--json").json["is_private"] is False


def test_pack_to_a_public_repository_names_the_command_that_publishes(hub: Hub, packed: Path) -> None:
    hub.push(NAME, {".gitattributes": b""})
    error = refusal("pack", packed.parent / "source", "--layout", "pp=2", "--out", f"hf://{NAME}")
    assert error.found == (3, "store.public-repository", f"hf://{NAME}")
    assert f"reshard push DIR {NAME} --public" in error.text


@pytest.mark.parametrize("name", ["a/b/c", "org/na me", "org/-x", "s3://bucket", "org/name@"])
def test_malformed_names_are_refused(hub: Hub, packed: Path, name: str) -> None:
    assert refusal("push", packed, name).found[1] == "store.malformed-address"
    assert hub.take_requests() == []


def test_bucket_is_not_pushed(hub: Hub) -> None:
    address = "s3://bucket/packed"
    assert refusal("push", address, NAME).found == (3, "store.unsupported", address)


def test_damaged_folder_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    packed = pack(tmp_path)
    (packed / SHARD).write_bytes((packed / SHARD).read_bytes()[:-1])
    assert refusal("push", packed, NAME).found[1] == "manifest.differs"
    (packed / SHARD).unlink()
    assert refusal("push", packed, NAME).found[1] == "manifest.differs"
    (packed / "manifest.json").unlink()
    assert refusal("push", packed, NAME).found[1] == "manifest.missing"
    assert hub.take_requests() == []


def test_card_with_metadata_that_the_hub_refuses_is_refused(hub: Hub, packed: Path) -> None:
    hub.push(NAME, {"README.md": b"---\nlicense: [\n---\n"}, private=True)
    assert refusal("push", packed, NAME).found[1] == "store.invalid-card"


def test_pack_to_the_hub_is_the_pack_of_the_folder(hub: Hub, packed: Path, tmp_path: Path) -> None:
    source, place = packed.parent / "source", f"hf://{NAME}"
    hub.fail("/commit/", method="POST", status=400, body=b"{}")
    error = refusal("pack", source, "--layout", "pp=2", "--out", place)
    staged = tmp_path / "cache" / "reshard" / "org--tiny-pp2"
    assert error.found[1] == "store.refused"
    assert f"reshard push {staged} {place}" in error.text
    ended = reshard("pack", source, "--layout", "pp=2", "--out", place, "--json")
    assert (ended.code, ended.json["manifest"]) == (0, f"{place}/manifest.json")
    there = hub.files(NAME)
    assert {name: there[name] for name in files_in(packed)} == files_in(packed)
    assert not staged.exists()
    assert refusal("pack", source, "--layout", "pp=1", "--out", place).found[1] == "output.exists"
    assert refusal("pack", source, "--layout", "pp=2", "--virtual", "--out", place).found[:2] == (2, "options.conflict")


def test_pack_that_fails_does_not_offer_to_push_the_model_before_it(hub: Hub, packed: Path, tmp_path: Path) -> None:
    place, damaged = f"hf://{NAME}", pack(tmp_path, hidden_size=32)
    hub.fail("/commit/", method="POST", status=400, body=b"{}")
    assert "reshard push" in refusal("pack", packed.parent / "source", "--layout", "pp=2", "--out", place).text
    (damaged / SHARD).write_bytes((damaged / SHARD).read_bytes()[:-1] + b"x")
    error = refusal("pack", damaged, "--layout", "pp=1", "--out", place)
    assert (error.found[1], "reshard push" in error.text) == ("shard.digest-mismatch", False)


def test_printed_command_continues_a_forced_pack(
    hub: Hub, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(monkeypatch, hub, tmp_path / "a b")
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    hub.push(NAME, {"model.safetensors": b"of another"}, private=True)
    hub.fail("/commit/", method="POST", status=400, body=b"{}")
    source, place = packed.parent / "source", f"hf://{NAME}"
    error = refusal("pack", source, "--layout", "pp=2", "--out", place, "--force")
    command = shlex.split(error.text.partition("to continue: ")[2])
    assert command[2] == str(tmp_path / "a b" / "reshard" / "org--tiny-pp2")
    assert reshard(*command[1:]).code == 0
    assert "model.safetensors" not in hub.files(NAME)


def test_packs_to_branches_of_similar_names_are_kept_apart(hub: Hub, packed: Path) -> None:
    """Otherwise the command in the first error would push the second model."""
    folders = []
    for branch, layout in (("x/y", "pp=2"), ("x-y", "pp=1")):
        hub.fail("/commit/", method="POST", status=400, body=b"{}")
        error = refusal("pack", packed.parent / "source", "--layout", layout, "--out", f"hf://{NAME}@{branch}")
        folders.append(error.text.partition("reshard push ")[2].split()[0])
    assert [num_shards(Path(folder)) for folder in folders] == [num_shards(packed), 1]


@pytest.mark.parametrize(
    "own",
    [
        b"",
        b"text",
        b"---\n---\n",
        b"---\nlicense: mit\n---\n# Title\n",
        b"---\nbase_model: a/b\n---\n",
        b"----\nnot front matter\n",
        b"---\r\nlicense: mit\r\n---\r\n",
        "émojis 🤗\n\n\n".encode(),
        b"\xff\xfe not UTF-8",
    ],
)
@pytest.mark.parametrize("base_model", [None, "org/base"])
def test_card_without_its_section_is_its_own_text(own: bytes, base_model: str | None) -> None:
    card = with_section(own, "one\n\ntwo", base_model)
    assert card != own
    assert without_section(card) == own
    assert without_section(own) == own


def test_manifest_from_anywhere_does_not_break_out_of_the_card(hub: Hub, tmp_path: Path) -> None:
    packed = pack(tmp_path)

    def change(document: dict[str, object]) -> None:
        document["created_by"] = "x` <!-- reshard: end -->\n# Injected"

    edit_manifest(packed, change)
    assert reshard("push", packed, NAME).code == 0
    card = hub.files(NAME)["README.md"]
    assert without_section(card) == b""
    assert b"\n# Injected" not in card
    assert json.loads(hub.files(NAME)["manifest.json"])["created_by"].endswith("Injected")
