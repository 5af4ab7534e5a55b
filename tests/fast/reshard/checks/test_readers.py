"""What other programs read of a packed folder, without an export."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.builders import EMBEDDING, HEAD, Tensor, flip, llama_config, pack, random_tensors, reshard, run, write_model
from tests.fast.reshard.formats.dcp.test_dcp_source import huggingface_state, save_in_halves
from tests.fast.trained import read_moments, write_moments, write_trained

NO_RANKS = "ignore:torch.distributed is (disabled|unavailable)"
LAYOUTS = ("pp=1", "pp=3", "pp=2,vpp=2")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, tie_word_embeddings=request.param, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("readers") / "source"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(params=LAYOUTS)
def packed(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    out = tmp_path / "packed"
    args = ("--layout", request.param, "--max-shard-size", "3KB", "--out", out)
    assert reshard("pack", source, *args).code == 0
    return out


def logits_of(folder: Path) -> tuple[torch.Tensor, dict[str, Any], bool]:
    """Return a model's logits, what transformers found wrong as it loaded it, and whether its head is tied."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model(torch.arange(12)[None]).logits
    return logits, info, model.lm_head.weight is model.model.embed_tokens.weight


def test_transformers_loads_the_same_model(source: Path, packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "transformers"):
        found, info, is_tied = logits_of(packed)
    expected, of_source, was_tied = logits_of(source)
    assert torch.equal(found, expected)
    assert (info, is_tied) == (of_source, was_tied)
    assert not any(info.values())
    assert caplog.messages == []


def test_safetensors_opens_every_shard(source: Path, packed: Path) -> None:
    found = {}
    for path in packed.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for fqn in file.keys():  # noqa: SIM118
                assert fqn not in found
                found[fqn] = file.get_tensor(fqn)
    with safe_open(source / "model.safetensors", "pt") as file:
        expected = {fqn: file.get_tensor(fqn) for fqn in file.keys()}  # noqa: SIM118
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())


@pytest.mark.filterwarnings(NO_RANKS)
def test_torchs_reader_of_hugging_face_folders_reads_every_tensor(source: Path, packed: Path) -> None:
    with safe_open(source / "model.safetensors", "pt") as file:
        expected = {fqn: file.get_tensor(fqn) for fqn in file.keys()}  # noqa: SIM118
    reader = HuggingFaceStorageReader(str(packed))
    assert reader.read_metadata().state_dict_metadata.keys() == expected.keys()
    found = {fqn: torch.full_like(tensor, torch.nan) for fqn, tensor in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(packed)))
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())


def test_optimizer_state_and_replicas_are_where_readers_of_the_root_do_not_look(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2", tie_word_embeddings=True)
    names = HuggingFaceStorageReader(str(trained)).read_metadata().state_dict_metadata.keys()
    assert HEAD not in names
    config = LlamaConfig.from_pretrained(trained)
    assert names == LlamaForCausalLM(config).state_dict().keys() - {HEAD}


UP = "model.layers.3.mlp.up_proj.weight"


def test_same_tensors_on_other_stages_are_equal(tmp_path: Path, wording: Callable[[str], None]) -> None:
    trained = write_trained(tmp_path, "pp=2", tie_word_embeddings=True)
    other = pack(trained, tmp_path / "v", "pp=2,style=v")
    ended = run("diff", trained, other)
    wording(ended.out)
    found = reshard("diff", trained, other, "--json").json
    assert (found["equal"], found["num_equal"], found["num_moved"]) == (True, 114, 57)
    assert reshard("diff", trained, trained, "--json").json["num_moved"] == 0


def test_each_difference_is_named_with_its_kind(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    other = pack(trained, tmp_path / "other")
    moments = read_moments(other, 1, "exp_avg")
    moments[UP] = replace(moments[UP], data=bytes(len(moments[UP].data)))
    moments[HEAD] = replace(moments[HEAD], dtype="I32")
    write_moments(other, 1, "exp_avg", moments)
    ended = reshard("diff", trained, other, "--json")
    assert ended.code == 4
    assert [(one["holds"], one["fqn"], one["problem"]) for one in ended.json["differences"]] == [
        ("exp_avg", UP, "bytes differ"),
        ("exp_avg", HEAD, "F32 [40, 16] in A, I32 [40, 16] in B"),
    ]
    assert (ended.json["equal"], ended.json["num_equal"], ended.json["num_moved"]) == (False, 115, 0)


def test_folder_without_digests_is_read_and_has_no_optimizer_state(
    tmp_path: Path, wording: Callable[[str], None]
) -> None:
    trained = write_trained(tmp_path, "pp=2")
    ended = reshard("diff", tmp_path / "source", trained)
    assert ended.code == 4
    assert "39 tensors are equal, 78 differ\n" in ended.out
    wording(ended.out)
    differences = reshard("diff", tmp_path / "source", trained, "--json").json["differences"]
    assert [(one["fqn"], one["num_tensors"]) for one in differences] == [("*", 39), ("*", 39)]


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16"])
def test_norm_of_a_difference_is_numpys(dtype: str, tmp_path: Path) -> None:
    config = llama_config(hidden_size=256, intermediate_size=640, num_hidden_layers=1)  # more than a block
    noise = np.random.default_rng(0)
    kind = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    values: list[dict[str, torch.Tensor]] = [
        {
            fqn: torch.from_numpy(noise.normal(size=prod(tensor.shape))).to(kind)
            for fqn, tensor in random_tensors(config).items()
        }
        for _ in range(2)
    ]
    for name, of in zip("ab", values, strict=True):
        tensors = {
            fqn: Tensor(dtype=dtype, shape=tensor.shape, data=of[fqn].view(torch.uint8).numpy().tobytes())
            for fqn, tensor in random_tensors(config).items()
        }
        write_model(tmp_path / name, config, tensors)
    found = reshard("diff", tmp_path / "a", tmp_path / "b", "--norms", "--json").json["differences"]
    assert len(found) == len(values[0])
    for one in found:
        left, right = (of[one["fqn"]].double().numpy() for of in values)
        assert one["norm"] == pytest.approx(np.linalg.norm(right - left), rel=1e-9)
        assert one["norm_a"] == pytest.approx(np.linalg.norm(left), rel=1e-9)


SIGNALING = b"\x01\x00\x80\x7f"  # a NaN of float32, of whose cast numpy warns


@pytest.mark.parametrize("value", [np.array(math.inf, "<f4").tobytes(), SIGNALING], ids=["infinite", "signaling NaN"])
def test_values_that_are_not_finite_are_said_and_the_report_stays_json(value: bytes, tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    other = pack(trained, tmp_path / "other")
    moments = read_moments(other, 1, "exp_avg")
    moments[UP] = replace(moments[UP], data=24 * 16 * value)
    write_moments(other, 1, "exp_avg", moments)
    ended = reshard("diff", trained, other, "--norms", "--json")
    (one,) = json.loads(ended.out, parse_constant=pytest.fail)["differences"]
    assert (one["problem"], one["norm"]) == ("bytes differ, and not all values are finite", None)


def test_verify_against_the_parent_compares_optimizer_state_too(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    other = pack(trained, tmp_path / "other", "pp=4")
    assert reshard("verify", other, "--against", trained).code == 0
    moments = read_moments(other, 3, "exp_avg_sq")
    write_moments(other, 3, "exp_avg_sq", {**moments, HEAD: replace(moments[HEAD], data=bytes(4 * 40 * 16))})
    ended = reshard("verify", other, "--against", trained)
    assert ended.code == 4
    assert f"{other}/stage-003/exp_avg_sq/model.safetensors: '{HEAD}': expected blake3:" in ended.out
    assert reshard("verify", other, "--against", tmp_path / "source").code == 0


def test_norms_are_given_unless_they_are_not_wanted(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    other = pack(trained, tmp_path / "other")
    for out, value in ((trained, 3.0), (other, 4.0)):
        moments = read_moments(out, 1, "exp_avg")
        moments[UP] = replace(moments[UP], data=np.full(24 * 16, value, "<f4").tobytes())
        write_moments(out, 1, "exp_avg", moments)
    line = f"  exp_avg {UP}: bytes differ"
    assert reshard("diff", trained, other).out.splitlines()[-1] == f"{line}; B - A has norm 19.6, 0.33 of A's 58.8"
    assert reshard("diff", trained, other, "--no-norms").out.splitlines()[-1] == line
    (found,) = reshard("diff", trained, other, "--json").json["differences"]
    assert (found["norm"] ** 2, found["norm_a"] ** 2) == (pytest.approx(24 * 16), pytest.approx(9 * 24 * 16))
    assert found["relative"] == pytest.approx(1 / 3)


def test_same_values_in_another_dtype_differ_by_nothing(tmp_path: Path) -> None:
    config = llama_config()
    tensors = {fqn: replace(tensor, data=bytes(len(tensor.data))) for fqn, tensor in random_tensors(config).items()}
    write_model(tmp_path / "a", config, tensors)
    wide = {fqn: replace(tensor, dtype="F32", data=2 * tensor.data) for fqn, tensor in tensors.items()}
    write_model(tmp_path / "b", config, wide)
    found = reshard("diff", tmp_path / "a", tmp_path / "b", "--json").json["differences"]
    assert {(one["norm"], one["relative"]) for one in found} == {(0.0, None)}
    assert {tuple(one["dtypes"]) for one in found} == {("BF16", "F32")}
    ended = reshard("diff", tmp_path / "a", tmp_path / "b")
    assert ended.out.splitlines()[-2:] == [
        f"0 tensors are equal, {len(found)} differ",
        f"  weights of {len(found)} tensors: BF16 in A, F32 in B, same values; --tensors lists them",
    ]
    listed = reshard("diff", tmp_path / "a", tmp_path / "b", "--tensors").out.splitlines()
    assert [line.split()[1].rstrip(":") for line in listed[-len(found) :]] == [one["fqn"] for one in found]


@pytest.mark.parametrize(
    ("data", "problem"), [(b"\x80\x7f", ", and not all values are finite"), (b"\x80\x3f", "; B - A")]
)
def test_cast_tensor_of_other_values_is_listed(data: bytes, problem: str, tmp_path: Path) -> None:
    """A line for all casts would hide an overflow, or that A is zero and B is not."""
    config = llama_config()
    zeros = {fqn: replace(tensor, data=bytes(len(tensor.data))) for fqn, tensor in random_tensors(config).items()}
    write_model(tmp_path / "a", config, zeros)
    wide = {fqn: replace(tensor, dtype="F32", data=2 * tensor.data) for fqn, tensor in zeros.items()}
    wide[UP] = replace(wide[UP], data=len(zeros[UP].data) // 2 * (b"\0\0" + data))
    write_model(tmp_path / "b", config, wide)
    _, line, casts = reshard("diff", tmp_path / "a", tmp_path / "b").out.splitlines()[-3:]
    assert line.startswith(f"  weights {UP}: BF16 [24, 16] in A, F32 [24, 16] in B{problem}")
    assert casts.startswith(f"  weights of {len(zeros) - 1} tensors: ")


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_head_is_the_embedding_and_a_stored_one_may_equal_it(tmp_path: Path, is_equal: bool) -> None:
    tied = write_model(tmp_path / "tied", llama_config(tie_word_embeddings=True))
    head = tied[EMBEDDING] if is_equal else replace(tied[EMBEDDING], data=bytes(len(tied[EMBEDDING].data)))
    write_model(tmp_path / "untied", llama_config(), {**tied, HEAD: head})
    pack(tmp_path / "tied", tmp_path / "packed")
    for a, b in (("tied", "untied"), ("untied", "tied"), ("packed", "untied")):
        ended = reshard("diff", tmp_path / a, tmp_path / b, "--json")
        assert ended.code == (0 if is_equal else 4)
        differences = [(one["fqn"], one["problem"]) for one in ended.json["differences"]]
        assert differences == ([] if is_equal else [(HEAD, "bytes differ")])


def test_with_bytes_damage_behind_a_right_digest_is_found(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    other = pack(trained, tmp_path / "other", "pp=1")
    assert reshard("diff", trained, other, "--bytes").code == 0
    shard = other / "stage-000" / "exp_avg" / "model.safetensors"
    flip(shard, -1, 64)
    assert reshard("diff", trained, other).code == 0  # by digests alone
    ended = reshard("diff", trained, other, "--bytes", "--json")
    assert ended.code == 3
    assert ended.json["error"]["where"].startswith(f"{shard}: ")
    assert ended.json["error"]["code"] == "shard.digest-mismatch"


def test_slices_without_digests_are_read(tmp_path: Path) -> None:
    state = huggingface_state("llama", tmp_path / "model")
    one, same = (save_in_halves(tmp_path / name, "llama", state) for name in ("one", "same"))
    differs = [fqn for fqn in state if "proj" in fqn]
    other = save_in_halves(tmp_path / "other", "llama", state | {fqn: state[fqn] + 1 for fqn in differs})
    for flags in ((), ("--bytes",)):
        equal = reshard("diff", one, same, *flags, "--json")
        assert (equal.code, equal.json["num_equal"]) == (0, len(state))
        ended = reshard("diff", one, other, *flags, "--json")
        assert (ended.code, ended.json["num_equal"]) == (4, len(state) - len(differs))
        assert sorted(found["fqn"] for found in ended.json["differences"]) == sorted(differs)
