"""Chains: what is published is what receivers get, in any order of versions, and as any command's source."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard
from manifests.digest import digest_bytes
from manifests.errors import UserError
from manifests.models import model_shape
from manifests.trained import encode_steps, encode_trained
from manifests.versions import LOCK_NAME
from reshard.cli.delta import apply_text
from reshard.delta.apply import apply_delta
from reshard.formats.delta.chain import Chain, Version, open_chain
from reshard.transforms.arithmetic import Changes
from tests.builders import (
    EMBEDDING,
    HEAD,
    INDEX,
    Tensor,
    edit_manifest,
    files_in,
    flip,
    llama_config,
    random_tensors,
    refusal,
    run,
    tensors_in,
    write_model,
)
from tests.builders import reshard as command
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.delta import slime_decoder
from tests.fast.reshard.delta.states import bytes_of, changed, weights_in, write_states
from tests.fast.reshard.transforms.adapters import write_adapter

CHECKSUMS = ("blake3", "xxh3-128", "adler32")
NUM_STATES = 4
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, bytes]]]:
    """A folder with `v1` to `v4` and their `chain`: a full version and three deltas."""
    folder = tmp_path_factory.mktemp("published")
    states = write_states(folder, NUM_STATES)
    for number in range(1, NUM_STATES + 1):
        done = run("delta", "publish", folder / f"v{number}", "--chain", folder / "chain", "--json").json
        assert (done["number"], done["base"], done["is_new"]) == (number, None if number == 1 else number - 1, True)
    return folder, states


@pytest.fixture
def chain(published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> Path:
    """A copy of the chain that a test may change."""
    return Path(shutil.copytree(published[0] / "chain", tmp_path / "chain"))


def served(folder: Path) -> dict[str, bytes]:
    """Return the weights of the shards that the index of a folder lists, which are all that are there."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {path.name for path in folder.glob("*.safetensors")} == set(weight_map.values())
    weights = weights_in(folder)
    assert weights.keys() == weight_map.keys()
    return weights


@pytest.mark.parametrize("versions", [(1, 2, 3, 4), (4, 1), (2, 4, 3, 3), (3, 1, 4, 2)])
def test_folder_gets_any_version_from_any_other(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path, versions: tuple[int, ...]
) -> None:
    folder, states = published
    before = None
    for number in versions:
        done = apply_delta(folder / "chain", tmp_path / "served", version=number)
        assert (done.number, done.before) == (number, before)
        assert served(tmp_path / "served") == states[number - 1]
        assert not [path for path in (tmp_path / "served/.cache").rglob("*") if path.is_file()]
        before = number


@pytest.mark.parametrize("then", [2, 3])
def test_apply_says_that_it_has_finished_an_interrupted_switch(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: int
) -> None:
    chain, out, move = published[0] / "chain", tmp_path / "served", os.replace
    apply_delta(chain, out, version=1)

    def interrupted(source: Path, target: Path) -> None:
        if target == out / INDEX:
            raise KeyboardInterrupt
        move(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply_delta(chain, out, version=2)
    monkeypatch.undo()
    done = apply_delta(chain, out, version=then)
    assert (done.number, done.before, done.is_resumed) == (then, 2, True)
    assert served(out) == published[1][then - 1]
    what = "is finished now" if then == 2 else "was finished first"
    assert f"whose interrupted switch {what}" in apply_text(done)
    again = apply_delta(chain, out, version=then)
    assert not again.is_resumed
    assert apply_text(again) == f"version {then}, as before: {out}"


def test_versions_are_sources_of_every_command(published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> None:
    folder, states = published
    for number in (1, 3):
        at = f"{folder / 'chain'}@{number}"
        run("pack", at, "--layout", "pp=2", "--out", tmp_path / f"packed{number}")
        run("export", at, "--to", "hf", "--out", tmp_path / f"exported{number}")
        assert weights_in(tmp_path / f"packed{number}") == states[number - 1]
        assert weights_in(tmp_path / f"exported{number}") == states[number - 1]
        assert json.loads((tmp_path / f"packed{number}/manifest.json").read_text())["source"]["location"] == at
        assert refusal("pack", at, "--layout", "pp=2", "--out", folder / "chain/new").found[0] == 2
        assert run("check", at, "--against", folder / f"v{number}", "--bytes", "--json").json["ok"]
        assert run("diff", at, folder / f"v{number}", "--json").json["equal"]
        listing = reshard.inspect(at)
        assert (listing.format, listing.num_files) == ("delta", number)
        assert {tensor.name for tensor in listing.tensors} == states[number - 1].keys()
    assert reshard.inspect(folder / "chain").title == f"version {NUM_STATES} of a chain"
    for number, chain in enumerate((folder / "chain", f"file://{folder}/chain")):
        run("export", chain, "--to", "hf", "--out", tmp_path / f"newest{number}")
        assert weights_in(tmp_path / f"newest{number}") == states[-1]
    assert command("diff", folder / "chain", folder / "v3").code == 4  # without a number, it is the newest
    delta = refusal("pack", folder / "chain/weight_v000003", "--layout", "pp=2", "--out", tmp_path / "delta")
    assert delta.found[:2] == (3, "source.no-config")
    assert "CHAIN@3" in delta.text


def test_decoder_of_slime_gets_our_bytes(tmp_path: Path) -> None:
    states = write_states(tmp_path, 3)
    for number in (1, 2, 3):
        run("delta", "publish", tmp_path / f"v{number}", "--chain", tmp_path / "chain")
    for number in (1, 2, 3):
        slime_decoder.pull(tmp_path / f"pulled{number}", tmp_path / "nothing", tmp_path / "chain", number)
        assert weights_in(tmp_path / f"pulled{number}") == states[number - 1]


def test_decoder_of_slime_gets_our_deltas_of_a_base_that_it_has(tmp_path: Path) -> None:
    states = write_states(tmp_path, 3)
    for number in (2, 3):
        done = reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain", base=tmp_path / f"v{number - 1}")
        assert (done.number, done.base) == (number - 1, number - 2)
    slime_decoder.pull(tmp_path / "pulled", tmp_path / "v1", tmp_path / "chain", 2)
    assert weights_in(tmp_path / "pulled") == states[2]
    assert apply_delta(tmp_path / "chain", tmp_path / "v1").before == 0
    assert served(tmp_path / "v1") == states[2]
    assert reshard.verify_delta(tmp_path / "chain").findings[0].code == "source.no-full-version"


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("algorithm", CHECKSUMS)
def test_chain_of_slime_is_read(tmp_path: Path, encoding: str, algorithm: str) -> None:
    states = write_states(tmp_path, 3)
    for number in (1, 2):
        slime_decoder.publish(tmp_path / "chain", number, *states[number - 1 : number + 1], encoding, algorithm)
    done = apply_delta(tmp_path / "chain", tmp_path / "v1")
    assert (done.number, done.before) == (2, 0)
    assert not done.is_recorded
    assert served(tmp_path / "v1") == states[2]
    with pytest.raises(UserError) as refused:  # of the full version, there is none
        apply_delta(tmp_path / "chain", tmp_path / "empty")
    assert refused.value.code == "source.no-full-version"


def test_bytes_beyond_the_positions_of_an_overwrite_stay() -> None:
    """A tensor of more than 4 GiB has such bytes; only those before can be changed."""
    last, value = (1 << 32) - 1, memoryview(b"x")
    changes = Changes(memoryview(last.to_bytes(4, "little")), value)
    blocks = bytearray(4), bytearray(4)
    for block, begin in zip(blocks, (last - 3, last + 1), strict=True):
        changes.apply(memoryview(block), begin)
    assert blocks == (b"\0\0\0x", bytes(4))


def test_flipped_bit_in_a_chain_of_slime_is_refused(tmp_path: Path) -> None:
    states = write_states(tmp_path, 2)
    slime_decoder.publish(tmp_path / "chain", 1, *states, "xor", "xxh3-128")
    name = max(states[0], key=lambda name: len(states[0][name]) * (states[0][name] != states[1][name]))
    path, first, _ = slime_decoder.locate(tmp_path / "v1", name)
    flip(path, first)  # of the base: a chain of slime's has no digest of it
    with pytest.raises(UserError) as refused:
        apply_delta(tmp_path / "chain", tmp_path / "v1")
    assert refused.value.code == "source.bad-delta"
    assert repr(name) in refused.value.where


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8}
STEPS = st.lists(
    st.tuples(st.sampled_from(("values", "dtype", "layers", "shape", "tied", "nothing", "back")), st.integers(0, 99)),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dtypes=st.sampled_from([("BF16",), ("F32", "BF16"), ("F16",)]), steps=STEPS)
def test_fold_of_any_changes_is_the_last_state(
    tmp_path_factory: pytest.TempPathFactory, dtypes: tuple[str, ...], steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("fold")
    config = llama_config(**SMALL, num_hidden_layers=1)
    tensors = random_tensors(config, dtypes=dtypes)
    states: list[dict[str, Tensor]] = []
    for kind, seed in (("values", 0), *steps):
        if kind == "back" and states:
            tensors = states[seed % len(states)]
            config["num_hidden_layers"] = sum(".q_proj." in name for name in tensors)
            config["intermediate_size"] = tensors["model.layers.0.mlp.up_proj.weight"].shape[0]
            config["tie_word_embeddings"] = "lm_head.weight" not in tensors
        elif kind == "values":
            tensors = changed(tensors, seed)
        elif kind != "nothing":
            if kind == "layers":
                config["num_hidden_layers"] = 1 + seed % 2
            elif kind == "shape":
                config["intermediate_size"] = 8 * (1 + seed % 2)
            elif kind == "tied":
                config["tie_word_embeddings"] = bool(seed % 2)
            tensors = random_tensors(config, dtypes=dtypes if kind != "dtype" else ("F32",), seed=seed)
        source = folder / f"source{len(states)}-{seed}-{kind}"
        shutil.rmtree(source, ignore_errors=True)
        write_model(source, config, tensors)
        done = reshard.publish_delta(source, folder / "chain")
        if done.is_new:
            states.append(tensors)
        assert done.number == len(states)
    for number, state in enumerate(states, 1):
        folded = reshard.fold_delta(folder / "chain", version=number, out=folder / f"fold{number}")
        assert folded.number == number
        assert tensors_in(folder / f"fold{number}" / f"weight_v{number:06d}") == state
    for number in (len(states), 1):
        apply_delta(folder / "chain", folder / "served", version=number)
        assert served(folder / "served") == bytes_of(states[number - 1])


def test_roll_back_and_fork(chain: Path, published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> None:
    folder, states = published
    apply_delta(chain, tmp_path / "served")
    assert run("delta", "fold", chain, "--version", "2", "--json").json["number"] == NUM_STATES + 1
    done = apply_delta(chain, tmp_path / "served")
    assert (done.before, done.number) == (NUM_STATES, NUM_STATES + 1)
    assert served(tmp_path / "served") == states[1]
    fork = tmp_path / "fork"
    assert run("delta", "fold", chain, "--version", "2", "--out", fork, "--json").json["number"] == 2
    assert reshard.publish_delta(folder / "v4", fork).base == 2
    assert apply_delta(fork, tmp_path / "served").before == 2  # its state is one of the fork's
    assert served(tmp_path / "served") == states[3]
    found = refusal("delta", "fold", chain, "--out", fork).found
    assert found == (3, "source.chain-exists", str(fork))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_prune_keeps_what_the_last_versions_are_computed_from(
    chain: Path, published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path, scheme: str
) -> None:
    address = f"{scheme}{chain}"
    assert run("delta", "prune", address, "--keep", "1", "--json").json["removed"] == []
    run("delta", "fold", chain)
    assert reshard.publish_delta(published[0] / "v1", chain).number == 6
    assert run("delta", "prune", address, "--keep", "3", "--json").json["removed"] == []
    assert run("delta", "prune", address, "--keep", "2", "--json").json["removed"] == [1, 2, 3, 4]
    assert [entry.number for entry in reshard.delta_log(chain)] == [5, 6]
    assert not [path for path in chain.glob("weight_v00000[1-4]/*") if path.is_file()]
    apply_delta(chain, tmp_path / "served")
    assert served(tmp_path / "served") == published[1][0]
    assert reshard.verify_delta(chain).ok


def test_malformed_index_before_the_full_version_stops_only_what_reads_it(
    chain: Path, published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    folder, states = published
    assert reshard.fold_delta(chain).number == 5
    assert reshard.publish_delta(folder / "v1", chain).base == 5
    index = chain / "weight_v000003" / INDEX
    index.write_bytes(b"")
    shutil.copytree(folder / "v4", tmp_path / "copy")  # of version 5
    assert [apply_delta(chain, tmp_path / name).before for name in ("served", "copy")] == [None, 5]
    assert served(tmp_path / "served") == served(tmp_path / "copy") == states[0]
    assert reshard.publish_delta(folder / "v2", chain).base == 6
    assert reshard.fold_delta(chain).number == 8
    for args in (("log", chain), ("apply", chain, "--version", "4", "--to", tmp_path / "older")):
        assert refusal("delta", *args).found[0::2] == (3, str(index))
    assert reshard.prune_delta(chain, keep=1).removed == tuple(range(1, 8))
    assert [entry.number for entry in reshard.delta_log(chain)] == [8]


def test_files_about_training_are_not_published(chain: Path, tmp_path: Path) -> None:
    run("pack", f"{chain}@{NUM_STATES}", "--layout", "pp=1", "--out", tmp_path / "checkpoint")
    files = {"trained.json": encode_trained([]), "optimizer-steps.json": encode_steps({"lm_head.weight": 1}),
             "skipped-documents.json": b"{}", "dataset-state.json": b"{}"}  # fmt: skip
    for name, data in files.items():
        (tmp_path / "checkpoint" / name).write_bytes(data)
        entry = {"path": name, "nbytes": len(data), "digest": digest_bytes(data)}
        edit_manifest(tmp_path / "checkpoint", lambda document, entry=entry: document["files"].append(entry))
    assert not run("delta", "publish", tmp_path / "checkpoint", "--chain", chain, "--json").json["is_new"]
    run("export", tmp_path / "checkpoint", "--to", "hf", "--out", tmp_path / "exported")
    assert not files.keys() & {path.name for path in (tmp_path / "exported").iterdir()}
    run("verify", tmp_path / "checkpoint", "--against", f"{chain}@{NUM_STATES}")


def test_what_is_made_of_a_served_folder_is_no_version(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    served_folder = tmp_path / "served"
    apply_delta(published[0] / "chain", served_folder)
    before = json.loads((served_folder / INDEX).read_text())
    assert before["metadata"].keys() == {"total_size", "version", "state", "files"}
    total_size = before["metadata"]["total_size"]
    run("pack", served_folder, "--layout", "pp=2", "--out", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "hf", "--out", tmp_path / "exported")
    run("merge", served_folder, write_adapter(tmp_path / "adapter"), "--out", tmp_path / "merged")
    for out in ("exported", "merged"):
        index = json.loads((tmp_path / out / INDEX).read_text())
        assert index == {"metadata": {"total_size": total_size}, "weight_map": before["weight_map"]}


@pytest.mark.parametrize("has_base", [False, True])
def test_full_version_can_follow_what_cannot_be_read(
    has_base: bool, chain: Path, published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    folder, states = published
    if has_base:  # which the chain has not
        chain = tmp_path / "of a base"
        run("delta", "publish", folder / "v2", "--chain", chain, "--base", folder / "v1")
    else:
        shutil.rmtree(chain / "weight_v000002")
    code = "source.no-full-version" if has_base else "source.broken-chain"
    assert refusal("delta", "publish", folder / "v3", "--chain", chain).found[:2] == (3, code)
    run("delta", "publish", folder / "v3", "--chain", chain, "--full")
    apply_delta(chain, tmp_path / "served")
    assert served(tmp_path / "served") == states[2]


@pytest.mark.parametrize("is_url", [False, True])
def test_what_is_named_as_a_version_comes_first(
    is_url: bool, chain: Path, published: tuple[Path, list[dict[str, bytes]]]
) -> None:
    folder = Path(shutil.copytree(published[0] / "v3", f"{chain}@2"))
    assert run("diff", f"file://{folder}" if is_url else folder, published[0] / "v3", "--json").json["equal"]
    folder.rename(f"{chain}@x")
    assert run("diff", f"file://{folder}" if is_url else folder, published[0] / "v2", "--json").json["equal"]


def test_version_of_a_chain_is_no_chain(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    for address in (f"{tmp_path.name}/chain@2", f"{chain}@2", f"file://{chain}@2"):  # the first might be of the hub
        assert refusal("delta", "log", address).found == (3, "source.no-version", address)


def test_version_is_named_by_ascii_digits(chain: Path) -> None:
    assert refusal("inspect", f"file://{chain}@\N{ARABIC-INDIC DIGIT THREE}").found[0] == 3
    (chain / "weight_v000004").rename(chain / "weight_v00000\N{ARABIC-INDIC DIGIT FOUR}")
    assert [entry.number for entry in reshard.delta_log(chain)] == [1, 2, 3]
    index = chain / "weight_v000003" / INDEX
    index.write_text(index.read_text().replace('"000003"', '"00000\N{ARABIC-INDIC DIGIT THREE}"'))
    assert refusal("delta", "log", chain).found[:2] == (3, "source.bad-delta")


def test_equal_digests_are_not_read(published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> None:
    """Between two manifests, only the tensors that differ are read: a bit of any other may be flipped."""
    folder, states = published
    for number in (1, 2):
        run("pack", folder / f"v{number}", "--layout", "pp=1", "--out", tmp_path / f"packed{number}")
    reshard.publish_delta(tmp_path / "packed1", tmp_path / "chain")
    same = next(name for name in states[0] if states[0][name] == states[1][name])
    path, first, _ = slime_decoder.locate(tmp_path / "packed2", same)
    flip(path, first)
    done = reshard.publish_delta(tmp_path / "packed2", tmp_path / "chain", base=tmp_path / "packed1")
    assert done.num_changed == sum(states[0][name] != states[1][name] for name in states[0])
    assert reshard.verify_delta(tmp_path / "chain").ok


def test_auxiliary_files_that_change_are_in_the_delta(tmp_path: Path) -> None:
    write_states(tmp_path, 2)
    reshard.publish_delta(tmp_path / "v1", tmp_path / "chain")
    apply_delta(tmp_path / "chain", tmp_path / "served")
    (tmp_path / "v2/generation_config.json").write_text('{"bos_token_id": 2}\n')
    reshard.publish_delta(tmp_path / "v2", tmp_path / "chain")
    assert sorted(path.name for path in (tmp_path / "chain/weight_v000002").iterdir()) == [
        "generation_config.json", SHARD, INDEX,
    ]  # fmt: skip
    apply_delta(tmp_path / "chain", tmp_path / "served")
    for name in ("generation_config.json", "config.json", "tokenizer.json"):
        assert (tmp_path / "served" / name).read_bytes() == (tmp_path / "v2" / name).read_bytes(), name


def test_gitattributes_that_an_older_version_has_published_are_left_behind(tmp_path: Path) -> None:
    write_states(tmp_path, 2)
    chain = tmp_path / "chain"
    reshard.publish_delta(tmp_path / "v1", chain)
    attributes, index = chain / "weight_v000001/.gitattributes", chain / "weight_v000001" / INDEX
    attributes.write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    document = json.loads(index.read_text())
    files = json.loads(document["metadata"]["files"]) | {attributes.name: digest_bytes(attributes.read_bytes())}
    document["metadata"]["files"] = json.dumps(files)
    index.write_text(json.dumps(document))
    run("delta", "verify", chain)
    run("pack", chain, "--layout", "pp=1", "--out", tmp_path / "packed")
    assert apply_delta(chain, tmp_path / "served").other_files == ()
    assert not reshard.publish_delta(tmp_path / "v1", chain).is_new
    assert reshard.publish_delta(tmp_path / "v2", chain).base == 1
    run("delta", "fold", chain, "--out", tmp_path / "folded")
    assert apply_delta(chain, tmp_path / "served").other_files == ()
    assert not list((tmp_path / "served").glob(attributes.name))


def test_auxiliary_files_of_a_base_that_is_not_in_the_chain_are_named_if_they_are_others(tmp_path: Path) -> None:
    write_states(tmp_path, 2)
    shutil.copytree(tmp_path / "v1", tmp_path / "served")
    reshard.publish_delta(tmp_path / "v2", tmp_path / "chain", base=tmp_path / "v1")
    (tmp_path / "served/generation_config.json").write_text("{}")
    (tmp_path / "served/tokenizer.json").unlink()
    done = apply_delta(tmp_path / "chain", tmp_path / "served")
    assert set(done.other_files) == {"generation_config.json", "tokenizer.json"}
    assert done.other_files == apply_delta(tmp_path / "chain", tmp_path / "served").other_files
    for name in done.other_files:
        shutil.copy(tmp_path / "v1" / name, tmp_path / "served")
    assert apply_delta(tmp_path / "chain", tmp_path / "served").other_files == ()


def test_auxiliary_files_that_a_version_lacks_are_removed_unless_they_are_the_users(tmp_path: Path) -> None:
    write_states(tmp_path, 2)
    (tmp_path / "v1/chat_template.jinja").write_text("old")
    for name in ("v1", "v2"):
        reshard.publish_delta(tmp_path / name, tmp_path / "chain")
    apply_delta(tmp_path / "chain", tmp_path / "served", version=1)
    (tmp_path / "served/notes.txt").write_text("mine")
    assert (tmp_path / "served/chat_template.jinja").exists()
    apply_delta(tmp_path / "chain", tmp_path / "served")
    apply_delta(tmp_path / "chain", tmp_path / "fresh")
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("served", "fresh")]
    assert {name for name in names[0] ^ names[1] if not name.endswith(".safetensors")} == {"notes.txt"}


def test_weights_are_removed_before_files_that_the_new_ones_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_states(tmp_path, 2, num_shards=1)
    (tmp_path / "v1/chat_template.jinja").write_text("old")
    for name in ("v1", "v2"):
        reshard.publish_delta(tmp_path / name, tmp_path / "chain")
    removed, unlink = list[str](), os.unlink

    def unlink_and_note(path: Path) -> None:
        removed.append(Path(path).name)
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_and_note)
    apply_delta(tmp_path / "chain", tmp_path / "v1")
    assert removed.index("model.safetensors") < removed.index("chat_template.jinja")


def test_auxiliary_files_of_a_version_that_the_chain_has_no_longer_are_removed(tmp_path: Path) -> None:
    write_states(tmp_path, 1)
    shutil.copytree(tmp_path / "v1", tmp_path / "v2")
    (tmp_path / "v1/chat_template.jinja").write_text("old")
    reshard.publish_delta(tmp_path / "v1", tmp_path / "chain")
    apply_delta(tmp_path / "chain", tmp_path / "served")
    reshard.publish_delta(tmp_path / "v2", tmp_path / "chain", full=True)
    reshard.prune_delta(tmp_path / "chain", keep=1)
    apply_delta(tmp_path / "chain", tmp_path / "served")
    assert not (tmp_path / "served/chat_template.jinja").exists()


@pytest.mark.parametrize("is_served", [False, True])
def test_folder_with_the_weights_of_a_version_gets_its_auxiliary_files(is_served: bool, tmp_path: Path) -> None:
    write_states(tmp_path, 1)
    shutil.copytree(tmp_path / "v1", tmp_path / "v2")
    (tmp_path / "v2/generation_config.json").write_text('{"bos_token_id": 2}\n')
    for name in ("v1", "v2"):
        reshard.publish_delta(tmp_path / name, tmp_path / "chain")
    if is_served:
        apply_delta(tmp_path / "chain", tmp_path / "served")
        (tmp_path / "served/generation_config.json").write_text("{}")
    else:
        shutil.copytree(tmp_path / "v1", tmp_path / "served")
    done = apply_delta(tmp_path / "chain", tmp_path / "served")
    assert (done.number, done.before, done.num_changed) == (2, 2, 0)
    assert (tmp_path / "served/generation_config.json").read_text() == '{"bos_token_id": 2}\n'


@pytest.mark.parametrize("value", [0, 1])
def test_index_lists_the_names_in_shards_that_stay(value: int, tmp_path: Path) -> None:
    """Of files of the model without its head, whose names lack a prefix, in a folder below, as the index says."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2,
              "vocab_size": 12, "n_positions": 6}  # fmt: skip
    shape = model_shape(config, "config.json")
    tensors = {
        fqn.removeprefix("transformer."): Tensor(dtype="F32", shape=dims, data=bytes(4 * prod(dims)))
        for fqn, dims in shape.tensors.items()
        if fqn != "lm_head.weight"
    }
    write_model(tmp_path / "v1", config, tensors, num_shards=2)
    data = bytes(4 * 8 * 12 - 1) + bytes((value,))
    write_model(tmp_path / "v2", config, {**tensors, "wte.weight": replace(tensors["wte.weight"], data=data)})
    (tmp_path / "v2/generation_config.json").write_text("{}")
    for name in ("v1", "v2"):
        reshard.publish_delta(tmp_path / name, tmp_path / "chain")
    served_folder = tmp_path / "served"
    shutil.copytree(tmp_path / "v1", served_folder)
    index = json.loads((served_folder / INDEX).read_text())
    for shard in set(index["weight_map"].values()):
        (served_folder / "below").mkdir(exist_ok=True)
        (served_folder / shard).rename(served_folder / "below" / shard)
    index["weight_map"] = {name: f"below/{shard}" for name, shard in index["weight_map"].items()}
    (served_folder / INDEX).write_text(json.dumps(index))
    for before in (None, 2):
        done = apply_delta(tmp_path / "chain", served_folder)
        assert (done.number, done.before) == (2, before or (1 if value else 2))
        assert not reshard.check(served_folder).findings
        assert reshard.diff(served_folder, tmp_path / "v2").equal
    listed = set(json.loads((served_folder / INDEX).read_text())["weight_map"].values())
    assert {path.relative_to(served_folder).as_posix() for path in served_folder.rglob("*.safetensors")} == listed


def test_digests_of_a_base_that_is_a_manifest_are_those_of_its_bundles(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    """Its source.json has the headers of its source, here of a folder whose headers have digests of other bytes."""
    folder, chain, served_folder = published[0], tmp_path / "chain", tmp_path / "served"
    apply_delta(folder / "chain", served_folder, version=1)
    for name, source in (("m1", served_folder), ("m2", folder / "v2")):
        run("pack", source, "--layout", "pp=2", "--dtype", "fp32", "--out", tmp_path / name)
    base = ("--base", tmp_path / "m1")
    done = run("delta", "publish", tmp_path / "m2", "--chain", chain, *base, "--dtype", "fp32", "--json").json
    assert (done["number"], done["base"]) == (1, 0)
    run("delta", "verify", chain, *base)
    for name in ("m1", "m2"):
        run("export", tmp_path / name, "--to", "hf", "--dtype", "fp32", "--out", tmp_path / f"{name}-hf")
    apply_delta(chain, tmp_path / "m1-hf")
    assert weights_in(tmp_path / "m1-hf") == weights_in(tmp_path / "m2-hf")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("flags", [("--virtual",), ("--stages", "0")])
def test_version_of_a_chain_cannot_be_referred_to(
    number: int, flags: tuple[str, ...], published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    at = f"{published[0] / 'chain'}@{number}"
    refused = refusal("pack", at, "--layout", "pp=2", *flags, "--out", tmp_path / "out")
    assert refused.found[:2] == (3, "options.cannot-be-virtual")
    assert not (tmp_path / "out").exists()


def test_optional_modules_of_a_version_can_be_dropped(tmp_path: Path) -> None:
    config = read_config("tiny-deepseek-v3", num_nextn_predict_layers=1)
    tensors = {
        fqn: Tensor(dtype="F32", shape=dims, data=bytes(4 * prod(dims)))
        for fqn, dims in model_shape(config, "config.json").tensors.items()
    }
    module = f"model.layers.{config['num_hidden_layers']}"
    write_model(tmp_path / "v1", config, tensors)
    new = {fqn: replace(tensor, data=b"\1" + tensor.data[1:]) for fqn, tensor in tensors.items()}
    write_model(tmp_path / "v2", config, new)
    for number, state in enumerate((tensors, new), start=1):
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
        at, out = f"{tmp_path / 'chain'}@{number}", tmp_path / f"packed{number}"
        run("pack", at, "--layout", "pp=2", "--drop", module, "--out", out)
        rest = {fqn: tensor.data for fqn, tensor in state.items() if not fqn.startswith(f"{module}.")}
        assert weights_in(out) == rest != bytes_of(state)
        run("verify", out, "--against", at)


@pytest.mark.parametrize("form", ["dcp", "deepspeed", "universal", "megatron"])
def test_version_with_two_copies_of_a_tied_weight_is_exported_where_no_value_is_lost(form: str, tmp_path: Path) -> None:
    config, chain = llama_config(tie_word_embeddings=True, dtype="bfloat16"), tmp_path / "chain"
    tensors = random_tensors(config)
    head = tensors[EMBEDDING]
    for number, data in enumerate((head.data, head.data[:-1] + b"\0"), start=1):
        write_model(tmp_path / f"v{number}", config, tensors | {HEAD: replace(head, data=data)})
        reshard.publish_delta(tmp_path / f"v{number}", chain)
    run("export", f"{chain}@1", "--to", form, "--out", tmp_path / "equal")
    lost = refusal("export", f"{chain}@2", "--to", form, "--out", tmp_path / "lost")
    assert lost.found[:2] == (3, "source.tied-values-differ")
    assert not (tmp_path / "lost").exists()
    run("export", f"{chain}@2", "--to", "hf", "--out", tmp_path / "both")
    assert weights_in(tmp_path / "both") == weights_in(tmp_path / "v2")


def test_folder_of_a_model_does_not_become_a_chain(chain: Path, tmp_path: Path) -> None:
    write_states(tmp_path, 2)
    before = files_in(tmp_path / "v1")
    for args in (("publish", tmp_path / "v2", "--chain", tmp_path / "v1"), ("fold", chain, "--out", tmp_path / "v1")):
        assert refusal("delta", *args).found == (3, "output.not-ours", str(tmp_path / "v1"))
    assert files_in(tmp_path / "v1") == before
    (chain / "config.json").write_text("{}")  # of others, in a chain that is one
    run("delta", "publish", tmp_path / "v2", "--chain", chain)


@pytest.mark.parametrize("name", ["runs/new", "./runs/new", "gone/new"])
def test_new_chain_at_a_relative_path_is_on_this_machine(
    chain: Path, published: tuple[Path, list[dict[str, bytes]]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And no repository of the hub, which is offline in tests."""
    (chain.parent / "runs").mkdir()
    monkeypatch.chdir(chain.parent)
    run("delta", "publish", published[0] / "v1", "--chain", name)
    assert reshard.publish_delta(published[0] / "v1", f"{name}-2").number == 1
    run("delta", "fold", "chain", "--version", "3", "--out", f"{name}-3")
    logs = [reshard.delta_log(Path(f"{name}{end}").resolve()) for end in ("", "-2", "-3")]
    assert [[entry.number for entry in log] for log in logs] == [[1], [1], [3]]


def test_chain_that_this_user_may_not_look_into_is_named(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may look into all."""
    chain, stat = tmp_path / "chain", os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(chain)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    found = refusal("delta", "publish", published[0] / "v1", "--chain", chain).found
    assert found == (3, "store.unreadable", str(chain))


def test_address_is_no_folder_to_apply_to(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused = refusal("delta", "apply", chain, "--to", "s3://bucket/served")
    assert refused.found == (2, "options.invalid-value", "--to")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("number", [1, 2])
def test_version_in_a_chain_is_not_applied_to(chain: Path, number: int, tmp_path: Path) -> None:
    before = files_in(chain)
    os.symlink(chain / "weight_v000001", tmp_path / "link")
    for place in (chain / "weight_v000001", tmp_path / "link", chain / "new"):
        refused = refusal("delta", "apply", chain, "--version", str(number), "--to", place)
        assert refused.found == (2, "output.overlaps-source", "--to")
    assert files_in(chain) == before


def test_prune_removes_the_link_to_a_version_and_not_what_it_leads_to(tmp_path: Path) -> None:
    write_states(tmp_path, 1)
    for full in (False, True):
        reshard.publish_delta(tmp_path / "v1", tmp_path / "chain", full=full)
    (tmp_path / "chain/weight_v000001").rename(tmp_path / "elsewhere")
    (tmp_path / "chain/weight_v000001").symlink_to(tmp_path / "elsewhere")
    before = files_in(tmp_path / "elsewhere")
    assert reshard.prune_delta(tmp_path / "chain", keep=1).removed == (1,)
    assert files_in(tmp_path / "elsewhere") == before
    assert [path.name for path in (tmp_path / "chain").iterdir()] == ["weight_v000002"]


def test_prune_whose_lock_is_taken_over_removes_no_more(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("delta", "fold", chain)
    before, unlink, lock = files_in(chain), os.unlink, chain / LOCK_NAME

    def take_over(path: str | Path, **options: Any) -> None:
        unlink(path, **options)
        if str(path) == str(chain / "weight_v000004" / INDEX):
            lock.write_text(json.dumps(json.loads(lock.read_text()) | {"nonce": "of another"}))

    monkeypatch.setattr(os, "unlink", take_over)
    with pytest.raises(UserError) as caught:
        reshard.prune_delta(chain, keep=1)
    assert (caught.value.code, str(caught.value.where)) == ("launch.folder-in-use", str(chain))
    assert before.keys() - files_in(chain).keys() == {f"weight_v000004/{INDEX}"}


@pytest.mark.slow
def test_folder_and_full_version_open_in_transformers(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder, states = published
    apply_delta(folder / "chain", tmp_path / "served")
    for path, state in ((tmp_path / "served", states[-1]), (folder / "chain/weight_v000001", states[0])):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        loaded = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in model.state_dict().items()}
        assert loaded == state


@pytest.mark.parametrize("where", ["full", "delta", "folder", "unchanged", "header"])
def test_flipped_bit_is_named_before_it_is_served(
    chain: Path, published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path, where: str
) -> None:
    states, out = published[1], tmp_path / "served"
    differs = next(name for name in states[0] if states[0][name] != states[1][name])
    apply_delta(chain, out, version=1)
    before = files_in(out)
    if where == "full":
        path, first, _ = slime_decoder.locate(chain / "weight_v000001", differs)
        out = tmp_path / "late"
    elif where == "delta":
        path, first, _ = slime_decoder.locate(chain / "weight_v000002", differs)
    elif where == "header":
        path, first = chain / "weight_v000002" / SHARD, 200
    else:
        same = next(name for name in states[0] if states[0][name] == states[1][name])
        path, first, _ = slime_decoder.locate(out, differs if where == "folder" else same)
    flip(path, first)
    damaged = files_in(out) if out.exists() else {}
    ended = command("delta", "apply", chain, "--to", out, "--version", "2", "--json")
    assert ended.code == 3
    assert ended.json["error"]["code"] in ("shard.digest-mismatch", "source.bad-delta", "source.broken-chain",
                                           "header.not-safetensors", "source.not-json", "header.invalid-field",
                                           "json.invalid")  # fmt: skip
    assert path.name in ended.json["error"]["where"] or "version 2" in ended.json["error"]["problem"]
    left = {name: data for name, data in files_in(out).items() if not name.startswith(".cache")}
    assert left == ({} if where == "full" else damaged)
    if where in ("full", "delta", "header"):
        assert command("delta", "verify", chain).code == 4
        assert left in ({}, before)
    assert reshard.verify_delta(published[0] / "chain").ok


@pytest.mark.parametrize(
    ("scheme", "is_full", "least"),
    [("", False, 0), ("", False, 1), ("file://", False, 0), ("file://", False, 1), ("file://", True, 0)],
)
def test_error_of_a_callback_is_none_of_the_disk(
    scheme: str, is_full: bool, least: int, published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    """Such as that of a pipe which nobody reads; it names no file."""
    states, chain = published[0], f"{scheme}{tmp_path / 'chain'}"
    (tmp_path / "chain").mkdir()
    reshard.publish_delta(states / "v1", chain)

    def progress(done: int, total: int) -> None:
        if done >= least:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    with pytest.raises(BrokenPipeError):
        reshard.publish_delta(states / "v2", chain, full=is_full, progress=progress)
    assert not (tmp_path / "chain" / "weight_v000002" / INDEX).exists()


def test_chain_may_have_folders_that_this_user_may_not_search(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as `lost+found`; root may search all."""
    closed, stat = tmp_path / "lost+found", os.stat
    closed.mkdir()

    def refused(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert [reshard.publish_delta(published[0] / name, tmp_path).number for name in ("v1", "v2")] == [1, 2]


def test_late_joiner_reads_the_base_and_the_deltas_once(tmp_path: Path) -> None:
    number = 300
    config = llama_config(**SMALL, num_hidden_layers=1)
    tensors = random_tensors(config)
    write_model(tmp_path / "model", config, tensors)
    reshard.publish_delta(tmp_path / "model", tmp_path / "chain")
    states = [bytes_of(tensors)]
    for version in range(2, number + 1):  # as slime's trainer does, which takes less time
        tensors = changed(tensors, version, share=0.1)
        states.append(bytes_of(tensors))
        slime_decoder.publish(tmp_path / "chain", version, *states[-2:], "xor", "blake3")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, limits[1]))
    try:  # deltas of a chain are not all open at once
        done = apply_delta(tmp_path / "chain", tmp_path / "served")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (done.number, done.before) == (number, None)
    assert served(tmp_path / "served") == states[-1]
    stored = sum(entry.nbytes for entry in reshard.delta_log(tmp_path / "chain"))
    assert done.read_nbytes == stored
    assert done.write_nbytes < 2 * 4096 + sum(map(len, states[-1].values()))


def test_folder_that_is_one_version_behind_reads_few_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama_config(**SMALL, num_hidden_layers=1)
    tensors = random_tensors(config)
    write_model(tmp_path / "model", config, tensors)
    reshard.publish_delta(tmp_path / "model", tmp_path / "chain")
    states = [bytes_of(tensors)]
    for version in range(2, 41):
        tensors = changed(tensors, version, share=0.1)
        states.append(bytes_of(tensors))
        slime_decoder.publish(tmp_path / "chain", version, *states[-2:], "xor", "blake3")
    apply_delta(tmp_path / "chain", tmp_path / "served", version=39)
    chain, numbers, version_of = open_chain(tmp_path / "chain"), list[int](), Chain.version

    def read(chain: Chain, number: int) -> Version:
        numbers.append(number)
        return version_of(chain, number)

    monkeypatch.setattr(Chain, "version", read)
    assert [version.number for version in chain.line(40, after=39)] == [40]
    assert len(numbers) < 20
    assert apply_delta(tmp_path / "chain", tmp_path / "served").before == 39
    assert served(tmp_path / "served") == states[-1]


@pytest.mark.parametrize("is_full", [True, False])
def test_publisher_whose_lock_is_taken_over_publishes_nothing(
    chain: Path, published: tuple[Path, list[dict[str, bytes]]], is_full: bool
) -> None:
    """As after its machine was suspended: the process that has the lock then may write the same version."""
    lock, before = chain / LOCK_NAME, files_in(chain)

    def take_over(done: int, total: int) -> None:
        lock.write_text(json.dumps(json.loads(lock.read_text()) | {"nonce": "of another"}))

    source = published[0] / "v1"
    with pytest.raises(UserError) as error:
        reshard.publish_delta(source, chain, full=is_full, progress=take_over)
    assert (error.value.code, error.value.where) == ("launch.folder-in-use", str(chain))
    lock.unlink()
    assert {name: data for name, data in files_in(chain).items() if ".partial" not in name} == before


def test_folders_that_are_not_ours_are_refused(published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> None:
    chain = published[0] / "chain"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/thesis.txt").write_text("mine")
    assert refusal("delta", "apply", chain, "--to", tmp_path / "notes").found == (
        3, "output.not-ours", str(tmp_path / "notes")
    )  # fmt: skip
    config = llama_config()
    write_model(tmp_path / "other", config, random_tensors(config, seed=7))
    assert refusal("delta", "apply", chain, "--to", tmp_path / "other").found[:2] == (3, "source.other-base")
    assert refusal("delta", "publish", published[0] / "v1", "--chain", chain, "--base", tmp_path / "other").found[
        :2
    ] == (3, "shard.digest-mismatch")
    run("pack", published[0] / "v1", "--layout", "pp=1", "--out", tmp_path / "packed")
    assert refusal("delta", "apply", chain, "--to", tmp_path / "packed").found[:2] == (3, "output.has-manifest")
    for verb in (("apply", chain, "--to", tmp_path / "new", "--version", "9"), ("log", tmp_path / "nowhere"),
                 ("verify", tmp_path / "nowhere"), ("prune", tmp_path / "nowhere", "--keep", "1")):  # fmt: skip
        assert refusal("delta", *map(str, verb)).found[:2] == (3, "source.no-version")
    assert not (tmp_path / "new").exists()


def test_without_its_package_one_sentence_says_what_to_install(
    published: tuple[Path, list[dict[str, bytes]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    found = refusal("delta", "apply", published[0] / "chain", "--to", tmp_path / "served")
    assert found.found[:2] == (3, "store.missing-package")
    assert "pip install 'reshard[delta]'" in found.text


GOLDEN = Path(__file__).parents[3] / "data" / "golden" / "delta-v1-checksums"  # v2 with xxh3-128, v3 with adler32
OTHER_STATE = "blake3:" + "0" * 64


def set_state(chain: Path, number: int) -> None:
    """Let a version say that its tensors have another digest than they have."""
    path = chain / f"weight_v{number:06d}" / INDEX
    index = json.loads(path.read_text())
    index["metadata"]["state"] = OTHER_STATE
    path.write_text(json.dumps(index))


def test_golden_chain_of_other_checksums_is_applied_and_verified_for_ever(tmp_path: Path) -> None:
    for number in (2, 3):
        done = apply_delta(GOLDEN, tmp_path / "served", version=number)
        assert (done.state, done.is_recorded) == (reshard.delta_log(GOLDEN)[number - 1].state, True)
        slime_decoder.pull(tmp_path / f"pulled{number}", tmp_path / "nothing", GOLDEN, number)
        assert served(tmp_path / "served") == weights_in(tmp_path / f"pulled{number}")
    assert reshard.verify_delta(GOLDEN).ok
    assert command("diff", GOLDEN, tmp_path / "served").code == 0


@pytest.mark.parametrize("number", [2, 3])
def test_recorded_state_is_compared_with_that_of_a_golden_chain(tmp_path: Path, number: int) -> None:
    chain = Path(shutil.copytree(GOLDEN, tmp_path / "chain"))
    shutil.rmtree(chain / "weight_v000003") if number == 2 else None
    set_state(chain, number)
    for arguments in (("delta", "apply", chain, "--to"), ("pack", chain, "--layout", "pp=1", "--out")):
        assert refusal(*arguments, tmp_path / "new").found[:2] == (3, "source.broken-chain")
    assert {finding.code for finding in reshard.verify_delta(chain).findings} == {"source.broken-chain"}
    assert not (tmp_path / "new/config.json").exists()


@pytest.mark.parametrize("algorithm", CHECKSUMS)
def test_recorded_state_is_compared_where_a_delta_has_no_digests(tmp_path: Path, algorithm: str) -> None:
    states = write_states(tmp_path, 2)
    reshard.publish_delta(tmp_path / "v1", tmp_path / "chain")
    slime_decoder.publish(tmp_path / "chain", 2, *states, "xor", algorithm)
    assert reshard.verify_delta(tmp_path / "chain").ok
    apply_delta(tmp_path / "chain", tmp_path / "served", version=1)
    set_state(tmp_path / "chain", 2)
    chain, new = tmp_path / "chain", tmp_path / "new"
    for arguments in (
        ("delta", "apply", chain, "--to", tmp_path / "served"),
        ("delta", "fold", chain),
        ("delta", "fold", chain, "--out", new),
        ("pack", chain, "--layout", "pp=1", "--out", new),
        ("export", chain, "--to", "hf", "--out", new),
        ("diff", chain, tmp_path / "v2"),
    ):
        assert refusal(*arguments).found[:2] == (3, "source.broken-chain")
    assert served(tmp_path / "served") == states[0]
    assert not list(new.glob("*.json"))
    assert [entry.number for entry in reshard.delta_log(chain)] == [1, 2]
    assert {finding.code for finding in reshard.verify_delta(tmp_path / "chain").findings} == {"source.broken-chain"}


def test_chain_that_slime_began_and_we_go_on_with_is_a_source(tmp_path: Path) -> None:
    states = write_states(tmp_path, 3)
    shutil.copytree(tmp_path / "v1", tmp_path / "chain/weight_v000001")  # no digests in its headers
    slime_decoder.publish(tmp_path / "chain", 2, *states[:2], "xor", "xxh3-128")
    reshard.publish_delta(tmp_path / "v3", tmp_path / "chain")
    run("pack", tmp_path / "chain", "--layout", "pp=2", "--out", tmp_path / "packed")
    assert weights_in(tmp_path / "packed") == states[2]
    done = reshard.fold_delta(tmp_path / "chain")
    assert done.state == reshard.delta_log(tmp_path / "chain")[2].state
    assert apply_delta(tmp_path / "chain", tmp_path / "served").is_recorded
    assert served(tmp_path / "served") == states[2]


@pytest.mark.parametrize("algorithm", CHECKSUMS)
def test_folder_follows_a_chain_of_versions_of_slime_and_of_ours(tmp_path: Path, algorithm: str) -> None:
    """A version of slime's records no state: a folder that has it is known by its number, or as a base of ours."""
    states = write_states(tmp_path, 5)
    chain, folder = tmp_path / "chain", tmp_path / "served"
    shutil.copytree(tmp_path / "v1", chain / "weight_v000001")
    steps = ("full", "slime", "ours", "slime", "slime")
    for number, step in enumerate(steps, 1):
        if step == "slime":
            slime_decoder.publish(chain, number, *states[number - 2 : number], "overwrite", algorithm)
        elif step == "ours":
            reshard.publish_delta(tmp_path / f"v{number}", chain)
        done = apply_delta(chain, folder)
        assert (done.number, done.before) == (number, number - 1 or None)
        assert served(folder) == states[number - 1]
    other, index = tmp_path / "v5", json.loads((tmp_path / "v5" / INDEX).read_text())
    index["metadata"]["version"] = "000002"  # whose state it is not: version 3 records that
    (other / INDEX).write_text(json.dumps(index))
    apply_delta(chain, other, version=3)
    assert served(other) == states[2]


def test_version_of_slime_has_the_auxiliary_files_of_the_version_before(tmp_path: Path) -> None:
    states, new = write_states(tmp_path, 3), '{"bos_token_id": 2}\n'
    (tmp_path / "v2/generation_config.json").write_text(new)
    for name in ("v1", "v2"):
        reshard.publish_delta(tmp_path / name, tmp_path / "chain")
    slime_decoder.publish(tmp_path / "chain", 3, *states[1:], "xor", "xxh3-128")
    run("pack", tmp_path / "chain", "--layout", "pp=1", "--out", tmp_path / "packed")
    apply_delta(tmp_path / "chain", tmp_path / "served")
    for name in ("packed", "served"):
        assert (tmp_path / name / "generation_config.json").read_text() == new


@pytest.mark.parametrize("versions", [(1, 2, 3), (2, 3), (2, 2, 3)])
def test_auxiliary_files_are_followed_through_versions_of_slime(versions: tuple[int, ...], tmp_path: Path) -> None:
    states, chain, folder = write_states(tmp_path, 3), tmp_path / "chain", tmp_path / "served"
    (tmp_path / "v1/chat_template.jinja").write_text("old")
    reshard.publish_delta(tmp_path / "v1", chain)
    slime_decoder.publish(chain, 2, *states[:2], "xor", "adler32")
    reshard.publish_delta(tmp_path / "v3", chain)
    for number in versions:
        apply_delta(chain, folder, version=number)
        assert (folder / "chat_template.jinja").exists() == (number < 3)
        (folder / "generation_config.json").unlink()  # the next call brings it back
    assert apply_delta(chain, folder).other_files == ()
    assert (folder / "generation_config.json").exists()


def test_file_that_only_a_full_version_of_slime_has_is_removed_with_the_next_one(tmp_path: Path) -> None:
    write_states(tmp_path, 3)
    chain, folder = tmp_path / "chain", tmp_path / "served"
    reshard.publish_delta(tmp_path / "v1", chain)
    shutil.copytree(tmp_path / "v2", chain / "weight_v000002")
    (chain / "weight_v000002/chat_template.jinja").write_text("of slime's")
    reshard.publish_delta(tmp_path / "v3", chain)
    for number in (1, 2, 3):
        apply_delta(chain, folder, version=number)
        assert (folder / "chat_template.jinja").exists() == (number == 2)
    apply_delta(chain, tmp_path / "fresh")
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "fresh").iterdir()}


@pytest.mark.parametrize("number", [1, 2])
def test_auxiliary_file_that_a_chain_has_lost_is_found(number: int, tmp_path: Path) -> None:
    write_states(tmp_path, 2)
    (tmp_path / "v2/chat_template.jinja").write_text("new")
    for name in ("v1", "v2"):
        reshard.publish_delta(tmp_path / name, tmp_path / "chain")
    chain, new = tmp_path / "chain", tmp_path / "new"
    (chain / f"weight_v{number:06d}" / ("tokenizer.json", "chat_template.jinja")[number - 1]).unlink()
    assert [finding.code for finding in reshard.verify_delta(chain).findings] == ["source.broken-chain"]
    for arguments in (
        ("pack", chain, "--layout", "pp=1", "--out", new),
        ("export", chain, "--to", "hf", "--out", new),
        ("delta", "fold", chain),
    ):
        assert refusal(*arguments).found[:2] == (3, "source.broken-chain")
    assert reshard.publish_delta(tmp_path / "v2", chain).is_new  # which has it again
    assert reshard.verify_delta(chain).ok


def test_copy_of_a_version_that_records_no_state_is_not_taken_for_it(tmp_path: Path) -> None:
    states = write_states(tmp_path, 3)
    shutil.copytree(tmp_path / "v1", tmp_path / "chain/weight_v000001")
    slime_decoder.publish(tmp_path / "chain", 2, *states[:2], "xor", "xxh3-128")
    reshard.publish_delta(tmp_path / "v3", tmp_path / "chain", base=tmp_path / "v1")  # an older one
    assert reshard.verify_delta(tmp_path / "chain").ok
    apply_delta(tmp_path / "chain", tmp_path / "served")
    assert served(tmp_path / "served") == states[2]


# A bit that is flipped anywhere in a base, a chain or a copy is named before it is served, or changes no weight.


NUM_FLIPS = 300


def shown(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_in(folder).items() if not name.startswith(".cache")}


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, NUM_FLIPS), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_flipped_bit_is_never_served(tmp_path: Path, seeds: range) -> None:
    states = write_states(tmp_path, 3)
    for number in (1, 2, 3):
        reshard.publish_delta(tmp_path / f"v{number}", tmp_path / "chain")
    reshard.apply_delta(tmp_path / "chain", tmp_path / "served", version=1)
    num_refused = 0
    for seed in seeds:
        chance, place = random.Random(seed), tmp_path / str(seed)
        for name in ("chain", "served"):
            shutil.copytree(tmp_path / name, place / name)
        paths = [place / name for name in files_in(place) if not name.startswith("served/.cache")]
        path = chance.choices(paths, [path.stat().st_size for path in paths])[0]
        flip(path, chance.randrange(path.stat().st_size), 1 << chance.randrange(8))
        before = shown(place / "served")
        try:
            reshard.apply_delta(place / "chain", place / "served")
        except UserError:
            num_refused += 1
            assert shown(place / "served") == before, seed
        else:
            assert weights_in(place / "served") == states[2], (seed, path)
        shutil.rmtree(place)
    assert num_refused > len(seeds) // 4
