"""verify: every damage is found, all of it in one run, and the exit code is 4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from reshard.checks.compare import check_index, hash_each, read_index
from reshard.tensors.comparison import Findings
from stores.bundles import Bundles, TensorAt
from stores.local import LocalFile
from stores.open import open_manifest
from tests.builders import (
    Tensor,
    flip,
    llama_config,
    pack,
    random_tensors,
    refusal,
    reshard,
    write_model,
)
from tests.fast.reshard.forged import digest, read_stage

UP = "model.layers.3.mlp.up_proj.weight"
FIRST, SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Pack a tied model into two stages."""
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True))
    return pack(tmp_path / "source", tmp_path / "out")


def differences(out: Path) -> list[tuple[str, str]]:
    """Return what verify says differs, without the folder's own path; text and JSON say the same."""
    shown, told = reshard("verify", out / "manifest.json", "--json"), reshard("verify", out)
    assert (shown.code, told.code, shown.err, told.err) == (4, 4, "", "")
    assert shown.json["equal"] is False
    lines = [f"  {found['where']}: {found['problem']}" for found in shown.json["differences"]]
    assert told.out.splitlines()[1:-1] == lines
    assert told.out.splitlines()[-1].startswith("hint: ")
    assert told.out.startswith(f"{out}: {len(lines)} problem")
    return [
        (found["where"].replace(str(out), "OUT"), found["problem"].replace(str(out), "OUT"))
        for found in shown.json["differences"]
    ]


def test_names_of_files_do_not_control_the_terminal(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config())
    (tmp_path / "source" / "\x9b2J.txt").write_text("one")
    pack(tmp_path / "source", tmp_path / "out")
    (tmp_path / "out" / "\x9b2J.txt").write_text("two")
    text = reshard("verify", tmp_path / "out").out
    assert "2J.txt" in text
    assert text.replace("\n", "").isprintable()


def test_whole_checkpoint_verifies(out: Path) -> None:
    ended = reshard("verify", out)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("verified 39 tensors, 17.78 KiB: ")
    assert reshard("verify", out, "--json").json == {
        "version": 1, "equal": True, "num_tensors": 39, "nbytes": 18208, "compared_nbytes": 18208, "differences": []
    }  # fmt: skip


def test_flipped_byte_is_found_in_its_tensor(out: Path) -> None:
    before = read_stage(out, 1)[UP].data
    file = (out / SHARD).read_bytes()
    flip(out / SHARD, file.index(before) + 7)
    after = read_stage(out, 1)[UP].data
    assert before != after
    assert differences(out) == [(f"OUT/{SHARD}: '{UP}'", f"expected {digest(before)}, found {digest(after)}")]


def test_flipped_byte_of_a_header_is_found(out: Path) -> None:
    expected = digest((out / SHARD).read_bytes()[:4096])
    flip(out / SHARD, 4095)  # padding, a space becomes an exclamation mark
    ((where, problem),) = differences(out)
    assert where == f"OUT/{SHARD}: header"
    assert problem.startswith("invalid JSON: Extra data: ")
    (out / SHARD).write_bytes((out / SHARD).read_bytes().replace(b"!", b"\n", 1))
    found = digest((out / SHARD).read_bytes()[:4096])
    assert differences(out) == [(f"OUT/{SHARD}", f"header: expected {expected} (manifest.json), found {found}")]


def test_truncated_shard_is_found(out: Path) -> None:
    file = (out / SHARD).read_bytes()
    (out / SHARD).write_bytes(file[:-100])
    assert differences(out) == [
        (f"OUT/{SHARD}", f"expected {len(file)} bytes (manifest.json), found {len(file) - 100}")
    ]


def test_missing_small_file_is_found(out: Path) -> None:
    (out / "tokenizer.json").unlink()
    assert differences(out) == [("OUT/tokenizer.json", "cannot be read: No such file or directory")]


def test_all_damage_is_named_in_one_run(out: Path) -> None:
    flip(out / FIRST, 5000)
    flip(out / FIRST, -1)
    (out / SHARD).unlink()
    flip(out / "source.json", 100)
    assert [where for where, _ in differences(out)] == [
        f"OUT/{SHARD}",
        f"OUT/{FIRST}: 'model.embed_tokens.weight'",
        f"OUT/{FIRST}: 'model.layers.1.post_attention_layernorm.weight'",
        "OUT/source.json",
    ]


@pytest.mark.parametrize("fqn", [UP, "model.layers.3.self_attn.q_proj.weight"])  # joined and permuted by some
@pytest.mark.parametrize(
    "command",
    [
        "pack --layout pp=1", "export --to hf", "export --to hf --dtype fp32", "export --to dcp",
        "export --to dcp --for torchtitan", "export --to deepspeed", "export --to megatron",
    ],
)  # fmt: skip
def test_damaged_bundle_is_neither_packed_nor_exported(command: str, fqn: str, out: Path) -> None:
    before = read_stage(out, 1)[fqn].data
    flip(out / SHARD, (out / SHARD).read_bytes().index(before))
    after = read_stage(out, 1)[fqn].data
    verb, *options = command.split()
    refused = refusal(verb, out, *options, "--out", out.parent / "again")
    assert refused.found == (3, "shard.digest-mismatch", f"{out}/{SHARD}: '{fqn}'")
    assert f"expected {digest(before)}, found {digest(after)}" in refused.text
    assert not (out.parent / "again").exists()


def test_quick_reads_no_tensor(out: Path) -> None:
    flip(out / SHARD, -1)
    assert reshard("verify", out, "--quick", "--json").json["compared_nbytes"] == 0
    assert reshard("verify", out, "--quick").out.count("17.78 KiB") == 2  # all of it, and what was not compared
    flip(out / "tokenizer.json", -1)
    assert reshard("verify", out, "--quick").out.count("17.78 KiB") == 2  # of a folder with a problem, too
    flip(out / SHARD, 4095)
    assert reshard("verify", out, "--quick").code == 4


def test_only_the_chosen_stages_are_looked_at(out: Path) -> None:
    flip(out / FIRST, -1)
    chosen = reshard("verify", out, "--stage", "1", "--json")
    assert (chosen.code, chosen.json["num_tensors"], chosen.json["compared_nbytes"]) == (0, 20, 9120)
    assert reshard("verify", out, "--stage", "1", "--stage", "0").code == 4
    (out / FIRST).unlink()
    assert reshard("verify", out, "--stage", "1").code == 0


def test_bundles_equal_their_source(out: Path) -> None:
    source = out.parent / "source"
    ended = reshard("verify", out, "--against", source)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(f" {source}\n")
    pack(out, out.parent / "other", "pp=3")
    assert reshard("verify", out.parent / "other", "--against", out).code == 0


def test_whatever_differs_from_the_source_is_listed(out: Path, tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    changed, wider = tensors[UP], "model.norm.weight"
    tensors[UP] = replace(changed, data=bytes(len(changed.data)))
    tensors[wider] = Tensor(dtype="F32", shape=(16,), data=bytes(64))
    more = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[more] = Tensor(dtype="F32", shape=(2,), data=bytes(8))
    write_model(tmp_path / "other", config, tensors)
    other = tmp_path / "other" / "model.safetensors"
    ended = reshard("verify", out, "--against", tmp_path / "other", "--json")
    assert ended.code == 4
    assert [(found["where"], found["problem"]) for found in ended.json["differences"]] == [
        (f"{out}/{SHARD}: '{wider}'", f"expected F32 [16] ({other}), found BF16 [16]"),
        (f"{out}/{SHARD}: '{UP}'", f"expected {digest(tensors[UP].data)} ({other}), found {digest(changed.data)}"),
        (f"{other}: '{more}'", "is in no bundle"),
    ]
    first = reshard("verify", out, "--against", tmp_path / "other", "--stage", "0", "--json")
    assert [found["where"] for found in first.json["differences"]] == [f"{other}: '{more}'"]


def test_tensors_that_the_source_lacks_are_listed(out: Path, tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = random_tensors(config) | {name: Tensor(dtype="F32", shape=(2,), data=bytes(8))}
    write_model(tmp_path / "more", config, tensors)
    pack(tmp_path / "more", tmp_path / "out2", "pp=1")
    ended = reshard("verify", tmp_path / "out2", "--against", tmp_path / "source", "--json")
    assert [found["problem"] for found in ended.json["differences"]] == ["the source has no such tensor"]


def test_tensors_that_were_dropped_are_not_missed(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = random_tensors(llama_config()) | {name: Tensor(dtype="F32", shape=(2,), data=bytes(8))}
    write_model(tmp_path / "source", llama_config(), tensors)
    pack(tmp_path / "source", tmp_path / "out", "pp=1", "--drop", name)
    assert reshard("verify", tmp_path / "out", "--against", tmp_path / "source").code == 0


@pytest.mark.parametrize("name", ["model.layers.0.side.weight", "lm_head.weight"])
def test_source_with_tensors_that_were_dropped_is_compared_without_them(name: str, tmp_path: Path) -> None:
    """A model that has no such tensor, and one whose head is dropped for the embedding."""
    source, out, exported = (tmp_path / name for name in ("source", "out", "exported"))
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config) | {name: random_tensors(llama_config())["lm_head.weight"]}
    write_model(source, config, tensors)
    pack(source, out, "pp=2", "--drop", name)
    reshard("export", out, "--to", "hf", "--out", exported)
    for against in (source, exported, out):
        assert reshard("verify", out, "--against", against).code == 0
    write_model(source, config, tensors | {UP: replace(tensors[UP], data=bytes(len(tensors[UP].data)))})
    ended = reshard("verify", out, "--against", source, "--json")
    assert (ended.code, [UP in found["where"] for found in ended.json["differences"]]) == (4, [True])


def test_tied_copy_of_the_source_that_is_stored_under_another_name_is_compared(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tied = write_model(tmp_path / "source", config)
    pack(tmp_path / "source", tmp_path / "out", "pp=1")
    head = tied["model.embed_tokens.weight"]
    write_model(tmp_path / "same", config, {**tied, "lm_head.weight": head})
    write_model(tmp_path / "other", config, {**tied, "lm_head.weight": replace(head, data=bytes(len(head.data)))})
    assert reshard("verify", tmp_path / "out", "--against", tmp_path / "same").code == 0
    ended = reshard("verify", tmp_path / "out", "--against", tmp_path / "other", "--json")
    (found,) = ended.json["differences"]
    assert (ended.code, found["where"]) == (4, f"{tmp_path}/other/model.safetensors: 'lm_head.weight'")
    pack(tmp_path / "other", tmp_path / "dropped", "pp=1", "--drop", "lm_head.weight")
    assert reshard("verify", tmp_path / "dropped", "--against", tmp_path / "other").code == 0


def test_virtual_bundles_are_compared_where_there_is_a_source(out: Path) -> None:
    source, virtual = out.parent / "source", out.parent / "virtual"
    pack(source, virtual, "pp=2", "--virtual")
    alone = reshard("verify", virtual, "--json").json
    assert (alone["equal"], alone["nbytes"], alone["compared_nbytes"]) == (True, 18208, 0)
    against = reshard("verify", virtual, "--against", out, "--json").json
    assert (against["equal"], against["compared_nbytes"]) == (True, 18208)


@pytest.mark.parametrize("change", ["changed", "only there", "only here"])
def test_auxiliary_files_are_compared_with_the_sources(change: str, out: Path) -> None:
    source = out.parent / "source"
    file = source / "generation_config.json"
    assert reshard("verify", out, "--against", source).code == 0
    if change == "changed":
        file.write_bytes(file.read_bytes() + b" ")
    elif change == "only here":
        file.unlink()
    else:
        file = source / "chat_template.jinja"
        file.write_text("{{ messages }}")
    ended = reshard("verify", out, "--against", source, "--json")
    assert ended.code == 4
    assert [found["where"] for found in ended.json["differences"]] == [str(out / file.name)]


def test_model_card_may_differ_from_the_sources(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_model(source, llama_config())
    (source / "README.md").write_text("# One\n")
    pack(source, tmp_path / "out")
    (source / "README.md").write_text("# Two\n")
    assert reshard("verify", tmp_path / "out", "--against", source).code == 0


# What is compared of what is stored: each tensor that can be read, and each name once.


NBYTES, NUM = 64, 9


@pytest.mark.parametrize("unreadable", [{0}, {NUM - 1}, {3, 4}, set(range(NUM))])
def test_tensors_that_can_be_read_are_hashed_beside_those_that_cannot(tmp_path: Path, unreadable: set[int]) -> None:
    data = bytes(range(NUM)) * NBYTES
    (tmp_path / "whole").write_bytes(data)
    (tmp_path / "empty").write_bytes(b"")
    tensors = [
        TensorAt(
            f"t{number}", "U8", (NBYTES,), LocalFile(tmp_path / ("empty" if number in unreadable else "whole")),
            number * NBYTES, NBYTES,
        )
        for number in range(NUM)
    ]  # fmt: skip
    findings = Findings()
    digests = hash_each(tensors, lambda nbytes: None, findings, code="check.unreadable")
    ranges = [data[number * NBYTES : (number + 1) * NBYTES] for number in range(NUM)]
    assert digests == [None if number in unreadable else blake3(part).hexdigest() for number, part in enumerate(ranges)]
    assert {(finding.code, finding.where) for finding in findings} == {("check.unreadable", str(tmp_path / "empty"))}


def test_name_that_the_shards_of_a_stage_have_twice_is_a_finding(out: Path) -> None:
    read, findings = open_manifest(out), Findings()
    index, stage = read_index(read.manifest, read.folder, findings), read.manifest.stages[0]
    assert index is not None
    first, *others = Bundles(read.manifest, read.folder).tensors_on(stage)
    check_index(index, read.manifest, read.folder, [stage], [first, first, *others], findings)
    (finding,) = findings
    assert first.name in finding.problem
