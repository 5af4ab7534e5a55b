"""Adapters of another base or other options, and damaged records of them, are refused or noted."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from manifests.digest import digest_bytes
from manifests.errors import UserError
from manifests.models.adapters import RECORD_NAME
from manifests.schema import AuxiliaryFile, Parent
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint import peft_folder
from runner.checkpoint.adapter_record import AdapterRecord, check_adapters, check_base, record_of
from runner.checkpoint.peft_folder import read_peft
from runner.config.flags import parse_training
from runner.config.lora import LoraOptions
from runner.models.adapters import Adapters
from runner.models.regions import Region
from runner.rundir.exit_report import code_of
from tests.builders import Tensor, pack, write_model
from tests.fast.reshard.transforms.adapters import PREFIX, float32, write_adapter
from tests.fast.runner.load.test_slices_loaded import in_slices, weights_of
from tests.fast.trained import write_trained

LORA = LoraOptions(rank=2, alpha=2.0, target="all-linear", experts=False, dropout=0.0, is_rank_scaled=False)
RECORD = AdapterRecord(lora=LORA, location="/base", digest="blake3:aa", base_digest="blake3:01")


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    write_model(tmp_path / "model")
    return open_packed(pack(tmp_path / "model", tmp_path / "packed"))


def checkpoint_of(packed: Packed, record: bytes) -> Packed:
    (packed.root / RECORD_NAME).write_bytes(record)
    file = AuxiliaryFile(path=RECORD_NAME, nbytes=len(record), digest=digest_bytes(record))
    manifest = replace(packed.manifest, files=(*packed.manifest.files, file))
    return replace(packed, read=replace(packed.read, manifest=manifest))


def test_base_is_compared_by_digests_and_noted_without(packed: Packed, caplog: pytest.LogCaptureFixture) -> None:
    for ours, theirs, warns in (
        (RECORD, RECORD, 0),
        (replace(RECORD, base_digest=None), RECORD, 0),  # the same manifest
        (replace(RECORD, base_digest=None), replace(RECORD, digest="blake3:bb"), 1),
        (RECORD, replace(RECORD, digest="blake3:bb"), 0),  # another layout
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "runner"):
            check_base(checkpoint_of(packed, ours.encode()), theirs)
        assert len(caplog.records) == warns
    with pytest.raises(UserError) as refused:
        check_base(checkpoint_of(packed, RECORD.encode()), replace(RECORD, base_digest="blake3:02"))
    assert refused.value.code == "resume.other-base"


def test_weights_that_the_base_was_trained_from_are_refused_where_it_is_in_slices(packed: Packed) -> None:
    origin = checkpoint_of(packed, replace(RECORD, base_digest=None).encode())
    parents = (Parent(location="/pp2", digest="blake3:bb"), Parent(location="/base", digest="blake3:aa"))
    origin = replace(origin, read=replace(origin.read, manifest=replace(origin.manifest, parents=parents)))
    check_base(origin, replace(RECORD, base_digest=None))
    check_base(origin, replace(RECORD, digest="blake3:cc"))  # perhaps the base on another layout
    with pytest.raises(UserError) as refused:
        check_base(origin, replace(RECORD, location="/pp2", digest="blake3:bb"))
    assert refused.value.code == "resume.other-base"
    assert "launch /base" in refused.value.hint


def test_record_has_the_digests_of_a_base_in_slices_of_whole_rows(tmp_path: Path) -> None:
    whole = open_packed(write_trained(tmp_path, "pp=2"))
    weights = weights_of(whole)
    fqn = next(name for name in weights if "q_proj" in name)
    for num_slices, counts in ((1, [16]), (3, [5, 5, 6])):
        parts = [part.numpy().tobytes() for part in weights[fqn].split(counts)]
        digest = blake3("".join(blake3(part).hexdigest() for part in parts).encode()).hexdigest()
        text = " ".join(("F32", digest, *(str(len(part)) for part in parts)))
        record = record_of(LORA, [fqn], in_slices(whole, weights, num_slices, 1))
        assert json.loads(record.base_tensors or "") == {fqn: text}
    assert record_of(LORA, [fqn], in_slices(whole, weights, 1, 2)).base_tensors is None


def test_record_that_lacks_an_option_is_refused(packed: Packed) -> None:
    record = json.loads(RECORD.encode())
    for lora in ({**record["lora"], "rank": 3}, {}, {**record["lora"], "another": 1}):
        origin = checkpoint_of(packed, json.dumps({**record, "lora": lora}).encode())
        with pytest.raises(UserError) as refused:
            check_adapters(origin, parse_training(["--data", "synthetic", "--lora-rank", "2"]), None)
        assert refused.value.code == "resume.other-adapters"


@pytest.mark.parametrize("base_digest", ["blake3:01", None, "blake3:02"])
def test_peft_folder_of_another_base_is_refused(base_digest: str | None, tmp_path: Path) -> None:
    tensors, adapters = peft_of_one_module()
    write_adapter(tmp_path, tensors, metadata={"base_digest": "blake3:01"})
    record = replace(RECORD, base_digest=base_digest)
    if base_digest != "blake3:02":
        read_peft(tmp_path, adapters, (), record)
        read_peft(tmp_path, adapters, (), None)
        return
    with pytest.raises(UserError) as refused:
        read_peft(tmp_path, adapters, (), record)
    assert refused.value.code == "source.other-adapter"


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 5), (errno.EACCES, 3)])
def test_peft_folder_on_a_disk_that_fails_is_one_that_a_restart_may_read(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, adapters = peft_of_one_module()
    write_adapter(tmp_path, tensors)

    def refused(path: Path, mode: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    def refused_without_errno(path: Path, framework: str) -> None:
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr(peft_folder, "open", refused, raising=False)
    monkeypatch.setattr(peft_folder, "safe_open", refused_without_errno)  # as safetensors says of any such error
    with pytest.raises(UserError) as error:
        read_peft(tmp_path, adapters, (), None)
    assert (error.value.code, code_of(error.value)) == ("source.bad-adapter", code)


def test_peft_folder_is_not_read_on_weights_that_its_base_was_trained_from(tmp_path: Path) -> None:
    tensors, adapters = peft_of_one_module()
    write_adapter(tmp_path, tensors, metadata={"base_parents": "blake3:aa blake3:bb"})
    for record in (replace(RECORD, digest="blake3:cc"), replace(RECORD, base_digest=None), None):
        read_peft(tmp_path, adapters, (), record)
    with pytest.raises(UserError) as refused:
        read_peft(tmp_path, adapters, (), RECORD)
    assert refused.value.code == "source.other-adapter"


def test_peft_folder_with_other_modules_than_its_config_says_which(tmp_path: Path) -> None:
    tensors, adapters = peft_of_one_module()
    for odd in ("q_proj.lora_B.weight", "v_proj.lora_A.weight"):
        write_adapter(tmp_path, {**tensors, f"{PREFIX}{odd}": float32((2, 2), 1)} if odd[0] == "v" else
                      {name: tensor for name, tensor in tensors.items() if not name.endswith(odd)})  # fmt: skip
        with pytest.raises(UserError) as refused:
            read_peft(tmp_path, adapters, (), None)
        assert refused.value.code == "source.other-adapter"
        assert odd in refused.value.problem
        assert "None" not in refused.value.problem


def peft_of_one_module() -> tuple[dict[str, Tensor], Adapters]:
    names = ("q_proj.lora_A.weight", "q_proj.lora_B.weight")
    regions = {name: Region(fqn=name, shape=(2, 2), corner=(0, 0), sizes=(2, 2), dims=(0, 1)) for name in names}
    adapters = Adapters(lora=LORA, linear=("q_proj",), experts={}, target=("q_proj",), is_transposed=False,
                        base=("q_proj.weight",), tensors=regions)  # fmt: skip
    return {f"{PREFIX}{name}": float32((2, 2), 1) for name in names}, adapters
