"""Copies of versions that may not be what they are taken for: folders, bases of publish, and auxiliary files beside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import reshard
from manifests.errors import UserError
from tests.builders import Tensor, llama_config, pack, random_tensors, refusal, run, write_model
from tests.fast.reshard.delta import slime_decoder
from tests.fast.reshard.delta.states import bytes_of, changed, weights_in, write_states

CHECKSUMS = ("blake3", "xxh3-128", "adler32")
EDITED = '{"bos_token_id": 2}\n'


def other_run(
    chain: Path, tensors: dict[str, Tensor], seed: int, algorithm: str, *, is_full: bool
) -> dict[str, Tensor]:
    """Write versions 1 and 2 of a run as slime does, and 3, of which one tensor alone has changed; return it."""
    states = [tensors]
    for number in (1, 2, 3):
        states.append(changed(states[-1], seed + number, share=0.0 if number == 3 else 0.9))
        if number == 1 and is_full:
            write_model(chain / "weight_v000001", llama_config(), states[-1], num_shards=2)
        else:
            before, after = map(bytes_of, states[-2:])
            slime_decoder.publish(chain, number, before, after, "xor", algorithm)
    return states[-1]


@pytest.mark.parametrize(
    ("before", "algorithm", "is_full"),
    [(1, "adler32", False), (2, "blake3", False), (3, "xxh3-128", False), (2, "xxh3-128", True), (3, "blake3", True)],
)
def test_folder_at_a_version_of_another_run_is_not_taken_for_that_of_its_number(
    before: int, algorithm: str, is_full: bool, tmp_path: Path
) -> None:
    """slime numbers the versions of each run from 1, and records no states."""
    base = random_tensors(llama_config())
    for name in ("base", "other"):
        write_model(tmp_path / name, llama_config(), base, num_shards=2)
    other_run(tmp_path / "first", base, 10, algorithm, is_full=is_full)
    last = other_run(tmp_path / "second", base, 40, algorithm, is_full=is_full)
    reshard.apply_delta(tmp_path / "first", tmp_path / "base", version=before)
    weights = weights_in(tmp_path / "base")
    for quick in (False, True):
        with pytest.raises(UserError) as refused:
            reshard.apply_delta(tmp_path / "second", tmp_path / "base", quick=quick)
        assert refused.value.code == "source.other-base"
        assert weights_in(tmp_path / "base") == weights
    for version in (1, 2, 3, 3):
        done = reshard.apply_delta(tmp_path / "second", tmp_path / "other", version=version)
        assert done.number == version
    assert weights_in(tmp_path / "other") == bytes_of(last)


@pytest.mark.parametrize("algorithm", CHECKSUMS)
def test_older_copy_is_not_taken_for_a_version_of_slime_whose_chain_has_no_full_one(
    algorithm: str, tmp_path: Path
) -> None:
    states, chain = write_states(tmp_path, 4), tmp_path / "chain"
    for number in (1, 2):
        slime_decoder.publish(chain, number, *states[number - 1 : number + 1], "xor", algorithm)
    publish = ("delta", "publish", tmp_path / "v4", "--chain", chain, "--base")
    for other in ("v1", "v2", "v4"):
        assert refusal(*publish, tmp_path / other).found[:2] == (3, "source.other-base")
    assert not (chain / "weight_v000003").exists()
    run(*publish, tmp_path / "v3")
    assert reshard.verify_delta(chain, base=tmp_path / "v1").ok
    reshard.apply_delta(chain, tmp_path / "v1")
    assert weights_in(tmp_path / "v1") == states[3]


def test_file_that_was_edited_in_the_copy_of_a_base_is_published(tmp_path: Path) -> None:
    write_states(tmp_path, 3)
    chain, served = tmp_path / "chain", tmp_path / "served"
    shutil.copytree(tmp_path / "v1", served)
    reshard.publish_delta(tmp_path / "v2", chain, base=tmp_path / "v1")
    for name in ("v2", "v3"):
        (tmp_path / name / "generation_config.json").write_text(EDITED)
    reshard.publish_delta(tmp_path / "v3", chain, base=tmp_path / "v2")
    assert reshard.apply_delta(chain, served).other_files == ()
    assert (served / "generation_config.json").read_text() == EDITED
    assert reshard.verify_delta(chain, base=tmp_path / "v1").ok


def test_digests_of_the_files_of_a_base_are_not_those_of_a_version(tmp_path: Path) -> None:
    states, chain = write_states(tmp_path, 3), tmp_path / "chain"
    (tmp_path / "v1/SHA256SUMS").write_text("of the files of v1\n")
    shutil.copytree(tmp_path / "v1", chain / "weight_v000001")
    shutil.copytree(tmp_path / "v1", tmp_path / "served")
    for number in (2, 3):
        slime_decoder.publish(chain, number, *states[number - 2 : number], "xor", "xxh3-128")
    for folder, version in (("served", 2), ("served", 3), ("served", 3), ("new", 2), ("new", 3)):
        reshard.apply_delta(chain, tmp_path / folder, version=version)
        assert weights_in(tmp_path / folder) == states[version - 1]
    run("export", pack(chain, tmp_path / "packed"), "--to", "hf", "--out", tmp_path / "exported")
    for folder in ("served", "new", "packed", "exported"):
        assert not (tmp_path / folder / "source-files").exists()
    for folder in ("new", "packed", "exported"):
        assert not (tmp_path / folder / "SHA256SUMS").exists()


def test_files_that_are_not_the_versions_are_named_with_quiet_too(tmp_path: Path) -> None:
    write_states(tmp_path, 2)
    reshard.publish_delta(tmp_path / "v2", tmp_path / "chain", base=tmp_path / "v1")
    apply = ("delta", "apply", tmp_path / "chain", "--to", tmp_path / "v1", "--quiet")
    (tmp_path / "v1/tokenizer.json").write_text(json.dumps({}))
    for _ in range(2):
        assert "tokenizer.json" in run(*apply).out
    shutil.copy(tmp_path / "v2/tokenizer.json", tmp_path / "v1")
    assert run(*apply).out == ""
